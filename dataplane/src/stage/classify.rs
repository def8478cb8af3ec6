//! Fifth stage: packets that no session knows. Which way would they go, and is that allowed?
//!
//! The order is that of the VIP: a session first (lookup), then a Service frontend, else dropped. A pod's packet is
//! translated or, where policy excludes its destination, routed unchanged; nothing else leaves with a pod's address.

use crate::batch::{Batch, Head, IpVersion, Kind, Way};
use crate::counters::{Direction, DropReason};
use crate::ports::pool::WorkerId;
use crate::session::tuple::Tuple;
use crate::snapshot::Snapshot;
use crate::snapshot::policy::Family;
use crate::snapshot::spec::Role;
use crate::verdict::Verdict;

/// Decides about every packet that no session knows.
pub fn run(batch: &mut Batch, view: &Snapshot, this: WorkerId) {
    for i in batch.open_packets() {
        if batch.ways[i] != Way::Unknown {
            continue;
        }
        let head = batch.heads[i];
        let role = view.network.interface(batch.frames[i].interface).role;
        let class = match head.version {
            IpVersion::V4 => classify(&batch.v4[i], head, role, view, this),
            IpVersion::V6 => classify(&batch.v6[i], head, role, view, this),
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
    this: WorkerId,
) -> Result<Way, Verdict> {
    let policy = &view.policy;
    if let Some(vip) = policy.vip(tuple.destination) {
        // Only the worker that owns the port can know a session for it.
        let owner = vip.pool.owner(tuple.destination_port);
        return Err(match owner {
            Some(owner) if owner != this && !head.handed_over && head.kind.has_session() => Verdict::HandOff(owner),
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
                kind if kind.has_session() => Ok(Way::Egress(id)),
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
