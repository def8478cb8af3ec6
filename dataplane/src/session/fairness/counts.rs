//! Which holders there are, by the hash of who they are: open addressing with linear probing, at most half full, and nothing is left behind by
//! what is gone.

use vipgate_mem::{MemoryError, Slab};

use super::histograms::{BinId, Histogram};

/// What belongs to one hash.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Record {
    hash: u64,
    /// Its bin in the histogram of its kind. 0: the place is empty.
    pub(super) bin: BinId,
    /// Of a VIP: its members.
    pub(super) members: Histogram,
}

/// Records by hash.
#[derive(Debug)]
pub(super) struct Counts {
    records: Slab<Record>,
    mask: usize,
    used: u32,
}

/// A place of a record, or where one would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(usize);

impl Counts {
    /// Room for `most` records, or some more.
    pub(super) fn new(most: u32) -> Result<Self, MemoryError> {
        let places = (2 * most as usize).next_power_of_two();
        Ok(Self { records: Slab::new(places)?, mask: places - 1, used: 0 })
    }

    /// Records that fit.
    pub(super) fn capacity(&self) -> u32 {
        (self.mask / 2 + 1) as u32
    }

    /// Records that there are.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    pub(super) fn is_full(&self) -> bool {
        self.used >= self.capacity()
    }

    /// Where the record of a hash is, or would be.
    #[inline]
    pub(super) fn place(&self, hash: u64) -> Place {
        let records = &*self.records;
        let mut at = hash as usize & self.mask;
        while records[at].bin != 0 && records[at].hash != hash {
            at = (at + 1) & self.mask;
        }
        Place(at)
    }

    /// The record in a place, if there is one.
    #[inline]
    pub(super) fn at(&mut self, Place(at): Place) -> Option<&mut Record> {
        Some(&mut self.records[at]).filter(|record| record.bin != 0)
    }

    #[inline]
    pub(super) fn get(&self, hash: u64) -> Option<&Record> {
        let Place(at) = self.place(hash);
        Some(&self.records[at]).filter(|record| record.bin != 0)
    }

    /// Fills the empty place of a hash; the table isn't full.
    pub(super) fn insert(&mut self, Place(at): Place, hash: u64, bin: BinId, members: Histogram) {
        debug_assert!(!self.is_full() && self.records[at].bin == 0);
        self.used += 1;
        self.records[at] = Record { hash, bin, members };
    }

    /// Empties a place, and moves what stands behind it, and belongs there or before, to where searches find it.
    pub(super) fn remove(&mut self, Place(mut gap): Place) {
        self.used -= 1;
        let mask = self.mask;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let record = self.records[at];
            if record.bin == 0 {
                break;
            }
            // Whatever stands at least as far from its home as from the gap may stand in it.
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
        fn records_are_those_of_a_map_however_crowded_it_is(steps in prop::collection::vec((0..24_u64, prop::bool::weighted(0.6)), 1..200)) {
            // Sixteen records in 32 places; hashes are at home in eight neighbouring places, one of them the last one.
            let mut counts = Counts::new(12).unwrap();
            let hash = |n: u64| 28 + n % 8 + (n << 32);
            let mut model: HashMap<u64, BinId> = HashMap::new();
            for (bin, (n, adds)) in (1..).zip(steps) {
                let place = counts.place(hash(n));
                prop_assert_eq!(counts.at(place).map(|it| it.bin), model.get(&n).copied());
                match (adds, model.contains_key(&n)) {
                    (true, false) if !counts.is_full() => {
                        counts.insert(place, hash(n), bin, Histograms::VIPS);
                        model.insert(n, bin);
                    }
                    (true, true) => {
                        counts.at(place).unwrap().bin = bin;
                        model.insert(n, bin);
                    }
                    (false, true) => {
                        counts.remove(place);
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
