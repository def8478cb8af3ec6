//! Port allocator: one worker's allocation of SNAT ports from the VIPs' blocks.
//!
//! A port may have any number of sessions as long as their remotes differ (RFC 7857 section 3), so "free" is a lookup
//! in the session table. Almost always the first random port is free (RFC 6056 section 3.3.2). If several in a row are
//! not, a port map of the destination is created (`map_cache`), which from then on finds a free port, or that there is
//! none, in a few steps. The map is only an index; the session table decides.
//!
//! Where policy guarantees ports to endpoints, the sum of all guarantees is reserved at the end of the range, for
//! endpoints below their guarantee only. No endpoint can hold more of these ports than its guarantee, so one is always
//! left for an endpoint below its guarantee.

mod availability;

use vipgate_mem::{MemoryError, Slab};

pub use self::availability::Availability;
use super::blocks::BlockSet;
use super::pool::PortPool;
use super::{BLOCKS, BlockId, PortRange, Stripe};
use crate::flow::address::Address;
use crate::flow::ids::{MAX_VIPS, VipId, WorkerId};
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};
use crate::ports::map_cache::PortMapCache;
use crate::ports::selection::{Candidates, Selection};
use crate::ports::vip::VipPorts;

/// Random ports that are tried before a destination gets a map. Of the sessions to one whose ports are 20 % in use, one
/// in 16 000 finds all of them in use; at 50 % one in 64, at 90 % every other.
const MAX_PROBES: u32 = 6;
/// Destinations with a port map at a time, 8.5 KiB each; memory is touched as they are created.
const MAX_MAPS: u8 = 128;

/// Every candidate port is in use toward this destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

/// One worker's blocks of one VIP.
#[derive(Clone, Copy, bytemuck::AnyBitPattern)]
#[repr(C)]
struct Holding {
    /// Stamp of the pool when it last had no free block; 0: none.
    exhausted_at: u64,
    /// Blocks that this worker owns.
    owned: BlockSet,
    /// Number of these blocks.
    owned_count: u32,
    /// Sessions that use a port of the block, toward any remote.
    used: [u32; BLOCKS],
}

/// Class of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationClass {
    /// For an endpoint below the guarantee of its policy: every port is a candidate.
    Guaranteed,
    /// For any other endpoint.
    Ordinary,
}

/// The shard of a VIP's ports to allocate from.
#[derive(Clone, Copy, Debug)]
pub struct PortShard<'a> {
    pub blocks: &'a BlockSet,
    /// The ports to allocate first.
    pub stripe: Stripe,
}

impl PortShard<'_> {
    /// All ports of a VIP.
    pub const ALL: Self = PortShard { blocks: &BlockSet::ALL, stripe: Stripe::ALL };
}

/// Port allocator of one worker.
pub struct Allocator {
    worker: WorkerId,
    workers: u8,
    range: PortRange,
    holdings: Slab<Holding>,
    map_cache: PortMapCache,
    key: HashKey,
    drawn: u64,
    is_predictable: bool,
}

impl std::fmt::Debug for Allocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Allocator").field("worker", &self.worker).field("range", &self.range).finish_non_exhaustive()
    }
}

impl Allocator {
    /// Allocator of worker `worker` of `workers`; `key` makes its choices unpredictable (RFC 6056).
    ///
    /// # Errors
    /// If memory for the tables can't be allocated.
    pub fn new(worker: WorkerId, workers: u8, range: PortRange, key: HashKey) -> Result<Self, MemoryError> {
        Self::with_max_maps(MAX_MAPS, worker, workers, range, key)
    }

    /// An allocator with at most `max_maps` port maps.
    pub(super) fn with_max_maps(
        max_maps: u8,
        worker: WorkerId,
        workers: u8,
        range: PortRange,
        key: HashKey,
    ) -> Result<Self, MemoryError> {
        let (holdings, map_cache) = (Slab::new(MAX_VIPS)?, PortMapCache::new(max_maps)?);
        Ok(Self { worker, workers: workers.max(1), range, holdings, map_cache, key, drawn: 0, is_predictable: true })
    }

