//! IPv6 headers and the extension headers between them and the payload (RFC 8200).

use super::protocol;
use crate::address::V6;

/// Length of the fixed header.
pub const HEADER: usize = 40;
/// Where the length of what follows the header is.
pub const PAYLOAD_LENGTH: usize = 4;
/// Where the protocol of what follows is.
pub const NEXT_HEADER: usize = 6;
/// Where the hop limit is.
pub const HOP_LIMIT: usize = 7;
/// Where the source address is; the destination follows it.
pub const ADDRESSES: usize = 8;

/// Extension headers in one packet that anyone has a use for; more is an attack on whoever walks them.
pub(crate) const LONGEST_CHAIN: usize = 8;

pub(crate) const HOP_BY_HOP: u8 = 0;
pub(crate) const ROUTING: u8 = 43;
pub(crate) const FRAGMENT: u8 = 44;
pub(crate) const DESTINATION_OPTIONS: u8 = 60;

/// Why a header can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Lengths, version or extension headers contradict each other or the frame.
    Malformed,
    /// It carries a routing header of the type that RFC 5095 forbids.
    SourceRoute,
}

/// What a fragment header says (RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// What the fragments of one packet have in common, with the addresses.
    pub identification: u32,
    /// Where it stands, from the start of the IPv6 header; what it cuts up begins 8 bytes later.
    pub header_at: u16,
    /// Where these bytes stand in what was cut up, in units of 8 bytes; 13 bits.
    pub offset_units: u16,
    /// Whether bytes follow behind these.
    pub more: bool,
}

impl FragmentHeader {
    /// Length of the header.
    pub const LENGTH: u16 = 8;
    /// Where the identification is in it.
    pub const IDENTIFICATION: usize = 4;

    fn parse(bytes: &[u8], header_at: u16) -> Option<Self> {
        let fixed: &[u8; Self::LENGTH as usize] = bytes.first_chunk()?;
        let field = u16::from_be_bytes([fixed[2], fixed[3]]);
        Some(Self {
            identification: u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]),
            header_at,
            offset_units: field >> 3,
            more: field & 1 != 0,
        })
    }

    /// Whether it stands around a whole packet, which RFC 6946 wants treated as such, whatever else has the same
    /// identification.
    fn is_atomic(self) -> bool {
        self.offset_units == 0 && !self.more
    }
}

/// A header whose lengths are right, with its extension headers walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Source address.
    pub source: V6,
    /// Destination address.
    pub destination: V6,
    /// Protocol of the payload behind all extension headers. In a fragment that isn't the first it is what the fragment
    /// header claims, and only the first one's claim counts.
    pub protocol: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Bytes of the header with extension headers.
    pub length: u16,
    /// Bytes of headers and payload.
    pub total: u16,
    /// Whether this is a fragment. A fragment header around a whole packet (RFC 6946) doesn't count.
    pub fragment: bool,
    /// The fragment header, if this is a fragment.
    pub fragment_header: Option<FragmentHeader>,
}

