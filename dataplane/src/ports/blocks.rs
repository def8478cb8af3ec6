//! Bit sets of port blocks.

use super::{BLOCKS, BlockId};

/// Words in a set.
pub(super) const WORDS: usize = BLOCKS / 64;

/// A set of a VIP's blocks, one bit each: block 0 is the lowest bit of the first word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::AnyBitPattern)]
#[repr(transparent)]
pub struct BlockSet(pub(super) [u64; WORDS]);

impl BlockSet {
    /// All blocks.
    pub const ALL: Self = Self([u64::MAX; WORDS]);
    /// Size in bytes.
    pub const BYTES: usize = BLOCKS / 8;

    /// From bytes: block 0 is the lowest bit of the first one.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let mut set = Self::default();
        for (word, bytes) in set.0.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        set
    }

    /// To bytes: block 0 is the lowest bit of the first one.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(self.0) {
            *bytes = word.to_le_bytes();
        }
        bytes
    }

    /// Number of blocks in the set.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Union of two sets.
    #[must_use]
    pub fn union(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
        self
    }

    /// The blocks whose number plus `by`, modulo the number of blocks, is in the set.
    #[must_use]
    pub fn rotated(&self, by: u16) -> Self {
        let (words, bits) = (usize::from(by) / 64, u32::from(by) % 64);
        Self(std::array::from_fn(|at| {
            let [low, high] = [0, 1].map(|next| self.0[(at + words + next) % WORDS]);
            // Two shifts: one by 64 bits is undefined.
            low >> bits | high << (63 - bits) << 1
        }))
    }

    /// Adds a block.
    #[inline]
    pub fn insert(&mut self, block: BlockId) {
        self.0[block.index() / 64] |= 1 << (block.index() % 64);
    }

    /// Removes a block.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId) {
        self.0[block.index() / 64] &= !(1 << (block.index() % 64));
    }

    /// Removes the blocks of `other`.
    pub(super) fn remove_all(&mut self, other: &Self) {
        for (word, other) in self.0.iter_mut().zip(other.0) {
            *word &= !other;
        }
    }

    /// Whether a block is in the set.
    #[inline]
    pub fn contains(&self, block: BlockId) -> bool {
        self.0[block.index() / 64] >> (block.index() % 64) & 1 == 1
    }

    /// Its blocks, in ascending order.
    pub fn iter(self) -> impl Iterator<Item = BlockId> {
        (0..WORDS).flat_map(move |word| {
            let mut bits = self.0[word];
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(BlockId::at(word * 64 + bit))
            })
        })
    }
}

/// The first block at or behind `from`, wrapping around, of the set with the words `word`.
#[inline]
pub(super) fn first_from(from: BlockId, word: impl Fn(usize) -> u64) -> Option<BlockId> {
    let (at, bit) = (from.index() / 64, from.index() % 64);
    let here = word(at) & (u64::MAX << bit);
    if here != 0 {
        return Some(BlockId::at(at * 64 + here.trailing_zeros() as usize));
    }
    // The last step is the first word again, for the bits below `from`.
    (1..=WORDS).map(|step| (at + step) % WORDS).find_map(|at| {
        let bits = word(at);
        (bits != 0).then(|| BlockId::at(at * 64 + bits.trailing_zeros() as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_wraps_around_once() {
        let mut set = BlockSet::default();
        let find = |set: &BlockSet, from| first_from(BlockId(from), |word| set.0[word]).map(|block| block.0);
        assert_eq!(find(&set, 77), None);
        for block in [3, 70, 1023] {
            set.insert(BlockId(block));
        }
        for (from, found) in [(0, 3), (3, 3), (4, 70), (70, 70), (71, 1023), (1023, 1023)] {
            assert_eq!(find(&set, from), Some(found), "from {from}");
        }
        assert_eq!(set.iter().map(|block| block.0).collect::<Vec<_>>(), [3, 70, 1023]);
        set.remove(BlockId(1023));
        assert_eq!(find(&set, 71), Some(3));
        set.remove_all(&BlockSet([1 << 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(find(&set, 64), Some(70));
        assert_eq!(find(&set, 71), Some(70), "the search ends with the word that it began with");
        assert!(!set.contains(BlockId(3)) && set.contains(BlockId(70)));
        let mut other = BlockSet::default();
        other.insert(BlockId(3));
        assert_eq!(set.union(&other).iter().map(|block| block.0).collect::<Vec<_>>(), [3, 70]);
    }
}
