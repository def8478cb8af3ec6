//! Load balancing: gives the first packet of a client to a Service a backend and an inbound session (DNAT), or rejects
//! it with a reason. As for egress sessions, all checks run on a draft that is committed last, and an earlier packet of
//! the batch may have opened the session.
//!
//! Only the destination is translated: the backend sees the client's address.

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{FrontendId, GatewayId, Owner, Slot, WorkerId};
use crate::flow::tunnel_metadata::HAIRPIN_SIDE;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind};
use crate::policy::maglev;
use crate::policy::network::NextHop;
use crate::policy::service::{Backend, Frontend, Service};
use crate::policy::spec::{BackendState, Role, Scope};
use crate::replication::accounting::SessionAccounting;
use crate::session::admission::Admission;
use crate::session::affinity::{BackendHash, Choice, ServiceClient};
use crate::session::embryonic::Embryonic;
use crate::session::entry::Flags;
use crate::session::lending::Lender;
use crate::session::{Draft, SessionFamily, Sessions};
use crate::stage::context::{Context, PacketFamily};
use crate::stage::snat::may_open_session;
use crate::stage::{encap, route, snat};
use crate::wire::tcp;

/// Alternative backends tried if the reply tuple is in use: the client reaches the same backend through another
/// frontend.
const MAX_BACKEND_TRIES: u32 = 4;
/// Alternative client ports tried after that.
const MAX_PORT_TRIES: u16 = 16;

/// Opens the inbound sessions of the batch's first packets to Services.
pub fn run<A: PacketFamily>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    embryonic: &mut Embryonic,
    context: &Context<'_>,
    accounting: &mut SessionAccounting<'_>,
) {
    if batch.undecided_of::<A>().and(batch.new_inbound).is_empty() {
        return;
    }
    prefetch::<A>(batch, sessions, context);
    for i in batch.undecided_of::<A>().and(batch.new_inbound) {
        match load_balance::<A>(batch, i, sessions, context, accounting) {
            Ok(Established { slot, is_new }) => {
                batch.slots[i] = slot;
                batch.directions[i] = A::table(sessions).entry(slot).direction();
                batch.validated.insert(i);
                let origin = &A::tuples(batch)[i];
                if let Some(vip) = context.snapshot.policy.vip(origin.destination).filter(|_| is_new) {
                    embryonic.push(slot, origin, vip.ports.id);
                }
            }
            Err(error) => reject::<A>(batch, i, error, context),
        }
    }
}

/// Decides on a packet that gets no session here.
pub fn reject<A: PacketFamily>(batch: &mut Batch, i: usize, error: LoadBalanceError, context: &Context<'_>) {
    match error {
        LoadBalanceError::HandOff(worker) => {
            batch.frames[i].mark_handed_off();
            batch.decide(i, Verdict::HandOff(worker));
        }
        LoadBalanceError::Lend(lender) => snat::hand_off(batch, i, lender),
        LoadBalanceError::ForwardToOwner(gateway) => encap::forward_to_owner::<A>(batch, i, gateway),
        // ECMP rerouting or a gateway failure sent another gateway's client here: the Maglev table is the same on
        // all gateways.
        LoadBalanceError::Rejected(DropReason::NoSession) if is_group_vip::<A>(batch, i, context) => {
            batch.stateless_replies.insert(i);
        }
        LoadBalanceError::Rejected(reason @ DropReason::NoSession) => batch.decide(i, Verdict::Drop(reason)),
        LoadBalanceError::Rejected(reason) => batch.reject(i, reason),
    }
}

/// The session that a packet got.
struct Established {
    slot: Slot,
    is_new: bool,
}

/// Why a packet gets no session here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBalanceError {
    /// It is rejected.
    Rejected(DropReason),
    /// Another worker may have a session with the same reply tuple: it decides.
    HandOff(WorkerId),
    /// Another worker opens the session: this one has no slot for it.
    Lend(Lender),
    /// Another gateway owns the client's flow: see [`crate::policy::compiled::Policy::owner_of_client`].
    ForwardToOwner(GatewayId),
}

impl From<DropReason> for LoadBalanceError {
    fn from(reason: DropReason) -> Self {
        Self::Rejected(reason)
    }
}

/// Whether a packet's VIP belongs to a group of gateways, not to this one alone.
fn is_group_vip<A: PacketFamily>(batch: &Batch, i: usize, context: &Context<'_>) -> bool {
    let vip = context.snapshot.policy.vip(A::tuples(batch)[i].destination);
    vip.is_some_and(|vip| !vip.shards.is_standalone())
}

