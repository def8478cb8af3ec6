//! Random port selection (RFC 6056): the candidate ports, and the choice among them by a random number.

use super::blocks::{BlockSet, WORDS, first_from};
use super::{BlockId, PortRange, Stripe};
use crate::ports::vip::VipPorts;

/// Candidate ports of an allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidates<'a> {
    /// The VIP, which reserves some of its ports.
    pub(super) vip: &'a VipPorts,
    /// Blocks to allocate from.
    pub(super) blocks: &'a BlockSet,
    /// Port range to allocate from.
    pub(super) range: PortRange,
    /// Stripe to allocate from.
    pub(super) stripe: Stripe,
}

/// Candidates and the random number that selects one (RFC 6056 section 3.3).
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    /// Blocks that the worker owns.
    pub(super) owned: &'a BlockSet,
    /// Candidate ports.
    pub(super) candidates: Candidates<'a>,
    /// Random number: its lower half selects a block, its upper six bits a port.
    pub(super) random: u64,
}

impl Selection<'_> {
    /// A random block of the range, uniformly.
    #[inline]
    pub(super) fn random_block(&self) -> BlockId {
        BlockId(
            self.candidates.range.first_block().0 + below(self.random, self.candidates.range.blocks() as u32) as u16,
        )
    }

    /// The first block from a random one on that the worker owns; `None` if it owns none.
    #[inline]
    pub(super) fn owned_block(&self) -> Option<BlockId> {
        first_from(self.random_block(), |word| self.block_word(word))
    }

    /// A random port of a block; `None` if all its ports are reserved.
    #[inline]
    pub(super) fn port_of(&self, block: BlockId) -> Option<u16> {
        let usable = self.usable(block);
        (usable != 0).then(|| block.first_port() + self.random_bit(usable) as u16)
    }

    /// Candidate ports of `block`, as bits.
    #[inline]
    pub(super) fn usable(&self, block: BlockId) -> u64 {
        self.candidates.range.mask(block) & self.candidates.stripe.ports() & !self.candidates.vip.reserved_mask(block)
    }

    /// A random port of `ports`, which must not be empty, as its bit number; uniformly.
    #[inline]
    pub(super) fn random_bit(&self, ports: u64) -> u32 {
        let bit = (self.random >> 58) as u32;
        if ports >> bit & 1 == 1 { bit } else { nth_one(ports, below(self.mixed(), ports.count_ones())) }
    }

    /// Candidate blocks that the worker owns, as bits of one word.
    #[inline]
    pub(super) fn block_word(&self, word: usize) -> u64 {
        self.owned.0[word] & self.candidates.blocks.0[word] & self.candidates.range.block_mask(word)
    }

    /// Whether ports of a block may be allocated.
    pub(super) fn may_use(&self, block: BlockId) -> bool {
        self.owned.contains(block) && self.candidates.blocks.contains(block)
    }

    /// A random block of the set with the words `word`, uniformly. The next block behind a full one would let runs of
    /// full blocks grow and make the ports behind them predictable.
    #[inline]
    pub(super) fn random_block_of(&self, word: impl Fn(usize) -> u64) -> Option<BlockId> {
        let block = self.random_block();
        if word(block.index() / 64) >> (block.index() % 64) & 1 == 1 {
            return Some(block);
        }
        let counts: [u32; WORDS] = std::array::from_fn(|at| word(at).count_ones());
        let mut nth = below(self.mixed() >> 32, counts.iter().sum());
        for (at, count) in counts.into_iter().enumerate() {
            if nth < count {
                return Some(BlockId::at(at * 64 + nth_one(word(at), nth) as usize));
            }
            nth -= count;
        }
        None
    }

    /// Remixed bits of the random number, for a second choice after one that failed.
    #[inline]
    fn mixed(&self) -> u64 {
        self.random.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A number below `limit` from 32 random bits; 0 if `limit` is 0.
#[inline]
fn below(random: u64, limit: u32) -> u32 {
    (((random & 0xffff_ffff) * u64::from(limit)) >> 32) as u32
}

/// Position of the set bit number `n`.
#[inline]
fn nth_one(mut bits: u64, n: u32) -> u32 {
    for _ in 0..n {
        bits &= bits - 1;
    }
    bits.trailing_zeros()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::flow::tuple::HashKey;
    use crate::ports::tests::vip;

    #[test]
    fn blocks_and_ports_are_selected_uniformly() {
        const DRAWS: u32 = 64_000;
        let vip = vip(&Arc::default(), &[]);
        let key =
            HashKey::new([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaef1_7502_108e_f2d9, 0x632b_e593_8a41_7d6f]);
        // The last one of each is behind a long gap.
        let (blocks, ports) = ([16, 17, 18, 19, 64, 65, 200, 900], [0, 1, 2, 3, 4, 5, 6, 63]);
        let mut owned = BlockSet::default();
        for block in blocks {
            owned.insert(BlockId(block));
        }
        let free = ports.iter().fold(0, |free, port| free | 1 << port);
        let (mut of_block, mut of_port) = ([0_u32; 8], [0_u32; 8]);
        for counter in 0..DRAWS {
            let random = key.draw(counter.into());
            let of = Candidates { vip: &vip, blocks: &BlockSet::ALL, range: PortRange::default(), stripe: Stripe::ALL };
            let choice = Selection { owned: &owned, candidates: of, random };
            let block = choice.random_block_of(|word| owned.0[word]).unwrap();
            of_block[blocks.iter().position(|&own| own == block.0).unwrap()] += 1;
            of_port[ports.iter().position(|&own| own == choice.random_bit(free)).unwrap()] += 1;
        }
        // 8000 expected; a binomial deviates by 84.
        for count in of_block.into_iter().chain(of_port) {
            assert!((7_600..8_400).contains(&count), "{of_block:?} {of_port:?}");
        }
        let of = Candidates { vip: &vip, blocks: &BlockSet::ALL, range: PortRange::default(), stripe: Stripe::ALL };
        let choice = Selection { owned: &owned, candidates: of, random: 5 };
        assert_eq!(choice.random_block_of(|_| 0), None);
    }
}
