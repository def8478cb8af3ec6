//! Standby sessions: replicated from the gateways that own their shards, so that they can continue here after a
//! failover. They are in the same tables, marked. A packet that matches one is forwarded to the shard's owner, or, once
//! this gateway owns the shard, promotes it. So neither a failover nor a failback walks the table: only sessions that
//! receive packets are touched.
//!
//! A standby session holds its port here, too, so that the port is not reallocated when the shard changes its owner. It
//! ends when its owner ends it, or doesn't include it in a full sync; never by idle timeout, since packets are not
//! replicated, unless a full table evicts it (eviction.rs).

use super::entry::{Entry, Flags};
use super::pair::Role;
use super::{Draft, Ended, SessionFamily, Sessions, deadline, ended};
use crate::flow::direction::Direction;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::session::record::{DirectionRecord, FamilyRecord, RecordState};

/// Records applied by one command.
pub const MAX_RECORDS_APPLIED: usize = 256;

/// Interval of checks of a standby session without updates, and the shorter one once it would end if its shard were
/// owned here.
const CHECK_INTERVAL_MS: u32 = 600_000;
const SHORT_CHECK_INTERVAL_MS: u32 = 10_000;
/// Time that a standby session is kept beyond its timeout after its shard has become this gateway's, if no packet has
/// come for it: its former owner may still forward its packets while partitioned from all other gateways, and until
/// then its port must not be reallocated.
const GRACE_MS: u32 = 600_000;

/// Flags that are replicated.
const REPLICATED_FLAGS: Flags = Flags(Flags::SYN.0 | Flags::FIN.0 | Flags::RST.0 | Flags::SEEN.0);

/// Result of applying a replication record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// Inserted: its port must be reserved.
    Inserted(Slot),
    Updated,
    /// Ended; its port is quarantined.
    Ended,
    /// Ignored: the session has ended and wasn't here, or is this gateway's own; or the record is of no session.
    Ignored,
}

/// Why a replication record was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordRejected {
    /// The table is full, and its holder has its fair share.
    OverShare,
    /// Its holder is entitled to the session, but the table is full or a key is in use.
    NoCapacity,
}

impl<A: SessionFamily> Draft<A> {
    /// The session of a record, with its next hop and the policy in force still to be looked up.
    fn of(record: &FamilyRecord<A>) -> Self {
        let side = |half: &DirectionRecord| Flags(half.flags).side();
        Self {
            origin: record.origin,
            translated: record.translated,
            direction: record.direction,
            reply_direction: match record.direction {
                Direction::Inbound => Direction::ServiceReply,
                _ => Direction::Reply,
            },
            origin_side: side(&record.directions[0]),
            reply_side: side(&record.directions[1]),
            next_hop: None,
            generation: 0,
        }
    }
}

impl Sessions {
    /// Standby sessions, without quarantined ones.
    pub fn standby_count(&self) -> u32 {
        self.standby
    }

    /// Replication record of a session; `slot` is that of its original direction.
    pub fn record<A: SessionFamily>(&self, slot: Slot, now: Tick) -> FamilyRecord<A> {
        let table = A::table(self);
        let entry = table.entry(slot);
        let half = |entry: &Entry<A>| DirectionRecord {
            flags: entry.flags().0 & REPLICATED_FLAGS.0 | entry.ingress_side() | entry.confirmation_flags(),
            idle_ms: now.since(entry.last_seen()),
            sequence: entry.verified_sequence(),
            acknowledged: entry.acknowledged(),
            packets: entry.packets() as u32,
            bytes: entry.bytes(),
        };
        FamilyRecord {
            state: if entry.flags().has(Flags::QUARANTINED) { RecordState::Ended } else { RecordState::Open },
            direction: entry.direction(),
            origin: entry.key(),
            translated: entry.translated(),
            directions: [half(entry), half(table.entry(entry.twin()))],
        }
    }

    /// Applies a replication record of another gateway. `is_owned`: this gateway owns the session's shard, so its own
    /// state has precedence.
    ///
    /// # Errors
    /// If the table is full, or another session uses one of its tuples.
    pub fn apply_record<A: SessionFamily>(
        &mut self,
        record: &FamilyRecord<A>,
        round: u8,
        is_owned: bool,
        now: Tick,
    ) -> Result<Applied, RecordRejected> {
        let known = self.find(self.hash(&record.origin), &record.origin);
        // A late update from the shard's former owner is applied until the session is active here.
        if is_owned && known.is_some_and(|slot| !A::table(self).entry(slot).is_standby()) {
            return Ok(Applied::Ignored);
        }
        if let Some(slot) = known {
            let entry = *A::table(self).entry(slot);
            let is_same = entry.flags().has(Flags::ORIGIN) && entry.translated() == record.translated;
            let is_quarantined = entry.flags().has(Flags::QUARANTINED);
            match record.state {
                RecordState::Affinity => return Ok(Applied::Ignored),
                RecordState::Ended if !is_same || is_quarantined => return Ok(Applied::Ignored),
                RecordState::Ended => {
                    self.demote::<A>(slot, now);
                    self.end_standby::<A>(slot, now);
                    return Ok(Applied::Ended);
                }
                // The session that uses its tuple has ended at its owner; that update comes later.
                RecordState::Open if !is_same => return Err(RecordRejected::NoCapacity),
                RecordState::Open if is_quarantined => {
                    let admission = self.standby_admission(record)?;
                    self.reopen_standby::<A>(slot, now);
                    self.note_standby_admitted(admission);
                }
                RecordState::Open => self.demote::<A>(slot, now),
            }
            self.write_record::<A>(slot, &record.directions, round, now);
            return Ok(Applied::Updated);
        }
        if record.state != RecordState::Open {
            return Ok(Applied::Ignored);
        }
        let reply = record.translated.reversed();
        let admission = self.standby_admission(record)?;
        if !self.is_free(&reply) {
            return Err(RecordRejected::NoCapacity);
        }
        let slot = self.commit(&Draft::of(record), now).map_err(|_| RecordRejected::NoCapacity)?;
        self.note_standby_admitted(admission);
        self.demote::<A>(slot, now);
        self.write_record::<A>(slot, &record.directions, round, now);
        Ok(Applied::Inserted(slot))
    }

