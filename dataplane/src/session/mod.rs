//! The session table of one worker: two entries per session, one for the original and one for the reply direction, in
//! one hash table per address family.
//!
//! A session is inserted whole or not at all ([`Sessions::commit`]), refreshed by packets of either direction and
//! removed whole. Expiry scans the column of deadlines in slices: at a due deadline it compares the time of the
//! session's last packet with its timeout, then sets the next deadline or ends the session. An ended session stays in
//! the table, quarantined, until its port may be reused.

pub mod admission;
pub mod affinity;
pub mod embryonic;
pub mod end_reason;
pub mod entry;
pub mod eviction;
pub mod fairness;
mod flags;
pub mod flow_directory;
pub mod lending;
pub mod migrate;
mod pair;
pub mod persistence;
pub mod quarantine;
pub mod query;
pub mod record;
pub mod restore;
pub mod sctp;
pub mod standby;
pub mod table;
pub mod tcp;
#[cfg(test)]
pub(crate) mod tests;
pub mod timeout;
pub mod track;
pub mod window;

use affinity::stored::StoredChoices;
use entry::{Entry, Flags};
use fairness::{Fairness, Holder};
use lending::Lending;
use table::{Table, TableFull};
use timeout::Timeouts;
use track::{StateChange, TrackOutcome};
use vipgate_mem::{Region, Storage, StorageError};

use self::end_reason::EndReason;
use self::query::SessionState;
use self::record::{FamilyRecord, ReplicationRecord};
use crate::flow::address::V6;
use crate::flow::direction::Direction;
use crate::flow::ids::Slot;
use crate::flow::key::Key;
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};
use crate::policy::compiled::Family;
use crate::policy::network::{NextHopId, Routed};
use crate::wire::sctp::CommonHeader;
use crate::wire::tcp::Segment;

/// An address family that has sessions.
pub trait SessionFamily: Family + Routed {
    /// The family's table.
    fn table(sessions: &Sessions) -> &Table<Self>;
    /// The family's table, mutable.
    fn table_mut(sessions: &mut Sessions) -> &mut Table<Self>;
    /// The family's table and the fair-share accounting, both mutable.
    fn parts_mut(sessions: &mut Sessions) -> (&mut Table<Self>, &mut Fairness);
    /// Wraps a replication record of this family.
    fn record(record: FamilyRecord<Self>) -> ReplicationRecord;
}

macro_rules! session_family {
    ($family:ty, $table:ident, $record:ident) => {
        impl SessionFamily for $family {
            #[inline]
            fn table(sessions: &Sessions) -> &Table<Self> {
                &sessions.$table
            }

            #[inline]
            fn table_mut(sessions: &mut Sessions) -> &mut Table<Self> {
                &mut sessions.$table
            }

            fn parts_mut(sessions: &mut Sessions) -> (&mut Table<Self>, &mut Fairness) {
                (&mut sessions.$table, &mut sessions.fairness)
            }

            fn record(record: FamilyRecord<Self>) -> ReplicationRecord {
                ReplicationRecord::$record(record)
            }
        }
    };
}

session_family!(u32, v4, V4);
session_family!(V6, v6, V6);

/// Accounts for the sessions that a table ends on its own.
pub trait Accounting {
    /// Accounts for a session that has ended or left its quarantine.
    fn release<A: SessionFamily>(&mut self, expiry: &Expiry<A>);
    /// Counts an evicted standby session. Its holder is at or below its share if `is_entitled`: the active gateway is
    /// asked for it again.
    fn standby_evicted(&mut self, is_entitled: bool);
}

/// Sessions at a due deadline that are prefetched at once.
const SWEEP_BATCH: usize = 32;

/// A session that is not in the table yet: every decision is made, no state has changed.
#[derive(Clone, Copy, Debug)]
pub struct Draft<A: SessionFamily> {
    /// Original-direction tuple, as received.
    pub origin: Tuple<A>,
    /// Original-direction tuple, after translation.
    pub translated: Tuple<A>,
    /// Traffic direction of the original direction.
    pub direction: Direction,
    /// Traffic direction of the replies.
    pub reply_direction: Direction,
    /// Ingress side of the original direction: see [`Flags::side`].
    pub origin_side: u8,
    /// Ingress side of the replies.
    pub reply_side: u8,
    /// Next hop of the original direction.
    pub next_hop: Option<NextHopId>,
    /// Policy generation that the decision is based on.
    pub generation: u32,
}

