//! How a session gets a port: one worker's side of the VIPs' blocks.
//!
//! A port may stand for any number of sessions as long as their far sides differ (RFC 7857 section 3), so "free" is a
//! question to the session table. Almost always the first random port is free; if several are not, the blocks are
//! searched to the last port. "Exhausted" is the truth, and it is remembered for a moment, so that somebody who keeps
//! asking for a port that isn't there doesn't cost a search each time.

use vipgate_mem::{MemoryError, Slab};

use super::pool::{PortPool, WorkerId};
use super::{BLOCKS, BlockId, PortRange};
use crate::session::tuple::HashKey;
use crate::snapshot::build::MOST_VIPS;
use crate::snapshot::policy::{Vip, VipId};
use crate::time::Tick;

/// Random ports that are tried before the search: at 90 % fill, half of the sessions find theirs here.
const RANDOM_TRIES: u64 = 6;
/// Destinations without a free port that are remembered.
const REMEMBERED: usize = 64;
/// For how long.
const REMEMBERED_MS: u32 = 50;

/// Every port that may be given out is in use toward this destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

/// What one worker has of one VIP.
#[derive(Clone, Copy, bytemuck::AnyBitPattern)]
#[repr(C)]
struct Holding {
    /// Blocks that are this worker's, as bits.
    owned: [u64; BLOCKS / 64],
    /// Sessions that use a port of the block, whoever their far side is.
    used: [u32; BLOCKS],
}

/// One worker's ports.
pub struct Allocator {
    worker: WorkerId,
    workers: u8,
    range: PortRange,
    holdings: Slab<Holding>,
    key: HashKey,
    drawn: u64,
    /// Hashes of (VIP, far side) that had no free port, and when.
    exhausted: [(u64, Tick); REMEMBERED],
}

impl std::fmt::Debug for Allocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Allocator").field("worker", &self.worker).field("range", &self.range).finish_non_exhaustive()
    }
}

impl Allocator {
    /// The ports of worker `worker` of `workers`; `key` makes its choices unpredictable (RFC 6056).
    ///
    /// # Errors
    /// When there is no memory for the tables.
    pub fn new(worker: WorkerId, workers: u8, range: PortRange, key: HashKey) -> Result<Self, MemoryError> {
        let exhausted = [(0, Tick::default()); REMEMBERED];
        Ok(Self { worker, workers: workers.max(1), range, holdings: Slab::new(MOST_VIPS)?, key, drawn: 0, exhausted })
    }

    /// A port of `vip` for which `is_free` says yes, and counts it as used. `destination` is a hash of everything that
    /// tells far sides apart.
    ///
    /// # Errors
    /// When there is none.
    pub fn allocate(
        &mut self,
        vip: &Vip,
        destination: u64,
        now: Tick,
        is_free: impl Fn(u16) -> bool,
    ) -> Result<u16, Exhausted> {
        let remembered = &self.exhausted[destination as usize % REMEMBERED];
        if remembered.0 == destination && now.since(remembered.1) < REMEMBERED_MS {
            return Err(Exhausted);
        }
        if self.owned_blocks(vip.id) == 0 {
            self.claim_share(vip);
        }
        let port = self
            .try_random(vip, &is_free)
            .or_else(|| self.search(vip, &is_free))
            .or_else(|| self.claim_free(vip).then(|| self.search(vip, &is_free)).flatten());
        let Some(port) = port else {
            vip.pool.ask_for_blocks(now);
            self.exhausted[destination as usize % REMEMBERED] = (destination, now);
            return Err(Exhausted);
        };
        self.holdings[usize::from(vip.id.0)].used[usize::from(BlockId::of(port).0)] += 1;
        Ok(port)
    }

