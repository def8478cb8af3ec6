//! Packets built by an independent implementation, to compare byte by byte.

use std::net::IpAddr;

use etherparse::{
    IpFragOffset, IpHeaders, IpNumber, Ipv4Header, Ipv4Options, Ipv6Extensions, Ipv6FragmentHeader, Ipv6Header,
    Ipv6RawExtHeader, PacketBuilder, PacketBuilderStep,
};
use proptest::prelude::*;

use super::IcmpErrorFamily;
use crate::flow::address::{Address, V6};
use crate::flow::tuple::Tuple;
use crate::wire::protocol;

/// The transport of a quoted packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::wire) enum QuotedTransport {
    Tcp,
    Udp,
    UdpWithoutChecksum,
    Sctp,
    EchoRequest,
    EchoReply,
}

impl QuotedTransport {
    pub(in crate::wire) const ALL: [Self; 6] =
        [Self::Tcp, Self::Udp, Self::UdpWithoutChecksum, Self::Sctp, Self::EchoRequest, Self::EchoReply];

    fn header(self) -> usize {
        match self {
            Self::Tcp => 20,
            Self::Sctp => 12,
            _ => 8,
        }
    }

    /// The part of a tuple that a packet of this transport contains.
    fn visible_tuple<A: IcmpErrorFamily>(self, tuple: Tuple<A>) -> Tuple<A> {
        match self {
            Self::Tcp => Tuple { protocol: protocol::TCP, ..tuple },
            Self::Udp | Self::UdpWithoutChecksum => Tuple { protocol: protocol::UDP, ..tuple },
            Self::Sctp => Tuple { protocol: protocol::SCTP, ..tuple },
            Self::EchoRequest => Tuple { destination_port: 0, protocol: A::ICMP, ..tuple },
            Self::EchoReply => Tuple { source_port: 0, protocol: A::ICMP, ..tuple },
        }
    }
}

