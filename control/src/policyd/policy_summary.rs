//! What a publication has of each policy, for the status service and the status of objects.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::xds::publication::Publication;
use crate::xds::resource::{Key, Kind};

/// A policy in a publication.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PolicySummary {
    /// Endpoints that it covers.
    pub(super) endpoints: u64,
    pub(super) vips: BTreeSet<IpAddr>,
    /// The publication that last changed it, an endpoint or a VIP: a gateway with that one has the policy in force.
    pub(super) since: u64,
}

/// The policies of a publication, by name (`Kind namespace/name`).
pub(super) fn policy_summaries(published: &Publication) -> BTreeMap<&str, PolicySummary> {
    let placement = &published.placement;
    let mut summaries: BTreeMap<&str, PolicySummary> =
        placement.policies.iter().map(|policy| (&*policy.name, PolicySummary::default())).collect();
    for resource in published.of_kind(Kind::Endpoint) {
        let endpoint = resource.key.name.parse().ok().and_then(|address| published.endpoint(address));
        let Some(endpoint) = endpoint else { continue };
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

/// The policies and Services that the resources of a publication are part of, by name.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    published: &'a Publication,
    of_vips: BTreeMap<IpAddr, BTreeSet<&'a str>>,
}

impl<'a> Parts<'a> {
    /// `summaries` are those of the publication.
    pub(super) fn new(published: &'a Publication, summaries: &BTreeMap<&'a str, PolicySummary>) -> Self {
        let of_policies = summaries.iter().flat_map(|(name, summary)| summary.vips.iter().map(|vip| (*vip, *name)));
        let services = published.placement.services.iter();
        let of_services = services.flat_map(|service| service.vips.iter().map(|vip| (*vip, &*service.name)));
        let mut of_vips: BTreeMap<IpAddr, BTreeSet<&str>> = BTreeMap::new();
        for (vip, name) in of_policies.chain(of_services) {
            of_vips.entry(vip).or_default().insert(name);
        }
        Self { published, of_vips }
    }

    /// Those that a resource is part of. Where an endpoint is a VIP, too, the VIP is set aside with it.
    pub(super) fn of(&self, key: &Key) -> BTreeSet<&'a str> {
        let placement = &self.published.placement;
        let address = key.name.parse::<IpAddr>().ok();
        let mut names = match (key.kind, address) {
            (Kind::Vip | Kind::Endpoint, Some(address)) => self.of_vips.get(&address).cloned().unwrap_or_default(),
            _ => BTreeSet::new(),
        };
        names.extend(match (key.kind, address) {
            (Kind::EgressPolicy, _) => placement.policies.get(&key.name).map(|policy| &*policy.name),
            (Kind::Service, _) => placement.services.get(&key.name).map(|service| &*service.name),
            (Kind::Endpoint, Some(address)) => placement.endpoints.get(&address).map(|endpoint| &*endpoint.policy),
            _ => None,
        });
        names
    }
}

/// The publication that last changed a resource; 0: there is no such resource.
pub(super) fn changed_in(published: &Publication, kind: Kind, name: &str) -> u64 {
    published.get(&Key { kind, name: name.into() }).map_or(0, |it| it.changed_in)
}
