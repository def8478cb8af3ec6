//! Third stage: which session? Hash all, fetch all, find all, so that memory works while the processor does.

use crate::batch::{Batch, Lane, MOST};
use crate::counters::DropReason;
use crate::session::Sessions;
use crate::session::entry::Flags;
use crate::session::table::Home;
use crate::snapshot::Snapshot;
use crate::verdict::Verdict;

/// Fetches the entry of every packet that can have a session.
pub fn fetch<A: Lane>(batch: &mut Batch, sessions: &Sessions) {
    let packets = batch.open_of::<A>().without(batch.sessionless);
    let table = A::table(sessions);
    let mut homes = [Home::default(); MOST];
    for i in packets {
        let hash = sessions.hash(&A::tuples(batch)[i]);
        batch.hashes[i] = hash;
        homes[i] = table.prefetch(hash);
    }
    for i in packets {
        batch.slots[i] = table.prefetch_entry(homes[i], batch.hashes[i]);
    }
}

/// Finds the session of every packet that can have one. [`fetch`] has come before.
pub fn find<A: Lane>(batch: &mut Batch, sessions: &Sessions, view: &Snapshot) {
    let table = A::table(sessions);
    for i in batch.open_of::<A>().without(batch.sessionless) {
        let Some(slot) = table.find_at(batch.slots[i], batch.hashes[i], &A::tuples(batch)[i]) else { continue };
        let entry = table.entry(slot);
        let flags = entry.flags();
        if flags.has(Flags::QUARANTINED) {
            continue;
        }
        // Bits, not branches: which side a packet is from is anybody's guess, and a wrong one costs as much as the whole find.
        if batch.heads[i].sides & flags.side() == 0 {
            // A packet of the session, but from the side where it can't come from.
            batch.decide(i, Verdict::Drop(DropReason::SpoofedSource));
            continue;
        }
        batch.slots[i] = slot;
        batch.directions[i] = entry.direction();
        if entry.generation() == view.generation {
            batch.known.insert(i);
        } else {
            batch.stale.insert(i);
        }
    }
}
