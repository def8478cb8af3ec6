//! Client affinity: the backend of each client of a Service port, for Services with `sessionAffinity: ClientIP`.
//!
//! A client's sessions arrive on any queue, so all workers share one table: one atomic word per client and Service
//! port, written when a session opens. The backend already follows from the client's address (Maglev); the table only
//! keeps that choice stable while backends are added and removed. An evicted entry costs no more than that.
//!
//! As in kube-proxy, a choice belongs to a Service port, whichever of the Service's VIPs the client uses: another port
//! may have other backends. [`stored`] keeps choices for the next process and for other gateways.

pub mod stored;

use std::sync::atomic::Ordering::Relaxed;

use crate::flow::address::Address;
use crate::flow::ids::ServiceId;
use crate::flow::listener::Listener;
use crate::flow::sync::AtomicU64;
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};
use crate::policy::compiled::{Family, Policy};

/// Entries per bucket: the table is set-associative.
const WAYS: usize = 4;
/// A word: the time in the lowest bits, then the backend's hash, then the client's tag. 0 is an empty entry.
const TIME_BITS: u32 = 20;
const BACKEND_BITS: u32 = 24;
const TIME: u64 = (1 << TIME_BITS) - 1;
const BACKEND: u64 = (1 << BACKEND_BITS) - 1;
/// A word counts time in units of 1024 ms, a power of two: so a tick that wraps around leaves no gap.
const UNIT_BITS: u32 = 10;
/// How far in the future a time may be: every worker reads the clock for itself.
const MAX_SKEW_MS: u32 = 60_000;

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

/// A client of a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceClient<A> {
    /// The client.
    pub address: A,
    pub service: ServiceId,
    /// The port at the Service's VIPs.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

impl<A: Address> ServiceClient<A> {
    /// The sender of a packet to a VIP of the Service.
    pub fn of(packet: &Tuple<A>, service: ServiceId) -> Self {
        Self { address: packet.source, service, port: packet.destination_port, protocol: packet.protocol }
    }
}

/// A client's backend, by what identifies both at every gateway and in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice<A> {
    pub client: A,
    /// The VIP and port that it used last.
    pub frontend: Listener<A>,
    pub backend: Listener<A>,
    /// When it opened its last session.
    pub seen: Tick,
}

impl<A: Address> Choice<A> {
    /// The choice of a session that was opened at `seen`, by its first packet before and after translation.
    pub fn of(origin: &Tuple<A>, translated: &Tuple<A>, seen: Tick) -> Self {
        Self { client: origin.source, frontend: origin.receiver(), backend: translated.receiver(), seen }
    }

    /// The first packet of such a session before and after translation. The client's port is none of its own: it
    /// spreads the records of choices over workers, those of one client to one worker.
    pub fn tuples(&self) -> (Tuple<A>, Tuple<A>) {
        let to = |receiver: &Listener<A>| Tuple {
            source: self.client,
            destination: receiver.address,
            source_port: (self.client.mix() >> 16) as u16,
            destination_port: receiver.port,
            protocol: receiver.protocol,
        };
        (to(&self.frontend), to(&self.backend))
    }

    /// Milliseconds since the client opened its last session.
    pub fn age_ms(&self, now: Tick) -> u32 {
        age_ms(self.seen, now)
    }
}

