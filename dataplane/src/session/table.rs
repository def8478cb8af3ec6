//! Session hash table: open addressing over groups of slots, of a fixed size, for one worker and one address family.
//!
//! ```text
//!   hash -> group:  30 tags of two bytes, one overflow count     (a cache line)
//!                    |  a tag that matches
//!                    v
//!           entry:  30 slots a group, each a direction of a session (see entry.rs)
//!           deadline: a number a slot, scanned in order (see session.rs)
//! ```
//! An entry never moves, so its slot number identifies it: twins and deadlines refer to it. A full group overflows into
//! the next ones; each counts the entries that overflowed past it, so a search stops at a group that nothing
//! overflowed, and a removal leaves no tombstone. In a full table 96 % of the entries are in their home group, and a
//! search reads 1.07 groups on average.

mod prefetch;

use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

use vipgate_mem::{Pages, Region, Slab, Storage, StorageError, TAGS_PER_LINE, equal_tags};

pub use self::prefetch::Lookups;
use super::entry::Entry;
use crate::flow::address::Address;
use crate::flow::ids::Slot;
use crate::flow::key::Key;
use crate::flow::time::Tick;

/// Slots in a group: one per tag in a cache line, since with larger groups fewer are full before the table is. A
/// two-byte tag matches wrongly once in thousands of times, so a prefetch by tag is almost always right.
const SLOTS: usize = TAGS_PER_LINE - 2;
/// Groups that a search may read: an insertion that would need more finds the table full. At the highest load an entry
/// is n groups behind its home with a probability of about e^(-n/4), so no table that fits a machine gets here by
/// chance; and without the hash key nobody can provoke it.
const MAX_PROBES: u32 = 512;

#[derive(Clone, Copy, Debug, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Group {
    /// One tag per slot; 0 is an empty slot.
    tags: [u16; SLOTS],
    /// Entries whose home is here or before, and which are in a group behind; sticks at 65535.
    overflow: u16,
    spare: u16,
}

const _: () = assert!(size_of::<Group>() == 64);

impl Group {
    /// The bits of all slots.
    const ALL: u32 = (1 << SLOTS) - 1;

    /// Slots whose tag is `tag`, as bits.
    #[inline]
    fn matches(&self, tag: u16) -> u32 {
        equal_tags(bytemuck::cast_ref(self), tag) & Self::ALL
    }
}

/// The table has no free slot for one more entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull;

/// The entries of one worker and one address family.
#[derive(Debug)]
pub struct Table<A: Address> {
    groups: Slab<Group>,
    entries: Slab<Entry<A>>,
    deadlines: Slab<u32>,
    count: u32,
    occupied: u32,
    max_entries: u32,
}

impl<A: Address> Table<A> {
    /// A table for `entries` entries.
    ///
    /// # Errors
    /// If memory for it can't be allocated.
    pub fn new(entries: u32, storage: &mut Storage<'_>) -> Result<Self, StorageError> {
        let count = Self::groups(entries).unwrap_or(u32::MAX);
        Ok(Self {
            groups: storage.slab(count as usize)?,
            // One more that is never used: the sentinel, for searches that find no tag.
            entries: storage.slab(count as usize * SLOTS + 1)?,
            deadlines: storage.slab(count as usize * SLOTS)?,
            count,
            occupied: 0,
            max_entries: entries,
        })
    }

    /// Groups of a table for so many entries; `None` if their slots can't be numbered.
    fn groups(entries: u32) -> Option<u32> {
        let count = entries.div_ceil(8).checked_mul(9)?.div_ceil(SLOTS as u32).max(1);
        count.checked_mul(SLOTS as u32).map(|_| count)
    }

    /// Bytes that a table for so many entries takes in a region.
    pub(super) fn region_bytes(entries: u32) -> Option<u64> {
        let count = Self::groups(entries)? as usize;
        let slots = count * SLOTS;
        Some(
            Region::bytes_of::<Group>(count) + Region::bytes_of::<Entry<A>>(slots + 1) + Region::bytes_of::<u32>(slots),
        )
    }

    /// Entries in the table.
    pub fn occupied(&self) -> u32 {
        self.occupied
    }

    /// Slots, free or not.
    pub fn slots(&self) -> u32 {
        self.count * SLOTS as u32
    }

