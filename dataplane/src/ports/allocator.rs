//! How a session gets a port: one worker's side of the VIPs' blocks.
//!
//! A port may stand for any number of sessions as long as their far sides differ (RFC 7857 section 3), so "free" is a
//! question to the session table. Almost always the first random port is free (RFC 6056 section 3.3.2). If several in a
//! row are not, the destination is crowded: a map of its ports is made, and from then on finds a free one, or the
//! truth that there is none, in a few steps. The map is bounded help; the session table has the last word.
//!
//! Where policy guarantees ports to endpoints, as many as all of them together may claim stand at the end of the range, and only
//! who has less than its guarantee gets one of them. Nobody can hold more of them than its guarantee, so there is always one left
//! for who has less.

mod outlook;

use vipgate_mem::{MemoryError, Slab};

pub use self::outlook::Outlook;

use super::blocks::{BlockSet, first_from};
use super::choice::{Choice, Of};
use super::crowded::Crowded;
use super::pool::{PortPool, WorkerId};
use super::{BLOCKS, BlockId, PortRange, Stripe};
use crate::address::Address;
use crate::session::tuple::{HashKey, Tuple};
use crate::snapshot::build::MOST_VIPS;
use crate::snapshot::policy::{Vip, VipId};
use crate::time::Tick;

/// Random ports that are tried before a destination counts as crowded. Of the sessions to one that is filled to 20 %,
/// one in 16 000 finds all of them in use; at 50 % one in 64, at 90 % every other.
const RANDOM_TRIES: u32 = 6;
/// Destinations that have a map of their ports at a time, 8.5 KiB each; memory is used as they come.
const MOST_CROWDED: u8 = 128;

/// Every port that may be given out is in use toward this destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

/// What one worker has of one VIP.
#[derive(Clone, Copy, bytemuck::AnyBitPattern)]
#[repr(C)]
struct Holding {
    /// The stamp of the pool when it last had no free block; 0 is none.
    nothing_at: u64,
    /// Blocks that are this worker's.
    owned: BlockSet,
    /// How many these are.
    owned_count: u32,
    /// Sessions that use a port of the block, whoever their far side is.
    used: [u32; BLOCKS],
}

/// Who asks for a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// An endpoint that has less than what policy guarantees it: it may have every port.
    Guaranteed,
    /// Any other endpoint.
    Ordinary,
}

/// The part of a VIP's ports that is asked for one.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The blocks that it has.
    pub blocks: &'a BlockSet,
    /// Which of their ports first.
    pub stripe: Stripe,
}

impl Part<'_> {
    /// All ports.
    const ALL: Self = Part { blocks: &BlockSet::ALL, stripe: Stripe::ALL };
}

