//! Port pool: the owning workers of one VIP's port blocks, shared by all workers.
//!
//! The only session state that workers share, and the only atomics: a block changes its owner when a worker claims a
//! free block or releases an empty one, which is rare; all workers read it to find the owner of a reply.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use super::{BLOCKS, BlockId, BlockSet};
use crate::flow::ids::WorkerId;
use crate::flow::time::Tick;
use crate::ports::refcount::RefCount;

const FREE: u16 = u16::MAX;
/// How long a request for blocks from other workers is valid.
const BLOCK_REQUEST_TIMEOUT_MS: u32 = 1_000;
/// How long a session that another gateway has opened may be unknown here: its record is sent at once.
const LENDING_MS: u32 = 1_000;

/// Block ownership of one VIP. It exists as long as a worker owns a block, even after policy has dropped the VIP.
#[derive(Debug)]
pub struct PortPool {
    owners: [AtomicU16; BLOCKS],
    /// Deadline of the current request to release unused blocks: a worker has run out of ports.
    requested_until: Deadline,
    /// Number of blocks with an owner.
    block_refs: RefCount,
    /// Sessions that hold a port, by worker modulo 16.
    sessions: [AtomicU32; 16],
    /// Number of the pool, and how often a block of it was released.
    stamp: AtomicU64,
    /// Packets refused since all blocks of the VIP were exhausted.
    refused: AtomicU64,
    /// Packets refused since the blocks of the endpoint's shard were exhausted.
    refused_in_shard: AtomicU64,
    /// Until when other gateways may have sessions that they opened for this one, which had no port.
    lent_until: Deadline,
}

/// Packets refused since no port of a VIP was free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusedAllocations {
    /// Their endpoints could use all blocks.
    pub whole: u64,
    /// Their endpoints could use the blocks of one shard only; ports of other shards may have been free.
    pub in_shard: u64,
}

/// Number of the next pool.
static POOLS: AtomicU64 = AtomicU64::new(1);
/// Shift of the pool's number in its stamp.
const POOL_SHIFT: u32 = 40;

impl Default for PortPool {
    fn default() -> Self {
        Self {
            owners: [const { AtomicU16::new(FREE) }; BLOCKS],
            requested_until: Deadline::default(),
            block_refs: RefCount::zero(),
            sessions: [const { AtomicU32::new(0) }; 16],
            stamp: AtomicU64::new(POOLS.fetch_add(1, Relaxed) << POOL_SHIFT),
            refused: AtomicU64::new(0),
            refused_in_shard: AtomicU64::new(0),
            lent_until: Deadline::default(),
        }
    }
}

impl PortPool {
    /// Worker that owns the block of `port`.
    #[inline]
    pub fn owner(&self, port: u16) -> Option<WorkerId> {
        match self.owners[usize::from(BlockId::of(port).0)].load(Relaxed) {
            FREE => None,
            worker => Some(WorkerId(worker as u8)),
        }
    }

    /// Claims a block for `worker` if it is free; returns whether it was.
    ///
    /// Relaxed ordering is enough: no data of the former owner is published with the block.
    pub fn claim(&self, block: BlockId, worker: WorkerId) -> bool {
        if !self.block_refs.acquire() {
            return false;
        }
        let owner = &self.owners[usize::from(block.0)];
        let is_claimed = owner.compare_exchange(FREE, worker.0.into(), Relaxed, Relaxed).is_ok();
        if !is_claimed {
            self.block_refs.release();
        }
        is_claimed
    }

    /// Releases a block of `worker`. Only its owner calls this, when none of its ports is in use.
    pub fn release_block(&self, block: BlockId, worker: WorkerId) {
        let released = self.owners[usize::from(block.0)].compare_exchange(worker.0.into(), FREE, Relaxed, Relaxed);
        debug_assert!(released.is_ok(), "a worker released a block that it doesn't own");
        self.block_refs.release();
        // After the store above: a worker that reads this stamp finds the block free or claimed by a faster one.
        self.stamp.fetch_add(1, Release);
    }

