//! Packets of a flood: each is written anew, with random ends and right checksums, so that nothing but what it claims is wrong with it.

use std::collections::VecDeque;
use std::net::IpAddr;

use vipgate_dataplane::wire::checksum;
use vipgate_dataplane::wire::ethernet::Mac;

use super::Kind;

/// TCP flags.
const SYN: u8 = 2;
const ACK: u8 = 16;
/// Protocols.
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const FRAGMENT: u8 = 44;
const ICMP_V6: u8 = 58;
/// A blind ACK comes so many SYNs after its own, 5 ms at 50 000 packets a second: the backend's SYN-ACK has passed the gateway by then, and of
/// a table of 16 384 the SYN's session hasn't made room for later ones yet.
const ACK_LAG: usize = 128;

/// Addresses as they lie in packets: 4 bytes or 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ip {
    /// IPv4.
    Four([u8; 4]),
    /// IPv6.
    Six([u8; 16]),
}

impl Ip {
    /// The address that this text is.
    pub fn of(text: &str) -> Self {
        match text.parse().unwrap() {
            IpAddr::V4(address) => Self::Four(address.octets()),
            IpAddr::V6(address) => Self::Six(address.octets()),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Four(bytes) => bytes,
            Self::Six(bytes) => bytes,
        }
    }
}

/// Where a flood goes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Link addresses: the gateway's, and the sender's.
    pub link: [Mac; 2],
    /// The VIP; of a flood from inside the pod that sends.
    pub address: Ip,
    /// The Service's ports there: of TCP, and of UDP.
    pub ports: [u16; 2],
    /// Of a flood from inside: the only destination, instead of random ones.
    pub only: Option<Ip>,
}

/// SplitMix64: enough to make clients up, and the same in each run.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A port above the well-known ones.
    fn port(&mut self) -> u16 {
        1024 + (self.draw() % 64_000) as u16
    }

    /// Somebody in 11.0.0.0/8 or 2001:db8:b00::/48, which nothing else uses.
    fn client(&mut self, like: Ip) -> Ip {
        let number = self.draw();
        match like {
            Ip::Four(_) => Ip::Four([11, number as u8, (number >> 8) as u8, (number >> 16) as u8]),
            Ip::Six(_) => six([0x2001, 0xdb8, 0xb00, 0], number),
        }
    }

    /// A far side in 198.18.0.0/15 or 2001:db8:18::/48.
    fn remote(&mut self, like: Ip) -> Ip {
        let number = self.draw();
        match like {
            Ip::Four(_) => Ip::Four([198, 18 + (number as u8 & 1), (number >> 8) as u8, (number >> 16) as u8]),
            Ip::Six(_) => six([0x2001, 0xdb8, 0x18, 0], number),
        }
    }
}

fn six(network: [u16; 4], number: u64) -> Ip {
    let mut bytes = [0; 16];
    for (at, word) in network.iter().enumerate() {
        bytes[at * 2..at * 2 + 2].copy_from_slice(&word.to_be_bytes());
    }
    bytes[8..].copy_from_slice(&number.to_be_bytes());
    Ip::Six(bytes)
}

/// Writes the packets of one kind, one after the other.
#[derive(Debug)]
pub struct Writer {
    kind: Kind,
    target: Target,
    random: Random,
    number: u64,
    /// The client of the packet before, where one has several.
    client: (Ip, u16),
    /// SYNs that a blind ACK will follow: their clients, and their sequence numbers.
    unacknowledged: VecDeque<((Ip, u16), u32)>,
}

impl Writer {
    /// Of a kind, to a target; the same seed, the same packets.
    pub fn new(kind: Kind, target: Target, seed: u64) -> Self {
        let mut random = Random(seed);
        let client = (random.client(target.address), random.port());
        Self { kind, target, random, number: 0, client, unacknowledged: VecDeque::new() }
    }

    /// Writes the next frame over `frame`.
    pub fn write(&mut self, frame: &mut Vec<u8>) {
        let (vip, number) = (self.target.address, self.number);
        self.number += 1;
        if number.is_multiple_of(self.packets_of_a_client()) {
            self.client = (self.random.client(vip), self.random.port());
        }
        let (client, port) = self.client;
        match self.kind {
            Kind::Syn => self.syn(frame),
            Kind::SynAck => self.handshake(frame),
            Kind::Udp => {
                let to = if number & 3 < 2 { self.target.ports[1] } else { self.random.port() };
                self.udp(frame, (client, port), (vip, to));
            }
            Kind::Fragments => self.fragment(frame, number),
            Kind::IcmpErrors => self.icmp_error(frame),
            Kind::Neighbors => self.neighbor(frame),
            Kind::Pod => {
                let (from, to) = ((vip, self.random.port()), self.target.only.unwrap_or(self.random.remote(vip)));
                let port = self.random.port();
                self.udp(frame, from, (to, port));
            }
        }
    }

