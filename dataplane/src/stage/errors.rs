//! ICMP errors: each belongs to the session of the packet that it quotes, and is translated with the quote (RFC 5508 sections
//! 4 and 5). It changes nothing about the session: whoever gets it decides what it means.

use crate::batch::{Batch, Lane};
use crate::counters::{Direction, DropReason};
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::entry::{Entry, Flags, Slot};
use crate::session::tuple::Tuple;
use crate::snapshot::members::GatewayId;
use crate::snapshot::network::NextHop;
use crate::snapshot::policy::Policy;
use crate::snapshot::shares::Owner;
use crate::stage::rewrite::{self, OnWire};
use crate::stage::{recheck, route, serve, wrap};
use crate::verdict::Verdict;
use crate::wire::ethernet;
use crate::wire::icmp_error::{self, ErrorFamily, Quote, Wrong};

/// Translates the ICMP errors of the batch. Those that policy leaves as they are stay open.
pub fn run<A: OnWire + ErrorFamily>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>) {
    for i in batch.open_of::<A>().and(batch.errors) {
        let (tuple, policy) = (&A::tuples(batch)[i], &context.view.policy);
        if !is_translated(tuple, policy) && !policy.is_backend(tuple.source) {
            continue;
        }
        match find::<A>(batch, i, sessions, context) {
            Ok((Some(slot), quote)) => {
                batch.slots[i] = slot;
                let entry = *A::table(sessions).entry(slot);
                let hop = route::session_hop::<A>(batch, i, sessions, context.view);
                if let Some(hop) = hop {
                    translate(batch, i, &entry, hop, &quote, context);
                }
            }
            Ok((None, quote)) => without_session(batch, i, &quote, context),
            // A backend without a policy talks about something that isn't ours.
            Err(Lost::End(Verdict::Drop(DropReason::NoSession)))
                if !is_translated(&A::tuples(batch)[i], &context.view.policy) => {}
            Err(Lost::Peer(to)) => wrap::send_to_owner::<A>(batch, i, to),
            Err(Lost::End(verdict)) => {
                if matches!(verdict, Verdict::HandOff(_)) {
                    batch.frames[i].settle();
                }
                batch.decide(i, verdict);
            }
        }
    }
}

/// Whether an error between these addresses concerns somebody who is translated.
fn is_translated<A: Lane>(tuple: &Tuple<A>, policy: &Policy) -> bool {
    policy.vip(tuple.destination).is_some()
        || policy.endpoint(tuple.source).is_some_and(|(_, _, egress)| policy.translates(egress, tuple.destination))
}

/// The direction of the session in which answers to the quoted packet come, which is the error's way, too.
fn find<A: OnWire + ErrorFamily>(
    batch: &Batch,
    i: usize,
    sessions: &Sessions,
    context: &Context<'_>,
) -> Result<(Option<Slot>, Quote<A>), Lost> {
    let (head, received) = (batch.heads[i], &batch.frames[i]);
    let drop = |reason| Lost::End(Verdict::Drop(reason));
    let packet = received.frame.bytes().get(ethernet::HEADER..).unwrap_or_default();
    let quote = icmp_error::read::<A>(packet, usize::from(head.l4) - ethernet::HEADER).map_err(|wrong| {
        drop(match wrong {
            Wrong::Malformed | Wrong::Short | Wrong::QuotesError => DropReason::Malformed,
            Wrong::Checksum | Wrong::QuotedChecksum => DropReason::BadChecksum,
            Wrong::Misaddressed => DropReason::SpoofedSource,
            Wrong::Fragment => DropReason::Fragment,
            Wrong::NotAnError | Wrong::Refused | Wrong::Protocol => DropReason::UnknownProtocol,
        })
    })?;
    // Nobody's link carries less (RFC 791 section 3.2, RFC 8200 section 5): a lie to make a sender crawl.
    if quote.mtu.is_some_and(|mtu| mtu != 0 && mtu < A::SMALLEST_MTU) {
        return Err(drop(DropReason::Malformed));
    }
    let key = quote.tuple.reversed();
    let Some(slot) = sessions.find(sessions.hash(&key), &key) else {
        return match elsewhere(&key, received.is_settled(), context) {
            // A client of several gateways: which of them has its connection, if any, only packets of it show.
            Lost::End(Verdict::Drop(DropReason::NoSession)) if is_of_several(&key, &context.view.policy) => {
                Ok((None, quote))
            }
            lost => Err(lost),
        };
    };
    let entry = A::table(sessions).entry(slot);
    if !entry.is_live() || !recheck::stands(entry, context.view) {
        return Err(elsewhere(&key, received.is_settled(), context));
    }
    if !entry.flags().may_come_from(head.sides) {
        return Err(drop(DropReason::SpoofedSource));
    }
    Ok((Some(slot), quote))
}

