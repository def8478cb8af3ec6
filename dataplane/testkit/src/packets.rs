//! Packets from pods and remotes, and accessors for sent packets.

use std::net::{IpAddr, SocketAddr};

use etherparse::{IpNumber, IpPayloadSlice, NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::wire::checksum::{checksum, sum};

use crate::{INSIDE, INSIDE_MAC, OUTSIDE_MAC, POD_MAC, ROUTER_MAC};

/// A pod and its remote, in each address family.
pub const POD_AND_REMOTE: [(&str, &str); 2] =
    [("10.244.1.5:4000", "198.51.100.10:443"), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:443")];

/// Source and destination address of a packet.
pub fn addresses(net: &NetSlice<'_>) -> (IpAddr, IpAddr) {
    match net {
        NetSlice::Ipv4(v4) => (v4.header().source_addr().into(), v4.header().destination_addr().into()),
        NetSlice::Ipv6(v6) => (v6.header().source_addr().into(), v6.header().destination_addr().into()),
        NetSlice::Arp(_) => panic!("ARP has no IP endpoints"),
    }
}

/// Source and destination of a packet; for ICMP echo both ports are the identifier.
pub fn ends(bytes: &[u8]) -> (SocketAddr, SocketAddr) {
    let parsed = SlicedPacket::from_ethernet(bytes).unwrap();
    let net = parsed.net.as_ref().unwrap();
    let (source, destination) = addresses(net);
    let IpPayloadSlice { ip_number, fragmented, payload, .. } = net.ip_payload_ref().unwrap();
    let at = |offset: usize| u16::from_be_bytes(payload[offset..offset + 2].try_into().unwrap());
    let [source_port, destination_port] = match parsed.transport {
        Some(TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_)) => [4, 4].map(at),
        Some(TransportSlice::Igmp(_)) => panic!("IGMP has no ports"),
        Some(TransportSlice::Tcp(_) | TransportSlice::Udp(_)) => [0, 2].map(at),
        None => {
            assert!(*ip_number == IpNumber::SCTP && !fragmented, "no ports: {ip_number:?}");
            [0, 2].map(at)
        }
    };
    ((source, source_port).into(), (destination, destination_port).into())
}

/// A protocol with sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Tcp,
    Udp,
    /// ICMP echo.
    Echo,
}

/// A packet from source to destination: a SYN, a datagram or an echo request (its identifier is the source port).
pub fn packet(protocol: Protocol, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    match protocol {
        Protocol::Tcp => tcp(source, destination, "S", 1000, 0),
        Protocol::Udp => {
            let mut bytes = Vec::new();
            on_ip(source, destination).udp(source.port(), destination.port()).write(&mut bytes, b"payload").unwrap();
            bytes
        }
        Protocol::Echo => echo(true, source, destination, source.port()),
    }
}

/// A datagram of 1500 bytes from outside over IPv4, with or without DF.
pub fn large_reply(from: SocketAddr, to: SocketAddr, may_fragment: bool) -> Vec<u8> {
    reply_of_length(1500, from, to, may_fragment)
}

/// The same of a given length, IP header included.
pub fn reply_of_length(length: u16, from: SocketAddr, to: SocketAddr, may_fragment: bool) -> Vec<u8> {
    assert!(from.is_ipv4());
    let mut frame = Vec::new();
    on_ip(from, to).udp(from.port(), to.port()).write(&mut frame, &vec![9; usize::from(length) - 28]).unwrap();
    frame[18..20].copy_from_slice(&77_u16.to_be_bytes());
    frame[20] = if may_fragment { 0 } else { 0x40 };
    update_header_checksum(&mut frame);
    frame
}

/// The remote's reply to a packet as it received it.
pub fn reply_to(seen: &[u8], protocol: Protocol) -> Vec<u8> {
    let (source, destination) = ends(seen);
    match protocol {
        Protocol::Tcp => tcp(destination, source, "SA", 5000, 1001),
        Protocol::Udp => packet(Protocol::Udp, destination, source),
        Protocol::Echo => echo(false, destination, source, source.port()),
    }
}

/// A TCP segment without payload; `flags` are the initials of SYN, ACK, FIN, RST and PSH.
pub fn tcp(source: SocketAddr, destination: SocketAddr, flags: &str, sequence: u32, ack: u32) -> Vec<u8> {
    let mut builder = on_ip(source, destination).tcp(source.port(), destination.port(), sequence, 64_000);
    for flag in flags.chars() {
        builder = match flag {
            'S' => builder.syn(),
            'A' => builder.ack(ack),
            'F' => builder.fin(),
            'R' => builder.rst(),
            'P' => builder.psh(),
            other => panic!("unknown TCP flag {other}"),
        };
    }
    let mut bytes = Vec::new();
    builder.write(&mut bytes, &[]).unwrap();
    bytes
}

