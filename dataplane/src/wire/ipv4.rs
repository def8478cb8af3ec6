//! IPv4 headers (RFC 791).

use super::checksum;

/// Length of a header without options.
pub const HEADER: usize = 20;
/// Where the length of header and payload is.
pub const TOTAL: usize = 2;
/// Where the protocol of the payload is.
pub const PROTOCOL: usize = 9;
/// Where the identification is.
pub const IDENTIFICATION: usize = 4;
/// Where the flags of fragmentation are; the offset follows them.
pub const FRAGMENT: usize = 6;
/// Where the time to live is.
pub const TTL: usize = 8;
/// Where the header checksum is.
pub const CHECKSUM: usize = 10;
/// Where the source address is; the destination follows it.
pub const ADDRESSES: usize = 12;

/// The flag "don't fragment".
pub const DONT_FRAGMENT: u16 = 0x4000;
/// The flag "more fragments".
pub const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_LOOSE_SOURCE_ROUTE: u8 = 131;
const OPTION_STRICT_SOURCE_ROUTE: u8 = 137;

/// Why a header can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Lengths or version contradict each other or the frame.
    Malformed,
    /// The header checksum is wrong.
    Checksum,
    /// It asks for source routing, which no border lets pass (RFC 7126 section 4).
    SourceRoute,
}

/// A header whose lengths and checksum are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Time to live.
    pub ttl: u8,
    /// Bytes of the header with options.
    pub length: u16,
    /// Bytes of header and payload.
    pub total: u16,
    /// Whether this is a fragment: an offset, or more to come.
    pub fragment: bool,
    /// What the fragments of one datagram have in common, with addresses and protocol.
    pub identification: u16,
    /// Where the payload stands in the datagram's, in units of 8 bytes; 13 bits.
    pub fragment_offset: u16,
    /// Whether bytes of the datagram follow behind these.
    pub more_fragments: bool,
    /// Whether nobody on the way may cut it.
    pub dont_fragment: bool,
}

impl Header {
    /// Reads the header at the start of `packet`, which may be followed by link padding.
    ///
    /// # Errors
    /// Says what is wrong with it.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, Wrong> {
        let fixed: &[u8; HEADER] = packet.first_chunk().ok_or(Wrong::Malformed)?;
        let length = usize::from(fixed[0] & 0x0f) * 4;
        let total = u16::from_be_bytes([fixed[2], fixed[3]]);
        if fixed[0] >> 4 != 4 || length < HEADER || usize::from(total) < length || packet.len() < usize::from(total) {
            return Err(Wrong::Malformed);
        }
        if length == HEADER {
            if !checksum::verifies_header(fixed) {
                return Err(Wrong::Checksum);
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
fn check_options(header: &[u8]) -> Result<(), Wrong> {
    if !checksum::verifies(0, header) {
        return Err(Wrong::Checksum);
    }
    let mut options = &header[HEADER..];
    while let [kind, rest @ ..] = options {
        options = match *kind {
            OPTION_END => break,
            OPTION_NOP => rest,
            OPTION_LOOSE_SOURCE_ROUTE | OPTION_STRICT_SOURCE_ROUTE => return Err(Wrong::SourceRoute),
            _ => {
                let length = rest.first().copied().map_or(0, usize::from);
                options.get(length..).filter(|_| length >= 2).ok_or(Wrong::Malformed)?
            }
        };
    }
    Ok(())
}

/// The header of a packet that the gateway itself makes: no options, a fresh TTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnHeader {
    /// Type of service: DSCP and ECN.
    pub service: u8,
    /// Bytes of header and payload.
    pub total: u16,
    /// The identification; without meaning where the packet may not be fragmented (RFC 6864 section 4.1).
    pub identification: u16,
    /// Whether nobody may fragment it.
    pub dont_fragment: bool,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
}

impl OwnHeader {
    /// The header's bytes, with its checksum.
    pub fn bytes(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[0] = 0x45;
        header[1] = self.service;
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

/// The destination of a packet whose header has been read before.
pub fn destination(packet: &[u8]) -> u32 {
    packet.get(ADDRESSES + 4..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// Notes congestion in a packet whose ends know of it (RFC 3168): it says so itself.
pub fn note_congestion(packet: &mut [u8]) {
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
    fn a_good_header_is_read() {
        let parsed = Header::parse(&header(|_| ())).unwrap();
        assert_eq!((parsed.source, parsed.destination), (0x0a00_0001, 0xc000_0201));
        assert_eq!((parsed.length, parsed.total, parsed.ttl, parsed.protocol), (20, 24, 64, 17));
        assert!(!parsed.fragment);
        assert!(Header::parse(&header(|h| h[6] = 0x20)).unwrap().fragment);
        assert!(!Header::parse(&header(|h| h[6] = 0x40)).unwrap().fragment, "DF alone is no fragment");
    }

    #[test]
    fn fragment_fields_are_read_bit_by_bit() {
        let fields = |high, low| {
            let bytes = header(|h| h[4..8].copy_from_slice(&[0xab, 0xcd, high, low]));
            let parsed = Header::parse(&bytes).unwrap();
            assert_eq!(parsed.identification, 0xabcd);
            (parsed.fragment, parsed.fragment_offset, parsed.more_fragments, parsed.dont_fragment)
        };
        assert_eq!(fields(0x00, 0x00), (false, 0, false, false));
        assert_eq!(fields(0x80, 0x00), (false, 0, false, false), "the reserved bit says nothing");
        assert_eq!(fields(0x40, 0x00), (false, 0, false, true));
        assert_eq!(fields(0x20, 0x00), (true, 0, true, false));
        assert_eq!(fields(0x20, 0xb9), (true, 0xb9, true, false));
        assert_eq!(fields(0x1f, 0xff), (true, 0x1fff, false, false));
        assert_eq!(fields(0x60, 0x01), (true, 1, true, true), "a fragment that may not be cut further");
    }

    #[test]
    fn each_contradiction_is_named() {
        assert_eq!(Header::parse(&header(|h| h[0] = 0x44)), Err(Wrong::Malformed));
        assert_eq!(Header::parse(&header(|h| h[0] = 0x65)), Err(Wrong::Malformed));
        assert_eq!(Header::parse(&header(|h| h[3] = 19)), Err(Wrong::Malformed));
        assert_eq!(Header::parse(&header(|h| h[3] = 25)), Err(Wrong::Malformed));
        assert_eq!(Header::parse(&header(|_| ())[..19]), Err(Wrong::Malformed));
        let mut flipped = header(|_| ());
        flipped[8] ^= 1;
        assert_eq!(Header::parse(&flipped), Err(Wrong::Checksum));
    }

    #[test]
    fn options_are_walked_and_source_routes_refused() {
        let build = |options: [u8; 4]| {
            header(|h| {
                h[0] = 0x46;
                h[20..24].copy_from_slice(&options);
            })
        };
        assert!(Header::parse(&build([1, 1, 1, 0])).is_ok());
        assert!(Header::parse(&build([148, 4, 0, 0])).is_ok(), "router alert");
        assert_eq!(Header::parse(&build([131, 3, 4, 0])), Err(Wrong::SourceRoute));
        assert_eq!(Header::parse(&build([7, 1, 0, 0])), Err(Wrong::Malformed));
        assert_eq!(Header::parse(&build([7, 5, 0, 0])), Err(Wrong::Malformed));
    }
}
