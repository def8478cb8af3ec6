//! Sets of packets of a batch, as bits.

use super::MOST;

/// A set of packets of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packets(u64);

impl Packets {
    /// The first `count` ones.
    #[inline]
    pub fn first(count: usize) -> Self {
        Self(if count >= 64 { u64::MAX } else { (1 << count) - 1 })
    }

    /// Those behind packet `i`.
    #[inline]
    pub fn behind(i: usize) -> Self {
        Self(u64::MAX.checked_shl(i as u32 + 1).unwrap_or(0))
    }

    /// Puts packet `i` in.
    #[inline]
    pub fn insert(&mut self, i: usize) {
        self.0 |= 1 << (i % MOST);
    }

    /// Takes packet `i` out.
    #[inline]
    pub fn remove(&mut self, i: usize) {
        self.0 &= !(1 << (i % MOST));
    }

    /// Whether packet `i` is in it.
    #[inline]
    pub fn contains(self, i: usize) -> bool {
        self.0 >> (i % MOST) & 1 == 1
    }

    /// Those that are in `other`, too.
    #[inline]
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those that are in this one or in `other`.
    #[inline]
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those that aren't in `other`.
    #[inline]
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl IntoIterator for Packets {
    type Item = usize;
    type IntoIter = PacketNumbers;

    #[inline]
    fn into_iter(self) -> PacketNumbers {
        PacketNumbers(self.0)
    }
}

/// The numbers of the packets of a set, ascending.
#[derive(Clone, Debug)]
pub struct PacketNumbers(u64);

impl Iterator for PacketNumbers {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        // Below 64 in any case; the remainder tells the compiler, too.
        let first = self.0.trailing_zeros() as usize % MOST;
        self.0 &= self.0 - 1;
        Some(first)
    }
}