impl<A: Family> Choice<A> {
    /// The client and the backend, as the table has them; `None` if the policy has none of them, or the choice has
    /// expired.
    pub fn in_force(&self, policy: &Policy, now: Tick) -> Option<(ServiceClient<A>, BackendHash)> {
        let (service, target) = policy.permitted_backend(&self.frontend, &self.backend)?;
        let seconds = service.spec.affinity?;
        let backend = BackendHash::of(service.backend_hash(target)?);
        let Listener { port, protocol, .. } = self.frontend;
        let client = ServiceClient { address: self.client, service: service.id, port, protocol };
        (u64::from(self.age_ms(now)) <= u64::from(seconds) * 1000).then_some((client, backend))
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

    /// The backend of a client, if its last session was opened at most `seconds` ago.
    pub fn find<A: Address>(&self, client: &ServiceClient<A>, seconds: u32, now: Tick) -> Option<BackendHash> {
        let (bucket, tag) = self.bucket(client);
        let words = bucket.iter().map(|entry| entry.load(Relaxed)).filter(|word| is_tagged(*word, tag));
        // Two workers that record a new client at once may take a way each.
        let word = words.min_by_key(|word| age(*word, now))?;
        // A choice lasts up to two units longer, never shorter.
        let limit = u64::from(seconds) * 1000 + (1 << UNIT_BITS) - 1;
        let backend = BackendHash((word >> TIME_BITS & BACKEND) as u32);
        (u64::from(age(word, now)) << UNIT_BITS <= limit).then_some(backend)
    }

    /// Records the backend that the client was sent to at the time `seen`, unless it was sent somewhere later.
    pub fn record<A: Address>(&self, client: &ServiceClient<A>, backend: BackendHash, seen: Tick, now: Tick) {
        let (bucket, tag) = self.bucket(client);
        let word = tag << (TIME_BITS + BACKEND_BITS) | u64::from(backend.0) << TIME_BITS | time(seen);
        let words = bucket.each_ref().map(|entry| entry.load(Relaxed));
        let ages = words.map(|word| (word != 0).then(|| age(word, now)));
        let own = words.iter().position(|word| is_tagged(*word, tag));
        if let Some(way) = way(ages, own, age(word, now)) {
            bucket[way].store(word, Relaxed);
        }
    }

    /// Takes up a choice of a former process or of another gateway; false if it isn't in force.
    pub fn adopt<A: Family>(&self, choice: &Choice<A>, policy: &Policy, now: Tick) -> bool {
        let Some((client, backend)) = choice.in_force(policy, now) else { return false };
        self.record(&client, backend, choice.seen, now);
        true
    }

    fn bucket<A: Address>(&self, client: &ServiceClient<A>) -> (&[AtomicU64; WAYS], u64) {
        let ServiceClient { address, service: ServiceId(service), port, protocol } = *client;
        let at_port = Tuple { source: address, destination_port: port, protocol, ..Tuple::default() };
        let hash = self.key.draw(self.key.hash(&at_port) ^ u64::from(service));
        // A tag is never 0, so no word in use is.
        let tag = hash >> (TIME_BITS + BACKEND_BITS) | 1;
        (&self.buckets[hash as usize & (self.buckets.len() - 1)], tag)
    }
}

/// The way that a choice of this age takes in a bucket, given the ages of those in it, and the way of the same
/// client's. `None`: that one is later, or all others are.
fn way(ages: [Option<u32>; WAYS], own: Option<usize>, age: u32) -> Option<usize> {
    let least_recent = || (0..WAYS).max_by_key(|way| ages[*way]);
    let way = own.or_else(|| ages.iter().position(Option::is_none)).or_else(least_recent)?;
    ages[way].is_none_or(|other| other >= age).then_some(way)
}

fn is_tagged(word: u64, tag: u64) -> bool {
    word >> (TIME_BITS + BACKEND_BITS) == tag
}

/// A time as a word stores it: it wraps around every twelve days.
fn time(at: Tick) -> u64 {
    u64::from(at.0 >> UNIT_BITS) & TIME
}

/// Age of a word, in units.
fn age(word: u64, now: Tick) -> u32 {
    let age = (time(now).wrapping_sub(word) & TIME) as u32;
    if age > TIME as u32 - (MAX_SKEW_MS >> UNIT_BITS) { 0 } else { age }
}

/// Milliseconds since `seen`, which wrap around after fifty days.
fn age_ms(seen: Tick, now: Tick) -> u32 {
    let age = now.0.wrapping_sub(seen.0);
    if age > u32::MAX - MAX_SKEW_MS { 0 } else { age }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::flow::address::V6;

    const CLIENT: ServiceClient<u32> =
        ServiceClient { address: 0xc633_640a, service: ServiceId(7), port: 80, protocol: 6 };
    const ONE: BackendHash = BackendHash(1);
    const OTHER: BackendHash = BackendHash(2);

    fn table(clients: usize) -> AffinityTable {
        AffinityTable::new(clients, HashKey::fixed())
    }

    /// The client with the address that many addresses behind.
    fn client(n: u32) -> ServiceClient<u32> {
        ServiceClient { address: CLIENT.address + n, ..CLIENT }
    }

    #[test]
    fn a_client_keeps_its_backend_until_the_affinity_timeout() {
        // At the start of the clock, and where it wraps around.
        for start in [0, u32::MAX - 30_000] {
            let table = table(100);
            let at = |second: u32| Tick(start).plus(second * 1000 + 999);
            assert_eq!(table.find(&CLIENT, 60, at(5)), None);
            table.record(&CLIENT, ONE, at(5), at(5));
            assert_eq!(table.find(&CLIENT, 60, at(65)), Some(ONE));
            assert_eq!(table.find(&CLIENT, 60, at(68)), None, "expired");
            table.record(&CLIENT, OTHER, at(70), at(70));
            assert_eq!(table.find(&CLIENT, 60, at(100)), Some(OTHER));
        }
    }

    #[test]
    fn every_port_of_every_service_has_its_own_choice() {
        let (table, now) = (table(100), Tick(5_000));
        let others = [
            ServiceClient { service: ServiceId(8), ..CLIENT },
            ServiceClient { port: 443, ..CLIENT },
            ServiceClient { protocol: 17, ..CLIENT },
        ];
        table.record(&CLIENT, ONE, now, now);
        for other in others {
            assert_eq!(table.find(&other, 60, now), None);
            table.record(&other, OTHER, now, now);
        }
        assert_eq!(table.find(&CLIENT, 60, now), Some(ONE));
        let v6 = ServiceClient { address: V6::from_bits(1), service: ServiceId(7), port: 80, protocol: 6 };
        assert_eq!(table.find(&v6, 60, now), None);
        table.record(&v6, OTHER, now, now);
        assert_eq!((table.find(&v6, 60, now), table.find(&CLIENT, 60, now)), (Some(OTHER), Some(ONE)));
    }

    #[test]
    fn the_later_choice_counts_in_whatever_order_they_arrive() {
        let (table, now) = (table(100), Tick(50_000));
        table.record(&CLIENT, ONE, Tick(20_000), now);
        table.record(&CLIENT, OTHER, Tick(10_000), now);
        assert_eq!(table.find(&CLIENT, 60, now), Some(ONE), "the other one is older");
        table.record(&CLIENT, OTHER, Tick(30_000), now);
        assert_eq!(table.find(&CLIENT, 60, now), Some(OTHER));
    }

    #[test]
    fn a_worker_whose_clock_was_read_earlier_finds_the_choice() {
        let table = table(100);
        table.record(&CLIENT, ONE, Tick(1_024), Tick(1_024));
        assert_eq!(table.find(&CLIENT, 60, Tick(1_023)), Some(ONE));
    }

    #[test]
    fn the_least_recently_used_entry_is_evicted() {
        let table = table(1);
        for n in 0..5 {
            table.record(&client(n), ONE, Tick(n * 2_000), Tick(n * 2_000));
        }
        let found = |now| (0..5).filter(|n| table.find(&client(*n), 60, now).is_some()).collect::<Vec<_>>();
        assert_eq!(found(Tick(10_000)), [1, 2, 3, 4]);
        // One that is older than all others evicts none.
        table.record(&client(0), ONE, Tick(0), Tick(10_000));
        assert_eq!(found(Tick(10_000)), [1, 2, 3, 4]);
    }
}
