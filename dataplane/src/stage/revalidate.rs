//! Revalidates sessions that were checked against an older policy, once each. A session that policy still permits
//! continues; any other ends, and its packet is classified like one without a session.

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{Owner, Slot};
use crate::flow::listener::Listener;
use crate::flow::time::Tick;
use crate::flow::tunnel_metadata::HAIRPIN_SIDE;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind, PacketSet};
use crate::policy::Snapshot;
use crate::policy::compiled::Policy;
use crate::policy::spec::{Limits, Role};
use crate::replication::accounting::SessionAccounting;
use crate::replication::{accounting, owner};
use crate::session::end_reason::EndReason;
use crate::session::entry::{Entry, Flags};
use crate::session::table::Table;
use crate::session::{Accounting, Expiry, SessionFamily, Sessions, tcp};
use crate::stage::context::{Context, PacketFamily};
use crate::wire::tcp::Flags as TcpFlags;

/// Revalidates the stale sessions of the batch.
pub fn run<A: PacketFamily>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    context: &Context<'_>,
    accounting: &mut SessionAccounting<'_>,
) {
    let Context { snapshot, now, .. } = *context;
    for i in batch.undecided_of::<A>().and(batch.stale) {
        if !batch.undecided.contains(i) || requeue_behind_opening::<A>(batch, i, sessions, snapshot) {
            continue;
        }
        if apply::<A>(batch.slots[i], sessions, snapshot, now, accounting) {
            batch.validated.insert(i);
            if !A::table(sessions).entry(batch.slots[i]).flags().may_come_from(batch.headers[i].sides) {
                batch.decide(i, Verdict::Drop(DropReason::SpoofedSource));
            }
            continue;
        }
        let entry = A::table(sessions).entry(batch.slots[i]);
        if entry.is_standby() {
            // Its shard belongs to another gateway now, and so does the session.
            batch.session_owners[i] = owner::owner(entry, &snapshot.policy);
            batch.standby.insert(i);
        }
    }
}

/// Requeues a packet that would end a pod's session if an earlier packet of the same pod may open one: the quota must
/// accept or reject that one before the end. The pod's later packets are requeued, too. False if nothing has to wait.
fn requeue_behind_opening<A: PacketFamily>(
    batch: &mut Batch,
    i: usize,
    sessions: &Sessions,
    snapshot: &Snapshot,
) -> bool {
    let table = A::table(sessions);
    let entry = table.entry(batch.slots[i]);
    let without_session = batch.undecided_of::<A>().without(batch.validated);
    let mut before = without_session.without(PacketSet::after(i));
    before.remove(i);
    if before.is_empty() || entry.is_dnat() || !entry.is_active() || is_valid(entry, snapshot) {
        return false;
    }
    let pod = entry.endpoint();
    let is_limited = snapshot.policy.endpoint(pod).is_some_and(|(.., egress)| egress.spec.limits != Limits::default());
    if !is_limited || !before.into_iter().any(|other| A::tuples(batch)[other].source == pod) {
        return false;
    }
    batch.requeue(i);
    for other in without_session.and(PacketSet::after(i)) {
        let is_of_pod = A::tuples(batch)[other].source == pod
            || (batch.stale.contains(other) && table.entry(batch.slots[other]).endpoint() == pod);
        if is_of_pod || batch.icmp_errors.contains(other) {
            batch.requeue(other);
        }
    }
    true
}

/// Handles SYNs that reuse the ports of a closed connection: the old session ends, so the client gets a new backend.
/// The old one may take no new sessions any more.
pub fn reopen<A: PacketFamily>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    now: Tick,
    accounting: &mut SessionAccounting<'_>,
) {
    for i in batch.validated_of::<A>() {
        let (slot, table) = (batch.slots[i], A::table(sessions));
        // An earlier packet may have requeued it.
        if !batch.undecided.contains(i) || !is_client_syn(batch, i, table) {
            continue;
        }
        let twin = table.entry(slot).twin();
        let is_of_session = |other: &usize| [slot, twin].contains(&batch.slots[*other]);
        let all = batch.validated_of::<A>();
        let before = all.without(PacketSet::after(i)).into_iter().filter(|other| *other != i && is_of_session(other));
        let (mut has_before, closes) =
            before.fold((false, false), |(_, closes), other| (true, closes | may_close(batch, other)));
        if !closes && !reopens_connection(batch, i, table) {
            continue;
        }
        // Earlier packets of the old connection in this batch still need its session, and so may ICMP errors: the SYN
        // is requeued behind them, and later packets behind the SYN.
        let errors = batch.undecided_of::<A>().and(batch.icmp_errors);
        has_before |= !errors.without(PacketSet::after(i)).is_empty();
        let mut after = errors.and(PacketSet::after(i));
        all.and(PacketSet::after(i)).into_iter().filter(is_of_session).for_each(|other| after.insert(other));
        if has_before {
            batch.requeue(i);
        } else {
            let expiry: Expiry<A> = sessions.end_with_reason(slot, EndReason::Closed, now);
            accounting.release(&expiry);
            batch.validated.remove(i);
        }
        after.into_iter().for_each(|other| batch.requeue(other));
    }
}