/// A session that has ended. It no longer counts against capacity or quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended<A: SessionFamily> {
    /// Original-direction tuple, as received.
    pub origin: Tuple<A>,
    /// Original-direction tuple, after translation.
    pub translated: Tuple<A>,
    /// Traffic direction of the original direction.
    pub direction: Direction,
}

/// Result of a session reaching its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry<A: SessionFamily> {
    /// It has ended; its port, if it has one, is quarantined.
    Ended(EndReason, Ended<A>),
    /// Its quarantine is over: the port may be released.
    Released(Ended<A>),
}

/// The sessions of one worker.
#[derive(Debug)]
pub struct Sessions {
    v4: Table<u32>,
    v6: Table<V6>,
    key: HashKey,
    timeouts: Timeouts,
    /// Active sessions: owned by this gateway and not quarantined.
    open: u32,
    /// Standby sessions, replicated from other gateways.
    standby: u32,
    capacity: u32,
    /// Part of the capacity that only holders below their fair share may use.
    reserve: u32,
    /// Upper bound of the standby sessions in the reserve.
    standby_in_reserve: u32,
    fairness: Fairness,
    /// What the other workers lend; `None`: there are no others.
    lending: Option<Lending>,
    choices: StoredChoices,
}

impl Sessions {
    /// Tables for `capacity` sessions of each family, in process memory.
    ///
    /// # Errors
    /// If memory for the tables can't be allocated.
    pub fn new(capacity: u32, timeouts: Timeouts, key: HashKey) -> Result<Self, StorageError> {
        Self::in_storage(capacity, timeouts, key, &mut Storage::Process)
    }

    /// Bytes that the tables take in a region, header included; `None` if `capacity` exceeds the slot numbers.
    pub fn region_bytes(capacity: u32) -> Option<u64> {
        let entries = capacity.checked_mul(2)?;
        let header = Region::bytes_of::<persistence::Header>(1);
        let tables = Table::<u32>::region_bytes(entries)? + Table::<V6>::region_bytes(entries)?;
        Some(header + tables + StoredChoices::region_bytes(capacity))
    }

    fn in_storage(
        capacity: u32,
        timeouts: Timeouts,
        key: HashKey,
        storage: &mut Storage<'_>,
    ) -> Result<Self, StorageError> {
        let (v4, v6) = (Table::new(capacity * 2, storage)?, Table::new(capacity * 2, storage)?);
        let (fairness, choices) = (Fairness::new(capacity)?, StoredChoices::new(capacity, key, storage)?);
        Ok(Self {
            v4,
            v6,
            key,
            timeouts,
            open: 0,
            standby: 0,
            capacity,
            reserve: 0,
            standby_in_reserve: 0,
            fairness,
            lending: None,
            choices,
        })
    }

    /// Active sessions.
    pub fn open_count(&self) -> u32 {
        self.open
    }

    /// Active and standby sessions: what counts against the capacity.
    fn in_use(&self) -> u32 {
        self.open + self.standby
    }

    /// The backends of clients with session affinity.
    pub fn choices(&self) -> &StoredChoices {
        &self.choices
    }

    /// The backends of clients with session affinity, mutable.
    pub fn choices_mut(&mut self) -> &mut StoredChoices {
        &mut self.choices
    }

    /// The timeouts in force.
    pub fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// Hash of a table key.
    #[inline]
    pub fn hash_key<A: SessionFamily>(&self, key: &Key<A>) -> u64 {
        self.key.hash_key(key)
    }

    /// Hash of a tuple.
    #[inline]
    pub fn hash<A: SessionFamily>(&self, tuple: &Tuple<A>) -> u64 {
        self.key.hash(tuple)
    }

    /// Slot of the entry with this tuple, in any session state.
    #[inline]
    pub fn find<A: SessionFamily>(&self, hash: u64, tuple: &Tuple<A>) -> Option<Slot> {
        A::table(self).find(hash, &Key::of(tuple))
    }

    /// Whether no session, active, standby or quarantined, uses the tuple as a key.
    #[inline]
    pub fn is_free<A: SessionFamily>(&self, tuple: &Tuple<A>) -> bool {
        self.find(self.hash(tuple), tuple).is_none()
    }

