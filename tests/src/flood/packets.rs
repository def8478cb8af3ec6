//! Packets of a flood, with random addresses and ports and valid checksums: only the flood's own anomaly is wrong
//! with them.

use std::collections::VecDeque;
use std::net::IpAddr;

use vipgate_dataplane::flow::address::V6;
use vipgate_dataplane::wire::arp::Arp;
use vipgate_dataplane::wire::ethernet::{self, Mac};
use vipgate_dataplane::wire::{checksum, ndp};

use super::FloodKind;

/// TCP flags.
const SYN: u8 = 2;
const ACK: u8 = 16;
/// IP protocol numbers.
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const FRAGMENT: u8 = 44;
const ICMP_V6: u8 = 58;
/// A blind ACK follows its SYN by this many SYNs, 5 ms at 50 000 packets a second: the backend's SYN-ACK has passed
/// the gateway by then, and the SYN's session hasn't been evicted from a table of 16 384 yet.
const ACK_LAG: usize = 128;

/// An address as in a packet: 4 or 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ip {
    /// IPv4.
    V4([u8; 4]),
    /// IPv6.
    V6([u8; 16]),
}

impl Ip {
    /// Parses an address.
    pub fn parse(text: &str) -> Self {
        match text.parse().unwrap() {
            IpAddr::V4(address) => Self::V4(address.octets()),
            IpAddr::V6(address) => Self::V6(address.octets()),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::V4(bytes) => bytes,
            Self::V6(bytes) => bytes,
        }
    }
}

/// Target of a flood.
#[derive(Clone, Copy, Debug)]
pub struct FloodTarget {
    /// MAC addresses of the gateway and of the sender.
    pub macs: [Mac; 2],
    /// The VIP; for a flood from inside, the sending pod.
    pub address: Ip,
    /// The Service's TCP and UDP port.
    pub ports: [u16; 2],
}

/// SplitMix64 random numbers, reproducible by seed.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next random number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A port above the well-known ones.
    fn port(&mut self) -> u16 {
        1024 + (self.next_u64() % 64_000) as u16
    }

    /// A random client in 11.0.0.0/8 or 2001:db8:b00::/48, which nothing else uses.
    fn client(&mut self, like: Ip) -> Ip {
        let number = self.next_u64();
        match like {
            Ip::V4(_) => Ip::V4([11, number as u8, (number >> 8) as u8, (number >> 16) as u8]),
            Ip::V6(_) => ipv6([0x2001, 0xdb8, 0xb00, 0], number),
        }
    }

    /// A random remote address in 198.18.0.0/15 or 2001:db8:18::/48.
    fn remote(&mut self, like: Ip) -> Ip {
        let number = self.next_u64();
        match like {
            Ip::V4(_) => Ip::V4([198, 18 + (number as u8 & 1), (number >> 8) as u8, (number >> 16) as u8]),
            Ip::V6(_) => ipv6([0x2001, 0xdb8, 0x18, 0], number),
        }
    }
}

fn ipv6(network: [u16; 4], number: u64) -> Ip {
    let mut bytes = [0; 16];
    for (at, word) in network.iter().enumerate() {
        bytes[at * 2..at * 2 + 2].copy_from_slice(&word.to_be_bytes());
    }
    bytes[8..].copy_from_slice(&number.to_be_bytes());
    Ip::V6(bytes)
}

/// Writes the packets of one flood in sequence.
#[derive(Debug)]
pub struct PacketWriter {
    kind: FloodKind,
    target: FloodTarget,
    random: Random,
    number: u64,
    /// Client of the current packet, for kinds with several packets per client.
    client: (Ip, u16),
    /// SYNs whose blind ACK is still to be sent: clients and sequence numbers.
    unacknowledged: VecDeque<((Ip, u16), u32)>,
}

impl PacketWriter {
    /// A writer for a target; packets are reproducible by seed.
    pub fn new(kind: FloodKind, target: FloodTarget, seed: u64) -> Self {
        let mut random = Random(seed);
        let client = (random.client(target.address), random.port());
        Self { kind, target, random, number: 0, client, unacknowledged: VecDeque::new() }
    }

