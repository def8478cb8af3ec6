//! ICMP errors that the gateway makes itself, and the packets about which nobody makes any.

use super::family::{behind_extensions, is_later_fragment_v4};
use super::{ErrorFamily, HEADER};
use crate::address::Address;
use crate::address::V6;
use crate::wire::{checksum, icmp, ipv4, ipv6, protocol, set_u16, u16_at};

/// The longest error of IPv4: what every host takes (RFC 1812 section 4.3.2.3).
pub const LONGEST_V4: usize = 576;
/// The longest error of IPv6: what every link takes (RFC 4443 section 2.4 c).
pub const LONGEST_V6: usize = 1280;

/// Internetwork control, the precedence of what routers say about packets (RFC 1812 section 4.3.2.5).
const INTERNETWORK_CONTROL: u8 = 0xc0;

/// What the gateway has to say about a packet that it doesn't forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// The packet has made too many hops (RFC 792 type 11; RFC 4443 section 3.3).
    TtlExceeded,
    /// The packet is longer than the next link takes: fragmentation needed (RFC 1191 section 4), packet too big
    /// (RFC 4443 section 3.2).
    PacketTooBig {
        /// What the link takes, in bytes of IP packet.
        mtu: u16,
    },
    /// There is no route to the destination: network unreachable, no route to destination.
    NoRoute,
    /// There is a route, but nobody answers for the address: host unreachable, address unreachable.
    HostUnreachable,
    /// A rule forbids it (RFC 1812 section 5.2.7.1, RFC 4443 section 3.1).
    Prohibited,
    /// Nobody listens.
    PortUnreachable,
}

impl Error {
    /// Type, code and the four bytes behind the checksum.
    fn v4(self) -> (u8, u8, u32) {
        match self {
            Self::TtlExceeded => (11, 0, 0),
            Self::PacketTooBig { mtu } => (3, 4, mtu.into()),
            Self::NoRoute => (3, 0, 0),
            Self::HostUnreachable => (3, 1, 0),
            Self::Prohibited => (3, 13, 0),
            Self::PortUnreachable => (3, 3, 0),
        }
    }

    fn v6(self) -> (u8, u8, u32) {
        match self {
            Self::TtlExceeded => (3, 0, 0),
            Self::PacketTooBig { mtu } => (2, 0, mtu.into()),
            Self::NoRoute => (1, 0, 0),
            Self::HostUnreachable => (1, 3, 0),
            Self::Prohibited => (1, 1, 0),
            Self::PortUnreachable => (1, 4, 0),
        }
    }
}

/// Whether an IP packet may be answered with an ICMP error (RFC 1122 section 3.2.2, RFC 4443 section 2.4 e). Not if it
/// is one itself or may be one, a fragment other than the first, or from or to an address that isn't one node's.
///
/// Broadcast addresses of single networks look like any other: the caller knows them. IPv6 would allow a packet too big
/// for a multicast group to be answered; such packets never come as far as that here.
pub fn may_answer(original: &[u8]) -> bool {
    match original.first().map(|byte| byte >> 4) {
        Some(4) => answerable_v4(original).is_some(),
        Some(6) => answerable_v6(original).is_some(),
        _ => false,
    }
}

fn answerable_v4(original: &[u8]) -> Option<ipv4::Header> {
    let header = ipv4::Header::parse(original).ok()?;
    let about_error = header.protocol == protocol::ICMP
        && original.get(usize::from(header.length)..usize::from(header.total))?.first().is_none_or(|kind| {
            // What is neither a known query nor its answer may be an error of a type yet to come.
            u32::is_error(*kind) || !matches!(kind, 0 | 8 | 9 | 10 | 13..=18)
        });
    let answerable = !about_error
        && !is_later_fragment_v4(original)
        && !header.source.is_martian()
        && !header.destination.is_martian();
    answerable.then_some(header)
}

