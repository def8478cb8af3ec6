//! One wide look at a frame that is as almost all are: Ethernet, IPv4 without options and not to be fragmented, or IPv6
//! without extension headers. Fields are read many at once and compared as one number. `None` says nothing about a frame but
//! that it needs a closer look.

use super::{checksum, ethernet, ipv4, ipv6, tcp, udp};
use crate::address::{Address, V6};

/// Bytes before the payload of IP.
const L4_V4: usize = ethernet::HEADER + ipv4::HEADER;
const L4_V6: usize = ethernet::HEADER + ipv6::HEADER;
/// Bytes that the shortest such frame has: UDP without data in IPv4.
pub const SHORTEST: usize = L4_V4 + udp::HEADER;

/// The beginning of a UDP or TCP header: ports, and of UDP also length and checksum.
pub type Transport = [u8; udp::HEADER];

/// What such a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain<A> {
    /// Source address, its bytes as they stand in the packet.
    pub source: A,
    /// Destination address, in the same way.
    pub destination: A,
    /// Source and destination port, if the payload has some, in the same way.
    pub ports: [u8; 4],
    /// Protocol of the payload.
    pub protocol: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// Bytes of IP header and payload.
    pub total: u16,
    /// Bytes of the datagram with its header, if it is UDP.
    pub udp_length: u16,
}

/// An address family whose plain frames are known.
pub trait PlainFamily: Address {
    /// Where the payload of IP begins in them.
    const L4: usize;
    /// Looks at a frame that begins with `first`. Lengths that the headers speak of haven't been compared with the frame's.
    fn read(first: &[u8; SHORTEST], frame: &[u8]) -> Option<Plain<Self>>;

    /// A frame's headers up to IP, and behind them as much of the transport's header as all of them have.
    #[inline]
    fn split(frame: &mut [u8]) -> Option<(&mut [u8], &mut Transport)> {
        let (headers, rest) = frame.split_at_mut_checked(Self::L4)?;
        Some((headers, rest.first_chunk_mut()?))
    }

    /// The checksum of TCP in a frame.
    #[inline]
    fn tcp_checksum(frame: &mut [u8]) -> Option<&mut [u8; 2]> {
        let (_, segment) = frame.split_at_mut_checked(Self::L4)?;
        segment.first_chunk_mut::<{ tcp::HEADER }>()?[tcp::CHECKSUM..].first_chunk_mut()
    }
}

impl PlainFamily for u32 {
    const L4: usize = L4_V4;

    #[inline]
    fn read(first: &[u8; SHORTEST], _: &[u8]) -> Option<Plain<Self>> {
        // EtherType, version and header length, service, total length, identification.
        let opening = u64::from_le_bytes(*first[ethernet::TYPE..].first_chunk()?);
        // Fragmentation, time to live, protocol, checksum, half of the source.
        let middle = u64::from_le_bytes(*first[ethernet::HEADER + ipv4::FRAGMENT..].first_chunk()?);
        let is_atomic = middle as u16 == ipv4::DONT_FRAGMENT.to_be();
        let header = first[ethernet::HEADER..].first_chunk()?;
        if opening & 0x00ff_ffff != 0x0045_0008 || !is_atomic || !checksum::verifies_header(header) {
            return None;
        }
        let addresses = u64::from_le_bytes(*first[ethernet::HEADER + ipv4::ADDRESSES..].first_chunk()?);
        Some(Plain {
            source: (addresses as u32).to_le(),
            destination: ((addresses >> 32) as u32).to_le(),
            ports: *first[L4_V4..].first_chunk()?,
            protocol: (middle >> 24) as u8,
            ttl: (middle >> 16) as u8,
            total: ((opening >> 32) as u16).swap_bytes(),
            udp_length: u16::from_be_bytes(*first[L4_V4 + udp::LENGTH..].first_chunk()?),
        })
    }
}

impl PlainFamily for V6 {
    const L4: usize = L4_V6;