    /// Takes a port that a session of a former process holds; false if its block is another worker's by now.
    pub fn adopt(&mut self, vip: &Vip, port: u16) -> bool {
        let block = usize::from(BlockId::of(port).0);
        let holding = &self.holdings[usize::from(vip.id.0)];
        let owned = holding.owned[block / 64] >> (block % 64) & 1 == 1;
        let got = owned || self.claim(vip.id, &vip.pool, block);
        if got {
            self.holdings[usize::from(vip.id.0)].used[block] += 1;
        }
        got
    }

    /// Counts a port as unused: its session is gone and it has rested.
    pub fn release(&mut self, vip: VipId, port: u16) {
        let used = &mut self.holdings[usize::from(vip.0)].used[usize::from(BlockId::of(port).0)];
        debug_assert!(*used > 0, "a port was released that nobody used");
        *used = used.saturating_sub(1);
    }

    /// Gives back the blocks that nothing uses, where policy has dropped the VIP or another worker asks for them.
    pub fn give_back_unused(&mut self, vip: &Vip, now: Tick) {
        if !vip.retired && !vip.pool.is_asked_for_blocks(now) {
            return;
        }
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        for (word, owned) in holding.owned.iter_mut().enumerate() {
            let mut bits = *owned;
            while bits != 0 {
                let block = word * 64 + bits.trailing_zeros() as usize;
                if holding.used[block] == 0 {
                    *owned &= !(1 << (block % 64));
                    vip.pool.give_back(block_id(block), self.worker);
                }
                bits &= bits - 1;
            }
        }
    }

    /// Blocks of a VIP that this worker owns.
    pub fn owned_blocks(&self, vip: VipId) -> u32 {
        self.holdings[usize::from(vip.0)].owned.iter().map(|word| word.count_ones()).sum()
    }

    /// Takes this worker's even share of the blocks, spread over the whole range.
    fn claim_share(&mut self, vip: &Vip) {
        let (worker, workers) = (usize::from(self.worker.0), usize::from(self.workers));
        for block in (0..BLOCKS).filter(|block| block % workers == worker) {
            self.claim(vip.id, &vip.pool, block);
        }
    }

    /// Takes whatever nobody has; says whether that was anything.
    fn claim_free(&mut self, vip: &Vip) -> bool {
        let mut any = false;
        for block in 0..BLOCKS {
            any |= self.claim(vip.id, &vip.pool, block);
        }
        any
    }

    fn claim(&mut self, vip: VipId, pool: &PortPool, block: usize) -> bool {
        let got = self.range.mask(block_id(block)) != 0 && pool.claim(block_id(block), self.worker);
        if got {
            self.holdings[usize::from(vip.0)].owned[block / 64] |= 1 << (block % 64);
        }
        got
    }

    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.key.draw(self.drawn)
    }

    fn try_random(&mut self, vip: &Vip, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        for _ in 0..RANDOM_TRIES {
            let random = self.draw();
            let block = self.next_owned(vip.id, random as usize % BLOCKS)?;
            let usable = self.usable(vip, block);
            if usable == 0 {
                continue;
            }
            let turn = (random >> 32) as u32 % 64;
            let port = block_id(block).first_port() + ((usable.rotate_right(turn).trailing_zeros() + turn) % 64) as u16;
            if is_free(port) {
                return Some(port);
            }
        }
        None
    }

    /// Asks for every port of every own block, from a random one on.
    fn search(&mut self, vip: &Vip, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        let start = self.draw() as usize % BLOCKS;
        let owned = self.holdings[usize::from(vip.id.0)].owned;
        for block in (start..BLOCKS).chain(0..start).filter(|block| owned[block / 64] >> (block % 64) & 1 == 1) {
            let mut usable = self.usable(vip, block);
            while usable != 0 {
                let port = block_id(block).first_port() + usable.trailing_zeros() as u16;
                if is_free(port) {
                    return Some(port);
                }
                usable &= usable - 1;
            }
        }
        None
    }

    fn usable(&self, vip: &Vip, block: usize) -> u64 {
        self.range.mask(block_id(block)) & !vip.reserved_mask(block_id(block))
    }

    /// The first own block at or behind `from`, going round.
    fn next_owned(&self, vip: VipId, from: usize) -> Option<usize> {
        let owned = &self.holdings[usize::from(vip.0)].owned;
        let (word, bit) = (from / 64, from % 64);
        let here = owned[word] & (u64::MAX << bit);
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        (1..=owned.len())
            .map(|step| (word + step) % owned.len())
            .find_map(|word| (owned[word] != 0).then(|| word * 64 + owned[word].trailing_zeros() as usize))
    }
}

