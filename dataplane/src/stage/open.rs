//! Sixth stage: what may open a session does, or is refused by name. Everything is decided on a draft; the last step
//! commits it, so a refusal leaves no trace.
//!
//! It looks again before it opens: an earlier packet of the same batch may have opened the session.

use crate::batch::{Batch, Kind, Lane};
use crate::counters::{Direction, DropReason};
use crate::pipeline::Context;
use crate::ports::allocator::{Allocator, Claim, Part};
use crate::session::entry::{Flags, Slot};
use crate::session::room::Room;
use crate::session::tuple::{HashKey, Tuple};
use crate::session::{Draft, SessionFamily, Sessions};
use crate::settle::{self, Settle};
use crate::snapshot::Snapshot;
use crate::snapshot::endpoints::Endpoint;
use crate::snapshot::network::NextHop;
use crate::snapshot::policy::{Egress, Vip};
use crate::snapshot::shares::Share;
use crate::snapshot::spec::{AROUND, AddressSelection, Role};
use crate::stage::route;
use crate::verdict::Verdict;
use crate::wire::sctp::Chunk;

/// What the configuration says about connections.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Only a SYN opens a TCP session.
    pub require_syn: bool,
    /// The secret of what the gateway says at VIPs: the same for all workers.
    pub secret: HashKey,
    /// Whether clients hear that nobody listens where no Service is.
    pub reject_no_service: bool,
    /// Whether they hear that a Service has no backend.
    pub reject_no_backend: bool,
    /// The largest segment size that a SYN of IPv4 may announce; that of IPv6 is 20 bytes smaller. `None`: any.
    pub mss: Option<u16>,
}

/// Opens the sessions of the batch's first packets.
pub fn run<A: Lane>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>, settle: &mut Settle<'_>) {
    for i in batch.open_of::<A>().and(batch.opening) {
        match open::<A>(batch, i, sessions, context, settle) {
            Ok(slot) => {
                batch.slots[i] = slot;
                batch.directions[i] = A::table(sessions).entry(slot).direction();
                batch.known.insert(i);
            }
            Err(reason) => refuse::<A>(batch, i, reason, context),
        }
    }
}

/// Ends the way of a packet that opens no session here. Another worker may have ports left.
fn refuse<A: Lane>(batch: &mut Batch, i: usize, reason: DropReason, context: &Context<'_>) {
    if ask_another(batch, i, reason, context) {
        return;
    }
    if matches!(reason, DropReason::Quota | DropReason::PortsExhausted | DropReason::SessionTableFull) {
        context.view.policy.endpoint_with(batch.endpoints[i]).0.usage.refuse();
    }
    if reason == DropReason::PortsExhausted {
        count_exhausted::<A>(batch, i, context);
    }
    refuse_with::<A>(batch, i, reason, context);
}

/// Counts at each VIP that was tried that it has no port here, and whether the endpoint's shard is only a part of it.
#[cold]
fn count_exhausted<A: Lane>(batch: &Batch, i: usize, context: &Context<'_>) {
    let policy = &context.view.policy;
    let (endpoint, egress) = policy.endpoint_with(batch.endpoints[i]);
    let tried = candidates(policy.vips_of(endpoint), egress.spec.address_selection, batch.hashes[i])
        .filter(|vip| A::from_ip(vip.address).is_some() && part_of(endpoint, vip, context.view).is_ok());
    tried.for_each(|vip| vip.pool.refuse(vip.shares.is_shared()));
}

/// Drops a packet that opens no session; its sender may hear of it, unless asking again is all that it could do. One of a share
/// that its former owner has not released yet waits for that, and for the sessions that come with it.
pub fn refuse_with<A: Lane>(batch: &mut Batch, i: usize, reason: DropReason, context: &Context<'_>) {
    if matches!(reason, DropReason::NoLease | DropReason::NoSession) && is_share_coming::<A>(batch, i, context) {
        return batch.decide(i, Verdict::Defer(reason));
    }
    // Who is left without a lease has it again in a moment: whoever hears nothing asks again.
    if matches!(reason, DropReason::NoSession | DropReason::NoLease | DropReason::NoOwner) {
        return batch.decide(i, Verdict::Drop(reason));
    }
    batch.refuse(i, reason);
}

