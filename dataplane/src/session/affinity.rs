//! Client affinity table: the backend of each client, for Services with `sessionAffinity: ClientIP`.
//!
//! A client's sessions arrive on any queue, so all workers share one table: one atomic word per client, written when
//! a session opens. The backend already follows from the client's address (Maglev); the table only keeps that choice
//! stable while backends are added and removed. An evicted entry costs no more than that.

use std::sync::atomic::Ordering::Relaxed;

use crate::flow::address::Address;
use crate::flow::ids::ServiceId;
use crate::flow::sync::AtomicU64;
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};

/// Entries per bucket: the table is set-associative.
const WAYS: usize = 4;
/// A word: seconds in the lowest bits, then the backend's hash, then the client's tag. 0 is an empty entry.
const SECOND_BITS: u32 = 20;
const BACKEND_BITS: u32 = 24;
const SECONDS: u64 = (1 << SECOND_BITS) - 1;
const BACKEND: u64 = (1 << BACKEND_BITS) - 1;

/// Hash of a backend, as the table stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendHash(u32);

impl BackendHash {
    /// The upper bits of a [`crate::policy::maglev::backend_hash`]. Two backends of a Service collide once in 16
    /// million times.
    pub fn of(hash: u64) -> Self {
        Self((hash >> (u64::BITS - BACKEND_BITS)) as u32)
    }
}

/// The affinity table of all workers.
#[derive(Debug)]
pub struct AffinityTable {
    buckets: Box<[[AtomicU64; WAYS]]>,
    key: HashKey,
}

impl AffinityTable {
    /// A table for about this many clients. All workers use the same `key`; no other table uses it.
    pub fn new(clients: usize, key: HashKey) -> Self {
        let count = (clients / 2).max(1).next_power_of_two();
        Self { buckets: (0..count).map(|_| Default::default()).collect(), key }
    }

    /// The backend of a client of a Service, if it was recorded at most `seconds` ago.
    pub fn find<A: Address>(&self, client: A, service: ServiceId, seconds: u32, now: Tick) -> Option<BackendHash> {
        let (bucket, tag) = self.bucket(client, service);
        let word = bucket.iter().map(|entry| entry.load(Relaxed)).find(|word| *word != 0 && is_tagged(*word, tag))?;
        let backend = BackendHash((word >> SECOND_BITS & BACKEND) as u32);
        (age(word, now) <= u64::from(seconds)).then_some(backend)
    }

    /// Records the backend that the client is sent to now.
    pub fn record<A: Address>(&self, client: A, service: ServiceId, backend: BackendHash, now: Tick) {
        let (bucket, tag) = self.bucket(client, service);
        let word = tag << (SECOND_BITS + BACKEND_BITS) | u64::from(backend.0) << SECOND_BITS | seconds(now);
        let words = bucket.each_ref().map(|entry| entry.load(Relaxed));
        let own = words.iter().position(|word| *word != 0 && is_tagged(*word, tag));
        let at = own.or_else(|| words.iter().position(|word| *word == 0)).unwrap_or_else(|| {
            // Evicts the least recently used entry.
            (0..WAYS).max_by_key(|way| age(words[*way], now)).unwrap_or(0)
        });
        bucket[at].store(word, Relaxed);
    }

    fn bucket<A: Address>(&self, client: A, ServiceId(service): ServiceId) -> (&[AtomicU64; WAYS], u64) {
        let (source_port, destination_port) = ((service >> 16) as u16, service as u16);
        let hash = self.key.hash(&Tuple { source: client, source_port, destination_port, ..Tuple::default() });
        // A tag is never 0, so no word in use is.
        let tag = hash >> (SECOND_BITS + BACKEND_BITS) | 1;
        (&self.buckets[hash as usize & (self.buckets.len() - 1)], tag)
    }
}

fn is_tagged(word: u64, tag: u64) -> bool {
    word >> (SECOND_BITS + BACKEND_BITS) == tag
}

/// Seconds as stored in a word: they wrap every twelve days.
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
    fn a_client_keeps_its_backend_until_the_affinity_timeout() {
        let table = AffinityTable::new(100, HashKey::fixed());
        let (one, other) = (BackendHash::of(1 << 40), BackendHash::of(2 << 40));
        let at = |second: u32| Tick(second * 1000 + 999);
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(5)), None);
        table.record(CLIENT, SERVICE, one, at(5));
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(65)), Some(one));
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(66)), None, "expired");
        assert_eq!(table.find(CLIENT, ServiceId(8), 60, at(5)), None, "another Service");
        table.record(CLIENT, SERVICE, other, at(70));
        assert_eq!(table.find(CLIENT, SERVICE, 60, at(100)), Some(other));
    }

    #[test]
    fn the_least_recently_used_entry_is_evicted() {
        let table = AffinityTable::new(1, HashKey::fixed());
        let backend = BackendHash::of(1 << 40);
        for second in 0..5 {
            table.record(CLIENT + second, SERVICE, backend, Tick(second * 1000));
        }
        let found = (0..5).filter(|n| table.find(CLIENT + n, SERVICE, 60, Tick(5000)).is_some());
        assert_eq!(found.collect::<Vec<_>>(), [1, 2, 3, 4]);
    }
}
