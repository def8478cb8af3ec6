//! Fourth stage: sessions that were checked against an older policy, once each. What policy still wants goes on as it is;
//! what it doesn't want any more ends here, and its packet is looked at like one that no session knows.

use crate::batch::{Batch, Kind, Lane, Packets};
use crate::counters::{Direction, DropReason, EndReason};
use crate::pipeline::Context;
use crate::session::entry::{Entry, Flags, Slot};
use crate::session::table::Table;
use crate::session::{Expiry, SessionFamily, Sessions, tcp};
use crate::settle::{self, Settle};
use crate::snapshot::Snapshot;
use crate::snapshot::policy::Policy;
use crate::snapshot::service::Listener;
use crate::snapshot::shares::Owner;
use crate::snapshot::spec::{AROUND, Limits, Role};
use crate::stage::takeover;
use crate::time::Tick;
use crate::verdict::Verdict;
use crate::wire::tcp::Flags as TcpFlags;

/// Checks the stale sessions of the batch.
pub fn run<A: Lane>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>, settle: &mut Settle<'_>) {
    let Context { view, now, .. } = *context;
    for i in batch.open_of::<A>().and(batch.stale) {
        if !batch.open.contains(i) || wait_for_opening::<A>(batch, i, sessions, view) {
            continue;
        }
        if recheck::<A>(batch.slots[i], sessions, view, now, settle) {
            batch.known.insert(i);
            if !A::table(sessions).entry(batch.slots[i]).flags().may_come_from(batch.heads[i].sides) {
                batch.decide(i, Verdict::Drop(DropReason::SpoofedSource));
            }
            continue;
        }
        let entry = A::table(sessions).entry(batch.slots[i]);
        if entry.is_copy() {
            // Its share is another gateway's by now, and so is the session.
            batch.elsewhere[i] = takeover::owner(entry, &view.policy);
            batch.copies.insert(i);
        }
    }
}

/// Has a packet requeued that would end a session of a pod's, behind one of the same pod that may open one: that is refused or not by
/// the quota as it was before the end. What of the pod is behind them follows them; false if nothing has to wait.
fn wait_for_opening<A: Lane>(batch: &mut Batch, i: usize, sessions: &Sessions, view: &Snapshot) -> bool {
    let table = A::table(sessions);
    let entry = table.entry(batch.slots[i]);
    let unknown = batch.open_of::<A>().without(batch.known);
    let mut before = unknown.without(Packets::behind(i));
    before.remove(i);
    if before.is_empty() || entry.is_of_service() || !entry.is_live() || stands(entry, view) {
        return false;
    }
    let pod = entry.endpoint();
    let is_limited = view.policy.endpoint(pod).is_some_and(|(.., egress)| egress.spec.limits != Limits::default());
    if !is_limited || !before.into_iter().any(|other| A::tuples(batch)[other].source == pod) {
        return false;
    }
    batch.requeue(i);
    for other in unknown.and(Packets::behind(i)) {
        let is_its = A::tuples(batch)[other].source == pod
            || (batch.stale.contains(other) && table.entry(batch.slots[other]).endpoint() == pod);
        if is_its || batch.errors.contains(other) {
            batch.requeue(other);
        }
    }
    true
}

/// Lets clients whose connection is closed, and who begin anew with the same ports, choose their backend anew: the one that they
/// had may take no new sessions any more.
pub fn reopen<A: Lane>(batch: &mut Batch, sessions: &mut Sessions, now: Tick, settle: &mut Settle<'_>) {
    for i in batch.known_of::<A>() {
        let (slot, table) = (batch.slots[i], A::table(sessions));
        // An earlier one may have had it taken in again.
        if !batch.open.contains(i) || !opens_inbound(batch, i, table) {
            continue;
        }
        let twin = table.entry(slot).twin();
        let is_its = |other: &usize| [slot, twin].contains(&batch.slots[*other]);
        let all = batch.known_of::<A>();
        let before = all.without(Packets::behind(i)).into_iter().filter(|other| *other != i && is_its(other));
        let (mut has_before, closes) =
            before.fold((false, false), |(_, closes), other| (true, closes | ends_one(batch, other)));
        if !closes && !begins_anew(batch, i, table) {
            continue;
        }
        // Packets of the old connection in the same batch still need its session, and so may errors: what is before this one goes
        // before it, and what is behind it follows it.
        let errors = batch.open_of::<A>().and(batch.errors);
        has_before |= !errors.without(Packets::behind(i)).is_empty();
        let mut after = errors.and(Packets::behind(i));
        all.and(Packets::behind(i)).into_iter().filter(is_its).for_each(|other| after.insert(other));
        if has_before {
            batch.requeue(i);
        } else {
            let expiry: Expiry<A> = sessions.end_because(slot, EndReason::Closed, now);
            settle.settle(&expiry);
            batch.known.remove(i);
        }
        after.into_iter().for_each(|other| batch.requeue(other));
    }
}

