//! Classifies packets without a session: SNAT, load balancing, stateless reply, health check, forward to the owner,
//! route unchanged, or drop.
//!
//! The order for a packet to a VIP: a session (lookup), then a frontend of a Service, else dropped. A backend's packet
//! from a port of its Service is a reply: the worker with its client's session decides, whatever policy says of the
//! client, or it is translated without a session. A pod's other packets are translated, also those to another VIP of
//! this gateway, or, if policy excludes their destination, routed unchanged. Nothing else leaves with a pod's address.

use crate::flow::drop_reason::DropReason;
use crate::flow::ids::{EndpointId, FrontendId, GatewayId, Owner};
use crate::flow::tuple::HashKey;
use crate::flow::verdict::Verdict;
use crate::io::batch::{Batch, PacketKind};
use crate::policy::compiled::Vip;
use crate::policy::endpoints::Endpoint;
use crate::policy::shard::Shard;
use crate::policy::spec::Role;
use crate::stage::context::{Context, PacketFamily};
use crate::stage::encap;
use crate::stage::snat::{may_open_session, opens_connection};

/// ECMP hash of packets without a session.
pub(super) const ECMP_HASH: HashKey = HashKey::fixed();

/// How a packet without a session is handled.
enum Class {
    /// A pod's packet to be translated: opens an egress session.
    Egress(EndpointId),
    /// A client's packet to a frontend of a Service.
    Inbound(FrontendId),
    /// A backend's reply, translated without a session.
    Stateless(FrontendId),
    /// A segment to the health check port of a Service.
    HealthCheck(FrontendId),
    /// Forwarded to the gateway that owns it.
    ForwardToOwner(GatewayId),
    /// Routed without translation.
    Unchanged,
    /// Final verdict.
    Verdict(Verdict),
}

/// Classifies every packet without a session.
pub fn run<A: PacketFamily>(batch: &mut Batch, context: &Context<'_>) {
    for i in batch.undecided_of::<A>().without(batch.validated).without(batch.tunneled).without(batch.unchanged) {
        match classify::<A>(batch, i, context) {
            Class::Egress(endpoint) => {
                batch.endpoints[i] = endpoint;
                batch.new_egress.insert(i);
            }
            Class::Inbound(frontend) => {
                batch.frontends[i] = frontend;
                batch.new_inbound.insert(i);
            }
            Class::Stateless(frontend) => {
                batch.frontends[i] = frontend;
                batch.stateless_replies.insert(i);
            }
            Class::HealthCheck(frontend) => {
                batch.frontends[i] = frontend;
                batch.health_checks.insert(i);
            }
            Class::ForwardToOwner(to) => encap::forward_to_owner::<A>(batch, i, to),
            Class::Unchanged => {
                // Kinds that have no sessions have no hash yet; ECMP needs one.
                batch.hashes[i] = ECMP_HASH.hash(&A::tuples(batch)[i]);
                batch.unchanged.insert(i);
            }
            Class::Verdict(verdict) => {
                // The receiving worker must not hand it off again.
                if matches!(verdict, Verdict::HandOff(_)) {
                    batch.frames[i].mark_handed_off();
                }
                // The reject stage decides whether to reply.
                if verdict == Verdict::Drop(DropReason::NoService) {
                    batch.rejected.insert(i);
                }
                batch.decide(i, verdict);
            }
        }
    }
}

const fn drop(reason: DropReason) -> Class {
    Class::Verdict(Verdict::Drop(reason))
}