/// Whether a segment has FIN or RST set: it may close the connection.
fn may_close(batch: &Batch, i: usize) -> bool {
    let flags = batch.segments[i].flags;
    batch.headers[i].kind == PacketKind::Tcp && (flags.has(TcpFlags::FIN) || flags.has(TcpFlags::RST))
}

/// Result of checking a session against the policy in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// No change of policy concerns it; its next hop is still right, too.
    Fresh,
    /// Policy still permits it, with these flags. Its next hop may have changed.
    Permitted(Flags),
    /// Another gateway owns it now, or none that is active: it continues there.
    Moved(Owner),
    /// Policy no longer permits it.
    Forbidden,
}

/// Checks a session against the policy in force.
pub fn decide<A: SessionFamily>(entry: &Entry<A>, snapshot: &Snapshot) -> Validity {
    if snapshot.freshness.is_fresh(entry.generation(), entry.pod_remote_vip()) {
        return Validity::Fresh;
    }
    if is_permitted(entry, &snapshot.policy) {
        return Validity::Permitted(current_flags(entry, &snapshot.policy));
    }
    match owner::owner(entry, &snapshot.policy) {
        Owner::This => Validity::Forbidden,
        other => Validity::Moved(other),
    }
}

/// Whether the policy in force permits a session.
pub fn is_valid<A: SessionFamily>(entry: &Entry<A>, snapshot: &Snapshot) -> bool {
    snapshot.freshness.is_fresh(entry.generation(), entry.pod_remote_vip()) || is_permitted(entry, &snapshot.policy)
}

/// The same, from the policy alone, without the freshness cache. Another gateway's session is not permitted here.
pub fn is_permitted<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> bool {
    let [(endpoint, endpoint_port), (remote, _), (vip, vip_port)] = entry.transport_addresses();
    if owner::owner(entry, policy) != Owner::This {
        return false;
    }
    if !entry.is_dnat() {
        return policy.permits(endpoint, remote, (vip, vip_port));
    }
    let listener = |address, port| Listener { address, port, protocol: entry.key().protocol };
    let target = policy.permitted_backend(&listener(vip, vip_port), &listener(endpoint, endpoint_port));
    // Only the original direction shows which side the client is on.
    let is_outside = entry.direction() == Direction::Inbound && entry.flags().side() == Flags::OUTSIDE.0;
    policy.vip(vip).is_some_and(|vip| !vip.ports.retired)
        && target.is_some_and(|(service, _)| !is_outside || A::part(service).admits(remote))
}

/// The flags of a session that policy still permits: its remote may have become a VIP of this gateway, or ceased to be
/// one.
pub fn current_flags<A: SessionFamily>(entry: &Entry<A>, policy: &Policy) -> Flags {
    let is_hairpin = policy.vip(entry.key().source).is_some();
    if is_hairpin == (entry.flags().side() == 0) {
        return entry.flags();
    }
    entry.flags().with_side(if is_hairpin { HAIRPIN_SIDE } else { Role::Outside.sides() })
}

/// Whether a packet is a client's SYN that reuses the ports of a closed connection.
pub fn reopens_connection<A: PacketFamily>(batch: &Batch, i: usize, table: &Table<A>) -> bool {
    let entry = table.entry(batch.slots[i]);
    is_client_syn(batch, i, table) && tcp::is_closed(entry.flags(), table.entry(entry.twin()).flags())
}

/// Whether a packet is a client's SYN whose tuple has a session.
fn is_client_syn<A: PacketFamily>(batch: &Batch, i: usize, table: &Table<A>) -> bool {
    let is_syn = batch.headers[i].kind == PacketKind::Tcp && batch.segments[i].flags.is_initial_syn();
    is_syn && table.entry(batch.slots[i]).direction() == Direction::Inbound
}

/// Applies the decision on a session; returns whether it continues here.
fn apply<A: SessionFamily>(
    slot: Slot,
    sessions: &mut Sessions,
    snapshot: &Snapshot,
    now: Tick,
    accounting: &mut SessionAccounting<'_>,
) -> bool {
    let entry = A::table(sessions).entry(slot);
    // An earlier packet of this batch may have ended it already.
    if !entry.is_active() {
        return false;
    }
    match decide(entry, snapshot) {
        Validity::Fresh => {
            A::table_mut(sessions).entry_mut(slot).set_generation(snapshot.generation);
            true
        }
        Validity::Permitted(flags) => {
            let entry = A::table_mut(sessions).entry_mut(slot);
            entry.set_generation(snapshot.generation);
            entry.set_flags(flags);
            entry.set_next_hop(None);
            true
        }
        Validity::Moved(_) => {
            let (origin, _) = sessions.slot_pair::<A>(slot);
            let entry = *A::table(sessions).entry(origin);
            accounting::release_quota(&snapshot.policy, &entry.key(), &entry.translated(), entry.direction());
            sessions.demote::<A>(origin, now);
            false
        }
        Validity::Forbidden => {
            let expiry: Expiry<A> = sessions.end(slot, now);
            accounting.release(&expiry);
            false
        }
    }
}
