//! A gateway's session table, as far as replication is concerned: which sessions it has with which port, and what it
//! knows of their standby sessions. Mirrors `vipgate_dataplane::replication::apply` and `session::standby`; sessions
//! don't expire within the time of a world, so ports of ended sessions stay quarantined.

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::session::record::{DirectionRecord, FamilyRecord, RecordState, ReplicationRecord};

use super::engine::{Engine, Owner};

/// Stripes of ports; see `vipgate_dataplane::ports::Stripe`.
const STRIPES: u64 = 8;
/// Ports of each stripe. A gateway whose stripe is used up opens no more sessions: real ones widen the stripe only
/// where it is in use toward a remote.
const PORTS_PER_STRIPE: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum State {
    Active,
    Standby,
    Quarantined,
}

/// A session; see `vipgate_dataplane::session::entry::Entry`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    pub(super) id: u32,
    pub(super) shard: usize,
    pub(super) port: u8,
    pub(super) state: State,
    is_acknowledged: bool,
    is_sent: bool,
    round: u8,
    seen: u64,
}

/// Replication record of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) id: u32,
    pub(super) shard: usize,
    pub(super) port: u8,
    pub(super) is_ended: bool,
    /// When its owner has received its last packet.
    pub(super) seen: u64,
}

impl Record {
    pub(super) fn encode(self) -> ReplicationRecord {
        let tuple = |source, source_port| Tuple {
            source,
            destination: 0x0800_0001,
            source_port,
            destination_port: 443,
            protocol: 17,
        };
        let origin = DirectionRecord { idle_ms: self.seen as u32, ..DirectionRecord::default() };
        ReplicationRecord::V4(FamilyRecord {
            state: if self.is_ended { RecordState::Ended } else { RecordState::Open },
            direction: Direction::Egress,
            origin: tuple(self.id, 40_000),
            translated: tuple(0xc000_0201, (self.shard as u16) << 8 | u16::from(self.port)),
            directions: [origin, DirectionRecord::default()],
        })
    }

    pub(super) fn decode(record: &ReplicationRecord) -> Self {
        let ReplicationRecord::V4(record) = record else { panic!("the model has IPv4 only") };
        Self {
            id: record.origin.source,
            shard: usize::from(record.translated.source_port >> 8),
            port: record.translated.source_port as u8,
            is_ended: record.state == RecordState::Ended,
            seen: record.directions[0].idle_ms.into(),
        }
    }
}

/// Result of applying a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Applied {
    Inserted,
    Updated,
    Ignored,
    Older,
    Rejected,
}

/// Result of a purge.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Purged {
    pub(super) removed: usize,
    pub(super) is_outdated: bool,
    pub(super) has_other_policy: bool,
    pub(super) has_kept: bool,
}

/// The sessions of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Table {
    pub(super) entries: Vec<Entry>,
}

impl Entry {
    /// See `Entry::has_pending_changes`.
    fn has_pending_changes(&self) -> bool {
        !match self.state {
            State::Standby => self.is_acknowledged || self.round != 0,
            State::Active | State::Quarantined => self.is_acknowledged && self.is_sent,
        }
    }

    fn record(&self) -> Record {
        let is_ended = self.state == State::Quarantined;
        Record { id: self.id, shard: self.shard, port: self.port, is_ended, seen: self.seen }
    }

    fn enter(&mut self, state: State) {
        (self.state, self.is_acknowledged, self.is_sent, self.round) = (state, false, false, 0);
    }

    fn demote(&mut self) {
        if self.state == State::Active {
            self.enter(State::Standby);
        }
    }
}

impl Table {
    pub(super) fn find(&self, id: u32) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    fn find_mut(&mut self, id: u32) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// Whether it has a session that hasn't ended.
    pub(super) fn has(&self, id: u32) -> bool {
        self.find(id).is_some_and(|entry| entry.state != State::Quarantined)
    }

    fn is_port_free(&self, shard: usize, port: u8) -> bool {
        !self.entries.iter().any(|entry| (entry.shard, entry.port) == (shard, port))
    }

    /// The lowest free port of a stripe: two gateways that use one stripe at once collide with their first sessions.
    pub(super) fn free_port(&self, shard: usize, stripe: u64) -> Option<u8> {
        let ports = (0..PORTS_PER_STRIPE).map(|row| row * STRIPES as u8 + (stripe % STRIPES) as u8);
        ports.into_iter().find(|port| self.is_port_free(shard, *port))
    }

    pub(super) fn open(&mut self, id: u32, (shard, port): (usize, u8), now: u64) {
        let state = State::Active;
        self.entries.push(Entry {
            id,
            shard,
            port,
            state,
            is_acknowledged: false,
            is_sent: false,
            round: 0,
            seen: now,
        });
    }

    /// The session ends at its owner.
    pub(super) fn close(&mut self, id: u32) -> Option<Record> {
        let entry = self.find_mut(id)?;
        entry.enter(State::Quarantined);
        Some(entry.record())
    }

    /// A packet of a session arrives; see `stage/failover.rs` and `stage/revalidate.rs`. Returns the change of state.
    pub(super) fn receive(&mut self, id: u32, engine: &Engine, now: u64) -> Option<State> {
        let entry = self.find_mut(id)?;
        match (entry.state, engine.owner(entry.shard)) {
            (State::Active, Owner::This) => entry.seen = now,
            (State::Active, _) => {
                entry.demote();
                return Some(State::Standby);
            }
            (State::Standby, Owner::This) => {
                entry.enter(State::Active);
                entry.seen = now;
                return Some(State::Active);
            }
            (State::Standby | State::Quarantined, _) => {}
        }
        None
    }

