//! Why: one packet through the same stages and the live tables, and nothing changed by it.
//!
//! What a stage decides before it changes anything is asked as packets ask it; what it would change then is only said. So this is
//! read beside `pipeline.rs`: the order of the questions is the order of the stages.

mod found;

use std::sync::Arc;

pub use self::found::{Class, Fate, Found, LeavesWith, Probe};
use crate::address::{Address, V6};
use crate::batch::{Batch, Packets};
use crate::counters::{Direction, DropReason};
use crate::inspect;
use crate::io::Received;
use crate::pipeline::{Context, Tables};
use crate::ports::allocator::{Outlook, Part};
use crate::session::entry::{Entry, Flags, Slot};
use crate::session::room::Room;
use crate::session::tuple::Tuple;
use crate::snapshot::Snapshot;
use crate::snapshot::network::{HopId, NextHop};
use crate::snapshot::shares::Owner;
use crate::stage::refuse::what_to_say;
use crate::stage::rewrite::{self, OnWire};
use crate::stage::{classify, health, lookup, open, parse, recheck, relay, route, serve, stateless, takeover, wrap};
use crate::verdict::Verdict;

/// The packet that is looked at is alone in its batch.
const ONE: usize = 0;

/// Looks at the packet in `received`, which would have ended so many sessions of its pod at other workers; gives its frame back, with
/// what is found.
pub fn explain(
    batch: &mut Batch,
    received: Received,
    tables: &Tables,
    view: &Arc<Snapshot>,
    context: &Context<'_>,
    ended: u32,
) -> (Found, Option<Received>) {
    batch.frames.push(received);
    batch.begin();
    (batch.copies, batch.ended) = Default::default();
    parse::run(batch, &view.network);
    let mut found = Found {
        view: view.clone(),
        worker: context.flows.this,
        sides: batch.heads[ONE].sides,
        session: None,
        ended,
        class: None,
        leaves_with: None,
        is_reserved: false,
        translated: None,
        next_hop: None,
        direction: Direction::Unchanged,
        verdict: Verdict::Undecided,
        mtu: 0,
        hears: None,
    };
    relay::run::<u32>(batch, &tables.sessions, context);
    relay::run::<V6>(batch, &tables.sessions, context);
    if !batch.open.contains(ONE) && matches!(batch.verdicts[ONE], Verdict::Forward(_)) {
        found.class = Some(Class::Peer);
    }
    if batch.open_of::<u32>().contains(ONE) {
        look::<u32>(batch, tables, context, &mut found);
    } else if batch.open_of::<V6>().contains(ONE) {
        look::<V6>(batch, tables, context, &mut found);
    }
    wrap::run(batch, view);
    if batch.open.contains(ONE) {
        // Questions for link addresses: nobody asks about these.
        batch.decide(ONE, Verdict::Heard);
    }
    (found.verdict, found.direction, found.mtu) = (batch.verdicts[ONE], batch.directions[ONE], batch.mtus[ONE]);
    if let Verdict::Drop(reason) = found.verdict
        && batch.refused.contains(ONE)
    {
        found.hears = what_to_say(batch, ONE, reason, context);
    }
    (found, batch.frames.pop())
}

