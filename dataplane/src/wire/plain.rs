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

    /// A UDP datagram of 4 bytes in a frame of 60.
    fn datagram() -> [u8; 60] {
        let mut frame = [0; 60];
        frame[12..24].copy_from_slice(&[8, 0, 0x45, 0x2e, 0, 32, 1, 2, 0x40, 0, 64, 17]);
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 192, 0, 2, 1]);
        frame[34..40].copy_from_slice(&[0x12, 0x34, 0, 53, 0, 12]);
        seal(&mut frame);
        frame
    }

    fn seal(frame: &mut [u8; 60]) {
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

    proptest! {
        /// What the short look takes, the long one takes, too, and reads the same.
        #[test]
        fn both_looks_see_the_same(mut frame: [u8; 60], like_v4: bool, sealed: bool, hits in prop::collection::vec((12_usize..46, any::<u8>()), 0..3)) {
            if like_v4 {
                frame = datagram();
            } else {
                frame[12..21].copy_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 6, 17]);
            }
            for (at, value) in hits {
                frame[at] = value;
            }
            if sealed {
                seal(&mut frame);
            }
            let fits = |total: u16, least: u16| (least..=46).contains(&total);
            if let Some(plain) = read::<u32>(&frame).filter(|plain| fits(plain.total, 20)) {
                let header = ipv4::Header::parse(&frame[14..]).unwrap();
                prop_assert_eq!((header.source, header.destination, header.total), (plain.source.in_packet_order(), plain.destination.in_packet_order(), plain.total));
                prop_assert_eq!((header.protocol, header.ttl), (plain.protocol, plain.ttl));
                prop_assert!(!header.fragment && header.dont_fragment && header.length == 20);
            }
            if let Some(plain) = read::<V6>(&frame).filter(|plain| fits(plain.total, 40) && plain.protocol == 17) {
                let header = ipv6::Header::parse(&frame[14..]).unwrap();
                prop_assert_eq!((header.source, header.destination, header.total), (plain.source.in_packet_order(), plain.destination.in_packet_order(), plain.total));
                prop_assert_eq!((header.protocol, header.hop_limit, header.length), (plain.protocol, plain.ttl, 40));
            }
        }
    }
}
