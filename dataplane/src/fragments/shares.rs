//! How much each source holds of something that there is little of: an address a quarter, its network half.
//!
//! The network, a /24 or a /64, is there because one IPv6 host has as many addresses as it likes. What is counted
//! belongs to hashes, not to addresses, so nothing has to be kept about sources that hold nothing. Two sources with one
//! hash share a share; who they are nobody outside can choose, since the hash is keyed.

use bytemuck::{Pod, Zeroable};
use vipgate_mem::{MemoryError, Slab};

use crate::address::V6;
use crate::session::tuple::{HashKey, Tuple};

/// Counters of addresses, and as many of networks, for each thing that can be held.
const COUNTERS_EACH: u32 = 4;
const FEWEST_COUNTERS: u32 = 1024;

/// Who holds something: hashes of an address and of its network.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Holder {
    address: u32,
    network: u32,
}

impl Holder {
    /// The holder with this address, of which `network` is the part that stands for its network.
    #[inline]
    pub(super) fn new(address: V6, network: V6, key: &HashKey) -> Self {
        let hash = |source| (key.hash(&Tuple { source, ..Tuple::<V6>::default() }) >> 32) as u32;
        Self { address: hash(address), network: hash(network) }
    }
}

/// What is held of one kind of thing, by hash of address and by hash of network.
#[derive(Debug)]
pub(super) struct Shares {
    addresses: Slab<u32>,
    networks: Slab<u32>,
    mask: u32,
    limit: u32,
}

impl Shares {
    /// Nobody holds any of `limit` things.
    pub(super) fn new(limit: u32) -> Result<Self, MemoryError> {
        let counters = limit.saturating_mul(COUNTERS_EACH).clamp(FEWEST_COUNTERS, 1 << 24).next_power_of_two();
        let slab = || Slab::new(counters as usize);
        Ok(Self { addresses: slab()?, networks: slab()?, mask: counters - 1, limit })
    }

    /// Counts one more thing for a holder; false, and nothing changed, if its share is used up.
    #[inline]
    pub(super) fn take(&mut self, holder: Holder) -> bool {
        let address = &mut self.addresses[(holder.address & self.mask) as usize];
        let network = &mut self.networks[(holder.network & self.mask) as usize];
        let has_room = *address < self.limit.div_ceil(4) && *network < self.limit.div_ceil(2);
        if has_room {
            *address += 1;
            *network += 1;
        }
        has_room
    }

    /// Counts `count` things less for a holder.
    #[inline]
    pub(super) fn give(&mut self, holder: Holder, count: u32) {
        self.addresses[(holder.address & self.mask) as usize] -= count;
        self.networks[(holder.network & self.mask) as usize] -= count;
    }

    /// Whether nothing is held.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.addresses.iter().chain(&*self.networks).all(|&count| count == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(high: u64, low: u64) -> Holder {
        Holder::new(V6 { high, low }, V6 { high, low: 0 }, &HashKey::fixed())
    }

    #[test]
    fn an_address_gets_a_quarter_and_its_network_half() {
        let mut shares = Shares::new(16).unwrap();
        let taken = |shares: &mut Shares, who| (0..17).take_while(|_| shares.take(who)).count();
        assert_eq!(taken(&mut shares, holder(1, 1)), 4);
        assert_eq!(taken(&mut shares, holder(1, 2)), 4);
        assert_eq!(taken(&mut shares, holder(1, 3)), 0, "its neighbours have it all");
        assert_eq!(taken(&mut shares, holder(2, 1)), 4, "another network has its own");
        shares.give(holder(1, 1), 1);
        assert_eq!(taken(&mut shares, holder(1, 3)), 1);
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let mut shares = Shares::new(4).unwrap();
        for _ in 0..100 {
            assert!(shares.take(holder(1, 1)) && !shares.take(holder(1, 1)), "one of four is a quarter");
            shares.give(holder(1, 1), 1);
        }
        assert!(shares.is_empty());
    }
}
