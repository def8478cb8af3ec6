//! Fast parser for the common frames: Ethernet with IPv4 without options and with DF set, or IPv6 without extension
//! headers. It reads and compares several fields as one integer. `None` only means that the frame needs the full
//! parser.

use super::{checksum, ethernet, ipv4, ipv6, tcp, udp};
use crate::flow::address::{Address, V6};

/// Offset of the IP payload in a frame.
const L4_V4: usize = ethernet::HEADER + ipv4::HEADER;
const L4_V6: usize = ethernet::HEADER + ipv6::HEADER;
/// Length of the shortest accepted frame: UDP without data in IPv4.
pub const MIN_FRAME: usize = L4_V4 + udp::HEADER;

/// The first 8 bytes of a UDP or TCP header: the ports, and for UDP also length and checksum.
pub type Transport = [u8; udp::HEADER];

/// The fields of a fast-parsed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastHeaders<A> {
    /// Source address, in network byte order.
    pub source: A,
    /// Destination address, in network byte order.
    pub destination: A,
    /// Source and destination port, if the protocol has ports, in network byte order.
    pub ports: [u8; 4],
    /// Protocol of the payload.
    pub protocol: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Length of the IP packet, bytes.
    pub total: u16,
    /// Length field of UDP; meaningless for other protocols.
    pub udp_length: u16,
}

/// An address family with a fast parser.
pub trait FastParse: Address {
    /// Offset of the IP payload in a fast-parsed frame.
    const L4_OFFSET: usize;
    /// Parses a frame that begins with `first`. The header's lengths are not checked against the frame's.
    fn parse_frame(first: &[u8; MIN_FRAME], frame: &[u8]) -> Option<FastHeaders<Self>>;

    /// Splits a frame into its headers up to IP and the first bytes of the transport header.
    #[inline]
    fn split(frame: &mut [u8]) -> Option<(&mut [u8], &mut Transport)> {
        let (headers, rest) = frame.split_at_mut_checked(Self::L4_OFFSET)?;
        Some((headers, rest.first_chunk_mut()?))
    }

    /// The TCP checksum of a frame.
    #[inline]
    fn tcp_checksum(frame: &mut [u8]) -> Option<&mut [u8; 2]> {
        let (_, segment) = frame.split_at_mut_checked(Self::L4_OFFSET)?;
        segment.first_chunk_mut::<{ tcp::HEADER }>()?[tcp::CHECKSUM..].first_chunk_mut()
    }
}

impl FastParse for u32 {
    const L4_OFFSET: usize = L4_V4;

    #[inline]
    fn parse_frame(first: &[u8; MIN_FRAME], _: &[u8]) -> Option<FastHeaders<Self>> {
        // EtherType, version and header length, TOS, total length, identification.
        let first_word = u64::from_le_bytes(*first[ethernet::ETHERTYPE..].first_chunk()?);
        // Flags and fragment offset, TTL, protocol, checksum, half of the source.
        let second_word = u64::from_le_bytes(*first[ethernet::HEADER + ipv4::FRAGMENT..].first_chunk()?);
        let is_atomic = second_word as u16 == ipv4::DONT_FRAGMENT.to_be();
        let header = first[ethernet::HEADER..].first_chunk()?;
        if first_word & 0x00ff_ffff != 0x0045_0008 || !is_atomic || !checksum::verifies_header(header) {
            return None;
        }
        let addresses = u64::from_le_bytes(*first[ethernet::HEADER + ipv4::ADDRESSES..].first_chunk()?);
        Some(FastHeaders {
            source: (addresses as u32).to_le(),
            destination: ((addresses >> 32) as u32).to_le(),
            ports: *first[L4_V4..].first_chunk()?,
            protocol: (second_word >> 24) as u8,
            ttl: (second_word >> 16) as u8,
            total: ((first_word >> 32) as u16).swap_bytes(),
            udp_length: u16::from_be_bytes(*first[L4_V4 + udp::LENGTH..].first_chunk()?),
        })
    }
}

impl FastParse for V6 {
    const L4_OFFSET: usize = L4_V6;

