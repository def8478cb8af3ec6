//! Per-source limits on a scarce resource: an address may hold a quarter of it, its network half.
//!
//! The network, a /24 or a /64, is limited because one IPv6 host has as many addresses as it likes. Counters are
//! indexed by hashes, so sources that hold nothing need no memory. Sources with colliding hashes share a limit; nobody
//! outside can choose them, since the hash is keyed.

use bytemuck::{Pod, Zeroable};
use vipgate_mem::{MemoryError, Slab};

use crate::flow::address::V6;
use crate::flow::tuple::{HashKey, Tuple};

/// Address counters, and as many network counters, per unit of the resource.
const COUNTERS_PER_UNIT: u32 = 4;
const MIN_COUNTERS: u32 = 1024;

/// Keyed hashes of a source address and of its network.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SourceKey {
    address: u32,
    network: u32,
}

impl SourceKey {
    /// The key of an address and of its network prefix.
    #[inline]
    pub(super) fn new(address: V6, network: V6, key: &HashKey) -> Self {
        let hash = |source| (key.hash(&Tuple { source, ..Tuple::<V6>::default() }) >> 32) as u32;
        Self { address: hash(address), network: hash(network) }
    }
}

/// Units in use, by source address and by network.
#[derive(Debug)]
pub(super) struct SourceLimits {
    addresses: Slab<u32>,
    networks: Slab<u32>,
    mask: u32,
    limit: u32,
}

impl SourceLimits {
    /// Limits for `limit` units, none of them in use.
    pub(super) fn new(limit: u32) -> Result<Self, MemoryError> {
        let counters = limit.saturating_mul(COUNTERS_PER_UNIT).clamp(MIN_COUNTERS, 1 << 24).next_power_of_two();
        let slab = || Slab::new(counters as usize);
        Ok(Self { addresses: slab()?, networks: slab()?, mask: counters - 1, limit })
    }

    /// Acquires a unit for a source; false, with nothing changed, if its limit is reached.
    #[inline]
    pub(super) fn acquire(&mut self, holder: SourceKey) -> bool {
        let address = &mut self.addresses[(holder.address & self.mask) as usize];
        let network = &mut self.networks[(holder.network & self.mask) as usize];
        let is_below_limit = *address < self.limit.div_ceil(4) && *network < self.limit.div_ceil(2);
        if is_below_limit {
            *address += 1;
            *network += 1;
        }
        is_below_limit
    }

    /// Releases `count` units of a source.
    #[inline]
    pub(super) fn release(&mut self, holder: SourceKey, count: u32) {
        self.addresses[(holder.address & self.mask) as usize] -= count;
        self.networks[(holder.network & self.mask) as usize] -= count;
    }

    /// Whether no unit is in use.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.addresses.iter().chain(&*self.networks).all(|&count| count == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(high: u64, low: u64) -> SourceKey {
        SourceKey::new(V6 { high, low }, V6 { high, low: 0 }, &HashKey::fixed())
    }

    #[test]
    fn an_address_gets_a_quarter_and_its_network_half() {
        let mut limits = SourceLimits::new(16).unwrap();
        let acquired = |limits: &mut SourceLimits, source| (0..17).take_while(|_| limits.acquire(source)).count();
        assert_eq!(acquired(&mut limits, source(1, 1)), 4);
        assert_eq!(acquired(&mut limits, source(1, 2)), 4);
        assert_eq!(acquired(&mut limits, source(1, 3)), 0, "the network's limit is reached");
        assert_eq!(acquired(&mut limits, source(2, 1)), 4, "another network has its own limit");
        limits.release(source(1, 1), 1);
        assert_eq!(acquired(&mut limits, source(1, 3)), 1);
    }

    #[test]
    fn released_units_can_be_acquired_again() {
        let mut limits = SourceLimits::new(4).unwrap();
        for _ in 0..100 {
            assert!(limits.acquire(source(1, 1)) && !limits.acquire(source(1, 1)), "one of four is a quarter");
            limits.release(source(1, 1), 1);
        }
        assert!(limits.is_empty());
    }
}
