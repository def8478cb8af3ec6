//! A gateway under test: workers over in-memory devices, a policy, and a clock that only the test advances.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "each test file uses its part; a test fails by panicking"
)]

pub mod accounting;
pub mod capture;
pub mod cluster;
pub mod connection;
pub mod oracle;
pub mod packets;
pub mod prediction;
pub mod services;

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

pub use connection::*;
use crossbeam::channel::{Sender, bounded, unbounded};
use crossbeam::queue::ArrayQueue;
pub use oracle::*;
pub use packets::*;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::{InterfaceId, WorkerId};
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::io::handoff::{Wake, WorkerLinks};
use vipgate_dataplane::io::memory::MemoryIo;
use vipgate_dataplane::io::{PacketIo, batch};
use vipgate_dataplane::observe::capture::CaptureRing;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::persistence::Identity;
use vipgate_dataplane::session::query::SessionFilter;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::stage::context::SessionRules;
use vipgate_dataplane::worker::Worker;
use vipgate_dataplane::worker::builder::{
    ControlLinks, SESSIONS_PER_RESERVED, SessionTableRequest, SharedKeys, TableSizes, WorkerBuilder, WorkerInputs,
    WorkerKeys, WorkersConfig,
};
use vipgate_dataplane::worker::command::{Command, FlushChunk};
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;
use vipgate_mem::{Arena, Frame, HEADROOM, Region, StorageError};

use crate::support::accounting::CounterAccounting;
pub use crate::support::capture::*;

pub const INSIDE: InterfaceId = InterfaceId(0);
pub const OUTSIDE: InterfaceId = InterfaceId(1);
pub const INSIDE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x10];
pub const OUTSIDE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x20];
pub const POD_MAC: [u8; 6] = [2, 0, 0, 0, 1, 0x01];
pub const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 2, 0x01];

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Pods 10.244.1.5 and .6 (fd00:244:1::5, ::6) behind VIP 192.0.2.10 (2001:db8::10); .21 behind 192.0.2.11, with
/// 198.51.100.128/25 excluded.
pub fn policy() -> PolicySet {
    let egress = |name: &str, excluded: &[&str]| EgressSpec {
        name: name.into(),
        destinations: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
        excluded: excluded.iter().map(|net| net.parse().unwrap()).collect(),
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits::default(),
        on_exhaustion: OnExhaustion::Drop,
    };
    let vip = |address: &str, reserved: &[u16]| VipSpec {
        address: ip(address),
        name: "Service tenant/api".into(),
        announce: Announce::L2,
        reserved_ports: reserved.into(),
        shards: vec![],
    };
    let endpoint = |address: &str, policy: &str, vip: &str| EndpointSpec {
        address: ip(address),
        name: "".into(),
        policy: policy.into(),
        vips: vec![ip(vip)],
        gateway: None,
        remarks: vec![],
    };
    PolicySet {
        version: "test".into(),
        policies: vec![egress("a", &[]), egress("b", &["198.51.100.128/25"])],
        vips: vec![vip("192.0.2.10", &[80, 30000]), vip("192.0.2.11", &[]), vip("2001:db8::10", &[])],
        endpoints: vec![
            endpoint("10.244.1.5", "a", "192.0.2.10"),
            endpoint("10.244.1.6", "a", "192.0.2.10"),
            endpoint("10.244.1.21", "b", "192.0.2.11"),
            endpoint("fd00:244:1::5", "a", "2001:db8::10"),
            endpoint("fd00:244:1::6", "a", "2001:db8::10"),
        ],
        ..PolicySet::default()
    }
}

