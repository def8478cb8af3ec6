//! A checked change to the next policy: shares what stays, copies what changes, and notes whom that concerns.

mod services;

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;
use ipnet::IpNet;

use super::build::{MOST_VIPS, prefix};
use super::change::{Gone, PolicyChange};
use super::cluster::{Ranges, Reach};
use super::endpoints::Endpoint;
use super::freshness::Freshness;
use super::members::MembersSpec;
use super::overlay::Nodes;
use super::policy::{Egress, EgressId, Policy, Vip, VipId};
use super::prefixes::Prefixes;
use super::shares::Shares;
use super::spec::{Announce, ClusterSpec, EgressSpec, EndpointSpec, NodeSpec, PolicySet, VipSpec};
use super::uses::Uses;
use crate::address::{Address, V6};
use crate::session::tuple::{HashKey, Tuple};

/// A policy on its way to become the next one.
pub(super) struct Rebuild<'a> {
    policy: Policy,
    freshness: Freshness,
    uses: &'a mut Uses,
    /// Whether another gateway than before is to have the sessions of a share.
    begins_epoch: bool,
}

impl<'a> Rebuild<'a> {
    pub(super) fn new(policy: Policy, freshness: Freshness, uses: &'a mut Uses) -> Self {
        Self { policy, freshness, uses, begins_epoch: false }
    }

    /// The policy as it is now, and what has to be checked anew.
    pub(super) fn finish(mut self) -> (Policy, Freshness) {
        if self.begins_epoch {
            Arc::make_mut(&mut self.policy.members).begin_replication_epoch();
        }
        (self.policy, self.freshness)
    }

    /// Makes the change. What comes is there before it is named, what goes is named by nobody any more.
    pub(super) fn apply(&mut self, change: &PolicyChange) {
        self.policy.version.clone_from(&change.version);
        if let Some(nodes) = &change.nodes {
            self.set_nodes(nodes);
        }
        if let Some(cluster) = &change.cluster {
            self.set_cluster(cluster);
        }
        self.forget_retired_vips();
        let mut guarantees_changed = false;
        for spec in &change.policies {
            guarantees_changed |= self.set_egress(spec);
        }
        for spec in &change.vips {
            self.set_vip(spec);
        }
        let mut crowded = Vec::new();
        for spec in &change.endpoints {
            self.set_endpoint(spec.address, Some(spec), &mut crowded);
        }
        for &address in &change.gone.endpoints {
            self.set_endpoint(address, None, &mut crowded);
        }
        self.change_services(change);
        for &address in &change.gone.vips {
            self.retire_vip(address);
        }
        self.forget_retired_vips();
        for name in &change.gone.policies {
            if let Some(id) = self.uses.egress.remove(name) {
                Arc::make_mut(&mut self.policy.egress)[id.0 as usize] = None;
                // To be given out again by the next change: until then the steering program may know it by its former meaning.
                self.uses.free_egress.push(id);
            }
        }
        if guarantees_changed {
            self.uses.recount_guaranteed(&self.policy);
            crowded = self.policy.vips().map(|vip| vip.id).collect();
        }
        for id in crowded {
            self.update_guaranteed(id);
        }
    }

    /// Whatever goes to a pod may go another way now.
    fn set_nodes(&mut self, specs: &[NodeSpec]) {
        let nodes = Nodes::new(specs.to_vec());
        self.policy.v4.pods = Arc::new(nodes.pods());
        self.policy.v6.pods = Arc::new(nodes.pods());
        self.policy.nodes = Arc::new(nodes);
        self.freshness.touch_all();
    }

    /// Whatever goes to an address of the cluster's own may be translated no more, or again.
    fn set_cluster(&mut self, spec: &ClusterSpec) {
        if *self.policy.cluster == *spec {
            return;
        }
        self.policy.v4.ranges = Ranges::new(spec);
        self.policy.v6.ranges = Ranges::new(spec);
        self.policy.cluster = Arc::new(spec.clone());
        self.freshness.touch_all();
    }

