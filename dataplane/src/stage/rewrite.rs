//! Last stage: addresses, ports, TTL and checksums, updated in place (RFC 1624), and the link header; the session hears of
//! the packet. Nothing is refused any more.

use crate::address::V6;
use crate::batch::{Batch, Head, Kind, Lane};
use crate::counters::Direction;
use crate::ids::Ids;
use crate::io::{InterfaceId, Received};
use crate::link::outbox::Outbox;
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::entry::{self, Entry};
use crate::session::track::{self, Event, Noted, Place};
use crate::session::tuple::Tuple;
use crate::snapshot::Snapshot;
use crate::snapshot::network::{Network, NextHop};
use crate::stage::route;
use crate::time::Tick;
use crate::verdict::{Then, Verdict};
use crate::wire::checksum::Delta;
use crate::wire::plain::PlainFamily;
use crate::wire::tcp::Flags;
use crate::wire::{ethernet, icmp, ipv4, ipv6, mss, sctp, set_u16, tcp, u16_at, udp};

/// Rewrites every packet that goes on, and sends it on.
pub fn run<A: OnWire>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    ids: &mut Ids,
    outbox: &mut Outbox,
    context: &Context<'_>,
) {
    let Context { view, now, .. } = *context;
    let renumber = batch.known_of::<A>().and(batch.renumber);
    for i in batch.known_of::<A>() {
        let Some(hop) = route::session_hop::<A>(batch, i, sessions, view) else { continue };
        let (head, slot) = (batch.heads[i], batch.slots[i]);
        let noted = note::<A>(batch, i, sessions, now);
        if noted.event != Event::None {
            outbox.changed::<A>(slot, sessions, now);
        }
        if head.kind == Kind::Tcp
            && let Some(most) = context.rules.mss
            && batch.segments[i].flags.has(Flags::SYN)
        {
            clamp(&mut batch.frames[i], head, most.saturating_sub(A::HEADER - ipv4::HEADER as u16));
        }
        let entry = A::table_mut(sessions).entry_mut(slot);
        let mut seen = now;
        if noted.place == Place::OutOfWindow {
            context.counters.out_of_window.add(1);
            seen = entry.last_seen();
        } else if head.kind == Kind::Piece {
            // Its first fragment has kept the session alive, if it may.
            seen = entry.last_seen();
        }
        entry.count(head.length + LINK_HEADER, seen, view.generation);
        let frame = batch.frames[i].frame.bytes_mut();
        let Some((headers, payload)) = frame.split_at_mut_checked(head.l4.into()) else { continue };
        A::write_header(headers, entry);
        write_payload(payload, head.kind, entry.to_ports(), entry.l4_delta());
        let sent = send(headers, hop, &view.network);
        finish(batch, i, hop, sent, view);
    }
    // Those that were refused stay as they came.
    for i in renumber.without(batch.refused) {
        if matches!(batch.directions[i], Direction::Egress | Direction::ServiceReply) {
            self::renumber::<A>(batch, i, ids);
        }
    }
    for i in batch.open_of::<A>().and(batch.unchanged) {
        let Some(hop) = route::unchanged_hop::<A>(batch, i, view) else { continue };
        A::decrement_ttl(batch.frames[i].frame.bytes_mut());
        batch.directions[i] = Direction::Unchanged;
        send_on(batch, i, hop, view);
    }
}

/// Takes notice of a packet: what it does to its session.
#[inline]
fn note<A: OnWire>(batch: &Batch, i: usize, sessions: &mut Sessions, now: Tick) -> Noted {
    let slot = batch.slots[i];
    match batch.heads[i].kind {
        Kind::Tcp => sessions.note_segment::<A>(slot, &batch.segments[i], now),
        Kind::Sctp => sessions.note_association::<A>(slot, &batch.associations[i], now),
        // It says nothing of its transport: whatever its datagram proves, the first fragment has.
        Kind::Piece => Noted::NOTHING,
        _ => {
            let table = A::table_mut(sessions);
            if !table.entry(slot).flags().has(entry::Flags::SEEN) {
                track::note_first(table, slot);
            }
            Noted::NOTHING
        }
    }
}

/// Gives a packet of one of many who share a VIP an identification that is the VIP's.
pub fn renumber<A: OnWire>(batch: &mut Batch, i: usize, ids: &mut Ids) {
    let known = batch.frames[i].known().map(|known| known.translated_id);
    let Tuple { destination, protocol, .. } = A::tuples(batch)[i];
    let id = known.unwrap_or_else(|| ids.next(destination, protocol));
    A::renumber(batch.frames[i].frame.bytes_mut(), id);
}

