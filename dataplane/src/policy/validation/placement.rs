//! Validation of placement: shard maps, references to them, and the number of gateways.

use std::sync::Arc;

use foldhash::HashSet;

use super::BuildError;
use crate::policy::change::PolicyChange;
use crate::policy::compiled::Policy;
use crate::policy::members::MAX_GATEWAYS;
use crate::policy::references::References;
use crate::policy::spec::{SLOTS, ShardMapSpec};

/// Validates the shard maps of a change, and all references to shard maps after it.
pub(super) fn check(policy: &Policy, references: &References, change: &PolicyChange) -> Result<(), BuildError> {
    for map in change.shard_maps.changed() {
        check_map(map)?;
    }
    let is_known = |name: &str| change.shard_maps.is_present(name, || references.shard_maps.contains_key(name));
    let of_vips = change.vips.changed().filter_map(|vip| Some((vip.address, &vip.shard_map.as_ref()?.map)));
    let of_endpoints = change.endpoints.changed();
    let of_endpoints = of_endpoints.filter_map(|it| Some((it.address, it.slot.as_ref()?.map.as_ref()?)));
    for (of, map) in of_vips.chain(of_endpoints) {
        if !is_known(map) {
            return Err(BuildError::UnknownShardMap { of, map: map.clone() });
        }
    }
    check_removed(policy, references, change)?;
    let named = named_gateways(change);
    let unknown = named.iter().filter(|name| policy.members().id(name).is_none()).count();
    if unknown > policy.members().free_ids() {
        let count = policy.gateways_in_use().union(&policy.known_ids(&named)).count() + unknown;
        if count > MAX_GATEWAYS {
            return Err(BuildError::TooManyGateways { count });
        }
    }
    Ok(())
}

/// The gateways that a change names.
pub(in crate::policy) fn named_gateways(change: &PolicyChange) -> HashSet<&Arc<str>> {
    let of_maps = change.shard_maps.changed().flat_map(|map| map.orders.iter().flatten());
    let of_vips = change.vips.changed().flat_map(|vip| &vip.shards);
    let of_vips = of_vips.flat_map(|shard| std::iter::once(&shard.gateway).chain(&shard.backups));
    let of_endpoints = change.endpoints.changed().filter_map(|endpoint| endpoint.gateway.as_ref());
    of_maps.chain(of_vips).chain(of_endpoints).collect()
}

fn check_map(map: &ShardMapSpec) -> Result<(), BuildError> {
    let reason = if map.slots.len() != SLOTS {
        "doesn't have 1024 slots"
    } else if map.orders.len() > SLOTS {
        "has more orders than slots"
    } else if map.orders.iter().any(Vec::is_empty) {
        "has an order without a gateway"
    } else if map.slots.iter().any(|order| usize::from(*order) >= map.orders.len()) {
        "has a slot without an order"
    } else {
        return Ok(());
    };
    Err(BuildError::InvalidShardMap { map: map.name.clone(), reason })
}

/// Validates that nothing that stays refers to a removed shard map.
fn check_removed(policy: &Policy, references: &References, change: &PolicyChange) -> Result<(), BuildError> {
    let ids = change.shard_maps.removed().filter_map(|name| Some((*references.shard_maps.get(name)?, name)));
    for (id, map) in ids {
        let mut vips = policy.live_vips();
        let vip = vips.find(|vip| vip.shards.map_id() == Some(id) && !change.vips.contains_key(&vip.address));
        let vip = vip.map(|vip| vip.address);
        let endpoint = policy.endpoints().find(|(address, endpoint)| {
            endpoint.slot.is_some_and(|slot| slot.map == Some(id)) && !change.endpoints.contains_key(address)
        });
        if let Some(by) = vip.or(endpoint.map(|(address, _)| address)) {
            return Err(BuildError::ShardMapInUse { map: map.clone(), by });
        }
    }
    Ok(())
}
