//! Testbed: gateways with real links and mock workers, which are tables behind a lock that execute commands at once.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::replication::sender::{OutgoingRecord, ReplicationSender};
use vipgate_dataplane::session::record::{DirectionRecord, FamilyRecord, RecordState, ReplicationRecord};
use vipgate_dataplane::worker::command::Command;

use crate::membership;
use crate::membership::succession::Claim;
use crate::peer::identity::Fingerprint;
use crate::peer::{
    Identities, Identity, PROTOCOL_VERSIONS, PeerConfig, PeerEvent, PeerMember, PeerStatus, PeerView, Peers,
    ReplicationWaker, Workers,
};

/// Session numbers per gateway: those of the second gateway start here.
pub(super) const SESSIONS_PER_GATEWAY: u32 = 1_000_000;
pub(super) const NAMES: [&str; 3] = ["a", "b", "c"];
/// Timeout of all waits, long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The record of a session with this number.
pub(crate) fn session_record(number: u32) -> ReplicationRecord {
    let tuple = |source, source_port| Tuple {
        source,
        destination: 0x0800_0001,
        source_port,
        destination_port: 443,
        protocol: 6,
    };
    let half =
        |flags| DirectionRecord { flags, idle_ms: number, sequence: 3, acknowledged: 4, packets: 5, bytes: 1 << 40 };
    ReplicationRecord::V4(FamilyRecord {
        state: RecordState::Open,
        direction: Direction::Egress,
        origin: tuple(0x0a00_0000 + number, 40_000),
        translated: tuple(0xc000_0201, number as u16),
        directions: [half(1), half(2)],
    })
}

/// The record of the same session, ended.
pub(super) fn ended_record(number: u32) -> ReplicationRecord {
    match session_record(number) {
        ReplicationRecord::V4(record) => ReplicationRecord::V4(FamilyRecord { state: RecordState::Ended, ..record }),
        ReplicationRecord::V6(record) => ReplicationRecord::V6(record),
    }
}

fn number(record: &ReplicationRecord) -> (u32, RecordState) {
    match record {
        ReplicationRecord::V4(record) => (record.origin.source - 0x0a00_0000, record.state),
        ReplicationRecord::V6(_) => panic!("these tests have IPv4"),
    }
}

#[derive(Debug, Default)]
struct Table {
    own: BTreeMap<u32, GatewayId>,
    standby: BTreeMap<u32, u8>,
    last_number: HashMap<GatewayId, u64>,
}

#[derive(Debug)]
pub(super) struct MockWorkers {
    workers: Vec<Mutex<Table>>,
    senders: Vec<ReplicationSender>,
    /// Whether commands get no reply.
    pub(super) unresponsive: AtomicBool,
    /// Whether no gateway is in the policy yet.
    pub(super) without_policy: AtomicBool,
}

impl MockWorkers {
    fn new(count: usize, bell: &Arc<ReplicationWaker>) -> Self {
        Self {
            workers: (0..count).map(|_| Mutex::default()).collect(),
            senders: (0..count).map(|_| ReplicationSender::new(bell.clone())).collect(),
            unresponsive: AtomicBool::new(false),
            without_policy: AtomicBool::new(false),
        }
    }

    fn table(&self, number: u32) -> (usize, MutexGuard<'_, Table>) {
        let worker = number as usize % self.workers.len();
        (worker, self.workers[worker].lock().unwrap())
    }

    fn queue_record(&self, worker: usize, table: &mut Table, to: GatewayId, record: ReplicationRecord) {
        let number = table.last_number.entry(to).or_default();
        *number += 1;
        self.senders[worker].push(OutgoingRecord { to, number: *number, record });
        self.senders[worker].notify();
    }

    pub(super) fn open(&self, number: u32, to: GatewayId) {
        let (worker, mut table) = self.table(number);
        table.own.insert(number, to);
        self.queue_record(worker, &mut table, to, session_record(number));
    }

    pub(super) fn end(&self, number: u32) {
        let (worker, mut table) = self.table(number);
        let to = table.own.remove(&number).unwrap();
        self.queue_record(worker, &mut table, to, ended_record(number));
    }

