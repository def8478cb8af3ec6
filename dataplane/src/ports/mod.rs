//! SNAT ports: ownership of port blocks and allocation of ports to sessions.
//!
//! A VIP's ports are assigned in blocks of 64. Each block has one owner ([`pool`]), and only the owner allocates its
//! ports ([`allocator`]), so a reply finds its owner by the port, without a lookup. Where most ports toward a
//! destination are in use and random probing no longer pays, a bitmap of that destination's ports is kept for a while
//! (`map_cache`, `portmap`).

pub mod allocator;
mod blocks;
mod map_cache;
pub mod pool;
mod portmap;
mod refcount;
mod selection;
mod stripe;
#[cfg(test)]
mod tests;
pub mod vip;

pub use blocks::BlockSet;
pub use stripe::Stripe;

/// Log2 of the ports in a block.
pub const BLOCK_SHIFT: u32 = 6;
/// Ports in a block.
pub const BLOCK_PORTS: usize = 1 << BLOCK_SHIFT;
/// Blocks in the port space of a VIP.
pub const BLOCKS: usize = 1 << (16 - BLOCK_SHIFT);

/// A block of ports: the upper bits of the port numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u16);

impl BlockId {
    /// The block of a port.
    #[inline]
    pub fn of(port: u16) -> Self {
        Self(port >> BLOCK_SHIFT)
    }

    /// The block with this number, below [`BLOCKS`].
    #[inline]
    fn at(at: usize) -> Self {
        debug_assert!(at < BLOCKS, "block {at} of {BLOCKS}");
        Self(at as u16)
    }

    /// Its index in a list of all blocks.
    #[inline]
    fn index(self) -> usize {
        usize::from(self.0)
    }

    #[inline]
    pub fn first_port(self) -> u16 {
        self.0 << BLOCK_SHIFT
    }
}

/// The range of ports that may be allocated, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// The range from `first` to `last`, both included; `None` if it is empty or starts with port 0.
    pub fn new(first: u16, last: u16) -> Option<Self> {
        (first > 0 && first <= last).then_some(Self { first, last })
    }

    /// The ports of `block` that are in the range, as a bit mask: bit i is port i of the block.
    #[inline]
    pub fn mask(self, block: BlockId) -> u64 {
        let start = u32::from(block.first_port());
        let ones_below = |n: u32| if n >= 64 { u64::MAX } else { (1 << n) - 1 };
        let below_first = u32::from(self.first).saturating_sub(start);
        let up_to_last = (u32::from(self.last) + 1).saturating_sub(start);
        ones_below(up_to_last) & !ones_below(below_first)
    }

    /// The block of its first port.
    #[inline]
    pub fn first_block(self) -> BlockId {
        BlockId::of(self.first)
    }

    /// Number of blocks that it overlaps.
    #[inline]
    pub fn blocks(self) -> usize {
        usize::from(BlockId::of(self.last).0 - BlockId::of(self.first).0) + 1
    }

    /// The range without its last `count` ports, rounded down to whole blocks; `None` if nothing is left.
    #[inline]
    pub fn without_last(self, count: u32) -> Option<Self> {
        let end = (u32::from(self.last) + 1).saturating_sub(count) >> BLOCK_SHIFT << BLOCK_SHIFT;
        Self::new(self.first, end.checked_sub(1)? as u16)
    }

    /// The blocks of word number `word` of a bit set of all blocks that overlap the range, as a bit mask.
    #[inline]
    pub(crate) fn block_mask(self, word: usize) -> u64 {
        let (first, last) = (usize::from(BlockId::of(self.first).0), usize::from(BlockId::of(self.last).0));
        let ones_below = |n: usize| if n >= 64 { u64::MAX } else { (1 << n) - 1 };
        ones_below((last + 1).saturating_sub(word * 64)) & !ones_below(first.saturating_sub(word * 64))
    }

    /// Those of these blocks that overlap the range.
    #[must_use]
    pub fn within(self, blocks: &BlockSet) -> BlockSet {
        let mut within = *blocks;
        within.0.iter_mut().enumerate().for_each(|(word, bits)| *bits &= self.block_mask(word));
        within
    }

    /// Number of its ports in these blocks.
    pub fn count_in(self, blocks: &BlockSet) -> u32 {
        blocks.iter().map(|block| self.mask(block).count_ones()).sum()
    }

    /// Whether a port is in the range.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// Number of ports.
    pub fn count(self) -> u32 {
        u32::from(self.last) - u32::from(self.first) + 1
    }
}

impl Default for PortRange {
    fn default() -> Self {
        Self { first: 1024, last: u16::MAX }
    }
}

#[cfg(test)]
mod range_tests {
    use super::*;

    #[test]
    fn the_block_masks_of_a_range_cover_it_exactly() {
        for (first, last) in [(1024, 65535), (1, 65535), (1000, 1000), (63, 64), (1030, 1100), (65535, 65535)] {
            let range = PortRange::new(first, last).unwrap();
            let ports: u32 = (0..BLOCKS).map(|b| range.mask(BlockId(u16::try_from(b).unwrap())).count_ones()).sum();
            assert_eq!(ports, range.count(), "{first}-{last}");
            let blocks = (0..BLOCKS).filter(|b| range.mask(BlockId(u16::try_from(*b).unwrap())) != 0).count();
            assert_eq!(blocks, range.blocks(), "{first}-{last}");
            let listed: u32 = (0..BLOCKS / 64).map(|word| range.block_mask(word).count_ones()).sum();
            assert_eq!(listed as usize, blocks, "{first}-{last}");
            assert_ne!(range.mask(BlockId::of(first)) >> (first % 64) & 1, 0);
            assert_ne!(range.mask(BlockId::of(last)) >> (last % 64) & 1, 0);
        }
        assert!(PortRange::new(0, 5).is_none());
        assert_eq!(PortRange::default().without_last(0), Some(PortRange::default()));
        assert_eq!(PortRange::default().without_last(1), PortRange::new(1024, 65_471));
        assert_eq!(PortRange::default().without_last(64), PortRange::new(1024, 65_471));
        assert_eq!(PortRange::default().without_last(65), PortRange::new(1024, 65_407));
        assert_eq!(PortRange::new(1030, 1100).unwrap().without_last(1), PortRange::new(1030, 1087));
        assert_eq!(PortRange::new(1030, 1100).unwrap().without_last(70), None);
        assert_eq!(PortRange::default().without_last(u32::MAX), None);
        assert!(PortRange::new(6, 5).is_none());
        let range = PortRange::new(1000, 1100).unwrap();
        assert_eq!((range.count_in(&BlockSet::ALL), range.within(&BlockSet::ALL).count()), (101, 3));
        let mut one = BlockSet::default();
        for block in [3, 15] {
            one.insert(BlockId(block));
        }
        assert_eq!((range.count_in(&one), range.within(&one).count()), (24, 1), "1000 to 1023");
    }
}