    /// See `ReplicationQueue::send_session`: the record, and the connected targets as a bit set.
    pub(super) fn record_to_send(&mut self, id: u32, engine: &Engine, connected: u8) -> Option<(Record, u8)> {
        let entry = self.find_mut(id)?;
        let is_sent = match entry.state {
            State::Active => true,
            State::Standby => engine.owner(entry.shard) == Owner::This,
            State::Quarantined => false,
        };
        let targets = engine.replica_targets(entry.shard) & connected;
        if !is_sent || targets == 0 {
            return None;
        }
        entry.is_sent |= entry.state == State::Active;
        Some((entry.record(), targets))
    }

    /// See `mark_acknowledged`.
    pub(super) fn acknowledge(&mut self, id: u32, by: usize, engine: &Engine) {
        if let Some(entry) = self.find_mut(id).filter(|entry| entry.state == State::Active) {
            entry.is_acknowledged |= engine.successor(entry.shard) == Some(by);
        }
    }

    /// See `list_records`; a slice is a shard.
    pub(super) fn list(&mut self, shard: usize, target: usize, epoch: u64, engine: &Engine) -> Vec<Record> {
        let mut records = Vec::new();
        for entry in &mut self.entries {
            if entry.shard != shard || entry.state == State::Quarantined {
                continue;
            }
            let is_listed = match engine.owner(shard) {
                Owner::This => engine.replica_targets(shard) >> target & 1 == 1,
                Owner::Other(new) => {
                    let is_lacking = || engine.replica_may_lack_sessions(shard, epoch);
                    new == target && (entry.has_pending_changes() || is_lacking())
                }
                Owner::Unowned => false,
            };
            if is_listed {
                records.push(entry.record());
                entry.is_sent |= entry.state == State::Active;
                entry.is_acknowledged |= engine.successor(shard) == Some(target);
            }
        }
        records
    }

    /// See `RecordApplier::apply_one` and `Sessions::apply_record`.
    pub(super) fn apply(&mut self, record: &Record, round: u8, source: usize, engine: &Engine) -> Applied {
        let owner = engine.owner(record.shard);
        if owner == Owner::Other(source) && !record.is_ended {
            self.remove_conflicting(record);
        }
        let is_owned = owner == Owner::This;
        let is_from_owner = !matches!(owner, Owner::Other(other) if other != source);
        if let Some(entry) = self.find_mut(record.id) {
            let is_standby = entry.state == State::Standby;
            if is_owned && is_standby && !record.is_ended && record.seen < entry.seen {
                return Applied::Older;
            }
            if is_owned && !is_standby {
                return Applied::Ignored;
            }
            if record.is_ended {
                if entry.state == State::Quarantined {
                    return Applied::Ignored;
                }
                entry.enter(State::Quarantined);
                return Applied::Updated;
            }
            if entry.state != State::Standby {
                entry.enter(State::Standby);
            }
            entry.round = if is_from_owner { round } else { entry.round };
            entry.seen = record.seen;
            return Applied::Updated;
        }
        if record.is_ended {
            return Applied::Ignored;
        }
        if is_owned {
            let is_of_port = |it: &Entry| (it.shard, it.port) == (record.shard, record.port);
            self.entries.retain(|it| it.state != State::Quarantined || !is_of_port(it));
        }
        if !self.is_port_free(record.shard, record.port) {
            return Applied::Rejected;
        }
        let Record { id, shard, port, seen, .. } = *record;
        let round = if is_from_owner { round } else { 0 };
        let state = State::Standby;
        self.entries.push(Entry { id, shard, port, state, is_acknowledged: false, is_sent: false, round, seen });
        Applied::Inserted
    }

    /// See `RecordApplier::remove_conflicting`. A session has one port for ever here, so only the port can conflict.
    fn remove_conflicting(&mut self, record: &Record) {
        self.entries.retain(|entry| entry.id == record.id || (entry.shard, entry.port) != (record.shard, record.port));
    }

    /// See `purge`. `epoch`: that of this gateway's last round that the owner had acknowledged when it began its own.
    pub(super) fn purge(
        &mut self,
        owner: usize,
        (round, view, policy): (u8, u64, u32),
        epoch: u64,
        engine: &Engine,
    ) -> Purged {
        let (is_outdated, has_other_policy) = (engine.active_since > view, engine.policy != policy);
        let mut purged = Purged { is_outdated, has_other_policy, ..Purged::default() };
        if is_outdated || has_other_policy {
            return purged;
        }
        let before = self.entries.len();
        self.entries.retain(|entry| {
            let is_owned = engine.owner(entry.shard) == Owner::Other(owner);
            let is_listed = entry.state == State::Standby && entry.round == round & 0x0f;
            if entry.state == State::Quarantined || !is_owned || entry.has_pending_changes() || is_listed {
                return true;
            }
            let is_lacking = engine.replica_may_lack_sessions(entry.shard, epoch);
            purged.has_kept |= is_lacking;
            is_lacking
        });
        purged.removed = before - self.entries.len();
        purged
    }
}
