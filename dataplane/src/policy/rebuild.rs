//! Applies a validated change to a policy: shares what stays, copies what changes, and records which sessions that
//! affects.

mod placement;
mod services;

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;
use ipnet::IpNet;

use super::change::{Entries, PolicyChange};
use super::cluster::{ClusterPrefixes, DestinationMatch};
use super::endpoints::{Endpoint, EndpointSlot};
use super::freshness::Freshness;
use super::members::MembersSpec;
use super::overlay::Nodes;
use super::prefixes::Prefixes;
use super::spec::{Announce, ClusterSpec, EgressSpec, EndpointSpec, NodeSpec, VipSpec};
use super::static_nat::{PrivateVip, StaticNat};
use crate::flow::address::{Address, V6, of_family};
use crate::flow::ids::{EgressId, GatewayId, MAX_VIPS, Owner, VipId};
use crate::flow::tuple::{HashKey, Tuple};
use crate::policy::compiled::{Egress, Policy, Vip};
use crate::policy::prefixes::prefix;
use crate::policy::references::References;
use crate::policy::shards::Shards;
use crate::ports::vip::VipPorts;

/// The next policy under construction.
pub(super) struct Rebuild<'a> {
    policy: Policy,
    freshness: Freshness,
    references: &'a mut References,
    /// Whether the replica of any shard changes.
    starts_epoch: bool,
    /// Whether VIPs or the name of this gateway may have changed.
    affects_static_nat: bool,
}

impl<'a> Rebuild<'a> {
    pub(super) fn new(policy: Policy, freshness: Freshness, references: &'a mut References) -> Self {
        Self { policy, freshness, references, starts_epoch: false, affects_static_nat: false }
    }

    /// The new policy, and the freshness that goes with it.
    pub(super) fn finish(mut self) -> (Policy, Freshness) {
        if self.starts_epoch {
            Arc::make_mut(&mut self.policy.members).begin_replication_epoch();
        }
        if self.affects_static_nat {
            self.update_static_nat();
        }
        (self.policy, self.freshness)
    }

    /// Sessions know VIPs alone, so none is revalidated.
    fn update_static_nat(&mut self) {
        let this = self.policy.members.this_name();
        let private = |vip: &Vip| {
            let private = vip.private_at(this)?;
            Some(PrivateVip { vip: vip.address, private, retired: vip.ports.retired })
        };
        let private: Vec<PrivateVip> = self.policy.vips().filter_map(private).collect();
        if private.is_empty() && self.policy.static_nat.is_empty() {
            return;
        }
        let vips = self.policy.live_vips().map(|vip| vip.address).collect();
        let nat = StaticNat::new(&private, &vips);
        if nat != *self.policy.static_nat {
            self.policy.static_nat = Arc::new(nat);
        }
    }

    /// Applies the change: objects are added before others refer to them, and removed after.
    pub(super) fn apply(&mut self, change: &PolicyChange) {
        self.policy.version.clone_from(&change.version);
        if !change.nodes.is_empty() {
            self.set_nodes(&change.nodes);
        }
        if let Some(cluster) = &change.cluster {
            self.set_cluster(cluster);
        }
        self.reclaim_gateway_ids(change);
        Arc::make_mut(&mut self.policy.members).set_policy_version(&change.version);
        self.remove_retired_vips();
        let may_move_vips = !change.vips.is_empty() || !change.shard_maps.is_empty();
        let homes = may_move_vips.then(|| self.vip_homes());
        self.set_shard_maps(&change.shard_maps);
        let mut guarantees_changed = false;
        for spec in change.policies.changed() {
            guarantees_changed |= self.set_egress(spec);
        }
        for spec in change.vips.changed() {
            self.set_vip(spec);
        }
        let mut affected_vips = Vec::new();
        for (&address, spec) in &*change.endpoints {
            self.set_endpoint(address, spec.as_deref(), &mut affected_vips);
        }
        if let Some(homes) = homes {
            self.reorder_vips(&homes);
        }
        self.change_services(&change.services);
        for &address in change.vips.removed() {
            self.retire_vip(address);
        }
        self.remove_retired_vips();
        self.remove_shard_maps(&change.shard_maps);
        for name in change.policies.removed() {
            if let Some(id) = self.references.egress.remove(name) {
                if let Some(egress) = Arc::make_mut(&mut self.policy.egress)[id.0 as usize].take() {
                    self.references.count_prefixes(&egress.spec, false);
                }
                // Reused from the next change on: until then, the steering program may hold the number with its former
                // meaning.
                self.references.free_egress.push(id);
            }
        }
        if guarantees_changed {
            self.references.recount_guaranteed(&self.policy);
            affected_vips = self.policy.vips().map(|vip| vip.ports.id).collect();
        }
        for id in affected_vips {
            self.update_guaranteed(id);
        }
        if self.policy.awaits_release {
            // Others may have released this version already.
            self.update_owners();
        }
    }

