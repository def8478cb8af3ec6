//! Stored choices: the backends of clients with session affinity, one table for each worker beside its sessions. They
//! outlive the process with these, and full replication rounds list them. The workers' common table is filled from
//! them.
//!
//! ```text
//!   client, VIP, backend: 16 bytes each, IPv4 addresses as IPv4-mapped ones     48
//!   VIP port, backend port, protocol, confirmed, 2 free bytes                   56
//!   time of the client's last new session, check                                64
//! ```
//! A bucket has four records, and the least recent one goes. The check covers the rest of a record, with the table's
//! secret key: a record that a dying process has written in part, or damaged, counts as none.

use std::net::IpAddr;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use vipgate_mem::{Region, Slab, Storage, StorageError};

use super::{Choice, WAYS, age_ms, way};
use crate::flow::address::{Address, V6};
use crate::flow::listener::Listener;
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};

/// Sessions of a worker for each choice that it stores.
const SESSIONS_PER_CHOICE: u32 = 8;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Record {
    client: V6,
    vip: V6,
    backend: V6,
    vip_port: u16,
    backend_port: u16,
    protocol: u8,
    confirmed: u8,
    spare: [u8; 2],
    seen: u32,
    check: u32,
}

const _: () = assert!(size_of::<Record>() == 64);

impl Record {
    /// The record of a choice, without its check.
    fn new<A: Address>(choice: &Choice<A>, is_confirmed: bool) -> Self {
        Self {
            client: to_stored(choice.client),
            vip: to_stored(choice.frontend.address),
            backend: to_stored(choice.backend.address),
            vip_port: choice.frontend.port,
            backend_port: choice.backend.port,
            protocol: choice.frontend.protocol,
            confirmed: is_confirmed.into(),
            spare: [0; 2],
            seen: choice.seen.0,
            check: 0,
        }
    }

    /// Its choice, if that is of this family.
    fn choice<A: Address>(&self) -> Option<Choice<A>> {
        let listener = |address, port| Some(Listener { address: from_stored(address)?, port, protocol: self.protocol });
        Some(Choice {
            client: from_stored(self.client)?,
            frontend: listener(self.vip, self.vip_port)?,
            backend: listener(self.backend, self.backend_port)?,
            seen: Tick(self.seen),
        })
    }

    /// What identifies it in the table: client, VIP and port.
    fn key(&self) -> Tuple<V6> {
        let Self { client, vip, vip_port, protocol, .. } = *self;
        Tuple { source: client, destination: vip, source_port: 0, destination_port: vip_port, protocol }
    }
}

/// IPv4 addresses as IPv4-mapped ones, which no packet has.
fn to_stored<A: Address>(address: A) -> V6 {
    match address.to_ip() {
        IpAddr::V4(v4) => V6::from_bits(v4.to_ipv6_mapped().to_bits()),
        IpAddr::V6(v6) => V6::from_bits(v6.to_bits()),
    }
}

fn from_stored<A: Address>(address: V6) -> Option<A> {
    A::from_ip(address.to_ip().to_canonical())
}

/// The stored choices of one worker.
#[derive(Debug)]
pub struct StoredChoices {
    records: Slab<Record>,
    key: HashKey,
    /// Whether there may be any: without a Service with session affinity there are none.
    is_used: bool,
}

impl StoredChoices {
    /// Choices for a worker with so many sessions; `key` is that of its session table.
    pub(in crate::session) fn new(
        sessions: u32,
        key: HashKey,
        storage: &mut Storage<'_>,
    ) -> Result<Self, StorageError> {
        Ok(Self { records: storage.slab(slots(sessions))?, key, is_used: false })
    }

    /// Bytes that they take in a region.
    pub(in crate::session) fn region_bytes(sessions: u32) -> u64 {
        Region::bytes_of::<Record>(slots(sessions))
    }

    /// Slots, free or not.
    pub fn slots(&self) -> u32 {
        self.records.len() as u32
    }

    /// Whether there may be any choices.
    pub fn is_used(&self) -> bool {
        self.is_used
    }

    /// Notes that a former process has left choices.
    pub(in crate::session) fn mark_used(&mut self) {
        self.is_used = true;
    }

    /// The choice in a slot, if one of this family is there.
    pub fn get<A: Address>(&self, slot: u32) -> Option<Choice<A>> {
        self.record(slot).and_then(Record::choice)
    }

    /// The choice in a slot, if one of this family is there and its client is confirmed.
    pub fn confirmed<A: Address>(&self, slot: u32) -> Option<Choice<A>> {
        self.record(slot).filter(|record| record.confirmed != 0).and_then(Record::choice)
    }