impl Header {
    /// Reads the header at the start of `packet`, which may be followed by link padding.
    ///
    /// # Errors
    /// Says what is wrong with it.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, Wrong> {
        let fixed: &[u8; HEADER] = packet.first_chunk().ok_or(Wrong::Malformed)?;
        let payload = usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
        if fixed[0] >> 4 != 6 || packet.len() < HEADER + payload || HEADER + payload > usize::from(u16::MAX) {
            return Err(Wrong::Malformed);
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

    /// Goes over the extension headers. A first fragment must have all of them (RFC 7112); behind the fragment header
    /// of the others there are none.
    #[cold]
    fn walk_extensions(&mut self, packet: &[u8]) -> Result<(), Wrong> {
        let mut cut_before = false;
        for _ in 0..LONGEST_CHAIN {
            let at = usize::from(self.length);
            let bytes: usize = match self.protocol {
                // Hop-by-hop options stand first or nowhere (RFC 8200 section 4.1).
                HOP_BY_HOP if at != HEADER => return Err(Wrong::Malformed),
                // One fragment header at most, or what is a fragment of what could be disputed.
                FRAGMENT if cut_before => return Err(Wrong::Malformed),
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                    8 + usize::from(*packet.get(at + 1).ok_or(Wrong::Malformed)?) * 8
                }
                FRAGMENT => FragmentHeader::LENGTH.into(),
                _ => return Ok(()),
            };
            let extension = packet.get(at..at + bytes).ok_or(Wrong::Malformed)?;
            if self.protocol == ROUTING && extension[2] == 0 {
                return Err(Wrong::SourceRoute);
            }
            if self.protocol == FRAGMENT {
                cut_before = true;
                let header = FragmentHeader::parse(extension, self.length).ok_or(Wrong::Malformed)?;
                self.fragment_header = (!header.is_atomic()).then_some(header);
                self.fragment = self.fragment_header.is_some();
            }
            self.protocol = extension[0];
            self.length = (at + bytes) as u16;
            if self.fragment_header.is_some_and(|header| header.offset_units != 0) {
                return Ok(());
            }
        }
        Err(Wrong::Malformed)
    }
}

/// The header of a packet that the gateway itself makes, without extension headers.
pub fn own_header(payload: u16, protocol: u8, source: V6, destination: V6) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[0] = 0x60;
    header[4..6].copy_from_slice(&payload.to_be_bytes());
    header[6] = protocol;
    header[HOP_LIMIT] = 64;
    header[ADDRESSES..ADDRESSES + 16].copy_from_slice(&source.to_bits().to_be_bytes());
    header[ADDRESSES + 16..].copy_from_slice(&destination.to_bits().to_be_bytes());
    header
}

/// The destination of a packet whose header has been read before.
pub fn destination(packet: &[u8]) -> V6 {
    let bytes = packet.get(ADDRESSES + 16..).and_then(|rest| rest.first_chunk());
    V6::from_bits(bytes.map_or(0, |bytes| u128::from_be_bytes(*bytes)))
}

/// The sum of the pseudo-header (RFC 8200 section 8.1), not folded.
pub fn pseudo_header(source: V6, destination: V6, length: u32, protocol: u8) -> u32 {
    use crate::address::Address;
    source.word_sum() + destination.word_sum() + (length >> 16) + (length & 0xffff) + u32::from(protocol)
}

