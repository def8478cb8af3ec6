//! Third stage: which session? Hash all, fetch all, find all, so that memory works while the processor does.

use crate::batch::{Batch, Lane, MOST};
use crate::counters::DropReason;
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::entry::Flags;
use crate::session::key::Key;
use crate::session::table::Home;
use crate::verdict::Verdict;

/// Fetches the entry of every packet that can have a session.
#[inline(never)]
pub fn fetch<A: Lane>(batch: &mut Batch, sessions: &Sessions) {
    let packets = batch.open_of::<A>().without(batch.sessionless);
    let table = A::table(sessions);
    for i in packets.without(batch.plain) {
        A::keys_mut(batch)[i] = Key::of(&A::tuples(batch)[i]);
    }
    let mut homes = [Home::default(); MOST];
    for i in packets {
        let hash = sessions.hash_key(&A::keys(batch)[i]);
        batch.hashes[i] = hash;
        homes[i] = table.prefetch(hash);
    }
    for i in packets {
        batch.slots[i] = table.prefetch_entry(homes[i], batch.hashes[i]);
    }
}

/// Finds the session of every packet that can have one, and spells out what the short way has left. [`fetch`] has come before.
#[inline(never)]
pub fn find<A: Lane>(batch: &mut Batch, sessions: &Sessions, context: &Context<'_>) {
    let (view, is_lapsed) = (context.view, context.is_lapsed);
    let table = A::table(sessions);
    for i in batch.open_of::<A>().and(batch.plain) {
        A::tuples_mut(batch)[i] = A::keys(batch)[i].tuple();
    }
    for i in batch.open_of::<A>().without(batch.sessionless) {
        let Some(slot) = table.find_at(batch.slots[i], batch.hashes[i], &A::keys(batch)[i]) else { continue };
        let entry = table.entry(slot);
        let flags = entry.flags();
        if flags.has(Flags::QUARANTINED) {
            continue;
        }
        if entry.is_copy() {
            batch.slots[i] = slot;
            batch.copies.insert(i);
            continue;
        }
        // What another gateway may open in its place, it would open.
        if is_lapsed && !entry.is_told() && !entry.is_of_service() {
            batch.decide(i, Verdict::Drop(DropReason::NoLease));
            continue;
        }
        let is_stale = entry.generation() != view.generation;
        // What is stale is asked when it has been checked anew.
        if !is_stale && !flags.may_come_from(batch.heads[i].sides) {
            // A packet of the session, but from the side where it can't come from.
            batch.decide(i, Verdict::Drop(DropReason::SpoofedSource));
            continue;
        }
        batch.slots[i] = slot;
        batch.directions[i] = entry.direction();
        if is_stale {
            batch.stale.insert(i);
        } else {
            batch.known.insert(i);
        }
    }
}