/// Whether a packet says FIN or RST: behind it the connection may be closed.
fn ends_one(batch: &Batch, i: usize) -> bool {
    let flags = batch.segments[i].flags;
    batch.heads[i].kind == Kind::Tcp && (flags.has(TcpFlags::FIN) || flags.has(TcpFlags::RST))
}

/// Whether a session is what policy wants.
pub fn stands<A: SessionFamily>(entry: &Entry<A>, view: &Snapshot) -> bool {
    view.freshness.holds(entry.generation(), entry.parties()) || is_wanted(entry, &view.policy)
}

/// The same, whatever was asked before. What is another gateway's is not wanted here.
pub fn is_wanted<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> bool {
    let [(endpoint, endpoint_port), (remote, _), (vip, vip_port)] = entry.ends();
    if takeover::owner(entry, policy) != Owner::This {
        return false;
    }
    if !entry.is_of_service() {
        return policy.permits(endpoint, remote, (vip, vip_port));
    }
    let listener = |address, port| Listener { address, port, protocol: entry.key().protocol };
    let target = policy.target(&listener(vip, vip_port), &listener(endpoint, endpoint_port));
    // Which side the client is on, only its own direction knows.
    let is_outside = entry.direction() == Direction::Inbound && entry.flags().side() == Flags::OUTSIDE.0;
    policy.vip(vip).is_some_and(|vip| !vip.retired)
        && target.is_some_and(|(service, _)| !is_outside || A::half(service).admits(remote))
}

/// The flags of a session that policy still wants: whoever it talks to may have become a VIP of this gateway, or not be one any more.
pub fn flags_now<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> Flags {
    let comes_around = policy.vip(entry.key().source).is_some();
    if comes_around == (entry.flags().side() == 0) {
        return entry.flags();
    }
    entry.flags().with_side(if comes_around { AROUND } else { Role::Outside.sides() })
}

/// Whether a packet begins a connection anew that a client has had, and that is closed.
pub fn begins_anew<A: Lane>(batch: &Batch, i: usize, table: &Table<A>) -> bool {
    let entry = table.entry(batch.slots[i]);
    opens_inbound(batch, i, table) && tcp::is_closed(entry.flags(), table.entry(entry.twin()).flags())
}

/// Whether a packet is a SYN of a client's that has a session.
fn opens_inbound<A: Lane>(batch: &Batch, i: usize, table: &Table<A>) -> bool {
    let is_syn = batch.heads[i].kind == Kind::Tcp && batch.segments[i].flags.opens();
    is_syn && table.entry(batch.slots[i]).direction() == Direction::Inbound
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
    if !entry.is_live() {
        return false;
    }
    // What has changed concerns others: routes are as they were, too.
    if view.freshness.holds(entry.generation(), entry.parties()) {
        A::table_mut(sessions).entry_mut(slot).set_generation(view.generation);
        return true;
    }
    if is_wanted(entry, &view.policy) {
        let entry = A::table_mut(sessions).entry_mut(slot);
        entry.set_generation(view.generation);
        entry.set_flags(flags_now(entry, &view.policy));
        // Routes may be what has changed.
        entry.set_next_hop(None);
        return true;
    }
    if takeover::owner(entry, &view.policy) != Owner::This {
        // It goes on there.
        let (origin, _) = sessions.both::<A>(slot);
        let entry = *A::table(sessions).entry(origin);
        settle::close(&view.policy, &entry.key(), &entry.to(), entry.direction());
        sessions.demote::<A>(origin, now);
        return false;
    }
    let expiry: Expiry<A> = sessions.end(slot, now);
    settle.settle(&expiry);
    false
}