    /// Says whether what the policy guarantees has changed.
    fn set_egress(&mut self, spec: &EgressSpec) -> bool {
        let slots = Arc::make_mut(&mut self.policy.egress);
        let known = self.uses.egress.get(&spec.name).copied();
        let free = &mut self.uses.free_egress;
        let id = known.or_else(|| free.pop()).unwrap_or(EgressId(slots.len() as u32));
        let before = known.and_then(|id| slots[id.0 as usize].take());
        if slots.len() <= id.0 as usize {
            slots.push(None);
        }
        slots[id.0 as usize] = Some(Arc::new(build_egress(spec, id)));
        self.uses.egress.insert(spec.name.clone(), id);
        let Some(before) = before else { return false };
        if (&before.spec.destinations, &before.spec.excluded) != (&spec.destinations, &spec.excluded) {
            // Its endpoints may be many, and are not listed anywhere.
            self.freshness.touch_all();
        }
        before.spec.limits.guaranteed_ports != spec.limits.guaranteed_ports
    }

    fn set_vip(&mut self, spec: &VipSpec) {
        let known = self.policy.vip_at(spec.address).cloned();
        let members = Arc::make_mut(&mut self.policy.members);
        for name in spec.shares.iter().flat_map(|share| std::iter::once(&share.gateway).chain(&share.backups)) {
            members.number(name);
        }
        let unknown = Shares::default();
        let before = known.as_ref().filter(|vip| !vip.retired).map_or(&unknown, |vip| &vip.shares);
        let shares = Shares::new(&spec.shares, before, members);
        self.begins_epoch |= shares.begin_epoch(members);
        // A session that has a port which is reserved now, or another gateway's, must end here.
        let is_same = |vip: &Vip| *vip.reserved == *spec.reserved_ports && vip.shares.has_same_owners(&shares);
        if known.as_ref().is_none_or(|vip| vip.retired || !is_same(vip)) {
            self.touch_vip(spec.address);
        }
        let slots = Arc::make_mut(&mut self.policy.vips);
        let free = &mut self.uses.free_vips;
        let id = known.as_ref().map(|vip| vip.id).or_else(|| free.pop()).unwrap_or(VipId(slots.len() as u16));
        debug_assert!(usize::from(id.0) < MOST_VIPS, "the check has counted them");
        if slots.len() <= usize::from(id.0) {
            slots.push(None);
        }
        let is_new = known.is_none();
        slots[usize::from(id.0)] = Some(Arc::new(Vip {
            address: spec.address,
            name: spec.name.clone(),
            id,
            pool: known.map_or_else(Arc::default, |vip| vip.pool),
            retired: false,
            announce: spec.announce,
            reserved: spec.reserved_ports.clone().into(),
            guaranteed: self.uses.guaranteed(id),
            shares,
        }));
        if is_new {
            self.index_vip(spec.address, Some(id));
        }
    }

    fn set_endpoint(&mut self, address: IpAddr, spec: Option<&EndpointSpec>, crowded: &mut Vec<VipId>) {
        let before = self.policy.endpoint_at(address).cloned();
        let after = spec.map(|spec| Endpoint {
            policy: self.uses.egress[&spec.policy],
            vips: self.vips_of(spec),
            home: spec.gateway.as_ref().map(|name| Arc::make_mut(&mut self.policy.members).number(name)),
            name: spec.name.clone(),
            remarks: spec.remarks.iter().cloned().collect(),
            usage: self.policy.usage_at(address).unwrap_or_default(),
        });
        let bound = |endpoint: &Option<Endpoint>| endpoint.as_ref().map(|it| (it.policy, it.vips.clone(), it.home));
        if bound(&before) != bound(&after) {
            match address {
                IpAddr::V4(v4) => self.freshness.touch_endpoint(v4.to_bits()),
                IpAddr::V6(v6) => self.freshness.touch_endpoint(V6::from_bits(v6.to_bits())),
            }
        }
        for (endpoint, comes) in [(&before, false), (&after, true)] {
            let Some(endpoint) = endpoint else { continue };
            let ports = self.policy.egress_of(endpoint).spec.limits.guaranteed_ports.unwrap_or(0);
            self.uses.count(endpoint.policy, &endpoint.vips, ports, comes);
            if ports > 0 {
                crowded.extend(&endpoint.vips);
            }
        }
        match address {
            IpAddr::V4(v4) => self.policy.v4.endpoints.set(v4.to_bits(), after),
            IpAddr::V6(v6) => self.policy.v6.endpoints.set(V6::from_bits(v6.to_bits()), after),
        }
    }

