//! Which backend a new session gets: a look-up table after Maglev (Eisenbud et al., NSDI 2016, section 3.4).
//!
//! Every backend has its own order of the table's places, which follows from its address alone; in turns, each takes the
//! first place of its order that is free. So all gateways come to the same table, each backend has its part of it within a
//! place or two, and when one comes or goes, few places change hands but those that must.

use std::ops::Range;

use crate::address::Address;
use crate::session::tuple::{HashKey, Tuple};

/// Fixed on purpose: each gateway must come to the same choice, before and after a restart. Who aims at one backend of a
/// Service could as well send it more.
const CHOICE: HashKey = HashKey::fixed();

/// Sizes that a table may have; those that are primes.
pub const SIZES: Range<u32> = 7..131_072;

/// Whether a table may have this many places. A prime, so that every step visits every place.
pub fn is_size(size: u32) -> bool {
    SIZES.contains(&size) && (2..=size.isqrt()).all(|divisor| !size.is_multiple_of(divisor))
}

/// One backend on its way into a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// What the table says of it.
    number: u16,
    /// Its part beside those of others.
    weight: u16,
    /// Where its order begins and how it goes on; see [`order`].
    seed: u64,
}

impl Member {
    /// The backend at `address`, of which a table says `number`.
    pub fn new<A: Address>(number: u16, address: A, weight: u16) -> Self {
        Self { number, weight, seed: CHOICE.hash(&Tuple { source: address, ..Tuple::default() }) }
    }
}

/// A table of backends.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Maglev {
    /// What it was made of.
    members: Box<[Member]>,
    size: u32,
    /// With one member, nothing but it.
    places: Box<[u16]>,
}

impl Maglev {
    /// The table of these backends, whose order counts: by address. `size` is one that [`is_size`] admits.
    pub fn new(size: u32, members: Vec<Member>) -> Self {
        debug_assert!(is_size(size), "{size} places");
        let places = match members[..] {
            [] => Vec::new(),
            [only] => vec![only.number],
            _ => fill(size, &members),
        };
        Self { members: members.into(), size, places: places.into() }
    }

    /// Whether it was made of just this.
    pub fn is_of(&self, size: u32, members: &[Member]) -> bool {
        self.size == size && *self.members == *members
    }

    /// Whether nobody is in it.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// How many are in it.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// The backend for a hash; another one, as far as there is one, for each of the first few turns.
    #[inline]
    pub fn choose(&self, hash: u64, turn: u32) -> Option<u16> {
        // The upper half spreads over the table, the lower half goes on from there.
        let place = ((hash >> 32) * self.places.len() as u64) >> 32;
        let place = place as usize + turn as usize * (hash as u16 | 1) as usize;
        self.places.get(place % self.places.len().max(1)).copied()
    }
}

/// The hash of a session's first packet, by which its backend is chosen.
#[inline]
pub fn of_session<A: Address>(tuple: &Tuple<A>) -> u64 {
    CHOICE.hash(tuple)
}

/// The hash of a client, for Services whose clients stay with their backend.
#[inline]
pub fn of_client<A: Address>(client: A) -> u64 {
    CHOICE.hash(&Tuple { source: client, protocol: u8::MAX, ..Tuple::default() })
}

/// Where a member's order of places begins, and its step.
fn order(seed: u64, size: u32) -> (u32, u32) {
    let below = |half: u64, limit: u32| ((half * u64::from(limit)) >> 32) as u32;
    (below(seed >> 32, size), below(seed & 0xffff_ffff, size - 1) + 1)
}