fn block_id(block: usize) -> BlockId {
    BlockId(block as u16)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashSet;
    use std::sync::Arc;

    use super::*;
    use crate::snapshot::spec::Announce;

    fn vip(reserved: &[u16]) -> Vip {
        Vip {
            address: [192, 0, 2, 10].into(),
            id: VipId(3),
            pool: Arc::default(),
            retired: false,
            announce: Announce::L2,
            reserved: reserved.into(),
        }
    }

    fn allocator(worker: u8, workers: u8, range: PortRange) -> Allocator {
        Allocator::new(WorkerId(worker), workers, range, HashKey::new([5, 6, 7, 8])).unwrap()
    }

    #[test]
    fn every_port_of_the_range_but_the_reserved_ones_is_given_out_once() {
        let vip = vip(&[80, 1024, 2000, 65535]);
        let mut ports = allocator(0, 1, PortRange::default());
        let taken = RefCell::new(HashSet::new());
        while let Ok(port) = ports.allocate(&vip, 1, Tick(0), |port| !taken.borrow().contains(&port)) {
            assert!(taken.borrow_mut().insert(port), "port {port} was given twice");
        }
        assert_eq!(taken.borrow().len(), 64_512 - 3);
        assert!(taken.borrow().iter().all(|port| *port >= 1024 && ![1024, 2000, 65535].contains(port)));
    }

    #[test]
    fn a_refusal_is_remembered_only_for_a_moment_and_only_for_its_destination() {
        let vip = vip(&[]);
        let mut ports = allocator(0, 1, PortRange::new(5000, 5000).unwrap());
        assert_eq!(ports.allocate(&vip, 1, Tick(0), |_| true), Ok(5000));
        assert_eq!(ports.allocate(&vip, 1, Tick(0), |_| false), Err(Exhausted));
        assert_eq!(ports.allocate(&vip, 2, Tick(0), |_| true), Ok(5000), "another far side");
        assert_eq!(ports.allocate(&vip, 1, Tick(10), |_| true), Err(Exhausted));
        assert_eq!(ports.allocate(&vip, 1, Tick(REMEMBERED_MS), |_| true), Ok(5000));
    }

    #[test]
    fn workers_never_own_the_same_block_and_lend_what_they_do_not_use() {
        let vip = vip(&[]);
        let range = PortRange::new(1024, 1024 + 4 * 64 - 1).unwrap();
        let (mut one, mut two) = (allocator(0, 2, range), allocator(1, 2, range));
        let taken = RefCell::new(HashSet::new());
        let take = |ports: &mut Allocator, now| {
            let port = ports.allocate(&vip, 9, Tick(now), |port| !taken.borrow().contains(&port))?;
            assert!(taken.borrow_mut().insert(port));
            assert_eq!(vip.pool.owner(port), Some(ports.worker));
            Ok::<u16, Exhausted>(port)
        };
        take(&mut two, 0).unwrap();
        while take(&mut one, 0).is_ok() {}
        assert_eq!(taken.borrow().len(), 2 * 64 + 1, "the first took its share; the second holds the other");
        two.give_back_unused(&vip, Tick(2_000));
        assert_eq!(two.owned_blocks(vip.id), 2, "nobody asks any more");
        assert_eq!(take(&mut one, 2_000), Err(Exhausted));
        two.give_back_unused(&vip, Tick(2_100));
        while take(&mut one, 3_000).is_ok() {}
        assert_eq!(taken.borrow().len(), 3 * 64 + 1, "the block without sessions has changed hands");
    }
}