    fn packets_of_a_client(&self) -> u64 {
        match self.kind {
            Kind::Udp | Kind::Fragments => 2,
            _ => 1,
        }
    }

    fn syn(&mut self, frame: &mut Vec<u8>) {
        let initial = self.random.draw() as u32;
        if self.kind == Kind::SynAck {
            self.unacknowledged.push_back((self.client, initial));
        }
        self.tcp(frame, self.client, (SYN, initial, 0));
    }

    /// A SYN, or the ACK of an earlier one.
    fn handshake(&mut self, frame: &mut Vec<u8>) {
        let is_due = self.unacknowledged.len() > ACK_LAG;
        match self.unacknowledged.front() {
            Some(&(client, initial)) if is_due => {
                self.unacknowledged.pop_front();
                // What it sent itself it knows; what it was answered it has to guess.
                let acknowledged = self.random.draw() as u32 | 1;
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
        checked(&mut segment, 16, (client, vip), TCP);
        self.ip(frame, (client, vip), TCP, &segment);
    }

    fn udp(&self, frame: &mut Vec<u8>, from: (Ip, u16), to: (Ip, u16)) {
        let datagram = udp(from, to, b"flood...");
        self.ip(frame, (from.0, to.0), UDP, &datagram);
    }

    /// The first fragment and the last one of a client's datagrams; what is between them never comes.
    fn fragment(&mut self, frame: &mut Vec<u8>, number: u64) {
        let ((client, port), vip) = (self.client, self.target.address);
        let is_first = number.is_multiple_of(2);
        let id = self.random.draw() as u32;
        let datagram = udp((client, port), (vip, self.target.ports[1]), &[b'f'; 24]);
        // In units of 8 bytes, and whether more follow.
        let (offset, more) = if is_first { (0_u16, 1) } else { (64, 0) };
        match vip {
            Ip::Four(_) => {
                self.ip(frame, (client, vip), UDP, &datagram);
                frame[18..20].copy_from_slice(&(id as u16).to_be_bytes());
                frame[20..22].copy_from_slice(&(offset | more << 13).to_be_bytes());
                frame[24..26].fill(0);
                let sum = checksum::checksum(0, &frame[14..34]);
                frame[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            Ip::Six(_) => {
                let mut rest = vec![UDP, 0];
                rest.extend((offset << 3 | more).to_be_bytes());
                rest.extend(id.to_be_bytes());
                rest.extend(&datagram);
                self.ip(frame, (client, vip), FRAGMENT, &rest);
            }
        }
    }

    /// "Port unreachable", from anybody, about a datagram of the VIP that never was.
    fn icmp_error(&mut self, frame: &mut Vec<u8>) {
        let ((client, _), vip) = (self.client, self.target.address);
        let far = self.random.remote(vip);
        let datagram = udp((vip, self.random.port()), (far, self.random.port()), b"never...");
        let quoted = packet((vip, far), UDP, &datagram);
        let (kind, protocol) = match vip {
            Ip::Four(_) => ([3, 3], ICMP),
            Ip::Six(_) => ([1, 4], ICMP_V6),
        };
        let mut message = vec![kind[0], kind[1], 0, 0, 0, 0, 0, 0];
        message.extend(quoted);
        checked(&mut message, 2, (client, vip), protocol);
        self.ip(frame, (client, vip), protocol, &message);
    }

    fn neighbor(&mut self, frame: &mut Vec<u8>) {
        let [_, sender] = self.target.link;
        let asker = self.random.draw();
        match self.target.address {
            Ip::Four(vip) => {
                frame.clear();
                frame.extend([0xff; 6]);
                frame.extend(sender);
                frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
                frame.extend(sender);
                frame.extend([203, 0, 113, 128 + (asker % 100) as u8]);
                frame.extend([0; 6]);
                frame.extend(vip);
                frame.resize(60, 0);
            }
            Ip::Six(vip) => {
                let group = [&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff][..], &vip[13..]].concat();
                let to = Ip::Six(group.try_into().unwrap_or(vip));
                let from = six([0x2001, 0xdb8, 0x113, 0], 0x1000 + asker % 0xff00);
                let mut message = vec![135, 0, 0, 0, 0, 0, 0, 0];
                message.extend(vip);
                message.extend([1, 1]);
                message.extend(sender);
                checked(&mut message, 2, (from, to), ICMP_V6);
                self.ip(frame, (from, to), ICMP_V6, &message);
                frame[..6].copy_from_slice(&[0x33, 0x33, 0xff, vip[13], vip[14], vip[15]]);
                // Only what comes from the link itself counts (RFC 4861 section 7.1.1).
                frame[21] = 255;
            }
        }
    }

    fn ip(&self, frame: &mut Vec<u8>, ends: (Ip, Ip), protocol: u8, rest: &[u8]) {
        frame.clear();
        frame.extend(self.target.link.concat());
        frame.extend(match ends.0 {
            Ip::Four(_) => [8, 0],
            Ip::Six(_) => [0x86, 0xdd],
        });
        frame.extend(packet(ends, protocol, rest));
    }
}

/// An IP packet.
fn packet((from, to): (Ip, Ip), protocol: u8, rest: &[u8]) -> Vec<u8> {
    let length = rest.len() as u16;
    let mut bytes = match from {
        Ip::Four(_) => vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0],
        Ip::Six(_) => vec![0x60, 0, 0, 0, (length >> 8) as u8, length as u8, protocol, 64],
    };
    bytes.extend(from.bytes());
    bytes.extend(to.bytes());
    if let Ip::Four(_) = from {
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
    checked(&mut datagram, 6, (from.0, to.0), UDP);
    datagram
}

/// Writes the checksum at this place. ICMP has no pseudo-header.
fn checked(bytes: &mut [u8], at: usize, (from, to): (Ip, Ip), protocol: u8) {
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

    fn writer(kind: Kind, address: Ip) -> Writer {
        Writer::new(kind, Target { link: [[2; 6], [4; 6]], address, ports: [80, 53], only: None }, 1)
    }

    const VIPS: [Ip; 2] =
        [Ip::Four([203, 0, 113, 20]), Ip::Six([0x20, 1, 0xd, 0xb8, 1, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20])];

    #[test]
    fn every_kind_is_what_an_independent_parser_expects() {
        for vip in VIPS {
            for kind in Kind::ALL {
                let (mut writer, mut frame) = (writer(kind, vip), Vec::new());
                for _ in 0..64 {
                    writer.write(&mut frame);
                    let parsed = SlicedPacket::from_ethernet(&frame).unwrap();
                    if kind == Kind::Neighbors && matches!(vip, Ip::Four(_)) {
                        assert_eq!(frame.len(), 60);
                        continue;
                    }
                    let net = parsed.net.expect("an IP packet");
                    let ip = net.ip_payload_ref().expect("with a payload");
                    assert_eq!(ip.fragmented, kind == Kind::Fragments, "{kind:?} {vip:?}");
                    let header = frame.len() - ip.payload.len();
                    match parsed.transport {
                        Some(TransportSlice::Tcp(tcp)) => {
                            assert!(matches!(kind, Kind::Syn | Kind::SynAck) && tcp.destination_port() == 80);
                        }
                        Some(TransportSlice::Udp(_)) => assert!(matches!(kind, Kind::Udp | Kind::Pod)),
                        Some(_) => assert!(matches!(kind, Kind::IcmpErrors | Kind::Neighbors)),
                        None => assert_eq!(kind, Kind::Fragments),
                    }
                    if kind != Kind::Fragments {
                        let (from, to) = match vip {
                            Ip::Four(_) => (26..30, 30..34),
                            Ip::Six(_) => (22..38, 38..54),
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
    fn a_blind_ack_comes_when_its_syn_may_have_been_answered() {
        for vip in VIPS {
            let (mut writer, mut frame) = (writer(Kind::SynAck, vip), Vec::new());
            let (mut syns, mut acks) = (Vec::new(), 0);
            for _ in 0..2000 {
                writer.write(&mut frame);
                let parsed = SlicedPacket::from_ethernet(&frame).unwrap();
                let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("{vip:?}: no TCP") };
                let from = if matches!(vip, Ip::Four(_)) { 26..30 } else { 22..38 };
                let (client, sequence) = ((frame[from].to_vec(), tcp.source_port()), tcp.sequence_number());
                if tcp.syn() {
                    syns.push((client, sequence.wrapping_add(1)));
                } else {
                    assert_eq!(syns[acks], (client, sequence), "the next client in turn goes on where its SYN ended");
                    acks += 1;
                    assert!(syns.len() - acks >= ACK_LAG, "{acks} of {}", syns.len());
                }
            }
            assert!(acks > 900, "{acks}");
        }
    }

    #[test]
    fn clients_are_as_many_as_a_table_needs_to_be_full() {
        for vip in VIPS {
            let (mut writer, mut frame) = (writer(Kind::Syn, vip), Vec::new());
            let mut clients = HashSet::new();
            for _ in 0..50_000 {
                writer.write(&mut frame);
                let from = if matches!(vip, Ip::Four(_)) { 26..36 } else { 22..56 };
                clients.insert(frame[from].to_vec());
            }
            assert!(clients.len() > 49_900, "{}", clients.len());
        }
    }
}