    /// Applies the record of a session in the tables of a former process, in the role that it has there. It counts for
    /// no holder: [`Sessions::restore`] follows. False if the table is full, or another session uses one of its tuples.
    pub(super) fn apply_former<A: SessionFamily>(
        &mut self,
        former: &Self,
        origin: Slot,
        role: Role,
        now: Tick,
    ) -> bool {
        let record = former.record::<A>(origin, now);
        let draft = Draft::of(&record);
        let is_full = role != Role::Quarantined && self.in_use() >= self.capacity;
        if is_full || !self.is_free(&draft.origin) || !self.is_free(&draft.translated.reversed()) {
            return false;
        }
        let Ok(slot) = self.insert(&draft, now) else { return false };
        let (former, table) = (A::table(former), A::table_mut(self));
        for (at, from) in [(slot, origin), (table.entry(slot).twin(), former.entry(origin).twin())] {
            let (entry, from) = (table.entry_mut(at), former.entry(from));
            match role {
                Role::Active => {}
                Role::Standby => entry.mark_standby(),
                Role::Quarantined => entry.set_flags(entry.flags().with(Flags::QUARANTINED)),
            }
            // What other gateways have of it.
            if from.is_acknowledged() {
                entry.note_acknowledged();
            }
            if from.is_sent() {
                entry.note_sent();
            }
        }
        self.write_record::<A>(slot, &record.directions, former.entry(origin).sync_round(), now);
        match role {
            Role::Active => self.open += 1,
            Role::Standby => self.standby += 1,
            Role::Quarantined => {}
        }
        true
    }