/// From looking for a session on.
fn look<A: OnWire>(batch: &mut Batch, tables: &Tables, context: &Context<'_>, found: &mut Found) {
    lookup::fetch::<A>(batch, &tables.sessions);
    lookup::find::<A>(batch, &tables.sessions, context);
    session::<A>(batch, tables, context, found);
    if !batch.known.contains(ONE) {
        classify::run::<A>(batch, context);
    }
    if !batch.open.contains(ONE) {
        return;
    }
    found.class = Some(class(batch));
    let ahead = match class(batch) {
        Class::Known => known::<A>(batch, tables, context),
        Class::Egress { .. } => egress::<A>(batch, tables, context, found),
        Class::Inbound => inbound::<A>(batch, tables, context, found),
        Class::Stateless => Some(Ahead::Stateless),
        Class::Unchanged => {
            if let Some(hop) = route::unchanged_hop::<A>(batch, ONE, context.view) {
                found.next_hop = Some(hop);
                batch.directions[ONE] = Direction::Unchanged;
                rewrite::send_on(batch, ONE, hop, context.view);
            }
            None
        }
        Class::Health => {
            health::run::<A>(batch, context);
            None
        }
        Class::Peer => None,
    };
    match ahead {
        None => {}
        Some(Ahead::As(to, direction, hop)) => {
            if let Some(hop) = route::checked(batch, ONE, hop, context.view) {
                go::<A>(batch, &to, direction, hop, context, found);
            }
        }
        Some(Ahead::Stateless) => {
            found.class = Some(Class::Stateless);
            let Some(to) = stateless::translated::<A>(batch, ONE, context) else {
                return batch.decide(ONE, Verdict::Drop(DropReason::NoSession));
            };
            if let Some(hop) = route::stateless_hop(batch, ONE, to.destination, context.view) {
                go::<A>(batch, &to, stateless::direction(batch, ONE), hop, context, found);
            }
        }
    }
}

/// What classify has made of the packet.
fn class(batch: &Batch) -> Class {
    let is = |packets: Packets| packets.contains(ONE);
    match () {
        () if is(batch.known) => Class::Known,
        () if is(batch.opening) => Class::Egress { revives: false },
        () if is(batch.inbound) => Class::Inbound,
        () if is(batch.stateless) => Class::Stateless,
        () if is(batch.health) => Class::Health,
        () if is(batch.unchanged) => Class::Unchanged,
        () => Class::Peer,
    }
}

/// How a packet goes on that isn't refused.
enum Ahead<A> {
    /// With these ends, counted so, by this way.
    As(Tuple<A>, Direction, NextHop),
    /// As policy alone says.
    Stateless,
}

/// takeover, recheck and reopen: what becomes of the session that was found.
fn session<A: OnWire>(batch: &mut Batch, tables: &Tables, context: &Context<'_>, found: &mut Found) {
    let is = |packets: Packets| packets.contains(ONE);
    let (sessions, view) = (&tables.sessions, context.view);
    let (is_known, is_stale, is_copy) = (is(batch.known), is(batch.stale), is(batch.copies));
    if !is_known && !is_stale && !is_copy {
        return;
    }
    let (slot, table) = (batch.slots[ONE], A::table(sessions));
    let (origin, _) = sessions.both::<A>(slot);
    let record = inspect::describe::<A>(sessions, origin, context.now);
    let mut fate = |fate| found.session = Some((record, fate));
    let entry = as_live(table.entry(slot));
    batch.directions[ONE] = entry.direction();
    let owner = takeover::owner(&entry, &view.policy);
    if is_copy && owner != Owner::This {
        batch.elsewhere[ONE] = owner;
        return fate(Fate::CopyOf(owner));
    }
    let mut flags = entry.flags();
    if is_known {
        fate(Fate::Known);
    } else {
        if !recheck::stands(&entry, view) {
            batch.ended.insert(ONE);
            if owner != Owner::This {
                batch.copies.insert(ONE);
            }
            batch.elsewhere[ONE] = owner;
            return fate(if owner == Owner::This { Fate::Ended } else { Fate::LetGo });
        }
        fate(if is_copy { Fate::TakenOver } else { Fate::Rechecked });
        batch.known.insert(ONE);
        if !view.freshness.holds(entry.generation(), entry.parties()) {
            flags = recheck::flags_now(&entry, &view.policy);
        }
        if !flags.may_come_from(batch.heads[ONE].sides) {
            return batch.decide(ONE, Verdict::Drop(DropReason::SpoofedSource));
        }
    }
    if recheck::begins_anew::<A>(batch, ONE, table) {
        fate(Fate::BegunAnew);
        batch.known.remove(ONE);
        batch.ended.insert(ONE);
    }
}

/// A session as it is, or a copy as it would be once it is live.
fn as_live<A: Address>(entry: &Entry<A>) -> Entry<A> {
    let mut entry = *entry;
    if entry.is_copy() {
        entry.unmark_copy();
        entry.set_generation(0);
        entry.set_next_hop(None);
    }
    entry
}

