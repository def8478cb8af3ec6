//! The short way for what almost every packet is: one of a session that is known, checked and routed, to which nothing
//! happens. It is translated in one pass, as soon as its entry has come from memory. All others are left to the stages behind,
//! which do the same and everything else; on the wire the order stays that of the batch.

use crate::batch::{Batch, Kind, Packets, PlainParts};
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::entry::{Entry, Flags, Slot};
use crate::session::key::Key;
use crate::snapshot::Snapshot;
use crate::snapshot::freshness::Parties;
use crate::stage::recheck;
use crate::stage::rewrite::{self, OnWire};
use crate::verdict::Verdict;
use crate::watch::tap::{Near, Tap};
use crate::wire::{ethernet, tcp};

/// Packets of a batch whose sessions were checked against an older policy, from which on it is cheaper to look at all.
const RESTLESS: u32 = 8;

/// Whether nothing that has changed since the session was checked concerns it.
#[inline]
fn is_current<A: OnWire>(entry: &Entry<A>, view: &Snapshot) -> bool {
    let parties = entry.parties();
    view.freshness.holds(entry.generation(), parties) || stands(entry, parties, view)
}

/// Whether the policy in force wants the session as it is, though its endpoint, or one that is taken for it, has changed. Nothing
/// else has, so its packets go where they went.
#[cold]
#[inline(never)]
fn stands<A: OnWire>(entry: &Entry<A>, parties: Parties<A>, view: &Snapshot) -> bool {
    view.freshness.holds_beside_endpoint(entry.generation(), parties) && recheck::is_wanted(entry, &view.policy)
}

/// Translates the packets to whose sessions nothing happens. What may be captured is left: this way makes no copies.
pub fn run<A: OnWire>(batch: &mut Batch, sessions: &mut Sessions, tap: Option<&Tap>, context: &Context<'_>) {
    if batch.open_of::<A>().and(batch.plain).is_empty() || context.is_lapsed {
        return;
    }
    match tap.map_or(&Near::Nobody, Tap::near::<A>) {
        Near::Nobody => run_beside::<A>(batch, sessions, |_, _| false, context),
        Near::In(prefix) => run_beside::<A>(batch, sessions, |key, entry| prefix.has_address_of(key, entry), context),
        Near::At(port) => run_beside::<A>(batch, sessions, |key, entry| port.has_port_of(key, entry), context),
        Near::Of(protocol) => run_beside::<A>(batch, sessions, |key, _| key.protocol() == *protocol, context),
        Near::Everybody => {}
    }
}

/// The same, without those that are near.
fn run_beside<A: OnWire>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    is_near: impl Fn(&Key<A>, &Entry<A>) -> bool,
    context: &Context<'_>,
) {
    // While policy changes, the sessions of some packets were checked against the one in force, and those of others weren't: no
    // processor guesses which. Then, all are looked at; otherwise only those that weren't.
    if batch.restless {
        translate::<A, true>(batch, sessions, is_near, context);
    } else {
        translate::<A, false>(batch, sessions, is_near, context);
    }
}

#[inline(never)]
fn translate<A: OnWire, const LOOK: bool>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    is_near: impl Fn(&Key<A>, &Entry<A>) -> bool,
    context: &Context<'_>,
) {
    let (exits, view, in_force) = (context.view.network.exits(), context.view, context.view.generation);
    let glance = view.freshness.glance();
    let mut behind = 0;
    let table = A::table_mut(sessions);
    let packets = batch.open_of::<A>().and(batch.plain);
    let PlainParts { frames, heads, segments, keys, slots, directions, verdicts } = A::plain_parts(batch);
    let mut done = Packets::default();
    // Slots, modulo 64, of sessions of which a packet was left that may change what both directions are: what is behind it in either
    // must not overtake it.
    let mut left = 0_u64;
    let mark = |slot: Slot| 1_u64 << (slot.0 % u64::BITS);
    for i in packets {
        let head = heads[i];
        let entry = table.entry_mut(slots[i]);
        let flags = entry.flags();
        if !entry.has_key(&keys[i]) || flags.has(Flags::QUARANTINED) || head.sides & flags.side() == 0 || head.ttl <= 1
        {
            continue;
        }
        // A packet that may prove something, and a segment that doesn't just go on where the last one ended.
        let segment = &segments[i];
        let matters = !flags.has(Flags::SEEN)
            || (head.kind == Kind::Tcp && (segment.flags.is_rare() || segment.sequence != entry.sequence()));
        if matters || left & mark(slots[i]) != 0 {
            left |= mark(slots[i]) | mark(entry.twin());
            continue;
        }
        if is_near(&keys[i], entry) {
            continue;
        }
        let generation = entry.generation();
        if LOOK {
            behind += u32::from(generation != in_force);
            if !glance.holds(generation, entry.endpoint()) && !is_current(entry, view) {
                continue;
            }
        } else if generation != in_force {
            behind += 1;
            if !is_current(entry, view) {
                continue;
            }
        }
        // Without a link address nothing fits.
        let Some(exit) = exits.get(usize::from(entry.next_hop_number().0)).filter(|exit| head.length <= exit.mtu)
        else {
            continue;
        };
        let Some(received) = frames.get_mut(i) else { continue };
        let frame = received.frame.bytes_mut();
        if head.kind == Kind::Tcp {
            let Some(checksum) = A::tcp_checksum(frame) else { continue };
            rewrite::update(checksum, entry.l4_delta());
            let ack = segment.flags.has(tcp::Flags::ACK).then_some(segment.acknowledgement);
            entry.advance(segment.sequence.wrapping_add(segment.space), ack);
        }
        entry.count(frame.len() as u16, context.now, in_force);
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
    batch.restless = behind >= RESTLESS;
}