/// IP headers, without or with options or extension headers.
fn ip<A: Address>(source: A, destination: A, extended: bool) -> PacketBuilderStep<IpHeaders> {
    PacketBuilder::ip(match (source.to_ip(), destination.to_ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = Ipv4Header::new(0, 61, IpNumber::UDP, source.octets(), destination.octets()).unwrap();
            header.identification = 0xbeef;
            if extended {
                // A full record route, and a completed loose source route.
                let options: Ipv4Options = [7, 7, 8, 10, 1, 2, 3, 131, 3, 4, 0, 0].into();
                header.options = options;
                header.more_fragments = true;
            }
            IpHeaders::Ipv4(header, etherparse::Ipv4Extensions::default())
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let header = Ipv6Header {
                source: source.octets(),
                destination: destination.octets(),
                hop_limit: 61,
                ..Ipv6Header::default()
            };
            let options = || {
                Some(Ipv6RawExtHeader::new_raw(IpNumber::UDP, &[1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap())
            };
            let fragment = Ipv6FragmentHeader::new(IpNumber::UDP, IpFragOffset::ZERO, true, 7);
            let extensions = Ipv6Extensions {
                hop_by_hop_options: options(),
                destination_options: options(),
                fragment: Some(fragment),
                ..Ipv6Extensions::default()
            };
            IpHeaders::Ipv6(header, if extended { extensions } else { Ipv6Extensions::default() })
        }
        _ => unreachable!("both addresses are of one family"),
    })
}

/// Builds an IP packet.
pub(in crate::wire) fn datagram<A: IcmpErrorFamily>(
    tuple: &Tuple<A>,
    inner: QuotedTransport,
    extended: bool,
    payload: &[u8],
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ip = ip(tuple.source, tuple.destination, extended);
    let v4 = A::BITS == 32;
    match inner {
        QuotedTransport::Tcp => {
            let tcp = ip.tcp(tuple.source_port, tuple.destination_port, 0x0102_0304, 0xffff);
            tcp.write(&mut bytes, payload).unwrap();
        }
        QuotedTransport::Udp | QuotedTransport::UdpWithoutChecksum => {
            ip.udp(tuple.source_port, tuple.destination_port).write(&mut bytes, payload).unwrap();
        }
        QuotedTransport::Sctp => {
            let ports = [tuple.source_port.to_be_bytes(), tuple.destination_port.to_be_bytes()].concat();
            let sctp = [&ports[..], &[1, 2, 3, 4, 0xca, 0xfe, 0xba, 0xbe], payload].concat();
            ip.write(&mut bytes, IpNumber(protocol::SCTP), &sctp).unwrap();
        }
        QuotedTransport::EchoRequest if v4 => {
            ip.icmpv4_echo_request(tuple.source_port, 7).write(&mut bytes, payload).unwrap();
        }
        QuotedTransport::EchoRequest => {
            ip.icmpv6_echo_request(tuple.source_port, 7).write(&mut bytes, payload).unwrap();
        }
        QuotedTransport::EchoReply if v4 => {
            ip.icmpv4_echo_reply(tuple.destination_port, 7).write(&mut bytes, payload).unwrap();
        }
        QuotedTransport::EchoReply => {
            ip.icmpv6_echo_reply(tuple.destination_port, 7).write(&mut bytes, payload).unwrap();
        }
    }
    if inner == QuotedTransport::UdpWithoutChecksum {
        let at = bytes.len() - payload.len() - 2;
        bytes[at..at + 2].fill(0);
    }
    bytes
}

/// Builds an IP packet with an ICMP message.
pub(in crate::wire) fn message<A: IcmpErrorFamily>(header: [u8; 6], source: A, destination: A, body: &[u8]) -> Vec<u8> {
    let [kind, code, rest @ ..] = header;
    let mut bytes = Vec::new();
    let ip = ip(source, destination, false);
    if A::BITS == 32 {
        ip.icmpv4_raw(kind, code, rest).write(&mut bytes, body).unwrap();
    } else {
        ip.icmpv6_raw(kind, code, rest).write(&mut bytes, body).unwrap();
    }
    bytes
}

/// A generated ICMP error.
#[derive(Clone, Debug)]
pub(in crate::wire) struct ErrorCase {
    pub(in crate::wire) inner: QuotedTransport,
    /// Whether the quoted packet has IP options or extension headers.
    pub(in crate::wire) extended: bool,
    pub(in crate::wire) payload: Vec<u8>,
    /// Bytes truncated from the quoted transport header and payload, as far as they may be missing.
    pub(in crate::wire) cut: usize,
    /// Whether extensions follow the quote (RFC 4884).
    pub(in crate::wire) extensions: bool,
    pub(in crate::wire) kind: usize,
}

impl ErrorCase {
    pub(in crate::wire) fn any() -> impl Strategy<Value = Self> {
        let payload = prop::collection::vec(any::<u8>(), 0..200);
        (0..6_usize, any::<bool>(), payload, 0..300_usize, any::<bool>(), 0..4_usize).prop_map(
            |(inner, extended, payload, cut, extensions, kind)| Self {
                inner: QuotedTransport::ALL[inner],
                extended,
                payload,
                cut,
                extensions,
                kind,
            },
        )
    }

    /// The tuple that [`super::parse`] finds in the error.
    pub(in crate::wire) fn visible_tuple<A: IcmpErrorFamily>(&self, tuple: Tuple<A>) -> Tuple<A> {
        self.inner.visible_tuple(tuple)
    }

    /// The error that `router` sends for the packet with this tuple.
    pub(in crate::wire) fn error<A: IcmpErrorFamily>(&self, tuple: &Tuple<A>, router: A) -> Vec<u8> {
        let original = datagram(tuple, self.inner, self.extended, &self.payload);
        let headers = original.len() - self.inner.header() - self.payload.len();
        let kept = (original.len() - headers).saturating_sub(self.cut).max(8);
        // Not truncated between TCP's data offset and the end of its checksum: the checksum's presence would be
        // ambiguous.
        let kept = if self.inner == QuotedTransport::Tcp && (13..18).contains(&kept) { 12 } else { kept };
        let mut body = original[..headers + kept].to_vec();
        let (word, at) = if A::BITS == 32 { (4, 1) } else { (8, 0) };
        let (kind, code, mut rest) = match (self.kind, A::BITS) {
            (0, 32) => (3, 3, [0; 4]),
            (1, 32) => (3, 4, [0, 0, 0x05, 0xdc]),
            (2, 32) => (11, 0, [0; 4]),
            (_, 32) => (12, 0, [9, 0, 0, 0]),
            (0, _) => (1, 4, [0; 4]),
            (1, _) => (2, 0, [0, 0, 0x05, 0xdc]),
            (2, _) => (3, 0, [0; 4]),
            (_, _) => (4, 0, [0, 0, 0, 40]),
        };
        let may_be_extended = A::BITS == 32 || matches!(kind, 1 | 3);
        if self.extensions && may_be_extended {
            body.resize(body.len().max(128).next_multiple_of(word), 0);
            rest[at] = u8::try_from(body.len() / word).unwrap();
            // Version 2 and one object of class 1 (RFC 4884 section 7, RFC 4950).
            body.extend([0x20, 0, 0x12, 0x34, 0, 8, 1, 1, 0xde, 0xad, 0xbe, 0xef]);
        }
        let [a, b, c, d] = rest;
        message([kind, code, a, b, c, d], router, tuple.source, &body)
    }
}

/// Any tuple.
pub(in crate::wire) fn tuples<A: IcmpErrorFamily>(
    addresses: impl Strategy<Value = A> + Clone,
) -> impl Strategy<Value = Tuple<A>> {
    (addresses.clone(), addresses, any::<u16>(), any::<u16>()).prop_map(
        |(source, destination, source_port, destination_port)| Tuple {
            source,
            destination,
            source_port,
            destination_port,
            protocol: 0,
        },
    )
}

/// Any IPv4 address, with a bias to edge cases of the checksum.
pub(in crate::wire) fn v4() -> impl Strategy<Value = u32> + Clone {
    prop_oneof![4 => any::<u32>(), 1 => Just(0_u32), 1 => Just(u32::MAX)]
}

/// Any IPv6 address, with a bias to edge cases of the checksum.
pub(in crate::wire) fn v6() -> impl Strategy<Value = V6> + Clone {
    let some = any::<u128>().prop_map(V6::from_bits).boxed();
    prop_oneof![4 => some, 1 => Just(V6::default()), 1 => Just(<V6 as Address>::MAX)]
}

/// `packet` with every checksum valid that [`super::parse`] verifies.
pub(in crate::wire) fn with_valid_checksums<A: IcmpErrorFamily>(mut packet: Vec<u8>, l4: usize) -> Vec<u8> {
    use crate::wire::checksum::checksum;
    if A::BITS == 32 {
        let header = usize::from(packet.get(l4 + 8).copied().unwrap_or(0) & 15) * 4;
        if let Some(quoted) = packet.get_mut(l4 + 8..).and_then(|rest| rest.get_mut(..header)).filter(|q| q.len() >= 20)
        {
            quoted[10..12].fill(0);
            let sum = checksum(0, quoted);
            quoted[10..12].copy_from_slice(&sum.to_be_bytes());
        }
    }
    if packet.len() >= l4 + 4 {
        packet[l4 + 2..l4 + 4].fill(0);
        let sum = checksum(A::pseudo_header_sum(&packet, packet.len() - l4), &packet[l4..]);
        packet[l4 + 2..l4 + 4].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}
