//! TCP headers (RFC 9293).

/// Length of a header without options.
pub const HEADER: usize = 20;
/// Offset of the checksum.
pub const CHECKSUM: usize = 16;

/// TCP flags; those that matter for the connection state have constants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// No more data from the sender.
    pub const FIN: Self = Self(0x01);
    /// Synchronize sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// Reset.
    pub const RST: Self = Self(0x04);
    /// The acknowledgment number is valid.
    pub const ACK: Self = Self(0x10);

    /// Whether all flags of `other` are set.
    #[inline]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether SYN, FIN or RST is set.
    #[inline]
    pub fn has_syn_fin_rst(self) -> bool {
        self.0 & (Self::SYN.0 | Self::FIN.0 | Self::RST.0) != 0
    }

    /// Whether the segment may open a connection: SYN without ACK, RST or FIN.
    #[inline]
    pub fn is_initial_syn(self) -> bool {
        self.0 & (Self::SYN.0 | Self::ACK.0 | Self::RST.0 | Self::FIN.0) == Self::SYN.0
    }
}

/// The fields of a segment that connection tracking needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Sequence number of the first byte.
    pub sequence: u32,
    /// Acknowledgment number.
    pub acknowledgment: u32,
    pub flags: Flags,
    /// Length in sequence space (SEG.LEN of RFC 9293): data, SYN and FIN.
    pub sequence_length: u32,
}

impl Segment {
    /// Parses a segment into `to`; `None` if its lengths are inconsistent.
    #[inline]
    pub fn parse(payload: &[u8], to: &mut Self) -> Option<()> {
        let header: &[u8; HEADER] = payload.first_chunk()?;
        let data = usize::from(header[12] >> 4) * 4;
        if data < HEADER || payload.len() < data {
            return None;
        }
        let flags = Flags(header[13]);
        let bytes = (payload.len() - data) as u32;
        *to = Self {
            source: u16::from_be_bytes([header[0], header[1]]),
            destination: u16::from_be_bytes([header[2], header[3]]),
            sequence: u32::from_be_bytes([header[4], header[5], header[6], header[7]]),
            acknowledgment: u32::from_be_bytes([header[8], header[9], header[10], header[11]]),
            flags,
            sequence_length: bytes + u32::from(flags.has(Flags::SYN)) + u32::from(flags.has(Flags::FIN)),
        };
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_with_inconsistent_lengths_are_rejected() {
        let mut segment = [0_u8; 28];
        segment[12] = 0x60;
        segment[13] = 0x12;
        let mut parsed = Segment::default();
        assert_eq!(Segment::parse(&segment, &mut parsed), Some(()));
        assert_eq!(parsed.sequence_length, 4 + 1, "four bytes of data and the SYN");
        assert_eq!(Segment::parse(&segment[..23], &mut parsed), None);
        segment[12] = 0x40;
        assert_eq!(Segment::parse(&segment, &mut parsed), None);
    }

    #[test]
    fn only_a_syn_without_ack_rst_and_fin_opens_a_connection() {
        assert!(Flags(0x02).is_initial_syn() && Flags(0xc2).is_initial_syn(), "also with the ECN flags");
        for other in [0x00, 0x03, 0x06, 0x10, 0x12, 0x04, 0x11, 0x2b] {
            assert!(!Flags(other).is_initial_syn(), "{other:#x}");
        }
    }
}
