//! A gateway's sessions: those of a real worker, which gets commands and packets. Sessions don't expire within the time
//! of a world, so ports of ended sessions stay quarantined.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use crossbeam::channel::{Sender, bounded};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::ids::{InterfaceId, Slot};
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::policy::Snapshot;
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_dataplane::replication::round::{PurgeChunk, RecordChunk};
use vipgate_dataplane::replication::sender::OutgoingRecord;
use vipgate_dataplane::session::entry::Flags;
use vipgate_dataplane::session::query::SessionFilter;
use vipgate_dataplane::session::record::{DirectionRecord, FamilyRecord, RecordState, ReplicationRecord};
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::{SessionFamily, Sessions};
use vipgate_dataplane::worker::command::Command;
use vipgate_testkit::{CaptureMode, Gateway, INSIDE, OUTSIDE, PolicySet, Protocol, Setup, packet};

use super::engine::{Engine, Owner};
use super::env::Env;
use super::specs;

/// Longer than any world, milliseconds.
const TIMEOUT: u32 = 100_000_000;
/// Frames of the device: one for a packet, others for those that are deferred.
const FRAMES: usize = 16;
/// Records of one list: few, so that the full sync of a world takes several.
const MAX_LISTED: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Active,
    Standby,
    Quarantined,
}

/// A session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) port: u16,
    pub(super) state: State,
    seen: Tick,
}

/// A record that the worker has queued.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) to: usize,
    pub(super) number: u64,
    pub(super) record: ReplicationRecord,
}

/// What became of records.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Applied {
    pub(super) rejected: u64,
    /// Records of standby sessions that have been seen later.
    pub(super) older: u64,
}

/// The sessions of a gateway.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// `None` before it has any work.
    gateway: Option<Box<Gateway>>,
    /// The snapshot that the worker has.
    snapshot: Option<Arc<Snapshot>>,
    /// Records that it has queued.
    pub(super) outgoing: VecDeque<Outgoing>,
    /// The sessions that it has ever had from other gateways.
    received: BTreeSet<u32>,
}

impl Clone for Table {
    /// Only of one without sessions: the worker of the copy is a new one.
    fn clone(&self) -> Self {
        let is_used = self.sessions().is_some_and(|sessions| u32::table(sessions).occupied() > 0);
        assert!(!is_used && self.outgoing.is_empty(), "a worker with sessions can't be copied");
        Self::default()
    }
}

/// The session of a record.
pub(super) fn session_of(record: &ReplicationRecord) -> u32 {
    specs::id_of(&of_v4(record).origin)
}

/// The session of a record, unless it has ended.
pub(super) fn live_session_of(record: &ReplicationRecord) -> Option<u32> {
    (of_v4(record).state == RecordState::Open).then(|| session_of(record))
}

pub(super) fn of_v4(record: &ReplicationRecord) -> &FamilyRecord<u32> {
    let ReplicationRecord::V4(record) = record else { panic!("the model has IPv4 only") };
    record
}

/// A record from what frames have of it.
pub(super) fn record(id: u32, port: u16, state: RecordState, directions: [DirectionRecord; 2]) -> ReplicationRecord {
    let origin = specs::origin(id);
    let translated = Tuple { source: specs::VIP, source_port: port, ..origin };
    ReplicationRecord::V4(FamilyRecord { state, direction: Direction::Egress, origin, translated, directions })
}

fn setup(record_age: u64) -> Setup {
    let timeouts = Timeouts {
        tcp_established: TIMEOUT,
        tcp_transitory: TIMEOUT,
        udp: TIMEOUT,
        icmp: TIMEOUT,
        quarantine: TIMEOUT,
    };
    Setup {
        capacity: 2 * specs::MAX_SESSIONS as u32,
        range: specs::port_range(),
        timeouts,
        frames: FRAMES,
        first_record: FirstRecord::AtAge(record_age as u32),
        ..Setup::default()
    }
}

fn new_gateway(env: &Env) -> Box<Gateway> {
    let policy = PolicySet::default();
    let mut gateway = Gateway::starting_at(&setup(env.record_age), specs::network(), &policy, env.tick());
    gateway.skip_counter_check();
    gateway.capture_mode = CaptureMode::Manual;
    gateway.commands[0].send(Command::Capture(None)).expect("the worker lives");
    gateway.turn();
    Box::new(gateway)
}

impl Table {
    fn sessions(&self) -> Option<&Sessions> {
        self.gateway.as_ref().map(|gateway| &gateway.workers[0].tables().sessions)
    }

    fn slot(&self, id: u32) -> Option<(&Sessions, Slot)> {
        let (sessions, origin) = (self.sessions()?, specs::origin(id));
        Some((sessions, sessions.find(sessions.hash(&origin), &origin)?))
    }

    pub(super) fn find(&self, id: u32) -> Option<Entry> {
        let (sessions, slot) = self.slot(id)?;
        let table = u32::table(sessions);
        let entry = table.entry(slot);
        let state = if entry.flags().has(Flags::QUARANTINED) {
            State::Quarantined
        } else if entry.is_standby() {
            State::Standby
        } else {
            State::Active
        };
        let seen = entry.last_seen().later(table.entry(entry.twin()).last_seen());
        Some(Entry { port: entry.translated().source_port, state, seen })
    }

    /// Whether it has a session that hasn't ended.
    pub(super) fn has(&self, id: u32) -> bool {
        self.find(id).is_some_and(|entry| entry.state != State::Quarantined)
    }

    /// Whether another gateway has ever sent it a session.
    pub(super) fn has_had(&self, id: u32) -> bool {
        self.received.contains(&id)
    }

