//! Which sessions a change of policy can concern, so that the others need not be checked again.
//!
//! A session remembers the generation that it was checked against. When the generation has moved on, it still stands if
//! nothing has changed since then that concerns its endpoint, or, as VIPs, its far side or its VIP; changes are noted by bucket
//! of addresses, so a thousand changes a second make few sessions look.

use crate::address::Address;

/// Buckets of addresses; see [`Address::bucket`].
pub const BUCKETS: usize = 2048;
/// Ages of changes of endpoints: as many as a processor's first cache has room for beside everything else.
const AGES: usize = 8192;
/// Changes of endpoints, looked up where ages don't tell enough, by another rule: a session whose endpoint is taken in one for an
/// endpoint that has changed hardly is in both.
const ENDPOINTS: usize = 16384;

fn age_of<A: Address>(endpoint: A) -> usize {
    (endpoint.spread() >> (u32::BITS - AGES.ilog2())) as usize
}

fn change_of<A: Address>(endpoint: A) -> usize {
    (endpoint.spread_anew() >> (u32::BITS - ENDPOINTS.ilog2())) as usize
}

/// The generation of sessions that were never checked.
const NEVER: u32 = 0;

/// When what concerns an address last changed, as generations.
#[derive(Clone, Debug)]
pub struct Freshness {
    /// This one.
    generation: u32,
    /// The last change that concerns everybody.
    all: u32,
    /// Of endpoints, whose changes almost all are: how many generations ago the last one was, 255 for all that are as long ago
    /// or longer.
    ages: Box<[u8; AGES]>,
    endpoints: Box<[u32]>,
    /// The last change of any VIP.
    any_vip: u32,
    vips: Box<[u32; BUCKETS]>,
}

/// The pod, the far side and the VIP that a session is between.
pub type Parties<A> = (A, A, A);

impl Freshness {
    /// Everything has changed in this generation.
    pub(super) fn new(generation: u32) -> Self {
        Self {
            generation,
            all: generation,
            ages: Box::new([0; AGES]),
            endpoints: vec![generation; ENDPOINTS].into(),
            any_vip: generation,
            vips: Box::new([generation; BUCKETS]),
        }
    }

    /// This generation.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The same in the next generation, in which nothing has changed yet.
    pub(super) fn next(&self) -> Self {
        let mut next = self.clone();
        next.generation = self.generation.wrapping_add(1).max(NEVER + 1);
        next.ages.iter_mut().for_each(|age| *age = age.saturating_add(1));
        next
    }

    /// Something has changed that can concern every session.
    pub(super) fn touch_all(&mut self) {
        self.all = self.generation;
    }

    /// An endpoint has come, changed or gone.
    pub(super) fn touch_endpoint<A: Address>(&mut self, address: A) {
        self.ages[age_of(address)] = 0;
        self.endpoints[change_of(address)] = self.generation;
    }

    /// A VIP has come or gone.
    pub(super) fn touch_vip<A: Address>(&mut self, address: A) {
        self.any_vip = self.generation;
        self.vips[address.bucket()] = self.generation;
    }

    /// Whether nothing has changed for a session between these parties since it was checked against `generation`.
    #[inline]
    pub fn holds<A: Address>(&self, generation: u32, parties: Parties<A>) -> bool {
        let (endpoint, ..) = parties;
        let endpoint_holds = || is_since(generation, self.endpoints[change_of(endpoint)]);
        self.glance().holds(generation, endpoint)
            || (endpoint_holds() && self.holds_beside_endpoint(generation, parties))
    }

    /// Whether nothing has changed for it but what may concern its endpoint.
    #[inline]
    pub fn holds_beside_endpoint<A: Address>(&self, generation: u32, (_, remote, vip): Parties<A>) -> bool {
        let vip_holds = |vip: A| is_since(generation, self.vips[vip.bucket()]);
        let vips_hold = || is_since(generation, self.any_vip) || (vip_holds(remote) && vip_holds(vip));
        generation != NEVER && is_since(generation, self.all) && vips_hold()
    }

    /// The same question for many sessions, without a branch that nobody can foresee.
    #[inline]
    pub fn glance(&self) -> Glance<'_> {
        let since = |changed| self.generation.wrapping_sub(changed);
        Glance { generation: self.generation, ages: &self.ages, others: since(self.all).min(since(self.any_vip)) }
    }
}

/// A quick look at what has changed: what it sees to hold does, what it doesn't must be asked [`Freshness::holds`].
#[derive(Clone, Copy, Debug)]
pub struct Glance<'a> {
    generation: u32,
    ages: &'a [u8; AGES],
    /// Generations since the last change that isn't one endpoint's alone.
    others: u32,
}

impl Glance<'_> {
    /// Whether nothing has changed at all since `generation`, endpoints in other buckets excepted.
    #[inline]
    pub fn holds<A: Address>(&self, generation: u32, endpoint: A) -> bool {
        let behind = self.generation.wrapping_sub(generation);
        (generation != NEVER) & (behind <= self.others.min(self.ages[age_of(endpoint)].into()))
    }
}