/// The backend of a client's packet without a session: the one that a new session of this client would get. `None` if
/// there is none, or the client's address is not allowed.
pub fn stateless_backend<'a, A: PacketFamily>(
    origin: &Tuple<A>,
    id: FrontendId,
    sides: u8,
    context: &Context<'a>,
) -> Option<&'a Backend<A>> {
    let (service, frontend) = frontend::<A>(id, context)?;
    let outside = is_outside(sides);
    if outside && !A::part(service).admits(origin.source) {
        return None;
    }
    let select = |hash| frontend.backends.get(usize::from(frontend.table(outside).select(hash, 0)?));
    match service.spec.affinity {
        Some(_) => last_backend(origin, outside, service, frontend, context)
            .or_else(|| select(maglev::client_hash(origin.source))),
        None => select(maglev::session_hash(origin)),
    }
}

/// Prefetches the buckets and entries that the new sessions of the batch will be written to, so that cache misses
/// overlap.
#[inline(never)]
fn prefetch<A: PacketFamily>(batch: &Batch, sessions: &Sessions, context: &Context<'_>) {
    let table = A::table(sessions);
    let mut replies = batch.homes;
    let packets = batch.undecided_of::<A>().and(batch.new_inbound);
    for i in packets {
        let origin = A::tuples(batch)[i];
        let Some((_, frontend)) = frontend::<A>(batch.frontends[i], context) else { continue };
        let choices = frontend.table(is_outside(batch.headers[i].sides));
        let Some(target) = choices.select(maglev::session_hash(&origin), 0) else { continue };
        let Some(target) = frontend.backends.get(usize::from(target)) else { continue };
        replies[i] = table.prefetch(sessions.hash(&target.dnat(&origin).reversed()));
    }
    for i in packets {
        table.prefetch_free(batch.homes[i]);
        table.prefetch_free(replies[i]);
    }
}

/// How a client's packet gets a session.
#[derive(Debug)]
pub enum LoadBalancePlan<'a, A> {
    /// An earlier packet of the batch has opened its session.
    Existing(Slot),
    /// Open this session.
    Open(NewSession<'a, A>),
}

/// A planned inbound session.
#[derive(Debug)]
pub struct NewSession<'a, A> {
    /// An ended session with the same tuple, which it replaces.
    pub replaced: Option<Slot>,
    pub service: &'a Service,
    /// The backend.
    pub target: &'a Backend<A>,
    /// The translated tuple of the first packet.
    pub translated: Tuple<A>,
    /// The next hop toward the backend.
    pub next_hop: NextHop,
    /// Where in the session table it has its place.
    pub room: Admission,
}

/// Decides on the session of a client's packet. `ended`: a session that counts as ended, although it is still in the
/// table.
///
/// # Errors
/// The reason for which it gets no session here.
pub fn decide<'a, A: PacketFamily>(
    batch: &Batch,
    i: usize,
    sessions: &Sessions,
    context: &Context<'a>,
    ended: Option<Slot>,
) -> Result<LoadBalancePlan<'a, A>, LoadBalanceError> {
    let (head, hash, origin) = (batch.headers[i], batch.hashes[i], &A::tuples(batch)[i]);
    let Context { snapshot, rules, .. } = *context;
    let existing = sessions.find(hash, origin);
    if let Some(slot) = existing
        && !A::table(sessions).entry(slot).flags().has(Flags::QUARANTINED)
        && ended != Some(slot)
    {
        if A::table(sessions).entry(slot).is_standby() {
            return Err(DropReason::NoOwner.into());
        }
        return Ok(LoadBalancePlan::Existing(slot));
    }
    let may_open = may_open_session(batch, i, rules);
    if !may_open && !is_group_vip::<A>(batch, i, context) {
        return Err(DropReason::NoSession.into());
    }
    if head.ttl <= 1 {
        return Err(DropReason::Ttl.into());
    }
    let (service, frontend) = frontend::<A>(batch.frontends[i], context).ok_or(DropReason::NoService)?;
    let is_outside = is_outside(head.sides);
    if is_outside && !A::part(service).admits(origin.source) {
        return Err(DropReason::SourceRange.into());
    }
    // The frontend's port was an SNAT port that is still quarantined: free in a moment.
    if existing.is_some_and(|ended| !A::table(sessions).entry(ended).is_dnat()) {
        return Err(DropReason::TupleInUse.into());
    }
    let client =
        Client { origin: *origin, is_outside, is_handed_off: batch.frames[i].is_handed_off(), ended: existing };
    let (target, translated) = choose(&client, service, frontend, sessions, context)?;
    match owner_of_client(batch, i, target, context) {
        Owner::Other(gateway) if !batch.frames[i].is_at_hop_limit() => {
            return Err(LoadBalanceError::ForwardToOwner(gateway));
        }
        _ if may_open || takes_over::<A>(batch, i, target, context) => {}
        _ => return Err(DropReason::NoSession.into()),
    }
    let next_hop = route::next_hop_to(translated.destination, hash, snapshot).map_err(|_| DropReason::NoRoute)?;
    let room = sessions.admission(origin.destination, origin.destination, ended, existing.is_some().into());
    if room != Admission::Shared
        && is_first_choice(&client, service, frontend, &translated)
        && let Some(lender) = sessions.lender(room, batch.frames[i].workers_tried())
    {
        return Err(LoadBalanceError::Lend(lender));
    }
    if room == Admission::Rejected {
        return Err(DropReason::SessionTableFull.into());
    }
    Ok(LoadBalancePlan::Open(NewSession { replaced: existing, service, target, translated, next_hop, room }))
}

