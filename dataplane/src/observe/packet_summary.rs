//! Packet summary: addresses, protocol and ports of any frame, for output. Fields that cannot be parsed are left out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::wire::{ethernet, protocol, u16_at};

/// The addresses and ports of a packet, as far as they can be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketSummary {
    pub source: IpAddr,
    pub destination: IpAddr,
    /// IP protocol number, or the next header of IPv6.
    pub protocol: u8,
    /// Source and destination port, if it has ports.
    pub ports: Option<[u16; 2]>,
}

const IPV4: usize = 20;
const IPV6: usize = 40;

impl PacketSummary {
    /// The summary of a frame; `None` if it has no IP packet.
    pub fn of(frame: &[u8]) -> Option<Self> {
        let (link_header, packet) = frame.split_first_chunk::<{ ethernet::HEADER }>()?;
        let (_, ether_type) = ethernet::parse(link_header);
        match ether_type {
            ethernet::IPV4 => {
                let header: &[u8; IPV4] = packet.first_chunk()?;
                let octets = |at: usize| -> Option<[u8; 4]> { header.get(at..)?.first_chunk().copied() };
                let is_first = u16_at(header, 6) << 3 == 0;
                let payload = packet.get(usize::from(header[0] & 15) * 4..).filter(|_| is_first);
                Some(Self {
                    source: Ipv4Addr::from(octets(12)?).into(),
                    destination: Ipv4Addr::from(octets(16)?).into(),
                    protocol: header[9],
                    ports: payload.and_then(|payload| ports(header[9], payload)),
                })
            }
            ethernet::IPV6 => {
                let header: &[u8; IPV6] = packet.first_chunk()?;
                let octets = |at: usize| -> Option<[u8; 16]> { header.get(at..)?.first_chunk().copied() };
                Some(Self {
                    source: Ipv6Addr::from(octets(8)?).into(),
                    destination: Ipv6Addr::from(octets(24)?).into(),
                    protocol: header[6],
                    ports: packet.get(IPV6..).and_then(|payload| ports(header[6], payload)),
                })
            }
            _ => None,
        }
    }
}

fn ports(number: u8, payload: &[u8]) -> Option<[u16; 2]> {
    let has_ports = matches!(number, protocol::TCP | protocol::UDP | protocol::SCTP);
    let first: &[u8; 4] = payload.first_chunk().filter(|_| has_ports)?;
    Some([u16_at(first, 0), u16_at(first, 2)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parsable_fields_are_read_and_no_others() {
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 1, 0, 11, 198, 51, 100, 10]);
        let truncated = PacketSummary::of(&frame).unwrap();
        assert_eq!(
            (truncated.source, truncated.ports),
            ("10.1.0.11".parse().unwrap(), None),
            "truncated after the IP header"
        );
        frame.extend([0x10, 0, 0, 53, 0, 8, 0, 0]);
        let whole = PacketSummary::of(&frame).unwrap();
        assert_eq!((whole.destination, whole.ports), ("198.51.100.10".parse().unwrap(), Some([4096, 53])));
        frame[20] = 0x20;
        frame[21] = 1;
        assert_eq!(PacketSummary::of(&frame).unwrap().ports, None, "a non-first fragment has no ports");
        for length in 0..34 {
            assert_eq!(PacketSummary::of(&frame[..length]), None, "{length} bytes");
        }
        frame[12..14].copy_from_slice(&[8, 6]);
        assert_eq!(PacketSummary::of(&frame), None, "ARP");
    }
}
