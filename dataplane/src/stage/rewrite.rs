//! Rewrites packets with a session: addresses, ports, TTL, checksums (updated in place, RFC 1624) and MAC addresses,
//! and updates the session's state. No packet is rejected once its rewrite has begun.

use crate::flow::address::V6;
use crate::flow::direction::Direction;
use crate::flow::ids::InterfaceId;
use crate::flow::time::Tick;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::{AfterResolution, Verdict};
use crate::io::Received;
use crate::io::batch::{Batch, PacketKind, ParsedHeader};
use crate::policy::Snapshot;
use crate::policy::network::{Network, NextHop};
use crate::replication::queue::ReplicationQueue;
use crate::session::Sessions;
use crate::session::entry::{self, Entry};
use crate::session::track::{self, StateChange, TrackOutcome, WindowPosition};
use crate::stage::context::{Context, PacketFamily};
use crate::stage::route;
use crate::wire::checksum::Delta;
use crate::wire::fast_parse::FastParse;
use crate::wire::ip_id::IpIdAllocator;
use crate::wire::tcp::Flags;
use crate::wire::{ethernet, icmp, ipv4, ipv6, mss, sctp, set_u16, tcp, u16_at, udp};

/// Rewrites every packet with a session, forwards it, and forwards those that policy leaves untranslated.
pub fn run<A: HeaderRewrite>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    ids: &mut IpIdAllocator,
    replication_queue: &mut ReplicationQueue,
    context: &Context<'_>,
) {
    let Context { snapshot, now, .. } = *context;
    let needs_new_ip_id = batch.validated_of::<A>().and(batch.new_ip_id);
    for i in batch.validated_of::<A>() {
        let Some(hop) = route::session_next_hop::<A>(batch, i, sessions, snapshot) else { continue };
        let (head, slot) = (batch.headers[i], batch.slots[i]);
        let milestones = A::table(sessions).entry(slot).milestones();
        let state_change = update_state::<A>(batch, i, sessions, now);
        if replication_queue.follows_progress() && state_change.position == WindowPosition::InWindow {
            let progress = A::table(sessions).entry(slot).progress_since(milestones);
            replication_queue.progressed::<A>(slot, progress, sessions, now);
        }
        if state_change.change != StateChange::None {
            replication_queue.changed::<A>(slot, sessions, now);
        }
        if head.kind == PacketKind::Tcp
            && let Some(max_mss) = context.rules.mss_clamp
            && batch.segments[i].flags.has(Flags::SYN)
        {
            clamp_mss(&mut batch.frames[i], head, max_mss.saturating_sub(A::HEADER - ipv4::HEADER as u16));
        }
        let entry = A::table_mut(sessions).entry_mut(slot);
        let mut last_seen = now;
        if state_change.position == WindowPosition::OutOfWindow {
            context.counters.out_of_window.add(1);
            last_seen = entry.last_seen();
        } else if head.kind == PacketKind::ResolvedFragment {
            // Only the first fragment refreshes the session's timeout.
            last_seen = entry.last_seen();
        }
        entry.count(head.ip_length + ETHERNET_HEADER, last_seen, snapshot.generation);
        let frame = batch.frames[i].frame.bytes_mut();
        let Some((headers, payload)) = frame.split_at_mut_checked(head.l4_offset.into()) else { continue };
        A::rewrite_ip_header(headers, entry);
        rewrite_transport(payload, head.kind, entry.translated_ports(), entry.l4_delta());
        let sent = write_macs(headers, hop, &snapshot.network);
        finish(batch, i, hop, sent, snapshot);
    }
    // A rejected packet must stay unmodified: it is quoted.
    for i in needs_new_ip_id.without(batch.rejected) {
        if matches!(batch.directions[i], Direction::Egress | Direction::ServiceReply) {
            rewrite_ip_id::<A>(batch, i, ids);
        }
    }
    for i in batch.undecided_of::<A>().and(batch.unchanged) {
        let Some(hop) = route::untranslated_next_hop::<A>(batch, i, snapshot) else { continue };
        A::decrement_ttl(batch.frames[i].frame.bytes_mut());
        batch.directions[i] = Direction::Unchanged;
        forward(batch, i, hop, snapshot);
    }
}