/// Notes congestion in a packet whose ends know of it (RFC 3168): it says so itself.
pub fn note_congestion(packet: &mut [u8]) {
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
    fn a_plain_packet_and_one_with_options_lead_to_the_same_payload() {
        let plain = Header::parse(&packet(17, &[0; 8])).unwrap();
        assert_eq!((plain.protocol, plain.length, plain.total, plain.fragment), (17, 40, 48, false));
        let mut options = vec![17, 0, 1, 4, 0, 0, 0, 0];
        options.extend([0; 8]);
        let walked = Header::parse(&packet(60, &options)).unwrap();
        assert_eq!((walked.protocol, walked.length, walked.total), (17, 48, 56));
    }

    const OPTIONS: [u8; 8] = [60, 0, 1, 4, 0, 0, 0, 0];

    /// A fragment header; `field` is offset, two reserved bits, more to come.
    fn fragment_header(next: u8, field: u16) -> Vec<u8> {
        let mut header = vec![next, 0];
        header.extend(field.to_be_bytes());
        header.extend([0xde, 0xad, 0xbe, 0xef]);
        header
    }

    #[test]
    fn an_atomic_fragment_is_no_fragment() {
        let fragment = |field: u16| {
            let rest = [fragment_header(17, field), vec![0; 8]].concat();
            Header::parse(&packet(44, &rest)).unwrap()
        };
        for atomic in [fragment(0), fragment(0b110)] {
            assert_eq!((atomic.fragment, atomic.fragment_header), (false, None), "reserved bits say nothing");
            assert_eq!((atomic.protocol, atomic.length), (17, 48), "it is read like a whole packet");
        }
        assert!(fragment(1).fragment, "more to come");
        assert!(fragment(8).fragment, "an offset");
    }

    #[test]
    fn fragment_fields_are_read_bit_by_bit() {
        let rest = [fragment_header(17, 0xb9 << 3 | 1), vec![0; 8]].concat();
        let parsed = Header::parse(&packet(44, &rest)).unwrap();
        let expected = FragmentHeader { identification: 0xdead_beef, header_at: 40, offset_units: 0xb9, more: true };
        assert_eq!((parsed.fragment_header, parsed.protocol, parsed.length), (Some(expected), 17, 48));
        let last = [fragment_header(17, 0xfff8), vec![0; 8]].concat();
        let last = Header::parse(&packet(44, &last)).unwrap().fragment_header.unwrap();
        assert_eq!((last.offset_units, last.more), (0x1fff, false));
    }

    #[test]
    fn only_the_first_fragment_has_headers_behind_the_fragment_header() {
        let options = |next: u8| [&[next], &OPTIONS[1..]].concat();
        // Hop-by-hop options, then the fragment header, then destination options.
        let build = |field: u16| {
            let rest = [options(44), fragment_header(60, field), options(6), vec![0; 24]].concat();
            Header::parse(&packet(0, &rest)).unwrap()
        };
        let first = build(1);
        assert_eq!((first.protocol, first.length), (6, 64));
        assert_eq!(first.fragment_header.map(|header| header.header_at), Some(48));
        let later = build(8);
        assert_eq!((later.protocol, later.length), (60, 56), "its bytes are data, whatever they look like");
        let atomic = build(0);
        assert_eq!((atomic.protocol, atomic.length, atomic.fragment), (6, 64, false));
    }

    #[test]
    fn a_chain_that_is_cut_short_is_no_fragment_of_anything() {
        let whole = [vec![44], OPTIONS[1..].to_vec(), fragment_header(60, 1), OPTIONS.to_vec()].concat();
        for length in [0, 1, 7, 8, 12, 15, 16, 17, 23, 24] {
            let cut = Header::parse(&packet(0, &whole[..length]));
            assert_eq!(cut, Err(Wrong::Malformed), "{length} bytes of extension headers");
        }
        let later = [vec![44], OPTIONS[1..].to_vec(), fragment_header(60, 8)].concat();
        assert!(Header::parse(&packet(0, &later)).is_ok(), "what follows a later fragment's header isn't a chain");
    }

    #[test]
    fn a_fragment_of_a_fragment_is_refused() {
        for (outer, inner) in [(0, 8), (0, 1), (1, 8), (0, 0)] {
            let rest = [fragment_header(44, outer), fragment_header(17, inner), vec![0; 8]].concat();
            assert_eq!(Header::parse(&packet(44, &rest)), Err(Wrong::Malformed), "{outer} around {inner}");
        }
    }

    #[test]
    fn each_contradiction_is_named() {
        assert_eq!(Header::parse(&packet(17, &[0; 8])[..47]), Err(Wrong::Malformed));
        assert_eq!(Header::parse(&packet(60, &[17, 1, 0, 0, 0, 0, 0, 0])), Err(Wrong::Malformed));
        assert_eq!(Header::parse(&packet(43, &[17, 0, 0, 1, 0, 0, 0, 0])), Err(Wrong::SourceRoute));
        assert_eq!(Header::parse(&packet(60, &[0, 0, 0, 0, 0, 0, 0, 0])), Err(Wrong::Malformed));
        let endless: Vec<u8> = [60, 0, 1, 4, 0, 0, 0, 0].repeat(20);
        assert_eq!(Header::parse(&packet(60, &endless)), Err(Wrong::Malformed));
    }
}