/// Sends on a packet that is written but for its link header.
pub fn send_on(batch: &mut Batch, i: usize, hop: NextHop, view: &Snapshot) {
    let sent = send(batch.frames[i].frame.bytes_mut(), hop, &view.network);
    finish(batch, i, hop, sent, view);
}

/// Makes the maximum segment size that a SYN announces smaller.
#[cold]
fn clamp(received: &mut Received, head: Head, most: u16) {
    if let Some(segment) = received.frame.bytes_mut().get_mut(head.l4.into()..) {
        mss::clamp(segment, most);
    }
}

/// Writes the link header, and says where the frame leaves; `None` if it can't leave yet.
#[inline]
fn send(frame: &mut [u8], hop: NextHop, network: &Network) -> Option<InterfaceId> {
    let NextHop::Known(id) = hop else { return None };
    let hop = network.hop(id);
    ethernet::set_link(frame, &hop.link?);
    Some(hop.interface)
}

/// Ends a packet's way: it is sent, waits for its neighbour, or comes around. What goes into a tunnel has one more stage before it.
#[inline]
fn finish(batch: &mut Batch, i: usize, hop: NextHop, sent: Option<InterfaceId>, view: &Snapshot) {
    if let Some(interface) = sent {
        let whole = !batch.cut.contains(i);
        return batch.decide(i, if whole { Verdict::Forward(interface) } else { Verdict::Cut(interface) });
    }
    if let NextHop::Node(node) = hop {
        return batch.send_to_node(i, node);
    }
    let Some(wanted) = route::wanted(batch, i, hop, view) else {
        return batch.decide(i, Verdict::Around);
    };
    batch.wanted[i] = wanted;
    batch.decide(i, Verdict::Wait(if batch.cut.contains(i) { Then::Cut } else { Then::Forward }));
}

/// Bytes of the link header.
pub const LINK_HEADER: u16 = ethernet::HEADER as u16;

/// An address family that knows how it lies in a packet.
pub trait OnWire: Lane + PlainFamily {
    /// Bytes of the fixed header.
    const HEADER: u16;
    /// Writes addresses, checksum of the header and TTL of a frame.
    fn write_header(frame: &mut [u8], entry: &Entry<Self>);
    /// Counts down the TTL of a frame.
    fn decrement_ttl(frame: &mut [u8]);
    /// Gives the datagram in a frame another identification, if it has one.
    fn renumber(frame: &mut [u8], id: u32);
}

impl OnWire for u32 {
    const HEADER: u16 = ipv4::HEADER as u16;

    #[inline]
    fn write_header(frame: &mut [u8], entry: &Entry<Self>) {
        let Some(header) = ip_header::<{ ipv4::HEADER }>(frame) else { return };
        header[ipv4::TTL] = header[ipv4::TTL].wrapping_sub(1);
        update_at(header, ipv4::CHECKSUM, entry.ip_delta());
        header[ipv4::ADDRESSES..].copy_from_slice(bytemuck::bytes_of(&entry.to_addresses()));
    }

    fn decrement_ttl(frame: &mut [u8]) {
        let Some(header) = ip_header::<{ ipv4::HEADER }>(frame) else { return };
        header[ipv4::TTL] = header[ipv4::TTL].wrapping_sub(1);
        let checksum = u16_at(header, ipv4::CHECKSUM);
        set_u16(header, ipv4::CHECKSUM, Delta::TTL_DECREMENT.apply(checksum));
    }

    #[cold]
    fn renumber(frame: &mut [u8], id: u32) {
        let Some(header) = ip_header::<{ ipv4::HEADER }>(frame) else { return };
        let (old, new) = (u16_at(header, ipv4::IDENTIFICATION), id as u16);
        let checksum = u16_at(header, ipv4::CHECKSUM);
        set_u16(header, ipv4::IDENTIFICATION, new);
        set_u16(header, ipv4::CHECKSUM, Delta::of(old.into(), new.into()).apply(checksum));
    }
}

impl OnWire for V6 {
    const HEADER: u16 = ipv6::HEADER as u16;

