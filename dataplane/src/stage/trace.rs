//! Trace: runs one packet through the stages against the live tables, without changing anything, and records each
//! decision.
//!
//! Stages that change no table run as they are. Of the others it calls the same deciding functions, and records what
//! applying the decision would change. The order is that of `pipeline.rs`.

mod result;

use std::sync::Arc;

pub use self::result::{PacketClass, Probe, SessionOutcome, SnatChoice, TraceResult};
use crate::flow::address::{Address, V6};
use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{Owner, Slot};
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::Received;
use crate::io::batch::{Batch, PacketSet};
use crate::policy::Snapshot;
use crate::policy::network::NextHop;
use crate::ports::allocator::Availability;
use crate::replication::owner::owner;
use crate::session::admission::Admission;
use crate::session::entry::Entry;
use crate::session::query;
use crate::stage::context::{Context, Tables};
use crate::stage::reject::reject_reply;
use crate::stage::revalidate::Validity;
use crate::stage::rewrite::{self, HeaderRewrite};
use crate::stage::{
    classify, encap, forward_to_owner, health_check, load_balance, lookup, parse, revalidate, route, snat,
    stateless_reply,
};

/// The index of the packet: it is alone in its batch.
const PACKET: usize = 0;

/// Traces the packet in `received` and returns its frame. `ended` is the number of the endpoint's sessions that the
/// packet would already have ended on other workers.
pub fn trace(
    batch: &mut Batch,
    received: Received,
    tables: &Tables,
    snapshot: &Arc<Snapshot>,
    context: &Context<'_>,
    ended: u32,
) -> (TraceResult, Option<Received>) {
    batch.frames.push(received);
    batch.begin();
    batch.standby = PacketSet::default();
    parse::run(batch, &snapshot.network, &tables.sessions);
    let mut result = TraceResult {
        snapshot: snapshot.clone(),
        worker: context.flows.this,
        sides: batch.headers[PACKET].sides,
        session: None,
        ended_sessions: ended,
        class: None,
        snat: None,
        uses_reserve: false,
        translated: None,
        next_hop: None,
        direction: Direction::Unchanged,
        verdict: Verdict::Undecided,
        mtu: 0,
        reply: None,
    };
    let mut trace = Trace { tables, context, result: &mut result, ended: None };
    trace.run::<u32>(batch);
    trace.run::<V6>(batch);
    encap::run(batch, snapshot);
    if batch.undecided.contains(PACKET) {
        // ARP and neighbor discovery: not traced further.
        batch.decide(PACKET, Verdict::Consume);
    }
    (result.verdict, result.direction, result.mtu) =
        (batch.verdicts[PACKET], batch.directions[PACKET], batch.mtus[PACKET]);
    if let Verdict::Drop(reason) = result.verdict
        && batch.rejected.contains(PACKET)
    {
        result.reply = reject_reply(batch, PACKET, reason, context);
    }
    (result, batch.frames.pop())
}

/// One packet's way through the stages.
struct Trace<'a> {
    tables: &'a Tables,
    context: &'a Context<'a>,
    result: &'a mut TraceResult,
    /// The session that the packet would have ended before it opens one.
    ended: Option<Slot>,
}

/// How a packet that is not rejected is forwarded.
enum Forwarding<A> {
    /// With this tuple, counted in this direction, over this next hop.
    Translated(Tuple<A>, Direction, NextHop),
    /// Without a session, by policy only.
    Stateless,
}

