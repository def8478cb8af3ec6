//! Third stage: which session? Hash all, fetch all, find all, so that memory works while the processor does.

use crate::batch::{Batch, IpVersion, Way};
use crate::counters::DropReason;
use crate::session::entry::Flags;
use crate::session::tuple::Tuple;
use crate::session::{SessionFamily, Sessions};
use crate::snapshot::Snapshot;
use crate::verdict::Verdict;

/// Finds the session of every packet that can have one.
pub fn run(batch: &mut Batch, sessions: &Sessions, view: &Snapshot) {
    let open = batch.open_packets();
    for i in batch.open_packets() {
        batch.hashes[i] = match batch.heads[i].version {
            IpVersion::V4 => prefetch(sessions, &batch.v4[i]),
            IpVersion::V6 => prefetch(sessions, &batch.v6[i]),
            IpVersion::Neither => 0,
        };
    }
    for i in batch.open_packets() {
        match batch.heads[i].version {
            IpVersion::V4 => u32::table(sessions).prefetch_entry(batch.hashes[i]),
            IpVersion::V6 => crate::address::V6::table(sessions).prefetch_entry(batch.hashes[i]),
            IpVersion::Neither => {}
        }
    }
    for i in open {
        if !batch.heads[i].kind.has_session() {
            continue;
        }
        let found = match batch.heads[i].version {
            IpVersion::V4 => find(batch, i, sessions, &batch.v4[i], view),
            IpVersion::V6 => find(batch, i, sessions, &batch.v6[i], view),
            IpVersion::Neither => continue,
        };
        match found {
            Found::Way(way) => batch.ways[i] = way,
            Found::WrongSide => batch.decide(i, Verdict::Drop(DropReason::SpoofedSource)),
        }
    }
}

enum Found {
    Way(Way),
    /// A packet of the session, but from the side where it can't come from.
    WrongSide,
}

#[inline]
fn prefetch<A: SessionFamily>(sessions: &Sessions, tuple: &Tuple<A>) -> u64 {
    let hash = sessions.hash(tuple);
    A::table(sessions).prefetch(hash);
    hash
}

#[inline]
fn find<A: SessionFamily>(batch: &Batch, i: usize, sessions: &Sessions, tuple: &Tuple<A>, view: &Snapshot) -> Found {
    let Some(slot) = sessions.find(batch.hashes[i], tuple) else { return Found::Way(Way::Unknown) };
    let entry = A::table(sessions).entry(slot);
    if entry.flags().has(Flags::QUARANTINED) {
        return Found::Way(Way::Unknown);
    }
    let role = view.network.interface(batch.frames[i].interface).role;
    let right_side = if entry.flags().has(Flags::INSIDE) { role.is_inside() } else { role.is_outside() };
    if !right_side {
        return Found::WrongSide;
    }
    Found::Way(if entry.generation() == view.generation { Way::Session(slot) } else { Way::Stale(slot) })
}
