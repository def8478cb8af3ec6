//! Datagram table: a fixed number of records, a hash index over them, and two lists in eviction order.
//!
//! ```text
//!   cells:      open addressing, at most half full: hash and record number; a removal moves later cells up
//!   datagrams:  records, which never move
//!   unfinished: list through the records, oldest first: incomplete or poisoned
//!   finished:   list of complete ones, kept to recognize duplicates, as long as there is capacity
//! ```

use bytemuck::{AnyBitPattern, Pod, Zeroable};
use vipgate_mem::{MemoryError, Slab};

use crate::flow::address::V6;
use crate::flow::time::Tick;
use crate::reassembly::buffer::FragmentQueue;
use crate::reassembly::received::ReceivedRanges;
use crate::reassembly::source_limits::SourceKey;

/// A datagram's key, for either address family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct WideKey {
    pub(super) source: V6,
    pub(super) destination: V6,
    pub(super) id: u32,
    pub(super) protocol: u8,
    /// Bits of an address: the address family.
    pub(super) bits: u8,
    pub(super) spare: u16,
}

/// Upper bound of the capacity: 40 GB of records.
const MAX_DATAGRAMS: u32 = 1 << 28;

/// State flag: the first fragment has been received.
pub(super) const FIRST_RECEIVED: u8 = 1;
/// State flag: dropped because of one of its fragments; so are all that follow.
pub(super) const POISONED: u8 = 2;
/// State flag: every byte was received, and nothing is buffered.
const FINISHED: u8 = 4;

/// State of a datagram.
#[derive(Clone, Copy, Debug, Default, AnyBitPattern)]
#[repr(C)]
pub(super) struct Datagram {
    pub(super) key: WideKey,
    pub(super) deadline: u32,
    pub(super) source: SourceKey,
    /// Frames that wait for the first fragment, or to be released after it.
    pub(super) buffered: FragmentQueue,
    pub(super) translated_id: u32,
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
    pub(super) protocol: u8,
    pub(super) buffered_count: u8,
    flags: u8,
    spare: u8,
    pub(super) received: ReceivedRanges,
    hash: u32,
    /// Links in its list; `after` of a free record is the next free one. From 1.
    before: u32,
    after: u32,
}

const _: () = assert!(size_of::<Datagram>() == 160);

impl Datagram {
    /// A datagram with its first received fragment.
    pub(super) fn new(key: WideKey, holder: SourceKey, seen: ReceivedRanges, deadline: Tick) -> Self {
        Self { key, source: holder, received: seen, deadline: deadline.0, ..Self::default() }
    }

    /// Whether a state flag is set.
    #[inline]
    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Sets a state flag.
    #[inline]
    pub(super) fn set(&mut self, flag: u8) {
        self.flags |= flag;
    }

    /// Whether it is in the list of finished datagrams.
    #[inline]
    pub(super) fn is_finished(&self) -> bool {
        self.has(FINISHED)
    }

    /// Whether it has expired.
    #[inline]
    pub(super) fn is_expired(&self, now: Tick) -> bool {
        now.reached(Tick(self.deadline))
    }
}

/// Number of a record, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u32);

#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct Cell {
    hash: u32,
    /// From 1; 0 is an empty cell.
    slot: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct List {
    head: u32,
    tail: u32,
}

#[derive(Debug)]
pub(super) struct DatagramTable {
    cells: Slab<Cell>,
    mask: u32,
    datagrams: Slab<Datagram>,
    /// A record that was in use and is free now.
    free: u32,
    /// Records that were ever in use.
    used: u32,
    len: u32,
    unfinished: List,
    finished: List,
}

impl DatagramTable {
    /// A table for `count` datagrams, at most [`MAX_DATAGRAMS`].
    pub(super) fn new(count: u32) -> Result<Self, MemoryError> {
        let count = count.min(MAX_DATAGRAMS);
        let cells = (count * 2).max(2).next_power_of_two();
        Ok(Self {
            datagrams: Slab::new(count as usize)?,
            cells: Slab::new(cells as usize)?,
            mask: cells - 1,
            free: 0,
            used: 0,
            len: 0,
            unfinished: List::default(),
            finished: List::default(),
        })
    }

