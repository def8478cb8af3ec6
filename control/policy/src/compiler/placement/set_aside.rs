//! What is set aside: the placement without objects that a gateway refuses, closed and consistent. Whatever loses its
//! VIPs stays covered, so its traffic is dropped and nothing leaves untranslated.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use vipgate_dataplane::policy::spec::{
    AddressSelection, EgressSpec, EndpointSpec, Keyed, Limits, OnExhaustion, SlotRef, VipSpec,
};

use super::{PlacedService, Placement, Table};

/// Objects to set aside. Shard maps, gateways and the cluster's prefixes aren't among them: every tenant depends on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAside {
    /// Names of egress policies: a closed one takes the place of each.
    pub policies: BTreeSet<Arc<str>>,
    pub vips: BTreeSet<IpAddr>,
    /// Endpoints that stay, closed. Where one is a VIP, too, the VIP is set aside: the pod keeps its address.
    pub closed: BTreeSet<IpAddr>,
    /// Endpoints that can't even be closed: such an address is no pod's.
    pub dropped: BTreeSet<IpAddr>,
    /// Names of Services.
    pub services: BTreeSet<Arc<str>>,
    /// Names of nodes of the overlay network.
    pub nodes: BTreeSet<Arc<str>>,
}

impl Placement {
    /// The placement without these objects. Chunks of tables without a difference stay shared.
    #[must_use]
    pub fn without(&self, set_aside: &SetAside) -> Self {
        let is_refused = |vip: &IpAddr| set_aside.vips.contains(vip) || set_aside.closed.contains(vip);
        let refused = set_aside.vips.iter().chain(&set_aside.closed);
        let vips: BTreeSet<&IpAddr> = refused.filter(|vip| self.vips.get(vip).is_some()).collect();
        let closed = set_aside.policies.iter().filter(|name| self.policies.get(name).is_some()).map(closed_policy);
        Self {
            policies: self.policies.edit(&[], closed.collect()),
            vips: self.vips.edit(&vips.iter().copied().collect::<Vec<_>>(), Vec::new()),
            endpoints: edited(&self.endpoints, |endpoint| self.endpoint_without(endpoint, set_aside, is_refused)),
            services: edited(&self.services, |service| service_without(service, set_aside, is_refused)),
            nodes: self.nodes.iter().filter(|node| !set_aside.nodes.contains(&node.name)).cloned().collect(),
            ..self.clone()
        }
    }

    fn endpoint_without(
        &self,
        endpoint: &EndpointSpec,
        set_aside: &SetAside,
        is_refused: impl Fn(&IpAddr) -> bool,
    ) -> Edit<EndpointSpec> {
        if set_aside.dropped.contains(&endpoint.address) {
            return Edit::Remove;
        }
        if set_aside.closed.contains(&endpoint.address) {
            // Nothing but the address and the policy: whatever was refused isn't in it.
            let (address, policy) = (endpoint.address, endpoint.policy.clone());
            let remarks = vec!["set aside: its traffic is dropped".into()];
            let (name, vips, gateway, slot) = ("".into(), Vec::new(), None, None);
            return Edit::Replace(EndpointSpec { address, name, policy, vips, gateway, slot, remarks });
        }
        let has_refused_policy = set_aside.policies.contains(&endpoint.policy);
        let is_lost = |vip: &IpAddr| has_refused_policy || is_refused(vip);
        if !endpoint.vips.iter().any(&is_lost) {
            return Edit::Keep;
        }
        let mut after = endpoint.clone();
        after.vips.retain(|vip| !is_lost(vip));
        // The endpoint stays with its gateway, which was that of a VIP.
        if let Some(SlotRef { map: map @ None, .. }) = &mut after.slot {
            let of_vip = |vip: &VipSpec| vip.shard_map.as_ref().map(|reference| reference.map.clone());
            *map = endpoint.vips.iter().find_map(|vip| of_vip(self.vips.get(vip)?));
        }
        let of = if has_refused_policy { "its policy" } else { "a VIP of it" };
        after.remarks.push(format!("{of} is set aside").into());
        Edit::Replace(after)
    }
}

/// What becomes of an item.
enum Edit<T> {
    Keep,
    Replace(T),
    Remove,
}

fn edited<T: Keyed + Clone + PartialEq>(table: &Table<T>, edit: impl Fn(&T) -> Edit<T>) -> Table<T> {
    let (mut removed, mut replaced) = (Vec::new(), Vec::new());
    for item in table {
        match edit(item) {
            Edit::Keep => {}
            Edit::Replace(item) => replaced.push(item),
            Edit::Remove => removed.push(item.key()),
        }
    }
    table.edit(&removed, replaced)
}

/// A Service without VIPs has nothing to serve. Its ports stay reserved in the VIPs that stay.
fn service_without(
    service: &PlacedService,
    set_aside: &SetAside,
    is_refused: impl Fn(&IpAddr) -> bool,
) -> Edit<PlacedService> {
    if set_aside.services.contains(&service.name) {
        return Edit::Remove;
    }
    if !service.vips.iter().any(&is_refused) {
        return Edit::Keep;
    }
    let vips: Vec<IpAddr> = service.vips.iter().filter(|vip| !is_refused(vip)).copied().collect();
    if vips.is_empty() { Edit::Remove } else { Edit::Replace(PlacedService { vips, ..service.clone() }) }
}

/// A policy that covers every destination, for endpoints without VIPs.
fn closed_policy(name: &Arc<str>) -> EgressSpec {
    // Of each family the default prefix, of length 0.
    EgressSpec {
        name: name.clone(),
        destinations: vec![IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())],
        excluded: Vec::new(),
        address_selection: AddressSelection::default(),
        limits: Limits::default(),
        on_exhaustion: OnExhaustion::default(),
    }
}
