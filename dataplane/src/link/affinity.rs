//! Which backend a client was last sent to, for Services whose clients stay with their backend (`sessionAffinity: ClientIP`).
//!
//! A client's sessions come in on any queue, so the workers share one table: a word a client, written where sessions open. Which
//! backend a client gets follows from its address in the first place; the table only keeps it there while backends come and go.
//! A word that was crowded out costs no more than that.

use std::sync::atomic::Ordering::Relaxed;

use crate::address::Address;
use crate::session::tuple::{HashKey, Tuple};
use crate::snapshot::service::ServiceId;
use crate::sync::AtomicU64;
use crate::time::Tick;

/// Places that one client may have.
const WAYS: usize = 4;
/// A word: seconds in the lowest bits, then the backend, then the tag. 0 is an empty place.
const SECOND_BITS: u32 = 20;
const BACKEND_BITS: u32 = 24;
const SECONDS: u64 = (1 << SECOND_BITS) - 1;
const BACKEND: u64 = (1 << BACKEND_BITS) - 1;

/// A backend as the table knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Print(u32);

impl Print {
    /// That of a backend's address. Two backends of a Service have the same once in 16 million times.
    pub fn of<A: Address>(backend: A) -> Self {
        let hash = HashKey::fixed().hash(&Tuple { source: backend, ..Tuple::default() });
        Self((hash >> (64 - BACKEND_BITS)) as u32)
    }
}

/// The clients of all workers.
#[derive(Debug)]
pub struct Affinity {
    places: Box<[[AtomicU64; WAYS]]>,
    key: HashKey,
}

impl Affinity {
    /// A table for about this many clients. `key` is not any other table's, but the same for all workers.
    pub fn new(clients: usize, key: HashKey) -> Self {
        let buckets = (clients / 2).max(1).next_power_of_two();
        Self { places: (0..buckets).map(|_| Default::default()).collect(), key }
    }

    /// The backend that a client of a Service was sent to within so many seconds.
    pub fn find<A: Address>(&self, client: A, service: ServiceId, seconds: u32, now: Tick) -> Option<Print> {
        let (bucket, tag) = self.bucket(client, service);
        let word = bucket.iter().map(|place| place.load(Relaxed)).find(|word| *word != 0 && is_tagged(*word, tag))?;
        let backend = Print((word >> SECOND_BITS & BACKEND) as u32);
        (age(word, now) <= u64::from(seconds)).then_some(backend)
    }

    /// Notes which one it is sent to now.
    pub fn note<A: Address>(&self, client: A, service: ServiceId, backend: Print, now: Tick) {
        let (bucket, tag) = self.bucket(client, service);
        let word = tag << (SECOND_BITS + BACKEND_BITS) | u64::from(backend.0) << SECOND_BITS | seconds(now);
        let words = bucket.each_ref().map(|place| place.load(Relaxed));
        let own = words.iter().position(|word| *word != 0 && is_tagged(*word, tag));
        let place = own.or_else(|| words.iter().position(|word| *word == 0)).unwrap_or_else(|| {
            // Whoever was quiet for longest.
            (0..WAYS).max_by_key(|way| age(words[*way], now)).unwrap_or(0)
        });
        bucket[place].store(word, Relaxed);
    }

    fn bucket<A: Address>(&self, client: A, ServiceId(service): ServiceId) -> (&[AtomicU64; WAYS], u64) {
        let (source_port, destination_port) = ((service >> 16) as u16, service as u16);
        let hash = self.key.hash(&Tuple { source: client, source_port, destination_port, ..Tuple::default() });
        // A tag is never 0, so no word is.
        let tag = hash >> (SECOND_BITS + BACKEND_BITS) | 1;
        (&self.places[hash as usize & (self.places.len() - 1)], tag)
    }
}

fn is_tagged(word: u64, tag: u64) -> bool {
    word >> (SECOND_BITS + BACKEND_BITS) == tag
}

/// Seconds as a word holds them: they come around every twelve days.
fn seconds(now: Tick) -> u64 {
    u64::from(now.0 / 1000) & SECONDS
}

fn age(word: u64, now: Tick) -> u64 {
    seconds(now).wrapping_sub(word) & SECONDS
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    const SERVICE: ServiceId = ServiceId(7);
    const CLIENT: u32 = 0xc633_640a;

    #[test]
    fn a_client_stays_for_as_long_as_it_comes_back_in_time() {
        let table = Affinity::new(100, HashKey::fixed());
        let (one, other) = (Print::of(0x0a00_0001_u32), Print::of(0x0a00_0002_u32));
        let at = |second: u32| Tick(second * 1000 + 999);
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(5)), None);
        table.note(CLIENT, SERVICE, one, at(5));
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(65)), Some(one));
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(66)), None, "too late");
        assert_eq!(table.find(CLIENT, ServiceId(8), 60, at(5)), None, "another Service");
        table.note(CLIENT, SERVICE, other, at(70));
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(100)), Some(other));
    }

    #[test]
    fn whoever_was_quiet_for_longest_makes_room() {
        let table = Affinity::new(1, HashKey::fixed());
        let print = Print::of(1_u32);
        for second in 0..5 {
            table.note(CLIENT + second, SERVICE, print, Tick(second * 1000));
        }
        let known = (0..5).filter(|n| table.find(CLIENT + n, SERVICE, 60, Tick(5000)).is_some());
        assert_eq!(known.collect::<Vec<_>>(), [1, 2, 3, 4]);
    }
}
