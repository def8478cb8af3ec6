//! IPv6 headers and the extension headers between them and the payload (RFC 8200).

use super::protocol;
use crate::flow::address::V6;

/// Length of the fixed header.
pub const HEADER: usize = 40;
/// Offset of the payload length.
pub const PAYLOAD_LENGTH: usize = 4;
/// Offset of the next header field.
pub const NEXT_HEADER: usize = 6;
/// Offset of the hop limit.
pub const HOP_LIMIT: usize = 7;
/// Offset of the source address; the destination follows it.
pub const ADDRESSES: usize = 8;

/// Maximum number of extension headers in a packet; a longer chain is an attack on the parser.
pub(crate) const MAX_EXTENSION_HEADERS: usize = 8;

pub(crate) const HOP_BY_HOP: u8 = 0;
pub(crate) const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const DESTINATION_OPTIONS: u8 = 60;

/// Why a header is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// The version is wrong, or lengths or extension headers are inconsistent or exceed the frame.
    Malformed,
    /// It has a routing header of type 0, which RFC 5095 forbids.
    SourceRoute,
}

/// A fragment header (RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// Identification: equal in all fragments of a packet, together with the addresses.
    pub identification: u32,
    /// Offset from the start of the IPv6 header; the fragmented part follows it 8 bytes later.
    pub header_offset: u16,
    /// Offset of this fragment in the fragmented part, in units of 8 bytes; 13 bits.
    pub offset_units: u16,
    /// The M flag: more fragments follow.
    pub more_fragments: bool,
}

impl FragmentHeader {
    /// Length of the header.
    pub const LENGTH: u16 = 8;
    /// Offset of the identification in the fragment header.
    pub const IDENTIFICATION: usize = 4;

    fn parse(bytes: &[u8], header_at: u16) -> Option<Self> {
        let fixed: &[u8; Self::LENGTH as usize] = bytes.first_chunk()?;
        let field = u16::from_be_bytes([fixed[2], fixed[3]]);
        Some(Self {
            identification: u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]),
            header_offset: header_at,
            offset_units: field >> 3,
            more_fragments: field & 1 != 0,
        })
    }

    /// Whether this is an atomic fragment: a whole packet, processed apart from fragments with the same identification
    /// (RFC 6946).
    fn is_atomic(self) -> bool {
        self.offset_units == 0 && !self.more_fragments
    }
}

/// A header with valid lengths, including its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Source address.
    pub source: V6,
    /// Destination address.
    pub destination: V6,
    /// Protocol of the payload after all extension headers. In a later fragment it is the next header field of the
    /// fragment header, which only counts in the first fragment.
    pub protocol: u8,
    pub hop_limit: u8,
    /// Header length with extension headers, bytes.
    pub length: u16,
    /// Total length: headers and payload, bytes.
    pub total: u16,
    /// Whether this is a fragment. An atomic fragment (RFC 6946) is not.
    pub fragment: bool,
    /// The fragment header, if this is a fragment.
    pub fragment_header: Option<FragmentHeader>,
}