/// Updates the session's state: TCP and SCTP tracking, and the first packet of a direction.
#[inline]
fn update_state<A: HeaderRewrite>(batch: &Batch, i: usize, sessions: &mut Sessions, now: Tick) -> TrackOutcome {
    let slot = batch.slots[i];
    match batch.headers[i].kind {
        PacketKind::Tcp => sessions.track_segment::<A>(slot, &batch.segments[i], now),
        PacketKind::Sctp => sessions.track_association::<A>(slot, &batch.sctp_headers[i], now),
        // A later fragment has no transport header: the first fragment has updated the state.
        PacketKind::ResolvedFragment => TrackOutcome::UNCHANGED,
        _ => {
            let table = A::table_mut(sessions);
            if !table.entry(slot).flags().has(entry::Flags::SEEN) {
                track::track_first(table, slot);
            }
            TrackOutcome::UNCHANGED
        }
    }
}

/// Gives a packet an IP identification that is unique for its VIP, which several pods share.
pub fn rewrite_ip_id<A: HeaderRewrite>(batch: &mut Batch, i: usize, ids: &mut IpIdAllocator) {
    let of_datagram = batch.frames[i].datagram().map(|known| known.translated_id);
    let Tuple { destination, protocol, .. } = A::tuples(batch)[i];
    let id = of_datagram.unwrap_or_else(|| ids.next(destination, protocol));
    A::rewrite_ip_id(batch.frames[i].frame.bytes_mut(), id);
}

/// Translates a packet without a session, except for its MAC addresses.
pub fn translate<A: HeaderRewrite>(batch: &mut Batch, i: usize, to: Tuple<A>, direction: Direction) {
    batch.directions[i] = direction;
    let entry = Entry::new(A::tuples(batch)[i], to, direction, entry::Flags::default());
    let head = batch.headers[i];
    let frame = batch.frames[i].frame.bytes_mut();
    if let Some((headers, payload)) = frame.split_at_mut_checked(head.l4_offset.into()) {
        A::rewrite_ip_header(headers, &entry);
        rewrite_transport(payload, head.kind, entry.translated_ports(), entry.l4_delta());
    }
}

/// Forwards a packet that lacks only its MAC addresses.
pub fn forward(batch: &mut Batch, i: usize, hop: NextHop, snapshot: &Snapshot) {
    let sent = write_macs(batch.frames[i].frame.bytes_mut(), hop, &snapshot.network);
    finish(batch, i, hop, sent, snapshot);
}

/// Clamps the MSS of a SYN.
#[cold]
fn clamp_mss(received: &mut Received, head: ParsedHeader, max_mss: u16) {
    if let Some(segment) = received.frame.bytes_mut().get_mut(head.l4_offset.into()..) {
        mss::clamp(segment, max_mss);
    }
}

/// Writes the MAC addresses and returns the egress interface; `None` for a hairpin, for an overlay node, and if the
/// next hop's MAC address is unknown.
#[inline]
fn write_macs(frame: &mut [u8], hop: NextHop, network: &Network) -> Option<InterfaceId> {
    let NextHop::Neighbor(id) = hop else { return None };
    let hop = network.neighbor(id);
    ethernet::set_macs(frame, &hop.macs?);
    Some(hop.interface)
}

