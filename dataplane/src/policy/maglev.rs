//! Maglev lookup table: selects the backend of a new session (Eisenbud et al., NSDI 2016, section 3.4).
//!
//! Every backend has its own permutation of the table's slots, derived from a seed; round-robin, each takes the first
//! free slot of its permutation. So all gateways build the same table, each backend gets its part of it within a slot
//! or two, and adding or removing one moves few slots more than necessary.
//!
//! The seed is the backend's address. Of several backends with one address, the first one in their order has that
//! seed, the others one of address and target port. So one more with that address changes no other permutation, unless
//! it is the new first one: then, or when the first one goes, another backend takes over the address's permutation,
//! which costs as much as removing one backend and adding it again. A seed with the port for every backend would avoid
//! that, but change the tables of all Services: while a group is upgraded, packets that ECMP sends to a gateway of the
//! other version would reach other backends, and connections of every Service would break. Besides, ports of a Service
//! share tables, since its backends have the same seeds in all of them.

use std::ops::Range;

use crate::flow::address::Address;
use crate::flow::tuple::{HashKey, Tuple};
use crate::policy::spec::first_target;

/// Not keyed: every gateway must select the same backend, before and after a restart. An attacker gains nothing: a
/// client can send one backend more traffic anyway.
const CHOICE: HashKey = HashKey::fixed();

/// Range of table sizes; only primes are valid.
pub const TABLE_SIZES: Range<u32> = 7..131_072;

/// Whether a table may have this size: a prime, so that every step visits every slot.
pub fn is_valid_size(size: u32) -> bool {
    TABLE_SIZES.contains(&size) && (2..=size.isqrt()).all(|divisor| !size.is_multiple_of(divisor))
}

/// A backend to be placed in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightedBackend {
    /// Its value in the table.
    number: u16,
    /// Its weight, relative to the others.
    weight: u16,
    /// Determines offset and step of its permutation; see [`permutation`].
    seed: u64,
}

impl WeightedBackend {
    /// A backend with `number` as its value in the table; `seed` is an [`address_seed`] or a [`backend_hash`].
    pub fn new(number: u16, seed: u64, weight: u16) -> Self {
        Self { number, weight, seed }
    }
}

/// Seed of the only backend with an address, or of the first one.
pub fn address_seed<A: Address>(address: A) -> u64 {
    CHOICE.hash(&Tuple { source: address, ..Tuple::default() })
}

/// Hash of what identifies a backend in its Service, whichever others there are: the same in all Service ports.
pub fn backend_hash<A: Address>(address: A, ports: &[u16]) -> u64 {
    let (number, port) = first_target(ports);
    CHOICE.hash(&Tuple { source: address, source_port: number, destination_port: port, ..Tuple::default() })
}

/// A lookup table of backends.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Maglev {
    /// The backends it was built from.
    members: Box<[WeightedBackend]>,
    size: u32,
    /// A single entry if there is one backend.
    slots: Box<[u16]>,
}

impl Maglev {
    /// The table of these backends, which must be sorted by address and port. `size` must satisfy [`is_valid_size`].
    pub fn new(size: u32, members: Vec<WeightedBackend>) -> Self {
        debug_assert!(is_valid_size(size), "invalid table size {size}");
        let slots = match members[..] {
            [] => Vec::new(),
            [only] => vec![only.number],
            _ => fill(size, &members),
        };
        Self { members: members.into(), size, slots: slots.into() }
    }

    /// Whether it was built from exactly these backends.
    pub fn is_built_from(&self, size: u32, members: &[WeightedBackend]) -> bool {
        self.size == size && *self.members == *members
    }

    /// Whether it has no backends.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Number of backends.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Bytes of its slots.
    pub fn slot_bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }

    /// The backend for a hash; the first few attempts give different ones where there are several.
    #[inline]
    pub fn select(&self, hash: u64, attempt: u32) -> Option<u16> {
        // The upper half selects a slot, the lower half the step for further attempts.
        let slot = ((hash >> 32) * self.slots.len() as u64) >> 32;
        let slot = slot as usize + attempt as usize * (hash as u16 | 1) as usize;
        self.slots.get(slot % self.slots.len().max(1)).copied()
    }
}

/// Hash of a session's first packet, which selects its backend.
#[inline]
pub fn session_hash<A: Address>(tuple: &Tuple<A>) -> u64 {
    CHOICE.hash(tuple)
}

/// Hash of a client, for Services with client affinity.
#[inline]
pub fn client_hash<A: Address>(client: A) -> u64 {
    CHOICE.hash(&Tuple { source: client, protocol: u8::MAX, ..Tuple::default() })
}

