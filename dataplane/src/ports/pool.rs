//! The owners of one VIP's port blocks, shared by the workers.
//!
//! The only state that workers share about sessions, and the only atomics: a block changes hands when a worker claims a
//! free one or returns an empty one, which is rare; everybody reads it to find a reply's owner.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use crate::time::Tick;

use super::held::Held;
use super::{BLOCKS, BlockId, BlockSet};

/// A worker of this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u8);

const FREE: u16 = u16::MAX;
/// How long a worker that ran out of ports asks the others.
const WANTED_MS: u32 = 1_000;

/// The owners of one VIP's blocks. Lives as long as a worker owns a block, also when policy has dropped the VIP.
#[derive(Debug)]
pub struct PortPool {
    owners: [AtomicU16; BLOCKS],
    /// Until when the owners of unused blocks should give them back: some worker ran out of ports.
    wanted_until: AtomicU32,
    /// How many blocks have an owner.
    held: Held,
    /// Sessions that hold a port: those of worker n in place n, modulo 16.
    sessions: [AtomicU32; 16],
    /// Which pool this is, and how often a block of it was given back.
    stamp: AtomicU64,
    /// Packets refused for want of a port, of all blocks.
    refused: AtomicU64,
    /// The same of the endpoint's shard, which is a part of them.
    refused_in_shard: AtomicU64,
}

/// Packets that were refused for want of a port of a VIP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// While their endpoints could have had any of its blocks.
    pub whole: u64,
    /// While their endpoints could have had those of one shard: ports may have been free in the others.
    pub in_shard: u64,
}

/// How many pools there have been.
static POOLS: AtomicU64 = AtomicU64::new(1);
/// Where a pool's number begins in its stamp.
const POOL_SHIFT: u32 = 40;

impl Default for PortPool {
    fn default() -> Self {
        Self {
            owners: [const { AtomicU16::new(FREE) }; BLOCKS],
            wanted_until: AtomicU32::new(0),
            held: Held::none(),
            sessions: [const { AtomicU32::new(0) }; 16],
            stamp: AtomicU64::new(POOLS.fetch_add(1, Relaxed) << POOL_SHIFT),
            refused: AtomicU64::new(0),
            refused_in_shard: AtomicU64::new(0),
        }
    }
}

impl PortPool {
    /// The worker that owns the block of `port`.
    #[inline]
    pub fn owner(&self, port: u16) -> Option<WorkerId> {
        match self.owners[usize::from(BlockId::of(port).0)].load(Relaxed) {
            FREE => None,
            worker => Some(WorkerId(worker as u8)),
        }
    }

    /// Takes a block for `worker` if it is free; says whether it worked.
    ///
    /// Relaxed order is enough: the block carries no data of its former owner.
    pub fn claim(&self, block: BlockId, worker: WorkerId) -> bool {
        if !self.held.enter() {
            return false;
        }
        let owner = &self.owners[usize::from(block.0)];
        let got = owner.compare_exchange(FREE, worker.0.into(), Relaxed, Relaxed).is_ok();
        if !got {
            self.held.leave();
        }
        got
    }

    /// Gives a block of `worker` back. Only its owner calls this, when none of its ports is in use.
    pub fn give_back(&self, block: BlockId, worker: WorkerId) {
        let was = self.owners[usize::from(block.0)].compare_exchange(worker.0.into(), FREE, Relaxed, Relaxed);
        debug_assert!(was.is_ok(), "a worker gave back a block that it doesn't own");
        self.held.leave();
        // Behind the store above: who reads this stamp finds the block free, or owned by somebody who was faster.
        self.stamp.fetch_add(1, Release);
    }

    /// A number that changes whenever a block is given back, never 0, and different for every pool: who found no free
    /// block needs to look again only when it has changed.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.stamp.load(Acquire)
    }

    /// Asks the other workers for blocks that they don't use; they have a second to answer.
    pub fn ask_for_blocks(&self, now: Tick) {
        let until = now.plus(WANTED_MS).0.max(1);
        // Every refused packet comes here; the line is shared by all workers, so it's written once a millisecond at most.
        if self.wanted_until.load(Relaxed) != until {
            self.wanted_until.store(until, Relaxed);
        }
    }

    /// Whether somebody asks.
    #[inline]
    pub fn is_asked_for_blocks(&self, now: Tick) -> bool {
        match self.wanted_until.load(Relaxed) {
            0 => false,
            until => !now.reached(Tick(until)) && Tick(until).since(now) <= WANTED_MS,
        }
    }

    /// Counts a packet that no worker of this gateway has a port for; `in_shard`: it could have had a part of them only.
    pub fn refuse(&self, in_shard: bool) {
        let count = if in_shard { &self.refused_in_shard } else { &self.refused };
        count.fetch_add(1, Relaxed);
    }

    /// Packets refused for want of a port.
    pub fn refused(&self) -> Refused {
        Refused { whole: self.refused.load(Relaxed), in_shard: self.refused_in_shard.load(Relaxed) }
    }

    /// How many of these blocks a worker owns.
    pub fn claimed_among(&self, blocks: &BlockSet) -> u32 {
        blocks.iter().map(|block| u32::from(self.owner(block.first_port()).is_some())).sum()
    }

    /// Blocks that somebody owns.
    pub fn claimed(&self) -> usize {
        self.held.count() as usize
    }

    /// Sessions that hold a port, resting ones included.
    pub fn sessions(&self) -> u64 {
        // What is taken here and given back there wraps around in both places.
        let sum = self.sessions.iter().fold(0_u32, |sum, place| sum.wrapping_add(place.load(Relaxed)));
        sum.into()
    }

    /// Counts a session of a worker that holds a port.
    #[inline]
    pub(super) fn held_by(&self, worker: WorkerId) {
        self.sessions[usize::from(worker.0 & 15)].fetch_add(1, Relaxed);
    }

    /// Counts one less.
    #[inline]
    pub(super) fn left_by(&self, worker: WorkerId) {
        self.sessions[usize::from(worker.0 & 15)].fetch_sub(1, Relaxed);
    }

    /// Lets no block be taken any more, if nobody owns one; says whether that is so now. Whoever forgets the pool closes it
    /// first: a worker that still reads an older policy would take a block that nobody knows of.
    pub fn close(&self) -> bool {
        self.held.close()
    }
}