impl Header {
    /// Parses the header at the start of `packet`, which may be followed by Ethernet padding.
    ///
    /// # Errors
    /// The reason for which the header is rejected.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, ParseError> {
        let fixed: &[u8; HEADER] = packet.first_chunk().ok_or(ParseError::Malformed)?;
        let payload = usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
        if fixed[0] >> 4 != 6 || packet.len() < HEADER + payload || HEADER + payload > usize::from(u16::MAX) {
            return Err(ParseError::Malformed);
        }
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&fixed[at..at + 8]);
            u64::from_be_bytes(bytes)
        };
        let mut header = Self {
            source: V6 { high: number(8), low: number(16) },
            destination: V6 { high: number(24), low: number(32) },
            protocol: fixed[6],
            hop_limit: fixed[HOP_LIMIT],
            length: HEADER as u16,
            total: (HEADER + payload) as u16,
            fragment: false,
            fragment_header: None,
        };
        if !matches!(header.protocol, protocol::TCP | protocol::UDP | protocol::ICMPV6) {
            header.walk_extensions(&packet[..HEADER + payload])?;
        }
        Ok(header)
    }

    /// Walks the extension headers. A first fragment must contain all of them (RFC 7112); later fragments have none
    /// after the fragment header.
    #[cold]
    fn walk_extensions(&mut self, packet: &[u8]) -> Result<(), ParseError> {
        let mut has_fragment_header = false;
        for _ in 0..MAX_EXTENSION_HEADERS {
            let at = usize::from(self.length);
            let bytes: usize = match self.protocol {
                // Hop-by-hop options are only allowed directly after the IPv6 header (RFC 8200 section 4.1).
                HOP_BY_HOP if at != HEADER => return Err(ParseError::Malformed),
                // At most one fragment header: fragments of fragments are ambiguous.
                FRAGMENT if has_fragment_header => return Err(ParseError::Malformed),
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                    8 + usize::from(*packet.get(at + 1).ok_or(ParseError::Malformed)?) * 8
                }
                FRAGMENT => FragmentHeader::LENGTH.into(),
                _ => return Ok(()),
            };
            let extension = packet.get(at..at + bytes).ok_or(ParseError::Malformed)?;
            if self.protocol == ROUTING && extension[2] == 0 {
                return Err(ParseError::SourceRoute);
            }
            if self.protocol == FRAGMENT {
                has_fragment_header = true;
                let header = FragmentHeader::parse(extension, self.length).ok_or(ParseError::Malformed)?;
                self.fragment_header = (!header.is_atomic()).then_some(header);
                self.fragment = self.fragment_header.is_some();
            }
            self.protocol = extension[0];
            self.length = (at + bytes) as u16;
            if self.fragment_header.is_some_and(|header| header.offset_units != 0) {
                return Ok(());
            }
        }
        Err(ParseError::Malformed)
    }
}

/// The header of a packet that the gateway originates: no extension headers, hop limit 64.
pub fn local_header(payload: u16, protocol: u8, source: V6, destination: V6) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[0] = 0x60;
    header[4..6].copy_from_slice(&payload.to_be_bytes());
    header[6] = protocol;
    header[HOP_LIMIT] = 64;
    header[ADDRESSES..ADDRESSES + 16].copy_from_slice(&source.to_bits().to_be_bytes());
    header[ADDRESSES + 16..].copy_from_slice(&destination.to_bits().to_be_bytes());
    header
}

/// The destination address of a packet whose header has been validated.
pub fn destination(packet: &[u8]) -> V6 {
    let bytes = packet.get(ADDRESSES + 16..).and_then(|rest| rest.first_chunk());
    V6::from_bits(bytes.map_or(0, |bytes| u128::from_be_bytes(*bytes)))
}

