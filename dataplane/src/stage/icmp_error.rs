//! ICMP errors: each belongs to the session of the packet that it quotes, and is translated together with the quote
//! (RFC 5508 sections 4 and 5). It changes nothing in the session: the receiving host decides what the error means.
//! It is forwarded to the gateway that owns the session, as the session's packets are.
//!
//! On an inside interface its sender may be any router between the gateway and the pods. Without a session, an error
//! from there leaves only if its receiver may see the addresses that it quotes.

use crate::flow::direction::Direction;
use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{FrontendId, GatewayId, Owner, Slot};
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::Received;
use crate::io::batch::Batch;
use crate::policy::compiled::{Policy, Vip};
use crate::policy::network::NextHop;
use crate::policy::spec::Role;
use crate::replication::owner;
use crate::session::Sessions;
use crate::session::entry::{Entry, Flags};
use crate::stage::context::{Context, PacketFamily};
use crate::stage::rewrite::{self, HeaderRewrite};
use crate::stage::virtual_reassembly::FragmentFamily;
use crate::stage::{classify, encap, load_balance, revalidate, route};
use crate::wire::ethernet;
use crate::wire::icmp_error::{self, IcmpErrorFamily, ParseError, Quote};

/// Translates the ICMP errors of the batch. Those that policy leaves untranslated stay open.
pub fn run<A: HeaderRewrite + IcmpErrorFamily + FragmentFamily>(
    batch: &mut Batch,
    sessions: &mut Sessions,
    context: &Context<'_>,
) {
    drop_fragments::<A>(batch);
    for i in batch.undecided_of::<A>().and(batch.icmp_errors) {
        if !may_have_session::<A>(batch, i, &context.snapshot.policy) {
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
            Err(Untranslated::Verdict(Verdict::Drop(reason)))
                if !is_translated(&A::tuples(batch)[i], &context.snapshot.policy) =>
            {
                leave_untranslated::<A>(batch, i, reason, &context.snapshot.policy);
            }
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

/// Whether a packet was received on an inside interface.
fn is_inside(batch: &Batch, i: usize) -> bool {
    batch.headers[i].sides & Role::Inside.sides() != 0
}

/// Drops ICMP errors in fragments from inside, by their first fragment. No router sends such (RFC 1812 section 4.3.2.3,
/// RFC 4443 section 2.4 c), and a quote in fragments can't be translated.
fn drop_fragments<A: IcmpErrorFamily + FragmentFamily>(batch: &mut Batch) {
    for i in batch.undecided_of::<A>().and(batch.fragments) {
        if is_inside(batch, i) && begins_error::<A>(batch, i) {
            batch.decide(i, Verdict::Drop(DropReason::Fragment));
        }
    }
}

/// Whether a fragment is the first one of an ICMP error. One with inconsistent lengths may be.
fn begins_error<A: IcmpErrorFamily + FragmentFamily>(batch: &Batch, i: usize) -> bool {
    let frame = batch.frames[i].frame.bytes();
    let Some((_, piece, protocol)) = frame.get(ethernet::HEADER..).and_then(A::parse_fragment) else { return false };
    let is_later = piece.is_ok_and(|piece| !piece.is_first());
    let kind = frame.get(usize::from(batch.headers[i].l4_offset));
    protocol == A::ICMP && !is_later && kind.is_some_and(|&kind| A::is_error(kind))
}

/// Whether an error may belong to a session: because policy translates it, or because it comes from inside. Any router
/// there reports on packets that this gateway has translated. A VIP as source is spoofed.
fn may_have_session<A: PacketFamily>(batch: &Batch, i: usize, policy: &Policy) -> bool {
    let tuple = &A::tuples(batch)[i];
    is_translated(tuple, policy)
        || policy.is_backend(tuple.source)
        || (is_inside(batch, i) && policy.vip(tuple.source).is_none())
}

/// Whether policy translates packets between these addresses.
fn is_translated<A: PacketFamily>(tuple: &Tuple<A>, policy: &Policy) -> bool {
    policy.vip(tuple.destination).is_some() || policy.translates_from(tuple.source, tuple.destination)
}

/// Decides on an error that belongs to no session, between addresses that policy doesn't translate: it is dropped if
/// its receiver must not see it, for `reason` if that isn't the lack of a session. Otherwise it is routed unchanged, or
/// left to `classify`.
fn leave_untranslated<A: IcmpErrorFamily + PacketFamily>(
    batch: &mut Batch,
    i: usize,
    reason: DropReason,
    policy: &Policy,
) {
    let tuple = A::tuples(batch)[i];
    let packet = batch.frames[i].frame.bytes().get(ethernet::HEADER..).unwrap_or_default();
    let l4 = usize::from(batch.headers[i].l4_offset) - ethernet::HEADER;
    let quoted = match reason {
        // The quote may be of a packet without ports, which has no session.
        DropReason::NoSession | DropReason::UnknownProtocol | DropReason::Fragment => {
            icmp_error::quoted_addresses::<A>(packet, l4)
        }
        _ => None,
    };
    let Some(quoted) = quoted else { return batch.decide(i, Verdict::Drop(reason)) };
    if let Some(reason) = refusal(quoted, tuple.destination, policy) {
        return batch.decide(i, Verdict::Drop(reason));
    }
    if is_routed(&tuple, quoted.1, policy) {
        batch.hashes[i] = classify::ECMP_HASH.hash(&tuple);
        batch.unchanged.insert(i);
    }
}

/// Why a receiver must not see the source and the destination of the packet that an error quotes: policy translates or
/// drops what one of them sends to it. `None`: it may.
fn refusal<A: PacketFamily>(quoted: (A, A), receiver: A, policy: &Policy) -> Option<DropReason> {
    // Nothing to an endpoint leaves on an outside interface.
    if policy.endpoint(receiver).is_some() {
        return None;
    }
    [quoted.0, quoted.1].into_iter().filter(|address| *address != receiver).find_map(|address| {
        if let Some((.., egress)) = policy.endpoint(address) {
            return policy.translates(egress, receiver).then_some(DropReason::NoSession);
        }
        let stays = policy.is_pod(address) && !policy.is_cluster_address(receiver);
        (stays && policy.cluster().drop_uncovered).then_some(DropReason::NoPolicy)
    })
}

/// Whether an untranslated error of a router is routed: it doesn't leave the cluster, or it is about a packet to a pod
/// or backend (`reported`) that its receiver may see. Errors of pods and backends are routed as their other packets are.
fn is_routed<A: PacketFamily>(tuple: &Tuple<A>, reported: A, policy: &Policy) -> bool {
    let is_known =
        |address: A| policy.endpoint(address).is_some() || policy.is_pod(address) || policy.is_backend(address);
    let receiver = tuple.destination;
    let is_internal = policy.is_cluster_address(receiver) || policy.endpoint(receiver).is_some();
    !is_known(tuple.source) && (is_internal || is_known(reported))
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
        if !may_be_translated(&key, &context.snapshot.policy) {
            return Err(drop(DropReason::NoSession));
        }
        return match other_owner(&key, received, head.sides, context) {
            // Another gateway may have the session of a client of a shared VIP, if policy alone shows its translation.
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
        return Err(other_owner(&key, received, head.sides, context));
    }
    if !entry.flags().may_come_from(head.sides) {
        return Err(drop(DropReason::SpoofedSource));
    }
    Ok((Some(slot), quote))
}

/// Whether policy permits a session with this key, here or elsewhere.
fn may_be_translated<A: PacketFamily>(key: &Tuple<A>, policy: &Policy) -> bool {
    is_translated(key, policy) || policy.is_backend(key.source)
}

/// Whether a client's packets are for a Service at a VIP that all gateways announce.
fn is_shared_service<A: PacketFamily>(key: &Tuple<A>, policy: &Policy) -> bool {
    policy.frontend(&key.receiver()).is_some()
        && policy.vip(key.destination).is_some_and(|vip| vip.shards.is_distributed())
}

/// Translates an error about a backend's packet to a client, like a packet of that client without a session: see
/// [`super::stateless_reply`]. Only if any gateway may have the session. Otherwise the owner of the client's flow has
/// it, or there is none, and its translation isn't guessed.
fn translate_stateless<A: HeaderRewrite + IcmpErrorFamily>(
    batch: &mut Batch,
    i: usize,
    quote: &Quote<A>,
    context: &Context<'_>,
) {
    let key = quote.tuple.reversed();
    let (sides, policy) = (batch.headers[i].sides, &context.snapshot.policy);
    let target = policy.frontend(&key.receiver()).and_then(|frontend| {
        load_balance::stateless_backend(&key, frontend, sides, context)
            .filter(|target| policy.reply_shows_frontend(frontend, &key.sender(), target.address))
    });
    let Some(target) = target else { return batch.decide(i, Verdict::Drop(DropReason::NoSession)) };
    let to = target.dnat(&key);
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

/// The other gateway that would have the session: the owner of the VIP's port, of a client's flow, or of the pod.
fn owner_gateway<A: PacketFamily>(
    key: &Tuple<A>,
    received: &Received,
    sides: u8,
    context: &Context<'_>,
) -> Option<GatewayId> {
    let policy = &context.snapshot.policy;
    let owner = match called_vip(key, policy) {
        Some(vip) => match policy.frontend(&key.receiver()) {
            Some(frontend) => owner_of_client(key, vip, frontend, sides, context),
            None => vip.shards.owner_of_port(key.destination_port),
        },
        None => match policy.owner_of_reply(key, received.is_from_peer()) {
            Some(gateway) => return Some(gateway),
            None => policy.owner_of_flow(policy.endpoint(key.source)?.1, key),
        },
    };
    match owner {
        Owner::Other(gateway) => Some(gateway),
        Owner::This | Owner::Unowned => None,
    }
}

/// The VIP that decides who has a session with this key. None for a pod's own session, also for one to a VIP: that is
/// where the pod's packets open it.
fn called_vip<'a, A: PacketFamily>(key: &Tuple<A>, policy: &'a Policy) -> Option<&'a Vip> {
    policy.vip(key.destination).filter(|_| !policy.translates_from(key.source, key.destination))
}

/// The gateway that owns a client's flow to a frontend, as for the client's packets: one that owns nothing of the VIP
/// takes none of its clients. If no backend takes new sessions, that of an older one isn't known: it is unspecified.
fn owner_of_client<A: PacketFamily>(
    key: &Tuple<A>,
    vip: &Vip,
    frontend: FrontendId,
    sides: u8,
    context: &Context<'_>,
) -> Owner {
    if vip.shards.owner() != Owner::This {
        return vip.shards.owner();
    }
    let target = load_balance::stateless_backend(key, frontend, sides, context);
    let backend = target.map(|target| target.address).unwrap_or_default();
    context.snapshot.policy.owner_of_client(vip, frontend, &key.sender(), backend)
}

/// The other gateway or worker that may have the session; otherwise a drop.
fn other_owner<A: PacketFamily>(key: &Tuple<A>, received: &Received, sides: u8, context: &Context<'_>) -> Untranslated {
    if let Some(gateway) = owner_gateway(key, received, sides, context) {
        return Untranslated::ForwardToOwner(gateway);
    }
    let flows = context.flows;
    let policy = &context.snapshot.policy;
    let owner = match called_vip(key, policy) {
        _ if received.is_handed_off() => None,
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
    // A pod is on no path between a client and a backend, and the backend must not see its address.
    if context.snapshot.policy.translates_from(source, to.destination) {
        return batch.decide(i, Verdict::Drop(DropReason::SpoofedSource));
    }
    let l4 = usize::from(batch.headers[i].l4_offset) - ethernet::HEADER;
    let frame = batch.frames[i].frame.bytes_mut();
    A::decrement_ttl(frame);
    let Some(packet) = frame.get_mut(ethernet::HEADER..) else { return };
    icmp_error::translate(packet, l4, quote, &to.reversed(), source, to.destination);
    rewrite::forward(batch, i, hop, context.snapshot);
}