fn classify<A: PacketFamily>(batch: &Batch, i: usize, context: &Context<'_>) -> Class {
    if let Some(hand_off) = to_session_of_client::<A>(batch, i, context) {
        return hand_off;
    }
    let (tuple, received) = (&A::tuples(batch)[i], &batch.frames[i]);
    let policy = &context.snapshot.policy;
    let is_inside = batch.headers[i].sides & Role::Inside.sides() != 0;
    if tuple.is_martian(received.is_hairpin()) {
        return health_check_from_link::<A>(batch, i, context).map_or(drop(DropReason::Martian), Class::HealthCheck);
    }
    let vip = policy.vip(tuple.destination);
    if policy.vip(tuple.source).is_some() && !received.is_hairpin() {
        return drop(DropReason::SpoofedSource);
    }
    // The source of a hairpinned packet is a VIP, also if another gateway sent it.
    if received.is_hairpin() && received.is_from_peer() && policy.vip(tuple.source).is_none() {
        return drop(DropReason::SpoofedSource);
    }
    let endpoint = policy.endpoint(tuple.source);
    if endpoint.is_some() && !is_inside {
        return drop(DropReason::SpoofedSource);
    }
    let is_translated = endpoint.is_none_or(|(_, _, egress)| policy.translates(egress, tuple.destination));
    if is_inside && let Some(class) = backend_reply::<A>(batch, i, is_translated, context) {
        return class;
    }
    let class = match (endpoint, vip) {
        (Some((id, endpoint, egress)), _) if policy.translates(egress, tuple.destination) => {
            from_pod::<A>(batch, i, id, endpoint, context)
        }
        (_, Some(vip)) => to_vip::<A>(batch, i, vip, context),
        (Some(_), None) => Class::Unchanged,
        (None, None) => untranslated::<A>(batch, i, is_inside, context),
    };
    match class {
        // Gateways send each other only packets with an owner. An untranslated packet is routed by the gateway that
        // received it, except for what may belong to a session of the owner: an ICMP error, and a backend's packet from
        // a port of its Service.
        Class::Unchanged if received.is_from_peer() => {
            let may_have_session =
                batch.headers[i].kind == PacketKind::IcmpError || !policy.frontends_of(&tuple.sender()).is_empty();
            if may_have_session { class } else { drop(DropReason::SpoofedSource) }
        }
        // The worker that has a session which policy permits no more ends it.
        Class::Unchanged if is_inside && batch.headers[i].kind.has_session() => {
            hand_off::<A>(batch, i, false, context).unwrap_or(class)
        }
        class => class,
    }
}

/// The health check port to which a host on the link sends a segment from its link-local address, as Google Cloud's
/// prober does. The gateway itself replies; whatever else such hosts send is a martian.
fn health_check_from_link<A: PacketFamily>(batch: &Batch, i: usize, context: &Context<'_>) -> Option<FrontendId> {
    let (tuple, policy) = (&A::tuples(batch)[i], &context.snapshot.policy);
    let may_be = batch.headers[i].kind == PacketKind::Tcp && tuple.is_from_link() && !batch.frames[i].is_from_peer();
    policy.vip(tuple.destination).filter(|vip| may_be && !vip.ports.retired)?;
    policy.frontend(&tuple.receiver()).filter(|frontend| frontend.is_health())
}

/// Hands the packet off if the flow directory names another worker as the owner of its flow.
fn hand_off<A: PacketFamily>(batch: &Batch, i: usize, opens: bool, context: &Context<'_>) -> Option<Class> {
    if batch.frames[i].is_handed_off() {
        return None;
    }
    context.flows.owner(&A::tuples(batch)[i], opens).map(|owner| Class::Verdict(Verdict::HandOff(owner)))
}

/// Hands a backend's packet off to the worker that has its client's session, before any check: there it needs none. The
/// backend may be on any side, the client may be one whose packets policy doesn't translate, or the backend itself, and
/// the packet one that opens a connection (simultaneous open, RFC 9293 section 3.5).
fn to_session_of_client<A: PacketFamily>(batch: &Batch, i: usize, context: &Context<'_>) -> Option<Class> {
    context.flows.directory?;
    let may_be_reply = batch.headers[i].kind.has_ports()
        && !context.snapshot.policy.frontends_of(&A::tuples(batch)[i].sender()).is_empty();
    if may_be_reply { hand_off::<A>(batch, i, false, context) } else { None }
}

/// A backend's packet from a port of its Service, unless it is the pod's own: it opens a connection, or is a datagram or
/// one to a destination that policy doesn't translate (`is_translated`), and the gateway that would have its client's
/// session has none.
fn backend_reply<A: PacketFamily>(
    batch: &Batch,
    i: usize,
    is_translated: bool,
    context: &Context<'_>,
) -> Option<Class> {
    let (kind, tuple, received) = (batch.headers[i].kind, &A::tuples(batch)[i], &batch.frames[i]);
    if !kind.has_ports() || opens_connection(batch, i) {
        return None;
    }
    let policy = &context.snapshot.policy;
    let &frontend = policy.frontends_of(&tuple.sender()).first()?;
    if batch.standby.contains(i) {
        let Owner::Other(owner) = batch.session_owners[i] else { return None };
        return Some(Class::ForwardToOwner(owner));
    }
    if !received.is_at_hop_limit()
        && let Some(owner) = policy.owner_of_reply(tuple, received.is_from_peer())
    {
        return Some(Class::ForwardToOwner(owner));
    }
    if !is_translated || kind == PacketKind::Udp {
        return None;
    }
    let shows_frontend = policy.reply_shows_frontend(frontend, &tuple.receiver(), tuple.source);
    Some(if shows_frontend { Class::Stateless(frontend) } else { drop(DropReason::NoSession) })
}

