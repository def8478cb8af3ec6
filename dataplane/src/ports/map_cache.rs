//! Port map cache: maps of destinations whose ports are nearly exhausted; their number is fixed at start.
//!
//! A map is created when several random probes in a row have failed, and evicted when another destination needs its
//! memory and it wasn't used lately (second chance). Its contents are then probed again, so losing a map costs time and
//! nothing else.
//!
//! A destination is identified by a keyed 64-bit hash. If two collide, they share a map, which hides the ports of each
//! from the other: see [`super::portmap`] for why that is temporary.

use vipgate_mem::{MemoryError, Slab};

use super::blocks::BlockSet;
use super::portmap::PortMap;
use crate::flow::ids::VipId;

/// Hash chains of destinations; most are empty or have one.
const CHAINS: usize = 256;
/// The end of a chain.
const END: u8 = u8::MAX;

/// Index of a map, valid until the next [`PortMapCache::insert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapIndex(u8);

/// Destination of a map.
#[derive(Clone, Copy, Debug)]
struct Key {
    destination: u64,
    vip: VipId,
    /// Next one in the chain.
    next: u8,
    /// Used again since the clock hand last passed.
    recent: bool,
}

/// Port maps of one worker.
pub(super) struct PortMapCache {
    maps: Slab<PortMap>,
    /// A key for each map that is in use.
    keys: Vec<Key>,
    chains: [u8; CHAINS],
    /// Clock hand: where the search for a map to evict continues.
    hand: usize,
}

impl PortMapCache {
    /// Maps for `max_maps` destinations, 1 to 255.
    ///
    /// # Errors
    /// If memory for them can't be allocated.
    pub(super) fn new(max_maps: u8) -> Result<Self, MemoryError> {
        let max_maps = usize::from(max_maps.max(1));
        Ok(Self { maps: Slab::new(max_maps)?, keys: Vec::with_capacity(max_maps), chains: [END; CHAINS], hand: 0 })
    }

    /// Whether no destination has a map.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Index of a destination's map, if it has one.
    #[inline]
    pub(super) fn find(&self, vip: VipId, destination: u64) -> Option<MapIndex> {
        let mut at = self.chains[chain(destination)];
        while at != END {
            let key = &self.keys[usize::from(at)];
            if key.destination == destination && key.vip == vip {
                return Some(MapIndex(at));
            }
            at = key.next;
        }
        None
    }

    /// Marks a map as recently used, so that it isn't evicted for a while.
    #[inline]
    pub(super) fn touch(&mut self, index: MapIndex) {
        self.keys[usize::from(index.0)].recent = true;
    }

    /// The map with this index.
    #[inline]
    pub(super) fn map(&mut self, index: MapIndex) -> &mut PortMap {
        &mut self.maps[usize::from(index.0)]
    }

    /// Creates a map for a destination without one, and may evict another one for it.
    pub(super) fn insert(&mut self, vip: VipId, destination: u64) -> MapIndex {
        let at = if self.keys.len() < self.maps.len() { self.keys.len() } else { self.evict() };
        let chain = &mut self.chains[chain(destination)];
        let key = Key { destination, vip, next: *chain, recent: false };
        *chain = at as u8;
        match self.keys.get_mut(at) {
            Some(slot) => *slot = key,
            None => self.keys.push(key),
        }
        self.maps[at].clear();
        MapIndex(at as u8)
    }

    /// Marks a port as free toward a destination.
    #[inline]
    pub(super) fn release(&mut self, vip: VipId, destination: u64, port: u16) {
        if let Some(index) = self.find(vip, destination) {
            self.maps[usize::from(index.0)].release(port);
        }
    }

    /// Forgets some blocks in the maps of a VIP.
    pub(super) fn forget_blocks(&mut self, vip: VipId, blocks: &BlockSet) {
        for (key, map) in self.keys.iter().zip(self.maps.iter_mut()) {
            if key.vip == vip {
                map.forget_blocks(blocks);
            }
        }
    }

    /// Evicts the map of a destination that hasn't used it since the hand last passed.
    fn evict(&mut self) -> usize {
        while std::mem::take(&mut self.keys[self.hand].recent) {
            self.hand = (self.hand + 1) % self.keys.len();
        }
        let victim = self.hand;
        self.hand = (victim + 1) % self.keys.len();
        let Key { destination, next, .. } = self.keys[victim];
        let first = &mut self.chains[chain(destination)];
        if usize::from(*first) == victim {
            *first = next;
            return victim;
        }
        let mut before = usize::from(*first);
        while usize::from(self.keys[before].next) != victim {
            before = usize::from(self.keys[before].next);
        }
        self.keys[before].next = next;
        victim
    }
}

#[inline]
fn chain(destination: u64) -> usize {
    destination as usize % CHAINS
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_latest_destinations_are_found_in_any_chain() {
        let mut cache = PortMapCache::new(4).unwrap();
        assert!(cache.is_empty());
        // Few chains, and the same destination via two VIPs.
        let names: Vec<(VipId, u64)> =
            (0..40).map(|n| (VipId(n % 2), u64::from(n / 2) << 8 | u64::from(n % 3))).collect();
        for (n, &(vip, destination)) in names.iter().enumerate() {
            assert_eq!(cache.find(vip, destination), None);
            let index = cache.insert(vip, destination);
            assert_eq!(cache.find(vip, destination), Some(index));
            let found: Vec<MapIndex> = names.iter().filter_map(|&(vip, hash)| cache.find(vip, hash)).collect();
            assert_eq!(found.len(), (n + 1).min(4), "after {n}");
            assert_eq!(found.iter().map(|index| index.0).collect::<HashSet<_>>().len(), found.len());
        }
    }

    #[test]
    fn a_recently_used_map_is_not_evicted() {
        let mut cache = PortMapCache::new(3).unwrap();
        let busy = cache.insert(VipId(1), 1);
        for other in 2..50 {
            cache.touch(busy);
            cache.insert(VipId(1), other);
            assert_eq!(cache.find(VipId(1), 1), Some(busy), "while {other} was added");
        }
    }
}
