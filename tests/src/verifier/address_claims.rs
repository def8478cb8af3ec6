//! Address claims on a segment: ARP and neighbor discovery.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::packet::Packet;
use super::pcap::Frame;

/// A host claims an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressClaim {
    /// Nanoseconds of the wall clock.
    pub time: u64,
    /// Number of the capture.
    pub capture: usize,
    /// The claimed MAC address.
    pub mac: [u8; 6],
    /// Reply or announcement.
    pub kind: ClaimKind,
}

/// Cause of an address claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimKind {
    /// Reply to an ARP request or neighbor solicitation.
    Reply,
    /// Gratuitous ARP or unsolicited neighbor advertisement.
    Announcement,
}

const ARP: [u8; 2] = [0x08, 0x06];
const ADVERTISEMENT: u8 = 136;
const SOLICITED: u8 = 0x40;

/// Claims of an address, in the order of frames. A frame counts only where it entered the segment: where its source
/// MAC address is that of the capture's gateway.
pub fn address_claims(frames: &[Frame], address: &str, macs: &[[u8; 6]]) -> Vec<AddressClaim> {
    let address: IpAddr = address.parse().unwrap();
    let claim = |frame: &Frame| {
        let (bytes, mac) = (&frame.bytes, <[u8; 6]>::try_from(frame.bytes.get(6..12)?).ok()?);
        let (target, kind) = if bytes.get(12..14)? == ARP { arp(&bytes[14..])? } else { advertisement(bytes)? };
        let entered = macs.get(frame.capture) == Some(&mac);
        (target == address && entered).then_some(AddressClaim { time: frame.time, capture: frame.capture, mac, kind })
    };
    frames.iter().filter_map(claim).collect()
}

/// Parses ARP (RFC 826). Announcements are requests or replies for the sender's own address (RFC 5227).
fn arp(bytes: &[u8]) -> Option<(IpAddr, ClaimKind)> {
    let address = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?));
    let (operation, sender, target) = (u16::from_be_bytes([bytes[6], bytes[7]]), address(14)?, address(24)?);
    let kind = match (operation, sender == target) {
        (_, true) => ClaimKind::Announcement,
        (2, false) => ClaimKind::Reply,
        _ => return None,
    };
    Some((sender.into(), kind))
}

/// Parses a neighbor advertisement (RFC 4861 section 4.4).
fn advertisement(frame: &[u8]) -> Option<(IpAddr, ClaimKind)> {
    let packet = Packet::in_frame(frame)?;
    let message = packet.payload.get(..24).filter(|message| packet.protocol == 58 && message[0] == ADVERTISEMENT)?;
    let target = Ipv6Addr::from(<[u8; 16]>::try_from(&message[8..24]).ok()?);
    let kind = if message[4] & SOLICITED == 0 { ClaimKind::Announcement } else { ClaimKind::Reply };
    Some((target.into(), kind))
}
