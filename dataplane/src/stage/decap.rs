//! VXLAN decapsulation (RFC 7348) of packets from other gateways and from nodes of the overlay network.
//!
//! A gateway's packet continues as if it had arrived here on the side on which that gateway received it; a node's, as
//! if its pod were on the inside interface. Only known gateways and nodes are accepted, only on interfaces that route
//! to them, and a node's packet only with a source address of its own pods. Nothing is decapsulated twice.

use std::net::IpAddr;

use vipgate_mem::prefetch_read;

use crate::flow::address::of_family;
use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{InterfaceId, NodeId, TunnelRemote};
use crate::flow::tunnel_metadata::TunnelMetadata;
use crate::flow::verdict::Verdict;
use crate::io::Received;
use crate::io::batch::{Batch, PacketSet};
use crate::observe::counters::Counters;
use crate::policy::Snapshot;
use crate::policy::network::Network;
use crate::policy::spec::Role;
use crate::policy::tunnels::Tunnels;
use crate::wire::ethernet::{Mac, MacPair};
use crate::wire::vxlan::{self, InnerFrame, PlainHeaders};
use crate::wire::{ethernet, ipv4, ipv6, tunnel_echo, u16_at};

/// Decapsulates the tunnel packets of the batch; returns those that were accepted, without echoes.
pub fn run(batch: &mut Batch, snapshot: &Snapshot, counters: &Counters) -> PacketSet {
    let tunnels = &*snapshot.tunnels;
    let (from_gateways, from_nodes) = (tunnels.accepts_gateways(), tunnels.accepts_nodes());
    if !from_gateways && !from_nodes {
        return PacketSet::default();
    }
    let (mut of_gateways, mut of_nodes) = (PacketSet::default(), PacketSet::default());
    for i in batch.undecided {
        let received = &batch.frames[i];
        if received.is_from_peer() {
            continue;
        }
        let frame = received.frame.bytes();
        if from_gateways && tunnels.is_gateway_packet(frame) {
            of_gateways.insert(i);
        } else if from_nodes && tunnels.is_overlay_packet(frame) {
            of_nodes.insert(i);
        } else {
            continue;
        }
        // The device has fetched the outer headers only.
        prefetch_read(frame, vxlan::PLAIN_HEADERS);
    }
    let (mut packet_count, mut bytes_total) = (0, 0);
    for i in of_gateways {
        let received = &mut batch.frames[i];
        let bytes = u64::from(received.frame.len());
        let result = from_gateway_plain(received, snapshot).unwrap_or_else(|| from_gateway(received, snapshot));
        match result {
            Ok(()) => (packet_count, bytes_total) = (packet_count + 1, bytes_total + bytes),
            Err(reason) => batch.decide(i, Verdict::Drop(reason)),
        }
    }
    for i in of_nodes {
        match from_node(&mut batch.frames[i], snapshot) {
            Ok(NodePacket::Decapsulated) => {}
            Ok(NodePacket::Echo(node)) => batch.mark_tunnel_echo(i, node),
            Err(reason) => batch.decide(i, Verdict::Drop(reason)),
        }
    }
    counters.forwarded(Direction::PeerIn, packet_count, bytes_total);
    of_gateways.or(of_nodes).and(batch.undecided).without(batch.tunnel_echoes)
}

/// A tunnel packet addressed to this gateway.
#[derive(Clone, Copy, Debug)]
struct TunnelPacket {
    inner: InnerFrame,
    /// Outer source address.
    sender: IpAddr,
    traffic_class: u8,
}

