//! Port map of one destination: which ports are in use toward it, as far as probed.
//!
//! A block is probed, with 64 session table lookups, when a port of it is first needed, and kept up to date by
//! allocations and releases from then on. So the whole range is probed once in a map's life, however full it is; each
//! further port costs one lookup, and a refusal the scan of a few words.
//!
//! A bit can only hide a port: each port is looked up once more before it is allocated. A stale bit is found when the
//! destination would be refused: then one full block per millisecond is probed again.

use super::blocks::{BlockSet, first_from};
use super::{BLOCKS, BlockId};
use crate::flow::time::Tick;
use crate::ports::selection::Selection;

/// The ports of one destination. All zeros is an empty map.
#[derive(Clone, Copy, bytemuck::AnyBitPattern)]
#[repr(C)]
pub(super) struct PortMap {
    /// Blocks whose word in `used` is up to date.
    known: BlockSet,
    /// Known blocks without a free port when last scanned, and without a release since.
    full: BlockSet,
    /// Full blocks with a reserved port that isn't in use: under another policy they may not be full.
    reserved: BlockSet,
    /// Ports in use or out of range, one word per block; undefined for blocks that aren't known.
    used: [u64; BLOCKS],
    /// Time of the last probe of a full block.
    last_probe: u32,
    /// Block from which the next one is searched.
    probe_from: u32,
}

impl PortMap {
    /// Clears the map.
    pub(super) fn clear(&mut self) {
        (self.known, self.full, self.reserved) = Default::default();
    }

    /// Allocates a free port; `None` if every port of the worker's blocks is known to be in use.
    pub(super) fn allocate(&mut self, choice: &Selection<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        loop {
            let open = |word: usize| choice.block_word(word) & !self.full.0[word];
            let Some(block) = choice.random_block_of(open) else {
                if self.reopen_unreserved(choice) {
                    continue;
                }
                return None;
            };
            if let Some(port) = self.take_from(block, choice, is_free) {
                return Some(port);
            }
        }
    }

    /// Marks a port as free.
    #[inline]
    pub(super) fn release(&mut self, port: u16) {
        let block = BlockId::of(port);
        self.used[block.index()] &= !(1 << (port - block.first_port()));
        self.full.remove(block);
        self.reserved.remove(block);
    }

    /// Forgets some blocks.
    pub(super) fn forget_blocks(&mut self, blocks: &BlockSet) {
        self.known.remove_all(blocks);
        self.full.remove_all(blocks);
        self.reserved.remove_all(blocks);
    }

    /// Probes one full block again, at most once a millisecond; returns whether it has a free port.
    pub(super) fn revalidate(&mut self, choice: &Selection<'_>, now: Tick, is_free: &impl Fn(u16) -> bool) -> bool {
        if self.last_probe == now.0 {
            return false;
        }
        let from = BlockId::at(self.probe_from as usize % BLOCKS);
        let Some(block) = first_from(from, |word| choice.block_word(word) & self.full.0[word]) else { return false };
        self.last_probe = now.0;
        self.probe_from = u32::from(block.0) + 1;
        self.probe_block(block, choice, is_free);
        let has_free = choice.usable(block) & !self.used[block.index()] != 0;
        if has_free {
            self.full.remove(block);
            self.reserved.remove(block);
        }
        has_free
    }

    /// Allocates a port of one block; if there is none, marks the block as full.
    fn take_from(&mut self, block: BlockId, choice: &Selection<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        let usable = choice.usable(block);
        let port = |bit: u32| block.first_port() + bit as u16;
        if !self.known.contains(block) {
            // If this succeeds, a probe of the block isn't worth 64 lookups yet.
            let guess = (usable != 0).then(|| port(choice.random_bit(usable))).filter(|&port| is_free(port));
            if guess.is_some() {
                return guess;
            }
            self.probe_block(block, choice, is_free);
        }
        loop {
            let free = usable & !self.used[block.index()];
            if free == 0 {
                self.full.insert(block);
                if self.used[block.index()] != u64::MAX {
                    self.reserved.insert(block);
                }
                return None;
            }
            let bit = choice.random_bit(free);
            self.used[block.index()] |= 1 << bit;
            if is_free(port(bit)) {
                return Some(port(bit));
            }
        }
    }

