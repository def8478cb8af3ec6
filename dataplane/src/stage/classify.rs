//! Fifth stage: packets that no session knows. Which way would they go, and is that allowed?
//!
//! The order is that of the VIP: a session first (lookup), then a Service frontend, else dropped. A pod's packet is
//! translated or, where policy excludes its destination, routed unchanged; nothing else leaves with a pod's address.

use crate::batch::{Batch, Head, IpVersion, Kind, Way};
use crate::counters::{Direction, DropReason};
use crate::link::directory::Directory;
use crate::ports::pool::WorkerId;
use crate::session::tuple::Tuple;
use crate::snapshot::Snapshot;
use crate::snapshot::policy::Family;
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
    fn owner<A: Family>(self, flow: &Tuple<A>, head: Head, opens: bool) -> Option<WorkerId> {
        let directory = self.directory?;
        // Whoever was sent a packet doesn't send it on.
        let owner = match (head.handed_over, opens) {
            (true, _) => return None,
            (false, true) => Some(directory.find_or_claim(flow, self.this)),
            (false, false) => directory.find(flow),
        };
        owner.filter(|&owner| owner != self.this)
    }
}

/// Decides about every packet that no session knows.
pub fn run(batch: &mut Batch, view: &Snapshot, rules: Rules, flows: Flows<'_>) {
    for i in batch.open_packets() {
        if batch.ways[i] != Way::Unknown {
            continue;
        }
        let head = batch.heads[i];
        let role = view.network.interface(batch.frames[i].interface).role;
        let opens = may_open(batch, i, rules);
        let class = match head.version {
            IpVersion::V4 => classify(&batch.v4[i], head, role, view, flows, opens),
            IpVersion::V6 => classify(&batch.v6[i], head, role, view, flows, opens),
            IpVersion::Neither => Err(Verdict::Drop(DropReason::NotOurs)),
        };
        match class {
            Ok(way) => {
                batch.ways[i] = way;
                batch.directions[i] = if way == Way::Unchanged { Direction::Unchanged } else { Direction::Egress };
            }
            Err(verdict) => batch.decide(i, verdict),
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
) -> Result<Way, Verdict> {
    let policy = &view.policy;
    if let Some(vip) = policy.vip(tuple.destination) {
        // Only the worker that owns the port can know a session for it.
        let owner = vip.pool.owner(tuple.destination_port);
        return Err(match owner {
            Some(owner) if owner != flows.this && !head.handed_over && head.kind.has_session() => {
                Verdict::HandOff(owner)
            }
            _ => Verdict::Drop(DropReason::NoService),
        });
    }
    if policy.vip(tuple.source).is_some() {
        return Err(Verdict::Drop(DropReason::SpoofedSource));
    }
    if let Some((id, _, egress)) = policy.endpoint(tuple.source) {
        return if !role.is_inside() {
            Err(Verdict::Drop(DropReason::SpoofedSource))
        } else if !A::translates(egress, tuple.destination) {
            Ok(Way::Unchanged)
        } else {
            match head.kind {
                kind if kind.has_session() => match flows.owner(tuple, head, opens) {
                    Some(owner) => Err(Verdict::HandOff(owner)),
                    None => Ok(Way::Egress(id)),
                },
                Kind::Fragment => Err(Verdict::Drop(DropReason::Fragment)),
                _ => Err(Verdict::Drop(DropReason::UnknownProtocol)),
            }
        };
    }
    // The answer of somebody whom policy excludes: it comes back as unchanged as the question went.
    if let Some((_, _, egress)) = policy.endpoint(tuple.destination)
        && !A::translates(egress, tuple.source)
    {
        return Ok(Way::Unchanged);
    }
    Err(Verdict::Drop(DropReason::NoPolicy))
}