/// The gateway that owns the flow of a client with this backend.
fn owner_of_client<A: PacketFamily>(batch: &Batch, i: usize, target: &Backend<A>, context: &Context<'_>) -> Owner {
    let (policy, origin) = (&context.snapshot.policy, &A::tuples(batch)[i]);
    let Some(vip) = policy.vip(origin.destination) else { return Owner::This };
    policy.owner_of_client(vip, batch.frontends[i], &origin.sender(), target.address)
}

/// Whether a client's segment inside a connection opens a session: another gateway had it until the members changed, and
/// without a session the backend's replies wouldn't be known as such.
fn takes_over<A: PacketFamily>(batch: &Batch, i: usize, target: &Backend<A>, context: &Context<'_>) -> bool {
    let (policy, origin) = (&context.snapshot.policy, &A::tuples(batch)[i]);
    let is_open = batch.headers[i].kind == PacketKind::Tcp && !batch.segments[i].flags.has(tcp::Flags::RST);
    is_open
        && is_group_vip::<A>(batch, i, context)
        && !policy.reply_shows_frontend(batch.frontends[i], &origin.sender(), target.address)
}

/// Finds or opens the session of a packet.
fn load_balance<A: PacketFamily>(
    batch: &Batch,
    i: usize,
    sessions: &mut Sessions,
    context: &Context<'_>,
    accounting: &mut SessionAccounting<'_>,
) -> Result<Established, LoadBalanceError> {
    let NewSession { replaced, service, target, translated, next_hop, .. } =
        match decide::<A>(batch, i, sessions, context, None)? {
            LoadBalancePlan::Existing(slot) => return Ok(Established { slot, is_new: false }),
            LoadBalancePlan::Open(opening) => opening,
        };
    let (head, origin, Context { snapshot, now, .. }) = (batch.headers[i], &A::tuples(batch)[i], *context);
    if let Some(replaced) = replaced {
        // No packet of the batch refers to a replaced session.
        let (origin, _) = sessions.slot_pair::<A>(replaced);
        sessions.remove::<A>(origin);
    }
    let out = route::egress_interface(next_hop, snapshot);
    let draft = Draft {
        origin: *origin,
        translated,
        direction: Direction::Inbound,
        reply_direction: Direction::ServiceReply,
        origin_side: origin_side(head.sides),
        reply_side: out.map_or(HAIRPIN_SIDE, |out| snapshot.network.interface(out).role.pod_side()),
        next_hop: route::hop_id(next_hop),
        generation: snapshot.generation,
    };
    let slot = sessions.commit(&draft, now).map_err(|_| DropReason::SessionTableFull)?;
    target.usage.open();
    accounting.opened::<A>(slot, sessions, now);
    context.flows.claim(&translated.reversed());
    if batch.frames[i].is_handed_off() {
        context.flows.claim(origin);
    }
    if service.spec.affinity.is_some()
        && let Some(hash) = service.backend_hash(target)
    {
        context.affinity.record(&ServiceClient::of(origin, service.id), BackendHash::of(hash), now, now);
        sessions.choices_mut().store(&Choice::of(origin, &translated, now), false, now);
    }
    Ok(Established { slot, is_new: true })
}

/// A client that opens a session with a Service.
struct Client<A> {
    origin: Tuple<A>,
    is_outside: bool,
    /// Another worker has handed its packet off: this worker decides.
    is_handed_off: bool,
    /// Its former session with the same tuple, which has ended.
    ended: Option<Slot>,
}

/// Whether packets from these sides come from outside the cluster.
fn is_outside(sides: u8) -> bool {
    sides & Role::Outside.sides() != 0
}

/// The side that packets come from: outside, if that is among them.
fn origin_side(sides: u8) -> u8 {
    [Role::Outside.sides(), Role::Inside.sides()].into_iter().find(|side| sides & side != 0).unwrap_or(HAIRPIN_SIDE)
}

fn frontend<'a, A: PacketFamily>(id: FrontendId, context: &Context<'a>) -> Option<(&'a Service, &'a Frontend<A>)> {
    let service = context.snapshot.policy.service(id.service)?;
    Some((service, A::part(service).frontends.get(usize::from(id.port))?))
}