    #[inline]
    fn read(_: &[u8; SHORTEST], frame: &[u8]) -> Option<Plain<Self>> {
        let first: &[u8; L4_V6 + udp::HEADER] = frame.first_chunk()?;
        let number = |at: usize| first[at..].first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
        // Version, class and flow label, length of the payload, next header, hop limit.
        let opening = u64::from_le_bytes(*first[ethernet::HEADER..].first_chunk()?);
        if first[ethernet::TYPE..ethernet::HEADER] != ethernet::IPV6.to_be_bytes() || opening & 0xf0 != 0x60 {
            return None;
        }
        Some(Plain {
            source: Self { high: number(22)?, low: number(30)? },
            destination: Self { high: number(38)?, low: number(46)? },
            ports: *first[L4_V6..].first_chunk()?,
            protocol: (opening >> 48) as u8,
            ttl: (opening >> 56) as u8,
            total: ((opening >> 32) as u16).swap_bytes().checked_add(ipv6::HEADER as u16)?,
            udp_length: u16::from_be_bytes(*first[L4_V6 + udp::LENGTH..].first_chunk()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tally::property;

    /// A UDP datagram of 4 bytes in a frame of 60.
    fn datagram() -> [u8; 60] {
        let mut frame = [0; 60];
        frame[12..24].copy_from_slice(&[8, 0, 0x45, 0x2e, 0, 32, 1, 2, 0x40, 0, 64, 17]);
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 192, 0, 2, 1]);
        frame[34..40].copy_from_slice(&[0x12, 0x34, 0, 53, 0, 12]);
        seal(&mut frame);
        frame
    }

    fn seal(frame: &mut [u8]) {
        frame[24..26].fill(0);
        let sum = checksum::checksum(0, &frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }

    fn read<A: PlainFamily>(frame: &[u8]) -> Option<Plain<A>> {
        A::read(frame.first_chunk()?, frame)
    }

    #[test]
    fn a_plain_datagram_is_read() {
        let plain = read::<u32>(&datagram()).unwrap();
        assert_eq!((plain.source.to_be(), plain.destination.to_be()), (0x0a00_0001, 0xc000_0201));
        assert_eq!(plain.ports, [0x12, 0x34, 0, 53]);
        assert_eq!((plain.protocol, plain.ttl, plain.total), (17, 64, 32));
    }

    #[test]
    fn whatever_is_special_needs_a_closer_look() {
        for (at, value) in [(13, 6), (14, 0x46), (14, 0x65), (20, 0), (20, 0x60), (21, 1), (12, 0x86)] {
            let mut frame = datagram();
            frame[at] = value;
            seal(&mut frame);
            assert_eq!(read::<u32>(&frame), None, "byte {at} is {value}");
        }
        let mut wrong = datagram();
        wrong[24] ^= 1;
        assert_eq!(read::<u32>(&wrong), None, "checksum");
    }

    /// A frame of either family with room for 26 bytes of payload.
    const LENGTH: usize = L4_V6 + 26;

    /// What a frame is made of: mostly as plain ones are, else as it comes.
    #[derive(Clone, Debug)]
    struct Made {
        v4: bool,
        noise: [u8; LENGTH],
        protocol: u8,
        /// Bytes that IP says are there, less than there are by so many.
        less: i16,
        hits: Vec<(usize, u8)>,
        sealed: bool,
    }

    fn made() -> impl Strategy<Value = Made> {
        let protocol = prop_oneof![4 => Just(17_u8), 4 => Just(6), 1 => Just(58), 1 => any::<u8>()];
        let less = prop_oneof![4 => Just(0_i16), 2 => 0_i16..20, 1 => -100_i16..100];
        let hits = prop_oneof![3 => Just(vec![]), 1 => prop::collection::vec((12_usize..LENGTH, any::<u8>()), 1..3)];
        let noise = prop::array::uniform32(any::<u8>());
        (any::<bool>(), noise, noise, protocol, less, hits, prop::bool::weighted(0.9)).prop_map(
            |(v4, first, second, protocol, less, hits, sealed)| {
                let mut noise = [0; LENGTH];
                noise[..32].copy_from_slice(&first);
                noise[32..64].copy_from_slice(&second);
                noise[64..].copy_from_slice(&first[..LENGTH - 64]);
                Made { v4, noise, protocol, less, hits, sealed }
            },
        )
    }

    impl Made {
        fn frame(&self) -> [u8; LENGTH] {
            let mut frame = self.noise;
            let there = |header: usize| ((LENGTH - header) as u16).wrapping_add_signed(-self.less).to_be_bytes();
            if self.v4 {
                frame[12..15].copy_from_slice(&[8, 0, 0x45]);
                frame[16..18].copy_from_slice(&there(ethernet::HEADER));
                frame[20..22].copy_from_slice(&[0x40, 0]);
                frame[23] = self.protocol;
            } else {
                frame[12..14].copy_from_slice(&[0x86, 0xdd]);
                frame[14] = 0x60 | frame[14] & 0x0f;
                frame[18..20].copy_from_slice(&there(L4_V6));
                frame[20] = self.protocol;
            }
            for &(at, value) in &self.hits {
                frame[at] = value;
            }
            if self.v4 && self.sealed {
                seal(&mut frame);
            }
            frame
        }
    }

    /// What the short look takes, the long one takes, too, and reads the same.
    #[test]
    fn both_looks_see_the_same() {
        let classes =
            ["IPv4", "IPv6", "IPv4 of a wrong length", "IPv6 of a wrong length", "IPv4 is special", "IPv6 is special"];
        property(ProptestConfig::with_cases(1_000), &made(), &classes, |made, tally| {
            let frame = made.frame();
            let fits = |total: u16, least: u16| (least..=(LENGTH - ethernet::HEADER) as u16).contains(&total);
            let (v4, v6) = (read::<u32>(&frame), read::<V6>(&frame));
            prop_assert!(v4.is_none() || v6.is_none());
            match (v4, v6) {
                (Some(plain), _) if fits(plain.total, 20) => {
                    let header = ipv4::Header::parse(&frame[14..]).unwrap();
                    let ends = (plain.source.in_packet_order(), plain.destination.in_packet_order());
                    prop_assert_eq!((header.source, header.destination, header.total), (ends.0, ends.1, plain.total));
                    prop_assert_eq!((header.protocol, header.ttl), (plain.protocol, plain.ttl));
                    prop_assert!(!header.fragment && header.dont_fragment && header.length == 20);
                    prop_assert_eq!(&plain.ports[..], &frame[L4_V4..][..4]);
                    tally.count("IPv4");
                }
                (_, Some(plain)) if fits(plain.total, 40) => {
                    // What follows extension headers isn't at the place where the short look reads it.
                    if matches!(plain.protocol, 6 | 17 | 58) {
                        let header = ipv6::Header::parse(&frame[14..]).unwrap();
                        let ends = (plain.source.in_packet_order(), plain.destination.in_packet_order());
                        prop_assert_eq!(
                            (header.source, header.destination, header.total),
                            (ends.0, ends.1, plain.total)
                        );
                        prop_assert_eq!((header.protocol, header.hop_limit), (plain.protocol, plain.ttl));
                        prop_assert_eq!((header.length, header.fragment), (40, false));
                        prop_assert_eq!(&plain.ports[..], &frame[L4_V6..][..4]);
                        tally.count("IPv6");
                    }
                }
                (Some(_), _) => tally.count("IPv4 of a wrong length"),
                (_, Some(_)) => tally.count("IPv6 of a wrong length"),
                (None, None) => tally.count(if made.v4 { "IPv4 is special" } else { "IPv6 is special" }),
            }
            Ok(())
        });
    }
}