    /// Memory of a full table, in bytes.
    pub fn bytes(&self) -> usize {
        self.groups.len() * size_of::<Group>() + self.entries.len() * (size_of::<Entry<A>>() + 4)
    }

    /// Kind of pages that back the entries.
    pub fn pages(&self) -> Pages {
        self.entries.pages()
    }

    #[inline]
    fn home(&self, hash: u64) -> u32 {
        (((hash & 0xffff_ffff) * u64::from(self.count)) >> 32) as u32
    }

    #[inline]
    fn tag(hash: u64) -> u16 {
        let tag = (hash >> 48) as u16;
        tag + u16::from(tag == 0)
    }

    #[inline]
    fn next_group(&self, group: u32) -> u32 {
        if group + 1 == self.count { 0 } else { group + 1 }
    }

    #[inline]
    fn slot(group: u32, index: u32) -> Slot {
        Slot(group * SLOTS as u32 + index)
    }

    /// The slot behind all others, whose entry is always empty.
    #[inline]
    fn sentinel(&self) -> Slot {
        Slot(self.slots())
    }

    /// Slot of the entry with this key, which most likely is `guess`.
    #[inline]
    pub fn find_at(&self, guess: Slot, hash: u64, key: &Key<A>) -> Option<Slot> {
        // A guess is a slot with a tag, or the sentinel, whose key is zero.
        if self.entries[guess.0 as usize].has_key(key) {
            return Some(guess);
        }
        self.find(hash, key)
    }

    /// Slot of the entry with this key.
    #[inline]
    pub fn find(&self, hash: u64, key: &Key<A>) -> Option<Slot> {
        let tag = Self::tag(hash);
        let mut group = self.home(hash);
        for _ in 0..MAX_PROBES {
            let here = &self.groups[group as usize];
            let mut found = here.matches(tag);
            while found != 0 {
                let slot = Self::slot(group, found.trailing_zeros());
                if self.entries[slot.0 as usize].has_key(key) {
                    return Some(slot);
                }
                found &= found - 1;
            }
            if here.overflow == 0 {
                return None;
            }
            group = self.next_group(group);
        }
        None
    }

    /// The entry in an occupied slot.
    #[inline]
    pub fn entry(&self, slot: Slot) -> &Entry<A> {
        &self.entries[slot.0 as usize]
    }

    /// The entry in an occupied slot, mutable.
    #[inline]
    pub fn entry_mut(&mut self, slot: Slot) -> &mut Entry<A> {
        &mut self.entries[slot.0 as usize]
    }

    /// Deadline of a slot; 0 is none.
    #[inline]
    pub fn deadline(&self, slot: Slot) -> u32 {
        self.deadlines[slot.0 as usize]
    }

    /// Sets the deadline of a slot.
    #[inline]
    pub fn set_deadline(&mut self, slot: Slot, deadline: u32) {
        self.deadlines[slot.0 as usize] = deadline;
    }

    /// Up to `count` deadlines from a slot on.
    #[inline]
    pub fn deadlines(&self, from: u32, count: u32) -> &[u32] {
        let from = (from as usize).min(self.deadlines.len());
        &self.deadlines[from..(from + count as usize).min(self.deadlines.len())]
    }

    /// Writes the first slots of a range whose deadlines are due; returns their number. Almost none is due, so they are
    /// tested in chunks, without a branch for each.
    pub fn due<const COUNT: usize>(&self, range: Range<u32>, now: Tick, due: &mut [Slot; COUNT]) -> usize {
        const CHUNK: usize = 64;
        let is_due = |deadline: u32| (deadline != 0) & now.reached(Tick(deadline));
        let mut count = 0;
        let deadlines = self.deadlines(range.start, range.end - range.start);
        for (chunk, first) in deadlines.chunks(CHUNK).zip((range.start..).step_by(CHUNK)) {
            if !chunk.iter().fold(false, |any, &deadline| any | is_due(deadline)) {
                continue;
            }
            for (&deadline, slot) in chunk.iter().zip(first..) {
                if is_due(deadline) {
                    due[count] = Slot(slot);
                    count += 1;
                    if count == COUNT {
                        return count;
                    }
                }
            }
        }
        count
    }