    /// Stores a choice, unless a later one of the client is there. `is_confirmed`: the client receives what is sent to
    /// its address, so it isn't spoofed.
    pub fn store<A: Address>(&mut self, choice: &Choice<A>, is_confirmed: bool, now: Tick) {
        self.insert(Record::new(choice, is_confirmed), now);
    }

    /// Notes that the client of a session is confirmed. Returns its choice if that is the session's backend, and the
    /// client wasn't confirmed since it opened its last session.
    pub fn confirm<A: Address>(&mut self, session: &Choice<A>) -> Option<Choice<A>> {
        let wanted = Record::new(session, true);
        let at = self.find(&wanted)?;
        let record = &mut self.records[at];
        let is_same = (record.backend, record.backend_port) == (wanted.backend, wanted.backend_port);
        if !is_same || record.confirmed != 0 {
            return None;
        }
        record.confirmed = 1;
        record.choice()
    }

    /// Stores the choices of a former worker in the tables of new ones: all of a client in one, since its last one
    /// counts.
    pub(in crate::session) fn migrate(&self, into: &mut [&mut Self], now: Tick) {
        for record in self.records.iter().filter(|record| self.is_valid(record)) {
            let worker = (u64::from(record.client.mix()) * into.len() as u64) >> 32;
            if let Some(worker) = into.get_mut(worker as usize) {
                worker.insert(*record, now);
            }
        }
    }

    fn record(&self, slot: u32) -> Option<&Record> {
        self.records.get(slot as usize).filter(|record| self.is_valid(record))
    }

    fn insert(&mut self, mut record: Record, now: Tick) {
        record.check = self.check(&record);
        self.is_used = true;
        let (own, bucket) = (self.find(&record), self.bucket(&record));
        let age = |at: usize| {
            let other = &self.records[at];
            self.is_valid(other).then(|| age_ms(Tick(other.seen), now))
        };
        let ages: [Option<u32>; WAYS] = std::array::from_fn(|way| age(bucket.start + way));
        let own = own.map(|at| at - bucket.start);
        if let Some(way) = way(ages, own, age_ms(Tick(record.seen), now)) {
            self.records[bucket.start + way] = record;
        }
    }

    /// The slot of the record with the same client, VIP and port.
    fn find(&self, record: &Record) -> Option<usize> {
        self.bucket(record).find(|at| {
            let other = &self.records[*at];
            other.key() == record.key() && self.is_valid(other)
        })
    }

    fn bucket(&self, record: &Record) -> Range<usize> {
        let buckets = (self.records.len() / WAYS) as u64;
        let start = (((self.key.hash(&record.key()) & 0xffff_ffff) * buckets) >> 32) as usize * WAYS;
        start..start + WAYS
    }

    fn is_valid(&self, record: &Record) -> bool {
        record.check == self.check(record)
    }

    /// Covers all but the mark of confirmed clients.
    fn check(&self, record: &Record) -> u32 {
        let backend = Tuple { source: record.backend, source_port: record.backend_port, ..Tuple::default() };
        let rest = self.key.hash(&backend).rotate_left(32) ^ u64::from(record.seen);
        self.key.draw(self.key.hash(&record.key()) ^ rest) as u32
    }
}