pub fn network() -> NetworkSpec {
    let interface = |id, name: &str, role, mac| InterfaceSpec {
        id,
        name: name.into(),
        ifindex: u32::from(id.0) + 1,
        role,
        mac,
        mtu: 1500,
        up: true,
        addresses: vec![],
    };
    let route = |prefix: &str, interface, gateway: Option<&str>| RouteSpec {
        prefix: prefix.parse().unwrap(),
        target: RouteTarget::Via(vec![HopSpec { interface, gateway: gateway.map(ip) }]),
    };
    let neighbor = |interface, address: &str, mac| NeighborSpec { interface, address: ip(address), mac };
    NetworkSpec {
        interfaces: vec![
            interface(INSIDE, "in", Role::Inside, INSIDE_MAC),
            interface(OUTSIDE, "out", Role::Outside, OUTSIDE_MAC),
        ],
        routes: vec![
            route("10.244.1.0/24", INSIDE, None),
            route("fd00:244:1::/64", INSIDE, None),
            route("0.0.0.0/0", OUTSIDE, Some("192.0.2.254")),
            route("::/0", OUTSIDE, Some("2001:db8::fe")),
            route("192.0.2.0/24", OUTSIDE, None),
        ],
        neighbors: vec![
            neighbor(INSIDE, "10.244.1.5", POD_MAC),
            neighbor(INSIDE, "10.244.1.6", POD_MAC),
            neighbor(INSIDE, "10.244.1.7", POD_MAC),
            neighbor(INSIDE, "10.244.1.21", POD_MAC),
            neighbor(INSIDE, "fd00:244:1::5", POD_MAC),
            neighbor(INSIDE, "fd00:244:1::6", POD_MAC),
            neighbor(OUTSIDE, "192.0.2.254", ROUTER_MAC),
            neighbor(OUTSIDE, "2001:db8::fe", ROUTER_MAC),
        ],
        locals: vec![],
    }
}

#[derive(Debug)]
struct NoopWaker;

impl Wake for NoopWaker {
    fn wake(&self) {}
}

pub struct Setup {
    pub workers: u8,
    pub capacity: u32,
    /// Sessions of the capacity reserved for holders below their fair share; `None`: the default.
    pub reserve: Option<u32>,
    pub range: PortRange,
    pub timeouts: Timeouts,
    pub frames: usize,
    pub mss: Option<u16>,
    /// Whether clients receive a reset or ICMP error where no Service or backend is.
    pub reject: bool,
    /// Unconfirmed sessions per VIP.
    pub embryonic: u32,
    /// Whether only a SYN or INIT opens a connection.
    pub require_syn: bool,
    /// The gateway's own VXLAN address in the overlay network.
    pub overlay: Option<SocketAddr>,
    /// Persistent session tables: one file per worker, this name with the worker's number as its extension.
    pub state: Option<PathBuf>,
}

impl Default for Setup {
    fn default() -> Self {
        let timeouts =
            Timeouts { tcp_established: 30_000, tcp_transitory: 4_000, udp: 5_000, icmp: 3_000, quarantine: 2_000 };
        Self {
            workers: 1,
            capacity: 4096,
            reserve: None,
            range: PortRange::default(),
            timeouts,
            frames: 512,
            mss: None,
            reject: false,
            embryonic: 1024,
            require_syn: true,
            overlay: None,
            state: None,
        }
    }
}

impl Setup {
    fn config(&self) -> WorkersConfig {
        WorkersConfig {
            workers: self.workers,
            sizes: TableSizes {
                sessions: self.capacity,
                reserve: self.reserve.unwrap_or(self.capacity / SESSIONS_PER_RESERVED),
                embryonic_queue: self.capacity,
                embryonic_per_vip: self.embryonic,
                datagrams: 64,
                queued_fragments: 32,
                affinity_clients: 4096,
                directory_flows: 4096,
            },
            ports: self.range,
            timeouts: self.timeouts,
            fragment_timeout: 2_000,
            replication_delay: 100,
            rules: SessionRules {
                require_syn: self.require_syn,
                cookie_key: HashKey::new([1, 3, 5, 7]),
                reject_no_service: self.reject,
                reject_no_backend: self.reject,
                mss_clamp: self.mss,
            },
        }
    }

    fn open_sessions(&self, mut request: SessionTableRequest<'_>) -> Result<Sessions, StorageError> {
        let Some(path) = &self.state else { return request.in_memory() };
        let worker = request.restorer.worker.0;
        let mut region = Region::open(&path.with_extension(worker.to_string()))?;
        let (workers, capacity) = (self.workers.into(), request.capacity);
        let identity = Identity { worker: worker.into(), workers, capacity, boot: [1; 16] };
        let (mut sessions, _) = Sessions::in_region(&mut region, identity, request.timeouts, request.key)?;
        sessions.restore(request.now, &mut request.restorer);
        Ok(sessions)
    }
}

/// The key of a worker's tables.
fn worker_key(worker: u8) -> HashKey {
    let last = 0x632b_e593_8a41_7d6f + u64::from(worker);
    HashKey::new([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaef1_7502_108e_f2d9, last])
}

