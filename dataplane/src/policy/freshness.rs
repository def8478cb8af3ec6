//! Freshness: which sessions a policy change may affect, so that the others aren't revalidated.
//!
//! A session stores the generation that it was validated against. It is fresh while nothing has changed since then for
//! its endpoint, its VIP or its remote (which may be a VIP, too). Changes are recorded by address bucket, so that even
//! a thousand changes a second cause few revalidations.

use crate::flow::address::Address;

/// Address buckets; see [`Address::bucket`].
pub const BUCKETS: usize = 2048;
/// Buckets of endpoint change ages: as many as fit in the L1 data cache beside everything else.
const AGE_BUCKETS: usize = 8192;
/// Buckets of endpoint generations, checked after an age says "changed". Another hash selects them, so an endpoint that
/// collides with a changed one in one table hardly collides in both.
const CHANGE_BUCKETS: usize = 16384;

fn age_bucket<A: Address>(endpoint: A) -> usize {
    (endpoint.mix() >> (u32::BITS - AGE_BUCKETS.ilog2())) as usize
}

fn change_bucket<A: Address>(endpoint: A) -> usize {
    (endpoint.mix_alternative() >> (u32::BITS - CHANGE_BUCKETS.ilog2())) as usize
}

/// The generation of sessions that were never validated.
const NEVER: u32 = 0;

/// Generations of the last changes, by address.
#[derive(Clone, Debug)]
pub struct Freshness {
    /// The current generation.
    generation: u32,
    /// The last change that affects all sessions.
    all: u32,
    /// Generations since the last endpoint change, by bucket; 255 and more are 255. Almost all changes are of
    /// endpoints.
    ages: Box<[u8; AGE_BUCKETS]>,
    endpoints: Box<[u32]>,
    /// The last change of any VIP.
    any_vip: u32,
    vips: Box<[u32; BUCKETS]>,
}

/// Addresses of a session: pod, remote and VIP.
pub type SessionAddresses<A> = (A, A, A);

impl Freshness {
    /// Everything has changed in this generation.
    pub(super) fn new(generation: u32) -> Self {
        Self {
            generation,
            all: generation,
            ages: Box::new([0; AGE_BUCKETS]),
            endpoints: vec![generation; CHANGE_BUCKETS].into(),
            any_vip: generation,
            vips: Box::new([generation; BUCKETS]),
        }
    }

    /// The current generation.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The next generation, without changes yet.
    pub(super) fn next(&self) -> Self {
        let mut next = self.clone();
        next.generation = self.generation.wrapping_add(1).max(NEVER + 1);
        next.ages.iter_mut().for_each(|age| *age = age.saturating_add(1));
        next
    }

    /// Records a change that may affect all sessions.
    pub(super) fn touch_all(&mut self) {
        self.all = self.generation;
    }

    /// Records that an endpoint was added, changed or removed.
    pub(super) fn touch_endpoint<A: Address>(&mut self, address: A) {
        self.ages[age_bucket(address)] = 0;
        self.endpoints[change_bucket(address)] = self.generation;
    }

    /// Records that a VIP was added, changed or removed.
    pub(super) fn touch_vip<A: Address>(&mut self, address: A) {
        self.any_vip = self.generation;
        self.vips[address.bucket()] = self.generation;
    }

    /// Whether nothing has changed for a session since it was validated against `generation`.
    #[inline]
    pub fn is_fresh<A: Address>(&self, generation: u32, addresses: SessionAddresses<A>) -> bool {
        let (endpoint, ..) = addresses;
        let endpoint_holds = || is_up_to_date(generation, self.endpoints[change_bucket(endpoint)]);
        self.filter().is_fresh(generation, endpoint)
            || (endpoint_holds() && self.is_fresh_except_endpoint(generation, addresses))
    }

    /// As [`Freshness::is_fresh`], but ignores endpoint changes.
    #[inline]
    pub fn is_fresh_except_endpoint<A: Address>(&self, generation: u32, (_, remote, vip): SessionAddresses<A>) -> bool {
        let vip_holds = |vip: A| is_up_to_date(generation, self.vips[vip.bucket()]);
        let vips_hold = || is_up_to_date(generation, self.any_vip) || (vip_holds(remote) && vip_holds(vip));
        generation != NEVER && is_up_to_date(generation, self.all) && vips_hold()
    }

    /// A conservative filter for many sessions, without unpredictable branches.
    #[inline]
    pub fn filter(&self) -> FreshnessFilter<'_> {
        let since = |changed| self.generation.wrapping_sub(changed);
        FreshnessFilter {
            generation: self.generation,
            ages: &self.ages,
            others: since(self.all).min(since(self.any_vip)),
        }
    }
}

/// Fast filter in front of [`Freshness::is_fresh`]: no false positives; a negative needs the full check.
#[derive(Clone, Copy, Debug)]
pub struct FreshnessFilter<'a> {
    generation: u32,
    ages: &'a [u8; AGE_BUCKETS],
    /// Generations since the last change that isn't limited to one endpoint.
    others: u32,
}

impl FreshnessFilter<'_> {
    /// Whether nothing has changed since `generation`, except endpoints in other buckets.
    #[inline]
    pub fn is_fresh<A: Address>(&self, generation: u32, endpoint: A) -> bool {
        let behind = self.generation.wrapping_sub(generation);
        (generation != NEVER) & (behind <= self.others.min(self.ages[age_bucket(endpoint)].into()))
    }
}

