//! Shard maps: the order of gateways for each slot, by rendezvous hashing.
//!
//! All policies with the same candidates share their maps, so the size of a placement doesn't depend on its VIPs. There
//! are several, so that a gateway of many that has few slots of one map has more of another.

use std::collections::BTreeMap;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use vipgate_dataplane::policy::spec::{SLOTS, ShardMapSpec};

use super::gateways::{Candidates, GatewayId, Gateways, Locality, MAX_BACKUPS};
use crate::fingerprint::{Fingerprint, mix};

/// Maps with the same candidates.
const VARIANTS: u64 = 4;

/// A shard map under construction.
#[derive(Clone, Debug)]
pub(super) struct ShardMap {
    pub(super) spec: ShardMapSpec,
    /// The home of each slot.
    homes: Vec<GatewayId>,
    /// The slots of each home.
    slots_of: HashMap<GatewayId, Vec<u16>>,
}

/// Shard maps, by name. The gateways are the same for all: then the name of a map determines its content.
#[derive(Clone, Debug, Default)]
pub(super) struct ShardMaps(BTreeMap<Arc<str>, ShardMap>);

/// What a map is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapKey<'a> {
    /// The eligible gateways.
    pub(super) candidates: &'a Candidates,
    /// Those that have the VIP, ascending: all with capacity for it.
    pub(super) gateways: &'a [GatewayId],
    /// The object that it is for: objects use different variants of a map.
    pub(super) group: &'a str,
    /// Gateways near this place come first.
    pub(super) locality: Locality<'a>,
    /// Whether others are left out.
    pub(super) requires_zone: bool,
}

impl MapKey<'_> {
    fn variant(&self) -> u64 {
        Fingerprint::of(self.group.as_bytes()) % VARIANTS
    }

    fn name(&self, gateways: &Gateways<'_>) -> String {
        let Locality { node, zone } = self.locality;
        let without: Vec<&str> = self
            .candidates
            .ids
            .iter()
            .filter(|id| self.gateways.binary_search(id).is_err())
            .map(|id| &**gateways.name(*id))
            .collect();
        let without = if without.is_empty() { String::new() } else { format!(" without {}", without.join(",")) };
        let part = |what: &str, name: Option<&str>| name.map_or_else(String::new, |name| format!(" {what} {name}"));
        let only = if self.requires_zone { " only" } else { "" };
        let place = format!("{}{}{only}", part("node", node), part("zone", zone));
        format!("{}/{}{without}{place}", self.candidates.name, self.variant())
    }
}

impl ShardMaps {
    /// The map for a key, of which at least one gateway is near enough.
    pub(super) fn get(&mut self, key: &MapKey<'_>, gateways: &Gateways<'_>) -> &ShardMap {
        let name: Arc<str> = key.name(gateways).into();
        self.0.entry(name).or_insert_with_key(|name| ShardMap::new(name.clone(), key, gateways))
    }

    /// A slot of the map with this name, and its home.
    pub(super) fn slot(&self, map: &str, key: u64, home: Option<GatewayId>) -> Option<(u16, GatewayId)> {
        self.0.get(map)?.slot(key, home)
    }

    /// Forgets the maps that aren't used.
    pub(super) fn retain(&mut self, is_used: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| is_used(name));
    }

    /// Their names, ascending.
    pub(super) fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.0.keys()
    }

    /// The specs, by name.
    pub(super) fn specs(&self) -> Arc<[ShardMapSpec]> {
        self.0.values().map(|map| map.spec.clone()).collect()
    }
}

impl ShardMap {
    fn new(name: Arc<str>, key: &MapKey<'_>, gateways: &Gateways<'_>) -> Self {
        let seed = mix(key.variant());
        let distances = key.gateways.iter().map(|&id| (gateways.distance(id, key.locality), id));
        let eligible: Vec<(u8, GatewayId)> =
            distances.filter(|(distance, _)| !key.requires_zone || *distance < 2).collect();
        let (mut orders, mut numbers) = (Vec::new(), HashMap::new());
        let mut homes = Vec::with_capacity(SLOTS);
        let mut slots_of: HashMap<GatewayId, Vec<u16>> = HashMap::new();
        let slot = |slot: u16| {
            let order = gateways.order(eligible.iter().copied(), mix(seed ^ u64::from(slot)), 1 + MAX_BACKUPS);
            if let Some(home) = order.first() {
                homes.push(*home);
                slots_of.entry(*home).or_default().push(slot);
            }
            *numbers.entry(order).or_insert_with_key(|order| {
                orders.push(order.iter().map(|&id| gateways.name(id).clone()).collect());
                orders.len() as u16 - 1
            })
        };
        let slots = (0..SLOTS as u16).map(slot).collect();
        Self { spec: ShardMapSpec { name, orders, slots }, homes, slots_of }
    }

    /// A slot by this key, one with this home if there is any, and its home.
    fn slot(&self, key: u64, home: Option<GatewayId>) -> Option<(u16, GatewayId)> {
        let slot = match home.and_then(|home| self.slots_of.get(&home)) {
            Some(slots) => slots[(key % slots.len() as u64) as usize],
            None => (key % SLOTS as u64) as u16,
        };
        Some((slot, *self.homes.get(usize::from(slot))?))
    }
}