/// Whether the pod's share of a VIP is this gateway's, and its former owner has not released it yet.
#[cold]
fn is_share_coming<A: Lane>(batch: &Batch, i: usize, context: &Context<'_>) -> bool {
    let policy = &context.view.policy;
    let (endpoint, _) = policy.endpoint_with(batch.endpoints[i]);
    let vips = policy.vips_of(endpoint).filter(|vip| A::from_ip(vip.address).is_some());
    vips.filter_map(|vip| policy.share_of(endpoint, vip)).any(Share::is_coming)
}

/// Sends a packet for which this worker has no port to the next one that hasn't been asked; false if there is none.
pub fn ask_another(batch: &mut Batch, i: usize, reason: DropReason, context: &Context<'_>) -> bool {
    let received = &mut batch.frames[i];
    let lender = context.flows.lender(received.asked()).filter(|_| reason == DropReason::PortsExhausted);
    let Some(lender) = lender else { return false };
    received.ask_another();
    received.settle();
    batch.decide(i, Verdict::HandOff(lender));
    true
}

/// Whether a packet begins something, as can be seen from it alone: a SYN, an INIT.
pub fn begins(batch: &Batch, i: usize) -> bool {
    match batch.heads[i].kind {
        Kind::Tcp => batch.segments[i].flags.opens(),
        Kind::Sctp => batch.associations[i].first_chunk == Chunk::Init,
        _ => false,
    }
}

/// Whether a packet is of a kind that opens sessions: a SYN, a datagram, a question.
pub fn may_open(batch: &Batch, i: usize, rules: Rules) -> bool {
    match batch.heads[i].kind {
        Kind::Tcp => !rules.require_syn || batch.segments[i].flags.opens(),
        Kind::Sctp => batch.associations[i].first_chunk == Chunk::Init || !rules.require_syn,
        Kind::Udp | Kind::EchoRequest => true,
        Kind::EchoReply | Kind::Arp | Kind::Neighbour | Kind::Error | Kind::Fragment | Kind::Piece | Kind::Other => {
            false
        }
    }
}

/// What is to be done for a pod's packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Nothing: an earlier packet has opened its session.
    Known(Slot),
    /// Its session is opened; one with its ends that is in quarantine is taken up again or makes room for it.
    Open(NextHop, Option<Quarantined>),
}

/// What becomes of a session in quarantine whose pod sends again to the same remote from the same port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quarantined {
    /// It is taken up again, with its port.
    Revives(Slot),
    /// Its VIP or its port isn't the pod's any more: a new one takes its place, and only its port stays in quarantine.
    MakesRoom(Slot),
}

/// What is to be done for a pod's packet, short of what is counted and given out only with the session itself: quota and port.
///
/// # Errors
/// Why it gets no session.
pub fn plan<A: Lane>(batch: &Batch, i: usize, sessions: &Sessions, context: &Context<'_>) -> Result<Plan, DropReason> {
    let (head, hash, origin) = (batch.heads[i], batch.hashes[i], &A::tuples(batch)[i]);
    let Context { view, rules, .. } = *context;
    let known = sessions.find(hash, origin);
    if let Some(slot) = known
        && !A::table(sessions).entry(slot).flags().has(Flags::QUARANTINED)
        && !batch.ended.contains(i)
    {
        // By way of another VIP of the pod, which another gateway has.
        let is_copy = A::table(sessions).entry(slot).is_copy();
        return if is_copy { Err(DropReason::NoOwner) } else { Ok(Plan::Known(slot)) };
    }
    if !may_open(batch, i, rules) {
        return Err(DropReason::NoSession);
    }
    if head.ttl <= 1 {
        return Err(DropReason::Ttl);
    }
    let next_hop = route::hop_to(origin.destination, hash, view).map_err(|_| DropReason::NoRoute)?;
    if context.is_lapsed {
        return Err(DropReason::NoLease);
    }
    let quarantined = known.map(|slot| quarantined(slot, origin, sessions, view)).transpose()?;
    Ok(Plan::Open(next_hop, quarantined))
}

