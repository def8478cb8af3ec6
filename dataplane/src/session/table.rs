//! Where the entries are: an open hash table of groups, of a fixed size, for one worker and one address family.
//!
//! ```text
//!   hash -> group:  30 tags of two bytes, one overflow count     (a cache line)
//!                    |  a tag that matches
//!                    v
//!           entry:  30 slots a group, each a direction of a session (see entry.rs)
//!           deadline: a number a slot, swept in order (see sessions.rs)
//! ```
//! An entry never moves, so its slot number is its name: twins and deadlines refer to it. A full group overflows into
//! the next ones; each counts the entries that passed it by, so that a search stops where nothing went on, and nothing
//! is left behind by removals. In a full table 96 of 100 entries stand in their home group, and a search reads 1.07 groups.

use std::sync::atomic::{Ordering, compiler_fence};

use vipgate_mem::{Pages, Region, Slab, Storage, StorageError, TAGS, equal_tags, prefetch_read};

use super::entry::{Entry, Slot};
use super::key::Key;
use crate::address::Address;

/// Slots in a group: as many as a cache line has tags for, since in larger groups fewer are full before the table is. Tags of two
/// bytes are wrong once in thousands of times, so the guess that is fetched ahead is right.
const SLOTS: usize = TAGS - 2;
/// Groups that a search may read: an insertion that would need more finds the table full. At the highest load an entry stands
/// n groups behind its home with a chance of about e^(-n/4), so no table that fits a machine ever comes here by chance; and
/// nobody outside can make it, not knowing the key.
const REACH: u32 = 512;

#[derive(Clone, Copy, Debug, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Group {
    /// A tag a slot; 0 is an empty slot.
    tags: [u16; SLOTS],
    /// Entries that belong here or before and stand behind; stays at 65535 once it got there.
    overflow: u16,
    spare: u16,
}

const _: () = assert!(size_of::<Group>() == 64);

impl Group {
    /// The slots whose tag is `tag`, as bits.
    #[inline]
    fn matches(&self, tag: u16) -> u32 {
        equal_tags(bytemuck::cast_ref(self), tag) & ((1 << SLOTS) - 1)
    }
}

/// The group in which the entry of a hash should be.
#[derive(Clone, Copy, Debug, Default)]
pub struct Home(u32);

/// The table has no room for one more entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The entries of one worker and one address family.
#[derive(Debug)]
pub struct Table<A: Address> {
    groups: Slab<Group>,
    entries: Slab<Entry<A>>,
    deadlines: Slab<u32>,
    count: u32,
    occupied: u32,
    most: u32,
}