/// One worker's ports.
pub struct Allocator {
    worker: WorkerId,
    workers: u8,
    range: PortRange,
    holdings: Slab<Holding>,
    crowded: Crowded,
    key: HashKey,
    drawn: u64,
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
        Self::with_most_crowded(MOST_CROWDED, worker, workers, range, key)
    }

    /// The same, with maps for `most_crowded` destinations.
    pub(super) fn with_most_crowded(
        most_crowded: u8,
        worker: WorkerId,
        workers: u8,
        range: PortRange,
        key: HashKey,
    ) -> Result<Self, MemoryError> {
        let (holdings, crowded) = (Slab::new(MOST_VIPS)?, Crowded::new(most_crowded)?);
        Ok(Self { worker, workers: workers.max(1), range, holdings, crowded, key, drawn: 0 })
    }

    /// A port of `vip` for which `is_free` says yes, and counts it as used: in one of the blocks that are given with it, if they are, and in
    /// their stripe as long as one is found there soon. `translated` is the session's first packet as it leaves; its source port may be
    /// anything yet.
    ///
    /// # Errors
    /// When there is none, now and among the blocks that this worker has or could have.
    #[inline]
    pub fn allocate<A: Address>(
        &mut self,
        (vip, part): (&Vip, Option<Part<'_>>),
        translated: &Tuple<A>,
        claim: Claim,
        now: Tick,
        is_free: impl Fn(u16) -> bool,
    ) -> Result<u16, Exhausted> {
        let range = match claim {
            Claim::Guaranteed => self.range,
            Claim::Ordinary => vip.ordinary(self.range).ok_or(Exhausted)?,
        };
        // A destination with a map doesn't guess: at 99 % fill it would do so in vain.
        let is_crowded =
            !self.crowded.is_empty() && self.crowded.find(vip.id, destination(&self.key, translated)).is_some();
        let Part { blocks, stripe } = part.unwrap_or(Part::ALL);
        let of = Of { vip, blocks, range, stripe };
        let port = if is_crowded { None } else { self.guess(of, &is_free) };
        let port = match port {
            Some(port) => port,
            None => self.allocate_crowded(of, destination(&self.key, translated), now, &is_free)?,
        };
        self.holdings[usize::from(vip.id.0)].used[BlockId::of(port).index()] += 1;
        vip.pool.held_by(self.worker);
        Ok(port)
    }

    /// Takes a port that a session of a former process holds; false if its block is another worker's by now.
    pub fn adopt(&mut self, vip: &Vip, port: u16) -> bool {
        let block = BlockId::of(port);
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        let got = holding.owned.contains(block) || holding.adopt(&vip.pool, block, self.worker);
        if got {
            holding.used[block.index()] += 1;
            vip.pool.held_by(self.worker);
        }
        got
    }

    /// Takes this worker's even share of the blocks of a VIP that it has adopted some of; after all workers have adopted
    /// theirs, so that none takes what another one's sessions hold.
    pub fn claim_share(&mut self, vip: &Vip) {
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        if holding.owned_count > 0 {
            holding.claim_share(&vip.pool, self.range, self.worker, self.workers);
        }
    }

    /// Counts the port of a session as unused: the session is gone and its port has rested. `translated` is its first
    /// packet as it left.
    pub fn release<A: Address>(&mut self, vip: &Vip, translated: &Tuple<A>) {
        let port = translated.source_port;
        vip.pool.left_by(self.worker);
        let used = &mut self.holdings[usize::from(vip.id.0)].used[BlockId::of(port).index()];
        debug_assert!(*used > 0, "a port was released that nobody used");
        *used = used.saturating_sub(1);
        if !self.crowded.is_empty() {
            self.crowded.release(vip.id, destination(&self.key, translated), port);
        }
    }

    /// Gives back the blocks that nothing uses, where policy has dropped the VIP or another worker asks for them.
    pub fn give_back_unused(&mut self, vip: &Vip, now: Tick) {
        if !vip.retired && !vip.pool.is_asked_for_blocks(now) {
            return;
        }
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        let mut given = BlockSet::default();
        for block in holding.owned.iter().filter(|block| holding.used[block.index()] == 0) {
            vip.pool.give_back(block, self.worker);
            given.insert(block);
            holding.owned_count -= 1;
        }
        holding.owned.remove_all(&given);
        if given != BlockSet::default() {
            self.crowded.forget(vip.id, &given);
        }
    }

    /// Blocks of a VIP that this worker owns.
    pub fn owned_blocks(&self, vip: VipId) -> u32 {
        self.holdings[usize::from(vip.0)].owned_count
    }

    /// Those of these blocks that have ports to give out, and how many of those this worker owns.
    pub fn blocks_among(&self, vip: VipId, blocks: &BlockSet) -> (u32, u32) {
        let owned = &self.holdings[usize::from(vip.0)].owned;
        let words = (0..BLOCKS / 64).map(|word| (blocks.0[word] & self.range.blocks_of_word(word), owned.0[word]));
        words.fold((0, 0), |(all, own), (among, owned)| (all + among.count_ones(), own + (among & owned).count_ones()))
    }

    /// Blocks of a VIP of which at least one port is in use here.
    pub fn used_blocks(&self, vip: VipId) -> u32 {
        let holding = &self.holdings[usize::from(vip.0)];
        // Almost all VIPs of thousands are somebody else's, or asleep.
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
    fn guess(&mut self, of: Of<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        self.try_random(of, is_free).or_else(|| self.guess_wider(of, is_free))
    }

    /// Where a stripe is in use, what is the turn of others as late as can be.
    #[cold]
    fn guess_wider(&mut self, of: Of<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        let mut wider = std::iter::successors(of.stripe.wider(), |stripe| stripe.wider());
        wider.find_map(|stripe| self.try_random(Of { stripe, ..of }, is_free))
    }

    #[inline]
    fn try_random(&mut self, of: Of<'_>, is_free: &impl Fn(u16) -> bool) -> Option<u16> {
        for _ in 0..RANDOM_TRIES {
            let random = self.draw();
            let owned = &self.holdings[usize::from(of.vip.id.0)].owned;
            let choice = Choice { owned, of, random };
            let block = first_from(choice.block(), |word| choice.blocks(word))?;
            let usable = choice.usable(block);
            if usable == 0 {
                continue;
            }
            let port = block.first_port() + choice.bit(usable) as u16;
            if is_free(port) {
                return Some(port);
            }
        }
        None
    }

    /// What a destination gets where guesses fail, or where this worker has no block yet.
    #[cold]
    #[inline(never)]
    fn allocate_crowded(
        &mut self,
        of: Of<'_>,
        destination: u64,
        now: Tick,
        is_free: &impl Fn(u16) -> bool,
    ) -> Result<u16, Exhausted> {
        let vip = of.vip;
        if self.owned_blocks(vip.id) == 0 {
            if !self.claim_more(vip) {
                vip.pool.ask_for_blocks(now);
                return Err(Exhausted);
            }
            if let Some(port) = self.guess(of, is_free) {
                return Ok(port);
            }
        }
        // Where guesses fail, what a stripe avoids is the smaller evil.
        let of = Of { stripe: Stripe::ALL, ..of };
        let place = if let Some(place) = self.crowded.find(vip.id, destination) {
            self.crowded.keep(place);
            place
        } else {
            self.crowded.add(vip.id, destination)
        };
        loop {
            let random = self.draw();
            let owned = &self.holdings[usize::from(vip.id.0)].owned;
            let choice = Choice { owned, of, random };
            let map = self.crowded.map(place);
            if let Some(port) = map.take(&choice, is_free) {
                return Ok(port);
            }
            if !map.recheck(&choice, now, is_free) && !self.claim_more(vip) {
                vip.pool.ask_for_blocks(now);
                return Err(Exhausted);
            }
        }
    }

    /// Takes blocks that nobody has: an even share, spread over the range, where the worker has none; else whatever is
    /// left. Says whether there was one.
    fn claim_more(&mut self, vip: &Vip) -> bool {
        let holding = &mut self.holdings[usize::from(vip.id.0)];
        let stamp = vip.pool.stamp();
        if holding.nothing_at == stamp {
            return false;
        }
        let had = holding.owned_count;
        if had == 0 {
            holding.claim_share(&vip.pool, self.range, self.worker, self.workers);
        }
        if holding.owned_count == had {
            for block in 0..BLOCKS {
                holding.claim(&vip.pool, BlockId::at(block), self.range, self.worker);
            }
        }
        let any = holding.owned_count > had;
        if !any {
            holding.nothing_at = stamp;
        }
        any
    }
}

impl Holding {
    fn claim(&mut self, pool: &PortPool, block: BlockId, range: PortRange, worker: WorkerId) {
        if range.mask(block) != 0 {
            self.adopt(pool, block, worker);
        }
    }

    /// Takes a block whatever the range says now; says whether it was free.
    fn adopt(&mut self, pool: &PortPool, block: BlockId, worker: WorkerId) -> bool {
        let got = pool.claim(block, worker);
        if got {
            self.owned.insert(block);
            self.owned_count += 1;
        }
        got
    }

    /// Takes an even share of the blocks, spread over the range.
    fn claim_share(&mut self, pool: &PortPool, range: PortRange, worker: WorkerId, workers: u8) {
        for block in (usize::from(worker.0)..BLOCKS).step_by(workers.into()) {
            self.claim(pool, BlockId::at(block), range, worker);
        }
    }
}

/// What tells far sides apart: everything of a session's first packet as it leaves, but its own port.
#[inline]
fn destination<A: Address>(key: &HashKey, translated: &Tuple<A>) -> u64 {
    key.hash(&Tuple { source_port: 0, ..*translated })
}