/// rewrite, of a packet with a session.
fn known<A: OnWire>(batch: &mut Batch, tables: &Tables, context: &Context<'_>) -> Option<Ahead<A>> {
    let view = context.view;
    let entry = as_live(A::table(&tables.sessions).entry(batch.slots[ONE]));
    // Routes may have changed since, unless nothing has that concerns it.
    let is_fresh = entry.generation() == view.generation || view.freshness.holds(entry.generation(), entry.parties());
    let to = entry.to();
    let hop = match entry.next_hop().filter(|_| is_fresh) {
        Some(HopId::HAIRPIN) => Ok(NextHop::Hairpin),
        Some(hop) => Ok(NextHop::Known(hop)),
        None => route::hop_to(to.destination, batch.hashes[ONE], view),
    };
    let Ok(hop) = hop else {
        batch.refuse(ONE, DropReason::NoRoute);
        return None;
    };
    Some(Ahead::As(to, entry.direction(), hop))
}

/// open.
fn egress<A: OnWire>(batch: &mut Batch, tables: &Tables, context: &Context<'_>, found: &mut Found) -> Option<Ahead<A>> {
    match try_egress::<A>(batch, tables, context, found) {
        Ok(ahead) => Some(ahead),
        Err(reason) => {
            if !open::ask_another(batch, ONE, reason, context) {
                open::refuse_with::<A>(batch, ONE, reason, context);
            }
            None
        }
    }
}

fn try_egress<A: OnWire>(
    batch: &Batch,
    tables: &Tables,
    context: &Context<'_>,
    found: &mut Found,
) -> Result<Ahead<A>, DropReason> {
    let (sessions, view) = (&tables.sessions, context.view);
    if is_let_go(found) {
        return Err(DropReason::NoOwner);
    }
    let (hop, quarantined) = match open::plan::<A>(batch, ONE, sessions, context)? {
        open::Plan::Open(hop, quarantined) => (hop, quarantined),
        open::Plan::Known(slot) => return of_session(A::table(sessions).entry(slot), batch, view),
    };
    let origin = &A::tuples(batch)[ONE];
    let (endpoint, egress) = view.policy.endpoint_with(batch.endpoints[ONE]);
    // Its own session, which it ends first, is an endpoint's unless it is a client's.
    let ends_its_own =
        batch.ended.contains(ONE) && A::table(sessions).entry(batch.slots[ONE]).direction() == Direction::Egress;
    found.ended += u32::from(ends_its_own);
    let claim =
        endpoint.usage.would_open(egress.spec.limits, found.ended, context.now).map_err(|_| DropReason::Quota)?;
    let ended = own_ended(batch);
    let mut take = |room: Room| {
        found.is_reserved = room == Room::Reserved;
        if room == Room::None { Err(DropReason::SessionTableFull) } else { Ok(()) }
    };
    if let Some(open::Quarantined::Revives(slot)) = quarantined {
        take(open::room_to_revive::<A>(slot, sessions, ended))?;
        found.class = Some(Class::Egress { revives: true });
        return Ok(Ahead::As(A::table(sessions).entry(slot).to(), Direction::Egress, hop));
    }
    let mut reason = DropReason::NoVip;
    let selection = egress.spec.address_selection;
    for vip in open::candidates(view.policy.vips_of(endpoint), selection, batch.hashes[ONE]) {
        let Some(address) = A::from_ip(vip.address) else { continue };
        let Ok(part) = open::part_of(endpoint, vip, view) else {
            reason = DropReason::NoLease;
            continue;
        };
        if let Err(full) = take(open::room_to_open(address, origin, quarantined, sessions, ended)) {
            reason = full;
            continue;
        }
        let through = |port: u16| open::translate(origin, address, port);
        let outlook = tables.ports.outlook((vip, part), claim, |port| sessions.is_free(&through(port).reversed()));
        let among = part.map(|Part { blocks, .. }| tables.ports.blocks_among(vip.id, blocks));
        let (blocks, owned) = among.unzip();
        let owned = owned.unwrap_or_else(|| tables.ports.owned_blocks(vip.id));
        found.leaves_with = Some(LeavesWith { vip: vip.id, blocks, owned, outlook });
        if outlook != Outlook::Exhausted {
            return Ok(Ahead::As(through(0), Direction::Egress, hop));
        }
        reason = DropReason::PortsExhausted;
    }
    Err(reason)
}