/// Whether `generation` isn't older than `changed`. Generations wrap; only their order counts.
#[inline]
fn is_up_to_date(generation: u32, changed: u32) -> bool {
    generation.wrapping_sub(changed).cast_signed() >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses in different buckets.
    const ONE: u32 = 0x0a01_0001;
    const OTHER: u32 = 0x0a01_0002;
    const REMOTE: u32 = 0xc633_640a;
    const VIP: u32 = 0xcb00_710a;

    /// Advances to the next generation and applies a change.
    fn next(freshness: &mut Freshness, change: impl FnOnce(&mut Freshness)) {
        *freshness = freshness.next();
        change(freshness);
    }

    #[test]
    fn a_change_affects_only_sessions_with_its_address_validated_before() {
        let mut freshness = Freshness::new(7);
        let (one, other) = ((ONE, REMOTE, VIP), (OTHER, REMOTE, VIP));
        assert!(freshness.is_fresh(7, one) && !freshness.is_fresh(6, one));
        next(&mut freshness, |it| it.touch_endpoint(ONE));
        assert!(!freshness.is_fresh(7, one) && freshness.is_fresh(8, one) && freshness.is_fresh(7, other));
        next(&mut freshness, |it| it.touch_vip(OTHER));
        assert!(freshness.is_fresh(8, one) && freshness.is_fresh(8, other), "a VIP change affects no endpoint");
        for vip in [REMOTE, VIP] {
            let before = freshness.generation();
            next(&mut freshness, |it| it.touch_vip(vip));
            assert!(!freshness.is_fresh(before, one) && freshness.is_fresh(freshness.generation(), one));
        }
        let before = freshness.generation();
        next(&mut freshness, |it| it.touch_endpoint(REMOTE));
        assert!(freshness.is_fresh(before, one), "an endpoint change affects no VIP");
        assert!(
            freshness.is_fresh_except_endpoint(before, (REMOTE, ONE, OTHER))
                && !freshness.is_fresh(before, (REMOTE, ONE, ONE))
        );
        next(&mut freshness, Freshness::touch_all);
        assert!(!freshness.is_fresh(before, other) && !freshness.is_fresh_except_endpoint(before, other));
        assert!(freshness.is_fresh(freshness.generation(), other));
    }

    #[test]
    fn the_filter_never_claims_more_than_the_full_check() {
        let mut freshness = Freshness::new(u32::MAX - 150);
        let mut hits = 0;
        // More generations than ages can count, and across the wrap.
        for step in 0..600_u32 {
            next(&mut freshness, |it| match step % 200 {
                50 => it.touch_vip(VIP),
                100 => it.touch_all(),
                _ => it.touch_endpoint(ONE.wrapping_mul(step)),
            });
            for behind in [0, 1, 2, 40, 254, 255, 256, 300] {
                let generation = freshness.generation().wrapping_sub(behind);
                for endpoint in (0..64_u32).map(|n| ONE.wrapping_mul(n)) {
                    let fresh = freshness.filter().is_fresh(generation, endpoint);
                    assert!(!fresh || freshness.is_fresh(generation, (endpoint, REMOTE, VIP)));
                    hits += u32::from(fresh && behind > 0);
                }
            }
        }
        assert!(hits > 50_000, "{hits}");
    }

    #[test]
    fn a_collision_in_one_table_is_resolved_by_the_other() {
        let other = (ONE + 1..ONE + 100_000).find(|&it| age_bucket(it) == age_bucket(ONE)).unwrap();
        assert_ne!(change_bucket(other), change_bucket(ONE));
        let mut freshness = Freshness::new(1);
        next(&mut freshness, |it| it.touch_endpoint(other));
        assert!(!freshness.filter().is_fresh(1, ONE) && freshness.is_fresh(1, (ONE, REMOTE, VIP)));
    }

    #[test]
    fn unvalidated_sessions_are_never_fresh_and_generations_wrap() {
        let mut freshness = Freshness::new(u32::MAX);
        let addresses = (ONE, REMOTE, VIP);
        assert!(!freshness.is_fresh(NEVER, addresses));
        next(&mut freshness, |_| ());
        assert_eq!(freshness.generation(), 1, "1 follows the highest");
        assert!(freshness.is_fresh(u32::MAX, addresses) && !freshness.is_fresh(NEVER, addresses));
        next(&mut freshness, Freshness::touch_all);
        assert!(!freshness.is_fresh(u32::MAX, addresses) && !freshness.is_fresh(1, addresses));
    }

    #[test]
    fn addresses_of_a_subnet_spread_over_all_buckets() {
        fn counts(buckets: usize, of: impl Iterator<Item = usize>) -> Vec<u32> {
            let mut seen = vec![0; buckets];
            of.for_each(|bucket| seen[bucket] += 1);
            seen
        }
        let v4 = || (0..100_000_u32).map(|n| 0x0a00_0000 + n);
        let v6 = || (0..100_000_u128).map(|n| crate::flow::address::V6::from_bits((0xfd00 << 112) + n));
        for seen in [counts(BUCKETS, v4().map(Address::bucket)), counts(BUCKETS, v6().map(Address::bucket))] {
            assert!(seen.iter().all(|&count| (20..90).contains(&count)), "100 000 over 2048 are 49 each");
        }
        for seen in [counts(AGE_BUCKETS, v4().map(age_bucket)), counts(AGE_BUCKETS, v6().map(age_bucket))] {
            assert!(seen.iter().all(|&count| count < 40), "100 000 over 8192 are 12 each");
        }
        for seen in [counts(CHANGE_BUCKETS, v4().map(change_bucket)), counts(CHANGE_BUCKETS, v6().map(change_bucket))] {
            assert!(seen.iter().all(|&count| count < 24), "100 000 over 16 384 are 6 each");
        }
    }
}
