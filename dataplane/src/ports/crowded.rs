//! Destinations that are crowded, and the maps of their ports: as many as there is memory for, which is fixed at start.
//!
//! A map comes when several guesses in a row have failed, and goes when others need its place and it wasn't asked for
//! lately (second chance). What it knew is then looked up again, so a map that is lost costs time and nothing else.
//!
//! A destination is known by a keyed 64-bit hash. Should two share one, they share a map, and it hides from each the
//! ports of the other: see [`super::portmap`] for why that ends.

use vipgate_mem::{MemoryError, Slab};

use super::blocks::BlockSet;
use super::portmap::PortMap;
use crate::snapshot::policy::VipId;

/// Chains that the destinations are found in; most are empty or have one.
const CHAINS: usize = 256;
/// The end of a chain.
const END: u8 = u8::MAX;

/// A map's place. Good until the next [`Crowded::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u8);

/// Whose map it is.
#[derive(Clone, Copy, Debug)]
struct Key {
    destination: u64,
    vip: VipId,
    /// The next one in the chain.
    next: u8,
    /// Asked for again since the hand last came by.
    recent: bool,
}

/// The crowded destinations of one worker.
pub(super) struct Crowded {
    maps: Slab<PortMap>,
    /// A key for each map that is in use.
    keys: Vec<Key>,
    chains: [u8; CHAINS],
    /// Where the search for a map that nobody needs goes on.
    hand: usize,
}

impl Crowded {
    /// Room for `most` destinations, 1 to 255.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub(super) fn new(most: u8) -> Result<Self, MemoryError> {
        let most = usize::from(most.max(1));
        Ok(Self { maps: Slab::new(most)?, keys: Vec::with_capacity(most), chains: [END; CHAINS], hand: 0 })
    }

    /// Whether no destination is crowded.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The place of a destination's map, if it has one.
    #[inline]
    pub(super) fn find(&self, vip: VipId, destination: u64) -> Option<Place> {
        let mut at = self.chains[chain(destination)];
        while at != END {
            let key = &self.keys[usize::from(at)];
            if key.destination == destination && key.vip == vip {
                return Some(Place(at));
            }
            at = key.next;
        }
        None
    }

    /// Lets a destination keep its map for a while: it has asked for it again.
    #[inline]
    pub(super) fn keep(&mut self, place: Place) {
        self.keys[usize::from(place.0)].recent = true;
    }

    /// The map in a place.
    #[inline]
    pub(super) fn map(&mut self, place: Place) -> &mut PortMap {
        &mut self.maps[usize::from(place.0)]
    }

    /// A map for a destination that has none; another one may lose its map for it.
    pub(super) fn add(&mut self, vip: VipId, destination: u64) -> Place {
        let at = if self.keys.len() < self.maps.len() { self.keys.len() } else { self.evict() };
        let chain = &mut self.chains[chain(destination)];
        let key = Key { destination, vip, next: *chain, recent: false };
        *chain = at as u8;
        match self.keys.get_mut(at) {
            Some(place) => *place = key,
            None => self.keys.push(key),
        }
        self.maps[at].clear();
        Place(at as u8)
    }

    /// Notes that a port is free again toward a destination.
    #[inline]
    pub(super) fn release(&mut self, vip: VipId, destination: u64, port: u16) {
        if let Some(place) = self.find(vip, destination) {
            self.maps[usize::from(place.0)].release(port);
        }
    }

    /// Forgets what the maps of a VIP know of some blocks.
    pub(super) fn forget(&mut self, vip: VipId, blocks: &BlockSet) {
        for (key, map) in self.keys.iter().zip(self.maps.iter_mut()) {
            if key.vip == vip {
                map.forget(blocks);
            }
        }
    }

    /// Takes its map away from a destination that hasn't asked for it since the last time round.
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
    fn every_destination_of_the_last_ones_is_found_whatever_its_chain() {
        let mut crowded = Crowded::new(4).unwrap();
        assert!(crowded.is_empty());
        // Few chains, and the same destination by way of two VIPs.
        let names: Vec<(VipId, u64)> =
            (0..40).map(|n| (VipId(n % 2), u64::from(n / 2) << 8 | u64::from(n % 3))).collect();
        for (n, &(vip, destination)) in names.iter().enumerate() {
            assert_eq!(crowded.find(vip, destination), None);
            let place = crowded.add(vip, destination);
            assert_eq!(crowded.find(vip, destination), Some(place));
            let found: Vec<Place> = names.iter().filter_map(|&(vip, hash)| crowded.find(vip, hash)).collect();
            assert_eq!(found.len(), (n + 1).min(4), "after {n}");
            assert_eq!(found.iter().map(|place| place.0).collect::<HashSet<_>>().len(), found.len());
        }
    }

    #[test]
    fn who_asks_keeps_its_map() {
        let mut crowded = Crowded::new(3).unwrap();
        let busy = crowded.add(VipId(1), 1);
        for other in 2..50 {
            crowded.keep(busy);
            crowded.add(VipId(1), other);
            assert_eq!(crowded.find(VipId(1), 1), Some(busy), "while {other} came");
        }
    }
}