impl<A: Address> Table<A> {
    /// A table for `entries` entries.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn new(entries: u32, storage: &mut Storage<'_>) -> Result<Self, StorageError> {
        let count = Self::groups(entries).unwrap_or(u32::MAX);
        Ok(Self {
            groups: storage.slab(count as usize)?,
            // One more that is never used: nobody's entry, for searches that find no tag.
            entries: storage.slab(count as usize * SLOTS + 1)?,
            deadlines: storage.slab(count as usize * SLOTS)?,
            count,
            occupied: 0,
            most: entries,
        })
    }

    /// Groups of a table for so many entries; `None` for more than slots can be numbered for.
    fn groups(entries: u32) -> Option<u32> {
        let count = entries.div_ceil(8).checked_mul(9)?.div_ceil(SLOTS as u32).max(1);
        count.checked_mul(SLOTS as u32).map(|_| count)
    }

    /// Bytes that such a table takes in a region.
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

    /// Slots, used or not.
    pub fn slots(&self) -> u32 {
        self.count * SLOTS as u32
    }

    /// Bytes of memory that the table takes when it is full.
    pub fn bytes(&self) -> usize {
        self.groups.len() * size_of::<Group>() + self.entries.len() * (size_of::<Entry<A>>() + 4)
    }

    /// What kind of pages the entries lie on.
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
    fn after(&self, group: u32) -> u32 {
        if group + 1 == self.count { 0 } else { group + 1 }
    }

    #[inline]
    fn slot(group: u32, index: u32) -> Slot {
        Slot(group * SLOTS as u32 + index)
    }

    /// Fetches the home group of a hash from memory, and says which one it is.
    #[inline]
    pub fn prefetch(&self, hash: u64) -> Home {
        let group = self.home(hash);
        prefetch_read(&self.groups, group as usize);
        Home(group)
    }

    /// Fetches the entry that most likely belongs to a hash, and says which: nobody's if none does. The group should have been
    /// fetched before.
    #[inline]
    pub fn prefetch_entry(&self, home: Home, hash: u64) -> Slot {
        let group = &self.groups[home.0 as usize];
        let found = group.matches(Self::tag(hash));
        let slot = if found != 0 {
            Self::slot(home.0, found.trailing_zeros())
        } else if group.overflow != 0 {
            self.guess_behind(home.0, hash)
        } else {
            self.nobodys()
        };
        prefetch_read(&self.entries, slot.0 as usize);
        slot
    }

    /// Fetches an entry that is about to be read, or taken out.
    #[inline]
    pub fn prefetch_slot(&self, slot: Slot) {
        prefetch_read(&self.entries, slot.0 as usize);
        prefetch_read(&self.deadlines, slot.0 as usize);
    }

    /// Fetches what a new entry at home in a group will most likely take. The group should have been fetched before.
    #[inline]
    pub fn prefetch_free(&self, Home(group): Home) {
        let free = self.groups[group as usize].matches(0);
        self.prefetch_slot(Self::slot(group, free.trailing_zeros().min(SLOTS as u32 - 1)));
    }

    /// The same where entries of the home group stand behind it.
    #[cold]
    fn guess_behind(&self, home: u32, hash: u64) -> Slot {
        let next = self.after(home);
        let found = self.groups[next as usize].matches(Self::tag(hash));
        if found == 0 { self.nobodys() } else { Self::slot(next, found.trailing_zeros()) }
    }

    /// The slot behind all others, whose entry is nobody's.
    #[inline]
    fn nobodys(&self) -> Slot {
        Slot(self.slots())
    }

    /// The slot of the entry with this key, which most likely is `guess`.
    #[inline]
    pub fn find_at(&self, guess: Slot, hash: u64, key: &Key<A>) -> Option<Slot> {
        // Only slots with a tag are guessed, or nobody's, whose key is zero.
        if self.entries[guess.0 as usize].has_key(key) {
            return Some(guess);
        }
        self.find(hash, key)
    }

    /// The slot of the entry with this key.
    #[inline]
    pub fn find(&self, hash: u64, key: &Key<A>) -> Option<Slot> {
        let tag = Self::tag(hash);
        let mut group = self.home(hash);
        for _ in 0..REACH {
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
            group = self.after(group);
        }
        None
    }

    /// The entry in a slot that was found or inserted.
    #[inline]
    pub fn entry(&self, slot: Slot) -> &Entry<A> {
        &self.entries[slot.0 as usize]
    }

    /// The same, to change it.
    #[inline]
    pub fn entry_mut(&mut self, slot: Slot) -> &mut Entry<A> {
        &mut self.entries[slot.0 as usize]
    }

    /// The deadline of a slot; 0 is none.
    #[inline]
    pub fn deadline(&self, slot: Slot) -> u32 {
        self.deadlines[slot.0 as usize]
    }

    /// Sets the deadline of a slot.
    #[inline]
    pub fn set_deadline(&mut self, slot: Slot, deadline: u32) {
        self.deadlines[slot.0 as usize] = deadline;
    }

    /// The deadlines from a slot on, at most `count`.
    #[inline]
    pub fn deadlines(&self, from: u32, count: u32) -> &[u32] {
        let from = (from as usize).min(self.deadlines.len());
        &self.deadlines[from..(from + count as usize).min(self.deadlines.len())]
    }

    /// Whether a slot holds an entry.
    pub fn is_occupied(&self, slot: Slot) -> bool {
        let (group, index) = (slot.0 as usize / SLOTS, slot.0 as usize % SLOTS);
        self.groups.get(group).is_some_and(|group| group.tags[index] != 0)
    }

    /// Whether `more` entries fit.
    pub fn has_room(&self, more: u32) -> bool {
        self.occupied + more <= self.most
    }

    /// Puts an entry with a key that isn't there yet into the table.
    ///
    /// # Errors
    /// When it is full, or crowded around this hash; nothing has changed then.
    pub fn insert(&mut self, hash: u64, entry: Entry<A>) -> Result<Slot, Full> {
        if !self.has_room(1) {
            return Err(Full);
        }
        let mut group = self.home(hash);
        let mut passed = 0;
        let free = loop {
            let free = self.groups[group as usize].matches(0);
            if free != 0 {
                break free;
            }
            passed += 1;
            if passed == REACH.min(self.count) {
                return Err(Full);
            }
            group = self.after(group);
        };
        let slot = Self::slot(group, free.trailing_zeros());
        self.entries[slot.0 as usize] = entry;
        self.deadlines[slot.0 as usize] = 0;
        self.count_overflow(hash, passed);
        // The tag makes it an entry: whoever finds the table after this process died finds it whole.
        compiler_fence(Ordering::SeqCst);
        self.groups[group as usize].tags[free.trailing_zeros() as usize] = Self::tag(hash);
        self.occupied += 1;
        Ok(slot)
    }

    fn count_overflow(&mut self, hash: u64, passed: u32) {
        let mut on_the_way = self.home(hash);
        for _ in 0..passed {
            let overflow = &mut self.groups[on_the_way as usize].overflow;
            *overflow = overflow.saturating_add(1);
            on_the_way = self.after(on_the_way);
        }
    }

    /// Whether the entry in a slot stands where one with this hash may stand, under its tag.
    pub(super) fn is_at_home(&self, hash: u64, slot: Slot) -> bool {
        let (group, index) = (slot.0 / SLOTS as u32, slot.0 as usize % SLOTS);
        self.groups.get(group as usize).is_some_and(|group| group.tags[index] == Self::tag(hash))
            && self.passed(hash, group) < REACH.min(self.count)
    }

    /// Groups between the home of a hash and `group`.
    fn passed(&self, hash: u64, group: u32) -> u32 {
        let home = self.home(hash);
        if group >= home { group - home } else { group + self.count - home }
    }

    /// Forgets all that is counted; [`Table::recount`] counts an entry anew.
    pub(super) fn forget_counts(&mut self) {
        self.occupied = 0;
        self.groups.iter_mut().for_each(|group| group.overflow = 0);
    }

    /// Counts an entry that is in the table; `hash` is that of its key.
    pub(super) fn recount(&mut self, hash: u64, slot: Slot) {
        self.occupied += 1;
        self.count_overflow(hash, self.passed(hash, slot.0 / SLOTS as u32));
    }

    /// Empties a slot that isn't counted.
    pub(super) fn wipe(&mut self, slot: Slot) {
        self.groups[slot.0 as usize / SLOTS].tags[slot.0 as usize % SLOTS] = 0;
        self.deadlines[slot.0 as usize] = 0;
        self.entries[slot.0 as usize] = Entry::default();
    }

    /// Takes an entry out of the table; `hash` is that of its key.
    pub fn remove(&mut self, hash: u64, slot: Slot) {
        let (own, index) = (slot.0 / SLOTS as u32, slot.0 as usize % SLOTS);
        debug_assert!(self.is_occupied(slot), "an entry was removed twice");
        self.groups[own as usize].tags[index] = 0;
        compiler_fence(Ordering::SeqCst);
        self.deadlines[slot.0 as usize] = 0;
        self.entries[slot.0 as usize] = Entry::default();
        let mut on_the_way = self.home(hash);
        while on_the_way != own {
            let overflow = &mut self.groups[on_the_way as usize].overflow;
            // A count that has saturated isn't known any more; it stays, and searches go on past it.
            if *overflow != u16::MAX {
                *overflow -= 1;
            }
            on_the_way = self.after(on_the_way);
        }
        self.occupied -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::counters::Direction;
    use crate::session::entry::Flags;
    use crate::session::tuple::Tuple;
    use crate::tally::property;

    fn tuple(n: u16) -> Tuple<u32> {
        Tuple { source: 0x0a00_0001, destination: 7, source_port: n, destination_port: 53, protocol: 17 }
    }

    fn entry(n: u16) -> Entry<u32> {
        Entry::new(tuple(n), tuple(n).reversed(), Direction::Egress, Flags::ORIGIN)
    }

    const MOST: u32 = 150;

    /// A hash that puts everything into few groups, the first and the last among them, and gives neighbours one tag.
    fn crowded(n: u16) -> u64 {
        [0, 3 << 30, 0xffff_ffff][usize::from(n % 3)] | u64::from(n / 6) << 48
    }

    fn find(table: &Table<u32>, n: u16) -> Option<Slot> {
        table.find(crowded(n), &Key::of(&tuple(n)))
    }

    /// Inserts and removals, in this order of weight: only a table that grows is ever full.
    fn steps() -> impl Strategy<Value = Vec<(bool, u16)>> {
        prop::collection::vec((prop::bool::weighted(0.85), 0_u16..200), 1..800)
    }

    #[test]
    fn it_behaves_like_a_map() {
        let classes =
            ["inserted", "there already", "removed", "not there", "full", "behind its home", "around", "one tag"];
        property(ProptestConfig::default(), &steps(), &classes, |steps, tally| {
            let mut table = Table::<u32>::new(MOST, &mut Storage::Process).unwrap();
            let mut model: HashMap<u16, Slot> = HashMap::new();
            for (insert, n) in steps {
                let hash = crowded(n);
                prop_assert_eq!(find(&table, n), model.get(&n).copied());
                let guess = table.prefetch_entry(table.prefetch(hash), hash);
                prop_assert_eq!(table.find_at(guess, hash, &Key::of(&tuple(n))), model.get(&n).copied());
                match (insert, model.get(&n).copied()) {
                    (true, Some(_)) => tally.count("there already"),
                    (true, None) => {
                        if let Ok(slot) = table.insert(hash, entry(n)) {
                            prop_assert!(model.values().all(|&other| other != slot), "a slot was given twice");
                            let (group, home) = (slot.0 / SLOTS as u32, table.home(hash));
                            tally.count(match group.cmp(&home) {
                                Ordering::Equal => "inserted",
                                Ordering::Greater => "behind its home",
                                Ordering::Less => "around",
                            });
                            // Its only neighbour of the same home and the same tag.
                            let other = if n % 6 < 3 { n + 3 } else { n - 3 };
                            tally.add("one tag", u64::from(model.contains_key(&other)));
                            model.insert(n, slot);
                        } else {
                            prop_assert_eq!(model.len(), MOST as usize, "refused with room left");
                            tally.count("full");
                        }
                    }
                    (false, Some(slot)) => {
                        table.remove(hash, slot);
                        model.remove(&n);
                        prop_assert!(!table.is_occupied(slot));
                        tally.count("removed");
                    }
                    (false, None) => tally.count("not there"),
                }
                prop_assert_eq!(table.occupied() as usize, model.len());
            }
            for (&n, &slot) in &model {
                prop_assert_eq!(find(&table, n), Some(slot));
                prop_assert!(table.is_occupied(slot) && table.is_at_home(crowded(n), slot));
            }
            Ok(())
        });
    }

    #[test]
    fn every_configured_entry_fits() {
        use crate::session::tuple::HashKey;
        let key = HashKey::new([11, 22, 33, 44]);
        let mut table = Table::<u32>::new(40_000, &mut Storage::Process).unwrap();
        for n in 0..40_000 {
            assert!(table.insert(key.hash(&tuple(n)), entry(n)).is_ok(), "entry {n} of 40000");
        }
        assert_eq!(table.insert(key.hash(&tuple(50_000)), entry(50_000)), Err(Full));
    }
}
