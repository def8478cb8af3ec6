//! ICMP errors that the gateway originates, and the packets for which none may be sent.

use super::family::{is_later_fragment_v4, skip_extensions};
use super::{HEADER, IcmpErrorFamily};
use crate::flow::address::{Address, V6};
use crate::wire::{checksum, icmp, ipv4, ipv6, protocol, set_u16, u16_at};

/// Maximum length of an IPv4 error, bytes: every host accepts it (RFC 1812 section 4.3.2.3).
pub const MAX_LENGTH_V4: usize = 576;
/// Maximum length of an IPv6 error, bytes: the minimum MTU (RFC 4443 section 2.4 c).
pub const MAX_LENGTH_V6: usize = 1280;

/// Precedence 6, internetwork control, of ICMP errors sent by routers (RFC 1812 section 4.3.2.5).
const INTERNETWORK_CONTROL: u8 = 0xc0;

/// The error that the gateway sends for a packet that it doesn't forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpError {
    /// TTL or hop limit exceeded (RFC 792 type 11; RFC 4443 section 3.3).
    TtlExceeded,
    /// The packet exceeds the MTU of the next hop: fragmentation needed (RFC 1191 section 4), packet too big (RFC 4443
    /// section 3.2).
    PacketTooBig {
        /// The MTU, bytes of IP packet.
        mtu: u16,
    },
    /// There is no route to the destination: network unreachable, no route to destination.
    NoRoute,
    /// There is a route, but the neighbor doesn't resolve: host unreachable, address unreachable.
    HostUnreachable,
    /// Administratively prohibited (RFC 1812 section 5.2.7.1, RFC 4443 section 3.1).
    Prohibited,
    /// Nothing listens on the port.
    PortUnreachable,
}

