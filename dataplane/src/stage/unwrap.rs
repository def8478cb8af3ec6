//! First of all: packets come out of their tunnels. Those that other gateways have sent here go on as if they had come in here on the
//! side that they came in on there, those of the overlay network's nodes as if their pods were on the link. Only known gateways and nodes
//! are believed, by the interfaces that lead to them, these only about their own pods, and nothing is unwrapped twice.

use std::net::IpAddr;

use crate::address::V6;
use crate::batch::Batch;
use crate::counters::{Counters, Direction, DropReason};
use crate::io::Received;
use crate::snapshot::Snapshot;
use crate::snapshot::network::Network;
use crate::snapshot::spec::Role;
use crate::snapshot::tunnels::{End, Mark};
use crate::verdict::Verdict;
use crate::wire::vxlan::{self, Inner};
use crate::wire::{ethernet, ipv4, ipv6};

/// Unwraps the tunnel packets of the batch.
pub fn run(batch: &mut Batch, view: &Snapshot, counters: &Counters) {
    let tunnels = &*view.tunnels;
    let (from_gateways, from_nodes) = (tunnels.is_open(), tunnels.is_overlay_open());
    if !from_gateways && !from_nodes {
        return;
    }
    for i in batch.open {
        let received = &mut batch.frames[i];
        if received.is_from_peer() {
            continue;
        }
        let bytes = u64::from(received.frame.len());
        let unwrapped = if from_gateways && tunnels.is_arrival(received.frame.bytes()) {
            from_gateway(received, view).map(|()| counters.forwarded(Direction::PeerIn, 1, bytes))
        } else if from_nodes && tunnels.is_overlay_arrival(received.frame.bytes()) {
            from_node(received, view)
        } else {
            continue;
        };
        if let Err(reason) = unwrapped {
            batch.decide(i, Verdict::Drop(reason));
        }
    }
}

/// A packet goes on as it came in at the gateway that has sent it.
fn from_gateway(received: &mut Received, view: &Snapshot) -> Result<(), DropReason> {
    let (inner, sender) = open(received, &view.network)?;
    let way = view.tunnels.sender(sender).filter(|way| way.may_come_by(received.interface));
    let (way, mark) = way.zip(Mark::of_vni(inner.vni)).ok_or(DropReason::PeerUnknown)?;
    let frame = received.frame.bytes();
    let packet = frame.get(inner.at..inner.at + inner.length).ok_or(DropReason::Malformed)?;
    if !way.is_authentic(packet, inner.vni) {
        return Err(DropReason::PeerUnauthenticated);
    }
    let sender = ethernet::source(frame).unwrap_or_default();
    take_out(received, inner, &view.network)?;
    // The inner link addresses may be a tag: who captures sees who has sent it on.
    received.frame.bytes_mut()[sender.len()..2 * sender.len()].copy_from_slice(&sender);
    received.arrive(mark.sides, mark.leg);
    Ok(())
}

/// A packet goes on as if its pod were on the link: if the node is known, it came in where pods are and by where the node is, and the pod
/// is that node's.
fn from_node(received: &mut Received, view: &Snapshot) -> Result<(), DropReason> {
    let (inner, sender) = open(received, &view.network)?;
    let node = view.policy.nodes().sender(sender).filter(|(_, node)| node.vni == inner.vni);
    let is_inside = view.network.port(received.interface).sides & Role::Inside.sides() != 0;
    let (id, _) = node.filter(|_| is_inside).ok_or(DropReason::PeerUnknown)?;
    let way = view.tunnels.to(End::Node(id));
    if !way.is_some_and(|way| way.may_come_by(received.interface)) {
        return Err(DropReason::PeerUnknown);
    }
    take_out(received, inner, &view.network)?;
    let owner = match outer(received.frame.bytes()).ok_or(DropReason::Malformed)?.0 {
        IpAddr::V4(v4) => view.policy.node_of(v4.to_bits()),
        IpAddr::V6(v6) => view.policy.node_of(V6::from_bits(v6.to_bits())),
    };
    if owner == Some(id) { Ok(()) } else { Err(DropReason::SpoofedSource) }
}

/// What is in a tunnel packet to this gateway, and its sender.
fn open(received: &Received, network: &Network) -> Result<(Inner, IpAddr), DropReason> {
    let mac = network.interface(received.interface).mac;
    let frame = received.frame.bytes();
    if frame.get(..mac.len()) != Some(&mac[..]) {
        return Err(DropReason::NotOurs);
    }
    let inner = vxlan::parse(frame).ok_or(DropReason::Malformed)?;
    let (sender, _) = outer(frame).ok_or(DropReason::Malformed)?;
    Ok((inner, sender))
}

/// Leaves of a tunnel packet what is in it: an IP packet, as if it were sent to this gateway's own link address.
fn take_out(received: &mut Received, inner: Inner, network: &Network) -> Result<(), DropReason> {
    let mac = network.interface(received.interface).mac;
    let frame = received.frame.bytes_mut();
    let (_, traffic_class) = outer(frame).ok_or(DropReason::Malformed)?;
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
    Ok(())
}

/// Both bits of ECN: congestion experienced.
const CONGESTION: u8 = 3;

/// Sender and traffic class of a packet.
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
