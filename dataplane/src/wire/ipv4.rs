//! IPv4 headers (RFC 791).

use super::checksum;

/// Length of a header without options.
pub const HEADER: usize = 20;
/// Offset of the total length.
pub const TOTAL_LENGTH: usize = 2;
/// Offset of the protocol number.
pub const PROTOCOL: usize = 9;
/// Offset of the identification.
pub const IDENTIFICATION: usize = 4;
/// Offset of the flags and fragment offset field.
pub const FRAGMENT: usize = 6;
/// Offset of the TTL.
pub const TTL: usize = 8;
/// Offset of the header checksum.
pub const CHECKSUM: usize = 10;
/// Offset of the source address; the destination follows it.
pub const ADDRESSES: usize = 12;

/// The flag "don't fragment" (DF).
pub const DONT_FRAGMENT: u16 = 0x4000;
/// The flag "more fragments" (MF).
pub const MORE_FRAGMENTS: u16 = 0x2000;
pub const FRAGMENT_OFFSET: u16 = 0x1fff;

const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_LOOSE_SOURCE_ROUTE: u8 = 131;
const OPTION_STRICT_SOURCE_ROUTE: u8 = 137;

/// Why a header is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// The version is wrong, or lengths are inconsistent or exceed the frame.
    Malformed,
    /// The header checksum is wrong.
    Checksum,
    /// It has a source route option, which border routers drop (RFC 7126 section 4).
    SourceRoute,
}

/// A header with valid lengths and checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
    /// Protocol of the payload.
    pub protocol: u8,
    pub ttl: u8,
    /// Header length with options, bytes.
    pub length: u16,
    /// Total length: header and payload, bytes.
    pub total: u16,
    /// Whether this is a fragment: nonzero offset, or MF set.
    pub fragment: bool,
    /// Identification: equal in all fragments of a datagram, together with addresses and protocol.
    pub identification: u16,
    /// Offset of the payload in the datagram, in units of 8 bytes; 13 bits.
    pub fragment_offset: u16,
    /// The MF flag.
    pub more_fragments: bool,
    /// The DF flag: routers must not fragment the packet.
    pub dont_fragment: bool,
}

impl Header {
    /// Parses the header at the start of `packet`, which may be followed by Ethernet padding.
    ///
    /// # Errors
    /// The reason for which the header is rejected.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, ParseError> {
        let fixed: &[u8; HEADER] = packet.first_chunk().ok_or(ParseError::Malformed)?;
        let length = usize::from(fixed[0] & 0x0f) * 4;
        let total = u16::from_be_bytes([fixed[2], fixed[3]]);
        if fixed[0] >> 4 != 4 || length < HEADER || usize::from(total) < length || packet.len() < usize::from(total) {
            return Err(ParseError::Malformed);
        }
        if length == HEADER {
            if !checksum::verifies_header(fixed) {
                return Err(ParseError::Checksum);
            }
        } else {
            check_options(&packet[..length])?;
        }
        let fragment = u16::from_be_bytes([fixed[6], fixed[7]]);
        Ok(Self {
            source: u32::from_be_bytes([fixed[12], fixed[13], fixed[14], fixed[15]]),
            destination: u32::from_be_bytes([fixed[16], fixed[17], fixed[18], fixed[19]]),
            protocol: fixed[9],
            ttl: fixed[TTL],
            length: length as u16,
            total,
            fragment: fragment & (MORE_FRAGMENTS | FRAGMENT_OFFSET) != 0,
            identification: u16::from_be_bytes([fixed[4], fixed[5]]),
            fragment_offset: fragment & FRAGMENT_OFFSET,
            more_fragments: fragment & MORE_FRAGMENTS != 0,
            dont_fragment: fragment & DONT_FRAGMENT != 0,
        })
    }
}

#[cold]
fn check_options(header: &[u8]) -> Result<(), ParseError> {
    if !checksum::verifies(0, header) {
        return Err(ParseError::Checksum);
    }
    let mut options = &header[HEADER..];
    while let [kind, rest @ ..] = options {
        options = match *kind {
            OPTION_END => break,
            OPTION_NOP => rest,
            OPTION_LOOSE_SOURCE_ROUTE | OPTION_STRICT_SOURCE_ROUTE => return Err(ParseError::SourceRoute),
            _ => {
                let length = rest.first().copied().map_or(0, usize::from);
                options.get(length..).filter(|_| length >= 2).ok_or(ParseError::Malformed)?
            }
        };
    }
    Ok(())
}

/// The header of a packet that the gateway originates: no options, TTL 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalHeader {
    /// Type of service: DSCP and ECN.
    pub tos: u8,
    /// Total length: header and payload, bytes.
    pub total: u16,
    /// The identification; without meaning if DF is set (RFC 6864 section 4.1).
    pub identification: u16,
    /// The DF flag.
    pub dont_fragment: bool,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
}