/// Chooses the backend for a client and translates its first packet.
fn choose<'a, A: SessionFamily>(
    client: &Client<A>,
    service: &Service,
    frontend: &'a Frontend<A>,
    sessions: &Sessions,
    context: &Context<'_>,
) -> Result<(&'a Backend<A>, Tuple<A>), LoadBalanceError> {
    let table = frontend.table(client.is_outside);
    let at = |attempt: u32, hash: u64| {
        table.select(hash, attempt).and_then(|index| frontend.backends.get(usize::from(index)))
    };
    let Client { origin, .. } = client;
    // Two sessions of one client with one backend must differ in the reply tuple, also if another worker has one of them.
    let former_reply = client.ended.map(|ended| A::table(sessions).entry(ended).twin());
    let is_free = |to: &Tuple<A>| {
        let reply = to.reversed();
        let user = sessions.find(sessions.hash(&reply), &reply);
        user.is_none_or(|slot| former_reply == Some(slot)) && context.flows.owner(&reply, false).is_none()
    };
    let (first, tries, hash) = if service.spec.affinity.is_some() {
        let hash = maglev::client_hash(origin.source);
        let last = last_backend(origin, client.is_outside, service, frontend, context);
        (last.or_else(|| at(0, hash)), 1, hash)
    } else {
        let hash = maglev::session_hash(origin);
        (at(0, hash), MAX_BACKEND_TRIES, hash)
    };
    let first = first.ok_or_else(|| no_backend(frontend, service, client.is_outside))?;
    let reply = first.dnat(origin).reversed();
    if let Some(worker) = context.flows.owner(&reply, false).filter(|_| !client.is_handed_off) {
        return Err(LoadBalanceError::HandOff(worker));
    }
    for target in std::iter::once(first).chain((1..tries).filter_map(|attempt| at(attempt, hash))) {
        let to = target.dnat(origin);
        if is_free(&to) {
            return Ok((target, to));
        }
    }
    // As a last resort the client's port is translated, too; its address never is.
    let other_port = |attempt: u16| {
        let port =
            1024 + (origin.source_port ^ hash as u16).wrapping_add(attempt.wrapping_mul(7919)) % (u16::MAX - 1024);
        Tuple { source_port: port, ..first.dnat(origin) }
    };
    (1..=MAX_PORT_TRIES).map(other_port).find(is_free).map(|to| (first, to)).ok_or(DropReason::TupleInUse.into())
}

/// The backend of the client's last session at the Service port, within the affinity timeout, if it accepts new
/// sessions.
fn last_backend<'a, A: SessionFamily>(
    origin: &Tuple<A>,
    is_outside: bool,
    service: &Service,
    frontend: &'a Frontend<A>,
    context: &Context<'_>,
) -> Option<&'a Backend<A>> {
    let client = ServiceClient::of(origin, service.id);
    let last = context.affinity.find(&client, service.spec.affinity?, context.now)?;
    let at = frontend.hashes.iter().position(|hash| BackendHash::of(*hash) == last)?;
    frontend.backends.get(at).filter(|target| accepts_new(target, service, is_outside))
}

/// Whether a client got the first backend that [`choose`] tries, with its own port: another worker chooses the same.
/// Otherwise a session of this worker has the reply tuple of that choice, and none of another worker's may have it.
fn is_first_choice<A: SessionFamily>(
    client: &Client<A>,
    service: &Service,
    frontend: &Frontend<A>,
    translated: &Tuple<A>,
) -> bool {
    let Client { origin, is_outside, .. } = client;
    if service.spec.affinity.is_some() {
        return translated.source_port == origin.source_port;
    }
    let first = frontend.table(*is_outside).select(maglev::session_hash(origin), 0);
    let first = first.and_then(|first| frontend.backends.get(usize::from(first)));
    first.is_some_and(|first| first.dnat(origin) == *translated)
}

/// Whether a backend still accepts new sessions.
fn accepts_new<A>(target: &Backend<A>, service: &Service, is_outside: bool) -> bool {
    let backend = service.spec.backends.get(usize::from(target.number));
    backend.is_some_and(|it| it.is_eligible(is_outside))
}

/// Why there is no backend: none on this node, or none at all.
#[cold]
fn no_backend<A>(frontend: &Frontend<A>, service: &Service, is_outside: bool) -> DropReason {
    let backends = frontend.backends.iter().filter_map(|target| service.spec.backends.get(usize::from(target.number)));
    let mut elsewhere = backends.filter(|backend| backend.state != BackendState::NotReady);
    if service.scope(is_outside) == Scope::Local && elsewhere.next().is_some() {
        DropReason::NotLocal
    } else {
        DropReason::NoBackend
    }
}
