//! Which sessions a change of policy can concern, so that the others need not be checked again.
//!
//! A session remembers the generation that it was checked against. When the generation has moved on, it still stands if
//! nothing has changed since then that concerns its endpoint, its far side or its VIP; changes are noted by bucket of
//! addresses, so a thousand changes a second make few sessions look.

use crate::address::Address;

/// Buckets of addresses; see [`Address::bucket`].
pub const BUCKETS: usize = 2048;

/// When what concerns an address last changed, as generations.
#[derive(Clone, Debug)]
pub struct Freshness {
    /// The last change that concerns everybody.
    all: u32,
    buckets: Box<[u32; BUCKETS]>,
}

impl Freshness {
    /// Everything has changed in this generation.
    pub(super) fn new(generation: u32) -> Self {
        Self { all: generation, buckets: Box::new([generation; BUCKETS]) }
    }

    /// Something has changed that can concern every session.
    pub(super) fn touch_all(&mut self, generation: u32) {
        self.all = generation;
    }

    /// Something has changed that concerns this address.
    pub(super) fn touch(&mut self, bucket: usize, generation: u32) {
        self.buckets[bucket] = generation;
    }

    /// Whether nothing has changed for a session between these addresses since it was checked against `generation`.
    #[inline]
    pub fn holds<A: Address>(&self, generation: u32, addresses: [A; 3]) -> bool {
        // Generations wrap; only their order counts. 0 is that of sessions which were never checked.
        let since = |changed: u32| generation.wrapping_sub(changed).cast_signed() >= 0;
        generation != 0 && since(self.all) && addresses.iter().all(|address| since(self.buckets[address.bucket()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_concerns_its_own_bucket_and_whoever_was_checked_before() {
        let mut freshness = Freshness::new(7);
        let (one, other, far) = (0x0a01_0001_u32, 0x0a01_0002, 0xc633_640a);
        assert_ne!(one.bucket(), other.bucket());
        assert!(freshness.holds(7, [one, far, far]) && !freshness.holds(6, [one, far, far]));
        freshness.touch(one.bucket(), 8);
        assert!(!freshness.holds(7, [one, far, far]) && freshness.holds(8, [one, far, far]));
        assert!(freshness.holds(7, [other, far, far]));
        freshness.touch_all(9);
        assert!(!freshness.holds(8, [other, far, far]) && freshness.holds(9, [one, far, far]));
    }

    #[test]
    fn what_was_never_checked_never_holds_and_generations_wrap() {
        let mut freshness = Freshness::new(u32::MAX);
        assert!(!freshness.holds(0, [1_u32, 2, 3]));
        assert!(freshness.holds(1, [1_u32, 2, 3]), "1 comes after the highest");
        freshness.touch_all(2);
        assert!(!freshness.holds(u32::MAX, [1_u32, 2, 3]));
    }

    #[test]
    fn addresses_of_a_subnet_spread_over_all_buckets() {
        let mut seen = vec![0_u32; BUCKETS];
        (0..100_000_u32).for_each(|n| seen[(0x0a00_0000 + n).bucket()] += 1);
        assert!(seen.iter().all(|&count| (20..90).contains(&count)), "100 000 over 2048 are 49 each");
        let mut seen = vec![0_u32; BUCKETS];
        (0..100_000_u128).for_each(|n| seen[crate::address::V6::from_bits((0xfd00 << 112) + n).bucket()] += 1);
        assert!(seen.iter().all(|&count| (20..90).contains(&count)));
    }
}
