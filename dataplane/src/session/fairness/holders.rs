//! Hash table of holders, by the keyed hash of their addresses: open addressing with linear probing, at most half full,
//! without tombstones.

use vipgate_mem::{MemoryError, Slab};

use super::histograms::{BinId, Histogram};

/// Entry of one holder.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct HolderEntry {
    hash: u64,
    /// Its bin in the histogram that it is in. 0: the entry is empty.
    pub(super) bin: BinId,
    /// Of a VIP: the histogram of its members.
    pub(super) members: Histogram,
}

/// Holders by hash.
#[derive(Debug)]
pub(super) struct HolderTable {
    records: Slab<HolderEntry>,
    mask: usize,
    used: u32,
}

/// Position of an entry, or where one would be inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position(usize);

impl HolderTable {
    /// A table for at least `max_entries` holders.
    pub(super) fn new(max_entries: u32) -> Result<Self, MemoryError> {
        let positions = (2 * max_entries as usize).next_power_of_two();
        Ok(Self { records: Slab::new(positions)?, mask: positions - 1, used: 0 })
    }

    /// Capacity in entries.
    pub(super) fn capacity(&self) -> u32 {
        (self.mask / 2 + 1) as u32
    }

    /// Number of entries.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    pub(super) fn is_full(&self) -> bool {
        self.used >= self.capacity()
    }

    /// Position of a hash's entry, or where it would be inserted.
    #[inline]
    pub(super) fn position(&self, hash: u64) -> Position {
        let records = &*self.records;
        let mut at = hash as usize & self.mask;
        while records[at].bin != 0 && records[at].hash != hash {
            at = (at + 1) & self.mask;
        }
        Position(at)
    }

    /// The entry at a position, if there is one.
    #[inline]
    pub(super) fn get_mut(&mut self, Position(at): Position) -> Option<&mut HolderEntry> {
        Some(&mut self.records[at]).filter(|record| record.bin != 0)
    }

    #[inline]
    pub(super) fn get(&self, hash: u64) -> Option<&HolderEntry> {
        let Position(at) = self.position(hash);
        Some(&self.records[at]).filter(|record| record.bin != 0)
    }

    /// Inserts an entry at the empty position of a hash; the table must not be full.
    pub(super) fn insert(&mut self, Position(at): Position, hash: u64, bin: BinId, members: Histogram) {
        debug_assert!(!self.is_full() && self.records[at].bin == 0);
        self.used += 1;
        self.records[at] = HolderEntry { hash, bin, members };
    }

    /// Removes an entry, and shifts entries behind it back to where a search finds them.
    pub(super) fn remove(&mut self, Position(mut gap): Position) {
        self.used -= 1;
        let mask = self.mask;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let record = self.records[at];
            if record.bin == 0 {
                break;
            }
            // An entry may move to the gap if that isn't before its home.
            let from_home = at.wrapping_sub(record.hash as usize) & mask;
            if from_home >= at.wrapping_sub(gap) & mask {
                self.records[gap] = record;
                gap = at;
            }
        }
        self.records[gap] = bytemuck::Zeroable::zeroed();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::histograms::Histograms;
    use super::*;

    proptest! {
        #[test]
        fn the_table_behaves_like_a_map_even_when_full(
            steps in prop::collection::vec((0..24_u64, prop::bool::weighted(0.6)), 1..200),
        ) {
            // Sixteen entries in 32 positions; all hashes have eight neighboring homes, one of them the last position.
            let mut counts = HolderTable::new(12).unwrap();
            let hash = |n: u64| 28 + n % 8 + (n << 32);
            let mut model: HashMap<u64, BinId> = HashMap::new();
            for (bin, (n, adds)) in (1..).zip(steps) {
                let position = counts.position(hash(n));
                prop_assert_eq!(counts.get_mut(position).map(|it| it.bin), model.get(&n).copied());
                match (adds, model.contains_key(&n)) {
                    (true, false) if !counts.is_full() => {
                        counts.insert(position, hash(n), bin, Histograms::VIPS);
                        model.insert(n, bin);
                    }
                    (true, true) => {
                        counts.get_mut(position).unwrap().bin = bin;
                        model.insert(n, bin);
                    }
                    (false, true) => {
                        counts.remove(position);
                        model.remove(&n);
                    }
                    _ => {}
                }
                prop_assert_eq!((counts.used() as usize, counts.is_full()), (model.len(), model.len() == 16));
                for n in 0..24 {
                    prop_assert_eq!(counts.get(hash(n)).map(|it| it.bin), model.get(&n).copied());
                }
            }
        }
    }
}