impl IcmpError {
    /// Type, code and the four bytes after the checksum.
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

/// Whether an ICMP error may be sent for an IP packet (RFC 1122 section 3.2.2, RFC 4443 section 2.4 e). Not if it is or
/// may be an ICMP error, if it is a later fragment, or if its source or destination is not a unicast address.
///
/// Directed broadcast addresses look like unicast ones: the caller checks them. IPv6 would allow "packet too big" for
/// multicast packets; they never reach this point.
pub fn may_send_error(original: &[u8]) -> bool {
    match original.first().map(|byte| byte >> 4) {
        Some(4) => parse_permitted_v4(original).is_some(),
        Some(6) => parse_permitted_v6(original).is_some(),
        _ => false,
    }
}

fn parse_permitted_v4(original: &[u8]) -> Option<ipv4::Header> {
    let header = ipv4::Header::parse(original).ok()?;
    let is_error = header.protocol == protocol::ICMP
        && original.get(usize::from(header.length)..usize::from(header.total))?.first().is_none_or(|kind| {
            // A type that is no known query or reply may be an error type defined later.
            u32::is_error(*kind) || !matches!(kind, 0 | 8 | 9 | 10 | 13..=18)
        });
    let is_permitted =
        !is_error && !is_later_fragment_v4(original) && !header.source.is_martian() && !header.destination.is_martian();
    is_permitted.then_some(header)
}

fn parse_permitted_v6(original: &[u8]) -> Option<ipv6::Header> {
    let header = ipv6::Header::parse(original).ok()?;
    let packet = original.get(..usize::from(header.total))?;
    let (number, at) = skip_extensions(packet).ok()?;
    let is_error = number == protocol::ICMPV6 && packet.get(at..)?.first().is_none_or(|kind| V6::is_error(*kind));
    let is_permitted = !is_error && !header.source.is_martian() && !header.destination.is_martian();
    is_permitted.then_some(header)
}

/// Writes the IPv4 packet with which `source` reports `error` to the sender of `original`, and returns its length;
/// `None` if [no error may be sent](may_send_error) for `original`, if it isn't IPv4, or if the buffer is too small (at
/// most [`MAX_LENGTH_V4`] bytes are needed). `original` is the IP packet as received, TTL and addresses unmodified.
pub fn compose_v4(into: &mut [u8], original: &[u8], error: IcmpError, source: u32) -> Option<usize> {
    let original_header = parse_permitted_v4(original)?;
    let quote = original.get(..usize::from(original_header.total).min(MAX_LENGTH_V4 - ipv4::HEADER - HEADER))?;
    let length = ipv4::HEADER + HEADER + quote.len();
    let packet = into.get_mut(..length)?;
    let header = ipv4::LocalHeader {
        tos: INTERNETWORK_CONTROL,
        total: length as u16,
        // As unique as the original's; needs neither a counter nor random numbers (RFC 6864 section 4).
        identification: u16_at(original, 4),
        dont_fragment: false,
        protocol: protocol::ICMP,
        source,
        destination: original_header.source,
    };
    let (ip, message) = packet.split_at_mut(ipv4::HEADER);
    ip.copy_from_slice(&header.bytes());
    write_message(message, error.v4(), quote, 0);
    Some(length)
}

/// Like [`compose_v4`], for IPv6, at most [`MAX_LENGTH_V6`] bytes. An MTU below 1280 must not be reported for IPv6:
/// hosts ignore it (RFC 8201 section 4).
pub fn compose_v6(into: &mut [u8], original: &[u8], error: IcmpError, source: V6) -> Option<usize> {
    let original_header = parse_permitted_v6(original)?;
    let quote = original.get(..usize::from(original_header.total).min(MAX_LENGTH_V6 - ipv6::HEADER - HEADER))?;
    let payload = HEADER + quote.len();
    let packet = into.get_mut(..ipv6::HEADER + payload)?;
    let (ip, message) = packet.split_at_mut(ipv6::HEADER);
    ip.copy_from_slice(&ipv6::local_header(payload as u16, protocol::ICMPV6, source, original_header.source));
    let pseudo = checksum::pseudo_header_sum(source, original_header.source, payload as u32, protocol::ICMPV6);
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

    use super::super::fixtures::{QuotedTransport, datagram, message, tuples, v4, v6};
    use super::super::parse;
    use super::*;
    use crate::flow::address::Address;
    use crate::flow::tuple::Tuple;

    const GATEWAY: u32 = 0xc000_0201;
    const GATEWAY_V6: V6 = V6 { high: 0x2001_0db8_0000_0000, low: 1 };

    const ALL: [IcmpError; 6] = [
        IcmpError::TtlExceeded,
        IcmpError::PacketTooBig { mtu: 1500 },
        IcmpError::NoRoute,
        IcmpError::HostUnreachable,
        IcmpError::Prohibited,
        IcmpError::PortUnreachable,
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
    fn each_v4_error_equals_that_of_an_independent_implementation() {
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
            let original = datagram(&tuple, QuotedTransport::Udp, false, &vec![7; payload]);
            for (error, (kind, code, rest)) in ALL.into_iter().zip(expected) {
                let mut header = Ipv4Header::new(0, 64, IpNumber::ICMP, GATEWAY.to_be_bytes(), [10, 0, 0, 1]).unwrap();
                header.dscp = IpDscp::try_new(48).unwrap();
                header.identification = 0xbeef;
                header.dont_fragment = false;
                let mut packet = Vec::new();
                let ip = etherparse::IpHeaders::Ipv4(header, Ipv4Extensions::default());
                let builder = PacketBuilder::ip(ip).icmpv4_raw(kind, code, rest);
                builder.write(&mut packet, &original[..quoted]).unwrap();
                let mut into = [0xaa; MAX_LENGTH_V4];
                // Ethernet padding is not part of the packet.
                let padded = [&original[..], &[0x55; 6]].concat();
                assert_eq!(compose_v4(&mut into, &padded, error, GATEWAY), Some(packet.len()));
                assert_eq!(&into[..packet.len()], packet);
                assert_eq!(compose_v4(&mut into[..packet.len() - 1], &original, error, GATEWAY), None);
            }
        }
    }

    #[test]
    fn each_v6_error_equals_that_of_an_independent_implementation() {
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
            let original = datagram(&tuple, QuotedTransport::Udp, false, &vec![7; payload]);
            for (error, (kind, code, rest)) in ALL.into_iter().zip(expected) {
                let (source, destination) = (GATEWAY_V6.to_bits(), tuple.source.to_bits());
                let mut packet = Vec::new();
                PacketBuilder::ipv6(source.to_be_bytes(), destination.to_be_bytes(), 64)
                    .icmpv6_raw(kind, code, rest)
                    .write(&mut packet, &original[..quoted])
                    .unwrap();
                let mut into = [0xaa; MAX_LENGTH_V6];
                let padded = [&original[..], &[0x55; 6]].concat();
                assert_eq!(compose_v6(&mut into, &padded, error, GATEWAY_V6), Some(packet.len()));
                assert_eq!(&into[..packet.len()], packet);
                assert_eq!(compose_v6(&mut into[..packet.len() - 1], &original, error, GATEWAY_V6), None);
            }
        }
    }