fn open<A: Lane>(
    batch: &Batch,
    i: usize,
    sessions: &mut Sessions,
    context: &Context<'_>,
    settle: &mut Settle<'_>,
) -> Result<Slot, DropReason> {
    let (next_hop, quarantined) = match plan::<A>(batch, i, sessions, context)? {
        Plan::Known(slot) => return Ok(slot),
        Plan::Open(next_hop, quarantined) => (next_hop, quarantined),
    };
    let (origin, Context { view, now, .. }) = (&A::tuples(batch)[i], *context);
    let (endpoint, egress) = view.policy.endpoint_with(batch.endpoints[i]);
    let claim = endpoint.usage.open(egress.spec.limits, now).map_err(|_| DropReason::Quota)?;
    let committed = if let Some(Quarantined::Revives(slot)) = quarantined {
        revive::<A>(slot, next_hop, sessions, context)
    } else {
        commit::<A>(batch, i, next_hop, quarantined, (endpoint, egress, claim), sessions, context, settle.ports)
    };
    if let Ok(slot) = committed {
        settle.born::<A>(slot, sessions, now);
        if batch.frames[i].asked() > 0 {
            context.flows.take_over(origin);
        }
    } else {
        endpoint.usage.withdraw(now);
    }
    committed
}

/// What room there is for a session that a session in quarantine becomes again: its entries are in the table already. The one in the
/// slot `ended` would have ended before.
pub fn room_to_revive<A: SessionFamily>(slot: Slot, sessions: &Sessions, ended: Option<Slot>) -> Room {
    let entry = A::table(sessions).entry(slot);
    sessions.room(entry.to().source, entry.key().source, ended, 1)
}

/// What room there is for a new session of the pod that sends `origin`, and that leaves as `vip`. If it takes the place of one in quarantine,
/// that leaves the table if it was a client's; else its port keeps it there. The one in the slot `ended` would have ended before.
pub fn room_to_open<A: SessionFamily>(
    vip: A,
    origin: &Tuple<A>,
    quarantined: Option<Quarantined>,
    sessions: &Sessions,
    ended: Option<Slot>,
) -> Room {
    let of_service = |slot: Slot| A::table(sessions).entry(slot).is_of_service();
    let is_gone = matches!(quarantined, Some(Quarantined::MakesRoom(slot)) if of_service(slot));
    sessions.room(vip, origin.source, ended, is_gone.into())
}

fn revive<A: SessionFamily>(
    slot: Slot,
    next_hop: NextHop,
    sessions: &mut Sessions,
    context: &Context<'_>,
) -> Result<Slot, DropReason> {
    let Context { view, now, .. } = *context;
    if room_to_revive::<A>(slot, sessions, None) == Room::None {
        return Err(DropReason::SessionTableFull);
    }
    let way = (route::number(next_hop), answers_from(next_hop, view));
    sessions.revive::<A>(slot, way, view.generation, now);
    Ok(slot)
}

/// The side that the answers to what goes there come from. What answers by way of another VIP comes around.
fn answers_from(next_hop: NextHop, view: &Snapshot) -> u8 {
    let out = route::interface(next_hop, view);
    out.map_or(AROUND, |out| view.network.interface(out).role.answers_from())
}

/// What becomes of the session in `slot`, which has ended, when this first packet comes.
///
/// # Errors
/// When it can't make room: the packet looks like answers by way of a VIP whose port is in quarantine.
fn quarantined<A: SessionFamily>(
    slot: Slot,
    origin: &Tuple<A>,
    sessions: &Sessions,
    view: &Snapshot,
) -> Result<Quarantined, DropReason> {
    let entry = A::table(sessions).entry(slot);
    if entry.is_of_service() {
        return Ok(Quarantined::MakesRoom(slot));
    }
    if !entry.flags().has(Flags::ORIGIN) {
        return Err(DropReason::NoPolicy);
    }
    let vip = (entry.to().source, entry.to().source_port);
    // Whoever has had the share may have given its port to another by now.
    let share = view.policy.vip(vip.0).and_then(|it| it.shares.of_port(vip.1));
    let is_its = view.policy.permits(origin.source, origin.destination, vip);
    if is_its && share.is_some_and(Share::is_coming) {
        return Err(DropReason::NoLease);
    }
    Ok(if is_its && share.is_none_or(|it| it.may_open) {
        Quarantined::Revives(slot)
    } else {
        Quarantined::MakesRoom(slot)
    })
}

