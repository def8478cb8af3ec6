//! Clients' first packets to a Service: each gets a backend and a session, or is refused by name. As with pods' sessions,
//! everything is decided on a draft and committed last, and an earlier packet of the batch may have opened it already.
//!
//! Only the destination is translated: the backend sees the client's own address.

use crate::batch::{Batch, Lane, MOST};
use crate::counters::{Direction, DropReason};
use crate::link::affinity::Print;
use crate::pipeline::Context;
use crate::ports::pool::WorkerId;
use crate::session::embryonic::Embryonic;
use crate::session::entry::{Flags, Slot};
use crate::session::room::Room;
use crate::session::table::Home;
use crate::session::tuple::Tuple;
use crate::session::{Draft, SessionFamily, Sessions};
use crate::settle::Settle;
use crate::snapshot::maglev;
use crate::snapshot::network::NextHop;
use crate::snapshot::service::{Frontend, FrontendId, Service, Target};
use crate::snapshot::spec::{AROUND, BackendState, Role, Scope};
use crate::stage::open::may_open;
use crate::stage::route;
use crate::verdict::Verdict;

/// Other backends that are tried for a client who has a session with the same ends by way of another frontend.
const TURNS: u32 = 4;
/// Other ports of the client that are tried then.
const PORTS: u16 = 16;

/// Opens the sessions of the batch's first packets to Services.
pub fn run<A: Lane>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    embryonic: &mut Embryonic,
    context: &Context<'_>,
    settle: &mut Settle<'_>,
) {
    if batch.open_of::<A>().and(batch.inbound).is_empty() {
        return;
    }
    fetch::<A>(batch, sessions, context);
    for i in batch.open_of::<A>().and(batch.inbound) {
        match serve::<A>(batch, i, sessions, context, settle) {
            Ok(Served { slot, is_new }) => {
                batch.slots[i] = slot;
                batch.directions[i] = A::table(sessions).entry(slot).direction();
                batch.known.insert(i);
                let origin = &A::tuples(batch)[i];
                if let Some(vip) = context.view.policy.vip(origin.destination).filter(|_| is_new) {
                    embryonic.push(slot, origin, vip.id);
                }
            }
            Err(Unserved::Elsewhere(worker)) => {
                batch.frames[i].settle();
                batch.decide(i, Verdict::HandOff(worker));
            }
            // The network, or a death, has sent a client of another gateway here: the table of backends is the same everywhere.
            Err(Unserved::Refused(DropReason::NoSession)) if is_of_several::<A>(batch, i, context) => {
                batch.stateless.insert(i);
            }
            Err(Unserved::Refused(reason @ DropReason::NoSession)) => batch.decide(i, Verdict::Drop(reason)),
            Err(Unserved::Refused(reason)) => batch.refuse(i, reason),
        }
    }
}

/// The session of a packet.
struct Served {
    slot: Slot,
    is_new: bool,
}

/// Why there is none here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unserved {
    /// Nobody serves it, or not this one.
    Refused(DropReason),
    /// Another worker may have a session that looks the same to the backend, and can tell.
    Elsewhere(WorkerId),
}

impl From<DropReason> for Unserved {
    fn from(reason: DropReason) -> Self {
        Self::Refused(reason)
    }
}

/// Whether the VIP that a packet is for is served by several gateways.
pub fn is_of_several<A: Lane>(batch: &Batch, i: usize, context: &Context<'_>) -> bool {
    let vip = context.view.policy.vip(A::tuples(batch)[i].destination);
    vip.is_some_and(|vip| !vip.shares.list().is_empty())
}

/// A client's packet as the backend gets it that new sessions of this client would have; `None` where there is none, or the client isn't
/// admitted.
pub fn without_session<A: Lane>(
    origin: &Tuple<A>,
    id: FrontendId,
    sides: u8,
    context: &Context<'_>,
) -> Option<Tuple<A>> {
    let (service, frontend) = frontend::<A>(id, context)?;
    let outside = is_outside(sides);
    if outside && !A::half(service).admits(origin.source) {
        return None;
    }
    let hash = match service.spec.affinity {
        Some(_) => maglev::of_client(origin.source),
        None => maglev::of_session(origin),
    };
    let target = frontend.targets.get(usize::from(frontend.table(outside).choose(hash, 0)?))?;
    Some(target.serves(origin))
}