    /// Overwrites `frame` with the next frame.
    pub fn write(&mut self, frame: &mut Vec<u8>) {
        let (vip, number) = (self.target.address, self.number);
        self.number += 1;
        if number.is_multiple_of(self.packets_per_client()) {
            self.client = (self.random.client(vip), self.random.port());
        }
        let (client, port) = self.client;
        match self.kind {
            FloodKind::Syn => self.syn(frame),
            FloodKind::SynAck => self.handshake(frame),
            FloodKind::Udp => {
                let to = if number & 3 < 2 { self.target.ports[1] } else { self.random.port() };
                self.udp(frame, (client, port), (vip, to));
            }
            FloodKind::Fragments => self.fragment(frame, number),
            FloodKind::IcmpErrors => self.icmp_error(frame),
            FloodKind::Neighbors => self.neighbor(frame),
            FloodKind::Pod => {
                let (from, to) = ((vip, self.random.port()), self.random.remote(vip));
                let port = self.random.port();
                self.udp(frame, from, (to, port));
            }
        }
    }

    fn packets_per_client(&self) -> u64 {
        match self.kind {
            FloodKind::Udp | FloodKind::Fragments => 2,
            _ => 1,
        }
    }

    fn syn(&mut self, frame: &mut Vec<u8>) {
        let initial = self.random.next_u64() as u32;
        if self.kind == FloodKind::SynAck {
            self.unacknowledged.push_back((self.client, initial));
        }
        self.tcp(frame, self.client, (SYN, initial, 0));
    }

    /// A SYN, or the blind ACK of an earlier one.
    fn handshake(&mut self, frame: &mut Vec<u8>) {
        let is_due = self.unacknowledged.len() > ACK_LAG;
        match self.unacknowledged.front() {
            Some(&(client, initial)) if is_due => {
                self.unacknowledged.pop_front();
                // The client knows its own sequence number, and guesses the backend's.
                let acknowledged = self.random.next_u64() as u32 | 1;
                self.tcp(frame, client, (ACK, initial.wrapping_add(1), acknowledged));
            }
            _ => self.syn(frame),
        }
    }

    fn tcp(&self, frame: &mut Vec<u8>, (client, port): (Ip, u16), (flags, sequence, acknowledged): (u8, u32, u32)) {
        let vip = self.target.address;
        let mut segment = [port.to_be_bytes(), self.target.ports[0].to_be_bytes()].concat();
        segment.extend(sequence.to_be_bytes());
        segment.extend(acknowledged.to_be_bytes());
        segment.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        write_checksum(&mut segment, 16, (client, vip), TCP);
        self.ip(frame, (client, vip), TCP, &segment);
    }

    fn udp(&self, frame: &mut Vec<u8>, from: (Ip, u16), to: (Ip, u16)) {
        let datagram = udp(from, to, b"flood...");
        self.ip(frame, (from.0, to.0), UDP, &datagram);
    }