/// Offset and step of a backend's permutation.
fn permutation(seed: u64, size: u32) -> (u32, u32) {
    let below = |half: u64, limit: u32| ((half * u64::from(limit)) >> 32) as u32;
    (below(seed >> 32, size), below(seed & 0xffff_ffff, size - 1) + 1)
}

fn fill(size: u32, members: &[WeightedBackend]) -> Vec<u16> {
    /// Marks a free slot: no backend has this number.
    const FREE: u16 = u16::MAX;
    let heaviest = members.iter().map(|member| u32::from(member.weight)).max().unwrap_or(0).max(1);
    let mut permutations: Vec<(u32, u32)> = members.iter().map(|member| permutation(member.seed, size)).collect();
    let mut credits = vec![0_u32; members.len()];
    let mut slots = vec![FREE; size as usize];
    let mut free_slots = size;
    loop {
        for ((member, (next, step)), credit) in members.iter().zip(&mut permutations).zip(&mut credits) {
            // The heaviest backend takes a slot in each round, the others in proportion to their weight.
            *credit += u32::from(member.weight);
            if *credit < heaviest {
                continue;
            }
            *credit -= heaviest;
            loop {
                let slot = &mut slots[*next as usize];
                *next += *step;
                if *next >= size {
                    *next -= size;
                }
                if *slot == FREE {
                    *slot = member.number;
                    break;
                }
            }
            free_slots -= 1;
            if free_slots == 0 {
                return slots;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The table of the backends 10.0.0.`n`, with `n` as their values.
    fn table(size: u32, backends: impl IntoIterator<Item = (u16, u16)>) -> Maglev {
        let member =
            |(n, weight): (u16, u16)| WeightedBackend::new(n, address_seed(0x0a00_0000 + u32::from(n)), weight);
        Maglev::new(size, backends.into_iter().map(member).collect())
    }

    fn uniform(size: u32, backends: Range<u16>) -> Maglev {
        table(size, backends.map(|n| (n, 1)))
    }

    fn fraction(table: &Maglev, backend: u16) -> f64 {
        let count = |slots: usize| f64::from(u32::try_from(slots).unwrap());
        count(table.slots.iter().filter(|slot| **slot == backend).count()) / count(table.slots.len())
    }

    #[test]
    fn only_primes_are_valid_sizes() {
        for good in [7, 251, 2039, 4093, 65_521, 131_071] {
            assert!(is_valid_size(good), "{good}");
        }
        for bad in [0, 1, 2, 5, 9, 1024, 2041, 65_536, 131_101] {
            assert!(!is_valid_size(bad), "{bad}");
        }
    }

    #[test]
    fn zero_and_one_backend() {
        assert_eq!(table(251, []).select(7, 0), None);
        assert!([0, 1, u64::MAX].into_iter().all(|hash| table(251, [(9, 3)]).select(hash, 4) == Some(9)));
    }

    #[test]
    fn slots_are_distributed_by_weight() {
        let even = uniform(2039, 0..10);
        assert!((0..10).all(|n| (fraction(&even, n) - 0.1).abs() < 0.001));
        let weighted = table(2039, [(1, 1), (2, 2), (3, 5)]);
        for (n, part) in [(1, 0.125), (2, 0.25), (3, 0.625)] {
            assert!((fraction(&weighted, n) - part).abs() < 0.005, "{n}: {}", fraction(&weighted, n));
        }
    }

    /// A change moves at most 1.5 times as many slots as necessary.
    #[test]
    fn a_removed_backend_moves_few_other_slots() {
        for (size, count) in [(2039_u32, 3_u16), (2039, 10), (2039, 16), (16_381, 50), (131_071, 100)] {
            let (mut moved, mut necessary) = (0, 0);
            let all = uniform(size, 0..count);
            for removed in (0..count).step_by(usize::from(count / 3)) {
                let rest = table(size, (0..count).filter(|n| *n != removed).map(|n| (n, 1)));
                // The reverse comparison adds the backend.
                moved += all.slots.iter().zip(&rest.slots).filter(|(one, other)| one != other).count();
                necessary += all.slots.iter().filter(|slot| **slot == removed).count();
            }
            assert!(2 * moved <= 3 * necessary, "{count} backends, {size} slots: {moved} moved, {necessary} necessary");
        }
    }

    #[test]
    fn another_attempt_selects_another_backend() {
        let table = uniform(2039, 0..4);
        for hash in (0..1000_u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
            let found: Vec<_> = (0..16).map(|attempt| table.select(hash, attempt)).collect();
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
                seen[usize::from(table.select(session_hash(&client), 0).unwrap())] += 1;
            }
            for (weight, count) in weights.iter().zip(seen) {
                let off = f64::from(count) / 30_000.0 - f64::from(*weight) / sum;
                prop_assert!(off.abs() < 0.02, "weight {weight} of {sum}: {off}");
            }
        }
    }
}