fn fill(size: u32, members: &[Member]) -> Vec<u16> {
    /// No member has this number: it stands for a free place.
    const FREE: u16 = u16::MAX;
    let heaviest = members.iter().map(|member| u32::from(member.weight)).max().unwrap_or(0).max(1);
    let mut orders: Vec<(u32, u32)> = members.iter().map(|member| order(member.seed, size)).collect();
    let mut credits = vec![0_u32; members.len()];
    let mut places = vec![FREE; size as usize];
    let mut left = size;
    loop {
        for ((member, (next, step)), credit) in members.iter().zip(&mut orders).zip(&mut credits) {
            // The heaviest takes a place in each round, others in as many of them as their weight is of its weight.
            *credit += u32::from(member.weight);
            if *credit < heaviest {
                continue;
            }
            *credit -= heaviest;
            loop {
                let place = &mut places[*next as usize];
                *next += *step;
                if *next >= size {
                    *next -= size;
                }
                if *place == FREE {
                    *place = member.number;
                    break;
                }
            }
            left -= 1;
            if left == 0 {
                return places;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The table of the backends 10.0.0.`n`, each with the number `n` in it.
    fn table(size: u32, backends: impl IntoIterator<Item = (u16, u16)>) -> Maglev {
        let member = |(n, weight): (u16, u16)| Member::new(n, 0x0a00_0000 + u32::from(n), weight);
        Maglev::new(size, backends.into_iter().map(member).collect())
    }

    fn equal(size: u32, backends: Range<u16>) -> Maglev {
        table(size, backends.map(|n| (n, 1)))
    }

    fn share(table: &Maglev, backend: u16) -> f64 {
        let count = |places: usize| f64::from(u32::try_from(places).unwrap());
        count(table.places.iter().filter(|place| **place == backend).count()) / count(table.places.len())
    }

    #[test]
    fn only_primes_are_sizes() {
        for good in [7, 251, 2039, 4093, 65_521, 131_071] {
            assert!(is_size(good), "{good}");
        }
        for bad in [0, 1, 2, 5, 9, 1024, 2041, 65_536, 131_101] {
            assert!(!is_size(bad), "{bad}");
        }
    }

    #[test]
    fn nobody_and_one() {
        assert_eq!(table(251, []).choose(7, 0), None);
        assert!([0, 1, u64::MAX].into_iter().all(|hash| table(251, [(9, 3)]).choose(hash, 4) == Some(9)));
    }

    #[test]
    fn each_has_its_part() {
        let even = equal(2039, 0..10);
        assert!((0..10).all(|n| (share(&even, n) - 0.1).abs() < 0.001));
        let weighted = table(2039, [(1, 1), (2, 2), (3, 5)]);
        for (n, part) in [(1, 0.125), (2, 0.25), (3, 0.625)] {
            assert!((share(&weighted, n) - part).abs() < 0.005, "{n}: {}", share(&weighted, n));
        }
    }

    /// What a change moves is at most half as much again as it must.
    #[test]
    fn few_places_change_hands_that_need_not() {
        for (size, count) in [(2039_u32, 3_u16), (2039, 10), (2039, 16), (16_381, 50), (131_071, 100)] {
            let (mut moved, mut must) = (0, 0);
            let all = equal(size, 0..count);
            for gone in (0..count).step_by(usize::from(count / 3)) {
                let rest = table(size, (0..count).filter(|n| *n != gone).map(|n| (n, 1)));
                // Read one way a backend goes, the other way it comes.
                moved += all.places.iter().zip(&rest.places).filter(|(one, other)| one != other).count();
                must += all.places.iter().filter(|place| **place == gone).count();
            }
            assert!(2 * moved <= 3 * must, "{count} backends, {size} places: {moved} moved, {must} must");
        }
    }

    #[test]
    fn another_turn_finds_another_backend() {
        let table = equal(2039, 0..4);
        for hash in (0..1000_u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
            let found: Vec<_> = (0..16).map(|turn| table.choose(hash, turn)).collect();
            assert!(found.iter().any(|other| *other != found[0]), "{hash:x}: {found:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn sessions_spread_by_weight(weights in prop::collection::vec(1_u16..8, 2..9)) {
            let table = table(4093, (0..).zip(weights.iter().copied()));
            let sum = f64::from(weights.iter().sum::<u16>());
            let mut seen = vec![0_u32; weights.len()];
            for port in 0..30_000_u32 {
                let client = Tuple {
                    source: 0xc633_6400 + port / 1000, destination: 0xcb00_710a,
                    source_port: (port * 7) as u16, destination_port: 80, protocol: 6,
                };
                seen[usize::from(table.choose(of_session(&client), 0).unwrap())] += 1;
            }
            for (weight, count) in weights.iter().zip(seen) {
                let off = f64::from(count) / 30_000.0 - f64::from(*weight) / sum;
                prop_assert!(off.abs() < 0.02, "weight {weight} of {sum}: {off}");
            }
        }
    }
}
