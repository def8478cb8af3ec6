//! Who sends what to whom, of any frame: for people, so what can't be read is simply left out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::wire::{ethernet, protocol, u16_at};

/// The ends of a packet, as far as they can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glimpse {
    /// Where it comes from.
    pub source: IpAddr,
    /// Where it goes.
    pub destination: IpAddr,
    /// IP protocol number, or IPv6's next header.
    pub protocol: u8,
    /// Source and destination port, where it has some.
    pub ports: Option<[u16; 2]>,
}

const IPV4: usize = 20;
const IPV6: usize = 40;

impl Glimpse {
    /// What a frame says; `None` where there is no IP packet in it.
    pub fn of(frame: &[u8]) -> Option<Self> {
        let (link, packet) = frame.split_first_chunk::<{ ethernet::HEADER }>()?;
        let (_, kind) = ethernet::parse(link);
        match kind {
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
    fn what_can_be_read_is_read_and_nothing_else() {
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 1, 0, 11, 198, 51, 100, 10]);
        let bare = Glimpse::of(&frame).unwrap();
        assert_eq!((bare.source, bare.ports), ("10.1.0.11".parse().unwrap(), None), "cut short behind the header");
        frame.extend([0x10, 0, 0, 53, 0, 8, 0, 0]);
        let whole = Glimpse::of(&frame).unwrap();
        assert_eq!((whole.destination, whole.ports), ("198.51.100.10".parse().unwrap(), Some([4096, 53])));
        frame[20] = 0x20;
        frame[21] = 1;
        assert_eq!(Glimpse::of(&frame).unwrap().ports, None, "a fragment that isn't the first has no ports");
        for length in 0..34 {
            assert_eq!(Glimpse::of(&frame[..length]), None, "{length} bytes");
        }
        frame[12..14].copy_from_slice(&[8, 6]);
        assert_eq!(Glimpse::of(&frame), None, "ARP");
    }
}
