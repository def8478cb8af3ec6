//! Seventh stage: addresses, ports, TTL and checksums, updated in place (RFC 1624); the session hears of the packet.

use crate::address::V6;
use crate::batch::{Batch, Head, IpVersion, Kind, Way};
use crate::counters::DropReason;
use crate::session::entry::Slot;
use crate::session::tuple::Tuple;
use crate::session::{SessionFamily, Sessions};
use crate::snapshot::network::{Network, NextHop, NoRoute};
use crate::time::Tick;
use crate::verdict::Verdict;
use crate::wire::checksum::Delta;
use crate::wire::{ethernet, icmp, ipv4, ipv6, set_u16, tcp, u16_at, udp};

/// Rewrites every packet that goes on, and says where it goes next.
pub fn run(batch: &mut Batch, sessions: &mut Sessions, network: &Network, now: Tick) {
    for i in batch.open_packets() {
        if batch.heads[i].ttl <= 1 {
            batch.decide(i, Verdict::Drop(DropReason::Ttl));
            continue;
        }
        let hop = match (batch.ways[i], batch.heads[i].version) {
            (Way::Session(slot), IpVersion::V4) => translate::<u32>(batch, i, slot, sessions, network, now),
            (Way::Session(slot), IpVersion::V6) => translate::<V6>(batch, i, slot, sessions, network, now),
            (Way::Unchanged, IpVersion::V4) => {
                decrement_ttl(batch.frames[i].frame.bytes_mut());
                network.next_hop(batch.v4[i].destination, batch.hashes[i])
            }
            (Way::Unchanged, IpVersion::V6) => {
                decrement_hop_limit(batch.frames[i].frame.bytes_mut());
                network.next_hop(batch.v6[i].destination, batch.hashes[i])
            }
            (way, version) => unreachable!("an undecided packet has a way: {way:?}, {version:?}"),
        };
        match hop {
            Ok(hop) => batch.hops[i] = Some(hop),
            Err(NoRoute) => batch.decide(i, Verdict::Drop(DropReason::NoRoute)),
        }
    }
}

/// An address family that knows how it lies in a packet.
trait OnWire: SessionFamily {
    /// Writes addresses, checksum of the header and TTL.
    fn write_header(packet: &mut [u8], to: &Tuple<Self>, delta: Delta);
}

impl OnWire for u32 {
    #[inline]
    fn write_header(packet: &mut [u8], to: &Tuple<Self>, delta: Delta) {
        let Some(header) = packet.first_chunk_mut::<{ ipv4::HEADER }>() else { return };
        let checksum = u16_at(header, ipv4::CHECKSUM);
        header[ipv4::TTL] -= 1;
        set_u16(header, ipv4::CHECKSUM, delta.and(Delta::TTL_DECREMENT).apply(checksum));
        header[ipv4::ADDRESSES..ipv4::ADDRESSES + 4].copy_from_slice(&to.source.to_be_bytes());
        header[ipv4::ADDRESSES + 4..].copy_from_slice(&to.destination.to_be_bytes());
    }
}

impl OnWire for V6 {
    #[inline]
    fn write_header(packet: &mut [u8], to: &Tuple<Self>, _: Delta) {
        let Some(header) = packet.first_chunk_mut::<{ ipv6::HEADER }>() else { return };
        header[ipv6::HOP_LIMIT] -= 1;
        header[ipv6::ADDRESSES..ipv6::ADDRESSES + 16].copy_from_slice(&to.source.to_bits().to_be_bytes());
        header[ipv6::ADDRESSES + 16..].copy_from_slice(&to.destination.to_bits().to_be_bytes());
    }
}

#[inline]
fn translate<A: OnWire>(
    batch: &mut Batch,
    i: usize,
    slot: Slot,
    sessions: &mut Sessions,
    network: &Network,
    now: Tick,
) -> Result<NextHop, NoRoute> {
    let head = batch.heads[i];
    let hash = batch.hashes[i];
    if head.kind == Kind::Tcp {
        sessions.note_segment::<A>(slot, &batch.segments[i], now);
    }
    let entry = A::table_mut(sessions).entry_mut(slot);
    let to = entry.to();
    let hop = if let Some(hop) = entry.next_hop() {
        NextHop::Known(hop)
    } else {
        let hop = network.next_hop(to.destination, hash)?;
        if let NextHop::Known(number) = hop {
            entry.set_next_hop(Some(number));
        }
        hop
    };
    entry.count(head.length + LINK_HEADER, now);
    batch.directions[i] = entry.direction();
    let (ip_delta, l4_delta) = (entry.ip_delta(), entry.l4_delta());
    let packet = &mut batch.frames[i].frame.bytes_mut()[ethernet::HEADER..];
    A::write_header(packet, &to, ip_delta);
    write_payload(&mut packet[usize::from(head.l4 - LINK_HEADER)..], head, &to, l4_delta);
    Ok(hop)
}

const LINK_HEADER: u16 = ethernet::HEADER as u16;

/// Writes ports, or the identifier, and the checksum over them.
#[inline]
fn write_payload<A: SessionFamily>(payload: &mut [u8], head: Head, to: &Tuple<A>, delta: Delta) {
    let checksum_at = match head.kind {
        Kind::Tcp => tcp::CHECKSUM,
        Kind::Udp => udp::CHECKSUM,
        Kind::EchoRequest | Kind::EchoReply => icmp::CHECKSUM,
        Kind::Unread | Kind::Arp | Kind::Neighbour | Kind::Fragment | Kind::Other => return,
    };
    match head.kind {
        Kind::EchoRequest => set_u16(payload, icmp::IDENTIFIER, to.source_port),
        Kind::EchoReply => set_u16(payload, icmp::IDENTIFIER, to.destination_port),
        _ => {
            set_u16(payload, 0, to.source_port);
            set_u16(payload, 2, to.destination_port);
        }
    }
    let old = u16_at(payload, checksum_at);
    if head.kind == Kind::Udp {
        // Zero says that there is no checksum (RFC 768): it stays so, and a computed zero is written as its twin.
        if old != 0 {
            let new = delta.apply(old);
            set_u16(payload, checksum_at, if new == 0 { 0xffff } else { new });
        }
    } else {
        set_u16(payload, checksum_at, delta.apply(old));
    }
}

fn decrement_ttl(frame: &mut [u8]) {
    let Some(header) =
        frame.get_mut(ethernet::HEADER..).and_then(|packet| packet.first_chunk_mut::<{ ipv4::HEADER }>())
    else {
        return;
    };
    header[ipv4::TTL] -= 1;
    let checksum = u16_at(header, ipv4::CHECKSUM);
    set_u16(header, ipv4::CHECKSUM, Delta::TTL_DECREMENT.apply(checksum));
}

fn decrement_hop_limit(frame: &mut [u8]) {
    if let Some(hop_limit) = frame.get_mut(ethernet::HEADER + ipv6::HOP_LIMIT) {
        *hop_limit -= 1;
    }
}