    /// The VIPs of an endpoint, the one first that it leaves with: by rendezvous, so that each gateway comes to the same, before and
    /// after a restart.
    fn vips_of(&self, spec: &EndpointSpec) -> Box<[VipId]> {
        const RENDEZVOUS: HashKey = HashKey::fixed();
        fn weight<A: Address>(endpoint: IpAddr, vip: IpAddr) -> u64 {
            let of = |address| A::from_ip(address).unwrap_or_default();
            RENDEZVOUS.hash(&Tuple { source: of(endpoint), destination: of(vip), ..Tuple::default() })
        }
        let mut vips: Vec<&Vip> = spec.vips.iter().filter_map(|&vip| self.policy.vip_at(vip)).collect();
        if vips.len() > 1 {
            let of = if spec.address.is_ipv4() { weight::<u32> } else { weight::<V6> };
            vips.sort_by_cached_key(|vip| std::cmp::Reverse(of(spec.address, vip.address)));
        }
        vips.into_iter().map(|vip| vip.id).collect()
    }

    /// Takes in how the gateways stand: shares change hands.
    pub(super) fn set_members(&mut self, spec: &MembersSpec) {
        let members = Arc::new(self.policy.members.with(spec));
        self.policy.members = members.clone();
        let changed: Vec<(VipId, Shares)> =
            self.policy.vips().filter_map(|vip| Some((vip.id, vip.shares.settled(&members)?))).collect();
        self.begins_epoch |= changed.iter().any(|(_, shares)| shares.begin_epoch(&members));
        for (id, shares) in changed {
            let vips = Arc::make_mut(&mut self.policy.vips);
            let Some(vip) = vips[usize::from(id.0)].as_mut() else { continue };
            let (address, moves) = (vip.address, !vip.shares.has_same_owners(&shares));
            Arc::make_mut(vip).shares = shares;
            if moves {
                self.touch_vip(address);
            }
        }
    }

    /// A VIP that nobody wants stays for as long as a worker holds ports of it.
    fn retire_vip(&mut self, address: IpAddr) {
        let Some(vip) = self.policy.vip_at(address).filter(|vip| !vip.retired) else { return };
        let id = vip.id;
        let retired = Vip { retired: true, reserved: Box::default(), announce: Announce::default(), ..vip.clone() };
        self.touch_vip(address);
        Arc::make_mut(&mut self.policy.vips)[usize::from(id.0)] = Some(Arc::new(retired));
    }

    /// Called first, for the room that it makes, and last, for those that nobody has held a port of.
    fn forget_retired_vips(&mut self) {
        let free: Vec<(IpAddr, VipId)> =
            self.policy.vips().filter(|vip| vip.retired && vip.pool.close()).map(|vip| (vip.address, vip.id)).collect();
        for (address, id) in free {
            Arc::make_mut(&mut self.policy.vips)[usize::from(id.0)] = None;
            self.uses.free_vips.push(id);
            self.touch_vip(address);
            self.index_vip(address, None);
        }
    }