pub struct Gateway {
    pub workers: Vec<Worker<MemoryIo>>,
    pub commands: Vec<Sender<Command>>,
    /// Replication sender side of each worker.
    pub replication_senders: Vec<Arc<ReplicationSender>>,
    /// Capture ring of each worker.
    pub capture_rings: Vec<Arc<CaptureRing>>,
    pub capture_mode: CaptureMode,
    pub lease: Arc<Lease>,
    pub publisher: Publisher,
    pub builder: Builder,
    pub resolution_requests: ResolutionRequests,
    pub now: Tick,
    /// Received packets may be malformed, and so may those that are sent.
    pub hostile: bool,
    pub accounting: CounterAccounting,
    frames: u64,
}

thread_local! {
    /// Frames of dropped gateways, for reuse: arenas are never freed, and fuzzers create many gateways.
    static FREE_FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

fn frames(count: usize) -> Vec<Frame> {
    FREE_FRAMES.with_borrow_mut(|spare| {
        if spare.len() < count {
            spare.extend(Arena::allocate(count, 2048).unwrap().frames());
        }
        let mut frames = spare.split_off(spare.len() - count);
        for frame in &mut frames {
            frame.reset(HEADROOM);
        }
        frames
    })
}

impl Drop for Gateway {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            let io = worker.io();
            while io.pop_sent().is_some() {}
            FREE_FRAMES.with_borrow_mut(|spare| spare.extend(std::iter::from_fn(|| io.allocate())));
        }
        self.check_unasserted();
    }
}

impl Gateway {
    pub fn new(setup: &Setup) -> Self {
        Self::with(setup, network(), &policy())
    }

    /// A gateway with another network and policy.
    pub fn with(setup: &Setup, network: NetworkSpec, policy: &PolicySet) -> Self {
        // The clock starts shortly before it wraps.
        Self::starting_at(setup, network, policy, Tick(u32::MAX - 10_000))
    }

    /// A gateway that starts at a given time: the successor of another process, if session tables are persistent.
    pub fn starting_at(setup: &Setup, network: NetworkSpec, policy: &PolicySet, now: Tick) -> Self {
        let mut builder = Builder::new(network).with_overlay(setup.overlay);
        let snapshot = builder.with_policy(policy).unwrap();
        let publisher = Publisher::new(snapshot);
        let resolution_requests =
            ResolutionRequests { queue: Arc::new(ArrayQueue::new(64)), waker: Arc::new(NoopWaker) };
        let lease = Arc::new(Lease::unlimited());
        let control = ControlLinks { publisher: &publisher, neighbor_requests: &resolution_requests, lease: &lease };
        let shared = SharedKeys { affinity: HashKey::new([5, 4, 3, 2]), directory: HashKey::new([9, 8, 7, 6]) };
        let worker_builder = WorkerBuilder::new(setup.config(), control, shared);
        let wakers: Vec<Arc<dyn Wake>> = (0..setup.workers).map(|_| Arc::new(NoopWaker) as _).collect();
        let (mut commands, mut replication_senders, mut capture_rings) = (Vec::new(), Vec::new(), Vec::new());
        let mut workers = Vec::new();
        for (links, id) in WorkerLinks::mesh(&wakers).into_iter().zip(0..) {
            let (sender, receiver) = unbounded();
            let replication = Arc::new(ReplicationSender::new(Arc::new(NoopWaker)));
            let inputs = WorkerInputs {
                io: MemoryIo::with_frames(frames(setup.frames)),
                links,
                commands: receiver,
                replication: replication.clone(),
                keys: WorkerKeys::same(worker_key(id)),
            };
            let mut parts = worker_builder.build(inputs, now, |request| setup.open_sessions(request)).unwrap();
            let capture_ring = Arc::new(CaptureRing::new(4 * batch::BATCH_SIZE, 2048));
            parts.tables.observer.capture = Some(Box::new(capture_all(&capture_ring, WorkerId(id))));
            workers.push(Worker::new(parts, now));
            commands.push(sender);
            replication_senders.push(replication);
            capture_rings.push(capture_ring);
        }
        let frames = setup.frames as u64 * u64::from(setup.workers);
        Self {
            workers,
            commands,
            replication_senders,
            capture_rings,
            capture_mode: CaptureMode::On(1),
            lease,
            publisher,
            builder,
            resolution_requests,
            now,
            hostile: false,
            accounting: CounterAccounting::default(),
            frames,
        }
    }

    pub fn set_policy(&mut self, set: &PolicySet) {
        let snapshot = self.builder.with_policy(set).unwrap();
        self.publisher.publish(snapshot);
    }