/// As [`from_gateway`], for the common packet: over IPv4, whole, and from an address that one gateway has. `None`, with
/// nothing done, for all others.
#[inline]
fn from_gateway_plain(received: &mut Received, snapshot: &Snapshot) -> Option<Result<(), DropReason>> {
    let (frame, interface) = (received.frame.bytes(), received.interface);
    let first: &[u8; vxlan::PLAIN_HEADERS] = frame.first_chunk()?;
    let is_ipv4 = u16_at(first, ethernet::ETHERTYPE) == ethernet::IPV4;
    if !is_ipv4 || !snapshot.network.interface_entry(interface).is_destination(first) {
        return None;
    }
    let PlainHeaders { inner, sender, traffic_class } = vxlan::parse_plain(first, frame.len())?;
    let mark = TunnelMetadata::of_vni(inner.vni)?;
    let kind = u16_at(first, vxlan::PLAIN_HEADERS - 2);
    if traffic_class & ECN_CE == ECN_CE || !matches!(kind, ethernet::IPV4 | ethernet::IPV6) {
        return None;
    }
    let source = snapshot.tunnels.only_source(sender).filter(|source| source.passes_reverse_path(interface))?;
    if !source.is_authentic(frame.get(inner.offset..inner.offset + inner.length)?, inner.vni) {
        return Some(Err(DropReason::PeerUnauthenticated));
    }
    let macs: MacPair = *first.first_chunk()?;
    let bytes = received.frame.bytes_mut();
    *bytes.get_mut(inner.offset..)?.first_chunk_mut()? = macs;
    received.frame.set_packet(received.frame.start() + inner.offset as u16, inner.length as u16);
    received.mark_from_peer(mark);
    Some(Ok(()))
}

/// Decapsulates a packet from another gateway and restores the sides and the hop count of its VNI.
#[inline(never)]
fn from_gateway(received: &mut Received, snapshot: &Snapshot) -> Result<(), DropReason> {
    let outer = parse_tunnel_packet(received, &snapshot.network)?;
    let mark = TunnelMetadata::of_vni(outer.inner.vni).ok_or(DropReason::PeerUnknown)?;
    authenticate(&outer, received.frame.bytes(), received.interface, &snapshot.tunnels)?;
    // The inner MAC addresses may be an authentication tag: with the outer ones, a capture shows which gateway sent
    // the packet.
    strip_outer::<{ size_of::<MacPair>() }>(received, &outer)?;
    received.mark_from_peer(mark);
    Ok(())
}

/// Authenticates a packet from another gateway. Several gateways may share the sender's address: any of them will do.
#[inline]
fn authenticate(
    &TunnelPacket { inner, sender, .. }: &TunnelPacket,
    frame: &[u8],
    interface: InterfaceId,
    tunnels: &Tunnels,
) -> Result<(), DropReason> {
    let packet = frame.get(inner.offset..inner.offset + inner.length).ok_or(DropReason::Malformed)?;
    let mut reason = DropReason::PeerUnknown;
    for sender in tunnels.sources(sender).filter(|sender| sender.passes_reverse_path(interface)) {
        if sender.is_authentic(packet, inner.vni) {
            return Ok(());
        }
        reason = DropReason::PeerUnauthenticated;
    }
    Err(reason)
}

/// An accepted packet from a node.
#[derive(Clone, Copy, Debug)]
enum NodePacket {
    /// A pod's packet, without the outer headers.
    Decapsulated,
    /// An echo of this node, unchanged.
    Echo(NodeId),
}