    fn index_vip(&mut self, address: IpAddr, id: Option<VipId>) {
        fn set<A: Address>(index: &mut Arc<HashMap<A, VipId>>, address: A, id: Option<VipId>) {
            let index = Arc::make_mut(index);
            match id {
                Some(id) => index.insert(address, id),
                None => index.remove(&address),
            };
        }
        match address {
            IpAddr::V4(v4) => set(&mut self.policy.v4.vips, v4.to_bits(), id),
            IpAddr::V6(v6) => set(&mut self.policy.v6.vips, V6::from_bits(v6.to_bits()), id),
        }
    }

    fn update_guaranteed(&mut self, id: VipId) {
        let guaranteed = self.uses.guaranteed(id);
        let vips = Arc::make_mut(&mut self.policy.vips);
        if let Some(vip) = vips[usize::from(id.0)].as_mut().filter(|vip| vip.guaranteed != guaranteed) {
            Arc::make_mut(vip).guaranteed = guaranteed;
        }
    }

    fn touch_vip(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => self.freshness.touch_vip(v4.to_bits()),
            IpAddr::V6(v6) => self.freshness.touch_vip(V6::from_bits(v6.to_bits())),
        }
    }
}

impl Policy {
    /// What an address uses, to be taken along.
    fn usage_at(&self, address: IpAddr) -> Option<Arc<super::quota::EndpointUse>> {
        match address {
            IpAddr::V4(v4) => self.v4.endpoints.usage(v4.to_bits()).cloned(),
            IpAddr::V6(v6) => self.v6.endpoints.usage(V6::from_bits(v6.to_bits())).cloned(),
        }
    }
}

impl PolicyChange {
    /// What makes `set` of a policy that is built already.
    pub(super) fn replacing(policy: &Policy, set: &PolicySet) -> Self {
        let policies: foldhash::HashSet<&str> = set.policies.iter().map(|policy| &*policy.name).collect();
        let vips: foldhash::HashSet<IpAddr> = set.vips.iter().map(|vip| vip.address).collect();
        let endpoints: foldhash::HashSet<IpAddr> = set.endpoints.iter().map(|endpoint| endpoint.address).collect();
        let services: foldhash::HashSet<&str> = set.services.iter().map(|service| &*service.name).collect();
        let gone = Gone {
            policies: policy
                .egress()
                .map(|egress| &egress.spec.name)
                .filter(|it| !policies.contains(&***it))
                .cloned()
                .collect(),
            vips: policy.live_vips().map(|vip| vip.address).filter(|vip| !vips.contains(vip)).collect(),
            endpoints: policy.endpoints().map(|(address, _)| address).filter(|it| !endpoints.contains(it)).collect(),
            services: policy
                .services()
                .map(|service| &service.spec.name)
                .filter(|name| !services.contains(&***name))
                .cloned()
                .collect(),
        };
        Self {
            version: set.version.clone(),
            policies: set.policies.clone(),
            vips: set.vips.clone(),
            endpoints: set.endpoints.clone(),
            services: set.services.clone(),
            nodes: (policy.nodes().list() != set.nodes).then(|| set.nodes.clone()),
            cluster: (*policy.cluster != set.cluster).then(|| set.cluster.clone()),
            gone,
        }
    }
}

fn build_egress(spec: &EgressSpec, id: EgressId) -> Egress {
    // Excluded first: where both lists name one prefix, the first counts.
    let all = || {
        let reach = |net: &IpNet, translated| (*net, Reach { translated, length: net.prefix_len() });
        let excluded = spec.excluded.iter().map(move |net| reach(net, false));
        excluded.chain(spec.destinations.iter().map(move |net| reach(net, true)))
    };
    Egress {
        spec: spec.clone(),
        id,
        v4: Prefixes::new(all().filter_map(|(net, value)| prefix(&net, value))),
        v6: Prefixes::new(all().filter_map(|(net, value)| prefix(&net, value))),
    }
}