impl Trace<'_> {
    fn run<A: HeaderRewrite>(&mut self, batch: &mut Batch) {
        if !batch.undecided_of::<A>().contains(PACKET) {
            return;
        }
        forward_to_owner::run::<A>(batch, self.context);
        if !batch.undecided.contains(PACKET) {
            if matches!(batch.verdicts[PACKET], Verdict::Forward(_)) {
                self.result.class = Some(PacketClass::ForwardToOwner);
            }
            return;
        }
        lookup::prefetch::<A>(batch, &self.tables.sessions);
        lookup::find::<A>(batch, &self.tables.sessions, self.context);
        self.session::<A>(batch);
        if !batch.validated.contains(PACKET) {
            classify::run::<A>(batch, self.context);
        }
        if batch.undecided.contains(PACKET) {
            self.forward::<A>(batch);
        }
    }

    /// The stages failover and revalidate: what happens to the matching session.
    fn session<A: HeaderRewrite>(&mut self, batch: &mut Batch) {
        let is = |packets: PacketSet| packets.contains(PACKET);
        let (sessions, snapshot) = (&self.tables.sessions, self.context.snapshot);
        let (is_known, is_stale, is_copy) = (is(batch.validated), is(batch.stale), is(batch.standby));
        if !is_known && !is_stale && !is_copy {
            return;
        }
        let (slot, table) = (batch.slots[PACKET], A::table(sessions));
        let (origin, _) = sessions.slot_pair::<A>(slot);
        let record = query::describe::<A>(sessions, origin, self.context.now);
        let mut outcome = |outcome| self.result.session = Some((record, outcome));
        let entry = as_active(table.entry(slot));
        batch.directions[PACKET] = entry.direction();
        if is_copy {
            batch.session_owners[PACKET] = owner(&entry, &snapshot.policy);
            if batch.session_owners[PACKET] != Owner::This {
                return outcome(SessionOutcome::Standby(batch.session_owners[PACKET]));
            }
        }
        if is_known {
            outcome(SessionOutcome::Valid);
        } else {
            let flags = match revalidate::decide(&entry, snapshot) {
                Validity::Fresh => entry.flags(),
                Validity::Permitted(flags) => flags,
                Validity::Moved(owner) => {
                    batch.standby.insert(PACKET);
                    batch.session_owners[PACKET] = owner;
                    self.ended = Some(slot);
                    return outcome(SessionOutcome::Demoted);
                }
                Validity::Forbidden => {
                    batch.session_owners[PACKET] = Owner::This;
                    self.ended = Some(slot);
                    return outcome(SessionOutcome::Ended);
                }
            };
            outcome(if is_copy { SessionOutcome::FailedOver } else { SessionOutcome::Revalidated });
            batch.validated.insert(PACKET);
            if !flags.may_come_from(batch.headers[PACKET].sides) {
                return batch.decide(PACKET, Verdict::Drop(DropReason::SpoofedSource));
            }
        }
        if revalidate::reopens_connection::<A>(batch, PACKET, table) {
            outcome(SessionOutcome::Reopened);
            batch.validated.remove(PACKET);
            self.ended = Some(slot);
        }
    }

    /// The stages behind classify.
    fn forward<A: HeaderRewrite>(&mut self, batch: &mut Batch) {
        let class = packet_class(batch);
        self.result.class = Some(class);
        let forwarding = match class {
            PacketClass::Session => self.known::<A>(batch),
            PacketClass::Egress { .. } => self.snat::<A>(batch),
            PacketClass::Inbound => self.load_balance::<A>(batch),
            PacketClass::StatelessReply => Some(Forwarding::Stateless),
            PacketClass::Unchanged => {
                if let Some(hop) = route::untranslated_next_hop::<A>(batch, PACKET, self.context.snapshot) {
                    self.result.next_hop = Some(hop);
                    batch.directions[PACKET] = Direction::Unchanged;
                    rewrite::forward(batch, PACKET, hop, self.context.snapshot);
                }
                None
            }
            PacketClass::HealthCheck => {
                health_check::trace::<A>(batch, PACKET, self.context);
                None
            }
            PacketClass::ForwardToOwner => None,
        };
        match forwarding {
            None => {}
            Some(Forwarding::Translated(to, direction, hop)) => {
                if let Some(hop) = route::check_next_hop(batch, PACKET, hop, self.context.snapshot) {
                    self.rewrite::<A>(batch, to, direction, hop);
                }
            }
            Some(Forwarding::Stateless) => self.stateless::<A>(batch),
        }
    }

    /// The stage rewrite, for a packet with a session.
    fn known<A: HeaderRewrite>(&self, batch: &mut Batch) -> Option<Forwarding<A>> {
        let entry = as_active(A::table(&self.tables.sessions).entry(batch.slots[PACKET]));
        let Ok(hop) = route::hop_of_session(&entry, batch.hashes[PACKET], self.context.snapshot) else {
            batch.reject(PACKET, DropReason::NoRoute);
            return None;
        };
        Some(Forwarding::Translated(entry.translated(), entry.direction(), hop))
    }

    /// The stage snat.
    fn snat<A: HeaderRewrite>(&mut self, batch: &mut Batch) -> Option<Forwarding<A>> {
        match self.try_snat::<A>(batch) {
            Ok(forwarding) => Some(forwarding),
            Err(snat::SnatError::HandOff(lender)) => {
                snat::hand_off(batch, PACKET, lender);
                None
            }
            Err(snat::SnatError::Rejected(reason)) => {
                if snat::try_next_worker(batch, PACKET, reason, &self.tables.sessions, self.context) {
                    return None;
                }
                if snat::try_next_gateway::<A>(batch, PACKET, reason, self.context) {
                    self.result.class = Some(PacketClass::ForwardToOwner);
                } else {
                    snat::reject_with::<A>(batch, PACKET, reason, self.context);
                }
                None
            }
        }
    }

    fn try_snat<A: HeaderRewrite>(&mut self, batch: &Batch) -> Result<Forwarding<A>, snat::SnatError> {
        let (Tables { sessions, ports, .. }, snapshot) = (self.tables, self.context.snapshot);
        if self.is_demoted() {
            return Err(DropReason::NoOwner.into());
        }
        let decision = snat::decide::<A>(batch, PACKET, sessions, self.context, self.ended)?;
        let (hop, quarantined) = match decision {
            snat::SnatPlan::Open(hop, quarantined) => (hop, quarantined),
            snat::SnatPlan::Existing(slot) => {
                return forward_by_session(A::table(sessions).entry(slot), batch, snapshot).map_err(Into::into);
            }
        };
        let (endpoint, egress) = snapshot.policy.endpoint_by_id(batch.endpoints[PACKET]);
        // A session that the packet ends first counts for the endpoint, unless it is an inbound one.
        let is_egress = |slot: Slot| A::table(sessions).entry(slot).direction() == Direction::Egress;
        self.result.ended_sessions += u32::from(self.ended.is_some_and(is_egress));
        let limits = egress.spec.limits;
        let claim = endpoint
            .usage
            .would_open(limits, self.result.ended_sessions, self.context.now)
            .map_err(|_| DropReason::Quota)?;
        if let Some(snat::QuarantineAction::Revive(slot)) = quarantined {
            let room = snat::capacity_to_revive::<A>(slot, sessions, self.ended);
            self.result.uses_reserve = room == Admission::Reserved;
            if room == Admission::Rejected {
                return Err(DropReason::SessionTableFull.into());
            }
            self.result.class = Some(PacketClass::Egress { reopens: true });
            return Ok(Forwarding::Translated(A::table(sessions).entry(slot).translated(), Direction::Egress, hop));
        }
        let (origin, workers_tried) = (A::tuples(batch)[PACKET], batch.frames[PACKET].workers_tried());
        let opening =
            snat::Opening { origin, hash: batch.hashes[PACKET], endpoint, egress, quarantined, workers_tried };
        let selected =
            opening.select_vip(sessions, snapshot, self.ended, |&snat::Candidate { vip, address, part, room }| {
                self.result.uses_reserve = room == Admission::Reserved;
                let is_free = |port: u16| sessions.is_free(&opening.translated(address, port).reversed());
                let outlook = ports.availability((&vip.ports, part), claim, is_free);
                let (blocks, owned) = ports.count_blocks_in(vip.ports.id, part.blocks);
                let blocks = (!vip.shards.is_standalone()).then_some(blocks);
                self.result.snat = Some(SnatChoice { vip: vip.ports.id, blocks, owned, availability: outlook });
                (outlook != Availability::Exhausted).then_some(())
            });
        if let Err(snat::SnatError::HandOff(_) | snat::SnatError::Rejected(DropReason::SessionTableFull)) = selected {
            // Not of a candidate before the last one.
            self.result.uses_reserve = false;
        }
        let (snat::Candidate { address, .. }, ()) = selected?;
        Ok(Forwarding::Translated(opening.translated(address, 0), Direction::Egress, hop))
    }

    /// The stage load_balance.
    fn load_balance<A: HeaderRewrite>(&mut self, batch: &mut Batch) -> Option<Forwarding<A>> {
        let sessions = &self.tables.sessions;
        if self.is_demoted() {
            batch.reject(PACKET, DropReason::NoOwner);
            return None;
        }
        match load_balance::decide::<A>(batch, PACKET, sessions, self.context, self.ended) {
            Ok(load_balance::LoadBalancePlan::Open(opening)) => {
                self.result.uses_reserve = opening.room == Admission::Reserved;
                Some(Forwarding::Translated(opening.translated, Direction::Inbound, opening.next_hop))
            }
            Ok(load_balance::LoadBalancePlan::Existing(slot)) => {
                forward_by_session(A::table(sessions).entry(slot), batch, self.context.snapshot).ok()
            }
            Err(error) => {
                load_balance::reject::<A>(batch, PACKET, error, self.context);
                if let load_balance::LoadBalanceError::ForwardToOwner(_) = error {
                    self.result.class = Some(PacketClass::ForwardToOwner);
                }
                batch.stateless_replies.contains(PACKET).then_some(Forwarding::Stateless)
            }
        }
    }

    /// The stage stateless_reply.
    fn stateless<A: HeaderRewrite>(&mut self, batch: &mut Batch) {
        self.result.class = Some(PacketClass::StatelessReply);
        let Some(to) = stateless_reply::translated::<A>(batch, PACKET, self.context) else {
            return batch.decide(PACKET, Verdict::Drop(DropReason::NoSession));
        };
        if let Some(hop) = route::stateless_next_hop(batch, PACKET, to.destination, self.context.snapshot) {
            let direction = stateless_reply::direction(batch, PACKET);
            self.rewrite::<A>(batch, to, direction, hop);
        }
    }

    /// The last step: rewrites the packet as far as the next hop decision needs it.
    fn rewrite<A: HeaderRewrite>(&mut self, batch: &mut Batch, to: Tuple<A>, direction: Direction, hop: NextHop) {
        let ends = [(to.source.to_ip(), to.source_port), (to.destination.to_ip(), to.destination_port)];
        self.result.translated = Some(ends.map(Into::into));
        self.result.next_hop = Some(hop);
        rewrite::translate::<A>(batch, PACKET, to, direction);
        rewrite::forward(batch, PACKET, hop, self.context.snapshot);
    }

    /// Whether the matching session would have become a standby session by now.
    fn is_demoted(&self) -> bool {
        matches!(self.result.session, Some((_, SessionOutcome::Demoted)))
    }
}

