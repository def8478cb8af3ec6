//! Packets that no session knows. Which way would they go, and is that allowed?
//!
//! The order is that of the VIP: a session first (lookup), then a Service frontend, else dropped. A pod's packet is
//! translated, also where it goes to another VIP of this gateway, or, where policy excludes its destination, routed
//! unchanged; nothing else leaves with a pod's address.

use crate::batch::{Batch, Kind, Lane};
use crate::counters::DropReason;
use crate::pipeline::Context;
use crate::session::tuple::HashKey;
use crate::snapshot::endpoints::EndpointId;
use crate::snapshot::spec::Role;
use crate::stage::open::may_open;
use crate::verdict::Verdict;

/// Spreads packets without sessions over equal ways.
const WAYS: HashKey = HashKey::fixed();

/// What becomes of a packet that no session knows.
enum Class {
    /// A pod's packet to the outside.
    Egress(EndpointId),
    /// Policy leaves it as it is.
    Unchanged,
    /// Its way ends here.
    End(Verdict),
}

/// Decides about every packet that no session knows.
pub fn run<A: Lane>(batch: &mut Batch, context: &Context<'_>) {
    for i in batch.open_of::<A>().without(batch.known) {
        match classify::<A>(batch, i, context) {
            Class::Egress(endpoint) => {
                batch.endpoints[i] = endpoint;
                batch.opening.insert(i);
            }
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
                batch.decide(i, verdict);
            }
        }
    }
}

fn classify<A: Lane>(batch: &Batch, i: usize, context: &Context<'_>) -> Class {
    let (tuple, head, received) = (&A::tuples(batch)[i], batch.heads[i], &batch.frames[i]);
    let (policy, flows) = (&context.view.policy, context.flows);
    let inside = head.sides & Role::Inside.sides() != 0;
    let drop = |reason| Class::End(Verdict::Drop(reason));
    if tuple.is_martian(received.is_hairpin()) {
        return drop(DropReason::Martian);
    }
    let vip = policy.vip(tuple.destination);
    if policy.vip(tuple.source).is_some() && !received.is_hairpin() {
        return drop(DropReason::SpoofedSource);
    }
    if let Some((id, _, egress)) = policy.endpoint(tuple.source) {
        return if !inside {
            drop(DropReason::SpoofedSource)
        } else if !A::translates(egress, tuple.destination) {
            if vip.is_some() { drop(DropReason::NoService) } else { Class::Unchanged }
        } else {
            match head.kind {
                kind if kind.has_session() => {
                    let opens = may_open(batch, i, context.rules);
                    match if received.is_settled() { None } else { flows.owner(tuple, opens) } {
                        Some(owner) => Class::End(Verdict::HandOff(owner)),
                        None => Class::Egress(id),
                    }
                }
                Kind::Fragment => drop(DropReason::Fragment),
                _ => drop(DropReason::UnknownProtocol),
            }
        };
    }
    if let Some(vip) = vip {
        // Only the worker that owns the port can know a session for it.
        return match vip.pool.owner(tuple.destination_port) {
            Some(owner) if owner != flows.this && !received.is_settled() && head.kind.has_session() => {
                Class::End(Verdict::HandOff(owner))
            }
            _ => drop(DropReason::NoService),
        };
    }
    // The answer of somebody whom policy excludes: it comes back as unchanged as the question went.
    if let Some((_, _, egress)) = policy.endpoint(tuple.destination)
        && !A::translates(egress, tuple.source)
    {
        return Class::Unchanged;
    }
    drop(DropReason::NoPolicy)
}
