//! Packets that no session knows. Which way would they go, and is that allowed?
//!
//! The order is that of the VIP: a session first (lookup), then a Service's frontend, else dropped. What a backend says from
//! the port that it serves is an answer, session or not. A pod's other packets are translated, also where they go to another
//! VIP of this gateway, or, where policy excludes their destination, routed unchanged; nothing else leaves with a pod's address.

use crate::batch::{Batch, Kind, Lane};
use crate::counters::DropReason;
use crate::pipeline::Context;
use crate::session::tuple::HashKey;
use crate::snapshot::endpoints::{Endpoint, EndpointId};
use crate::snapshot::members::GatewayId;
use crate::snapshot::policy::Vip;
use crate::snapshot::service::FrontendId;
use crate::snapshot::shares::{Owner, Share};
use crate::snapshot::spec::Role;
use crate::stage::open::{begins, may_open};
use crate::stage::wrap;
use crate::verdict::Verdict;

/// Spreads packets without sessions over equal ways.
pub(super) const WAYS: HashKey = HashKey::fixed();

/// What becomes of a packet that no session knows.
enum Class {
    /// A pod's packet to the outside.
    Egress(EndpointId),
    /// A client's packet to a Service.
    Inbound(FrontendId),
    /// A backend's answer for this frontend.
    Stateless(FrontendId),
    /// A health check of a Service.
    Health(FrontendId),
    /// Another gateway's.
    Peer(GatewayId),
    /// Policy leaves it as it is.
    Unchanged,
    /// Its way ends here.
    End(Verdict),
}

/// Decides about every packet that no session knows.
pub fn run<A: Lane>(batch: &mut Batch, context: &Context<'_>) {
    for i in batch.open_of::<A>().without(batch.known).without(batch.travelling) {
        match classify::<A>(batch, i, context) {
            Class::Egress(endpoint) => {
                batch.endpoints[i] = endpoint;
                batch.opening.insert(i);
            }
            Class::Inbound(frontend) => {
                batch.frontends[i] = frontend;
                batch.inbound.insert(i);
            }
            Class::Stateless(frontend) => {
                batch.frontends[i] = frontend;
                batch.stateless.insert(i);
            }
            Class::Health(frontend) => {
                batch.frontends[i] = frontend;
                batch.health.insert(i);
            }
            Class::Peer(to) => wrap::send_to_owner::<A>(batch, i, to),
            Class::Unchanged => {
                // Kinds without sessions have no hash yet; equal ways are chosen by one.
                batch.hashes[i] = WAYS.hash(&A::tuples(batch)[i]);
                batch.unchanged.insert(i);
            }
            Class::End(verdict) => {
                // Whoever is sent a packet doesn't send it on.
                if matches!(verdict, Verdict::HandOff(_)) {
                    batch.frames[i].settle();
                }
                // Who may hear of it is decided last.
                if verdict == Verdict::Drop(DropReason::NoService) {
                    batch.refused.insert(i);
                }
                batch.decide(i, verdict);
            }
        }
    }
}

const fn drop(reason: DropReason) -> Class {
    Class::End(Verdict::Drop(reason))
}

fn classify<A: Lane>(batch: &Batch, i: usize, context: &Context<'_>) -> Class {
    let (tuple, received) = (&A::tuples(batch)[i], &batch.frames[i]);
    let policy = &context.view.policy;
    let inside = batch.heads[i].sides & Role::Inside.sides() != 0;
    if tuple.is_martian(received.is_hairpin()) {
        return drop(DropReason::Martian);
    }
    let vip = policy.vip(tuple.destination);
    if policy.vip(tuple.source).is_some() && !received.is_hairpin() {
        return drop(DropReason::SpoofedSource);
    }
    // What comes around has left a pod as its VIP, whichever gateway says so.
    if received.is_hairpin() && received.is_from_peer() && policy.vip(tuple.source).is_none() {
        return drop(DropReason::SpoofedSource);
    }
    let endpoint = policy.endpoint(tuple.source);
    if endpoint.is_some() && !inside {
        return drop(DropReason::SpoofedSource);
    }
    // Whom policy excludes reaches pods without a VIP, and hears from them as it called them.
    if inside
        && endpoint.is_none_or(|(_, _, egress)| policy.translates(egress, tuple.destination))
        && let Some(class) = answer::<A>(batch, i, context)
    {
        return class;
    }
    let class = match (endpoint, vip) {
        (Some((id, endpoint, egress)), _) if policy.translates(egress, tuple.destination) => {
            from_pod::<A>(batch, i, (id, endpoint), context)
        }
        (_, Some(vip)) => to_vip::<A>(batch, i, vip, context),
        (Some(_), None) => Class::Unchanged,
        (None, None) => from_elsewhere::<A>(batch, i, inside, context),
    };
    match class {
        // Gateways send each other what has an owner. What nobody translates is routed where it comes in, but for what a backend says
        // of a packet, which may belong to an owner's session.
        Class::Unchanged if received.is_from_peer() && batch.heads[i].kind != Kind::Error => {
            drop(DropReason::SpoofedSource)
        }
        class => class,
    }
}

