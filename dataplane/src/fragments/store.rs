//! Where the datagrams are: a fixed number of records, an index over them, and two lists that say which ends next.
//!
//! ```text
//!   cells:      open addressing, at most half full: hash and record number; a removal moves later cells up
//!   datagrams:  records, which never move
//!   unfinished: a list through the records, oldest first: bytes are missing, or it is poisoned
//!   finished:   another one: every byte was seen; it is kept for repetitions, as long as there is room
//! ```

use bytemuck::{AnyBitPattern, Pod, Zeroable};
use vipgate_mem::{MemoryError, Slab};

use super::parking::Chain;
use super::seen::Seen;
use super::shares::Holder;
use crate::address::V6;
use crate::time::Tick;

/// A datagram's key with room for either family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct WideKey {
    pub(super) source: V6,
    pub(super) destination: V6,
    pub(super) id: u32,
    pub(super) protocol: u8,
    /// Bits of an address: which family it is.
    pub(super) bits: u8,
    pub(super) spare: u16,
}

/// More datagrams than there is memory for: 40 GB of them.
const MOST: u32 = 1 << 28;

/// The first fragment has come.
pub(super) const KNOWN: u8 = 1;
/// It has ended because of one of its fragments; what else comes of it is dropped.
pub(super) const POISONED: u8 = 2;
/// Every byte was seen, and nothing waits.
const FINISHED: u8 = 4;

/// What is remembered of a datagram.
#[derive(Clone, Copy, Debug, Default, AnyBitPattern)]
#[repr(C)]
pub(super) struct Datagram {
    pub(super) key: WideKey,
    pub(super) deadline: u32,
    pub(super) holder: Holder,
    /// Frames that wait for the first fragment, or to be fetched after it.
    pub(super) parked: Chain,
    pub(super) translated_id: u32,
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
    pub(super) protocol: u8,
    pub(super) parked_count: u8,
    flags: u8,
    spare: u8,
    pub(super) seen: Seen,
    hash: u32,
    /// Neighbours in its list; the record after a free one. From 1.
    before: u32,
    after: u32,
}

const _: () = assert!(size_of::<Datagram>() == 160);

impl Datagram {
    /// A datagram of which something was seen, and nothing else is known.
    pub(super) fn new(key: WideKey, holder: Holder, seen: Seen, deadline: Tick) -> Self {
        Self { key, holder, seen, deadline: deadline.0, ..Self::default() }
    }

    /// Whether it is in this state.
    #[inline]
    pub(super) fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Notes that it is in this state.
    #[inline]
    pub(super) fn set(&mut self, flag: u8) {
        self.flags |= flag;
    }

    /// Whether it is in the list of finished ones.
    #[inline]
    pub(super) fn is_finished(&self) -> bool {
        self.is(FINISHED)
    }

    /// Whether its time is over.
    #[inline]
    pub(super) fn is_over(&self, now: Tick) -> bool {
        now.reached(Tick(self.deadline))
    }
}

/// The number of a record, from 1.
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

/// All datagrams.
#[derive(Debug)]
pub(super) struct Store {
    cells: Slab<Cell>,
    mask: u32,
    datagrams: Slab<Datagram>,
    /// A record that was used before and is free.
    free: u32,
    /// Records that were ever used.
    used: u32,
    len: u32,
    unfinished: List,
    finished: List,
}

impl Store {
    /// Room for `count` datagrams, or for [`MOST`].
    pub(super) fn new(count: u32) -> Result<Self, MemoryError> {
        let count = count.min(MOST);
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

    /// Datagrams in it.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Whether there is no room for one more.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len as usize == self.datagrams.len()
    }

    /// The record of a slot.
    #[inline]
    pub(super) fn get(&self, slot: Slot) -> &Datagram {
        &self.datagrams[slot.0 as usize - 1]
    }

    /// The same, to change it.
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

    /// Adds a datagram whose key isn't there yet, as the youngest unfinished one; `None` when there is no room.
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

    /// Takes a datagram out.
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
            // A cell may move up to the hole unless its search begins behind it.
            let way = at.wrapping_sub(cell.hash) & self.mask;
            if way >= at.wrapping_sub(hole) & self.mask {
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

    /// The unfinished datagram that came first.
    #[inline]
    pub(super) fn oldest_unfinished(&self) -> Option<Slot> {
        (self.unfinished.head != 0).then_some(Slot(self.unfinished.head))
    }

    /// The finished datagram that was finished first.
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

    /// Few hashes, some at the end of the cells, and some the same.
    fn hash(id: u32) -> u32 {
        (id % 7).wrapping_sub(4)
    }

    fn order(store: &Store, first: Option<Slot>) -> Vec<u32> {
        let after = |slot: &Slot| Some(Slot(store.get(*slot).after)).filter(|after| after.0 != 0);
        std::iter::successors(first, after).map(|slot| store.get(slot).key.id).collect()
    }

    proptest! {
        #[test]
        fn it_behaves_like_two_queues_and_a_map(steps in prop::collection::vec((0..3, 0_u32..40), 1..300)) {
            let mut store = Store::new(20).unwrap();
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
    fn room_for_nothing_is_full_from_the_start() {
        let mut store = Store::new(0).unwrap();
        assert!(store.is_full() && store.insert(1, datagram(1)).is_none() && store.find(1, &datagram(1).key).is_none());
    }
}
