//! Replication between gateways, in slices of the session table: lists records for a full round, applies records of
//! other gateways, purges standby sessions. Cursors count slots: first those of IPv4, then those of IPv6, then those of
//! the backends of clients with session affinity.

use crate::flow::address::V6;
use crate::flow::direction::Direction;
use crate::flow::ids::{GatewayId, Owner, Slot, WorkerId};
use crate::flow::time::Tick;
use crate::policy::compiled::Policy;
use crate::ports::BlockId;
use crate::ports::allocator::Allocator;
use crate::replication::owner::owner;
use crate::replication::queue::ReplicationQueue;
use crate::replication::round::{PurgeChunk, RecordChunk};
use crate::replication::{accounting, targets};
use crate::session::affinity::stored::StoredChoices;
use crate::session::affinity::{AffinityTable, Choice};
use crate::session::entry::{Entry, Flags};
use crate::session::flow_directory::FlowDirectory;
use crate::session::record::{FamilyRecord, RecordState, ReplicationRecord};
use crate::session::standby::{Applied, RecordRejected};
use crate::session::{SessionFamily, Sessions};

/// Sessions that one command reads at most, and slots, most of which are skipped without reading the entry: each command
/// costs the control thread a round trip, and the worker must not pause for more than some ten microseconds.
const MAX_SESSIONS: usize = 1_024;
const MAX_SLOTS: u64 = 1 << 16;
/// Slots of clients' backends that one command reads at most.
const MAX_CHOICES: u64 = 2_048;

/// Writes records of the sessions that a gateway is a replica target of, then those of the backends of clients with
/// session affinity, into the chunk, up to its capacity, and advances its cursor.
pub fn list_records(sessions: &mut Sessions, chunk: &mut RecordChunk, policy: &Policy, now: Tick) {
    let Some(cursor) = chunk.cursor else { return };
    let (epoch, since) = (policy.members().replication_epoch(), policy.members().active_since());
    chunk.observed = (epoch, since);
    let (begun_by, expected) = chunk.expected;
    let version = policy.members().policy_version();
    let has_other_policy = chunk.policy.replace(version.clone()).is_some_and(|expected| expected != *version);
    if since > begun_by || has_other_policy || expected.is_some_and(|expected| epoch != expected) {
        return;
    }
    let v4_slots = u64::from(u32::table(sessions).slots());
    let session_slots = v4_slots + u64::from(V6::table(sessions).slots());
    let choices = if sessions.choices().is_used() { sessions.choices().slots() } else { 0 };
    let next = if cursor < v4_slots {
        list_family::<u32>(sessions, cursor, chunk, policy, now)
    } else if cursor < session_slots {
        list_family::<V6>(sessions, cursor - v4_slots, chunk, policy, now) + v4_slots
    } else {
        list_choices(sessions.choices(), cursor - session_slots, chunk, policy, now) + session_slots
    };
    chunk.cursor = (next < session_slots + u64::from(choices)).then_some(next);
}

/// Lists the backends of confirmed clients with session affinity; returns the next slot.
fn list_choices(choices: &StoredChoices, cursor: u64, chunk: &mut RecordChunk, policy: &Policy, now: Tick) -> u64 {
    let (target, end) = (chunk.target, (cursor + MAX_CHOICES).min(choices.slots().into()));
    for next in cursor..end {
        if chunk.records.len() == chunk.records.capacity() {
            return next;
        }
        let slot = next as u32;
        let record = if let Some(choice) = choices.confirmed::<u32>(slot) {
            choice_record(&choice, target, policy, now)
        } else {
            choices.confirmed::<V6>(slot).and_then(|choice| choice_record(&choice, target, policy, now))
        };
        chunk.records.extend(record);
    }
    end
}

/// The record of a client's backend, if a gateway gets it and the choice is in force.
fn choice_record<A: SessionFamily>(
    choice: &Choice<A>,
    target: GatewayId,
    policy: &Policy,
    now: Tick,
) -> Option<ReplicationRecord> {
    choice.in_force(policy, now)?;
    let is_target = targets::of_choice(choice.frontend.address, policy).any(|id| id == target);
    is_target.then(|| A::record(FamilyRecord::of_choice(choice, now)))
}