/// Sets CE in a packet if it is ECN-capable (RFC 3168).
pub fn set_ce(packet: &mut [u8]) {
    if let Some(second) = packet.get_mut(1).filter(|second| **second & 0x30 != 0) {
        *second |= 0x30;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(next: u8, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x60, 0, 0, 0, 0, u8::try_from(rest.len()).unwrap(), next, 64];
        bytes.extend([0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        bytes.extend([0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        bytes.extend(rest);
        bytes
    }

    #[test]
    fn the_payload_is_found_with_and_without_extension_headers() {
        let plain = Header::parse(&packet(17, &[0; 8])).unwrap();
        assert_eq!((plain.protocol, plain.length, plain.total, plain.fragment), (17, 40, 48, false));
        let mut options = vec![17, 0, 1, 4, 0, 0, 0, 0];
        options.extend([0; 8]);
        let walked = Header::parse(&packet(60, &options)).unwrap();
        assert_eq!((walked.protocol, walked.length, walked.total), (17, 48, 56));
    }

    const OPTIONS: [u8; 8] = [60, 0, 1, 4, 0, 0, 0, 0];

    /// A fragment header; `field` is offset, two reserved bits, M flag.
    fn fragment_header(next: u8, field: u16) -> Vec<u8> {
        let mut header = vec![next, 0];
        header.extend(field.to_be_bytes());
        header.extend([0xde, 0xad, 0xbe, 0xef]);
        header
    }

    #[test]
    fn an_atomic_fragment_is_parsed_as_a_whole_packet() {
        let fragment = |field: u16| {
            let rest = [fragment_header(17, field), vec![0; 8]].concat();
            Header::parse(&packet(44, &rest)).unwrap()
        };
        for atomic in [fragment(0), fragment(0b110)] {
            assert_eq!((atomic.fragment, atomic.fragment_header), (false, None), "reserved bits are ignored");
            assert_eq!((atomic.protocol, atomic.length), (17, 48), "parsed like a whole packet");
        }
        assert!(fragment(1).fragment, "more fragments");
        assert!(fragment(8).fragment, "nonzero offset");
    }

    #[test]
    fn fragment_fields_are_parsed_bit_by_bit() {
        let rest = [fragment_header(17, 0xb9 << 3 | 1), vec![0; 8]].concat();
        let parsed = Header::parse(&packet(44, &rest)).unwrap();
        let expected =
            FragmentHeader { identification: 0xdead_beef, header_offset: 40, offset_units: 0xb9, more_fragments: true };
        assert_eq!((parsed.fragment_header, parsed.protocol, parsed.length), (Some(expected), 17, 48));
        let last = [fragment_header(17, 0xfff8), vec![0; 8]].concat();
        let last = Header::parse(&packet(44, &last)).unwrap().fragment_header.unwrap();
        assert_eq!((last.offset_units, last.more_fragments), (0x1fff, false));
    }

    #[test]
    fn only_a_first_fragment_has_extension_headers_after_the_fragment_header() {
        let options = |next: u8| [&[next], &OPTIONS[1..]].concat();
        // Hop-by-hop options, then the fragment header, then destination options.
        let build = |field: u16| {
            let rest = [options(44), fragment_header(60, field), options(6), vec![0; 24]].concat();
            Header::parse(&packet(0, &rest)).unwrap()
        };
        let first = build(1);
        assert_eq!((first.protocol, first.length), (6, 64));
        assert_eq!(first.fragment_header.map(|header| header.header_offset), Some(48));
        let later = build(8);
        assert_eq!((later.protocol, later.length), (60, 56), "the bytes after it are data");
        let atomic = build(0);
        assert_eq!((atomic.protocol, atomic.length, atomic.fragment), (6, 64, false));
    }

    #[test]
    fn a_truncated_extension_header_chain_is_rejected() {
        let whole = [vec![44], OPTIONS[1..].to_vec(), fragment_header(60, 1), OPTIONS.to_vec()].concat();
        for length in [0, 1, 7, 8, 12, 15, 16, 17, 23, 24] {
            let truncated = Header::parse(&packet(0, &whole[..length]));
            assert_eq!(truncated, Err(ParseError::Malformed), "{length} bytes of extension headers");
        }
        let later = [vec![44], OPTIONS[1..].to_vec(), fragment_header(60, 8)].concat();
        assert!(
            Header::parse(&packet(0, &later)).is_ok(),
            "a later fragment has no extension headers after the fragment header"
        );
    }

    #[test]
    fn a_fragment_of_a_fragment_is_rejected() {
        for (outer, inner) in [(0, 8), (0, 1), (1, 8), (0, 0)] {
            let rest = [fragment_header(44, outer), fragment_header(17, inner), vec![0; 8]].concat();
            assert_eq!(Header::parse(&packet(44, &rest)), Err(ParseError::Malformed), "{outer} around {inner}");
        }
    }

    #[test]
    fn each_inconsistency_has_its_error() {
        assert_eq!(Header::parse(&packet(17, &[0; 8])[..47]), Err(ParseError::Malformed));
        assert_eq!(Header::parse(&packet(60, &[17, 1, 0, 0, 0, 0, 0, 0])), Err(ParseError::Malformed));
        assert_eq!(Header::parse(&packet(43, &[17, 0, 0, 1, 0, 0, 0, 0])), Err(ParseError::SourceRoute));
        assert_eq!(Header::parse(&packet(60, &[0, 0, 0, 0, 0, 0, 0, 0])), Err(ParseError::Malformed));
        let endless: Vec<u8> = [60, 0, 1, 4, 0, 0, 0, 0].repeat(20);
        assert_eq!(Header::parse(&packet(60, &endless)), Err(ParseError::Malformed));
    }
}