    #[test]
    fn no_error_is_sent_for_an_icmp_error() {
        let (client, server) = (0x0a00_0001_u32, 0xc633_6407);
        for kind in 0..=255 {
            let is_allowed = may_send_error(&message([kind, 0, 0, 0, 0, 0], client, server, &[0; 28]));
            assert_eq!(is_allowed, matches!(kind, 0 | 8 | 9 | 10 | 13..=18), "{kind}");
            let tuple = tuple_v6("2001:db8::1", "2001:db8::2");
            let is_allowed = may_send_error(&message([kind, 0, 0, 0, 0, 0], tuple.source, tuple.destination, &[0; 28]));
            assert_eq!(is_allowed, kind >= 128 && kind != 137, "{kind}");
        }
        let empty = ipv4::LocalHeader {
            tos: 0,
            total: 20,
            identification: 1,
            dont_fragment: true,
            protocol: protocol::ICMP,
            source: client,
            destination: server,
        };
        assert!(!may_send_error(&empty.bytes()), "it may be an error");
        let tuple = tuple_v6("2001:db8::1", "2001:db8::2");
        let empty = ipv6::local_header(0, protocol::ICMPV6, tuple.source, tuple.destination);
        assert!(!may_send_error(&empty), "it may be an error");
    }

    #[test]
    fn no_error_is_sent_from_or_to_a_non_unicast_address() {
        let unicast = [10, 0, 0, 1];
        let v4 = |source, destination| {
            may_send_error(&datagram(&tuple_v4(source, destination), QuotedTransport::Udp, false, &[]))
        };
        assert!(v4(unicast, [198, 51, 100, 7]));
        for other in [[224, 0, 0, 1], [239, 1, 2, 3], [255; 4], [240, 0, 0, 1], [127, 0, 0, 1], [0; 4]] {
            assert!(!v4(unicast, other), "to {other:?}");
            assert!(!v4(other, unicast), "from {other:?}");
        }
        let unicast = "2001:db8::1";
        let v6 = |source, destination| {
            may_send_error(&datagram(&tuple_v6(source, destination), QuotedTransport::Udp, false, &[]))
        };
        assert!(v6(unicast, "2001:db8::2"));
        for other in ["ff02::1", "ff0e::7", "::", "::1"] {
            assert!(!v6(unicast, other), "to {other}");
            assert!(!v6(other, unicast), "from {other}");
        }
    }

    #[test]
    fn errors_are_sent_for_first_fragments_only() {
        let tuple = tuple_v4([10, 0, 0, 1], [198, 51, 100, 7]);
        let fragment = |field: u16| {
            let mut packet = datagram(&tuple, QuotedTransport::Udp, false, &[]);
            packet[6..8].copy_from_slice(&field.to_be_bytes());
            packet[10..12].fill(0);
            let sum = checksum::checksum(0, &packet[..20]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
            may_send_error(&packet)
        };
        assert!(fragment(0x4000) && fragment(0x2000));
        assert!(!fragment(0x2001) && !fragment(0x0001) && !fragment(0x1fff));
        let mut packet = datagram(&tuple_v6("2001:db8::1", "2001:db8::2"), QuotedTransport::Udp, true, &[]);
        assert!(may_send_error(&packet));
        packet[40 + 32 + 3] = 9;
        assert!(!may_send_error(&packet));
        assert!(!may_send_error(&[]) && !may_send_error(&[0x45]) && !may_send_error(&[0x50; 64]));
    }

    proptest! {
        #[test]
        fn generated_errors_are_parsed_and_never_cause_another(
            tuple in tuples(v4()), tuple_v6 in tuples(v6()), inner in 0..6_usize, extended: bool,
            length in 0..1500_usize,
        ) {
            let (inner, payload) = (QuotedTransport::ALL[inner], vec![9; length]);
            let mut into = [0; MAX_LENGTH_V6];
            let original = datagram(&tuple, inner, extended, &payload);
            if let Some(length) = compose_v4(&mut into, &original, IcmpError::TtlExceeded, GATEWAY) {
                prop_assert_eq!(parse::<u32>(&into[..length], 20).map(|quote| quote.tuple.source), Ok(tuple.source));
                prop_assert!(!may_send_error(&into[..length]));
            } else {
                prop_assert!(!may_send_error(&original));
            }
            let original = datagram(&tuple_v6, inner, extended, &payload);
            if let Some(length) = compose_v6(&mut into, &original, IcmpError::TtlExceeded, GATEWAY_V6) {
                prop_assert_eq!(parse::<V6>(&into[..length], 40).map(|quote| quote.tuple.source), Ok(tuple_v6.source));
                prop_assert!(!may_send_error(&into[..length]));
            } else {
                prop_assert!(!may_send_error(&original));
            }
        }
    }
}