fn list_family<A: SessionFamily>(
    sessions: &mut Sessions,
    cursor: u64,
    chunk: &mut RecordChunk,
    policy: &Policy,
    now: Tick,
) -> u64 {
    let (slots, end) = slots_from::<A>(sessions, cursor);
    let mut left = MAX_SESSIONS;
    for slot in slots {
        if chunk.records.len() == chunk.records.capacity() || left == 0 {
            return slot.0.into();
        }
        let Some(entry) = original_direction::<A>(sessions, slot) else { continue };
        left -= 1;
        let is_target = match owner(&entry, policy) {
            // A standby session whose shard is this gateway's by now is listed like an active one.
            Owner::This => targets::of(&entry, policy).contains(chunk.target),
            // Its shard has moved there with the record pending, or acknowledged only by others. Only there: elsewhere
            // it would be purged as one that its owner hasn't listed.
            Owner::Other(new) => {
                new == chunk.target
                    && (entry.has_pending_changes() || lacks_record(&entry, policy, chunk.acknowledged_epoch))
            }
            Owner::Unowned => false,
        };
        if !is_target {
            continue;
        }
        chunk.records.push(A::record(sessions.record(slot, now)));
        let is_safe = targets::successor(&entry, policy) == Some(chunk.target);
        for at in [slot, entry.twin()] {
            let entry = A::table_mut(sessions).entry_mut(at);
            entry.note_sent();
            if is_safe {
                entry.note_acknowledged();
            }
        }
    }
    end
}

/// Whether a session's shard has moved to a gateway that may not have received its record.
fn lacks_record<A: SessionFamily>(entry: &Entry<A>, policy: &Policy, epoch: u64) -> bool {
    targets::replicated_shard(entry, policy)
        .is_some_and(|(vip, shard)| vip.shards.replica_may_lack_sessions(shard, epoch))
}

/// The tables that records are applied to.
#[derive(Debug)]
pub struct RecordApplier<'a> {
    /// The worker's sessions.
    pub sessions: &'a mut Sessions,
    pub ports: &'a mut Allocator,
    /// The policy in force.
    pub policy: &'a Policy,
    /// The flow directory of all workers.
    pub directory: Option<&'a FlowDirectory>,
    /// The affinity table of all workers.
    pub affinity: &'a AffinityTable,
    pub worker: WorkerId,
    /// The gateway that sent the records.
    pub source: GatewayId,
    /// Records for other gateways.
    pub queue: &'a mut ReplicationQueue,
    /// The current time.
    pub now: Tick,
}