/// An echo request or reply.
pub fn echo(request: bool, source: SocketAddr, destination: SocketAddr, id: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ip = on_ip(source, destination);
    match (source.is_ipv4(), request) {
        (true, true) => ip.icmpv4_echo_request(id, 7).write(&mut bytes, b"ping").unwrap(),
        (true, false) => ip.icmpv4_echo_reply(id, 7).write(&mut bytes, b"ping").unwrap(),
        (false, true) => ip.icmpv6_echo_request(id, 7).write(&mut bytes, b"ping").unwrap(),
        (false, false) => ip.icmpv6_echo_reply(id, 7).write(&mut bytes, b"ping").unwrap(),
    }
    bytes
}

/// Ethernet and IP headers of a packet, with the MAC addresses that a pod or the router would use.
pub fn on_ip(source: SocketAddr, destination: SocketAddr) -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    let from_pod = source.ip().to_string().starts_with("10.244.") || source.ip().to_string().starts_with("fd00:");
    let (source_mac, destination_mac) = if from_pod { (POD_MAC, INSIDE_MAC) } else { (ROUTER_MAC, OUTSIDE_MAC) };
    let builder = PacketBuilder::ethernet2(source_mac, destination_mac);
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => builder.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => builder.ipv6(from.octets(), to.octets(), 64),
        _ => panic!("mixed address families"),
    }
}

/// A packet with the MAC addresses of a link, whatever its IP source.
pub fn on_link(interface: InterfaceId, mut frame: Vec<u8>) -> Vec<u8> {
    let macs = if interface == INSIDE { [INSIDE_MAC, POD_MAC] } else { [OUTSIDE_MAC, ROUTER_MAC] };
    frame[..12].copy_from_slice(&macs.concat());
    frame
}

/// The IP fragments of a packet without options, with at most `size` bytes of data each.
pub fn ip_fragments(frame: &[u8], size: usize, id: u32) -> Vec<Vec<u8>> {
    let v4 = frame[12] == 8;
    let (header, data) = frame.split_at(if v4 { 34 } else { 54 });
    let count = data.chunks(size).count();
    let fragment = |(n, part): (usize, &[u8])| {
        let (more, offset) = (u16::from(n + 1 < count), (n * size / 8) as u16);
        let mut bytes = header.to_vec();
        if v4 {
            bytes[16..18].copy_from_slice(&(20 + part.len() as u16).to_be_bytes());
            bytes[18..20].copy_from_slice(&(id as u16).to_be_bytes());
            bytes[20..22].copy_from_slice(&(more << 13 | offset).to_be_bytes());
            update_header_checksum(&mut bytes);
        } else {
            bytes[18..20].copy_from_slice(&(8 + part.len() as u16).to_be_bytes());
            let protocol = std::mem::replace(&mut bytes[20], 44);
            bytes.extend([protocol, 0]);
            bytes.extend((offset << 3 | more).to_be_bytes());
            bytes.extend(id.to_be_bytes());
        }
        bytes.extend(part);
        bytes
    };
    data.chunks(size).enumerate().map(fragment).collect()
}

/// The sequence number of a TCP packet over IPv4 without IP options.
pub fn sequence(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[38..42].try_into().unwrap())
}

/// A TCP packet with its lengths and checksums recomputed.
pub fn with_tcp_checksums(mut frame: Vec<u8>) -> Vec<u8> {
    let v4 = frame[12] == 8;
    let (length_at, header, addresses, l4) = if v4 { (16, 0, 26..34, 34) } else { (18, 40, 22..54, 54) };
    let length = (frame.len() - 14 - header) as u16;
    frame[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
    update_header_checksum(&mut frame);
    frame[l4 + 16..l4 + 18].fill(0);
    let pseudo = sum(&frame[addresses]) + 6 + (frame.len() - l4) as u32;
    let segment = checksum(pseudo, &frame[l4..]);
    frame[l4 + 16..l4 + 18].copy_from_slice(&segment.to_be_bytes());
    frame
}

/// Recomputes the checksum of a frame's IPv4 header, if the frame has a complete one.
pub fn update_header_checksum(frame: &mut [u8]) {
    let header = 14 + usize::from(frame[14] & 15) * 4;
    if frame[12] == 8 && (34..=frame.len()).contains(&header) {
        frame[24..26].fill(0);
        let sum = checksum(0, &frame[14..header]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Sets a frame's TTL or hop limit.
pub fn set_ttl(frame: &mut [u8], ttl: u8) {
    frame[if frame[12] == 8 { 22 } else { 21 }] = ttl;
    update_header_checksum(frame);
}
