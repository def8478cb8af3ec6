//! Opens egress sessions (SNAT), or rejects their first packets with a reason. All checks run on a draft and the
//! session is committed last, so a rejected packet changes no table.
//!
//! It looks the session up again before it opens it: an earlier packet of the same batch may have opened it.

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{Slot, TunnelRemote};
use crate::flow::tunnel_metadata::HAIRPIN_SIDE;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind, PacketSet};
use crate::policy::Snapshot;
use crate::policy::compiled::{Egress, Family, Policy, Vip};
use crate::policy::endpoints::Endpoint;
use crate::policy::network::NextHop;
use crate::policy::shard::Shard;
use crate::policy::spec::{AddressSelection, Role};
use crate::ports::allocator::{AllocationClass, Allocator, PortShard};
use crate::replication::accounting;
use crate::replication::accounting::SessionAccounting;
use crate::session::admission::Admission;
use crate::session::entry::Flags;
use crate::session::lending::Lender;
use crate::session::{Draft, SessionFamily, Sessions};
use crate::stage::context::{Context, PacketFamily, SessionRules};
use crate::stage::{encap, route};
use crate::wire::sctp::ChunkType;

/// Opens the egress sessions of the batch's first packets.
pub fn run<A: PacketFamily>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    context: &Context<'_>,
    accounting: &mut SessionAccounting<'_>,
) {
    let packets = batch.undecided_of::<A>().and(batch.new_egress);
    if packets.is_empty() {
        return;
    }
    if accounting.ports.is_predictable() {
        prefetch::<A>(batch, packets, sessions, context, accounting.ports);
    }
    for i in packets {
        match open::<A>(batch, i, sessions, context, accounting) {
            Ok(slot) => {
                batch.slots[i] = slot;
                batch.directions[i] = A::table(sessions).entry(slot).direction();
                batch.validated.insert(i);
            }
            Err(SnatError::HandOff(lender)) => hand_off(batch, i, lender),
            Err(SnatError::Rejected(reason)) if try_next_worker(batch, i, reason, sessions, context) => {}
            Err(SnatError::Rejected(reason)) if try_next_gateway::<A>(batch, i, reason, context) => {}
            Err(SnatError::Rejected(reason)) => reject::<A>(batch, i, reason, context),
        }
    }
}

/// Prefetches the groups and entries that the new sessions of the batch will be written to, so that cache misses
/// overlap. The reply's place depends on the port, which is known beforehand as long as each first random port is free.
#[inline(never)]
fn prefetch<A: PacketFamily>(
    batch: &Batch,
    packets: PacketSet,
    sessions: &Sessions,
    context: &Context<'_>,
    ports: &Allocator,
) {
    let (table, policy) = (A::table(sessions), &context.snapshot.policy);
    let mut replies = batch.homes;
    for (i, ahead) in packets.into_iter().zip(0..) {
        let origin = A::tuples(batch)[i];
        let (endpoint, egress) = policy.endpoint_by_id(batch.endpoints[i]);
        let reply = vip_candidates(policy, endpoint, egress, &origin).next().and_then(|vip| {
            let (source, part) = (A::from_ip(vip.address)?, policy.parts_of(endpoint, vip).next()?);
            let source_port = ports.preview((&vip.ports, part), ahead)?;
            Some(Tuple { source, source_port, ..origin }.reversed())
        });
        if let Some(reply) = reply {
            replies[i] = table.prefetch(sessions.hash(&reply));
        }
    }
    for i in packets {
        table.prefetch_free(batch.homes[i]);
        table.prefetch_free(replies[i]);
    }
}

/// Rejects a packet that opens no session, and counts that.
fn reject<A: PacketFamily>(batch: &mut Batch, i: usize, reason: DropReason, context: &Context<'_>) {
    if matches!(reason, DropReason::Quota | DropReason::PortsExhausted | DropReason::SessionTableFull) {
        context.snapshot.policy.endpoint_by_id(batch.endpoints[i]).0.usage.count_rejected();
    }
    if reason == DropReason::PortsExhausted {
        count_exhausted::<A>(batch, i, context);
    }
    reject_with::<A>(batch, i, reason, context);
}