/// Whether a client's packets are for a Service that several gateways serve.
fn is_of_several<A: Lane>(key: &Tuple<A>, policy: &Policy) -> bool {
    policy.frontend(&key.receiver()).is_some() && policy.vip(key.destination).is_some_and(|vip| vip.shares.is_shared())
}

/// Translates an error about what a backend has said to a client, as a packet of that client would be: see [`super::stateless`].
fn without_session<A: OnWire + ErrorFamily>(batch: &mut Batch, i: usize, quote: &Quote<A>, context: &Context<'_>) {
    let key = quote.tuple.reversed();
    let sides = batch.heads[i].sides;
    let frontend = context.view.policy.frontend(&key.receiver());
    let Some(to) = frontend.and_then(|frontend| serve::without_session(&key, frontend, sides, context)) else {
        return batch.decide(i, Verdict::Drop(DropReason::NoSession));
    };
    let entry = Entry::new(key, to, Direction::Inbound, Flags::default());
    if let Some(hop) = route::stateless_hop(batch, i, to.destination, context.view) {
        translate(batch, i, &entry, hop, quote, context);
    }
}

/// Why an error is not translated here.
enum Lost {
    /// Its way ends.
    End(Verdict),
    /// Another gateway may know the session.
    Peer(GatewayId),
}

/// The other gateway that has the session if there is one: as seen by the VIP's port, or by the pod.
fn peer<A: Lane>(key: &Tuple<A>, policy: &Policy) -> Option<GatewayId> {
    let owner = match policy.vip(key.destination) {
        Some(vip) if policy.frontend(&key.receiver()).is_some() => vip.shares.owner(),
        Some(vip) => vip.shares.owner_of_port(key.destination_port),
        None => policy.owner_of(policy.endpoint(key.source)?.1),
    };
    match owner {
        Owner::Other(gateway) => Some(gateway),
        Owner::This | Owner::Nobody => None,
    }
}

/// Who else may know the session.
fn elsewhere<A: Lane>(key: &Tuple<A>, settled: bool, context: &Context<'_>) -> Lost {
    if let Some(gateway) = peer(key, &context.view.policy) {
        return Lost::Peer(gateway);
    }
    let flows = context.flows;
    let policy = &context.view.policy;
    let owner = match policy.vip(key.destination) {
        _ if settled => None,
        Some(_) if policy.frontend(&key.receiver()).is_some() => flows.owner(key, false),
        Some(vip) => vip.pool.owner(key.destination_port).filter(|&owner| owner != flows.this),
        None => flows.owner(key, false),
    };
    Lost::End(owner.map_or(Verdict::Drop(DropReason::NoSession), Verdict::HandOff))
}

fn translate<A: OnWire + ErrorFamily>(
    batch: &mut Batch,
    i: usize,
    entry: &Entry<A>,
    hop: NextHop,
    quote: &Quote<A>,
    context: &Context<'_>,
) {
    batch.directions[i] = entry.direction();
    let (key, to) = (entry.key(), entry.to());
    // Where the session hides its source, it hides the hops behind it, too (RFC 5508 REQ-5 c).
    let source = if key.source == to.source { A::tuples(batch)[i].source } else { to.source };
    let l4 = usize::from(batch.heads[i].l4) - ethernet::HEADER;
    let frame = batch.frames[i].frame.bytes_mut();
    A::decrement_ttl(frame);
    let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
    icmp_error::translate(packet, l4, quote, &to.reversed(), source, to.destination);
    rewrite::send_on(batch, i, hop, context.view);
}
