//! IPv6 headers and the extension headers between them and the payload (RFC 8200).

use super::protocol;
use crate::address::V6;

/// Length of the fixed header.
pub const HEADER: usize = 40;
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

/// A header whose lengths are right, with its extension headers walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Source address.
    pub source: V6,
    /// Destination address.
    pub destination: V6,
    /// Protocol of the payload behind all extension headers.
    pub protocol: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Bytes of the header with extension headers.
    pub length: u16,
    /// Bytes of headers and payload.
    pub total: u16,
    /// Whether this is a fragment. A fragment header around a whole packet (RFC 6946) doesn't count.
    pub fragment: bool,
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
        if fixed[0] >> 4 != 6 || packet.len() < HEADER + payload {
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
        };
        if !matches!(header.protocol, protocol::TCP | protocol::UDP | protocol::ICMPV6) {
            header.walk_extensions(&packet[..HEADER + payload])?;
        }
        Ok(header)
    }

    #[cold]
    fn walk_extensions(&mut self, packet: &[u8]) -> Result<(), Wrong> {
        for _ in 0..LONGEST_CHAIN {
            let at = usize::from(self.length);
            let bytes: usize = match self.protocol {
                // Hop-by-hop options stand first or nowhere (RFC 8200 section 4.1).
                HOP_BY_HOP if at != HEADER => return Err(Wrong::Malformed),
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                    8 + usize::from(*packet.get(at + 1).ok_or(Wrong::Malformed)?) * 8
                }
                FRAGMENT => 8,
                _ => return Ok(()),
            };
            let extension = packet.get(at..at + bytes).ok_or(Wrong::Malformed)?;
            if self.protocol == ROUTING && extension[2] == 0 {
                return Err(Wrong::SourceRoute);
            }
            if self.protocol == FRAGMENT {
                self.fragment |= u16::from_be_bytes([extension[2], extension[3]]) & 0xfff9 != 0;
            }
            self.protocol = extension[0];
            let length = (at + bytes) as u16;
            self.length = length;
            if self.fragment {
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

/// Whether an address can never be the source of a packet that is forwarded (RFC 4291): link-local, too, never leaves its link.
#[inline]
pub fn is_martian_source(address: V6) -> bool {
    is_martian_destination(address)
}

/// Whether an address can never be the destination of a packet that is forwarded: multicast, unspecified, loopback, link-local.
#[inline]
pub fn is_martian_destination(address: V6) -> bool {
    address.high >> 56 == 0xff || address.high >> 54 == 0xfe80 >> 6 || (address.high == 0 && address.low <= 1)
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

    #[test]
    fn an_atomic_fragment_is_no_fragment() {
        let fragment = |bits: u16| {
            let mut rest = vec![17, 0];
            rest.extend(bits.to_be_bytes());
            rest.extend([0, 0, 0, 7]);
            rest.extend([0; 8]);
            Header::parse(&packet(44, &rest)).unwrap()
        };
        assert!(!fragment(0).fragment);
        assert_eq!(fragment(0).length, 48);
        assert!(fragment(1).fragment, "more to come");
        assert!(fragment(8).fragment, "an offset");
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

    #[test]
    fn martians_are_told_apart() {
        let v6 = |text: &str| V6::from_bits(text.parse::<std::net::Ipv6Addr>().unwrap().to_bits());
        for martian in ["::", "::1", "fe80::1", "febf::1", "ff02::1"] {
            assert!(is_martian_destination(v6(martian)), "{martian}");
        }
        for fine in ["2001:db8::1", "fd00::1", "fec0::1", "::2"] {
            assert!(!is_martian_destination(v6(fine)), "{fine}");
        }
    }
}