/// Counts port exhaustion at each VIP that was tried, and whether the endpoint is limited to a shard of it.
#[cold]
fn count_exhausted<A: PacketFamily>(batch: &Batch, i: usize, context: &Context<'_>) {
    let policy = &context.snapshot.policy;
    let (endpoint, egress) = policy.endpoint_by_id(batch.endpoints[i]);
    let tried = vip_candidates(policy, endpoint, egress, &A::tuples(batch)[i])
        .filter(|vip| policy.parts_of(endpoint, vip).next().is_some());
    tried.for_each(|vip| vip.ports.pool.count_refused(vip.shards.is_distributed()));
}

/// Drops a packet that opens no session, with a reply to the sender unless a retry is all that it could do. A packet of
/// a shard that its former owner has not released yet is deferred until that is done and the sessions have arrived.
pub fn reject_with<A: PacketFamily>(batch: &mut Batch, i: usize, reason: DropReason, context: &Context<'_>) {
    let may_change = matches!(reason, DropReason::NoLease | DropReason::NoSession);
    let policy = &context.snapshot.policy;
    if may_change && policy.awaits_release(policy.endpoint_by_id(batch.endpoints[i]).0) {
        return batch.decide(i, Verdict::Defer(reason));
    }
    // A gateway without a lease usually renews it soon: without a reply, the sender retransmits.
    if matches!(reason, DropReason::NoSession | DropReason::NoLease | DropReason::NoOwner) {
        return batch.decide(i, Verdict::Drop(reason));
    }
    batch.reject(i, reason);
}

/// Hands a packet for which this worker has no port or no slot off to a worker not tried yet; false if there is none.
pub fn try_next_worker(
    batch: &mut Batch,
    i: usize,
    reason: DropReason,
    sessions: &Sessions,
    context: &Context<'_>,
) -> bool {
    let tried = batch.frames[i].workers_tried();
    let lender = match reason {
        DropReason::PortsExhausted => context.flows.next_lender(tried),
        DropReason::SessionTableFull => sessions.lender(Admission::Rejected, tried),
        _ => None,
    };
    if let Some(lender) = lender {
        hand_off(batch, i, lender);
    }
    lender.is_some()
}

/// Hands a packet off to another worker, which opens its session.
pub fn hand_off(batch: &mut Batch, i: usize, lender: Lender) {
    let received = &mut batch.frames[i];
    // Those between count as tried: they are full.
    for _ in 0..lender.distance {
        received.count_worker_tried();
    }
    received.mark_handed_off();
    batch.decide(i, Verdict::HandOff(lender.worker));
}

/// Forwards a packet for which no worker has a port to the next gateway that owns ports of its VIP, which opens the
/// session; false if there is none. So the packets behind it, until the session's record has arrived here.
#[cold]
pub fn try_next_gateway<A: PacketFamily>(
    batch: &mut Batch,
    i: usize,
    reason: DropReason,
    context: &Context<'_>,
) -> bool {
    let policy = &context.snapshot.policy;
    let (endpoint, egress) = policy.endpoint_by_id(batch.endpoints[i]);
    let flow = &A::tuples(batch)[i];
    let Some(vip) = vip_candidates(policy, endpoint, egress, flow).next() else { return false };
    let is_possible = match reason {
        DropReason::PortsExhausted => true,
        DropReason::NoSession => vip.ports.pool.has_port_request(context.now) && !policy.awaits_release(endpoint),
        _ => false,
    };
    if !is_possible || batch.frames[i].is_at_hop_limit() {
        return false;
    }
    let Some(to) = policy.next_port_owner(policy.owner_of_flow(endpoint, flow), vip) else { return false };
    if context.snapshot.tunnels.to(TunnelRemote::Gateway(to)).is_none() {
        return false;
    }
    if reason == DropReason::PortsExhausted && context.flows.claims {
        vip.ports.pool.note_port_request(context.now);
    }
    batch.frames[i].mark_port_request();
    encap::forward_to_owner::<A>(batch, i, to);
    true
}

/// Whether the packet alone shows that it opens a connection: a TCP SYN, an SCTP INIT.
pub fn opens_connection(batch: &Batch, i: usize) -> bool {
    match batch.headers[i].kind {
        PacketKind::Tcp => batch.segments[i].flags.is_initial_syn(),
        PacketKind::Sctp => batch.sctp_headers[i].first_chunk == ChunkType::Init,
        _ => false,
    }
}

