//! Who claims an address on a segment, by ARP and neighbour discovery.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::packet::Packet;
use super::pcap::Frame;

/// A gateway says that an address is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Nanoseconds of the wall clock.
    pub time: u64,
    /// Where it was captured.
    pub place: usize,
    /// Whose it is: the link address that is claimed for it.
    pub link: [u8; 6],
    /// Why it says so.
    pub kind: Kind,
}

/// Why somebody says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Because he was asked.
    Answer,
    /// By himself.
    Announcement,
}

const ARP: [u8; 2] = [0x08, 0x06];
const ADVERTISEMENT: u8 = 136;
const SOLICITED: u8 = 0x40;

/// Claims of an address, in the order of frames. A frame counts only where it entered: where its sender's link address is that of
/// the place.
pub fn claims(frames: &[Frame], address: &str, links: &[[u8; 6]]) -> Vec<Claim> {
    let address: IpAddr = address.parse().unwrap();
    let claim = |frame: &Frame| {
        let (bytes, link) = (&frame.bytes, <[u8; 6]>::try_from(frame.bytes.get(6..12)?).ok()?);
        let (target, kind) = if bytes.get(12..14)? == ARP { arp(&bytes[14..])? } else { advertisement(bytes)? };
        let entered = links.get(frame.place) == Some(&link);
        (target == address && entered).then_some(Claim { time: frame.time, place: frame.place, link, kind })
    };
    frames.iter().filter_map(claim).collect()
}

/// RFC 826, and RFC 5227 for announcements, which are requests or replies for one's own address.
fn arp(bytes: &[u8]) -> Option<(IpAddr, Kind)> {
    let address = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?));
    let (operation, sender, target) = (u16::from_be_bytes([bytes[6], bytes[7]]), address(14)?, address(24)?);
    let kind = match (operation, sender == target) {
        (_, true) => Kind::Announcement,
        (2, false) => Kind::Answer,
        _ => return None,
    };
    Some((sender.into(), kind))
}

/// RFC 4861, section 4.4.
fn advertisement(frame: &[u8]) -> Option<(IpAddr, Kind)> {
    let packet = Packet::in_frame(frame)?;
    let message = packet.payload.get(..24).filter(|message| packet.protocol == 58 && message[0] == ADVERTISEMENT)?;
    let target = Ipv6Addr::from(<[u8; 16]>::try_from(&message[8..24]).ok()?);
    let kind = if message[4] & SOLICITED == 0 { Kind::Announcement } else { Kind::Answer };
    Some((target.into(), kind))
}