    /// All sessions are revalidated: any pod may have another node now.
    fn set_nodes(&mut self, changes: &Entries<NodeSpec>) {
        let nodes = Nodes::new(self.policy.nodes.list_after(changes).into_iter().cloned().collect());
        self.policy.v4.pod_nodes = Arc::new(nodes.pod_prefixes());
        self.policy.v6.pod_nodes = Arc::new(nodes.pod_prefixes());
        self.policy.nodes = Arc::new(nodes);
        self.freshness.touch_all();
    }

    /// All sessions are revalidated: any destination may be internal now, or external.
    fn set_cluster(&mut self, spec: &ClusterSpec) {
        if *self.policy.cluster == *spec {
            return;
        }
        self.policy.v4.cluster = ClusterPrefixes::new(spec);
        self.policy.v6.cluster = ClusterPrefixes::new(spec);
        self.policy.cluster = Arc::new(spec.clone());
        self.freshness.touch_all();
    }

    /// Returns whether the policy's port guarantee has changed.
    fn set_egress(&mut self, spec: &EgressSpec) -> bool {
        let slots = Arc::make_mut(&mut self.policy.egress);
        let known = self.references.egress.get(&spec.name).copied();
        let free = &mut self.references.free_egress;
        let id = known.or_else(|| free.pop()).unwrap_or(EgressId(slots.len() as u32));
        let before = known.and_then(|id| slots[id.0 as usize].take());
        if slots.len() <= id.0 as usize {
            slots.push(None);
        }
        slots[id.0 as usize] = Some(Arc::new(build_egress(spec, id)));
        self.references.egress.insert(spec.name.clone(), id);
        self.references.count_prefixes(spec, true);
        let Some(before) = before else { return false };
        self.references.count_prefixes(&before.spec, false);
        if (&before.spec.destinations, &before.spec.excluded) != (&spec.destinations, &spec.excluded) {
            // Its endpoints may be many, and there is no index of them.
            self.freshness.touch_all();
        }
        if before.spec.limits.new_sessions_per_second.is_none() {
            let endpoints = self.policy.endpoints().filter(|(_, endpoint)| endpoint.policy == id);
            endpoints.for_each(|(_, endpoint)| endpoint.usage.prepare(spec.limits));
        }
        before.spec.limits.guaranteed_ports != spec.limits.guaranteed_ports
    }

    fn set_vip(&mut self, spec: &VipSpec) {
        self.affects_static_nat = true;
        let known = self.policy.vip_at(spec.address).cloned();
        let unknown = Shards::default();
        let before = known.as_ref().filter(|vip| !vip.ports.retired).map_or(&unknown, |vip| &vip.shards);
        let shards = self.shards_of(spec, before);
        self.starts_epoch |= shards.starts_epoch(&self.policy.members);
        // A session on a port that is reserved now, or that another gateway owns now, must end here.
        let is_same = |vip: &Vip| *vip.ports.reserved == *spec.reserved_ports && vip.shards.has_same_owners(&shards);
        if known.as_ref().is_none_or(|vip| vip.ports.retired || !is_same(vip)) {
            self.touch_vip(spec.address);
        }
        let slots = Arc::make_mut(&mut self.policy.vips);
        let free = &mut self.references.free_vips;
        let id = known.as_ref().map(|vip| vip.ports.id).or_else(|| free.pop()).unwrap_or(VipId(slots.len() as u16));
        debug_assert!(usize::from(id.0) < MAX_VIPS, "validated against the limit");
        if slots.len() <= usize::from(id.0) {
            slots.push(None);
        }
        let is_new = known.is_none();
        slots[usize::from(id.0)] = Some(Arc::new(Vip {
            address: spec.address,
            name: spec.name.clone(),
            ports: VipPorts {
                id,
                pool: known.map_or_else(Arc::default, |vip| vip.ports.pool),
                retired: false,
                reserved: spec.reserved_ports.clone().into(),
                guaranteed: self.references.guaranteed(id),
            },
            announce: spec.announce,
            shards,
            private: spec.private.clone().into(),
        }));
        if is_new {
            self.index_vip(spec.address, Some(id));
        }
    }