/// Sets a packet's verdict: forward, wait for its neighbor, or hairpin. A packet to an overlay node is left to encap.
#[inline]
fn finish(batch: &mut Batch, i: usize, hop: NextHop, sent: Option<InterfaceId>, snapshot: &Snapshot) {
    if let Some(interface) = sent {
        let is_whole = !batch.to_fragment.contains(i);
        return batch.decide(i, if is_whole { Verdict::Forward(interface) } else { Verdict::Fragment(interface) });
    }
    if let NextHop::Node(node) = hop {
        return batch.forward_to_node(i, node);
    }
    let Some(wanted) = route::unresolved_neighbor(batch, i, hop, snapshot) else {
        return batch.decide(i, Verdict::Hairpin);
    };
    batch.neighbors[i] = wanted;
    batch.decide(
        i,
        Verdict::AwaitNeighbor(if batch.to_fragment.contains(i) {
            AfterResolution::Fragment
        } else {
            AfterResolution::Forward
        }),
    );
}

/// Length of the Ethernet header, bytes.
pub const ETHERNET_HEADER: u16 = ethernet::HEADER as u16;

/// Rewriting of one address family's headers.
pub trait HeaderRewrite: PacketFamily + FastParse {
    /// Length of the fixed IP header, bytes.
    const HEADER: u16;
    /// Writes the translated addresses, decrements the TTL and updates the header checksum.
    fn rewrite_ip_header(frame: &mut [u8], entry: &Entry<Self>);
    /// Decrements the TTL of a frame.
    fn decrement_ttl(frame: &mut [u8]);
    /// Rewrites the IP identification of a frame, if it has one.
    fn rewrite_ip_id(frame: &mut [u8], id: u32);
}

impl HeaderRewrite for u32 {
    const HEADER: u16 = ipv4::HEADER as u16;

    #[inline]
    fn rewrite_ip_header(frame: &mut [u8], entry: &Entry<Self>) {
        let Some(header) = ip_header::<{ ipv4::HEADER }>(frame) else { return };
        header[ipv4::TTL] = header[ipv4::TTL].wrapping_sub(1);
        update_checksum_at(header, ipv4::CHECKSUM, entry.ip_delta());
        header[ipv4::ADDRESSES..].copy_from_slice(bytemuck::bytes_of(&entry.translated_addresses()));
    }

    fn decrement_ttl(frame: &mut [u8]) {
        let Some(header) = ip_header::<{ ipv4::HEADER }>(frame) else { return };
        header[ipv4::TTL] = header[ipv4::TTL].wrapping_sub(1);
        let checksum = u16_at(header, ipv4::CHECKSUM);
        set_u16(header, ipv4::CHECKSUM, Delta::TTL_DECREMENT.apply(checksum));
    }

    #[cold]
    fn rewrite_ip_id(frame: &mut [u8], id: u32) {
        let Some(header) = ip_header::<{ ipv4::HEADER }>(frame) else { return };
        let (old, new) = (u16_at(header, ipv4::IDENTIFICATION), id as u16);
        let checksum = u16_at(header, ipv4::CHECKSUM);
        set_u16(header, ipv4::IDENTIFICATION, new);
        set_u16(header, ipv4::CHECKSUM, Delta::of(old.into(), new.into()).apply(checksum));
    }
}

impl HeaderRewrite for V6 {
    const HEADER: u16 = ipv6::HEADER as u16;

    #[inline]
    fn rewrite_ip_header(frame: &mut [u8], entry: &Entry<Self>) {
        let Some(header) = ip_header::<{ ipv6::HEADER }>(frame) else { return };
        header[ipv6::HOP_LIMIT] = header[ipv6::HOP_LIMIT].wrapping_sub(1);
        header[ipv6::ADDRESSES..].copy_from_slice(bytemuck::bytes_of(&entry.translated_addresses()));
    }

    fn decrement_ttl(frame: &mut [u8]) {
        let Some(header) = ip_header::<{ ipv6::HEADER }>(frame) else { return };
        header[ipv6::HOP_LIMIT] = header[ipv6::HOP_LIMIT].wrapping_sub(1);
    }