fn answerable_v6(original: &[u8]) -> Option<ipv6::Header> {
    let header = ipv6::Header::parse(original).ok()?;
    let packet = original.get(..usize::from(header.total))?;
    let (number, at) = behind_extensions(packet).ok()?;
    let about_error = number == protocol::ICMPV6 && packet.get(at..)?.first().is_none_or(|kind| V6::is_error(*kind));
    let answerable = !about_error && !header.source.is_martian() && !header.destination.is_martian();
    answerable.then_some(header)
}

/// Writes the IPv4 packet with which `source` tells the sender of `original` about `error`, and returns its length;
/// `None` if `original` [may not be answered](may_answer), isn't IPv4 or the answer doesn't fit (at most
/// [`LONGEST_V4`] bytes). `original` is the IP packet as it came, TTL and addresses untouched.
pub fn compose_v4(into: &mut [u8], original: &[u8], error: Error, source: u32) -> Option<usize> {
    let answered = answerable_v4(original)?;
    let quote = original.get(..usize::from(answered.total).min(LONGEST_V4 - ipv4::HEADER - HEADER))?;
    let length = ipv4::HEADER + HEADER + quote.len();
    let packet = into.get_mut(..length)?;
    let header = ipv4::OwnHeader {
        service: INTERNETWORK_CONTROL,
        total: length as u16,
        // Unique where the original's is, and the gateway needs neither a counter nor dice for it (RFC 6864 section 4).
        identification: u16_at(original, 4),
        dont_fragment: false,
        protocol: protocol::ICMP,
        source,
        destination: answered.source,
    };
    let (ip, message) = packet.split_at_mut(ipv4::HEADER);
    ip.copy_from_slice(&header.bytes());
    write_message(message, error.v4(), quote, 0);
    Some(length)
}

/// The same for IPv6, at most [`LONGEST_V6`] bytes. An MTU below 1280 is not for this family: nobody would believe it
/// (RFC 8201 section 4).
pub fn compose_v6(into: &mut [u8], original: &[u8], error: Error, source: V6) -> Option<usize> {
    let answered = answerable_v6(original)?;
    let quote = original.get(..usize::from(answered.total).min(LONGEST_V6 - ipv6::HEADER - HEADER))?;
    let payload = HEADER + quote.len();
    let packet = into.get_mut(..ipv6::HEADER + payload)?;
    let (ip, message) = packet.split_at_mut(ipv6::HEADER);
    ip.copy_from_slice(&ipv6::own_header(payload as u16, protocol::ICMPV6, source, answered.source));
    let pseudo = ipv6::pseudo_header(source, answered.source, payload as u32, protocol::ICMPV6);
    write_message(message, error.v6(), quote, pseudo);
    Some(ipv6::HEADER + payload)
}

fn write_message(message: &mut [u8], (kind, code, rest): (u8, u8, u32), quote: &[u8], pseudo: u32) {
    let (header, body) = message.split_at_mut(HEADER);
    header[..4].copy_from_slice(&[kind, code, 0, 0]);
    header[4..].copy_from_slice(&rest.to_be_bytes());
    body.copy_from_slice(quote);
    let sum = checksum::checksum(pseudo, message);
    set_u16(message, icmp::CHECKSUM, sum);
}

#[cfg(test)]
mod tests {
    use etherparse::{IpDscp, IpNumber, Ipv4Extensions, Ipv4Header, PacketBuilder};
    use proptest::prelude::*;

    use super::super::fixtures::{Inner, datagram, message, tuples, v4, v6};
    use super::super::read;
    use super::*;
    use crate::address::Address;
    use crate::session::tuple::Tuple;

    const GATEWAY: u32 = 0xc000_0201;
    const GATEWAY_V6: V6 = V6 { high: 0x2001_0db8_0000_0000, low: 1 };

    const ALL: [Error; 6] = [
        Error::TtlExceeded,
        Error::PacketTooBig { mtu: 1500 },
        Error::NoRoute,
        Error::HostUnreachable,
        Error::Prohibited,
        Error::PortUnreachable,
    ];

    fn tuple_v4(source: [u8; 4], destination: [u8; 4]) -> Tuple<u32> {
        let (source, destination) = (u32::from_be_bytes(source), u32::from_be_bytes(destination));
        Tuple { source, destination, source_port: 4242, destination_port: 53, protocol: 17 }
    }