    fn set_endpoint(&mut self, address: IpAddr, spec: Option<&EndpointSpec>, affected_vips: &mut Vec<VipId>) {
        let before = self.policy.endpoint_at(address).cloned();
        let mut after = spec.map(|spec| Endpoint {
            policy: self.references.egress[&spec.policy],
            home: spec.gateway.as_ref().map(|name| Arc::make_mut(&mut self.policy.members).assign_id(name)),
            vips: self.vips_of(spec),
            slot: spec.slot.as_ref().map(|slot| EndpointSlot {
                map: slot.map.as_ref().map(|name| self.references.shard_maps[name]),
                slot: slot.slot,
            }),
            former_owner: None,
            name: spec.name.clone(),
            remarks: spec.remarks.iter().cloned().collect(),
            usage: self.policy.usage_at(address).unwrap_or_default(),
        });
        let binding =
            |endpoint: &Option<Endpoint>| endpoint.as_ref().map(|it| (it.policy, it.vips.clone(), it.home, it.slot));
        if binding(&before) != binding(&after) {
            self.touch_endpoint(address);
        }
        if let (Some(before), Some(after)) = (&before, &mut after) {
            self.note_former_owner(before, after);
        }
        for (endpoint, is_added) in [(&before, false), (&after, true)] {
            let Some(endpoint) = endpoint else { continue };
            let limits = self.policy.egress_of(endpoint).spec.limits;
            endpoint.usage.prepare(limits);
            let ports = limits.guaranteed_ports.unwrap_or(0);
            self.references.count_endpoint(endpoint.policy, &endpoint.vips, ports, is_added);
            if ports > 0 {
                affected_vips.extend(&endpoint.vips);
            }
        }
        self.replace_endpoint(address, after);
    }

    /// Revalidates the sessions of an endpoint.
    fn touch_endpoint(&mut self, address: IpAddr) {
        of_family!(address, it => self.freshness.touch_endpoint(it));
    }

    fn replace_endpoint(&mut self, address: IpAddr, endpoint: Option<Endpoint>) {
        match address {
            IpAddr::V4(v4) => self.policy.v4.endpoints.set(v4.to_bits(), endpoint),
            IpAddr::V6(v6) => self.policy.v6.endpoints.set(V6::from_bits(v6.to_bits()), endpoint),
        }
    }

    /// Notes the gateway that has handled an endpoint's packets so far, if it is another one by this change: it has the
    /// endpoint's sessions.
    fn note_former_owner(&mut self, before: &Endpoint, after: &mut Endpoint) {
        let owners = (self.policy.owner_of(before), self.policy.owner_of(after));
        after.former_owner = match owners {
            (Owner::Other(former), Owner::This) => Some(former),
            (Owner::This, Owner::This) => before.former_owner,
            _ => None,
        };
        self.policy.awaits_release |= after.former_owner.is_some();
        // The new one needs the sessions that have their port here.
        self.starts_epoch |= matches!(owners, (Owner::This, Owner::Other(_)));
    }

    /// The VIPs of an endpoint, in their order.
    fn vips_of(&self, spec: &EndpointSpec) -> Box<[VipId]> {
        let home = spec.gateway.as_ref().and_then(|name| self.policy.members.id(name));
        in_order(spec.address, home, spec.vips.iter().filter_map(|&vip| self.policy.vip_at(vip)).collect())
    }

    /// The gateway that each VIP is placed on as a whole.
    fn vip_homes(&self) -> HashMap<VipId, GatewayId> {
        let placed = self.policy.vips().filter_map(|vip| Some((vip.ports.id, vip.shards.only()?.home()?)));
        placed.collect()
    }

    /// Orders the VIPs of endpoints again of which one is placed on another gateway than before.
    fn reorder_vips(&mut self, before: &HashMap<VipId, GatewayId>) {
        let after = self.vip_homes();
        let has_moved = |vip: &VipId| before.get(vip) != after.get(vip);
        if !before.keys().chain(after.keys()).any(has_moved) {
            return;
        }
        let may_differ = |endpoint: &Endpoint| endpoint.vips.len() > 1 && endpoint.vips.iter().any(has_moved);
        let endpoints = self.policy.endpoints().filter(|(_, endpoint)| may_differ(endpoint));
        for (address, former) in endpoints.map(|(address, endpoint)| (address, endpoint.clone())).collect::<Vec<_>>() {
            let vips = in_order(address, former.home, self.policy.vips_of(&former).collect());
            if vips != former.vips {
                let mut endpoint = Endpoint { vips, ..former.clone() };
                self.touch_endpoint(address);
                self.note_former_owner(&former, &mut endpoint);
                self.replace_endpoint(address, Some(endpoint));
            }
        }
    }