/// The session that the packet would have ended itself before it opens one.
fn own_ended(batch: &Batch) -> Option<Slot> {
    batch.ended.contains(ONE).then(|| batch.slots[ONE])
}

/// Whether the session that was found would have become a copy by now.
fn is_let_go(found: &Found) -> bool {
    matches!(found.session, Some((_, Fate::LetGo)))
}

/// The way of a packet whose session an earlier packet would have opened: there is none before it, so this is one that is looked for anew.
fn of_session<A: OnWire>(entry: &Entry<A>, batch: &Batch, view: &Snapshot) -> Result<Ahead<A>, DropReason> {
    let to = entry.to();
    let hop = route::hop_to(to.destination, batch.hashes[ONE], view).map_err(|_| DropReason::NoRoute)?;
    Ok(Ahead::As(to, entry.direction(), hop))
}

/// serve.
fn inbound<A: OnWire>(
    batch: &mut Batch,
    tables: &Tables,
    context: &Context<'_>,
    found: &mut Found,
) -> Option<Ahead<A>> {
    let sessions = &tables.sessions;
    if is_let_go(found) {
        batch.refuse(ONE, DropReason::NoOwner);
        return None;
    }
    // Whatever rests with its ends makes room.
    let (vip, ended) = (A::tuples(batch)[ONE].destination, own_ended(batch));
    let room = |gone: bool| sessions.room(vip, vip, ended, gone.into());
    match serve::plan::<A>(batch, ONE, sessions, context) {
        Ok(serve::Plan::Open(opening)) => {
            let room = room(opening.ended.is_some());
            if room == Room::None {
                batch.refuse(ONE, DropReason::SessionTableFull);
                return None;
            }
            found.is_reserved = room == Room::Reserved;
            return Some(Ahead::As(opening.translated, Direction::Inbound, opening.next_hop));
        }
        Ok(serve::Plan::Known(slot)) => {
            return of_session(A::table(sessions).entry(slot), batch, context.view).ok();
        }
        Err(serve::Unserved::Elsewhere(worker)) => {
            batch.frames[ONE].settle();
            batch.decide(ONE, Verdict::HandOff(worker));
        }
        Err(serve::Unserved::Refused(DropReason::NoSession)) if serve::is_of_several::<A>(batch, ONE, context) => {
            return Some(Ahead::Stateless);
        }
        Err(serve::Unserved::Refused(reason @ DropReason::NoSession)) => batch.decide(ONE, Verdict::Drop(reason)),
        Err(serve::Unserved::Refused(reason)) => batch.refuse(ONE, reason),
    }
    None
}

/// The last step: the packet is written, as far as the next hop needs it.
fn go<A: OnWire>(
    batch: &mut Batch,
    to: &Tuple<A>,
    direction: Direction,
    hop: NextHop,
    context: &Context<'_>,
    found: &mut Found,
) {
    let origin = A::tuples(batch)[ONE];
    batch.directions[ONE] = direction;
    found.translated =
        Some([(to.source.to_ip(), to.source_port).into(), (to.destination.to_ip(), to.destination_port).into()]);
    found.next_hop = Some(hop);
    let entry = Entry::new(origin, *to, direction, Flags::default());
    let head = batch.heads[ONE];
    if let Some((headers, payload)) = batch.frames[ONE].frame.bytes_mut().split_at_mut_checked(head.l4.into()) {
        A::write_header(headers, &entry);
        rewrite::write_payload(payload, head.kind, entry.to_ports(), entry.l4_delta());
    }
    rewrite::send_on(batch, ONE, hop, context.view);
}