impl LocalHeader {
    /// The serialized header, with its checksum.
    pub fn bytes(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[0] = 0x45;
        header[1] = self.tos;
        header[2..4].copy_from_slice(&self.total.to_be_bytes());
        header[4..6].copy_from_slice(&self.identification.to_be_bytes());
        header[6] = if self.dont_fragment { 0x40 } else { 0 };
        header[TTL] = 64;
        header[9] = self.protocol;
        header[ADDRESSES..ADDRESSES + 4].copy_from_slice(&self.source.to_be_bytes());
        header[ADDRESSES + 4..].copy_from_slice(&self.destination.to_be_bytes());
        let sum = checksum::checksum(0, &header);
        header[CHECKSUM..CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
        header
    }
}

/// The destination address of a packet whose header has been validated.
pub fn destination(packet: &[u8]) -> u32 {
    packet.get(ADDRESSES + 4..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// Sets CE in a packet if it is ECN-capable (RFC 3168).
pub fn set_ce(packet: &mut [u8]) {
    let Some(header) = packet.first_chunk_mut::<HEADER>() else { return };
    if header[1] & 3 != 0 {
        let old = super::u16_at(header, 0);
        header[1] |= 3;
        let delta = checksum::Delta::of(old.into(), super::u16_at(header, 0).into());
        let sum = super::u16_at(header, CHECKSUM);
        super::set_u16(header, CHECKSUM, delta.apply(sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(with: impl FnOnce(&mut [u8; 24])) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[0] = 0x45;
        bytes[3] = 24;
        bytes[8] = 64;
        bytes[9] = 17;
        bytes[12..20].copy_from_slice(&[10, 0, 0, 1, 192, 0, 2, 1]);
        with(&mut bytes);
        let length = usize::from(bytes[0] & 15) * 4;
        let sum = checksum::checksum(0, &bytes[..length.min(24)]);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    #[test]
    fn a_valid_header_is_parsed() {
        let parsed = Header::parse(&header(|_| ())).unwrap();
        assert_eq!((parsed.source, parsed.destination), (0x0a00_0001, 0xc000_0201));
        assert_eq!((parsed.length, parsed.total, parsed.ttl, parsed.protocol), (20, 24, 64, 17));
        assert!(!parsed.fragment);
        assert!(Header::parse(&header(|h| h[6] = 0x20)).unwrap().fragment);
        assert!(!Header::parse(&header(|h| h[6] = 0x40)).unwrap().fragment, "DF alone is no fragment");
    }

    #[test]
    fn fragment_fields_are_parsed_bit_by_bit() {
        let fields = |high, low| {
            let bytes = header(|h| h[4..8].copy_from_slice(&[0xab, 0xcd, high, low]));
            let parsed = Header::parse(&bytes).unwrap();
            assert_eq!(parsed.identification, 0xabcd);
            (parsed.fragment, parsed.fragment_offset, parsed.more_fragments, parsed.dont_fragment)
        };
        assert_eq!(fields(0x00, 0x00), (false, 0, false, false));
        assert_eq!(fields(0x80, 0x00), (false, 0, false, false), "the reserved bit is ignored");
        assert_eq!(fields(0x40, 0x00), (false, 0, false, true));
        assert_eq!(fields(0x20, 0x00), (true, 0, true, false));
        assert_eq!(fields(0x20, 0xb9), (true, 0xb9, true, false));
        assert_eq!(fields(0x1f, 0xff), (true, 0x1fff, false, false));
        assert_eq!(fields(0x60, 0x01), (true, 1, true, true), "a fragment with DF");
    }

    #[test]
    fn each_inconsistency_has_its_error() {
        assert_eq!(Header::parse(&header(|h| h[0] = 0x44)), Err(ParseError::Malformed));
        assert_eq!(Header::parse(&header(|h| h[0] = 0x65)), Err(ParseError::Malformed));
        assert_eq!(Header::parse(&header(|h| h[3] = 19)), Err(ParseError::Malformed));
        assert_eq!(Header::parse(&header(|h| h[3] = 25)), Err(ParseError::Malformed));
        assert_eq!(Header::parse(&header(|_| ())[..19]), Err(ParseError::Malformed));
        let mut flipped = header(|_| ());
        flipped[8] ^= 1;
        assert_eq!(Header::parse(&flipped), Err(ParseError::Checksum));
    }

    #[test]
    fn options_are_parsed_and_source_routes_rejected() {
        let build = |options: [u8; 4]| {
            header(|h| {
                h[0] = 0x46;
                h[20..24].copy_from_slice(&options);
            })
        };
        assert!(Header::parse(&build([1, 1, 1, 0])).is_ok());
        assert!(Header::parse(&build([148, 4, 0, 0])).is_ok(), "router alert");
        assert_eq!(Header::parse(&build([131, 3, 4, 0])), Err(ParseError::SourceRoute));
        assert_eq!(Header::parse(&build([7, 1, 0, 0])), Err(ParseError::Malformed));
        assert_eq!(Header::parse(&build([7, 5, 0, 0])), Err(ParseError::Malformed));
    }
}