    /// Applies new gateway states: shards may change owner.
    pub(super) fn set_members(&mut self, spec: &MembersSpec) {
        self.affects_static_nat = true;
        self.policy.members = Arc::new(self.policy.members.with_states(spec));
        self.update_owners();
    }

    /// Assigns the owners of all shards by the members and what they have released.
    fn update_owners(&mut self) {
        let members = self.policy.members.clone();
        self.policy.awaits_release &= members.awaits_policy_release();
        self.update_shard_maps(&members);
        let after = |vip: &Vip| match vip.shards.map_id() {
            Some(id) => self.policy.shard_map_by_id(id).filter(|map| !Arc::ptr_eq(map, vip.shards.map())).cloned(),
            None => vip.shards.map().with_members(&members).map(Arc::new),
        };
        let changed: Vec<_> =
            self.policy.vips().filter_map(|vip| Some((vip.ports.id, vip.shards.with_map(after(vip)?)))).collect();
        for (id, shards) in changed {
            self.starts_epoch |= shards.starts_epoch(&members);
            self.policy.awaits_release |= shards.map().awaits_release();
            self.replace_shards(id, shards);
        }
    }

    /// Retires a VIP: it stays while a worker holds ports of it.
    fn retire_vip(&mut self, address: IpAddr) {
        let Some(vip) = self.policy.vip_at(address).filter(|vip| !vip.ports.retired) else { return };
        let id = vip.ports.id;
        let retired = Vip {
            ports: VipPorts { retired: true, reserved: Box::default(), ..vip.ports.clone() },
            announce: Announce::default(),
            ..vip.clone()
        };
        self.affects_static_nat = true;
        self.touch_vip(address);
        Arc::make_mut(&mut self.policy.vips)[usize::from(id.0)] = Some(Arc::new(retired));
    }

    /// Called first, to free capacity, and last, for VIPs without ports in use.
    fn remove_retired_vips(&mut self) {
        let free: Vec<(IpAddr, VipId)> = self
            .policy
            .vips()
            .filter(|vip| vip.ports.retired && vip.ports.pool.close())
            .map(|vip| (vip.address, vip.ports.id))
            .collect();
        for (address, id) in free {
            Arc::make_mut(&mut self.policy.vips)[usize::from(id.0)] = None;
            self.references.free_vips.push(id);
            self.affects_static_nat = true;
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
        let guaranteed = self.references.guaranteed(id);
        let vips = Arc::make_mut(&mut self.policy.vips);
        if let Some(vip) = vips[usize::from(id.0)].as_mut().filter(|vip| vip.ports.guaranteed != guaranteed) {
            Arc::make_mut(vip).ports.guaranteed = guaranteed;
        }
    }

    fn touch_vip(&mut self, address: IpAddr) {
        of_family!(address, it => self.freshness.touch_vip(it));
    }
}

impl Policy {
    /// Usage of an address, to be kept across the change.
    fn usage_at(&self, address: IpAddr) -> Option<Arc<super::quota::EndpointUsage>> {
        match address {
            IpAddr::V4(v4) => self.v4.endpoints.usage(v4.to_bits()).cloned(),
            IpAddr::V6(v6) => self.v6.endpoints.usage(V6::from_bits(v6.to_bits())).cloned(),
        }
    }
}

/// VIPs of an endpoint, the paired one first: those placed on its home gateway before others, and ordered by
/// rendezvous hashing, so that all gateways get the same order, before and after a restart.
fn in_order(endpoint: IpAddr, home: Option<GatewayId>, mut vips: Vec<&Vip>) -> Box<[VipId]> {
    const RENDEZVOUS: HashKey = HashKey::fixed();
    fn weight<A: Address>(endpoint: IpAddr, vip: IpAddr) -> u64 {
        let of = |address| A::from_ip(address).unwrap_or_default();
        RENDEZVOUS.hash(&Tuple { source: of(endpoint), destination: of(vip), ..Tuple::default() })
    }
    if vips.len() > 1 {
        let of = if endpoint.is_ipv4() { weight::<u32> } else { weight::<V6> };
        let is_elsewhere = |vip: &Vip| home.is_some() && vip.shards.only().is_some_and(|only| only.home() != home);
        vips.sort_by_cached_key(|vip| (is_elsewhere(vip), std::cmp::Reverse(of(endpoint, vip.address))));
    }
    vips.into_iter().map(|vip| vip.ports.id).collect()
}

fn build_egress(spec: &EgressSpec, id: EgressId) -> Egress {
    // Excluded first: of equal prefixes, the first one wins.
    let all = || {
        let reach = |net: &IpNet, translated| (*net, DestinationMatch { translated, length: net.prefix_len() });
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
