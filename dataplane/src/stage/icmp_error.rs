//! ICMP errors: each belongs to the session of the packet that it quotes, and is translated together with the quote
//! (RFC 5508 sections 4 and 5). It changes nothing in the session: the receiving host decides what the error means.

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{GatewayId, Owner, Slot};
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::batch::Batch;
use crate::policy::compiled::Policy;
use crate::policy::network::NextHop;
use crate::replication::owner;
use crate::session::Sessions;
use crate::session::entry::{Entry, Flags};
use crate::stage::context::{Context, PacketFamily};
use crate::stage::rewrite::{self, HeaderRewrite};
use crate::stage::{encap, load_balance, revalidate, route};
use crate::wire::ethernet;
use crate::wire::icmp_error::{self, IcmpErrorFamily, ParseError, Quote};

/// Translates the ICMP errors of the batch. Those that policy leaves untranslated stay open.
pub fn run<A: HeaderRewrite + IcmpErrorFamily>(batch: &mut Batch, sessions: &mut Sessions, context: &Context<'_>) {
    for i in batch.undecided_of::<A>().and(batch.icmp_errors) {
        let (tuple, policy) = (&A::tuples(batch)[i], &context.snapshot.policy);
        if !is_translated(tuple, policy) && !policy.is_backend(tuple.source) {
            continue;
        }
        match find_session::<A>(batch, i, sessions, context) {
            Ok((Some(slot), quote)) => {
                batch.slots[i] = slot;
                let entry = *A::table(sessions).entry(slot);
                let hop = route::session_next_hop::<A>(batch, i, sessions, context.snapshot);
                if let Some(hop) = hop {
                    translate(batch, i, &entry, hop, &quote, context);
                }
            }
            Ok((None, quote)) => translate_stateless(batch, i, &quote, context),
            // A backend without a policy: the error quotes a packet that vipgate didn't translate.
            Err(Untranslated::Verdict(Verdict::Drop(DropReason::NoSession)))
                if !is_translated(&A::tuples(batch)[i], &context.snapshot.policy) => {}
            Err(Untranslated::ForwardToOwner(to)) => encap::forward_to_owner::<A>(batch, i, to),
            Err(Untranslated::Verdict(verdict)) => {
                if matches!(verdict, Verdict::HandOff(_)) {
                    batch.frames[i].mark_handed_off();
                }
                batch.decide(i, verdict);
            }
        }
    }
}

/// Whether policy translates an error between these addresses.
fn is_translated<A: PacketFamily>(tuple: &Tuple<A>, policy: &Policy) -> bool {
    policy.vip(tuple.destination).is_some()
        || policy.endpoint(tuple.source).is_some_and(|(_, _, egress)| policy.translates(egress, tuple.destination))
}

/// The session entry of the direction opposite to the quoted packet's, which is the direction of the error.
fn find_session<A: HeaderRewrite + IcmpErrorFamily>(
    batch: &Batch,
    i: usize,
    sessions: &Sessions,
    context: &Context<'_>,
) -> Result<(Option<Slot>, Quote<A>), Untranslated> {
    let (head, received) = (batch.headers[i], &batch.frames[i]);
    let drop = |reason| Untranslated::Verdict(Verdict::Drop(reason));
    let packet = received.frame.bytes().get(ethernet::HEADER..).unwrap_or_default();
    let quote = icmp_error::parse::<A>(packet, usize::from(head.l4_offset) - ethernet::HEADER).map_err(|error| {
        drop(match error {
            ParseError::Malformed | ParseError::Truncated | ParseError::QuotesError => DropReason::Malformed,
            ParseError::Checksum | ParseError::QuotedChecksum => DropReason::BadChecksum,
            ParseError::Misaddressed => DropReason::SpoofedSource,
            ParseError::LaterFragment => DropReason::Fragment,
            ParseError::NotAnError | ParseError::Filtered | ParseError::UnsupportedProtocol => {
                DropReason::UnknownProtocol
            }
        })
    })?;
    // Every link carries at least that much (RFC 791 section 3.2, RFC 8200 section 5): a forged MTU, to slow the
    // sender.
    if quote.mtu.is_some_and(|mtu| mtu != 0 && mtu < A::MIN_MTU) {
        return Err(drop(DropReason::Malformed));
    }
    let key = quote.tuple.reversed();
    let Some(slot) = sessions.find(sessions.hash(&key), &key) else {
        return match other_owner(&key, received.is_handed_off(), context) {
            // Any gateway may have the session of a client of a shared VIP: without one here, translate statelessly.
            Untranslated::Verdict(Verdict::Drop(DropReason::NoSession))
                if is_shared_service(&key, &context.snapshot.policy) =>
            {
                Ok((None, quote))
            }
            other => Err(other),
        };
    };
    let entry = A::table(sessions).entry(slot);
    if !entry.is_active() || !revalidate::is_valid(entry, context.snapshot) {
        if let (true, Owner::Other(to)) = (entry.is_standby(), owner::owner(entry, &context.snapshot.policy)) {
            return Err(Untranslated::ForwardToOwner(to));
        }
        return Err(other_owner(&key, received.is_handed_off(), context));
    }
    if !entry.flags().may_come_from(head.sides) {
        return Err(drop(DropReason::SpoofedSource));
    }
    Ok((Some(slot), quote))
}

