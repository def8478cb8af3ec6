//! What the steering program must capture, from policy and network.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use vipgate_dataplane::snapshot::spec::PolicySet;
use vipgate_xdp::steering::SteeringTables;

/// The tables for this policy on a node with these addresses of its own.
pub(super) fn tables(set: &PolicySet, locals: &[IpAddr]) -> SteeringTables {
    let mut cidrs = BTreeMap::new();
    for (policy, number) in set.policies.iter().zip(0..) {
        cidrs.extend(policy.destinations.iter().map(|net| ((number, net.trunc()), true)));
        // Excluded last: where both lists name a prefix, it is excluded.
        cidrs.extend(policy.excluded.iter().map(|net| ((number, net.trunc()), false)));
    }
    SteeringTables {
        endpoints: set.endpoints.iter().map(|endpoint| (endpoint.address, endpoint.policy)).collect(),
        vips: set.vips.iter().map(|vip| vip.address).collect(),
        locals: locals.iter().copied().collect::<BTreeSet<_>>(),
        cidrs,
    }
}