/// Decapsulates a packet from a node. The node must be known by address and VNI and be routed over this interface,
/// which must be an inside one; the inner source must be a pod of that node, with its MAC address if that is a
/// secret. An echo is left to `tunnel_echo`.
fn from_node(received: &mut Received, snapshot: &Snapshot) -> Result<NodePacket, DropReason> {
    let outer = parse_tunnel_packet(received, &snapshot.network)?;
    let node = snapshot.policy.nodes().by_address(outer.sender).filter(|(_, node)| node.vni == outer.inner.vni);
    let is_inside = snapshot.network.interface_entry(received.interface).sides & Role::Inside.sides() != 0;
    let (id, node) = node.filter(|_| is_inside).ok_or(DropReason::PeerUnknown)?;
    let tunnel = snapshot.tunnels.to(TunnelRemote::Node(id));
    if !tunnel.is_some_and(|tunnel| tunnel.passes_reverse_path(received.interface)) {
        return Err(DropReason::PeerUnknown);
    }
    let frame = received.frame.bytes();
    if node.verify_mac && frame.get(outer.inner.offset..).and_then(ethernet::source) != Some(node.mac) {
        return Err(DropReason::PeerUnauthenticated);
    }
    if u16_at(frame, outer.inner.offset + ethernet::ETHERTYPE) == tunnel_echo::ETHERTYPE {
        return Ok(NodePacket::Echo(id));
    }
    strip_outer::<{ size_of::<Mac>() }>(received, &outer)?;
    let (source, _) = source_and_class(received.frame.bytes()).ok_or(DropReason::Malformed)?;
    let owner = of_family!(source, it => snapshot.policy.node_of(it));
    if owner != Some(id) {
        return Err(DropReason::SpoofedSource);
    }
    if node.sends_covered_only {
        received.mark_covered_only();
    }
    Ok(NodePacket::Decapsulated)
}

/// Parses a tunnel packet addressed to this gateway.
fn parse_tunnel_packet(received: &Received, network: &Network) -> Result<TunnelPacket, DropReason> {
    let frame = received.frame.bytes();
    if !network.interface_entry(received.interface).is_destination(frame) {
        return Err(DropReason::NotOurs);
    }
    let inner = vxlan::parse(frame).ok_or(DropReason::Malformed)?;
    let (sender, traffic_class) = source_and_class(frame).ok_or(DropReason::Malformed)?;
    Ok(TunnelPacket { inner, sender, traffic_class })
}

/// Strips the outer headers. The inner Ethernet header gets the first `COPIED` bytes of the outer one's MAC addresses,
/// so the frame is addressed to this gateway.
fn strip_outer<const COPIED: usize>(received: &mut Received, outer: &TunnelPacket) -> Result<(), DropReason> {
    let TunnelPacket { inner, traffic_class, .. } = *outer;
    let frame = received.frame.bytes_mut();
    let addresses = *frame.first_chunk::<COPIED>().ok_or(DropReason::Malformed)?;
    let packet = frame.get_mut(inner.offset..inner.offset + inner.length).ok_or(DropReason::Malformed)?;
    let header = packet.first_chunk_mut::<{ ethernet::HEADER }>().ok_or(DropReason::Malformed)?;
    let (_, kind) = ethernet::parse(header);
    if kind != ethernet::IPV4 && kind != ethernet::IPV6 {
        return Err(DropReason::Malformed);
    }
    header[..COPIED].copy_from_slice(&addresses);
    if traffic_class & ECN_CE == ECN_CE {
        propagate_ce(packet);
    }
    let start = received.frame.start() + inner.offset as u16;
    received.frame.set_packet(start, inner.length as u16);
    Ok(())
}

/// ECN field of congestion experienced, CE (RFC 3168).
const ECN_CE: u8 = 3;

/// Source address and traffic class of a packet.
fn source_and_class(frame: &[u8]) -> Option<(IpAddr, u8)> {
    let packet = frame.get(ethernet::HEADER..)?;
    if packet.first()? >> 4 == 4 {
        let source: &[u8; 4] = packet.get(ipv4::ADDRESSES..)?.first_chunk()?;
        Some((IpAddr::from(*source), packet[1]))
    } else {
        let source: &[u8; 16] = packet.get(ipv6::ADDRESSES..)?.first_chunk()?;
        Some((IpAddr::from(*source), packet[0] << 4 | packet[1] >> 4))
    }
}

/// Copies CE from the outer header to the inner one, if that is ECN-capable (RFC 6040 section 4.2).
#[cold]
fn propagate_ce(frame: &mut [u8]) {
    let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
    if packet.first().is_some_and(|first| first >> 4 == 4) {
        ipv4::set_ce(packet);
    } else {
        ipv6::set_ce(packet);
    }
}