    /// The first and the last fragment of a client's datagram; those in between are never sent.
    fn fragment(&mut self, frame: &mut Vec<u8>, number: u64) {
        let ((client, port), vip) = (self.client, self.target.address);
        let is_first = number.is_multiple_of(2);
        let id = self.random.next_u64() as u32;
        let datagram = udp((client, port), (vip, self.target.ports[1]), &[b'f'; 24]);
        // Fragment offset in units of 8 bytes, and the MF flag.
        let (offset, more) = if is_first { (0_u16, 1) } else { (64, 0) };
        match vip {
            Ip::V4(_) => {
                self.ip(frame, (client, vip), UDP, &datagram);
                frame[18..20].copy_from_slice(&(id as u16).to_be_bytes());
                frame[20..22].copy_from_slice(&(offset | more << 13).to_be_bytes());
                frame[24..26].fill(0);
                let sum = checksum::checksum(0, &frame[14..34]);
                frame[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            Ip::V6(_) => {
                let mut rest = vec![UDP, 0];
                rest.extend((offset << 3 | more).to_be_bytes());
                rest.extend(id.to_be_bytes());
                rest.extend(&datagram);
                self.ip(frame, (client, vip), FRAGMENT, &rest);
            }
        }
    }

    /// "Port unreachable" from a random address, quoting a datagram that the VIP has never sent.
    fn icmp_error(&mut self, frame: &mut Vec<u8>) {
        let ((client, _), vip) = (self.client, self.target.address);
        let remote = self.random.remote(vip);
        let datagram = udp((vip, self.random.port()), (remote, self.random.port()), b"never...");
        let quoted = packet((vip, remote), UDP, &datagram);
        let (kind, protocol) = match vip {
            Ip::V4(_) => ([3, 3], ICMP),
            Ip::V6(_) => ([1, 4], ICMP_V6),
        };
        let mut message = vec![kind[0], kind[1], 0, 0, 0, 0, 0, 0];
        message.extend(quoted);
        write_checksum(&mut message, 2, (client, vip), protocol);
        self.ip(frame, (client, vip), protocol, &message);
    }

    fn neighbor(&mut self, frame: &mut Vec<u8>) {
        let [_, mac] = self.target.macs;
        let requester = self.random.next_u64();
        frame.clear();
        match self.target.address {
            Ip::V4(vip) => {
                let sender = u32::from_be_bytes([203, 0, 113, 128 + (requester % 100) as u8]);
                frame.extend(Arp::request(mac, sender, u32::from_be_bytes(vip)).frame(ethernet::BROADCAST));
                frame.resize(60, 0);
            }
            Ip::V6(vip) => {
                let source = V6 { high: 0x2001_0db8_0113_0000, low: 0x1000 + requester % 0xff00 };
                let target = V6::from_bits(u128::from_be_bytes(vip));
                frame.extend(ndp::Solicitation { source, mac, target, target_mac: None }.frame());
            }
        }
    }

    fn ip(&self, frame: &mut Vec<u8>, ends: (Ip, Ip), protocol: u8, rest: &[u8]) {
        frame.clear();
        frame.extend(self.target.macs.concat());
        frame.extend(match ends.0 {
            Ip::V4(_) => [8, 0],
            Ip::V6(_) => [0x86, 0xdd],
        });
        frame.extend(packet(ends, protocol, rest));
    }
}

/// An IP packet.
fn packet((from, to): (Ip, Ip), protocol: u8, rest: &[u8]) -> Vec<u8> {
    let length = rest.len() as u16;
    let mut bytes = match from {
        Ip::V4(_) => vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0],
        Ip::V6(_) => vec![0x60, 0, 0, 0, (length >> 8) as u8, length as u8, protocol, 64],
    };
    bytes.extend(from.bytes());
    bytes.extend(to.bytes());
    if let Ip::V4(_) = from {
        bytes[2..4].copy_from_slice(&(length + 20).to_be_bytes());
        let sum = checksum::checksum(0, &bytes);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    bytes.extend(rest);
    bytes
}

fn udp(from: (Ip, u16), to: (Ip, u16), payload: &[u8]) -> Vec<u8> {
    let mut datagram = [from.1, to.1, 8 + payload.len() as u16, 0].map(u16::to_be_bytes).concat();
    datagram.extend(payload);
    write_checksum(&mut datagram, 6, (from.0, to.0), UDP);
    datagram
}

/// Writes the checksum at this offset. ICMPv4 has no pseudo-header.
fn write_checksum(bytes: &mut [u8], at: usize, (from, to): (Ip, Ip), protocol: u8) {
    let pseudo = match protocol {
        ICMP => 0,
        _ => checksum::sum(from.bytes()) + checksum::sum(to.bytes()) + u32::from(protocol) + bytes.len() as u32,
    };
    let sum = checksum::checksum(pseudo, bytes);
    let sum = if sum == 0 && protocol == UDP { 0xffff } else { sum };
    bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use etherparse::{SlicedPacket, TransportSlice};

    use super::*;

    fn writer(kind: FloodKind, address: Ip) -> PacketWriter {
        PacketWriter::new(kind, FloodTarget { macs: [[2; 6], [4; 6]], address, ports: [80, 53] }, 1)
    }

    const VIPS: [Ip; 2] =
        [Ip::V4([203, 0, 113, 20]), Ip::V6([0x20, 1, 0xd, 0xb8, 1, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20])];

    #[test]
    fn every_packet_is_valid_to_an_independent_parser() {
        for vip in VIPS {
            for kind in FloodKind::ALL {
                let (mut writer, mut frame) = (writer(kind, vip), Vec::new());
                for _ in 0..64 {
                    writer.write(&mut frame);
                    let parsed = SlicedPacket::from_ethernet(&frame).unwrap();
                    if kind == FloodKind::Neighbors && matches!(vip, Ip::V4(_)) {
                        assert_eq!(frame.len(), 60);
                        continue;
                    }
                    let net = parsed.net.expect("an IP packet");
                    let ip = net.ip_payload_ref().expect("with a payload");
                    assert_eq!(ip.fragmented, kind == FloodKind::Fragments, "{kind:?} {vip:?}");
                    let header = frame.len() - ip.payload.len();
                    match parsed.transport {
                        Some(TransportSlice::Tcp(tcp)) => {
                            assert!(matches!(kind, FloodKind::Syn | FloodKind::SynAck) && tcp.destination_port() == 80);
                        }
                        Some(TransportSlice::Udp(_)) => assert!(matches!(kind, FloodKind::Udp | FloodKind::Pod)),
                        Some(_) => assert!(matches!(kind, FloodKind::IcmpErrors | FloodKind::Neighbors)),
                        None => assert_eq!(kind, FloodKind::Fragments),
                    }
                    if kind != FloodKind::Fragments {
                        let (from, to) = match vip {
                            Ip::V4(_) => (26..30, 30..34),
                            Ip::V6(_) => (22..38, 38..54),
                        };
                        let protocol = u32::from(ip.ip_number.0);
                        let pseudo = checksum::sum(&frame[from]) + checksum::sum(&frame[to]) + protocol;
                        let pseudo = pseudo + ip.payload.len() as u32;
                        let pseudo = if protocol == u32::from(ICMP) { 0 } else { pseudo };
                        assert!(checksum::verifies(pseudo, &frame[header..]), "{kind:?} {vip:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_blind_ack_follows_its_syn_after_the_lag() {
        for vip in VIPS {
            let (mut writer, mut frame) = (writer(FloodKind::SynAck, vip), Vec::new());
            let (mut syns, mut acks) = (Vec::new(), 0);
            for _ in 0..2000 {
                writer.write(&mut frame);
                let parsed = SlicedPacket::from_ethernet(&frame).unwrap();
                let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("{vip:?}: no TCP") };
                let from = if matches!(vip, Ip::V4(_)) { 26..30 } else { 22..38 };
                let (client, sequence) = ((frame[from].to_vec(), tcp.source_port()), tcp.sequence_number());
                if tcp.syn() {
                    syns.push((client, sequence.wrapping_add(1)));
                } else {
                    assert_eq!(
                        syns[acks],
                        (client, sequence),
                        "ACKs follow the order of SYNs, with the next sequence number"
                    );
                    acks += 1;
                    assert!(syns.len() - acks >= ACK_LAG, "{acks} of {}", syns.len());
                }
            }
            assert!(acks > 900, "{acks}");
        }
    }

    #[test]
    fn random_clients_are_distinct_enough_to_fill_a_table() {
        for vip in VIPS {
            let (mut writer, mut frame) = (writer(FloodKind::Syn, vip), Vec::new());
            let mut clients = HashSet::new();
            for _ in 0..50_000 {
                writer.write(&mut frame);
                let from = if matches!(vip, Ip::V4(_)) { 26..36 } else { 22..56 };
                clients.insert(frame[from].to_vec());
            }
            assert!(clients.len() > 49_900, "{}", clients.len());
        }
    }
}