    /// Whether a slot holds an entry.
    pub fn is_occupied(&self, slot: Slot) -> bool {
        let (group, index) = (slot.0 as usize / SLOTS, slot.0 as usize % SLOTS);
        self.groups.get(group).is_some_and(|group| group.tags[index] != 0)
    }

    /// Whether `more` entries fit.
    pub fn has_capacity(&self, more: u32) -> bool {
        self.occupied + more <= self.max_entries
    }

    /// Inserts an entry with a key that isn't in the table.
    ///
    /// # Errors
    /// If it is full, or every group that this hash may use is; nothing has changed then.
    pub fn insert(&mut self, hash: u64, entry: Entry<A>) -> Result<Slot, TableFull> {
        if !self.has_capacity(1) {
            return Err(TableFull);
        }
        let mut group = self.home(hash);
        let mut passed = 0;
        let free = loop {
            let free = self.groups[group as usize].matches(0);
            if free != 0 {
                break free;
            }
            passed += 1;
            if passed == MAX_PROBES.min(self.count) {
                return Err(TableFull);
            }
            group = self.next_group(group);
        };
        let slot = Self::slot(group, free.trailing_zeros());
        self.entries[slot.0 as usize] = entry;
        self.deadlines[slot.0 as usize] = 0;
        self.count_overflow(hash, passed);
        // The tag makes it an entry, so it is written last: a process that restores the table after this one died finds
        // it complete.
        compiler_fence(Ordering::SeqCst);
        self.groups[group as usize].tags[free.trailing_zeros() as usize] = Self::tag(hash);
        self.occupied += 1;
        Ok(slot)
    }

    fn count_overflow(&mut self, hash: u64, passed: u32) {
        let mut group = self.home(hash);
        for _ in 0..passed {
            let overflow = &mut self.groups[group as usize].overflow;
            *overflow = overflow.saturating_add(1);
            group = self.next_group(group);
        }
    }

    /// Whether a search for this hash reaches the entry in a slot, under its tag.
    pub(super) fn is_reachable(&self, hash: u64, slot: Slot) -> bool {
        let (group, index) = (slot.0 / SLOTS as u32, slot.0 as usize % SLOTS);
        self.groups.get(group as usize).is_some_and(|group| group.tags[index] == Self::tag(hash))
            && self.probe_distance(hash, group) < MAX_PROBES.min(self.count)
    }

    /// Probe distance: groups from the home of a hash to `group`.
    fn probe_distance(&self, hash: u64, group: u32) -> u32 {
        let home = self.home(hash);
        if group >= home { group - home } else { group + self.count - home }
    }

    /// Resets the counts of entries and overflows; [`Table::recount`] counts an entry again.
    pub(super) fn reset_counts(&mut self) {
        self.occupied = 0;
        self.groups.iter_mut().for_each(|group| group.overflow = 0);
    }

    /// Counts an entry that is in the table; `hash` is that of its key.
    pub(super) fn recount(&mut self, hash: u64, slot: Slot) {
        self.occupied += 1;
        self.count_overflow(hash, self.probe_distance(hash, slot.0 / SLOTS as u32));
    }

    /// Clears a slot whose entry isn't counted.
    pub(super) fn clear_slot(&mut self, slot: Slot) {
        self.groups[slot.0 as usize / SLOTS].tags[slot.0 as usize % SLOTS] = 0;
        self.deadlines[slot.0 as usize] = 0;
        self.entries[slot.0 as usize] = Entry::default();
    }

