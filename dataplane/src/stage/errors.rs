//! ICMP errors: each belongs to the session of the packet that it quotes, and is translated with the quote (RFC 5508 sections
//! 4 and 5). It changes nothing about the session: whoever gets it decides what it means.

use crate::batch::{Batch, Lane};
use crate::counters::DropReason;
use crate::pipeline::Context;
use crate::session::Sessions;
use crate::session::entry::{Flags, Slot};
use crate::session::tuple::Tuple;
use crate::snapshot::policy::Policy;
use crate::stage::rewrite::{self, OnWire};
use crate::stage::{recheck, route};
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
            Ok((slot, quote)) => translate(batch, i, slot, &quote, sessions, context),
            // A backend without a policy talks about something that isn't ours.
            Err(Verdict::Drop(DropReason::NoSession)) if !is_translated(&A::tuples(batch)[i], &context.view.policy) => {
            }
            Err(verdict) => {
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
        || policy.endpoint(tuple.source).is_some_and(|(_, _, egress)| A::translates(egress, tuple.destination))
}

/// The direction of the session in which answers to the quoted packet come, which is the error's way, too.
fn find<A: OnWire + ErrorFamily>(
    batch: &Batch,
    i: usize,
    sessions: &Sessions,
    context: &Context<'_>,
) -> Result<(Slot, Quote<A>), Verdict> {
    let (head, received) = (batch.heads[i], &batch.frames[i]);
    let drop = |reason| Verdict::Drop(reason);
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
        return Err(elsewhere(&key, received.is_settled(), context));
    };
    let entry = A::table(sessions).entry(slot);
    if entry.flags().has(Flags::QUARANTINED) || !recheck::stands(entry, context.view) {
        return Err(drop(DropReason::NoSession));
    }
    if !entry.flags().may_come_from(head.sides) {
        return Err(drop(DropReason::SpoofedSource));
    }
    Ok((slot, quote))
}

/// Who else may know the session.
fn elsewhere<A: Lane>(key: &Tuple<A>, settled: bool, context: &Context<'_>) -> Verdict {
    let flows = context.flows;
    let policy = &context.view.policy;
    let owner = match policy.vip(key.destination) {
        _ if settled => None,
        Some(_) if policy.frontend(&key.receiver()).is_some() => flows.owner(key, false),
        Some(vip) => vip.pool.owner(key.destination_port).filter(|&owner| owner != flows.this),
        None => flows.owner(key, false),
    };
    owner.map_or(Verdict::Drop(DropReason::NoSession), Verdict::HandOff)
}

fn translate<A: OnWire + ErrorFamily>(
    batch: &mut Batch,
    i: usize,
    slot: Slot,
    quote: &Quote<A>,
    sessions: &mut Sessions,
    context: &Context<'_>,
) {
    let entry = *A::table(sessions).entry(slot);
    (batch.slots[i], batch.directions[i]) = (slot, entry.direction());
    let Some(hop) = route::session_hop::<A>(batch, i, sessions, context.view) else { return };
    let (key, to) = (entry.key(), entry.to());
    // Where the session hides its source, it hides the hops behind it, too (RFC 5508 REQ-5 c).
    let source = if key.source == to.source { A::tuples(batch)[i].source } else { to.source };
    let l4 = usize::from(batch.heads[i].l4) - ethernet::HEADER;
    let frame = batch.frames[i].frame.bytes_mut();
    A::decrement_ttl(frame);
    let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
    icmp_error::translate(packet, l4, quote, &to.reversed(), source, to.destination);
    rewrite::send_on(batch, i, hop, &context.view.network);
}