    /// Opens a session without a record in the replication queue.
    pub(super) fn insert(&self, number: u32, to: GatewayId) {
        self.table(number).1.own.insert(number, to);
    }

    pub(super) fn own(&self) -> Vec<u32> {
        self.sorted(|table| table.own.keys().copied().collect())
    }

    pub(super) fn standby(&self) -> Vec<u32> {
        self.sorted(|table| table.standby.keys().copied().collect())
    }

    /// Removes all standby sessions.
    pub(super) fn clear_standby(&self) {
        self.workers.iter().for_each(|table| table.lock().unwrap().standby.clear());
    }

    fn sorted(&self, list: impl Fn(&Table) -> Vec<u32>) -> Vec<u32> {
        let mut all: Vec<u32> = self.workers.iter().flat_map(|table| list(&table.lock().unwrap())).collect();
        all.sort_unstable();
        all
    }

    /// Whether the gateway has acknowledged all records.
    pub(super) fn is_acknowledged(&self, by: GatewayId) -> bool {
        self.workers.iter().zip(&self.senders).all(|(table, sender)| {
            sender.acknowledged(by) == table.lock().unwrap().last_number.get(&by).copied().unwrap_or(0)
        })
    }
}

impl Workers for MockWorkers {
    fn count(&self) -> usize {
        self.workers.len()
    }

    fn replication_sender(&self, worker: usize) -> &ReplicationSender {
        &self.senders[worker]
    }

    fn send(&self, worker: usize, command: Command, _: Instant) -> bool {
        if self.unresponsive.load(Ordering::Relaxed) {
            return false;
        }
        let mut table = self.workers[worker].lock().unwrap();
        match command {
            Command::ListRecords { mut chunk, reply } => {
                let from = chunk.cursor.unwrap() as u32;
                let capacity = chunk.records.capacity();
                let rows: Vec<_> = table.own.range(from..).take(capacity).collect();
                chunk.records.extend(
                    rows.iter().filter(|(_, to)| **to == chunk.target).map(|(number, _)| session_record(**number)),
                );
                chunk.cursor = (rows.len() == capacity).then(|| u64::from(*rows[capacity - 1].0) + 1);
                reply.send(chunk).unwrap();
            }
            Command::ApplyRecords { mut records, round, reply, .. } => {
                for record in records.drain(..) {
                    match number(&record) {
                        (number, RecordState::Open) => table.standby.insert(number, round),
                        (number, RecordState::Ended) => table.standby.remove(&number),
                        (_, RecordState::Affinity) => panic!("records of sessions only"),
                    };
                }
                reply.send(records).unwrap();
            }
            Command::PurgeStandby { mut chunk, reply } => {
                let previous_len = table.standby.len();
                let owner = u32::from(chunk.owner.0);
                table.standby.retain(|number, round| number / SESSIONS_PER_GATEWAY != owner || *round == chunk.round);
                chunk.removed += (previous_len - table.standby.len()) as u64;
                chunk.cursor = None;
                reply.send(chunk).unwrap();
            }
            Command::Sessions { .. }
            | Command::Flush { .. }
            | Command::Trace { .. }
            | Command::Drops { .. }
            | Command::Ports { .. }
            | Command::Capture(_)
            | Command::LogSessions(_)
            | Command::Announce(_)
            | Command::Defend(_) => panic!("not used by links"),
        }
        true
    }

    fn replication_epoch(&self) -> u64 {
        1
    }

    fn gateway_id(&self, name: &str) -> Option<GatewayId> {
        if self.without_policy.load(Ordering::Relaxed) {
            return None;
        }
        NAMES.iter().position(|it| *it == name).map(|index| GatewayId(index as u8))
    }

    fn worker_of(&self, record: &ReplicationRecord) -> usize {
        number(record).0 as usize % self.workers.len()
    }
}