/// Slots for the choices of so many sessions: full buckets, at least one.
fn slots(sessions: u32) -> usize {
    (sessions / SESSIONS_PER_CHOICE).max(1).next_multiple_of(WAYS as u32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Tick = Tick(50_000);

    fn choices(sessions: u32) -> StoredChoices {
        StoredChoices::new(sessions, HashKey::new([11, 22, 33, 44]), &mut Storage::Process).unwrap()
    }

    fn choice<A: Address>([client, vip, backend]: [A; 3], vip_port: u16, seen: u32) -> Choice<A> {
        let listener = |address, port| Listener { address, port, protocol: 6 };
        Choice { client, frontend: listener(vip, vip_port), backend: listener(backend, 8080), seen: Tick(seen) }
    }

    fn v4(n: u32) -> [u32; 3] {
        [0xc633_6400 + n, 0xc000_020a, 0x0af4_0105]
    }

    fn v6(n: u32) -> [V6; 3] {
        [1_u128 << 64 | u128::from(n), 2_u128 << 64, 3_u128 << 64].map(V6::from_bits)
    }

    fn all<A: Address>(choices: &StoredChoices) -> Vec<Choice<A>> {
        let mut all: Vec<Choice<A>> = (0..choices.slots()).filter_map(|slot| choices.get(slot)).collect();
        all.sort_by_key(|choice| choice.client);
        all
    }

    #[test]
    fn a_choice_is_found_as_it_was_stored_in_its_own_family_only() {
        let mut choices = choices(800);
        let (one, other) = (choice(v4(1), 80, 40_000), choice(v6(1), 80, 41_000));
        choices.store(&one, false, NOW);
        choices.store(&other, true, NOW);
        assert_eq!((all::<u32>(&choices), all::<V6>(&choices)), (vec![one], vec![other]));
        let confirmed: Vec<Choice<u32>> = (0..choices.slots()).filter_map(|slot| choices.confirmed(slot)).collect();
        assert_eq!(confirmed, []);
    }

    #[test]
    fn the_later_choice_of_a_client_at_a_port_replaces_the_earlier_one() {
        let mut choices = choices(800);
        let at = |backend, port, seen| choice([v4(1)[0], v4(1)[1], backend], port, seen);
        for stored in [at(7, 80, 40_000), at(8, 80, 39_000), at(8, 443, 38_000)] {
            choices.store(&stored, false, NOW);
        }
        let mut found = all::<u32>(&choices);
        found.sort_by_key(|choice| choice.frontend.port);
        assert_eq!(found, [at(7, 80, 40_000), at(8, 443, 38_000)]);
        choices.store(&at(8, 80, 42_000), false, NOW);
        assert!(all(&choices).contains(&at(8, 80, 42_000)) && all::<u32>(&choices).len() == 2);
    }

    #[test]
    fn a_full_bucket_keeps_the_most_recent_choices() {
        let mut choices = choices(1);
        for n in [0, 3, 1, 4, 2] {
            choices.store(&choice(v4(n), 80, 40_000 + n), false, NOW);
        }
        let clients: Vec<u32> = all::<u32>(&choices).iter().map(|choice| choice.client - v4(0)[0]).collect();
        assert_eq!(clients, [1, 2, 3, 4]);
        choices.store(&choice(v4(0), 80, 40_000), false, NOW);
        assert_eq!(all::<u32>(&choices)[0].client, v4(1)[0], "an older one replaces none");
    }

    #[test]
    fn a_client_is_confirmed_once_for_each_session_with_its_backend() {
        let mut choices = choices(800);
        let (stored, elsewhere) = (choice(v4(1), 80, 40_000), choice([v4(1)[0], v4(1)[1], 9], 80, 40_000));
        assert_eq!(choices.confirm(&stored), None, "nothing is stored");
        choices.store(&stored, false, NOW);
        assert_eq!(choices.confirm(&elsewhere), None, "a session with its former backend");
        let session = Choice { seen: Tick(0), ..stored };
        assert_eq!((choices.confirm(&session), choices.confirm(&session)), (Some(stored), None));
        assert_eq!((0..choices.slots()).filter_map(|slot| choices.confirmed::<u32>(slot)).count(), 1);
        let next = Choice { seen: Tick(41_000), ..stored };
        choices.store(&next, false, NOW);
        assert_eq!(choices.confirm(&session), Some(next), "its next session");
    }

    #[test]
    fn a_record_that_was_written_in_part_is_none() {
        let mut choices = choices(1);
        choices.store(&choice(v4(1), 80, 40_000), true, NOW);
        let at = (0..choices.records.len()).find(|at| choices.is_valid(&choices.records[*at])).unwrap();
        let whole = choices.records[at];
        for byte in (0..64).filter(|byte| !(53..56).contains(byte)) {
            let mut record = whole;
            bytemuck::bytes_of_mut(&mut record)[byte] ^= 1;
            choices.records[at] = record;
            assert_eq!(all::<u32>(&choices), [], "byte {byte}");
        }
        choices.records[at] = whole;
        assert_eq!(all::<u32>(&choices).len(), 1);
    }

    #[test]
    fn migration_keeps_the_last_choice_of_each_client_in_one_of_the_tables() {
        let mut former = [choices(8000), choices(8000)];
        for n in 0..40 {
            former[0].store(&choice(v4(n), 80, 40_000 + n), false, NOW);
            former[1].store(&choice(v4(n), 80, 41_000 + n), n % 2 == 0, NOW);
        }
        let mut into = [choices(8000), choices(8000), choices(8000)];
        for from in former.iter().rev() {
            from.migrate(&mut into.iter_mut().collect::<Vec<_>>(), NOW);
        }
        let mut found: Vec<Choice<u32>> = into.iter().flat_map(all).collect();
        found.sort_by_key(|choice| choice.client);
        assert_eq!(found, (0..40).map(|n| choice(v4(n), 80, 41_000 + n)).collect::<Vec<_>>());
        let confirmed = |choices: &StoredChoices| {
            (0..choices.slots()).filter(|slot| choices.confirmed::<u32>(*slot).is_some()).count()
        };
        assert_eq!(into.iter().map(confirmed).sum::<usize>(), 20);
    }
}
