//! Session lookup. Prefetches all entries, then compares, so that cache misses overlap.

use crate::flow::drop_reason::DropReason;
use crate::flow::key::Key;
use crate::flow::verdict::Verdict;
use crate::io::batch::Batch;
use crate::session::Sessions;
use crate::session::entry::Flags;
use crate::session::table::Lookups;
use crate::stage::context::{Context, PacketFamily};

/// Prefetches the entry of every packet that can have a session. `parse` has hashed the plain ones and prefetched their
/// groups.
#[inline(never)]
pub fn prefetch<A: PacketFamily>(batch: &mut Batch, sessions: &Sessions) {
    let packets = batch.undecided_of::<A>().without(batch.sessionless);
    let table = A::table(sessions);
    for i in packets.without(batch.plain) {
        let key = Key::of(&A::tuples(batch)[i]);
        let hash = sessions.hash_key(&key);
        (A::keys_mut(batch)[i], batch.hashes[i], batch.homes[i]) = (key, hash, table.prefetch(hash));
    }
    let Batch { slots, homes, hashes, .. } = batch;
    table.prefetch_entries(Lookups { packets, homes, hashes, slots });
}

/// Finds the session of every packet that can have one, and expands the keys of fast-parsed packets to tuples.
/// Call [`prefetch`] first.
#[inline(never)]
pub fn find<A: PacketFamily>(batch: &mut Batch, sessions: &Sessions, context: &Context<'_>) {
    let (snapshot, is_lease_expired) = (context.snapshot, context.lease_expired);
    let table = A::table(sessions);
    for i in batch.undecided_of::<A>().and(batch.plain) {
        A::tuples_mut(batch)[i] = A::keys(batch)[i].tuple();
    }
    for i in batch.undecided_of::<A>().without(batch.sessionless) {
        let Some(slot) = table.find_at(batch.slots[i], batch.hashes[i], &A::keys(batch)[i]) else { continue };
        let entry = table.entry(slot);
        let flags = entry.flags();
        if flags.has(Flags::QUARANTINED) {
            continue;
        }
        if entry.is_standby() {
            batch.slots[i] = slot;
            batch.standby.insert(i);
            continue;
        }
        // The lease has expired and the session isn't replicated: the shard's new owner may have opened another one in
        // its place.
        if is_lease_expired && !entry.is_acknowledged() && !entry.is_dnat() {
            batch.decide(i, Verdict::Drop(DropReason::NoLease));
            continue;
        }
        let is_stale = entry.generation() != snapshot.generation;
        // For a stale session, `revalidate` checks the side.
        if !is_stale && !flags.may_come_from(batch.headers[i].sides) {
            // A packet of the session, received on the wrong side.
            batch.decide(i, Verdict::Drop(DropReason::SpoofedSource));
            continue;
        }
        batch.slots[i] = slot;
        batch.directions[i] = entry.direction();
        if is_stale {
            batch.stale.insert(i);
        } else {
            batch.validated.insert(i);
        }
    }
}
