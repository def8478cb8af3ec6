//! Fifth stage: packets that no session knows. Which way would they go, and is that allowed?
//!
//! The order is that of the VIP: a session first (lookup), then a Service frontend, else dropped. A pod's packet is
//! translated or, where policy excludes its destination, routed unchanged; nothing else leaves with a pod's address.

use crate::batch::{Batch, Head, Kind, Lane};
use crate::counters::DropReason;
use crate::link::directory::Directory;
use crate::ports::pool::WorkerId;
use crate::session::tuple::Tuple;
use crate::snapshot::Snapshot;
use crate::snapshot::policy::{EndpointId, Family};
use crate::snapshot::spec::Role;
use crate::stage::open::{Rules, may_open};
use crate::verdict::Verdict;

/// Who among the workers has which flow.
#[derive(Clone, Copy, Debug)]
pub struct Flows<'a> {
    /// This worker.
    pub this: WorkerId,
    /// The flows of all; `None` where there is one worker.
    pub directory: Option<&'a Directory>,
}

impl Flows<'_> {
    /// The other worker that has a pod's flow. Without one, the flow is this worker's if the packet may open a session.
    fn owner<A: Family>(self, flow: &Tuple<A>, opens: bool) -> Option<WorkerId> {
        let directory = self.directory?;
        let owner = if opens { Some(directory.find_or_claim(flow, self.this)) } else { directory.find(flow) };
        owner.filter(|&owner| owner != self.this)
    }
}

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
pub fn run<A: Lane>(batch: &mut Batch, view: &Snapshot, rules: Rules, flows: Flows<'_>) {
    for i in batch.open_of::<A>().without(batch.known) {
        let role = view.network.interface(batch.frames[i].interface).role;
        let opens = may_open(batch, i, rules);
        // Whoever was sent a packet doesn't send it on.
        let may_hand_off = !batch.handed_over.contains(i);
        match classify(&A::tuples(batch)[i], batch.heads[i], role, view, flows, opens, may_hand_off) {
            Class::Egress(endpoint) => {
                batch.endpoints[i] = endpoint;
                batch.opening.insert(i);
            }
            Class::Unchanged => batch.unchanged.insert(i),
            Class::End(verdict) => batch.decide(i, verdict),
        }
    }
}

fn classify<A: Family>(
    tuple: &Tuple<A>,
    head: Head,
    role: Role,
    view: &Snapshot,
    flows: Flows<'_>,
    opens: bool,
    may_hand_off: bool,
) -> Class {
    let policy = &view.policy;
    let drop = |reason| Class::End(Verdict::Drop(reason));
    if let Some(vip) = policy.vip(tuple.destination) {
        // Only the worker that owns the port can know a session for it.
        return match vip.pool.owner(tuple.destination_port) {
            Some(owner) if owner != flows.this && may_hand_off && head.kind.has_session() => {
                Class::End(Verdict::HandOff(owner))
            }
            _ => drop(DropReason::NoService),
        };
    }
    if policy.vip(tuple.source).is_some() {
        return drop(DropReason::SpoofedSource);
    }
    if let Some((id, _, egress)) = policy.endpoint(tuple.source) {
        return if !role.is_inside() {
            drop(DropReason::SpoofedSource)
        } else if !A::translates(egress, tuple.destination) {
            Class::Unchanged
        } else {
            match head.kind {
                kind if kind.has_session() => match if may_hand_off { flows.owner(tuple, opens) } else { None } {
                    Some(owner) => Class::End(Verdict::HandOff(owner)),
                    None => Class::Egress(id),
                },
                Kind::Fragment => drop(DropReason::Fragment),
                _ => drop(DropReason::UnknownProtocol),
            }
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
