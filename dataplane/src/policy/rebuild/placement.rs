//! Placement in a policy under construction: shard maps, and the shards of VIPs.

use std::sync::Arc;

use foldhash::HashSet;

use super::Rebuild;
use crate::flow::ids::{ShardMapId, VipId};
use crate::policy::change::{Entries, PolicyChange};
use crate::policy::compiled::{NamedShardMap, Policy};
use crate::policy::members::{GatewaySet, Members};
use crate::policy::shard::Shard;
use crate::policy::shard_map::ShardMap;
use crate::policy::shards::Shards;
use crate::policy::spec::{ShardMapSpec, VipSpec};
use crate::policy::validation::named_gateways;

impl Rebuild<'_> {
    /// Frees the numbers of gateways that nothing refers to, if a change needs more than are free.
    pub(super) fn reclaim_gateway_ids(&mut self, change: &PolicyChange) {
        let named = named_gateways(change);
        let unknown = named.iter().filter(|name| self.policy.members.id(name).is_none()).count();
        if unknown > self.policy.members.free_ids() {
            let in_use = self.policy.gateways_in_use().union(&self.policy.known_ids(&named));
            Arc::make_mut(&mut self.policy.members).retain(&in_use);
        }
    }

    /// Adds or replaces shard maps, with the shards of the VIPs that have them.
    pub(super) fn set_shard_maps(&mut self, changes: &Entries<ShardMapSpec>) {
        for spec in changes.changed() {
            let members = Arc::make_mut(&mut self.policy.members);
            let names: HashSet<&Arc<str>> = spec.orders.iter().flatten().collect();
            for name in names {
                members.assign_id(name);
            }
            let maps = Arc::make_mut(&mut self.policy.shard_maps);
            let known = self.references.shard_maps.get(&spec.name).copied();
            let free = &mut self.references.free_shard_maps;
            let id = known.or_else(|| free.pop()).unwrap_or(ShardMapId(maps.len() as u32));
            if maps.len() <= id.0 as usize {
                maps.push(None);
            }
            let before = maps[id.0 as usize].take().map(|named| named.map).unwrap_or_default();
            let map = Arc::new(ShardMap::new(spec, &before, &self.policy.members));
            self.starts_epoch |= map.starts_epoch(&self.policy.members);
            self.policy.awaits_release |= map.awaits_release();
            maps[id.0 as usize] = Some(NamedShardMap { name: spec.name.clone(), map });
            self.references.shard_maps.insert(spec.name.clone(), id);
        }
        if !changes.is_empty() {
            self.follow_shard_maps();
        }
    }

    /// Removes shard maps. A retired VIP keeps its own.
    pub(super) fn remove_shard_maps(&mut self, changes: &Entries<ShardMapSpec>) {
        for name in changes.removed() {
            let Some(id) = self.references.shard_maps.remove(name) else { continue };
            Arc::make_mut(&mut self.policy.shard_maps)[id.0 as usize] = None;
            self.references.free_shard_maps.push(id);
            let orphans = self.policy.vips().filter(|vip| vip.shards.map_id() == Some(id));
            let orphans: Vec<VipId> = orphans.map(|vip| vip.ports.id).collect();
            for vip in orphans {
                self.edit_shards(vip, Shards::without_id);
            }
        }
    }

    /// The shards of a VIP by its spec, replacing `before`.
    pub(super) fn shards_of(&mut self, spec: &VipSpec, before: &Shards) -> Shards {
        if let Some(reference) = &spec.shard_map {
            let id = self.references.shard_maps[&reference.map];
            let map = self.policy.shard_map_by_id(id).cloned().unwrap_or_default();
            return Shards::new(map, Some(id), reference.rotation).replacing(before, &self.policy.members);
        }
        let members = Arc::make_mut(&mut self.policy.members);
        for name in spec.shards.iter().flat_map(|shard| std::iter::once(&shard.gateway).chain(&shard.backups)) {
            members.assign_id(name);
        }
        let former = if before.map_id().is_none() { Arc::clone(before.map()) } else { Arc::default() };
        let map = ShardMap::of_vip(&spec.shards, &former, members);
        self.policy.awaits_release |= map.awaits_release();
        Shards::new(Arc::new(map), None, 0).replacing(before, &self.policy.members)
    }

    /// Assigns the owners of all shard maps by new states of the members.
    pub(super) fn update_shard_maps(&mut self, members: &Members) {
        let maps = self.policy.shard_maps.iter().enumerate();
        let changed: Vec<_> =
            maps.filter_map(|(at, named)| Some((at, named.as_ref()?.map.with_members(members)?))).collect();
        for (at, map) in changed {
            self.starts_epoch |= map.starts_epoch(members);
            self.policy.awaits_release |= map.awaits_release();
            if let Some(named) = &mut Arc::make_mut(&mut self.policy.shard_maps)[at] {
                named.map = Arc::new(map);
            }
        }
    }

    /// Gives the VIPs the current versions of their shard maps.
    fn follow_shard_maps(&mut self) {
        let stale = |vip: &crate::policy::compiled::Vip| {
            let map = self.policy.shard_map_by_id(vip.shards.map_id()?)?;
            (!Arc::ptr_eq(map, vip.shards.map())).then(|| (vip.ports.id, vip.shards.with_map(map.clone())))
        };
        let changed: Vec<(VipId, Shards)> = self.policy.vips().filter_map(stale).collect();
        for (id, shards) in changed {
            self.replace_shards(id, shards);
        }
    }

    /// Replaces the shards of a VIP. Its sessions are revalidated if any owner has changed.
    pub(super) fn replace_shards(&mut self, id: VipId, shards: Shards) {
        let Some(vip) = self.policy.vips[usize::from(id.0)].as_ref() else { return };
        let (address, owner_changed) = (vip.address, !vip.shards.has_same_owners(&shards));
        self.edit_shards(id, |_| shards);
        if owner_changed {
            self.touch_vip(address);
        }
    }

    fn edit_shards(&mut self, id: VipId, edit: impl FnOnce(&Shards) -> Shards) {
        if let Some(vip) = Arc::make_mut(&mut self.policy.vips)[usize::from(id.0)].as_mut() {
            let vip = Arc::make_mut(vip);
            vip.shards = edit(&vip.shards);
        }
    }
}

impl Policy {
    /// The gateways that a shard, an endpoint or the membership refers to.
    pub(in crate::policy) fn gateways_in_use(&self) -> GatewaySet {
        let maps = self.shard_maps.iter().flatten().map(|named| &named.map);
        let maps = maps.chain(self.vips().map(|vip| vip.shards.map()));
        let of_shards = maps.flat_map(|map| map.list()).flat_map(Shard::gateways);
        let of_endpoints = self.endpoints().filter_map(|(_, endpoint)| endpoint.home);
        of_shards.chain(of_endpoints).chain(self.members.in_group()).collect()
    }

    /// The numbers of those gateways that have one.
    pub(in crate::policy) fn known_ids(&self, names: &HashSet<&Arc<str>>) -> GatewaySet {
        names.iter().filter_map(|name| self.members.id(name)).collect()
    }

    pub(in crate::policy) fn shard_map_by_id(&self, id: ShardMapId) -> Option<&Arc<ShardMap>> {
        self.shard_maps.get(id.0 as usize)?.as_ref().map(|named| &named.map)
    }

    /// Names of all shard maps, by number.
    pub fn shard_map_names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.shard_maps.iter().flatten().map(|named| &named.name)
    }
}
