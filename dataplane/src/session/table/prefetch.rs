//! Prefetches of groups and entries, so that the cache misses of a batch overlap.

use vipgate_mem::prefetch_read;
use vipgate_mem::simd::{Kernel, Simd};

use super::{Group, SLOTS, Table};
use crate::flow::address::Address;
use crate::flow::ids::{HomeGroup, Slot};
use crate::io::batch::{BATCH_SIZE, PacketSet};

/// Lookups of a batch's packets.
#[derive(Debug)]
pub struct Lookups<'a> {
    /// The packets.
    pub packets: PacketSet,
    /// Home groups of their hashes.
    pub homes: &'a [HomeGroup; BATCH_SIZE],
    /// The hashes of their keys.
    pub hashes: &'a [u64; BATCH_SIZE],
    /// The slots that are found.
    pub slots: &'a mut [Slot; BATCH_SIZE],
}

impl Lookups<'_> {
    #[inline(always)]
    fn run(self, find: impl Fn(HomeGroup, u64) -> Slot) {
        for i in self.packets {
            self.slots[i] = find(self.homes[i], self.hashes[i]);
        }
    }
}

/// [`Table::prefetch_entries`] with vector instructions.
struct PrefetchEntries<'a, A: Address> {
    table: &'a Table<A>,
    lookups: Lookups<'a>,
}

impl<A: Address> Kernel for PrefetchEntries<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run(self, simd: Simd) {
        let matches = |group: &Group, tag| simd.equal_tags(bytemuck::cast_ref(group), tag) & Group::ALL;
        self.lookups.run(|home, hash| self.table.prefetch_match(home, hash, matches));
    }
}

impl<A: Address> Table<A> {
    /// Prefetches the home group of a hash, and returns it.
    #[inline]
    pub fn prefetch(&self, hash: u64) -> HomeGroup {
        let group = self.home(hash);
        prefetch_read(&self.groups, group as usize);
        HomeGroup(group)
    }

    /// Prefetches the entry that most likely belongs to a hash, and returns its slot: the sentinel if no tag matches.
    /// The group should have been prefetched before.
    #[inline]
    pub fn prefetch_entry(&self, home: HomeGroup, hash: u64) -> Slot {
        self.prefetch_match(home, hash, Group::matches)
    }

    /// As [`Table::prefetch_entry`], for packets of a batch with their home groups and hashes; writes their slots.
    #[inline]
    pub fn prefetch_entries(&self, lookups: Lookups<'_>) {
        match Simd::detect() {
            Some(simd) => simd.run(PrefetchEntries { table: self, lookups }),
            None => lookups.run(|home, hash| self.prefetch_entry(home, hash)),
        }
    }

    /// Prefetches the entry that most likely belongs to a hash, by a comparison of the tags of its home group.
    #[inline(always)]
    fn prefetch_match(&self, home: HomeGroup, hash: u64, matches: impl Fn(&Group, u16) -> u32) -> Slot {
        let group = &self.groups[home.0 as usize];
        let found = matches(group, Self::tag(hash));
        let slot = if found != 0 {
            Self::slot(home.0, found.trailing_zeros())
        } else if group.overflow != 0 {
            self.guess_overflow(home.0, hash)
        } else {
            self.sentinel()
        };
        prefetch_read(&self.entries, slot.0 as usize);
        slot
    }

    /// Prefetches an entry that is about to be read or removed.
    #[inline]
    pub fn prefetch_slot(&self, slot: Slot) {
        prefetch_read(&self.entries, slot.0 as usize);
        prefetch_read(&self.deadlines, slot.0 as usize);
    }

    /// Prefetches the slot that a new entry with this home group will most likely take. The group should have been
    /// prefetched before.
    #[inline]
    pub fn prefetch_free(&self, HomeGroup(group): HomeGroup) {
        let free = self.groups[group as usize].matches(0);
        self.prefetch_slot(Self::slot(group, free.trailing_zeros().min(SLOTS as u32 - 1)));
    }

    /// Guesses the slot of a hash whose home group has overflowed.
    #[cold]
    fn guess_overflow(&self, home: u32, hash: u64) -> Slot {
        let next = self.next_group(home);
        let found = self.groups[next as usize].matches(Self::tag(hash));
        if found == 0 { self.sentinel() } else { Self::slot(next, found.trailing_zeros()) }
    }
}