/// Whether a check against `generation` has seen what has changed. Generations wrap; only their order counts.
#[inline]
fn is_since(generation: u32, changed: u32) -> bool {
    generation.wrapping_sub(changed).cast_signed() >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses that have nothing in common, not even a bucket.
    const ONE: u32 = 0x0a01_0001;
    const OTHER: u32 = 0x0a01_0002;
    const FAR: u32 = 0xc633_640a;
    const VIP: u32 = 0xcb00_710a;

    /// The next generation, with what has changed in it.
    fn next(freshness: &mut Freshness, change: impl FnOnce(&mut Freshness)) {
        *freshness = freshness.next();
        change(freshness);
    }

    #[test]
    fn a_change_concerns_whom_it_is_about_and_was_checked_before() {
        let mut freshness = Freshness::new(7);
        let (one, other) = ((ONE, FAR, VIP), (OTHER, FAR, VIP));
        assert!(freshness.holds(7, one) && !freshness.holds(6, one));
        next(&mut freshness, |it| it.touch_endpoint(ONE));
        assert!(!freshness.holds(7, one) && freshness.holds(8, one) && freshness.holds(7, other));
        next(&mut freshness, |it| it.touch_vip(OTHER));
        assert!(freshness.holds(8, one) && freshness.holds(8, other), "as a VIP it concerns nobody's endpoint");
        for vip in [FAR, VIP] {
            let before = freshness.generation();
            next(&mut freshness, |it| it.touch_vip(vip));
            assert!(!freshness.holds(before, one) && freshness.holds(freshness.generation(), one));
        }
        let before = freshness.generation();
        next(&mut freshness, |it| it.touch_endpoint(FAR));
        assert!(freshness.holds(before, one), "as an endpoint it is nobody's VIP");
        assert!(
            freshness.holds_beside_endpoint(before, (FAR, ONE, OTHER)) && !freshness.holds(before, (FAR, ONE, ONE))
        );
        next(&mut freshness, Freshness::touch_all);
        assert!(!freshness.holds(before, other) && !freshness.holds_beside_endpoint(before, other));
        assert!(freshness.holds(freshness.generation(), other));
    }

    #[test]
    fn a_glance_sees_at_most_what_holds() {
        let mut freshness = Freshness::new(u32::MAX - 150);
        let mut glanced = 0;
        // Longer than ages are counted, and over the wrap.
        for turn in 0..600_u32 {
            next(&mut freshness, |it| match turn % 200 {
                50 => it.touch_vip(VIP),
                100 => it.touch_all(),
                _ => it.touch_endpoint(ONE.wrapping_mul(turn)),
            });
            for behind in [0, 1, 2, 40, 254, 255, 256, 300] {
                let generation = freshness.generation().wrapping_sub(behind);
                for endpoint in (0..64_u32).map(|n| ONE.wrapping_mul(n)) {
                    let sees = freshness.glance().holds(generation, endpoint);
                    assert!(!sees || freshness.holds(generation, (endpoint, FAR, VIP)));
                    glanced += u32::from(sees && behind > 0);
                }
            }
        }
        assert!(glanced > 50_000, "{glanced}");
    }

    #[test]
    fn who_shares_a_bucket_in_one_table_is_told_apart_in_the_other() {
        let neighbour = (ONE + 1..ONE + 100_000).find(|&it| age_of(it) == age_of(ONE)).unwrap();
        assert_ne!(change_of(neighbour), change_of(ONE));
        let mut freshness = Freshness::new(1);
        next(&mut freshness, |it| it.touch_endpoint(neighbour));
        assert!(!freshness.glance().holds(1, ONE) && freshness.holds(1, (ONE, FAR, VIP)));
    }

    #[test]
    fn what_was_never_checked_never_holds_and_generations_wrap() {
        let mut freshness = Freshness::new(u32::MAX);
        let parties = (ONE, FAR, VIP);
        assert!(!freshness.holds(NEVER, parties));
        next(&mut freshness, |_| ());
        assert_eq!(freshness.generation(), 1, "1 comes after the highest");
        assert!(freshness.holds(u32::MAX, parties) && !freshness.holds(NEVER, parties));
        next(&mut freshness, Freshness::touch_all);
        assert!(!freshness.holds(u32::MAX, parties) && !freshness.holds(1, parties));
    }

    #[test]
    fn addresses_of_a_subnet_spread_over_all_buckets() {
        fn counts(buckets: usize, of: impl Iterator<Item = usize>) -> Vec<u32> {
            let mut seen = vec![0; buckets];
            of.for_each(|bucket| seen[bucket] += 1);
            seen
        }
        let v4 = || (0..100_000_u32).map(|n| 0x0a00_0000 + n);
        let v6 = || (0..100_000_u128).map(|n| crate::address::V6::from_bits((0xfd00 << 112) + n));
        for seen in [counts(BUCKETS, v4().map(Address::bucket)), counts(BUCKETS, v6().map(Address::bucket))] {
            assert!(seen.iter().all(|&count| (20..90).contains(&count)), "100 000 over 2048 are 49 each");
        }
        for seen in [counts(AGES, v4().map(age_of)), counts(AGES, v6().map(age_of))] {
            assert!(seen.iter().all(|&count| count < 40), "100 000 over 8192 are 12 each");
        }
        for seen in [counts(ENDPOINTS, v4().map(change_of)), counts(ENDPOINTS, v6().map(change_of))] {
            assert!(seen.iter().all(|&count| count < 24), "100 000 over 16 384 are 6 each");
        }
    }
}