/// The class that the classify stage has assigned.
fn packet_class(batch: &Batch) -> PacketClass {
    let is = |packets: PacketSet| packets.contains(PACKET);
    match () {
        () if is(batch.validated) => PacketClass::Session,
        () if is(batch.new_egress) => PacketClass::Egress { reopens: false },
        () if is(batch.new_inbound) => PacketClass::Inbound,
        () if is(batch.stateless_replies) => PacketClass::StatelessReply,
        () if is(batch.health_checks) => PacketClass::HealthCheck,
        () if is(batch.unchanged) => PacketClass::Unchanged,
        () => PacketClass::ForwardToOwner,
    }
}

/// The entry of a session; of a standby session as if it were active.
fn as_active<A: Address>(entry: &Entry<A>) -> Entry<A> {
    let mut entry = *entry;
    if entry.is_standby() {
        entry.mark_active();
        entry.set_generation(0);
        entry.set_next_hop(None);
    }
    entry
}

/// Forwarding by a session that an earlier packet of the batch would have opened. A probe is alone, so the route is
/// looked up.
fn forward_by_session<A: HeaderRewrite>(
    entry: &Entry<A>,
    batch: &Batch,
    snapshot: &Snapshot,
) -> Result<Forwarding<A>, DropReason> {
    let to = entry.translated();
    let hop = route::next_hop_to(to.destination, batch.hashes[PACKET], snapshot).map_err(|_| DropReason::NoRoute)?;
    Ok(Forwarding::Translated(to, entry.direction(), hop))
}
