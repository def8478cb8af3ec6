//! ARP for IPv4 over Ethernet (RFC 826, RFC 5227).

use super::ethernet::{self, Mac};

/// Length of an ARP packet for IPv4 over Ethernet.
pub const LENGTH: usize = 28;

const FIXED: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];

/// The operation of an ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Asks for the MAC address of the target.
    Request,
    /// Announces the MAC address of the sender.
    Reply,
}

/// An ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// Request or reply.
    pub operation: Operation,
    /// MAC address of the sender.
    pub sender_mac: Mac,
    /// IPv4 address of the sender; 0 in a probe (RFC 5227).
    pub sender: u32,
    /// MAC address of the target; zero in a request.
    pub target_mac: Mac,
    /// IPv4 address of the target.
    pub target: u32,
}

impl Arp {
    /// A request for the MAC address of `target`; with a `sender` of 0 it is a probe (RFC 5227 section 2.1.1).
    pub fn request(mac: Mac, sender: u32, target: u32) -> Self {
        Self { operation: Operation::Request, sender_mac: mac, sender, target_mac: [0; 6], target }
    }

    /// An announcement of an address (gratuitous ARP): a request for the sender's own (RFC 5227 section 3).
    pub fn announcement(mac: Mac, address: u32) -> Self {
        Self::request(mac, address, address)
    }

    /// Parses the payload of a frame of type [`ethernet::ARP`]; `None` if it isn't IPv4 over Ethernet or is truncated.
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

    /// Builds the Ethernet frame that carries this packet to `destination`.
    pub fn frame(&self, destination: Mac) -> [u8; ethernet::HEADER + LENGTH] {
        let mut frame = [0; ethernet::HEADER + LENGTH];
        ethernet::set_macs(&mut frame, &ethernet::mac_pair(destination, self.sender_mac));
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
    fn an_arp_packet_is_parsed_as_it_was_written_and_not_if_truncated() {
        let arp = Arp::request([2, 0, 0, 0, 0, 1], 0xc000_0201, 0xc000_020a);
        let frame = arp.frame(ethernet::BROADCAST);
        assert_eq!(Arp::parse(&frame[14..]), Some(arp));
        assert_eq!(Arp::parse(&frame[14..41]), None);
    }
}