    /// Allocates a port of `vip` for which `is_free` returns true, and counts it as used: from the blocks of the shard,
    /// if one is given, and from its stripe as long as one is found there quickly. `translated` is the session's
    /// translated tuple; its source port is ignored.
    ///
    /// # Errors
    /// If there is none in the blocks that this worker owns or can claim.
    #[inline]
    pub fn allocate<A: Address>(
        &mut self,
        (vip, part): (&VipPorts, PortShard<'_>),
        translated: &Tuple<A>,
        claim: AllocationClass,
        now: Tick,
        is_free: impl Fn(u16) -> bool,
    ) -> Result<u16, Exhausted> {
        let range = match claim {
            AllocationClass::Guaranteed => self.range,
            AllocationClass::Ordinary => vip.ordinary(self.range).ok_or(Exhausted)?,
        };
        // A destination with a map is not probed at random: at 99 % use that would almost always fail.
        let has_map = self.has_map(vip, translated);
        let PortShard { blocks, stripe } = part;
        let of = Candidates { vip, blocks, range, stripe };
        let port = if has_map { None } else { self.probe(of, &is_free) };
        self.is_predictable = port.is_some();
        let port = match port {
            Some(port) => port,
            None => self.allocate_from_map(of, destination(&self.key, translated), now, &is_free)?,
        };
        self.holdings[usize::from(vip.id.0)].used[BlockId::of(port).index()] += 1;
        vip.pool.session_opened(self.worker);
        Ok(port)
    }

    /// Whether the next allocation most likely returns a random port: the last one has. Ports from maps can't be previewed.
    #[inline]
    pub fn is_predictable(&self) -> bool {
        self.is_predictable
    }

    /// The port that an ordinary allocation will most likely return, after `ahead` others of whichever VIP: so that its
    /// place in the session table can be prefetched. `None` if nothing can be said.
    #[inline]
    pub fn preview(&self, (vip, part): (&VipPorts, PortShard<'_>), ahead: u64) -> Option<u16> {
        let PortShard { blocks, stripe } = part;
        let candidates = Candidates { vip, blocks, range: vip.ordinary(self.range)?, stripe };
        let owned = &self.holdings[usize::from(vip.id.0)].owned;
        let choice = Selection { owned, candidates, random: self.key.draw(self.drawn + 1 + ahead) };
        choice.port_of(choice.owned_block()?)
    }

    #[inline]
    fn has_map<A: Address>(&self, vip: &VipPorts, translated: &Tuple<A>) -> bool {
        !self.map_cache.is_empty() && self.map_cache.find(vip.id, destination(&self.key, translated)).is_some()
    }

    /// Reserves the port of a restored or standby session; false if another worker owns its block.
    pub fn reserve(&mut self, vip: &VipPorts, port: u16) -> bool {
        let block = BlockId::of(port);
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        let is_owned = holding.owned.contains(block) || holding.claim_any(&vip.pool, block, self.worker);
        if is_owned {
            holding.used[block.index()] += 1;
            vip.pool.session_opened(self.worker);
        }
        is_owned
    }

    /// Claims this worker's even share of the blocks of a VIP of which it owns some. Called after all workers have
    /// reserved the ports of their sessions, so that none claims a block that another worker's sessions use.
    pub fn claim_even_share(&mut self, vip: &VipPorts) {
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        if holding.owned_count > 0 {
            holding.claim_share(&vip.pool, self.range, self.worker, self.workers);
        }
    }

    /// Releases the port of a session that is removed, after its quarantine. `translated` is the session's translated
    /// tuple.
    pub fn release<A: Address>(&mut self, vip: &VipPorts, translated: &Tuple<A>) {
        let port = translated.source_port;
        vip.pool.session_closed(self.worker);
        let used = &mut self.holdings[usize::from(vip.id.0)].used[BlockId::of(port).index()];
        debug_assert!(*used > 0, "an unused port was released");
        *used = used.saturating_sub(1);
        if !self.map_cache.is_empty() {
            self.map_cache.release(vip.id, destination(&self.key, translated), port);
        }
    }

    /// Releases the unused blocks of a VIP that policy has dropped, or of which another worker requests blocks.
    pub fn release_unused_blocks(&mut self, vip: &VipPorts, now: Tick) {
        if !vip.retired && !vip.pool.has_block_request(now) {
            return;
        }
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        let mut released = BlockSet::default();
        for block in holding.owned.iter().filter(|block| holding.used[block.index()] == 0) {
            vip.pool.release_block(block, self.worker);
            released.insert(block);
            holding.owned_count -= 1;
        }
        holding.owned.remove_all(&released);
        if released != BlockSet::default() {
            self.map_cache.forget_blocks(vip.id, &released);
        }
    }

    /// Blocks of a VIP that this worker owns.
    pub fn owned_blocks(&self, vip: VipId) -> u32 {
        self.holdings[usize::from(vip.0)].owned_count
    }

    /// Number of blocks of a set that have ports in the range, and number of those that this worker owns.
    pub fn count_blocks_in(&self, vip: VipId, blocks: &BlockSet) -> (u32, u32) {
        let owned = &self.holdings[usize::from(vip.0)].owned;
        let words = (0..BLOCKS / 64).map(|word| (blocks.0[word] & self.range.block_mask(word), owned.0[word]));
        words.fold((0, 0), |(all, own), (set, owned)| (all + set.count_ones(), own + (set & owned).count_ones()))
    }

    /// Blocks of a VIP of which this worker uses at least one port.
    pub fn used_blocks(&self, vip: VipId) -> u32 {
        let holding = &self.holdings[usize::from(vip.0)];
        // Of thousands of VIPs, almost all are idle or owned by other gateways.
        if holding.owned_count == 0 {
            return 0;
        }
        holding.used.iter().map(|&sessions| u32::from(sessions > 0)).sum()
    }

    #[inline]
    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.key.draw(self.drawn)
    }

    #[inline]
    fn probe(&mut self, of: Candidates<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        self.probe_random(of, is_free).or_else(|| self.probe_wider(of, is_free))
    }

    /// Probes wider stripes, after the stripe itself: ports whose own turn is the furthest away first.
    #[cold]
    fn probe_wider(&mut self, of: Candidates<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        let mut wider = std::iter::successors(of.stripe.widened(), |stripe| stripe.widened());
        wider.find_map(|stripe| self.probe_random(Candidates { stripe, ..of }, is_free))
    }

    #[inline]
    fn probe_random(&mut self, of: Candidates<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        for _ in 0..MAX_PROBES {
            let random = self.draw();
            let owned = &self.holdings[usize::from(of.vip.id.0)].owned;
            let choice = Selection { owned, candidates: of, random };
            if let Some(port) = choice.port_of(choice.owned_block()?)
                && is_free(port)
            {
                return Some(port);
            }
        }
        None
    }

    /// Allocates from the destination's port map, when random probes have failed or this worker owns no block yet.
    #[cold]
    #[inline(never)]
    fn allocate_from_map(
        &mut self,
        of: Candidates<'_>,
        destination: u64,
        now: Tick,
        is_free: &impl Fn(u16) -> bool,
    ) -> Result<u16, Exhausted> {
        let vip = of.vip;
        if self.owned_blocks(vip.id) == 0 {
            if !self.claim_more(vip) {
                vip.pool.request_blocks(now);
                return Err(Exhausted);
            }
            if let Some(port) = self.probe(of, is_free) {
                return Ok(port);
            }
        }
        // When random probes fail, all stripes are used.
        let of = Candidates { stripe: Stripe::ALL, ..of };
        let index = if let Some(index) = self.map_cache.find(vip.id, destination) {
            self.map_cache.touch(index);
            index
        } else {
            self.map_cache.insert(vip.id, destination)
        };
        loop {
            let random = self.draw();
            let owned = &self.holdings[usize::from(vip.id.0)].owned;
            let choice = Selection { owned, candidates: of, random };
            let map = self.map_cache.map(index);
            if let Some(port) = map.allocate(&choice, is_free) {
                return Ok(port);
            }
            if !map.revalidate(&choice, now, is_free) && !self.claim_more(vip) {
                vip.pool.request_blocks(now);
                return Err(Exhausted);
            }
        }
    }

    /// Claims free blocks: an even share, spread over the range, if the worker has none; else all that are left.
    /// Returns whether there was one.
    fn claim_more(&mut self, vip: &VipPorts) -> bool {
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        let stamp = vip.pool.stamp();
        if holding.exhausted_at == stamp {
            return false;
        }
        let before = holding.owned_count;
        if before == 0 {
            holding.claim_share(&vip.pool, self.range, self.worker, self.workers);
        }
        if holding.owned_count == before {
            for block in 0..BLOCKS {
                holding.claim(&vip.pool, BlockId::at(block), self.range, self.worker);
            }
        }
        let has_claimed = holding.owned_count > before;
        if !has_claimed {
            holding.exhausted_at = stamp;
        }
        has_claimed
    }
}

impl Holding {
    fn claim(&mut self, pool: &PortPool, block: BlockId, range: PortRange, worker: WorkerId) {
        if range.mask(block) != 0 {
            self.claim_any(pool, block, worker);
        }
    }

    /// Claims a block, inside or outside the range; returns whether it was free.
    fn claim_any(&mut self, pool: &PortPool, block: BlockId, worker: WorkerId) -> bool {
        let is_claimed = pool.claim(block, worker);
        if is_claimed {
            self.owned.insert(block);
            self.owned_count += 1;
        }
        is_claimed
    }

    /// Claims an even share of the blocks, spread over the range.
    fn claim_share(&mut self, pool: &PortPool, range: PortRange, worker: WorkerId, workers: u8) {
        for block in (usize::from(worker.0)..BLOCKS).step_by(workers.into()) {
            self.claim(pool, BlockId::at(block), range, worker);
        }
    }
}

/// Hash of a destination: the translated tuple without its source port.
#[inline]
fn destination<A: Address>(key: &HashKey, translated: &Tuple<A>) -> u64 {
    key.hash(&Tuple { source_port: 0, ..*translated })
}