/// Fetches what new sessions will be written to, for all before the first: as with packets of known ones, memory is what takes time.
#[inline(never)]
fn fetch<A: Lane>(batch: &Batch, sessions: &Sessions, context: &Context<'_>) {
    let table = A::table(sessions);
    let mut homes = [[Home::default(); 2]; MOST];
    let packets = batch.open_of::<A>().and(batch.inbound);
    for i in packets {
        let origin = A::tuples(batch)[i];
        homes[i][0] = table.prefetch(batch.hashes[i]);
        let Some((_, frontend)) = frontend::<A>(batch.frontends[i], context) else { continue };
        let choices = frontend.table(is_outside(batch.heads[i].sides));
        let Some(target) = choices.choose(maglev::of_session(&origin), 0) else { continue };
        let Some(target) = frontend.targets.get(usize::from(target)) else { continue };
        homes[i][1] = table.prefetch(sessions.hash(&target.serves(&origin).reversed()));
    }
    for i in packets {
        homes[i].into_iter().for_each(|home| table.prefetch_free(home));
    }
}

/// What is to be done for a client's packet.
#[derive(Debug)]
pub enum Plan<'a, A> {
    /// Nothing: an earlier packet has opened its session.
    Known(Slot),
    /// Its session is opened.
    Open(Opening<'a, A>),
}

/// A session that a client is to get.
#[derive(Debug)]
pub struct Opening<'a, A> {
    /// One with the same ends that has ended, and makes room for it.
    pub ended: Option<Slot>,
    /// The Service.
    pub service: &'a Service,
    /// Its backend.
    pub target: &'a Target<A>,
    /// The first packet as it goes there.
    pub translated: Tuple<A>,
    /// And by which way.
    pub next_hop: NextHop,
}

/// What is to be done for a client's packet, short of whether there is room for one more session.
///
/// # Errors
/// Why it gets no session here.
pub fn plan<'a, A: Lane>(
    batch: &Batch,
    i: usize,
    sessions: &Sessions,
    context: &Context<'a>,
) -> Result<Plan<'a, A>, Unserved> {
    let (head, hash, origin) = (batch.heads[i], batch.hashes[i], &A::tuples(batch)[i]);
    let Context { view, rules, .. } = *context;
    let known = sessions.find(hash, origin);
    if let Some(slot) = known
        && !A::table(sessions).entry(slot).flags().has(Flags::QUARANTINED)
        && !batch.ended.contains(i)
    {
        if A::table(sessions).entry(slot).is_copy() {
            return Err(DropReason::NoOwner.into());
        }
        return Ok(Plan::Known(slot));
    }
    if !may_open(batch, i, rules) {
        return Err(DropReason::NoSession.into());
    }
    if head.ttl <= 1 {
        return Err(DropReason::Ttl.into());
    }
    let (service, frontend) = frontend::<A>(batch.frontends[i], context).ok_or(DropReason::NoService)?;
    let is_outside = is_outside(head.sides);
    if is_outside && !A::half(service).admits(origin.source) {
        return Err(DropReason::SourceRange.into());
    }
    // A port of the VIP that rests is a frontend's in a moment.
    if known.is_some_and(|ended| !A::table(sessions).entry(ended).is_of_service()) {
        return Err(DropReason::TupleInUse.into());
    }
    let client = Client { origin: *origin, is_outside, is_settled: batch.frames[i].is_settled(), ended: known };
    let (target, translated) = choose(&client, service, frontend, sessions, context)?;
    let next_hop = route::hop_to(translated.destination, hash, view).map_err(|_| DropReason::NoRoute)?;
    Ok(Plan::Open(Opening { ended: known, service, target, translated, next_hop }))
}

/// Finds or opens the session of a packet.
fn serve<A: Lane>(
    batch: &Batch,
    i: usize,
    sessions: &mut Sessions,
    context: &Context<'_>,
    settle: &mut Settle<'_>,
) -> Result<Served, Unserved> {
    let Opening { ended, service, target, translated, next_hop } = match plan::<A>(batch, i, sessions, context)? {
        Plan::Known(slot) => return Ok(Served { slot, is_new: false }),
        Plan::Open(opening) => opening,
    };
    let (head, origin, Context { view, now, .. }) = (batch.heads[i], &A::tuples(batch)[i], *context);
    if sessions.room(origin.destination, origin.destination, None, ended.is_some().into()) == Room::None {
        return Err(DropReason::SessionTableFull.into());
    }
    if let Some(ended) = ended {
        // Ended sessions are in no packet's hands.
        let (origin, _) = sessions.both::<A>(ended);
        sessions.remove::<A>(origin);
    }
    let out = route::interface(next_hop, view);
    let draft = Draft {
        origin: *origin,
        translated,
        direction: Direction::Inbound,
        reply_direction: Direction::ServiceReply,
        origin_side: side_of(head.sides),
        reply_side: out.map_or(AROUND, |out| view.network.interface(out).role.pods_from()),
        next_hop: route::number(next_hop),
        generation: view.generation,
    };
    let slot = sessions.commit(&draft, now).map_err(|_| DropReason::SessionTableFull)?;
    target.usage.open();
    settle.born::<A>(slot, sessions, now);
    context.flows.take_over(&translated.reversed());
    if batch.frames[i].is_settled() {
        context.flows.take_over(origin);
    }
    if service.spec.affinity.is_some() {
        context.affinity.note(origin.source, service.id, Print::of(target.address), now);
    }
    Ok(Served { slot, is_new: true })
}