/// The other worker that has the packet's session, as far as anybody knows.
fn owner<A: Lane>(batch: &Batch, i: usize, opens: bool, context: &Context<'_>) -> Option<Class> {
    if batch.frames[i].is_settled() {
        return None;
    }
    context.flows.owner(&A::tuples(batch)[i], opens).map(|owner| Class::End(Verdict::HandOff(owner)))
}

/// A backend's packet from the port that it serves, unless it begins something.
fn answer<A: Lane>(batch: &Batch, i: usize, context: &Context<'_>) -> Option<Class> {
    let (kind, tuple) = (batch.heads[i].kind, &A::tuples(batch)[i]);
    if !kind.has_ports() || begins(batch, i) {
        return None;
    }
    let &frontend = context.view.policy.frontends_of(&tuple.sender()).first()?;
    Some(owner::<A>(batch, i, false, context).unwrap_or(Class::Stateless(frontend)))
}

/// A covered pod's packet that is to be translated.
fn from_pod<A: Lane>(batch: &Batch, i: usize, (id, endpoint): (EndpointId, &Endpoint), context: &Context<'_>) -> Class {
    // Without a home, an endpoint's sessions may be of any share: one that is known here goes on where its share is.
    let whose = match batch.elsewhere[i] {
        other @ Owner::Other(_) if endpoint.home.is_none() && batch.copies.contains(i) => other,
        _ => context.view.policy.owner_of(endpoint),
    };
    match whose {
        Owner::This => {}
        Owner::Other(gateway) => return Class::Peer(gateway),
        Owner::Nobody => return drop(DropReason::NoOwner),
    }
    match batch.heads[i].kind {
        kind if kind.has_session() => {
            let opens = may_open(batch, i, context.rules);
            owner::<A>(batch, i, opens, context).unwrap_or(Class::Egress(id))
        }
        Kind::Fragment => drop(DropReason::Fragment),
        _ => drop(DropReason::UnknownProtocol),
    }
}

/// A packet to a VIP.
fn to_vip<A: Lane>(batch: &Batch, i: usize, vip: &Vip, context: &Context<'_>) -> Class {
    let (kind, tuple, received) = (batch.heads[i].kind, &A::tuples(batch)[i], &batch.frames[i]);
    let frontend = || context.view.policy.frontend(&tuple.receiver());
    if kind.has_ports()
        && !vip.retired
        && let Some(frontend) = frontend()
    {
        if frontend.is_health() {
            return Class::Health(frontend);
        }
        // Where all gateways announce a VIP, clients come to any of them. Else it is one gateway's, which others are not to answer for,
        // unless it is that one that thinks so.
        if let Owner::Other(gateway) = vip.shares.owner()
            && !received.is_at_last()
        {
            return Class::Peer(gateway);
        }
        let opens = may_open(batch, i, context.rules);
        return owner::<A>(batch, i, opens, context).unwrap_or(Class::Inbound(frontend));
    }
    match vip.shares.owner_of_port(tuple.destination_port) {
        Owner::This => {}
        Owner::Other(gateway) if kind.has_session() => return Class::Peer(gateway),
        Owner::Other(_) | Owner::Nobody => return drop(DropReason::NoService),
    }
    // Its session may be among those that its former owner is telling.
    let is_coming = kind.has_session() && vip.shares.of_port(tuple.destination_port).is_some_and(Share::is_coming);
    // Only the worker that owns the port can know a session for it.
    match vip.pool.owner(tuple.destination_port) {
        Some(owner) if owner != context.flows.this && !received.is_settled() && kind.has_session() => {
            Class::End(Verdict::HandOff(owner))
        }
        _ if is_coming => Class::End(Verdict::Defer(DropReason::NoService)),
        _ => drop(DropReason::NoService),
    }
}

/// A packet between two that no policy translates.
fn from_elsewhere<A: Lane>(batch: &Batch, i: usize, inside: bool, context: &Context<'_>) -> Class {
    let (tuple, policy) = (&A::tuples(batch)[i], &context.view.policy);
    // The answer of somebody whom policy excludes: it comes back as unchanged as the question went.
    let is_answer =
        policy.endpoint(tuple.destination).is_some_and(|(_, _, egress)| !policy.translates(egress, tuple.source));
    if is_answer {
        return Class::Unchanged;
    }
    let goes_on = inside
        && if policy.is_pod(tuple.source) {
            // An uncovered pod's (RFC 2827): inside the cluster it goes anywhere, beyond only where that is wanted.
            !policy.cluster().drop_uncovered || policy.is_inside(tuple.destination)
        } else {
            // A backend without a policy for what it asks: it was taken in because it could have been an answer.
            policy.is_backend(tuple.source)
        };
    if goes_on { Class::Unchanged } else { drop(DropReason::NoPolicy) }
}