fn commit<A: Lane>(
    batch: &Batch,
    i: usize,
    next_hop: NextHop,
    quarantined: Option<Quarantined>,
    (endpoint, egress, claim): (&Endpoint, &Egress, Claim),
    sessions: &mut Sessions,
    context: &Context<'_>,
    ports: &mut Allocator,
) -> Result<Slot, DropReason> {
    let Context { view, now, .. } = *context;
    let origin = &A::tuples(batch)[i];
    let mut reason = DropReason::NoVip;
    for vip in candidates(view.policy.vips_of(endpoint), egress.spec.address_selection, batch.hashes[i]) {
        let Some(address) = A::from_ip(vip.address) else { continue };
        let Ok(part) = part_of(endpoint, vip, view) else {
            reason = DropReason::NoLease;
            continue;
        };
        if room_to_open(address, origin, quarantined, sessions, None) == Room::None {
            reason = DropReason::SessionTableFull;
            continue;
        }
        let through = |port: u16| translate(origin, address, port);
        let port =
            ports.allocate((vip, part), &through(0), claim, now, |port| sessions.is_free(&through(port).reversed()));
        let Ok(port) = port else {
            reason = DropReason::PortsExhausted;
            continue;
        };
        let draft = Draft {
            origin: *origin,
            translated: through(port),
            direction: Direction::Egress,
            reply_direction: Direction::Reply,
            origin_side: Role::Inside.sides(),
            reply_side: answers_from(next_hop, view),
            next_hop: route::number(next_hop),
            generation: view.generation,
        };
        // Whoever is refused may still want the one in quarantine: it makes room when nothing else stands in the way.
        if let Some(Quarantined::MakesRoom(slot)) = quarantined {
            settle::vacate::<A>(slot, sessions, &view.policy, ports);
        }
        return sessions.commit(&draft, now).map_err(|_| {
            ports.release(vip, &draft.translated);
            DropReason::SessionTableFull
        });
    }
    Err(reason)
}

/// No part of a VIP is an endpoint's here, now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoPart;

/// The part of a VIP's ports that an endpoint's sessions are of; all where it isn't cut. Both directions of a session stay with one gateway:
/// its port is of the share that its endpoint is of.
///
/// # Errors
/// When there is none, or it can't be used now.
pub fn part_of<'a>(endpoint: &Endpoint, vip: &'a Vip, view: &Snapshot) -> Result<Option<Part<'a>>, NoPart> {
    let share = view.policy.share_of(endpoint, vip);
    if share.is_some_and(|share| !share.may_open) || (share.is_none() && !vip.shares.list().is_empty()) {
        return Err(NoPart);
    }
    Ok(share.map(Share::part))
}

/// The VIPs that a session may leave with, best first. An endpoint keeps its VIP, full or not (RFC 4787 REQ-2 and
/// REQ-11); only where policy says "per connection" there is a second choice.
pub fn candidates<'a>(
    vips: impl ExactSizeIterator<Item = &'a Vip> + Clone,
    selection: AddressSelection,
    hash: u64,
) -> impl Iterator<Item = &'a Vip> {
    let count = vips.len();
    let (first, choices) = match selection {
        _ if count == 0 => (0, 0),
        AddressSelection::PerEndpoint => (0, 1),
        AddressSelection::PerConnection => ((hash >> 40) as usize % count, count),
    };
    vips.clone().chain(vips).skip(first).take(choices)
}

/// The first packet as it leaves.
pub fn translate<A: SessionFamily>(origin: &Tuple<A>, vip: A, port: u16) -> Tuple<A> {
    Tuple { source: vip, source_port: port, ..*origin }
}
