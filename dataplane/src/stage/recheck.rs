//! Fourth stage: sessions that were checked against an older policy, once each. What policy still wants goes on as it is;
//! what it doesn't want any more ends here, and its packet is looked at like one that no session knows.

use crate::address::V6;
use crate::batch::{Batch, IpVersion, Way};
use crate::counters::Direction;
use crate::session::entry::{Flags, Slot};
use crate::session::{Expiry, SessionFamily, Sessions};
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::time::Tick;

/// Checks the stale sessions of the batch.
pub fn run(batch: &mut Batch, sessions: &mut Sessions, view: &Snapshot, now: Tick, settle: &mut Settle<'_>) {
    for i in batch.open_packets() {
        let Way::Stale(slot) = batch.ways[i] else { continue };
        let stands = match batch.heads[i].version {
            IpVersion::V4 => recheck::<u32>(slot, sessions, view, now, settle),
            IpVersion::V6 => recheck::<V6>(slot, sessions, view, now, settle),
            IpVersion::Neither => false,
        };
        batch.ways[i] = if stands { Way::Session(slot) } else { Way::Unknown };
    }
}

fn recheck<A: SessionFamily>(
    slot: Slot,
    sessions: &mut Sessions,
    view: &Snapshot,
    now: Tick,
    settle: &mut Settle<'_>,
) -> bool {
    let entry = A::table(sessions).entry(slot);
    // An earlier packet of this batch may have checked it already.
    if entry.flags().has(Flags::QUARANTINED) {
        return false;
    }
    let (endpoint, remote, vip) = match entry.direction() {
        Direction::Reply => (entry.to().destination, entry.key().source, entry.key().destination),
        _ => (entry.key().source, entry.key().destination, entry.to().source),
    };
    if view.policy.permits(endpoint, remote, vip) {
        let entry = A::table_mut(sessions).entry_mut(slot);
        entry.set_generation(view.generation);
        // Routes may be what has changed.
        entry.set_next_hop(None);
        return true;
    }
    let expiry: Expiry<A> = sessions.end(slot, now);
    settle.settle(&expiry);
    false
}