/// Classifies a pod's packet that policy translates.
fn from_pod<A: PacketFamily>(
    batch: &Batch,
    i: usize,
    id: EndpointId,
    endpoint: &Endpoint,
    context: &Context<'_>,
) -> Class {
    // Its sessions may have their ports in shards of any gateway: a packet with a standby session here goes to the
    // gateway that owns that one. If its gateway has no port left, this one opens the session.
    let owner = match batch.session_owners[i] {
        other @ Owner::Other(_) if batch.standby.contains(i) => other,
        _ if batch.frames[i].requests_port() => Owner::This,
        _ => context.snapshot.policy.owner_of_flow(endpoint, &A::tuples(batch)[i]),
    };
    let has_session = batch.headers[i].kind.has_session();
    match owner {
        Owner::This => {}
        // Unless another worker has its session, with a port of a shard of this gateway.
        Owner::Other(gateway) => {
            let hand_off = if has_session { hand_off::<A>(batch, i, false, context) } else { None };
            return hand_off.unwrap_or(Class::ForwardToOwner(gateway));
        }
        Owner::Unowned => return drop(DropReason::NoOwner),
    }
    match batch.headers[i].kind {
        _ if has_session => {
            let opens = may_open_session(batch, i, context.rules);
            hand_off::<A>(batch, i, opens, context).unwrap_or(Class::Egress(id))
        }
        PacketKind::Fragment => drop(DropReason::Fragment),
        _ => drop(DropReason::UnknownProtocol),
    }
}

/// Classifies a packet to a VIP.
fn to_vip<A: PacketFamily>(batch: &Batch, i: usize, vip: &Vip, context: &Context<'_>) -> Class {
    let (kind, tuple, received) = (batch.headers[i].kind, &A::tuples(batch)[i], &batch.frames[i]);
    let frontend = || context.snapshot.policy.frontend(&tuple.receiver());
    if kind.has_ports()
        && !vip.ports.retired
        && let Some(frontend) = frontend()
    {
        if frontend.is_health() {
            return Class::HealthCheck(frontend);
        }
        // If all gateways announce a VIP, any of them takes its clients, or forwards them once it knows their backend.
        // Otherwise one gateway owns it, and only that one replies, unless the packet has no forwarding hop left: then the
        // sender regards this gateway as the owner. What was a session here may be another gateway's by now.
        let owner = if batch.standby.contains(i) { batch.session_owners[i] } else { vip.shards.owner() };
        if let Owner::Other(gateway) = owner
            && !received.is_at_hop_limit()
        {
            return Class::ForwardToOwner(gateway);
        }
        let opens = may_open_session(batch, i, context.rules);
        return hand_off::<A>(batch, i, opens, context).unwrap_or(Class::Inbound(frontend));
    }
    match vip.shards.owner_of_port(tuple.destination_port) {
        Owner::This => {}
        Owner::Other(gateway) if kind.has_session() => return Class::ForwardToOwner(gateway),
        Owner::Other(_) | Owner::Unowned => return drop(DropReason::NoService),
    }
    // The shard's former owner may still be replicating the session.
    let is_pending =
        kind.has_session() && vip.shards.of_port(tuple.destination_port).is_some_and(Shard::awaits_release);
    // Only the worker that owns the port can have a session for it.
    match vip.ports.pool.owner(tuple.destination_port) {
        Some(owner) if owner != context.flows.this && !received.is_handed_off() && kind.has_session() => {
            Class::Verdict(Verdict::HandOff(owner))
        }
        _ if is_pending => Class::Verdict(Verdict::Defer(DropReason::NoService)),
        _ => drop(DropReason::NoService),
    }
}

/// Classifies a packet that is neither from a pod with a policy nor to a VIP.
fn untranslated<A: PacketFamily>(batch: &Batch, i: usize, is_inside: bool, context: &Context<'_>) -> Class {
    let (tuple, policy) = (&A::tuples(batch)[i], &context.snapshot.policy);
    // A reply from a destination that policy excludes: untranslated, like the request.
    let is_reply =
        policy.endpoint(tuple.destination).is_some_and(|(_, _, egress)| !policy.translates(egress, tuple.source));
    if is_reply {
        return Class::Unchanged;
    }
    let (is_pod, is_backend) = (policy.is_pod(tuple.source), policy.is_backend(tuple.source));
    let is_routed = is_inside
        && if policy.is_cluster_address(tuple.destination) {
            is_pod || is_backend
        } else if is_pod {
            // From a pod without a policy (RFC 2827): beyond the cluster only if `uncovered: pass`. A node that sends covered
            // pods' packets alone knows of a policy before this gateway does, or still does.
            !policy.cluster().drop_uncovered && !batch.frames[i].is_covered_only()
        } else {
            // From a backend without a policy, captured because it could have been a reply.
            is_backend && !batch.frames[i].is_covered_only()
        };
    if is_routed { Class::Unchanged } else { drop(DropReason::NoPolicy) }
}