/// Whether a client's packets are for a Service at a VIP that all gateways announce.
fn is_shared_service<A: PacketFamily>(key: &Tuple<A>, policy: &Policy) -> bool {
    policy.frontend(&key.receiver()).is_some()
        && policy.vip(key.destination).is_some_and(|vip| vip.shards.is_distributed())
}

/// Translates an error about a backend's packet to a client, like a packet of that client without a session: see
/// [`super::stateless_reply`].
fn translate_stateless<A: HeaderRewrite + IcmpErrorFamily>(
    batch: &mut Batch,
    i: usize,
    quote: &Quote<A>,
    context: &Context<'_>,
) {
    let key = quote.tuple.reversed();
    let sides = batch.headers[i].sides;
    let frontend = context.snapshot.policy.frontend(&key.receiver());
    let Some(to) = frontend.and_then(|frontend| load_balance::translate_stateless(&key, frontend, sides, context))
    else {
        return batch.decide(i, Verdict::Drop(DropReason::NoSession));
    };
    let entry = Entry::new(key, to, Direction::Inbound, Flags::default());
    if let Some(hop) = route::stateless_next_hop(batch, i, to.destination, context.snapshot) {
        translate(batch, i, &entry, hop, quote, context);
    }
}

/// What happens to an error that is not translated here.
enum Untranslated {
    /// Final verdict.
    Verdict(Verdict),
    /// Another gateway may have the session.
    ForwardToOwner(GatewayId),
}

/// The other gateway that would have the session: the owner of the VIP's port, or of the pod.
fn owner_gateway<A: PacketFamily>(key: &Tuple<A>, policy: &Policy) -> Option<GatewayId> {
    let owner = match policy.vip(key.destination) {
        Some(vip) if policy.frontend(&key.receiver()).is_some() => vip.shards.owner(),
        Some(vip) => vip.shards.owner_of_port(key.destination_port),
        None => policy.owner_of(policy.endpoint(key.source)?.1),
    };
    match owner {
        Owner::Other(gateway) => Some(gateway),
        Owner::This | Owner::Unowned => None,
    }
}

/// The other gateway or worker that may have the session; otherwise a drop.
fn other_owner<A: PacketFamily>(key: &Tuple<A>, is_handed_off: bool, context: &Context<'_>) -> Untranslated {
    if let Some(gateway) = owner_gateway(key, &context.snapshot.policy) {
        return Untranslated::ForwardToOwner(gateway);
    }
    let flows = context.flows;
    let policy = &context.snapshot.policy;
    let owner = match policy.vip(key.destination) {
        _ if is_handed_off => None,
        Some(_) if policy.frontend(&key.receiver()).is_some() => flows.owner(key, false),
        Some(vip) => vip.ports.pool.owner(key.destination_port).filter(|&owner| owner != flows.this),
        None => flows.owner(key, false),
    };
    Untranslated::Verdict(owner.map_or(Verdict::Drop(DropReason::NoSession), Verdict::HandOff))
}

fn translate<A: HeaderRewrite + IcmpErrorFamily>(
    batch: &mut Batch,
    i: usize,
    entry: &Entry<A>,
    hop: NextHop,
    quote: &Quote<A>,
    context: &Context<'_>,
) {
    batch.directions[i] = entry.direction();
    let (key, to) = (entry.key(), entry.translated());
    // If the session translates its source, the address of the router behind it is translated, too (RFC 5508 REQ-5 c).
    let source = if key.source == to.source { A::tuples(batch)[i].source } else { to.source };
    let l4 = usize::from(batch.headers[i].l4_offset) - ethernet::HEADER;
    let frame = batch.frames[i].frame.bytes_mut();
    A::decrement_ttl(frame);
    let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
    icmp_error::translate(packet, l4, quote, &to.reversed(), source, to.destination);
    rewrite::forward(batch, i, hop, context.snapshot);
}