    /// Ends the matching sessions of a worker by a flush command; returns their number.
    pub fn flush(&mut self, worker: usize, filter: SessionFilter) -> u64 {
        let mut chunk = FlushChunk { filter, cursor: Some(0), ended: 0 };
        while chunk.cursor.is_some() {
            let (reply, response) = bounded(1);
            self.commands[worker].send(Command::Flush { chunk, reply }).unwrap();
            self.turn();
            chunk = response.try_recv().unwrap();
        }
        chunk.ended
    }

    pub fn set_network(&mut self, network: NetworkSpec) {
        let snapshot = self.builder.with_network(network);
        self.publisher.publish(snapshot);
    }

    /// Advances the clock, polling the workers all along; in coarser steps for long periods, to keep fuzzers fast.
    pub fn advance(&mut self, ms: u32) {
        let step = if ms < 30_000 { 10 } else { 50 };
        for _ in 0..ms / step {
            self.now = self.now.plus(step);
            self.turn();
        }
    }

    pub fn turn(&mut self) {
        let now = self.now;
        for worker in &mut self.workers {
            worker.turn(now);
        }
    }

    /// Polls the workers until they are idle; returns what was sent, by interface.
    pub fn run(&mut self) -> Vec<(InterfaceId, Vec<u8>)> {
        for _ in 0..8 {
            self.turn();
        }
        self.toggle_capture();
        self.check_frames();
        let mut sent = Vec::new();
        for worker in &mut self.workers {
            while let Some((interface, bytes)) = worker.io().pop_sent() {
                if !self.hostile {
                    check_packet(&bytes);
                }
                sent.push((interface, bytes));
            }
        }
        sent
    }

    /// A worker receives a packet; returns what the gateway sends because of it.
    pub fn receive(&mut self, worker: usize, interface: InterfaceId, packet: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
        let predicted = self.predict(worker, interface, packet);
        let is_captured = matches!(self.capture_mode, CaptureMode::On(_));
        assert!(self.workers[worker].io().inject(interface, packet));
        let sent = self.run();
        match predicted {
            Some(predicted) if is_captured => self.check_prediction(&predicted, worker, packet),
            Some(predicted) => prediction::check_sent(&predicted, &sent),
            None => {}
        }
        sent
    }

    /// A pod's packet at worker 0 that must be forwarded outside; returns it as sent.
    pub fn pod_sends(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut sent = self.receive(0, INSIDE, packet);
        assert_eq!(sent.len(), 1, "one packet is sent outside: {:?}", self.drops());
        let (interface, bytes) = sent.remove(0);
        assert_eq!(interface, OUTSIDE);
        check_only_translated(packet, &bytes);
        bytes
    }

    /// A packet from outside at worker 0 that must reach a pod; returns it as the pod receives it.
    pub fn remote_sends(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut sent = self.receive(0, OUTSIDE, packet);
        assert_eq!(sent.len(), 1, "one packet reaches the pod: {:?}", self.drops());
        let (interface, bytes) = sent.remove(0);
        assert_eq!(interface, INSIDE);
        check_only_translated(packet, &bytes);
        bytes
    }

    /// No frame is lost: devices, rings and queues hold as many as there were at the start.
    pub fn check_frames(&mut self) {
        let held: u64 = self.workers.iter_mut().map(|w| w.io().audit().sum() + w.frames_held() as u64).sum();
        assert_eq!(held, self.frames, "frames are conserved");
    }

    pub fn drops(&self) -> HashMap<DropReason, u64> {
        let all = DropReason::ALL.iter().map(|&reason| {
            (reason, self.workers.iter().map(|w| w.counters().drops[reason as usize].get()).sum::<u64>())
        });
        all.filter(|&(_, count)| count > 0).collect()
    }

    /// Packets not forwarded: dropped for any reason, or waiting.
    pub fn not_forwarded(&self) -> u64 {
        self.drops().values().sum::<u64>()
            + self.workers.iter().map(|w| w.counters().neighbor_waiting.get()).sum::<u64>()
    }

    pub fn forwarded(&self, direction: Direction) -> u64 {
        self.workers.iter().map(|w| w.counters().packets[direction as usize].get()).sum()
    }

    pub fn sessions(&self) -> u64 {
        self.workers.iter().map(|w| u64::from(w.tables().sessions.open_count())).sum()
    }

    pub fn handoffs(&self) -> u64 {
        self.workers.iter().map(|w| w.counters().handoffs.get()).sum()
    }
}