    #[cold]
    fn rewrite_ip_id(frame: &mut [u8], id: u32) {
        let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
        let header = ipv6::Header::parse(packet).ok().and_then(|header| header.fragment_header);
        let at = header.map(|header| usize::from(header.header_offset) + ipv6::FragmentHeader::IDENTIFICATION);
        if let Some(field) = at.and_then(|at| packet.get_mut(at..at + 4)) {
            field.copy_from_slice(&id.to_be_bytes());
        }
    }
}

/// The fixed IP header of a frame.
#[inline]
fn ip_header<const LENGTH: usize>(frame: &mut [u8]) -> Option<&mut [u8; LENGTH]> {
    frame.get_mut(ethernet::HEADER..).and_then(|packet| packet.first_chunk_mut())
}

/// Writes ports, or the ICMP identifier, and updates the transport checksum.
#[inline]
pub fn rewrite_transport(payload: &mut [u8], kind: PacketKind, ports: [u8; 4], delta: Delta) {
    match kind {
        PacketKind::Tcp => {
            let Some(header) = payload.first_chunk_mut::<{ tcp::HEADER }>() else { return };
            write_ports(header, ports);
            update_checksum_at(header, tcp::CHECKSUM, delta);
        }
        PacketKind::Udp => {
            let Some(header) = payload.first_chunk_mut::<{ udp::HEADER }>() else { return };
            write_ports(header, ports);
            update_udp_checksum(header, delta);
        }
        PacketKind::EchoRequest | PacketKind::EchoReply => {
            let Some(header) = payload.first_chunk_mut::<{ icmp::HEADER }>() else { return };
            let identifier = u16_at(&ports, if kind == PacketKind::EchoRequest { 0 } else { 2 });
            set_u16(header, icmp::IDENTIFIER, identifier);
            update_checksum_at(header, icmp::CHECKSUM, delta);
        }
        PacketKind::Sctp => sctp::update_ports(payload, u16_at(&ports, 0), u16_at(&ports, 2)),
        PacketKind::Other
        | PacketKind::Arp
        | PacketKind::NeighborDiscovery
        | PacketKind::IcmpError
        | PacketKind::Fragment
        | PacketKind::ResolvedFragment => {}
    }
}

/// Writes the ports of TCP or UDP, in network order.
#[inline]
pub fn write_ports(header: &mut [u8], ports: [u8; 4]) {
    if let Some(field) = header.first_chunk_mut() {
        *field = ports;
    }
}

/// Updates the checksum of UDP. Zero means none (RFC 768) and stays; a computed zero is written as 0xffff.
#[inline]
pub fn update_udp_checksum(header: &mut [u8; udp::HEADER], delta: Delta) {
    let Some(field) = header.last_chunk_mut() else { return };
    let old = u16::from_ne_bytes(*field);
    if old != 0 {
        let new = delta.apply_in_place(old);
        *field = if new == 0 { 0xffff } else { new }.to_ne_bytes();
    }
}

#[inline]
pub fn update_checksum(field: &mut [u8; 2], delta: Delta) {
    *field = delta.apply_in_place(u16::from_ne_bytes(*field)).to_ne_bytes();
}

#[inline]
fn update_checksum_at(header: &mut [u8], offset: usize, delta: Delta) {
    if let Some(field) = header.get_mut(offset..).and_then(|rest| rest.first_chunk_mut()) {
        update_checksum(field, delta);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_udp_datagram_without_checksum_keeps_none_and_a_computed_zero_becomes_0xffff() {
        let mut without_checksum = [0, 1, 0, 2, 0, 8, 0, 0];
        rewrite_transport(&mut without_checksum, PacketKind::Udp, [0, 3, 0, 4], Delta::of(3, 7));
        assert_eq!(without_checksum, [0, 3, 0, 4, 0, 8, 0, 0]);
        let mut with_zero_sum = [0, 1, 0, 2, 0, 8, 0x55, 0x55];
        rewrite_transport(&mut with_zero_sum, PacketKind::Udp, [0, 3, 0, 4], Delta(0x5555));
        assert_eq!(with_zero_sum[6..], [0xff, 0xff]);
    }
}