/// Whether a packet may open a session: a SYN, an INIT, a UDP datagram, an echo request.
pub fn may_open_session(batch: &Batch, i: usize, rules: SessionRules) -> bool {
    match batch.headers[i].kind {
        PacketKind::Tcp => !rules.require_syn || batch.segments[i].flags.is_initial_syn(),
        PacketKind::Sctp => batch.sctp_headers[i].first_chunk == ChunkType::Init || !rules.require_syn,
        PacketKind::Udp | PacketKind::EchoRequest => true,
        PacketKind::EchoReply
        | PacketKind::Arp
        | PacketKind::NeighborDiscovery
        | PacketKind::IcmpError
        | PacketKind::Fragment
        | PacketKind::ResolvedFragment
        | PacketKind::Other => false,
    }
}

/// Why a pod's packet gets no session here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnatError {
    /// It is rejected, unless another worker or gateway has what this one lacks.
    Rejected(DropReason),
    /// Another worker opens the session.
    HandOff(Lender),
}

impl From<DropReason> for SnatError {
    fn from(reason: DropReason) -> Self {
        Self::Rejected(reason)
    }
}

/// How a pod's packet gets a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnatPlan {
    /// An earlier packet of the batch has opened its session.
    Existing(Slot),
    /// Open a session toward this next hop; one with the same tuple in quarantine is revived or replaced.
    Open(NextHop, Option<QuarantineAction>),
}

/// What happens to a quarantined session when its pod sends to the same remote from the same port again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuarantineAction {
    /// It becomes active again and keeps its SNAT port.
    Revive(Slot),
    /// The pod no longer has its VIP or port: a new session replaces it, and only its port stays quarantined.
    Replace(Slot),
}

/// Decides on the session of a pod's packet: everything except the quota and the port, which only the commit takes.
/// `ended`: a session that counts as ended, although it is still in the table.
///
/// # Errors
/// The reason for which it gets no session.
pub fn decide<A: PacketFamily>(
    batch: &Batch,
    i: usize,
    sessions: &Sessions,
    context: &Context<'_>,
    ended: Option<Slot>,
) -> Result<SnatPlan, DropReason> {
    let (head, hash, origin) = (batch.headers[i], batch.hashes[i], &A::tuples(batch)[i]);
    let Context { snapshot, rules, .. } = *context;
    let existing = sessions.find(hash, origin);
    if let Some(slot) = existing
        && !A::table(sessions).entry(slot).flags().has(Flags::QUARANTINED)
        && ended != Some(slot)
    {
        // A standby session: it uses another VIP of the pod, which another gateway owns.
        let is_copy = A::table(sessions).entry(slot).is_standby();
        return if is_copy { Err(DropReason::NoOwner) } else { Ok(SnatPlan::Existing(slot)) };
    }
    if !may_open_session(batch, i, rules) {
        return Err(DropReason::NoSession);
    }
    if head.ttl <= 1 {
        return Err(DropReason::Ttl);
    }
    let next_hop = route::next_hop_to(origin.destination, hash, snapshot).map_err(|_| DropReason::NoRoute)?;
    let (endpoint, _) = snapshot.policy.endpoint_by_id(batch.endpoints[i]);
    // The former owner of the endpoint's shard may have a session of this flow.
    if context.lease_expired || snapshot.policy.awaits_release(endpoint) {
        return Err(DropReason::NoLease);
    }
    let quarantined = existing.map(|slot| quarantine_action(slot, origin, sessions, snapshot)).transpose()?;
    Ok(SnatPlan::Open(next_hop, quarantined))
}

fn open<A: PacketFamily>(
    batch: &Batch,
    i: usize,
    sessions: &mut Sessions,
    context: &Context<'_>,
    accounting: &mut SessionAccounting<'_>,
) -> Result<Slot, SnatError> {
    let (next_hop, quarantined) = match decide::<A>(batch, i, sessions, context, None)? {
        SnatPlan::Existing(slot) => return Ok(slot),
        SnatPlan::Open(next_hop, quarantined) => (next_hop, quarantined),
    };
    let Context { snapshot, now, .. } = *context;
    let (endpoint, egress) = snapshot.policy.endpoint_by_id(batch.endpoints[i]);
    let claim = endpoint.usage.open(egress.spec.limits, now).map_err(|_| DropReason::Quota)?;
    let committed = if let Some(QuarantineAction::Revive(slot)) = quarantined {
        revive::<A>(slot, next_hop, sessions, context).map_err(SnatError::from)
    } else {
        let (origin, hash, workers_tried) = (A::tuples(batch)[i], batch.hashes[i], batch.frames[i].workers_tried());
        let opening = Opening { origin, hash, endpoint, egress, quarantined, workers_tried };
        commit(&opening, claim, next_hop, sessions, context, accounting.ports)
    };
    if let Ok(slot) = committed {
        accounting.opened::<A>(slot, sessions, now);
        if batch.frames[i].requests_port() {
            accounting.replication_queue.opened_for_other::<A>(slot, now);
        }
        if batch.frames[i].workers_tried() > 0 {
            context.flows.claim(&A::tuples(batch)[i]);
        }
    } else {
        endpoint.usage.undo_open(now);
    }
    committed
}