    /// A number that changes whenever a block is released, never 0, and different for every pool: a worker that found
    /// no free block needs to search again only when it has changed.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.stamp.load(Acquire)
    }

    /// Requests the other workers to release unused blocks, within one second.
    pub fn request_blocks(&self, now: Tick) {
        self.requested_until.set(now, BLOCK_REQUEST_TIMEOUT_MS);
    }

    /// Whether a request for blocks is pending.
    #[inline]
    pub fn has_block_request(&self, now: Tick) -> bool {
        self.requested_until.is_pending(now, BLOCK_REQUEST_TIMEOUT_MS)
    }

    /// Notes that another gateway is asked for a port.
    pub fn note_port_request(&self, now: Tick) {
        self.lent_until.set(now, LENDING_MS);
    }

    /// Whether another gateway may have a session that is not known here yet, since it was asked for a port.
    pub fn has_port_request(&self, now: Tick) -> bool {
        self.lent_until.is_pending(now, LENDING_MS)
    }

    /// Counts a packet refused since no worker of this gateway has a free port; `in_shard`: its endpoint could use the
    /// blocks of one shard only.
    pub fn count_refused(&self, in_shard: bool) {
        let count = if in_shard { &self.refused_in_shard } else { &self.refused };
        count.fetch_add(1, Relaxed);
    }

    /// Packets refused since no port was free.
    pub fn refused(&self) -> RefusedAllocations {
        RefusedAllocations { whole: self.refused.load(Relaxed), in_shard: self.refused_in_shard.load(Relaxed) }
    }

    /// Number of blocks of a set that a worker owns.
    pub fn claimed_in(&self, blocks: &BlockSet) -> u32 {
        blocks.iter().map(|block| u32::from(self.owner(block.first_port()).is_some())).sum()
    }

    /// Number of blocks with an owner.
    pub fn claimed(&self) -> usize {
        self.block_refs.count() as usize
    }

    /// Sessions that hold a port, quarantined ones included.
    pub fn sessions(&self) -> u64 {
        // A port counted at one worker and released at another makes both counts wrap around; the sum is right.
        let sum = self.sessions.iter().fold(0_u32, |sum, count| sum.wrapping_add(count.load(Relaxed)));
        sum.into()
    }

    /// Counts a session of a worker that has got a port.
    #[inline]
    pub(super) fn session_opened(&self, worker: WorkerId) {
        self.sessions[usize::from(worker.0 & 15)].fetch_add(1, Relaxed);
    }

    /// Counts a session of a worker that has released its port.
    #[inline]
    pub(super) fn session_closed(&self, worker: WorkerId) {
        self.sessions[usize::from(worker.0 & 15)].fetch_sub(1, Relaxed);
    }

    /// Closes the pool if no block has an owner: no block can be claimed any more. Returns whether it is closed. A pool
    /// is closed before it is removed: a worker that still reads an older policy would otherwise claim a block that is
    /// no longer tracked.
    pub fn close(&self) -> bool {
        self.block_refs.close()
    }
}

/// A deadline that all workers set and read; 0: none.
#[derive(Debug, Default)]
struct Deadline(AtomicU32);

impl Deadline {
    /// Sets it `timeout` milliseconds ahead. Every refused packet gets here, and all workers share the cache line, so it
    /// is written at most once a millisecond.
    fn set(&self, now: Tick, timeout: u32) {
        let until = now.plus(timeout).0.max(1);
        if self.0.load(Relaxed) != until {
            self.0.store(until, Relaxed);
        }
    }

    /// Whether it was set `timeout` milliseconds ahead and isn't reached.
    #[inline]
    fn is_pending(&self, now: Tick, timeout: u32) -> bool {
        match self.0.load(Relaxed) {
            0 => false,
            until => !now.reached(Tick(until)) && Tick(until).since(now) <= timeout,
        }
    }
}