    /// The worker, with this snapshot, at this time.
    fn gateway(&mut self, engine: &Engine, env: &Env) -> &mut Gateway {
        let gateway = self.gateway.get_or_insert_with(|| new_gateway(env));
        if !self.snapshot.as_ref().is_some_and(|snapshot| Arc::ptr_eq(snapshot, &engine.snapshot)) {
            gateway.publisher.publish((*engine.snapshot).clone());
            self.snapshot = Some(engine.snapshot.clone());
        }
        gateway.now = env.tick();
        gateway
    }

    /// Runs a turn of the worker, which sends records that are due.
    pub(super) fn turn(&mut self, engine: &Engine, env: &Env) {
        let gateway = self.gateway(engine, env);
        gateway.turn();
        while gateway.workers[0].io().pop_sent().is_some() {}
        let sender = &gateway.replication_senders[0];
        let queued: Vec<_> = std::iter::from_fn(|| sender.pop()).collect();
        let outgoing =
            |it: OutgoingRecord| Outgoing { to: engine.gateway(it.to), number: it.number, record: it.record };
        self.outgoing.extend(queued.into_iter().map(outgoing));
    }

    /// Runs a command; its reply.
    fn request<T>(&mut self, engine: &Engine, env: &Env, command: impl FnOnce(Sender<T>) -> Command) -> T {
        let (reply, response) = bounded(1);
        self.gateway(engine, env).commands[0].send(command(reply)).expect("the worker lives");
        self.turn(engine, env);
        response.try_recv().expect("each turn runs a command")
    }

    /// Opens a session by a packet of its endpoint; its port, if there was one.
    pub(super) fn open(&mut self, id: u32, engine: &Engine, env: &Env) -> Option<u16> {
        let (endpoint, remote) = specs::ends(id);
        self.inject(INSIDE, &packet(Protocol::Udp, endpoint, remote), engine, env);
        self.find(id).map(|entry| entry.port)
    }

    fn inject(&mut self, interface: InterfaceId, packet: &[u8], engine: &Engine, env: &Env) {
        assert!(self.gateway(engine, env).workers[0].io().inject(interface, packet), "no frame is free");
        self.turn(engine, env);
    }

    /// The session ends at its owner.
    pub(super) fn close(&mut self, id: u32, engine: &Engine, env: &Env) {
        let filter = SessionFilter { endpoint: Some(specs::endpoint(id)), ..SessionFilter::default() };
        self.gateway(engine, env).flush(0, filter);
        self.turn(engine, env);
    }

    /// A packet of a session arrives from its remote, and one from its endpoint: the former goes to the owner of its port,
    /// whatever sessions are here. Returns the change of state.
    pub(super) fn receive(&mut self, (id, port): (u32, u16), engine: &Engine, env: &Env) -> Option<State> {
        let before = self.find(id).map(|entry| entry.state).filter(|state| *state != State::Quarantined)?;
        self.inject(OUTSIDE, &packet(Protocol::Udp, specs::remote(), specs::vip(port)), engine, env);
        let (endpoint, remote) = specs::ends(id);
        self.inject(INSIDE, &packet(Protocol::Udp, endpoint, remote), engine, env);
        self.find(id).map(|entry| entry.state).filter(|state| *state != before)
    }

    /// Another gateway has applied all records for it up to this number.
    pub(super) fn acknowledge(&mut self, by: usize, number: u64, engine: &Engine, env: &Env) {
        let id = engine.id(by);
        self.gateway(engine, env).replication_senders[0].acknowledge(id, number);
        self.turn(engine, env);
    }

    /// Lists sessions for a gateway, as far as the chunk says.
    pub(super) fn list(
        &mut self,
        target: usize,
        (cursor, expected): (u64, (u64, Option<u64>)),
        (acknowledged_epoch, policy): (u64, Option<Arc<str>>),
        engine: &Engine,
        env: &Env,
    ) -> RecordChunk {
        let chunk = RecordChunk {
            target: engine.id(target),
            acknowledged_epoch,
            cursor: Some(cursor),
            records: Vec::with_capacity(MAX_LISTED),
            expected,
            policy,
            observed: (0, 0),
        };
        self.request(engine, env, |reply| Command::ListRecords { chunk, reply })
    }

    pub(super) fn apply(
        &mut self,
        records: &[ReplicationRecord],
        (round, source): (u8, usize),
        engine: &Engine,
        env: &Env,
    ) -> Applied {
        let source = engine.id(source);
        let applied = records.to_vec();
        let rejected =
            self.request(engine, env, |reply| Command::ApplyRecords { records: applied, round, source, reply });
        self.received.extend(records.iter().filter_map(live_session_of));
        // Those of shards that are this gateway's by now are sent on.
        self.turn(engine, env);
        let is_older = |record: &&ReplicationRecord| {
            let Some(entry) = live_session_of(record).and_then(|id| self.find(id)) else { return false };
            let [one, other] = of_v4(record).directions.map(|direction| direction.idle_ms);
            let is_owned = engine.owner(specs::shard_of(entry.port)) == Owner::This;
            is_owned && entry.state == State::Standby && env.tick().since(entry.seen) < one.min(other)
        };
        Applied { rejected: rejected.len() as u64, older: records.iter().filter(is_older).count() as u64 }
    }

    /// Removes what a round of an owner hasn't listed. `epoch`: that of this gateway's last round that the owner had
    /// acknowledged when it began its own.
    pub(super) fn purge(
        &mut self,
        owner: usize,
        by_round: (u8, u64, Arc<str>),
        epoch: u64,
        engine: &Engine,
        env: &Env,
    ) -> PurgeChunk {
        let mut chunk = PurgeChunk::first(engine.id(owner), by_round, epoch);
        while chunk.cursor.is_some() {
            chunk = self.request(engine, env, |reply| Command::PurgeStandby { chunk, reply });
        }
        chunk
    }
}
