//! The short way for what almost every packet is: one of a session that is known, checked and routed, to which nothing
//! happens. It is translated in one pass, as soon as its entry has come from memory. All others are left to the stages behind,
//! which do the same and everything else; on the wire the order stays that of the batch.

use crate::batch::{Batch, Kind, Packets, PlainParts};
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::entry::{Entry, Flags};
use crate::snapshot::Snapshot;
use crate::stage::rewrite::{self, OnWire};
use crate::verdict::Verdict;
use crate::wire::{ethernet, tcp};

/// Whether nothing that has changed since concerns the session; then it counts as checked.
#[inline(never)]
fn refresh<A: OnWire>(entry: &mut Entry<A>, view: &Snapshot) -> bool {
    let (endpoint, remote, vip) = entry.parties();
    let holds = view.freshness.holds(entry.generation(), [endpoint, remote, vip]);
    if holds {
        entry.set_generation(view.generation);
    }
    holds
}

/// Translates the packets to whose sessions nothing happens.
#[inline(never)]
pub fn run<A: OnWire>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>) {
    let (exits, view) = (context.view.network.exits(), context.view);
    let table = A::table_mut(sessions);
    let packets = batch.open_of::<A>().and(batch.plain);
    let PlainParts { frames, heads, segments, keys, slots, directions, verdicts } = A::plain_parts(batch);
    let mut done = Packets::default();
    for i in packets {
        let head = heads[i];
        let entry = table.entry_mut(slots[i]);
        let flags = entry.flags();
        let known = entry.has_key(&keys[i]) && (entry.generation() == view.generation || refresh(entry, view));
        if !known || flags.has(Flags::QUARANTINED) || head.sides & flags.side() == 0 || head.ttl <= 1 {
            continue;
        }
        // Without a link address nothing fits.
        let Some(exit) = exits.get(usize::from(entry.next_hop_number().0)).filter(|exit| head.length <= exit.mtu)
        else {
            continue;
        };
        let Some(received) = frames.get_mut(i) else { continue };
        let frame = received.frame.bytes_mut();
        if head.kind == Kind::Tcp {
            let segment = &segments[i];
            if segment.flags.is_rare() {
                continue;
            }
            let Some(checksum) = A::tcp_checksum(frame) else { continue };
            rewrite::update(checksum, entry.l4_delta());
            let ack = segment.flags.has(tcp::Flags::ACK).then_some(segment.acknowledgement);
            entry.advance(segment.sequence.wrapping_add(segment.space), ack, false);
        }
        entry.count(frame.len() as u16, context.now);
        let Some((headers, transport)) = A::split(frame) else { continue };
        ethernet::set_link(headers, &exit.link);
        A::write_header(headers, entry);
        rewrite::write_ports(transport, entry.to_ports());
        if head.kind == Kind::Udp {
            rewrite::update_udp(transport, entry.l4_delta());
        }
        directions[i] = entry.direction();
        verdicts[i] = Verdict::Forward(exit.interface);
        done.insert(i);
    }
    batch.close(done);
}
