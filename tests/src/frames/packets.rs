//! Packets as bytes: what is wrong with them is so on purpose.

use std::net::IpAddr;

use vipgate_dataplane::wire::checksum::{checksum, sum};

const ICMP: [u8; 2] = [1, 58];
const FRAGMENT: u8 = 44;
pub(super) const ETHERNET: usize = 14;

/// What an IP packet carries: the protocol number and the bytes.
pub(super) type Upper = (u8, Vec<u8>);

/// Source and destination, of one family.
pub(super) type Ends = [IpAddr; 2];

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// An IP packet with consistent headers.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    pub(super) ends: Ends,
    /// IPv4 options, a multiple of four bytes.
    pub(super) options: Vec<u8>,
    /// IPv6 extension headers: number and bytes, the first of which is replaced by the number of what follows.
    pub(super) extensions: Vec<(u8, Vec<u8>)>,
    pub(super) ttl: u8,
    pub(super) upper: Upper,
}

impl Packet {
    pub(super) fn new(ends: Ends, upper: Upper) -> Self {
        Self { ends, options: Vec::new(), extensions: Vec::new(), ttl: 64, upper }
    }

    pub(super) fn build(&self, number: usize) -> Vec<u8> {
        if self.ends[0].is_ipv4() {
            return self.v4(number, 0x4000, &self.upper.1);
        }
        let (first, payload) = self.chain();
        self.v6(number, first, &payload)
    }

    /// Its fragments, of `units` times eight bytes.
    pub(super) fn fragments(&self, number: usize, units: usize) -> Vec<Vec<u8>> {
        let is_v4 = self.ends[0].is_ipv4();
        let (first, payload) = if is_v4 { self.upper.clone() } else { self.chain() };
        let count = payload.chunks(units * 8).count();
        let fragment = |(n, piece): (usize, &[u8])| {
            let (offset, more) = ((n * units) as u16, u16::from(n + 1 < count));
            if is_v4 {
                return self.v4(number, more << 13 | offset, piece);
            }
            let field = (offset << 3 | more).to_be_bytes();
            let id = (number as u32).to_be_bytes();
            self.v6(number, FRAGMENT, &[&[first, 0, field[0], field[1]][..], &id, piece].concat())
        };
        payload.chunks(units * 8).enumerate().map(fragment).collect()
    }

    /// The extension headers and what they precede, with the number of the first one.
    fn chain(&self) -> Upper {
        self.extensions.iter().rev().fold(self.upper.clone(), |(next, rest), (number, header)| {
            let mut header = header.clone();
            header[0] = next;
            (*number, [header, rest].concat())
        })
    }

    fn v4(&self, number: usize, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let length = 20 + self.options.len();
        let mut packet = vec![0x40 | (length / 4) as u8, 0];
        for field in [(length + payload.len()) as u16, number as u16, fragment] {
            packet.extend(field.to_be_bytes());
        }
        packet.extend([self.ttl, self.upper.0, 0, 0]);
        packet.extend(self.ends.iter().flat_map(|end| octets(*end)));
        packet.extend(&self.options);
        packet.extend(payload);
        update_header_checksum(&mut packet);
        packet
    }

    fn v6(&self, number: usize, next: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = (0x6000_0000 | (number as u32 & 0xf_ffff)).to_be_bytes().to_vec();
        packet.extend((payload.len() as u16).to_be_bytes());
        packet.extend([next, self.ttl]);
        packet.extend(self.ends.iter().flat_map(|end| octets(*end)));
        packet.extend(payload);
        packet
    }
}

/// The number that a packet carries.
pub fn number(packet: &[u8]) -> Option<usize> {
    let word = u32::from_be_bytes(*packet.first_chunk::<4>()?);
    if word >> 28 == 4 {
        return Some(usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?])));
    }
    Some((word & 0xf_ffff) as usize)
}

/// Updates the checksum of an IPv4 header of the length that it states, if there is one.
pub(super) fn update_header_checksum(packet: &mut [u8]) {
    let length = usize::from(packet[0] & 15) * 4;
    packet[10..12].fill(0);
    let Some(header) = packet.get(..length).filter(|_| length >= 20) else { return };
    let sum = checksum(0, header).to_be_bytes();
    packet[10..12].copy_from_slice(&sum);
}

pub(super) fn tcp(ends: Ends, ports: [u16; 2], flags: u8) -> Upper {
    let mut segment = ports.map(u16::to_be_bytes).concat();
    segment.extend([0, 0, 3, 232, 0, 0, 0, 1, 0x50, flags, 4, 0, 0, 0, 0, 0]);
    segment.extend([b't'; 20]);
    (6, with_checksum(ends, 6, segment, 16))
}

pub(super) fn udp(ends: Ends, ports: [u16; 2]) -> Upper {
    let mut datagram = [ports[0], ports[1], 48, 0].map(u16::to_be_bytes).concat();
    datagram.extend([b'u'; 40]);
    (17, with_checksum(ends, 17, datagram, 6))
}

/// An ICMP message; `rest` is the second half of its header.
pub(super) fn icmp(ends: Ends, [kind, code]: [u8; 2], rest: [u8; 4], body: &[u8]) -> Upper {
    let protocol = ICMP[usize::from(ends[0].is_ipv6())];
    (protocol, with_checksum(ends, protocol, [&[kind, code, 0, 0][..], &rest, body].concat(), 2))
}

pub(super) fn echo(ends: Ends) -> Upper {
    icmp(ends, [if ends[0].is_ipv4() { 8 } else { 128 }, 0], [0x0f, 0xa0, 0, 1], &[b'e'; 40])
}

/// Computes the checksum at this offset, where there are zeros. ICMP over IPv4 has no pseudo-header.
fn with_checksum(ends: Ends, protocol: u8, mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    let pseudo = || {
        let addresses: u32 = ends.iter().map(|end| sum(&octets(*end))).sum();
        addresses + u32::from(protocol) + bytes.len() as u32
    };
    let pseudo = if protocol == ICMP[0] { 0 } else { pseudo() };
    let computed = checksum(pseudo, &bytes).to_be_bytes();
    bytes[at..at + 2].copy_from_slice(&computed);
    bytes
}