/// The table capacity for reviving a quarantined session: its entries are already in the table. `ended`: a session that
/// would have ended before.
pub fn capacity_to_revive<A: SessionFamily>(slot: Slot, sessions: &Sessions, ended: Option<Slot>) -> Admission {
    let entry = A::table(sessions).entry(slot);
    sessions.admission(entry.translated().source, entry.key().source, ended, 1)
}

/// The table capacity for a new session of the pod that sends `origin`, translated to `vip`. A quarantined session that
/// it replaces frees its entries if it is a client's; otherwise its quarantined port keeps them. `ended`: a session
/// that would have ended before.
pub fn capacity_to_open<A: SessionFamily>(
    vip: A,
    origin: &Tuple<A>,
    quarantined: Option<QuarantineAction>,
    sessions: &Sessions,
    ended: Option<Slot>,
) -> Admission {
    let of_service = |slot: Slot| A::table(sessions).entry(slot).is_dnat();
    let is_freed = matches!(quarantined, Some(QuarantineAction::Replace(slot)) if of_service(slot));
    sessions.admission(vip, origin.source, ended, is_freed.into())
}

fn revive<A: SessionFamily>(
    slot: Slot,
    next_hop: NextHop,
    sessions: &mut Sessions,
    context: &Context<'_>,
) -> Result<Slot, DropReason> {
    let Context { snapshot, now, .. } = *context;
    if capacity_to_revive::<A>(slot, sessions, None) == Admission::Rejected {
        return Err(DropReason::SessionTableFull);
    }
    let hop_and_side = (route::hop_id(next_hop), reply_side(next_hop, snapshot));
    sessions.reopen::<A>(slot, hop_and_side, snapshot.generation, now);
    Ok(slot)
}

/// The side on which replies from this next hop arrive; hairpin for another VIP of this gateway.
fn reply_side(next_hop: NextHop, snapshot: &Snapshot) -> u8 {
    let out = route::egress_interface(next_hop, snapshot);
    out.map_or(HAIRPIN_SIDE, |out| snapshot.network.interface(out).role.reply_side())
}

/// Decides what happens to the quarantined session in `slot` when this first packet arrives.
///
/// # Errors
/// When it can't be replaced: the packet's tuple is the reply tuple of a quarantined port, so it is to a VIP, from a
/// remote that is a pod itself and replies to a session that has ended.
fn quarantine_action<A: SessionFamily>(
    slot: Slot,
    origin: &Tuple<A>,
    sessions: &Sessions,
    snapshot: &Snapshot,
) -> Result<QuarantineAction, DropReason> {
    let entry = A::table(sessions).entry(slot);
    if entry.is_dnat() {
        return Ok(QuarantineAction::Replace(slot));
    }
    if !entry.flags().has(Flags::ORIGIN) {
        return Err(DropReason::NoService);
    }
    let vip = (entry.translated().source, entry.translated().source_port);
    // The former owner of the shard may have reused the port.
    let shard = snapshot.policy.vip(vip.0).and_then(|it| it.shards.of_port(vip.1));
    let is_permitted = snapshot.policy.permits(origin.source, origin.destination, vip);
    if is_permitted && shard.is_some_and(Shard::awaits_release) {
        return Err(DropReason::NoLease);
    }
    Ok(if is_permitted && shard.is_none_or(|it| it.may_open) {
        QuarantineAction::Revive(slot)
    } else {
        QuarantineAction::Replace(slot)
    })
}

/// A session to be opened.
#[derive(Debug)]
pub struct Opening<'a, A> {
    /// Its first packet's tuple.
    pub origin: Tuple<A>,
    /// The hash of that tuple.
    pub hash: u64,
    /// The pod.
    pub endpoint: &'a Endpoint,
    /// The pod's policy.
    pub egress: &'a Egress,
    /// What happens to a quarantined session of the same tuple.
    pub quarantined: Option<QuarantineAction>,
    /// Workers that could not open it.
    pub workers_tried: u8,
}