/// Whoever opens a session with a Service.
struct Client<A> {
    origin: Tuple<A>,
    is_outside: bool,
    /// Another worker has handed it over: this one decides.
    is_settled: bool,
    /// Its former session, which counts no more.
    ended: Option<Slot>,
}

/// Whether packets from these sides come from outside the cluster.
fn is_outside(sides: u8) -> bool {
    sides & Role::Outside.sides() != 0
}

/// The side that packets come from, if it can be the world's, that.
fn side_of(sides: u8) -> u8 {
    [Role::Outside.sides(), Role::Inside.sides()].into_iter().find(|side| sides & side != 0).unwrap_or(AROUND)
}

fn frontend<'a, A: Lane>(id: FrontendId, context: &Context<'a>) -> Option<(&'a Service, &'a Frontend<A>)> {
    let service = context.view.policy.service(id.service)?;
    Some((service, A::half(service).frontends.get(usize::from(id.port))?))
}

/// The backend for a client, and its first packet as it goes there.
fn choose<'a, A: SessionFamily>(
    client: &Client<A>,
    service: &Service,
    frontend: &'a Frontend<A>,
    sessions: &Sessions,
    context: &Context<'_>,
) -> Result<(&'a Target<A>, Tuple<A>), Unserved> {
    let table = frontend.table(client.is_outside);
    let at = |turn: u32, hash: u64| table.choose(hash, turn).and_then(|place| frontend.targets.get(usize::from(place)));
    let Client { origin, .. } = client;
    // Two ways of one client to one backend would look the same to it.
    let was = client.ended.map(|ended| A::table(sessions).entry(ended).twin());
    let is_free = |to: &Tuple<A>| {
        let answer = to.reversed();
        let user = sessions.find(sessions.hash(&answer), &answer);
        user.is_none_or(|slot| was == Some(slot))
    };
    let (first, turns, hash) = if let Some(seconds) = service.spec.affinity {
        let hash = maglev::of_client(origin.source);
        let print = context.affinity.find(origin.source, service.id, seconds, context.now);
        let same = |target: &&Target<A>| print == Some(Print::of(target.address));
        let last = frontend.targets.iter().find(same).filter(|target| takes(target, service, client.is_outside));
        (last.or_else(|| at(0, hash)), 1, hash)
    } else {
        let hash = maglev::of_session(origin);
        (at(0, hash), TURNS, hash)
    };
    let first = first.ok_or_else(|| nobody(frontend, service, client.is_outside))?;
    let answer = first.serves(origin).reversed();
    if let Some(worker) = context.flows.owner(&answer, false).filter(|_| !client.is_settled) {
        return Err(Unserved::Elsewhere(worker));
    }
    for target in std::iter::once(first).chain((1..turns).filter_map(|turn| at(turn, hash))) {
        let to = target.serves(origin);
        if is_free(&to) {
            return Ok((target, to));
        }
    }
    // The client's own port gives way then; its address never does.
    let other_port = |turn: u16| {
        let port = 1024 + (origin.source_port ^ hash as u16).wrapping_add(turn.wrapping_mul(7919)) % (u16::MAX - 1024);
        Tuple { source_port: port, ..first.serves(origin) }
    };
    (1..=PORTS).map(other_port).find(is_free).map(|to| (first, to)).ok_or(DropReason::TupleInUse.into())
}

/// Whether a backend still takes new sessions.
fn takes<A>(target: &Target<A>, service: &Service, is_outside: bool) -> bool {
    let backend = service.spec.backends.get(usize::from(target.number));
    backend.is_some_and(|it| it.takes(is_outside))
}

/// Why there is no backend: none here, or none at all.
#[cold]
fn nobody<A>(frontend: &Frontend<A>, service: &Service, is_outside: bool) -> DropReason {
    let backends = frontend.targets.iter().filter_map(|target| service.spec.backends.get(usize::from(target.number)));
    let mut elsewhere = backends.filter(|backend| backend.state != BackendState::NotReady);
    if service.scope(is_outside) == Scope::Local && elsewhere.next().is_some() {
        DropReason::NotLocal
    } else {
        DropReason::NoBackend
    }
}