    /// Removes an entry; `hash` is that of its key.
    pub fn remove(&mut self, hash: u64, slot: Slot) {
        let (own, index) = (slot.0 / SLOTS as u32, slot.0 as usize % SLOTS);
        debug_assert!(self.is_occupied(slot), "an entry was removed twice");
        self.groups[own as usize].tags[index] = 0;
        compiler_fence(Ordering::SeqCst);
        self.deadlines[slot.0 as usize] = 0;
        self.entries[slot.0 as usize] = Entry::default();
        let mut group = self.home(hash);
        while group != own {
            let overflow = &mut self.groups[group as usize].overflow;
            // A saturated count is inexact; it stays, and searches continue past it.
            if *overflow != u16::MAX {
                *overflow -= 1;
            }
            group = self.next_group(group);
        }
        self.occupied -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;
    use std::collections::HashMap;

    use proptest::prelude::*;
    use vipgate_coverage::property;

    use super::*;
    use crate::flow::direction::Direction;
    use crate::flow::tuple::Tuple;
    use crate::session::entry::Flags;

    fn tuple(n: u16) -> Tuple<u32> {
        Tuple { source: 0x0a00_0001, destination: 7, source_port: n, destination_port: 53, protocol: 17 }
    }

    fn entry(n: u16) -> Entry<u32> {
        Entry::new(tuple(n), Tuple { source: 9, ..tuple(n) }, Direction::Egress, Flags::ORIGIN)
    }

    const MAX_ENTRIES: u32 = 150;

    /// A hash that puts all entries into few groups, the first and the last among them, and gives neighbors one tag.
    fn clustered_hash(n: u16) -> u64 {
        [0, 3 << 30, 0xffff_ffff][usize::from(n % 3)] | u64::from(n / 6) << 48
    }

    fn find(table: &Table<u32>, n: u16) -> Option<Slot> {
        table.find(clustered_hash(n), &Key::of(&tuple(n)))
    }

    /// Insertions and removals, weighted so that the table fills up.
    fn steps() -> impl Strategy<Value = Vec<(bool, u16)>> {
        prop::collection::vec((prop::bool::weighted(0.85), 0_u16..200), 1..800)
    }

    #[test]
    fn a_table_behaves_like_a_map() {
        let classes = ["inserted", "present", "removed", "absent", "full", "overflowed", "wrapped around", "same tag"];
        property(ProptestConfig::default(), &steps(), &classes, |steps, coverage| {
            let mut table = Table::<u32>::new(MAX_ENTRIES, &mut Storage::Process).unwrap();
            let mut model: HashMap<u16, Slot> = HashMap::new();
            for (insert, n) in steps {
                let hash = clustered_hash(n);
                prop_assert_eq!(find(&table, n), model.get(&n).copied());
                let guess = table.prefetch_entry(table.prefetch(hash), hash);
                prop_assert_eq!(table.find_at(guess, hash, &Key::of(&tuple(n))), model.get(&n).copied());
                match (insert, model.get(&n).copied()) {
                    (true, Some(_)) => coverage.count("present"),
                    (true, None) => {
                        if let Ok(slot) = table.insert(hash, entry(n)) {
                            prop_assert!(model.values().all(|&other| other != slot), "a slot was allocated twice");
                            let (group, home) = (slot.0 / SLOTS as u32, table.home(hash));
                            coverage.count(match group.cmp(&home) {
                                Ordering::Equal => "inserted",
                                Ordering::Greater => "overflowed",
                                Ordering::Less => "wrapped around",
                            });
                            // The only other entry with the same home and tag.
                            let other = if n % 6 < 3 { n + 3 } else { n - 3 };
                            coverage.add("same tag", u64::from(model.contains_key(&other)));
                            model.insert(n, slot);
                        } else {
                            prop_assert_eq!(model.len(), MAX_ENTRIES as usize, "rejected below capacity");
                            coverage.count("full");
                        }
                    }
                    (false, Some(slot)) => {
                        table.remove(hash, slot);
                        model.remove(&n);
                        prop_assert!(!table.is_occupied(slot));
                        coverage.count("removed");
                    }
                    (false, None) => coverage.count("absent"),
                }
                prop_assert_eq!(table.occupied() as usize, model.len());
            }
            for (&n, &slot) in &model {
                prop_assert_eq!(find(&table, n), Some(slot));
                prop_assert!(table.is_occupied(slot) && table.is_reachable(clustered_hash(n), slot));
            }
            Ok(())
        });
    }

    #[test]
    fn a_table_takes_as_many_entries_as_configured() {
        use crate::flow::tuple::HashKey;
        let key = HashKey::new([11, 22, 33, 44]);
        let mut table = Table::<u32>::new(40_000, &mut Storage::Process).unwrap();
        for n in 0..40_000 {
            assert!(table.insert(key.hash(&tuple(n)), entry(n)).is_ok(), "entry {n} of 40000");
        }
        assert_eq!(table.insert(key.hash(&tuple(50_000)), entry(50_000)), Err(TableFull));
    }
}
