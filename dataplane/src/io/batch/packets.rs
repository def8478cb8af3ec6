//! Sets of packets of a batch, as bit sets.

use super::BATCH_SIZE;

/// A set of packets of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketSet(u64);

impl PacketSet {
    /// The first `count` packets.
    #[inline]
    pub fn first(count: usize) -> Self {
        Self(if count >= 64 { u64::MAX } else { (1 << count) - 1 })
    }

    /// The packets after packet `i`.
    #[inline]
    pub fn after(i: usize) -> Self {
        Self(u64::MAX.checked_shl(i as u32 + 1).unwrap_or(0))
    }

    /// Adds packet `i`.
    #[inline]
    pub fn insert(&mut self, i: usize) {
        self.0 |= 1 << (i % BATCH_SIZE);
    }

    /// Removes packet `i`.
    #[inline]
    pub fn remove(&mut self, i: usize) {
        self.0 &= !(1 << (i % BATCH_SIZE));
    }

    /// Whether packet `i` is in the set.
    #[inline]
    pub fn contains(self, i: usize) -> bool {
        self.0 >> (i % BATCH_SIZE) & 1 == 1
    }

    /// The eight packets from `first` on.
    #[inline]
    pub fn eight(first: usize) -> Self {
        Self(0xff << (first % BATCH_SIZE))
    }

    /// Intersection with `other`.
    #[inline]
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Union with `other`.
    #[inline]
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The packets that are not in `other`.
    #[inline]
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set is empty.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl IntoIterator for PacketSet {
    type Item = usize;
    type IntoIter = PacketIndices;

    #[inline]
    fn into_iter(self) -> PacketIndices {
        PacketIndices(self.0)
    }
}

/// Indices of the packets of a set, ascending.
#[derive(Clone, Debug)]
pub struct PacketIndices(u64);

impl Iterator for PacketIndices {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        // Below 64 in any case; the remainder lets the compiler drop bounds checks.
        let first = self.0.trailing_zeros() as usize % BATCH_SIZE;
        self.0 &= self.0 - 1;
        Some(first)
    }
}