    #[inline]
    fn write_header(frame: &mut [u8], entry: &Entry<Self>) {
        let Some(header) = ip_header::<{ ipv6::HEADER }>(frame) else { return };
        header[ipv6::HOP_LIMIT] = header[ipv6::HOP_LIMIT].wrapping_sub(1);
        header[ipv6::ADDRESSES..].copy_from_slice(bytemuck::bytes_of(&entry.to_addresses()));
    }

    fn decrement_ttl(frame: &mut [u8]) {
        let Some(header) = ip_header::<{ ipv6::HEADER }>(frame) else { return };
        header[ipv6::HOP_LIMIT] = header[ipv6::HOP_LIMIT].wrapping_sub(1);
    }

    #[cold]
    fn renumber(frame: &mut [u8], id: u32) {
        let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
        let header = ipv6::Header::parse(packet).ok().and_then(|header| header.fragment_header);
        let at = header.map(|header| usize::from(header.header_at) + ipv6::FragmentHeader::IDENTIFICATION);
        if let Some(field) = at.and_then(|at| packet.get_mut(at..at + 4)) {
            field.copy_from_slice(&id.to_be_bytes());
        }
    }
}

/// The fixed part of the IP header in a frame.
#[inline]
fn ip_header<const LENGTH: usize>(frame: &mut [u8]) -> Option<&mut [u8; LENGTH]> {
    frame.get_mut(ethernet::HEADER..).and_then(|packet| packet.first_chunk_mut())
}

/// Writes ports, or the identifier, and the checksum over them.
#[inline]
pub fn write_payload(payload: &mut [u8], kind: Kind, ports: [u8; 4], delta: Delta) {
    match kind {
        Kind::Tcp => {
            let Some(header) = payload.first_chunk_mut::<{ tcp::HEADER }>() else { return };
            write_ports(header, ports);
            update_at(header, tcp::CHECKSUM, delta);
        }
        Kind::Udp => {
            let Some(header) = payload.first_chunk_mut::<{ udp::HEADER }>() else { return };
            write_ports(header, ports);
            update_udp(header, delta);
        }
        Kind::EchoRequest | Kind::EchoReply => {
            let Some(header) = payload.first_chunk_mut::<{ icmp::HEADER }>() else { return };
            let identifier = u16_at(&ports, if kind == Kind::EchoRequest { 0 } else { 2 });
            set_u16(header, icmp::IDENTIFIER, identifier);
            update_at(header, icmp::CHECKSUM, delta);
        }
        Kind::Sctp => sctp::update_ports(payload, u16_at(&ports, 0), u16_at(&ports, 2)),
        Kind::Other | Kind::Arp | Kind::Neighbour | Kind::Error | Kind::Fragment | Kind::Piece => {}
    }
}

/// Writes the ports of TCP or UDP, as they stand in a packet.
#[inline]
pub fn write_ports(header: &mut [u8], ports: [u8; 4]) {
    if let Some(field) = header.first_chunk_mut() {
        *field = ports;
    }
}

/// Changes the checksum of UDP. Zero says that there is none (RFC 768): it stays so, and a computed zero is written as its twin.
#[inline]
pub fn update_udp(header: &mut [u8; udp::HEADER], delta: Delta) {
    let Some(field) = header.last_chunk_mut() else { return };
    let old = u16::from_ne_bytes(*field);
    if old != 0 {
        let new = delta.apply_in_place(old);
        *field = if new == 0 { 0xffff } else { new }.to_ne_bytes();
    }
}

/// Changes a checksum.
#[inline]
pub fn update(field: &mut [u8; 2], delta: Delta) {
    *field = delta.apply_in_place(u16::from_ne_bytes(*field)).to_ne_bytes();
}

#[inline]
fn update_at(header: &mut [u8], offset: usize, delta: Delta) {
    if let Some(field) = header.get_mut(offset..).and_then(|rest| rest.first_chunk_mut()) {
        update(field, delta);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_without_checksum_keeps_none_and_a_computed_zero_becomes_its_twin() {
        let mut bare = [0, 1, 0, 2, 0, 8, 0, 0];
        write_payload(&mut bare, Kind::Udp, [0, 3, 0, 4], Delta::of(3, 7));
        assert_eq!(bare, [0, 3, 0, 4, 0, 8, 0, 0]);
        let mut zero = [0, 1, 0, 2, 0, 8, 0x55, 0x55];
        write_payload(&mut zero, Kind::Udp, [0, 3, 0, 4], Delta(0x5555));
        assert_eq!(zero[6..], [0xff, 0xff]);
    }
}