    #[inline]
    fn parse_frame(_: &[u8; MIN_FRAME], frame: &[u8]) -> Option<FastHeaders<Self>> {
        let first: &[u8; L4_V6 + udp::HEADER] = frame.first_chunk()?;
        let u64_at = |at: usize| first[at..].first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
        // Version, traffic class and flow label, payload length, next header, hop limit.
        let first_word = u64::from_le_bytes(*first[ethernet::HEADER..].first_chunk()?);
        if first[ethernet::ETHERTYPE..ethernet::HEADER] != ethernet::IPV6.to_be_bytes() || first_word & 0xf0 != 0x60 {
            return None;
        }
        Some(FastHeaders {
            source: Self { high: u64_at(22)?, low: u64_at(30)? },
            destination: Self { high: u64_at(38)?, low: u64_at(46)? },
            ports: *first[L4_V6..].first_chunk()?,
            protocol: (first_word >> 48) as u8,
            ttl: (first_word >> 56) as u8,
            total: ((first_word >> 32) as u16).swap_bytes().checked_add(ipv6::HEADER as u16)?,
            udp_length: u16::from_be_bytes(*first[L4_V6 + udp::LENGTH..].first_chunk()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vipgate_coverage::property;

    use super::*;

    /// A UDP datagram of 4 bytes in a frame of 60.
    fn datagram() -> [u8; 60] {
        let mut frame = [0; 60];
        frame[12..24].copy_from_slice(&[8, 0, 0x45, 0x2e, 0, 32, 1, 2, 0x40, 0, 64, 17]);
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 192, 0, 2, 1]);
        frame[34..40].copy_from_slice(&[0x12, 0x34, 0, 53, 0, 12]);
        set_checksum(&mut frame);
        frame
    }

    fn set_checksum(frame: &mut [u8]) {
        frame[24..26].fill(0);
        let sum = checksum::checksum(0, &frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }

    fn read<A: FastParse>(frame: &[u8]) -> Option<FastHeaders<A>> {
        A::parse_frame(frame.first_chunk()?, frame)
    }

    #[test]
    fn a_common_datagram_is_parsed() {
        let plain = read::<u32>(&datagram()).unwrap();
        assert_eq!((plain.source.to_be(), plain.destination.to_be()), (0x0a00_0001, 0xc000_0201));
        assert_eq!(plain.ports, [0x12, 0x34, 0, 53]);
        assert_eq!((plain.protocol, plain.ttl, plain.total), (17, 64, 32));
    }

    #[test]
    fn uncommon_frames_are_left_to_the_full_parser() {
        for (at, value) in [(13, 6), (14, 0x46), (14, 0x65), (20, 0), (20, 0x60), (21, 1), (12, 0x86)] {
            let mut frame = datagram();
            frame[at] = value;
            set_checksum(&mut frame);
            assert_eq!(read::<u32>(&frame), None, "byte {at} is {value}");
        }
        let mut wrong = datagram();
        wrong[24] ^= 1;
        assert_eq!(read::<u32>(&wrong), None, "checksum");
    }

    /// Length of the generated frames of both families, bytes.
    const LENGTH: usize = L4_V6 + 26;

    /// A generated frame: mostly one that the fast parser accepts.
    #[derive(Clone, Debug)]
    struct GeneratedFrame {
        v4: bool,
        noise: [u8; LENGTH],
        protocol: u8,
        /// Bytes by which the IP length is smaller than the frame's payload.
        shortfall: i16,
        overwrites: Vec<(usize, u8)>,
        has_valid_checksum: bool,
    }

    fn generated() -> impl Strategy<Value = GeneratedFrame> {
        let protocol = prop_oneof![4 => Just(17_u8), 4 => Just(6), 1 => Just(58), 1 => any::<u8>()];
        let shortfall = prop_oneof![4 => Just(0_i16), 2 => 0_i16..20, 1 => -100_i16..100];
        let overwrites =
            prop_oneof![3 => Just(vec![]), 1 => prop::collection::vec((12_usize..LENGTH, any::<u8>()), 1..3)];
        let noise = prop::array::uniform32(any::<u8>());
        (any::<bool>(), noise, noise, protocol, shortfall, overwrites, prop::bool::weighted(0.9)).prop_map(
            |(v4, first, second, protocol, shortfall, overwrites, has_valid_checksum)| {
                let mut noise = [0; LENGTH];
                noise[..32].copy_from_slice(&first);
                noise[32..64].copy_from_slice(&second);
                noise[64..].copy_from_slice(&first[..LENGTH - 64]);
                GeneratedFrame { v4, noise, protocol, shortfall, overwrites, has_valid_checksum }
            },
        )
    }

    impl GeneratedFrame {
        fn frame(&self) -> [u8; LENGTH] {
            let mut frame = self.noise;
            let ip_length =
                |header: usize| ((LENGTH - header) as u16).wrapping_add_signed(-self.shortfall).to_be_bytes();
            if self.v4 {
                frame[12..15].copy_from_slice(&[8, 0, 0x45]);
                frame[16..18].copy_from_slice(&ip_length(ethernet::HEADER));
                frame[20..22].copy_from_slice(&[0x40, 0]);
                frame[23] = self.protocol;
            } else {
                frame[12..14].copy_from_slice(&[0x86, 0xdd]);
                frame[14] = 0x60 | frame[14] & 0x0f;
                frame[18..20].copy_from_slice(&ip_length(L4_V6));
                frame[20] = self.protocol;
            }
            for &(at, value) in &self.overwrites {
                frame[at] = value;
            }
            if self.v4 && self.has_valid_checksum {
                set_checksum(&mut frame);
            }
            frame
        }
    }

    /// The full parser accepts every frame that the fast parser accepts, with the same fields.
    #[test]
    fn the_fast_parser_agrees_with_the_full_parser() {
        let classes = [
            "IPv4",
            "IPv6",
            "IPv4 of a wrong length",
            "IPv6 of a wrong length",
            "IPv4 for the full parser",
            "IPv6 for the full parser",
        ];
        property(ProptestConfig::with_cases(1_000), &generated(), &classes, |generated, coverage| {
            let frame = generated.frame();
            let is_valid_length = |total: u16, min: u16| (min..=(LENGTH - ethernet::HEADER) as u16).contains(&total);
            let (v4, v6) = (read::<u32>(&frame), read::<V6>(&frame));
            prop_assert!(v4.is_none() || v6.is_none());
            match (v4, v6) {
                (Some(plain), _) if is_valid_length(plain.total, 20) => {
                    let header = ipv4::Header::parse(&frame[14..]).unwrap();
                    let ends = (plain.source.swap_network_order(), plain.destination.swap_network_order());
                    prop_assert_eq!((header.source, header.destination, header.total), (ends.0, ends.1, plain.total));
                    prop_assert_eq!((header.protocol, header.ttl), (plain.protocol, plain.ttl));
                    prop_assert!(!header.fragment && header.dont_fragment && header.length == 20);
                    prop_assert_eq!(&plain.ports[..], &frame[L4_V4..][..4]);
                    coverage.count("IPv4");
                }
                (_, Some(plain)) if is_valid_length(plain.total, 40) => {
                    // Behind extension headers the transport header is elsewhere.
                    if matches!(plain.protocol, 6 | 17 | 58) {
                        let header = ipv6::Header::parse(&frame[14..]).unwrap();
                        let ends = (plain.source.swap_network_order(), plain.destination.swap_network_order());
                        prop_assert_eq!(
                            (header.source, header.destination, header.total),
                            (ends.0, ends.1, plain.total)
                        );
                        prop_assert_eq!((header.protocol, header.hop_limit), (plain.protocol, plain.ttl));
                        prop_assert_eq!((header.length, header.fragment), (40, false));
                        prop_assert_eq!(&plain.ports[..], &frame[L4_V6..][..4]);
                        coverage.count("IPv6");
                    }
                }
                (Some(_), _) => coverage.count("IPv4 of a wrong length"),
                (_, Some(_)) => coverage.count("IPv6 of a wrong length"),
                (None, None) => {
                    coverage.count(if generated.v4 { "IPv4 for the full parser" } else { "IPv6 for the full parser" });
                }
            }
            Ok(())
        });
    }
}