    /// Inserts a session. Both keys must be free. Returns the slot of its original direction.
    ///
    /// # Errors
    /// If the table is full; nothing has changed then.
    pub fn commit<A: SessionFamily>(&mut self, draft: &Draft<A>, now: Tick) -> Result<Slot, TableFull> {
        if self.in_use() >= self.capacity {
            return Err(TableFull);
        }
        let slot = self.insert(draft, now)?;
        self.open += 1;
        let holder = Holder::of(A::table(self).entry(slot), &self.key);
        self.fairness.open(holder);
        Ok(slot)
    }

    /// Inserts both entries of a session, which isn't counted yet.
    #[inline]
    fn insert<A: SessionFamily>(&mut self, draft: &Draft<A>, now: Tick) -> Result<Slot, TableFull> {
        let reply_key = draft.translated.reversed();
        let mut origin =
            Entry::new(draft.origin, draft.translated, draft.direction, Flags::ORIGIN.with_side(draft.origin_side));
        let mut reply = Entry::new(
            reply_key,
            draft.origin.reversed(),
            draft.reply_direction,
            Flags::default().with_side(draft.reply_side),
        );
        for entry in [&mut origin, &mut reply] {
            entry.set_generation(draft.generation);
            entry.set_last_seen(now);
        }
        origin.set_next_hop(draft.next_hop);
        let (origin_hash, reply_hash) = (self.hash(&draft.origin), self.hash(&reply_key));
        let (_, timeout) = self.timeouts.state(&origin, &reply);
        let table = A::table_mut(self);
        let reply_slot = table.insert(reply_hash, reply)?;
        origin.set_twin(reply_slot);
        let Ok(slot) = table.insert(origin_hash, origin) else {
            table.remove(reply_hash, reply_slot);
            return Err(TableFull);
        };
        table.entry_mut(reply_slot).set_twin(slot);
        table.set_deadline(slot, deadline(now.plus(timeout)));
        Ok(slot)
    }

    /// Updates TCP state with a segment of the direction in `slot`.
    #[inline]
    pub fn track_segment<A: SessionFamily>(&mut self, slot: Slot, segment: &Segment, now: Tick) -> TrackOutcome {
        let outcome = tcp::track_segment(A::table_mut(self), slot, segment, now);
        self.refresh_deadline::<A>(outcome, slot, now)
    }

    /// Updates SCTP state with a packet of the direction in `slot`.
    pub fn track_association<A: SessionFamily>(
        &mut self,
        slot: Slot,
        packet: &CommonHeader,
        now: Tick,
    ) -> TrackOutcome {
        let outcome = sctp::track_packet(A::table_mut(self), slot, packet);
        self.refresh_deadline::<A>(outcome, slot, now)
    }

    /// Recomputes the deadline after a state change, which may select another timeout.
    #[inline]
    fn refresh_deadline<A: SessionFamily>(&mut self, outcome: TrackOutcome, slot: Slot, now: Tick) -> TrackOutcome {
        if outcome.change != StateChange::None {
            let (origin, _) = self.slot_pair::<A>(slot);
            self.reset_deadline::<A>(origin, now);
        }
        outcome
    }

    /// Sets a session's deadline to now plus the timeout of its state.
    fn reset_deadline<A: SessionFamily>(&mut self, origin: Slot, now: Tick) {
        let (_, timeout) = self.state::<A>(origin);
        A::table_mut(self).set_deadline(origin, deadline(now.plus(timeout)));
    }

    /// State of a session, and its idle timeout in milliseconds.
    pub fn state<A: SessionFamily>(&self, origin: Slot) -> (SessionState, u32) {
        let table = A::table(self);
        let entry = table.entry(origin);
        self.timeouts.state(entry, table.entry(entry.twin()))
    }

    /// Ends a session because of policy; its port, if it has one, is quarantined.
    pub fn end<A: SessionFamily>(&mut self, slot: Slot, now: Tick) -> Expiry<A> {
        self.end_with_reason(slot, EndReason::Policy, now)
    }

    /// Ends a session for the given reason; its port, if it has one, is quarantined.
    pub fn end_with_reason<A: SessionFamily>(&mut self, slot: Slot, reason: EndReason, now: Tick) -> Expiry<A> {
        let (origin, twin) = self.slot_pair::<A>(slot);
        let holder = self.holder::<A>(origin);
        let table = A::table_mut(self);
        let ended = ended(table.entry(origin));
        for at in [origin, twin] {
            let flags = table.entry(at).flags();
            debug_assert!(!flags.has(Flags::QUARANTINED), "a session ended twice");
            table.entry_mut(at).set_flags(flags.with(Flags::QUARANTINED));
        }
        // An inbound session holds no SNAT port, so it needs no quarantine.
        let holds_port = A::table(self).entry(origin).direction() == Direction::Egress;
        let quarantine = if holds_port { self.timeouts.quarantine } else { 0 };
        A::table_mut(self).set_deadline(origin, deadline(now.plus(quarantine)));
        self.open -= 1;
        self.fairness.close(holder);
        Expiry::Ended(reason, ended)
    }

