//! Prefetches of groups and entries, so that the cache misses of a batch overlap.

use vipgate_mem::prefetch_read;

use super::{SLOTS, Table};
use crate::flow::address::Address;
use crate::flow::ids::{HomeGroup, Slot};
use crate::io::batch::{BATCH_SIZE, PacketSet};

/// Lookups of a batch's packets.
#[derive(Debug)]
pub struct Lookups<'a> {
    pub packets: PacketSet,
    /// Home groups of their hashes.
    pub homes: &'a [HomeGroup; BATCH_SIZE],
    /// The hashes of their keys.
    pub hashes: &'a [u64; BATCH_SIZE],
    /// The slots that are found.
    pub slots: &'a mut [Slot; BATCH_SIZE],
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
        let group = &self.groups[home.0 as usize];
        let found = group.matches(Self::tag(hash));
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

    /// As [`Table::prefetch_entry`], for packets of a batch with their home groups and hashes; writes their slots.
    #[inline]
    pub fn prefetch_entries(&self, Lookups { packets, homes, hashes, slots }: Lookups<'_>) {
        for i in packets {
            slots[i] = self.prefetch_entry(homes[i], hashes[i]);
        }
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
