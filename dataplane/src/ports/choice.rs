//! One choice of a port: which may be given out, and where a random number points.

use super::blocks::{BlockSet, WORDS};
use super::{BlockId, PortRange, Stripe};
use crate::snapshot::policy::Vip;

/// Which ports may be given out to whoever asks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Of<'a> {
    /// Whose ports; it reserves some of them.
    pub(super) vip: &'a Vip,
    /// In which blocks.
    pub(super) blocks: &'a BlockSet,
    /// In which range.
    pub(super) range: PortRange,
    /// Which of a block.
    pub(super) stripe: Stripe,
}

/// What a port is chosen from, and the random number that does it (RFC 6056 section 3.3).
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice<'a> {
    /// Blocks that are the worker's own.
    pub(super) owned: &'a BlockSet,
    /// Ports that may be given out.
    pub(super) of: Of<'a>,
    /// One draw: its lower half names a block, its upper six bits a port.
    pub(super) random: u64,
}

impl Choice<'_> {
    /// Any block of the range, each as likely as the others.
    #[inline]
    pub(super) fn block(&self) -> BlockId {
        BlockId(self.of.range.first_block().0 + below(self.random, self.of.range.blocks() as u32) as u16)
    }

    /// The ports of `block` that may be given out, as bits.
    #[inline]
    pub(super) fn usable(&self, block: BlockId) -> u64 {
        self.of.range.mask(block) & self.of.stripe.ports() & !self.of.vip.reserved_mask(block)
    }

    /// Any port of `ports`, which has one at least, as its bit; each as likely as the others.
    #[inline]
    pub(super) fn bit(&self, ports: u64) -> u32 {
        let bit = (self.random >> 58) as u32;
        if ports >> bit & 1 == 1 { bit } else { nth_one(ports, below(self.mixed(), ports.count_ones())) }
    }

    /// The blocks of the range that the worker owns, a word of them.
    #[inline]
    pub(super) fn blocks(&self, word: usize) -> u64 {
        self.owned.0[word] & self.of.blocks.0[word] & self.of.range.blocks_of_word(word)
    }

    /// Whether ports of a block may be given out.
    pub(super) fn may_have(&self, block: BlockId) -> bool {
        self.owned.contains(block) && self.of.blocks.contains(block)
    }

    /// Any block of the set whose words `word` names, each as likely as the others. To take the next one behind a full
    /// one would make runs of full blocks grow, and what comes behind them predictable.
    #[inline]
    pub(super) fn block_of(&self, word: impl Fn(usize) -> u64) -> Option<BlockId> {
        let block = self.block();
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

    /// Other bits of the random number, for a choice after one that failed.
    #[inline]
    fn mixed(&self) -> u64 {
        self.random.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A number below `limit`, by 32 random bits; 0 for 0.
#[inline]
fn below(random: u64, limit: u32) -> u32 {
    (((random & 0xffff_ffff) * u64::from(limit)) >> 32) as u32
}

/// Where the bit number `n` of those that are set stands.
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
    use crate::ports::tests::vip;
    use crate::session::tuple::HashKey;

    #[test]
    fn every_block_and_every_port_is_as_likely_as_the_others() {
        const DRAWS: u32 = 64_000;
        let vip = vip(&Arc::default(), &[]);
        let key =
            HashKey::new([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaef1_7502_108e_f2d9, 0x632b_e593_8a41_7d6f]);
        // The last one of each stands behind a long gap.
        let (blocks, ports) = ([16, 17, 18, 19, 64, 65, 200, 900], [0, 1, 2, 3, 4, 5, 6, 63]);
        let mut owned = BlockSet::default();
        for block in blocks {
            owned.insert(BlockId(block));
        }
        let free = ports.iter().fold(0, |free, port| free | 1 << port);
        let (mut of_block, mut of_port) = ([0_u32; 8], [0_u32; 8]);
        for counter in 0..DRAWS {
            let random = key.draw(counter.into());
            let of = Of { vip: &vip, blocks: &BlockSet::ALL, range: PortRange::default(), stripe: Stripe::ALL };
            let choice = Choice { owned: &owned, of, random };
            let block = choice.block_of(|word| owned.0[word]).unwrap();
            of_block[blocks.iter().position(|&own| own == block.0).unwrap()] += 1;
            of_port[ports.iter().position(|&own| own == choice.bit(free)).unwrap()] += 1;
        }
        // 8000 expected; a binomial deviates by 84.
        for count in of_block.into_iter().chain(of_port) {
            assert!((7_600..8_400).contains(&count), "{of_block:?} {of_port:?}");
        }
        let of = Of { vip: &vip, blocks: &BlockSet::ALL, range: PortRange::default(), stripe: Stripe::ALL };
        let choice = Choice { owned: &owned, of, random: 5 };
        assert_eq!(choice.block_of(|_| 0), None);
    }
}
