//! First of all: packets come out of their tunnels. Those that other gateways have sent here go on as if they had come in here on the
//! side that they came in on there, those of the overlay network's nodes as if their pods were on the link. Only known gateways and nodes
//! are believed, by the interfaces that lead to them, these only about their own pods, and nothing is unwrapped twice.

use std::net::IpAddr;

use crate::address::V6;
use crate::batch::Batch;
use crate::counters::{Counters, Direction, DropReason};
use crate::io::{InterfaceId, Received};
use crate::snapshot::Snapshot;
use crate::snapshot::network::Network;
use crate::snapshot::spec::Role;
use crate::snapshot::tunnels::{End, Mark, Tunnels};
use crate::verdict::Verdict;
use crate::wire::ethernet::{Link, Mac};
use crate::wire::vxlan::{self, Inner};
use crate::wire::{ethernet, ipv4, ipv6};

/// Unwraps the tunnel packets of the batch.
pub fn run(batch: &mut Batch, view: &Snapshot, counters: &Counters) {
    let tunnels = &*view.tunnels;
    let (from_gateways, from_nodes) = (tunnels.is_open(), tunnels.is_overlay_open());
    if !from_gateways && !from_nodes {
        return;
    }
    let (mut packets, mut sum) = (0, 0);
    for i in batch.open {
        let received = &mut batch.frames[i];
        if received.is_from_peer() {
            continue;
        }
        let bytes = u64::from(received.frame.len());
        let unwrapped = if from_gateways && tunnels.is_arrival(received.frame.bytes()) {
            from_gateway(received, view).map(|()| {
                packets += 1;
                sum += bytes;
            })
        } else if from_nodes && tunnels.is_overlay_arrival(received.frame.bytes()) {
            from_node(received, view)
        } else {
            continue;
        };
        if let Err(reason) = unwrapped {
            batch.decide(i, Verdict::Drop(reason));
        }
    }
    counters.forwarded(Direction::PeerIn, packets, sum);
}

/// A tunnel packet to this gateway.
#[derive(Clone, Copy, Debug)]
struct Opened {
    inner: Inner,
    /// Where it comes from.
    sender: IpAddr,
    traffic_class: u8,
}

/// A packet goes on as it came in at the gateway that has sent it.
fn from_gateway(received: &mut Received, view: &Snapshot) -> Result<(), DropReason> {
    let opened = open(received, &view.network)?;
    let mark = Mark::of_vni(opened.inner.vni).ok_or(DropReason::PeerUnknown)?;
    authenticate(&opened, received.frame.bytes(), received.interface, &view.tunnels)?;
    // The inner link addresses may be a tag: who captures sees who has sent it on.
    take_out::<{ size_of::<Link>() }>(received, &opened)?;
    received.arrive(mark.sides, mark.leg);
    Ok(())
}

/// Whether a gateway that sends from this address has sent what is in a frame; of several, any.
#[inline]
fn authenticate(
    &Opened { inner, sender, .. }: &Opened,
    frame: &[u8],
    interface: InterfaceId,
    tunnels: &Tunnels,
) -> Result<(), DropReason> {
    let packet = frame.get(inner.at..inner.at + inner.length).ok_or(DropReason::Malformed)?;
    let mut reason = DropReason::PeerUnknown;
    for sender in tunnels.senders(sender).filter(|sender| sender.may_come_by(interface)) {
        if sender.is_authentic(packet, inner.vni) {
            return Ok(());
        }
        reason = DropReason::PeerUnauthenticated;
    }
    Err(reason)
}

/// A packet goes on as if its pod were on the link: if the node is known, it came in where pods are and by where the node is, and the pod
/// is that node's.
fn from_node(received: &mut Received, view: &Snapshot) -> Result<(), DropReason> {
    let opened = open(received, &view.network)?;
    let node = view.policy.nodes().sender(opened.sender).filter(|(_, node)| node.vni == opened.inner.vni);
    let is_inside = view.network.port(received.interface).sides & Role::Inside.sides() != 0;
    let (id, _) = node.filter(|_| is_inside).ok_or(DropReason::PeerUnknown)?;
    let way = view.tunnels.to(End::Node(id));
    if !way.is_some_and(|way| way.may_come_by(received.interface)) {
        return Err(DropReason::PeerUnknown);
    }
    take_out::<{ size_of::<Mac>() }>(received, &opened)?;
    let owner = match outer(received.frame.bytes()).ok_or(DropReason::Malformed)?.0 {
        IpAddr::V4(v4) => view.policy.node_of(v4.to_bits()),
        IpAddr::V6(v6) => view.policy.node_of(V6::from_bits(v6.to_bits())),
    };
    if owner == Some(id) { Ok(()) } else { Err(DropReason::SpoofedSource) }
}

/// Reads a tunnel packet to this gateway.
fn open(received: &Received, network: &Network) -> Result<Opened, DropReason> {
    let frame = received.frame.bytes();
    if !network.port(received.interface).is_destination(frame) {
        return Err(DropReason::NotOurs);
    }
    let inner = vxlan::parse(frame).ok_or(DropReason::Malformed)?;
    let (sender, traffic_class) = outer(frame).ok_or(DropReason::Malformed)?;
    Ok(Opened { inner, sender, traffic_class })
}

/// Leaves of a tunnel packet what is in it: an IP packet, with the first bytes of the tunnel packet's own link addresses, so sent to
/// this gateway.
fn take_out<const LINK: usize>(received: &mut Received, opened: &Opened) -> Result<(), DropReason> {
    let Opened { inner, traffic_class, .. } = *opened;
    let frame = received.frame.bytes_mut();
    let addresses = *frame.first_chunk::<LINK>().ok_or(DropReason::Malformed)?;
    let packet = frame.get_mut(inner.at..inner.at + inner.length).ok_or(DropReason::Malformed)?;
    let link = packet.first_chunk_mut::<{ ethernet::HEADER }>().ok_or(DropReason::Malformed)?;
    let (_, kind) = ethernet::parse(link);
    if kind != ethernet::IPV4 && kind != ethernet::IPV6 {
        return Err(DropReason::Malformed);
    }
    link[..LINK].copy_from_slice(&addresses);
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
