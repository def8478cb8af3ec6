//! ARP for IPv4 over Ethernet (RFC 826, RFC 5227).

use super::ethernet::{self, Mac};

/// Length of an ARP packet for IPv4 over Ethernet.
pub const LENGTH: usize = 28;

const FIXED: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];

/// What an ARP packet wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Who has the target address?
    Request,
    /// The sender has it.
    Reply,
}

/// An ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// Question or answer.
    pub operation: Operation,
    /// Link address of the sender.
    pub sender_mac: Mac,
    /// Address of the sender; 0 in a probe.
    pub sender: u32,
    /// Link address of the target; zero in a question.
    pub target_mac: Mac,
    /// Address that the packet is about.
    pub target: u32,
}

impl Arp {
    /// Reads the payload of a frame of type [`ethernet::ARP`]; `None` if it isn't IPv4 over Ethernet or is cut short.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let packet: &[u8; LENGTH] = payload.first_chunk()?;
        let (fixed, rest) = packet.split_first_chunk::<6>()?;
        if *fixed != FIXED {
            return None;
        }
        let operation = match rest[1] {
            1 if rest[0] == 0 => Operation::Request,
            2 if rest[0] == 0 => Operation::Reply,
            _ => return None,
        };
        let mac = |at: usize| rest[at..].first_chunk::<6>().copied();
        let address = |at: usize| rest[at..].first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes));
        Some(Self { operation, sender_mac: mac(2)?, sender: address(8)?, target_mac: mac(12)?, target: address(18)? })
    }

    /// The whole frame that carries this packet to `destination`.
    pub fn frame(&self, destination: Mac) -> [u8; ethernet::HEADER + LENGTH] {
        let mut frame = [0; ethernet::HEADER + LENGTH];
        ethernet::set_link(&mut frame, &ethernet::link(destination, self.sender_mac));
        frame[12..14].copy_from_slice(&ethernet::ARP.to_be_bytes());
        frame[14..20].copy_from_slice(&FIXED);
        frame[21] = match self.operation {
            Operation::Request => 1,
            Operation::Reply => 2,
        };
        frame[22..28].copy_from_slice(&self.sender_mac);
        frame[28..32].copy_from_slice(&self.sender.to_be_bytes());
        frame[32..38].copy_from_slice(&self.target_mac);
        frame[38..42].copy_from_slice(&self.target.to_be_bytes());
        frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_survives_the_wire() {
        let arp = Arp {
            operation: Operation::Request,
            sender_mac: [2, 0, 0, 0, 0, 1],
            sender: 0xc000_0201,
            target_mac: [0; 6],
            target: 0xc000_020a,
        };
        let frame = arp.frame(ethernet::BROADCAST);
        assert_eq!(Arp::parse(&frame[14..]), Some(arp));
        assert_eq!(Arp::parse(&frame[14..41]), None);
    }
}