    /// Removes a session from the table, whatever its state. No packet of the current batch may belong to it.
    pub fn remove<A: SessionFamily>(&mut self, origin: Slot) -> Ended<A> {
        let entry = *A::table(self).entry(origin);
        let twin = *A::table(self).entry(entry.twin());
        let (hash, twin_hash) = (self.hash(&entry.key()), self.hash(&twin.key()));
        let table = A::table_mut(self);
        table.remove(hash, origin);
        table.remove(twin_hash, entry.twin());
        if entry.is_standby() {
            self.standby -= 1;
        } else if !entry.flags().has(Flags::QUARANTINED) {
            self.open -= 1;
        }
        if !entry.flags().has(Flags::QUARANTINED) {
            self.fairness.close(Holder::of(&entry, &self.key));
        }
        ended(&entry)
    }

    /// Handles the due deadlines of up to `slots` slots from `cursor` on. Returns the next cursor; `None` at the end of
    /// the table. `is_owned` tells whether this gateway owns the shard of a standby session.
    pub fn sweep<A: SessionFamily>(
        &mut self,
        cursor: u32,
        slots: u32,
        now: Tick,
        is_owned: impl Fn(&Entry<A>) -> bool,
        mut on_expiry: impl FnMut(Expiry<A>),
    ) -> Option<u32> {
        let mut at = cursor;
        let end = cursor.saturating_add(slots).min(A::table(self).slots());
        let mut due = [Slot(0); SWEEP_BATCH];
        while at < end {
            let count = A::table(self).due(at..end, now, &mut due);
            self.prefetch_due::<A>(&due[..count]);
            for &slot in &due[..count] {
                if let Some(expiry) = self.expire::<A>(slot, &is_owned, now) {
                    on_expiry(expiry);
                }
            }
            at = if count < SWEEP_BATCH { end } else { due[count - 1].0 + 1 };
        }
        (end < A::table(self).slots()).then_some(end)
    }

    /// Prefetches what [`Sessions::expire`] reads and writes, so that the cache misses of several sessions overlap.
    fn prefetch_due<A: SessionFamily>(&self, due: &[Slot]) {
        let table = A::table(self);
        for &slot in due {
            table.prefetch_slot(slot);
        }
        for &slot in due {
            let entry = table.entry(slot);
            table.prefetch_slot(entry.twin());
            if entry.flags().has(Flags::QUARANTINED) {
                table.prefetch(self.hash_key(&entry.table_key()));
            }
        }
        for &slot in due.iter().filter(|&&slot| table.entry(slot).flags().has(Flags::QUARANTINED)) {
            table.prefetch(self.hash_key(&table.entry(table.entry(slot).twin()).table_key()));
        }
    }

    fn expire<A: SessionFamily>(
        &mut self,
        origin: Slot,
        is_owned: impl Fn(&Entry<A>) -> bool,
        now: Tick,
    ) -> Option<Expiry<A>> {
        let table = A::table(self);
        let entry = *table.entry(origin);
        let twin = *table.entry(entry.twin());
        if entry.flags().has(Flags::QUARANTINED) {
            return Some(Expiry::Released(self.remove(origin)));
        }
        if entry.is_standby() {
            self.check_standby::<A>(origin, is_owned(&entry), now);
            return None;
        }
        let (_, timeout) = self.timeouts.state(&entry, &twin);
        let idle_since = entry.last_seen().later(twin.last_seen());
        let expires = idle_since.plus(timeout);
        if !now.reached(expires) {
            A::table_mut(self).set_deadline(origin, deadline(expires));
            return None;
        }
        let reason = Timeouts::end_reason(entry.key().protocol, entry.flags(), twin.flags());
        Some(self.end_with_reason(origin, reason, now))
    }
}

/// A deadline as stored: 0 means none, so a deadline at tick 0 moves to tick 1.
fn deadline(tick: Tick) -> u32 {
    tick.0.max(1)
}

fn ended<A: SessionFamily>(origin: &Entry<A>) -> Ended<A> {
    Ended { origin: origin.key(), translated: origin.translated(), direction: origin.direction() }
}
