//! What a publication has of each policy, for the status service and the status of objects.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::publication::Publication;
use crate::xds::resource::{Key, Kind};

/// A policy in a publication.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PolicySummary {
    /// Endpoints that it covers.
    pub(super) endpoints: u64,
    /// Their VIPs.
    pub(super) vips: BTreeSet<IpAddr>,
    /// The publication that last changed it, an endpoint or a VIP: a gateway with that one has the policy in force.
    pub(super) since: u64,
}

/// The policies of a publication, by name (`Kind namespace/name`).
pub(super) fn policy_summaries(published: &Publication) -> BTreeMap<&str, PolicySummary> {
    let placement = &published.placement;
    let mut summaries: BTreeMap<&str, PolicySummary> =
        placement.policies.iter().map(|policy| (&*policy.name, PolicySummary::default())).collect();
    // Resources are in the order of the placement.
    for (endpoint, resource) in placement.endpoints.iter().zip(published.of_kind(Kind::Endpoint)) {
        let Some(summary) = summaries.get_mut(&*endpoint.policy) else { continue };
        summary.endpoints += 1;
        summary.since = summary.since.max(resource.changed_in);
        summary.vips.extend(&endpoint.vips);
    }
    for (name, summary) in &mut summaries {
        let vips = summary.vips.iter().map(|vip| changed_in(published, Kind::Vip, &vip.to_string()));
        let since = vips.chain([summary.since, changed_in(published, Kind::EgressPolicy, name)]).max();
        summary.since = since.unwrap_or_default();
    }
    summaries
}

/// The publication that last changed a resource; 0: there is no such resource.
pub(super) fn changed_in(published: &Publication, kind: Kind, name: &str) -> u64 {
    published.get(&Key { kind, name: name.into() }).map_or(0, |it| it.changed_in)
}