impl RecordApplier<'_> {
    /// Applies records and leaves those in `records` that are entitled to space and found none. Returns how many were
    /// rejected, those of holders at their fair share included.
    pub fn apply(&mut self, records: &mut Vec<ReplicationRecord>, round: u8) -> u64 {
        let mut rejected = 0;
        records.retain(|record| {
            let result = match record {
                ReplicationRecord::V4(record) => self.apply_one(record, round),
                ReplicationRecord::V6(record) => self.apply_one(record, round),
            };
            rejected += u64::from(result.is_err());
            result == Err(RecordRejected::NoCapacity)
        });
        rejected
    }

    fn apply_one<A: SessionFamily>(&mut self, record: &FamilyRecord<A>, round: u8) -> Result<(), RecordRejected> {
        if record.state == RecordState::Affinity {
            self.adopt(&record.choice(self.now));
            return Ok(());
        }
        let entry = Entry::new(record.origin, record.translated, record.direction, Flags::default());
        let owner = owner(&entry, self.policy);
        if owner == Owner::Other(self.source) && record.state == RecordState::Open {
            self.remove_conflicting(record);
        }
        if owner == Owner::This && record.state == RecordState::Open && !self.supersedes_conflicting(record) {
            return Ok(());
        }
        let Some(vip) = self.policy.vip(entry.transport_addresses()[2].0) else {
            return Err(RecordRejected::NoCapacity);
        };
        let known = self.sessions.find(self.sessions.hash(&record.origin), &record.origin);
        let was_active = known.is_some_and(|slot| A::table(self.sessions).entry(slot).is_active());
        // Of a shard that has moved: its former owner doesn't know that yet, or its next one already does, and the owner may
        // lack the session. Like one of this gateway itself, it goes to the owner with the next full round, and no round
        // of the owner removes it until then.
        let is_from_owner = !matches!(owner, Owner::Other(other) if other != self.source);
        let standby = known.map(|slot| A::table(self.sessions).entry(slot)).filter(|entry| entry.is_standby());
        let round = if is_from_owner { round } else { standby.map_or(0, Entry::sync_round) };
        let slot = match self.sessions.apply_record(record, round, owner == Owner::This, self.now)? {
            Applied::Inserted(slot) => slot,
            result => {
                if was_active && result != Applied::Ignored {
                    self.close(&entry);
                }
                return Ok(());
            }
        };
        if record.direction == Direction::Egress && !self.ports.reserve(&vip.ports, record.translated.source_port) {
            // Another worker has the port block by now: the record comes again with the next full round.
            self.sessions.remove::<A>(slot);
            return Err(RecordRejected::NoCapacity);
        }
        if let Some(directory) = self.directory {
            directory.claim(&record.origin, self.worker);
            if record.direction == Direction::Inbound {
                directory.claim(&record.translated.reversed(), self.worker);
            }
        }
        if owner == Owner::This {
            // Its shard has moved here: this gateway's replica targets may not have it.
            self.queue.moved::<A>(slot, self.now);
        }
        Ok(())
    }

    /// Takes up a client's backend, for this gateway and for its next process.
    fn adopt<A: SessionFamily>(&mut self, choice: &Choice<A>) {
        if self.affinity.adopt(choice, self.policy, self.now) {
            self.sessions.choices_mut().store(choice, true, self.now);
        }
    }

    /// The owner of a shard is authoritative for its sessions. A session here that conflicts with a record, in a shard
    /// that this gateway does not own, is stale: left by a process that died, or its end was never replicated.
    fn remove_conflicting<A: SessionFamily>(&mut self, record: &FamilyRecord<A>) {
        for tuple in [record.origin, record.translated.reversed()] {
            let Some(slot) = self.sessions.find(self.sessions.hash(&tuple), &tuple) else { continue };
            let (slot, _) = self.sessions.slot_pair::<A>(slot);
            let entry = *A::table(self.sessions).entry(slot);
            let is_same = (entry.key(), entry.translated()) == (record.origin, record.translated);
            if is_same {
                continue;
            }
            if owner(&entry, self.policy) == Owner::This {
                // Its pod has another VIP by now: only its port is quarantined here.
                if entry.key() == record.origin && entry.flags().has(Flags::QUARANTINED) {
                    accounting::free_tuple::<A>(slot, self.sessions, self.policy, self.ports);
                }
                continue;
            }
            if entry.is_active() {
                self.close(&entry);
            }
            self.remove::<A>(slot);
        }
    }

    /// Several gateways send records of a shard that has become this gateway's. Of a session, and of standby sessions
    /// that use its pod's or its VIP's port, the one that was seen last counts: the others' gateways haven't learned of
    /// their end. A port that is quarantined here may have been allocated again by another gateway, which owned the
    /// shard meanwhile. Removes what a record supersedes; false: the record itself is superseded.
    fn supersedes_conflicting<A: SessionFamily>(&mut self, record: &FamilyRecord<A>) -> bool {
        for tuple in [record.origin, record.translated.reversed()] {
            let Some(slot) = self.sessions.find(self.sessions.hash(&tuple), &tuple) else { continue };
            let (slot, _) = self.sessions.slot_pair::<A>(slot);
            let entry = *A::table(self.sessions).entry(slot);
            if entry.is_standby() && self.is_older(record, slot) {
                return false;
            }
            let is_same = (entry.key(), entry.translated()) == (record.origin, record.translated);
            let has_quarantined_port = entry.flags().has(Flags::QUARANTINED) && entry.key() != record.origin;
            if !is_same && (entry.is_standby() || has_quarantined_port) {
                self.remove::<A>(slot);
            }
        }
        true
    }

    /// Removes a session, and releases its port.
    fn remove<A: SessionFamily>(&mut self, slot: Slot) {
        let ended = self.sessions.remove::<A>(slot);
        accounting::release_port(self.policy, self.ports, &ended);
    }

    /// Whether a record's session was seen before a session here.
    fn is_older<A: SessionFamily>(&self, record: &FamilyRecord<A>, slot: Slot) -> bool {
        let table = A::table(self.sessions);
        let entry = table.entry(slot);
        let known = entry.last_seen().later(table.entry(entry.twin()).last_seen());
        let [original, reply] = &record.directions;
        let record_seen = Tick(self.now.0.wrapping_sub(original.idle_ms.min(reply.idle_ms)));
        !record_seen.reached(known)
    }

    /// A session of this gateway that another one owns by now counts there.
    fn close<A: SessionFamily>(&self, entry: &Entry<A>) {
        accounting::release_quota(self.policy, &entry.key(), &entry.translated(), entry.direction());
    }
}

