//! First of all: packets that other gateways have sent here come out of their tunnels, and go on as if they had come in here on the
//! side that they came in on there. Only known gateways are believed, and nothing is unwrapped twice.

use std::net::IpAddr;

use crate::batch::Batch;
use crate::counters::{Counters, Direction, DropReason};
use crate::io::Received;
use crate::snapshot::Snapshot;
use crate::snapshot::network::Network;
use crate::snapshot::tunnels::{Mark, Tunnels};
use crate::verdict::Verdict;
use crate::wire::{ethernet, ipv4, ipv6, vxlan};

/// Unwraps the tunnel packets of the batch.
pub fn run(batch: &mut Batch, view: &Snapshot, counters: &Counters) {
    let tunnels = &*view.tunnels;
    if !tunnels.is_open() {
        return;
    }
    for i in batch.open {
        let received = &mut batch.frames[i];
        if !tunnels.is_arrival(received.frame.bytes()) || received.is_from_peer() {
            continue;
        }
        let bytes = u64::from(received.frame.len());
        match unwrap(received, tunnels, &view.network) {
            Ok(()) => counters.forwarded(Direction::PeerIn, 1, bytes),
            Err(reason) => batch.decide(i, Verdict::Drop(reason)),
        }
    }
}

fn unwrap(received: &mut Received, tunnels: &Tunnels, network: &Network) -> Result<(), DropReason> {
    let mac = network.interface(received.interface).mac;
    let frame = received.frame.bytes_mut();
    if frame.get(..mac.len()) != Some(&mac[..]) {
        return Err(DropReason::NotOurs);
    }
    let inner = vxlan::parse(frame).ok_or(DropReason::Malformed)?;
    let (sender, traffic_class) = outer(frame).ok_or(DropReason::Malformed)?;
    let mark = Mark::of_vni(inner.vni).filter(|_| tunnels.sender(sender).is_some()).ok_or(DropReason::PeerUnknown)?;
    let packet = frame.get_mut(inner.at..inner.at + inner.length).ok_or(DropReason::Malformed)?;
    let link = packet.first_chunk_mut::<{ ethernet::HEADER }>().ok_or(DropReason::Malformed)?;
    let (_, kind) = ethernet::parse(link);
    if kind != ethernet::IPV4 && kind != ethernet::IPV6 {
        return Err(DropReason::Malformed);
    }
    link[..mac.len()].copy_from_slice(&mac);
    if traffic_class & CONGESTION == CONGESTION {
        note_congestion(packet);
    }
    let start = received.frame.start() + inner.at as u16;
    received.frame.place(start, inner.length as u16);
    received.arrive(mark.sides, mark.is_last);
    Ok(())
}

/// Both bits of ECN: congestion experienced.
const CONGESTION: u8 = 3;

/// Sender and traffic class of the outer packet, whose headers are checked.
fn outer(frame: &[u8]) -> Option<(IpAddr, u8)> {
    let packet = frame.get(ethernet::HEADER..)?;
    if packet.first()? >> 4 == 4 {
        let source: &[u8; 4] = packet.get(ipv4::ADDRESSES..)?.first_chunk()?;
        Some((IpAddr::from(*source), packet[1]))
    } else {
        let source: &[u8; 16] = packet.get(ipv6::ADDRESSES..)?.first_chunk()?;
        Some((IpAddr::from(*source), packet[0] << 4 | packet[1] >> 4))
    }
}

/// Congestion on the way through the tunnel is congestion on the packet's way (RFC 6040 section 4.2), if its ends know of it.
#[cold]
fn note_congestion(frame: &mut [u8]) {
    let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
    if packet.first().is_some_and(|first| first >> 4 == 4) {
        ipv4::note_congestion(packet);
    } else {
        ipv6::note_congestion(packet);
    }
}