    fn tuple_v6(source: &str, destination: &str) -> Tuple<V6> {
        let address = |text: &str| V6::from_ip(text.parse().unwrap()).unwrap();
        let (source, destination) = (address(source), address(destination));
        Tuple { source, destination, source_port: 4242, destination_port: 53, protocol: 17 }
    }

    #[test]
    fn each_v4_error_is_the_one_of_another_implementation() {
        let expected = [
            (11, 0, [0; 4]),
            (3, 4, [0, 0, 0x05, 0xdc]),
            (3, 0, [0; 4]),
            (3, 1, [0; 4]),
            (3, 13, [0; 4]),
            (3, 3, [0; 4]),
        ];
        let tuple = tuple_v4([10, 0, 0, 1], [198, 51, 100, 7]);
        for (payload, quoted) in [(0, 28), (519, 547), (520, 548), (521, 548), (1472, 548)] {
            let original = datagram(&tuple, Inner::Udp, false, &vec![7; payload]);
            for (error, (kind, code, rest)) in ALL.into_iter().zip(expected) {
                let mut header = Ipv4Header::new(0, 64, IpNumber::ICMP, GATEWAY.to_be_bytes(), [10, 0, 0, 1]).unwrap();
                header.dscp = IpDscp::try_new(48).unwrap();
                header.identification = 0xbeef;
                header.dont_fragment = false;
                let mut packet = Vec::new();
                let ip = etherparse::IpHeaders::Ipv4(header, Ipv4Extensions::default());
                let builder = PacketBuilder::ip(ip).icmpv4_raw(kind, code, rest);
                builder.write(&mut packet, &original[..quoted]).unwrap();
                let mut into = [0xaa; LONGEST_V4];
                // Link padding is not the packet's.
                let padded = [&original[..], &[0x55; 6]].concat();
                assert_eq!(compose_v4(&mut into, &padded, error, GATEWAY), Some(packet.len()));
                assert_eq!(&into[..packet.len()], packet);
                assert_eq!(compose_v4(&mut into[..packet.len() - 1], &original, error, GATEWAY), None);
            }
        }
    }

    #[test]
    fn each_v6_error_is_the_one_of_another_implementation() {
        let expected = [
            (3, 0, [0; 4]),
            (2, 0, [0, 0, 0x05, 0xdc]),
            (1, 0, [0; 4]),
            (1, 3, [0; 4]),
            (1, 1, [0; 4]),
            (1, 4, [0; 4]),
        ];
        let tuple = tuple_v6("2001:db8:1::5", "2001:db8:2::6");
        for (payload, quoted) in [(0, 48), (1183, 1231), (1184, 1232), (1185, 1232), (1452, 1232)] {
            let original = datagram(&tuple, Inner::Udp, false, &vec![7; payload]);
            for (error, (kind, code, rest)) in ALL.into_iter().zip(expected) {
                let (source, destination) = (GATEWAY_V6.to_bits(), tuple.source.to_bits());
                let mut packet = Vec::new();
                PacketBuilder::ipv6(source.to_be_bytes(), destination.to_be_bytes(), 64)
                    .icmpv6_raw(kind, code, rest)
                    .write(&mut packet, &original[..quoted])
                    .unwrap();
                let mut into = [0xaa; LONGEST_V6];
                let padded = [&original[..], &[0x55; 6]].concat();
                assert_eq!(compose_v6(&mut into, &padded, error, GATEWAY_V6), Some(packet.len()));
                assert_eq!(&into[..packet.len()], packet);
                assert_eq!(compose_v6(&mut into[..packet.len() - 1], &original, error, GATEWAY_V6), None);
            }
        }
    }

