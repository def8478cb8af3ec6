//! Fourth stage: sessions that were checked against an older policy, once each. What policy still wants goes on as it is;
//! what it doesn't want any more ends here, and its packet is looked at like one that no session knows.

use crate::batch::{Batch, Lane};
use crate::counters::DropReason;
use crate::pipeline::Context;
use crate::session::entry::{Entry, Flags, Slot};
use crate::session::{Expiry, SessionFamily, Sessions};
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::snapshot::spec::{AROUND, Role};
use crate::time::Tick;
use crate::verdict::Verdict;

/// Checks the stale sessions of the batch.
pub fn run<A: Lane>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>, settle: &mut Settle<'_>) {
    let Context { view, now, .. } = *context;
    for i in batch.open_of::<A>().and(batch.stale) {
        if recheck::<A>(batch.slots[i], sessions, view, now, settle) {
            batch.known.insert(i);
            if !A::table(sessions).entry(batch.slots[i]).flags().may_come_from(batch.heads[i].sides) {
                batch.decide(i, Verdict::Drop(DropReason::SpoofedSource));
            }
        }
    }
}

/// Whether a session is what policy wants.
pub fn stands<A: SessionFamily>(entry: &Entry<A>, view: &Snapshot) -> bool {
    let parties @ (endpoint, remote, vip) = entry.parties();
    view.freshness.holds(entry.generation(), parties) || view.policy.permits(endpoint, remote, vip)
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
    // What has changed concerns others: routes are as they were, too.
    let parties @ (endpoint, remote, vip) = entry.parties();
    if view.freshness.holds(entry.generation(), parties) {
        A::table_mut(sessions).entry_mut(slot).set_generation(view.generation);
        return true;
    }
    if view.policy.permits(endpoint, remote, vip) {
        let entry = A::table_mut(sessions).entry_mut(slot);
        entry.set_generation(view.generation);
        // Whoever it talks to may have become a VIP of this gateway, or not be one any more.
        let comes_around = view.policy.vip(entry.key().source).is_some();
        if comes_around != (entry.flags().side() == 0) {
            let side = if comes_around { AROUND } else { Role::Outside.sides() };
            entry.set_flags(entry.flags().with_side(side));
        }
        // Routes may be what has changed.
        entry.set_next_hop(None);
        return true;
    }
    let expiry: Expiry<A> = sessions.end(slot, now);
    settle.settle(&expiry);
    false
}