    /// Makes an active session standby, after its shard has moved to another gateway. No effect on a standby session.
    pub fn demote<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        let (origin, twin) = self.slot_pair::<A>(slot);
        let table = A::table_mut(self);
        if !table.entry(origin).is_active() {
            return;
        }
        for at in [origin, twin] {
            table.entry_mut(at).mark_standby();
        }
        table.set_deadline(origin, deadline(now.plus(CHECK_INTERVAL_MS)));
        self.open -= 1;
        self.standby += 1;
    }

    /// Makes a standby session active, after its shard has moved to this gateway. It is revalidated against policy like
    /// a session that was never validated.
    pub fn promote<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        let (origin, twin) = self.slot_pair::<A>(slot);
        let table = A::table_mut(self);
        debug_assert!(table.entry(origin).is_standby(), "only a standby session can be promoted");
        for at in [origin, twin] {
            let entry = table.entry_mut(at);
            entry.mark_active();
            entry.set_generation(0);
            entry.set_next_hop(None);
            entry.set_last_seen(now);
            entry.mark_stale();
        }
        self.standby -= 1;
        self.open += 1;
        self.reset_deadline::<A>(origin, now);
    }

    /// Ends a standby session; its port is quarantined like that of any session.
    pub fn end_standby<A: SessionFamily>(&mut self, slot: Slot, now: Tick) -> Ended<A> {
        let (origin, twin) = self.slot_pair::<A>(slot);
        let holder = self.holder::<A>(origin);
        let table = A::table_mut(self);
        debug_assert!(table.entry(origin).is_standby(), "the session is standby");
        for at in [origin, twin] {
            let entry = table.entry_mut(at);
            entry.mark_active();
            entry.set_flags(entry.flags().with(Flags::QUARANTINED));
        }
        let holds_port = table.entry(origin).direction() == Direction::Egress;
        let ended = ended(table.entry(origin));
        let quarantine = if holds_port { self.timeouts.quarantine } else { 0 };
        A::table_mut(self).set_deadline(origin, deadline(now.plus(quarantine)));
        self.standby -= 1;
        self.fairness.close(holder);
        ended
    }

    /// Checks a standby session at its deadline. If this gateway owns its shard by then and its grace period is over,
    /// it ends.
    pub(super) fn check_standby<A: SessionFamily>(&mut self, origin: Slot, is_owned: bool, now: Tick) {
        let entry = *A::table(self).entry(origin);
        let (_, timeout) = self.timeouts.state(&entry, A::table(self).entry(entry.twin()));
        let last_seen = entry.last_seen().later(A::table(self).entry(entry.twin()).last_seen());
        let remaining = timeout.saturating_add(GRACE_MS).saturating_sub(now.since(last_seen));
        if is_owned && remaining == 0 {
            self.end_standby::<A>(origin, now);
        } else {
            let next = remaining.clamp(SHORT_CHECK_INTERVAL_MS, CHECK_INTERVAL_MS);
            A::table_mut(self).set_deadline(origin, deadline(now.plus(next)));
        }
    }

    /// Slots of a session's original and reply direction.
    pub fn slot_pair<A: SessionFamily>(&self, slot: Slot) -> (Slot, Slot) {
        let entry = A::table(self).entry(slot);
        if entry.flags().has(Flags::ORIGIN) { (slot, entry.twin()) } else { (entry.twin(), slot) }
    }

    /// Makes a quarantined session standby: it was reopened at its owner.
    fn reopen_standby<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        let (origin, twin) = self.slot_pair::<A>(slot);
        let table = A::table_mut(self);
        for at in [origin, twin] {
            let entry = table.entry_mut(at);
            entry.set_flags(entry.flags().without(Flags::QUARANTINED).without(REPLICATED_FLAGS));
        }
        self.open += 1;
        self.fairness.open(self.holder::<A>(origin));
        self.demote::<A>(slot, now);
    }

    /// Writes the state from a record to its session.
    fn write_record<A: SessionFamily>(&mut self, slot: Slot, halves: &[DirectionRecord; 2], round: u8, now: Tick) {
        let (origin, twin) = self.slot_pair::<A>(slot);
        let table = A::table_mut(self);
        for (at, half) in [origin, twin].into_iter().zip(halves) {
            let entry = table.entry_mut(at);
            let own = entry.flags().without(REPLICATED_FLAGS);
            entry.set_flags(own.with(Flags(half.flags & REPLICATED_FLAGS.0)));
            entry.set_sync_round(round);
            entry.set_last_seen(Tick(now.0.wrapping_sub(half.idle_ms)));
            entry.apply_record(half);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::{draft, sessions};

    /// Replication record of such a session at another gateway.
    fn record_of(port: u16, vip_port: u16) -> FamilyRecord<u32> {
        let mut owner = sessions(4);
        let slot = owner.commit(&draft(port, vip_port), Tick(1000)).unwrap();
        owner.record(slot, Tick(1000))
    }

    #[test]
    fn a_standby_session_yields_its_record_unchanged_before_and_after_promotion() {
        let mut here = sessions(4);
        let record = record_of(1, 2000);
        let Ok(Applied::Inserted(slot)) = here.apply_record(&record, 1, false, Tick(1000)) else {
            panic!("not inserted")
        };
        assert_eq!(here.record(slot, Tick(1000)), record);
        here.promote::<u32>(slot, Tick(1000));
        assert_eq!(here.record(slot, Tick(1000)), record);
        assert_eq!((here.open_count(), here.standby_count()), (1, 0));
    }

    #[test]
    fn a_standby_session_ends_once_its_shard_is_owned_and_its_grace_period_is_over() {
        for is_late in [false, true] {
            let mut here = sessions(4);
            let Ok(Applied::Inserted(slot)) = here.apply_record(&record_of(1, 2000), 1, false, Tick(1000)) else {
                panic!("not inserted")
            };
            let (_, timeout) = here.state::<u32>(slot);
            let owned_from = if is_late { timeout + GRACE_MS + 100_000 } else { 0 };
            let ends = (0..4_000_u32).map(|n| n * 500).find(|elapsed| {
                let now = Tick(1000 + elapsed);
                here.sweep::<u32>(0, u32::MAX, now, |_| *elapsed >= owned_from, |_| ());
                here.standby_count() == 0
            });
            let from = (timeout + GRACE_MS).max(owned_from);
            assert!((from..=from + SHORT_CHECK_INTERVAL_MS + 500).contains(&ends.unwrap()), "{ends:?} of {from}");
        }
    }

    #[test]
    fn a_record_with_a_port_in_use_or_beyond_capacity_is_rejected() {
        let mut here = sessions(2);
        assert!(matches!(here.apply_record(&record_of(1, 2000), 1, false, Tick(1000)), Ok(Applied::Inserted(_))));
        assert_eq!(
            here.apply_record(&record_of(2, 2000), 1, false, Tick(1000)),
            Err(RecordRejected::NoCapacity),
            "replies would match two pods"
        );
        let unknown = record_of(2, 2000).origin;
        assert_eq!(here.find(here.hash(&unknown), &unknown), None);
        assert!(matches!(here.apply_record(&record_of(2, 2001), 1, false, Tick(1000)), Ok(Applied::Inserted(_))));
        assert_eq!(
            here.apply_record(&record_of(3, 2002), 1, false, Tick(1000)),
            Err(RecordRejected::OverShare),
            "the capacity is two"
        );
        assert_eq!(here.standby_count(), 2);
    }
}