/// Removes the standby sessions of an owner's shards that its last full round did not contain, and advances the chunk's
/// cursor. They may be open: this gateway need not be a replica target any more. The active members must not have
/// changed since the round began: the owner had no reason to list sessions of shards that it got later. Nor must its
/// policy be another one: by a later policy it may own no longer what it owns by the one here, and lists nothing of it.
pub fn purge(sessions: &mut Sessions, ports: &mut Allocator, chunk: &mut PurgeChunk, policy: &Policy) {
    let Some(cursor) = chunk.cursor else { return };
    if policy.members().active_since() > chunk.view {
        (chunk.cursor, chunk.outdated) = (None, true);
        return;
    }
    if chunk.policy != *policy.members().policy_version() {
        (chunk.cursor, chunk.has_other_policy) = (None, true);
        return;
    }
    let v4_slots = u64::from(u32::table(sessions).slots());
    chunk.cursor = if cursor < v4_slots {
        Some(purge_family::<u32>(sessions, ports, cursor, chunk, policy))
    } else {
        let next = purge_family::<V6>(sessions, ports, cursor - v4_slots, chunk, policy);
        (next < V6::table(sessions).slots().into()).then_some(next + v4_slots)
    };
}

fn purge_family<A: SessionFamily>(
    sessions: &mut Sessions,
    ports: &mut Allocator,
    cursor: u64,
    chunk: &mut PurgeChunk,
    policy: &Policy,
) -> u64 {
    let (slots, end) = slots_from::<A>(sessions, cursor);
    let mut left = MAX_SESSIONS;
    for slot in slots {
        if left == 0 {
            return slot.0.into();
        }
        let Some(entry) = original_direction::<A>(sessions, slot) else { continue };
        left -= 1;
        let is_owned = owner(&entry, policy) == Owner::Other(chunk.owner);
        // A session still active here in a shard that this gateway lost was not listed either. The owner cannot have
        // listed sessions with records that are still pending.
        if !is_owned || entry.has_pending_changes() || (entry.is_standby() && entry.sync_round() == chunk.round & 0x0f)
        {
            continue;
        }
        if lacks_record(&entry, policy, chunk.acknowledged_epoch) {
            chunk.kept = true;
            continue;
        }
        if !entry.is_standby() {
            accounting::release_quota(policy, &entry.key(), &entry.translated(), entry.direction());
        }
        let ended = sessions.remove::<A>(slot);
        accounting::release_port(policy, ports, &ended);
        chunk.removed += 1;
    }
    end
}

/// The worker that applies a record: the owner of its port, else the one that the port's block is assigned to by
/// modulo.
pub fn worker_of(record: &ReplicationRecord, policy: &Policy, workers: u8) -> WorkerId {
    let (vip, port) = record.vip_and_port();
    let workers = workers.max(1);
    if record.direction() == Direction::Egress {
        let owner = policy.vip_at(vip).and_then(|vip| vip.ports.pool.owner(port));
        return owner.unwrap_or(WorkerId((BlockId::of(port).0 % u16::from(workers)) as u8));
    }
    WorkerId((record.initiator_port() % u16::from(workers)) as u8)
}

/// The slots that one command reads at most, and where the next one continues.
fn slots_from<A: SessionFamily>(sessions: &Sessions, cursor: u64) -> (impl Iterator<Item = Slot> + use<A>, u64) {
    let end = (cursor + MAX_SLOTS).min(A::table(sessions).slots().into());
    let slot = |at: u64| Slot(u32::try_from(at).unwrap_or(u32::MAX));
    ((cursor..end).map(slot), end)
}

/// The entry of a session's original direction, if `slot` holds that and the session has not ended.
fn original_direction<A: SessionFamily>(sessions: &Sessions, slot: Slot) -> Option<Entry<A>> {
    let table = A::table(sessions);
    // Only the slot of the original direction has a deadline, so most slots are skipped without reading the entry.
    let entry = (table.deadline(slot) != 0).then(|| *table.entry(slot))?;
    (!entry.flags().has(Flags::QUARANTINED)).then_some(entry)
}
