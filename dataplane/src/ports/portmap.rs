//! The map of one destination's ports: which are in use toward it, as far as this has been looked up.
//!
//! A block is looked up, 64 questions to the session table, when somebody wants a port of it, and kept up to date by
//! what is given out and released from then on. So the whole range is looked up once in a map's life, however full it
//! is; a port more costs one question, and a refusal a look at a few words.
//!
//! A bit only ever hides a port: each port is asked for once more before it is given out. A bit that nobody clears, for
//! whatever reason, is found when the destination would be refused: then one full block a millisecond is looked up anew.

use super::blocks::{BlockSet, first_from};
use super::choice::Choice;
use super::{BLOCKS, BlockId};
use crate::time::Tick;

/// The ports of one destination. All zeros is a map of which nothing is known.
#[derive(Clone, Copy, bytemuck::AnyBitPattern)]
#[repr(C)]
pub(super) struct PortMap {
    /// Blocks whose word in `used` is up to date.
    known: BlockSet,
    /// Known blocks that had nothing to give out when they were last asked, and of which nothing was released since.
    full: BlockSet,
    /// Full blocks of which a reserved port is not in use: another policy may find them not full.
    reserved: BlockSet,
    /// Ports in use or out of range, a word a block; of blocks that aren't known, anything.
    used: [u64; BLOCKS],
    /// When a full block was last looked up anew.
    rechecked: u32,
    /// Behind which block that goes on.
    recheck_from: u32,
}

impl PortMap {
    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        (self.known, self.full, self.reserved) = Default::default();
    }

    /// A free port, which counts as used from now on; `None` when every port of the own blocks is known to be in use.
    pub(super) fn take(&mut self, choice: &Choice<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        loop {
            let open = |word: usize| choice.blocks(word) & !self.full.0[word];
            let Some(block) = choice.block_of(open) else {
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

    /// Counts a port as free again.
    #[inline]
    pub(super) fn release(&mut self, port: u16) {
        let block = BlockId::of(port);
        self.used[block.index()] &= !(1 << (port - block.first_port()));
        self.full.remove(block);
        self.reserved.remove(block);
    }

    /// Forgets what it knows of some blocks.
    pub(super) fn forget(&mut self, blocks: &BlockSet) {
        self.known.remove_all(blocks);
        self.full.remove_all(blocks);
        self.reserved.remove_all(blocks);
    }

    /// Looks up one more full block anew, if none was in this millisecond; says whether it isn't full after all.
    pub(super) fn recheck(&mut self, choice: &Choice<'_>, now: Tick, is_free: &impl Fn(u16) -> bool) -> bool {
        if self.rechecked == now.0 {
            return false;
        }
        let from = BlockId::at(self.recheck_from as usize % BLOCKS);
        let Some(block) = first_from(from, |word| choice.blocks(word) & self.full.0[word]) else { return false };
        self.rechecked = now.0;
        self.recheck_from = u32::from(block.0) + 1;
        self.look_up(block, choice, is_free);
        let has_free = choice.usable(block) & !self.used[block.index()] != 0;
        if has_free {
            self.full.remove(block);
            self.reserved.remove(block);
        }
        has_free
    }

    /// A free port of one block, or the knowledge that it is full.
    fn take_from(&mut self, block: BlockId, choice: &Choice<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        let usable = choice.usable(block);
        let port = |bit: u32| block.first_port() + bit as u16;
        if !self.known.contains(block) {
            // Where this succeeds, knowing the block isn't worth 64 questions yet.
            let guess = (usable != 0).then(|| port(choice.bit(usable))).filter(|&port| is_free(port));
            if guess.is_some() {
                return guess;
            }
            self.look_up(block, choice, is_free);
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
            let bit = choice.bit(free);
            self.used[block.index()] |= 1 << bit;
            if is_free(port(bit)) {
                return Some(port(bit));
            }
        }
    }

    /// Asks for every port of a block, the reserved ones too: another policy may release them.
    fn look_up(&mut self, block: BlockId, choice: &Choice<'_>, is_free: &impl Fn(u16) -> bool) {
        let in_range = choice.of.range.mask(block);
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

    /// Opens the blocks that only lacked ports which are reserved no more; says whether there was one.
    fn reopen_unreserved(&mut self, choice: &Choice<'_>) -> bool {
        let mut any = false;
        for block in self.reserved.iter().filter(|&block| choice.may_have(block)) {
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
    use crate::ports::choice::Of;
    use crate::ports::tests::vip;
    use crate::ports::{PortRange, Stripe};

    #[test]
    fn a_block_is_looked_up_once_until_it_is_forgotten() {
        let mut maps = Slab::<PortMap>::new(1).unwrap();
        let mut owned = BlockSet::default();
        owned.insert(BlockId(20));
        let vip = vip(&Arc::default(), &[]);
        let choice = Choice {
            owned: &owned,
            of: Of { vip: &vip, blocks: &BlockSet::ALL, range: PortRange::default(), stripe: Stripe::ALL },
            random: 0,
        };
        let asked = Cell::new(0);
        let never = |_| {
            asked.set(asked.get() + 1);
            false
        };
        assert_eq!(maps[0].take(&choice, &never), None);
        assert_eq!(asked.replace(0), 1 + 64, "a guess, then all");
        assert_eq!(maps[0].take(&choice, &never), None);
        assert_eq!(asked.get(), 0);
        maps[0].release(20 * 64 + 5);
        assert_eq!(maps[0].take(&choice, &|_| true), Some(20 * 64 + 5));
        assert_eq!(maps[0].take(&choice, &|_| true), None, "the others are hidden as long as nobody releases them");
        maps[0].forget(&owned);
        assert!(maps[0].take(&choice, &|_| true).is_some());
    }

    #[test]
    fn one_full_block_a_millisecond_is_looked_up_anew() {
        let mut maps = Slab::<PortMap>::new(1).unwrap();
        let mut owned = BlockSet::default();
        for block in 16..19 {
            owned.insert(BlockId(block));
        }
        let vip = vip(&Arc::default(), &[]);
        let choice = Choice {
            owned: &owned,
            of: Of { vip: &vip, blocks: &BlockSet::ALL, range: PortRange::default(), stripe: Stripe::ALL },
            random: 0,
        };
        assert_eq!(maps[0].take(&choice, &|_| false), None);
        let unseen = |port| port == 18 * 64;
        let found = (1..9)
            .map(|ms| maps[0].recheck(&choice, Tick(ms), &unseen) && !maps[0].recheck(&choice, Tick(ms), &unseen));
        assert_eq!(found.collect::<Vec<_>>()[..3], [false, false, true]);
        assert_eq!(maps[0].take(&choice, &unseen), Some(18 * 64));
    }
}