    /// Number of datagrams.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Whether all records are in use.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len as usize == self.datagrams.len()
    }

    /// The record of a slot.
    #[inline]
    pub(super) fn get(&self, slot: Slot) -> &Datagram {
        &self.datagrams[slot.0 as usize - 1]
    }

    /// The record of a slot, mutable.
    #[inline]
    pub(super) fn get_mut(&mut self, slot: Slot) -> &mut Datagram {
        &mut self.datagrams[slot.0 as usize - 1]
    }

    /// The datagram with this key.
    #[inline]
    pub(super) fn find(&self, hash: u32, key: &WideKey) -> Option<Slot> {
        let mut at = hash & self.mask;
        loop {
            let cell = self.cells[at as usize];
            if cell.slot == 0 {
                return None;
            }
            if cell.hash == hash && self.get(Slot(cell.slot)).key == *key {
                return Some(Slot(cell.slot));
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Adds a datagram whose key isn't in the table, as the youngest unfinished one; `None` if the table is full.
    pub(super) fn insert(&mut self, hash: u32, datagram: Datagram) -> Option<Slot> {
        if self.is_full() {
            return None;
        }
        let slot = if self.free == 0 {
            self.used += 1;
            Slot(self.used)
        } else {
            let slot = Slot(self.free);
            self.free = self.get(slot).after;
            slot
        };
        *self.get_mut(slot) = Datagram { hash, ..datagram };
        let mut at = hash & self.mask;
        while self.cells[at as usize].slot != 0 {
            at = (at + 1) & self.mask;
        }
        self.cells[at as usize] = Cell { hash, slot: slot.0 };
        self.len += 1;
        self.link(slot);
        Some(slot)
    }

    /// Removes a datagram.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.unlink(slot);
        let mut hole = self.get(slot).hash & self.mask;
        while self.cells[hole as usize].slot != slot.0 {
            hole = (hole + 1) & self.mask;
        }
        let mut at = hole;
        loop {
            at = (at + 1) & self.mask;
            let cell = self.cells[at as usize];
            if cell.slot == 0 {
                break;
            }
            // A cell may move up to the hole unless its probe sequence starts after it.
            let distance = at.wrapping_sub(cell.hash) & self.mask;
            if distance >= at.wrapping_sub(hole) & self.mask {
                self.cells[hole as usize] = cell;
                hole = at;
            }
        }
        self.cells[hole as usize] = Cell::default();
        self.get_mut(slot).after = self.free;
        self.free = slot.0;
        self.len -= 1;
    }

    /// Moves an unfinished datagram to the finished ones, as the youngest.
    pub(super) fn finish(&mut self, slot: Slot) {
        self.unlink(slot);
        self.get_mut(slot).set(FINISHED);
        self.link(slot);
    }

    /// The oldest unfinished datagram.
    #[inline]
    pub(super) fn oldest_unfinished(&self) -> Option<Slot> {
        (self.unfinished.head != 0).then_some(Slot(self.unfinished.head))
    }

    /// The datagram that was finished first.
    #[inline]
    pub(super) fn oldest_finished(&self) -> Option<Slot> {
        (self.finished.head != 0).then_some(Slot(self.finished.head))
    }

    fn list_of(&mut self, slot: Slot) -> &mut List {
        if self.get(slot).is_finished() { &mut self.finished } else { &mut self.unfinished }
    }

    fn link(&mut self, slot: Slot) {
        let list = self.list_of(slot);
        let last = std::mem::replace(&mut list.tail, slot.0);
        if last == 0 {
            list.head = slot.0;
        } else {
            self.get_mut(Slot(last)).after = slot.0;
        }
        let datagram = self.get_mut(slot);
        (datagram.before, datagram.after) = (last, 0);
    }

    fn unlink(&mut self, slot: Slot) {
        let Datagram { before, after, .. } = *self.get(slot);
        if before == 0 {
            self.list_of(slot).head = after;
        } else {
            self.get_mut(Slot(before)).after = after;
        }
        if after == 0 {
            self.list_of(slot).tail = before;
        } else {
            self.get_mut(Slot(after)).before = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn datagram(id: u32) -> Datagram {
        Datagram { key: WideKey { id, ..WideKey::default() }, ..Datagram::default() }
    }

    /// Few hashes: collisions, and probe sequences that wrap around the end.
    fn hash(id: u32) -> u32 {
        (id % 7).wrapping_sub(4)
    }

    fn order(store: &DatagramTable, first: Option<Slot>) -> Vec<u32> {
        let after = |slot: &Slot| Some(Slot(store.get(*slot).after)).filter(|after| after.0 != 0);
        std::iter::successors(first, after).map(|slot| store.get(slot).key.id).collect()
    }

    proptest! {
        #[test]
        fn the_table_behaves_like_a_map_and_two_queues(steps in prop::collection::vec((0..3, 0_u32..40), 1..300)) {
            let mut store = DatagramTable::new(20).unwrap();
            let (mut unfinished, mut finished) = (VecDeque::new(), VecDeque::new());
            for (step, id) in steps {
                let found = store.find(hash(id), &datagram(id).key);
                prop_assert_eq!(found.is_some(), unfinished.contains(&id) || finished.contains(&id));
                match (step, found) {
                    (0, None) => {
                        let slot = store.insert(hash(id), datagram(id));
                        prop_assert_eq!(slot.is_some(), unfinished.len() + finished.len() < 20);
                        if slot.is_some() {
                            unfinished.push_back(id);
                        }
                    }
                    (1, Some(slot)) if unfinished.contains(&id) => {
                        store.finish(slot);
                        unfinished.retain(|&other| other != id);
                        finished.push_back(id);
                    }
                    (2, Some(slot)) => {
                        store.remove(slot);
                        unfinished.retain(|&other| other != id);
                        finished.retain(|&other| other != id);
                    }
                    _ => {}
                }
                prop_assert_eq!(order(&store, store.oldest_unfinished()), Vec::from(unfinished.clone()));
                prop_assert_eq!(order(&store, store.oldest_finished()), Vec::from(finished.clone()));
                prop_assert_eq!(store.len() as usize, unfinished.len() + finished.len());
                for &id in unfinished.iter().chain(&finished) {
                    let slot = store.find(hash(id), &datagram(id).key);
                    prop_assert_eq!(slot.map(|slot| store.get(slot).key.id), Some(id));
                }
            }
        }
    }

    #[test]
    fn a_table_without_capacity_is_full() {
        let mut store = DatagramTable::new(0).unwrap();
        assert!(store.is_full() && store.insert(1, datagram(1)).is_none() && store.find(1, &datagram(1).key).is_none());
    }
}