    /// Looks up every port of a block, reserved ones too, since another policy may release these.
    fn probe_block(&mut self, block: BlockId, choice: &Selection<'_>, is_free: &impl Fn(u16) -> bool) {
        let in_range = choice.candidates.range.mask(block);
        let mut used = !in_range;
        let mut open = in_range;
        while open != 0 {
            let bit = open.trailing_zeros();
            used |= u64::from(!is_free(block.first_port() + bit as u16)) << bit;
            open &= open - 1;
        }
        self.used[block.index()] = used;
        self.known.insert(block);
    }

    /// Reopens full blocks whose reserved ports are no longer reserved; returns whether there was one.
    fn reopen_unreserved(&mut self, choice: &Selection<'_>) -> bool {
        let mut any = false;
        for block in self.reserved.iter().filter(|&block| choice.may_use(block)) {
            if choice.usable(block) & !self.used[block.index()] != 0 {
                self.full.remove(block);
                self.reserved.remove(block);
                any = true;
            }
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use vipgate_mem::Slab;

    use super::*;
    use crate::ports::selection::Candidates;
    use crate::ports::tests::vip;
    use crate::ports::vip::VipPorts;
    use crate::ports::{PortRange, Stripe};

    /// The choice of any port in these blocks.
    fn any_port<'a>(vip: &'a VipPorts, owned: &'a BlockSet) -> Selection<'a> {
        let candidates = Candidates { vip, blocks: &BlockSet::ALL, range: PortRange::default(), stripe: Stripe::ALL };
        Selection { owned, candidates, random: 0 }
    }

    #[test]
    fn a_block_is_probed_once_until_it_is_forgotten() {
        let mut maps = Slab::<PortMap>::new(1).unwrap();
        let mut owned = BlockSet::default();
        owned.insert(BlockId(20));
        let vip = vip(&Arc::default(), &[]);
        let choice = any_port(&vip, &owned);
        let lookups = Cell::new(0);
        let none_free = |_| {
            lookups.set(lookups.get() + 1);
            false
        };
        assert_eq!(maps[0].allocate(&choice, &none_free), None);
        assert_eq!(lookups.replace(0), 1 + 64, "one guess, then all ports");
        assert_eq!(maps[0].allocate(&choice, &none_free), None);
        assert_eq!(lookups.get(), 0);
        maps[0].release(20 * 64 + 5);
        assert_eq!(maps[0].allocate(&choice, &|_| true), Some(20 * 64 + 5));
        assert_eq!(maps[0].allocate(&choice, &|_| true), None, "the others are hidden until they are released");
        maps[0].forget_blocks(&owned);
        assert!(maps[0].allocate(&choice, &|_| true).is_some());
    }

    #[test]
    fn one_full_block_per_millisecond_is_probed_again() {
        let mut maps = Slab::<PortMap>::new(1).unwrap();
        let mut owned = BlockSet::default();
        for block in 16..19 {
            owned.insert(BlockId(block));
        }
        let vip = vip(&Arc::default(), &[]);
        let choice = any_port(&vip, &owned);
        assert_eq!(maps[0].allocate(&choice, &|_| false), None);
        let is_open = |port| port == 18 * 64;
        let found = (1..9).map(|ms| {
            maps[0].revalidate(&choice, Tick(ms), &is_open) && !maps[0].revalidate(&choice, Tick(ms), &is_open)
        });
        assert_eq!(found.collect::<Vec<_>>()[..3], [false, false, true]);
        assert_eq!(maps[0].allocate(&choice, &is_open), Some(18 * 64));
    }
}