    #[test]
    fn nobody_answers_an_error() {
        let (client, server) = (0x0a00_0001_u32, 0xc633_6407);
        for kind in 0..=255 {
            let may = may_answer(&message([kind, 0, 0, 0, 0, 0], client, server, &[0; 28]));
            assert_eq!(may, matches!(kind, 0 | 8 | 9 | 10 | 13..=18), "{kind}");
            let tuple = tuple_v6("2001:db8::1", "2001:db8::2");
            let may = may_answer(&message([kind, 0, 0, 0, 0, 0], tuple.source, tuple.destination, &[0; 28]));
            assert_eq!(may, kind >= 128 && kind != 137, "{kind}");
        }
        let empty = ipv4::OwnHeader {
            service: 0,
            total: 20,
            identification: 1,
            dont_fragment: true,
            protocol: protocol::ICMP,
            source: client,
            destination: server,
        };
        assert!(!may_answer(&empty.bytes()), "it may have been one");
        let tuple = tuple_v6("2001:db8::1", "2001:db8::2");
        let empty = ipv6::own_header(0, protocol::ICMPV6, tuple.source, tuple.destination);
        assert!(!may_answer(&empty), "it may have been one");
    }

    #[test]
    fn nobody_answers_a_crowd_or_nobody() {
        let fine = [10, 0, 0, 1];
        let v4 = |source, destination| may_answer(&datagram(&tuple_v4(source, destination), Inner::Udp, false, &[]));
        assert!(v4(fine, [198, 51, 100, 7]));
        for other in [[224, 0, 0, 1], [239, 1, 2, 3], [255; 4], [240, 0, 0, 1], [127, 0, 0, 1], [0; 4]] {
            assert!(!v4(fine, other), "to {other:?}");
            assert!(!v4(other, fine), "from {other:?}");
        }
        let fine = "2001:db8::1";
        let v6 = |source, destination| may_answer(&datagram(&tuple_v6(source, destination), Inner::Udp, false, &[]));
        assert!(v6(fine, "2001:db8::2"));
        for other in ["ff02::1", "ff0e::7", "::", "::1"] {
            assert!(!v6(fine, other), "to {other}");
            assert!(!v6(other, fine), "from {other}");
        }
    }

    #[test]
    fn only_the_first_fragment_is_answered() {
        let tuple = tuple_v4([10, 0, 0, 1], [198, 51, 100, 7]);
        let fragment = |field: u16| {
            let mut packet = datagram(&tuple, Inner::Udp, false, &[]);
            packet[6..8].copy_from_slice(&field.to_be_bytes());
            packet[10..12].fill(0);
            let sum = checksum::checksum(0, &packet[..20]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            may_answer(&packet)
        };
        assert!(fragment(0x4000) && fragment(0x2000));
        assert!(!fragment(0x2001) && !fragment(0x0001) && !fragment(0x1fff));
        let mut packet = datagram(&tuple_v6("2001:db8::1", "2001:db8::2"), Inner::Udp, true, &[]);
        assert!(may_answer(&packet));
        packet[40 + 32 + 3] = 9;
        assert!(!may_answer(&packet));
        assert!(!may_answer(&[]) && !may_answer(&[0x45]) && !may_answer(&[0x50; 64]));
    }

    proptest! {
        #[test]
        fn our_own_errors_are_understood_and_never_answered(
            tuple in tuples(v4()), tuple_v6 in tuples(v6()), inner in 0..6_usize, extended: bool,
            length in 0..1500_usize,
        ) {
            let (inner, payload) = (Inner::ALL[inner], vec![9; length]);
            let mut into = [0; LONGEST_V6];
            let original = datagram(&tuple, inner, extended, &payload);
            if let Some(length) = compose_v4(&mut into, &original, Error::TtlExceeded, GATEWAY) {
                prop_assert_eq!(read::<u32>(&into[..length], 20).map(|quote| quote.tuple.source), Ok(tuple.source));
                prop_assert!(!may_answer(&into[..length]));
            } else {
                prop_assert!(!may_answer(&original));
            }
            let original = datagram(&tuple_v6, inner, extended, &payload);
            if let Some(length) = compose_v6(&mut into, &original, Error::TtlExceeded, GATEWAY_V6) {
                prop_assert_eq!(read::<V6>(&into[..length], 40).map(|quote| quote.tuple.source), Ok(tuple_v6.source));
                prop_assert!(!may_answer(&into[..length]));
            } else {
                prop_assert!(!may_answer(&original));
            }
        }
    }
}