/// A gateway with real links and mock workers.
pub(super) struct Gateway {
    pub(super) peers: Peers,
    pub(super) events: mpsc::Receiver<PeerEvent>,
    pub(super) workers: Arc<MockWorkers>,
    /// As the policy server would name it.
    pub(super) member: PeerMember,
    /// Certificate and key of this process.
    keys: (Vec<u8>, Vec<u8>),
}

impl Gateway {
    pub(super) fn new(name: &str) -> Self {
        Self::with_versions(name, PROTOCOL_VERSIONS)
    }

    pub(super) fn with_versions(name: &str, versions: (u32, u32)) -> Self {
        Self::start(name, versions, Claim::new(7, Vec::new()), None)
    }

    /// Another process of a gateway, which has inherited its certificate.
    pub(super) fn successor(of: &Self, incarnation: u64, predecessors: &[u64]) -> Self {
        let (certificate, key) = of.keys.clone();
        let inherited = Identity::load(certificate, key).unwrap();
        let claim = Claim::new(incarnation, predecessors.to_vec());
        Self::start(&of.member.name, PROTOCOL_VERSIONS, claim, Some(inherited))
    }

    fn start(name: &str, versions: (u32, u32), claim: Claim, inherited: Option<Identity>) -> Self {
        let bell = Arc::new(ReplicationWaker::default());
        let tables = Arc::new(MockWorkers::new(2, &bell));
        let identity = Identity::generate().unwrap();
        let (fingerprint, incarnation) = (Some(identity.fingerprint()), claim.incarnation);
        let keys = (identity.certificate().to_vec(), identity.key().to_vec());
        let config = PeerConfig {
            name: name.into(),
            claim,
            identities: Identities::new(identity, inherited),
            successors: BTreeMap::new(),
            listen: "127.0.0.1:0".parse().unwrap(),
            heartbeat: Duration::from_millis(100),
            versions,
            workers: tables.clone(),
            waker: bell,
            sends_at_once: false,
            clock,
        };
        let (peers, events) = Peers::start(config).unwrap();
        let address = Some(peers.local_addr());
        let member = PeerMember { name: name.into(), address, fingerprint, active: true, incarnation };
        Self { peers, events, workers: tables, member, keys }
    }

    /// The status of a peer.
    pub(super) fn status(&self, name: &str) -> PeerStatus {
        self.peers.status().borrow().peers.get(name).cloned().unwrap_or_default()
    }

    /// Waits until the status of a peer fulfils a condition.
    pub(super) async fn wait_until(&self, name: &str, what: &str, is_met: impl Fn(&PeerStatus) -> bool) -> PeerStatus {
        wait_until(what, || is_met(&self.status(name))).await;
        self.status(name)
    }
}

/// Monotonic clock in milliseconds.
pub(super) fn clock() -> Tick {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    Tick(1000 + START.elapsed().as_millis() as u32)
}

/// The membership view with this number, as received from the policy server.
pub(super) fn membership_view(number: u64) -> Arc<membership::MembershipView> {
    Arc::new(membership::MembershipView {
        number,
        members: vec![membership::Member::new("a".into(), number)],
        ..membership::MembershipView::default()
    })
}

/// Applies a view of these gateways to all of them.
pub(super) fn set_view(number: u64, gateways: &[&Gateway]) {
    let view = Arc::new(PeerView {
        number,
        members: gateways.iter().map(|gateway| gateway.member.clone()).collect(),
        membership: membership_view(number),
    });
    for gateway in gateways {
        gateway.peers.set_view(&view);
    }
}

/// A view of this gateway and a peer "a".
pub(super) fn view_with_peer(gateway: &Gateway, other: Option<Fingerprint>) -> Arc<PeerView> {
    // Never connected to: the gateway with the lower name connects.
    let address = Some(SocketAddr::new(gateway.peers.local_addr().ip(), 9));
    let other = PeerMember { name: "a".into(), address, fingerprint: other, active: true, incarnation: 7 };
    Arc::new(PeerView { number: 1, members: vec![other, gateway.member.clone()], membership: membership_view(1) })
}

/// Waits until a condition is met.
pub(super) async fn wait_until(what: &str, is_met: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_met() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