/// A VIP that a session may use.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a, A> {
    pub vip: &'a Vip,
    pub address: A,
    /// The part of its ports to allocate from.
    pub part: PortShard<'a>,
    /// Where in the session table the session has its place.
    pub room: Admission,
}

impl<'a, A: SessionFamily> Opening<'a, A> {
    /// Selects a VIP: the first one that has a shard on this gateway, a place in the session table and, as `allocate`
    /// finds out, a port. `ended`: a session that counts as ended, although it is still in the table.
    ///
    /// # Errors
    /// The reason for which the last candidate was no use.
    pub fn select_vip<P>(
        &self,
        sessions: &Sessions,
        snapshot: &'a Snapshot,
        ended: Option<Slot>,
        mut allocate: impl FnMut(&Candidate<'a, A>) -> Option<P>,
    ) -> Result<(Candidate<'a, A>, P), SnatError> {
        let mut reason = DropReason::NoVip;
        for vip in vip_candidates(&snapshot.policy, self.endpoint, self.egress, &self.origin) {
            let Some(address) = A::from_ip(vip.address) else { continue };
            let room = capacity_to_open(address, &self.origin, self.quarantined, sessions, ended);
            if room == Admission::Rejected {
                reason = DropReason::SessionTableFull;
                continue;
            }
            // Here it would end another session.
            if room == Admission::Reserved
                && let Some(lender) = sessions.lender(room, self.workers_tried)
            {
                return Err(SnatError::HandOff(lender));
            }
            let parts = snapshot.policy.parts_of(self.endpoint, vip);
            reason = DropReason::NoLease;
            for part in parts {
                let candidate = Candidate { vip, address, part, room };
                match allocate(&candidate) {
                    Some(port) => return Ok((candidate, port)),
                    None => reason = DropReason::PortsExhausted,
                }
            }
        }
        Err(reason.into())
    }

    /// The translated tuple of the first packet.
    pub fn translated(&self, vip: A, port: u16) -> Tuple<A> {
        Tuple { source: vip, source_port: port, ..self.origin }
    }
}

fn commit<A: SessionFamily>(
    opening: &Opening<'_, A>,
    claim: AllocationClass,
    next_hop: NextHop,
    sessions: &mut Sessions,
    context: &Context<'_>,
    ports: &mut Allocator,
) -> Result<Slot, SnatError> {
    let Context { snapshot, now, .. } = *context;
    let (Candidate { vip, address, .. }, port) = opening.select_vip(sessions, snapshot, None, |candidate| {
        let Candidate { vip, address, part, .. } = *candidate;
        let is_free = |port: u16| sessions.is_free(&opening.translated(address, port).reversed());
        ports.allocate((&vip.ports, part), &opening.translated(address, 0), claim, now, is_free).ok()
    })?;
    let draft = Draft {
        origin: opening.origin,
        translated: opening.translated(address, port),
        direction: Direction::Egress,
        reply_direction: Direction::Reply,
        origin_side: Role::Inside.sides(),
        reply_side: reply_side(next_hop, snapshot),
        next_hop: route::hop_id(next_hop),
        generation: snapshot.generation,
    };
    // Replace the quarantined session only now: a rejected packet must not end it.
    if let Some(QuarantineAction::Replace(slot)) = opening.quarantined {
        accounting::free_tuple::<A>(slot, sessions, &snapshot.policy, ports);
    }
    sessions.commit(&draft, now).map_err(|_| {
        ports.release(&vip.ports, &draft.translated);
        DropReason::SessionTableFull.into()
    })
}

/// The candidate VIPs of a flow's session, in order of preference. An endpoint keeps its VIP, exhausted or not (RFC 4787
/// REQ-2 and REQ-11); only address selection per connection allows another choice.
pub fn vip_candidates<'a, A: Family>(
    policy: &'a Policy,
    endpoint: &'a Endpoint,
    egress: &Egress,
    flow: &Tuple<A>,
) -> impl Iterator<Item = &'a Vip> + use<'a, A> {
    let mut vips = policy.vips_of(endpoint).filter(|vip| A::from_ip(vip.address).is_some());
    let (first, is_per_connection) = match egress.spec.address_selection {
        AddressSelection::PerEndpoint => (vips.next(), false),
        AddressSelection::PerConnection => (policy.vip_of_flow(endpoint, flow), true),
    };
    let others = vips.filter(move |vip| is_per_connection && first.is_none_or(|first| first.address != vip.address));
    first.into_iter().chain(others)
}
