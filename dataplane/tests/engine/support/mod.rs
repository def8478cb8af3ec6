//! A gateway without a world: workers over memory devices, a policy, a clock that only tests move.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "each test file uses its part; a test fails by panicking"
)]

pub mod cluster;
pub mod connection;
pub mod foretold;
pub mod ledger;
pub mod oracle;
pub mod packets;
pub mod services;
pub mod watching;

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use crossbeam::channel::{Sender, bounded, unbounded};
use crossbeam::queue::ArrayQueue;
use vipgate_dataplane::adopt::Adoption;
use vipgate_dataplane::batch;
use vipgate_dataplane::command::{Command, FlushChunk, SessionFilter};
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::fragments::Fragments;
use vipgate_dataplane::ids::Ids;
use vipgate_dataplane::io::memory::MemoryIo;
use vipgate_dataplane::io::{InterfaceId, PacketIo};
use vipgate_dataplane::limiter::Limiter;
use vipgate_dataplane::link::affinity::Affinity;
use vipgate_dataplane::link::directory::Directory;
use vipgate_dataplane::link::handoff::{Links, Wake};
use vipgate_dataplane::link::lease::Lease;
use vipgate_dataplane::link::outbox::Outbox;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::pipeline::Tables;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::ports::allocator::Allocator;
use vipgate_dataplane::ports::pool::WorkerId;
use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::embryonic::Embryonic;
use vipgate_dataplane::session::eviction::Eviction;
use vipgate_dataplane::session::region::Identity;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::tuple::HashKey;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::snapshot::spec::*;
use vipgate_dataplane::stage::open::Rules;
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::waiting::{Questions, Waiting};
use vipgate_dataplane::watch::Watch;
use vipgate_dataplane::watch::tap::TapRing;
use vipgate_dataplane::worker::{Parts, Worker};
use vipgate_mem::{Arena, Frame, HEADROOM, Region};

pub use connection::*;
use ledger::Ledger;
pub use oracle::*;
pub use packets::*;
pub use watching::*;

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
        shares: vec![],
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
    let neighbour = |interface, address: &str, mac| NeighbourSpec { interface, address: ip(address), mac };
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
        neighbours: vec![
            neighbour(INSIDE, "10.244.1.5", POD_MAC),
            neighbour(INSIDE, "10.244.1.6", POD_MAC),
            neighbour(INSIDE, "10.244.1.7", POD_MAC),
            neighbour(INSIDE, "10.244.1.21", POD_MAC),
            neighbour(INSIDE, "fd00:244:1::5", POD_MAC),
            neighbour(INSIDE, "fd00:244:1::6", POD_MAC),
            neighbour(OUTSIDE, "192.0.2.254", ROUTER_MAC),
            neighbour(OUTSIDE, "2001:db8::fe", ROUTER_MAC),
        ],
        locals: vec![],
    }
}

#[derive(Debug)]
struct NoBell;

impl Wake for NoBell {
    fn wake(&self) {}
}

pub struct Setup {
    pub workers: u8,
    pub capacity: u32,
    /// Sessions of these that only holders below their fair share may have; `None`: as many as by default.
    pub reserve: Option<u32>,
    pub range: PortRange,
    pub timeouts: Timeouts,
    pub frames: usize,
    pub mss: Option<u16>,
    /// Whether clients hear that nobody listens.
    pub reject: bool,
    /// Unconfirmed sessions that a VIP may have.
    pub embryonic: u32,
    /// Whether only a first packet opens a connection.
    pub require_syn: bool,
    /// Where nodes of the overlay network reach it.
    pub overlay: Option<SocketAddr>,
    /// Where sessions outlive it: a file a worker, by this name and the worker's number.
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

pub struct Gateway {
    pub workers: Vec<Worker<MemoryIo>>,
    pub commands: Vec<Sender<Command>>,
    /// What each worker tells other gateways.
    pub outlets: Vec<Arc<Outlet>>,
    /// What each worker's packets are captured in.
    pub rings: Vec<Arc<TapRing>>,
    pub watching: Watching,
    pub lease: Arc<Lease>,
    pub publisher: Publisher,
    pub builder: Builder,
    pub questions: Questions,
    pub now: Tick,
    /// Packets that come in may be broken, and so may those that go out.
    pub hostile: bool,
    pub ledger: Ledger,
    frames: u64,
}

thread_local! {
    /// Frames of gateways that are gone. Their memory is never given back, and fuzzers make many gateways.
    static SPARE: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

fn frames(count: usize) -> Vec<Frame> {
    SPARE.with_borrow_mut(|spare| {
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
            while io.sent().is_some() {}
            SPARE.with_borrow_mut(|spare| spare.extend(std::iter::from_fn(|| io.take())));
        }
        self.check_all_is_stated();
    }
}

impl Gateway {
    pub fn new(setup: &Setup) -> Self {
        Self::with(setup, network(), &policy())
    }

    /// The same in another network, with another policy.
    pub fn with(setup: &Setup, network: NetworkSpec, policy: &PolicySet) -> Self {
        // Time begins shortly before its numbers wrap.
        Self::starting_at(setup, network, policy, Tick(u32::MAX - 10_000))
    }

    /// The same at a moment: as the process after another one, if sessions outlive that.
    pub fn starting_at(setup: &Setup, network: NetworkSpec, policy: &PolicySet, now: Tick) -> Self {
        let mut builder = Builder::new(network).at_overlay(setup.overlay);
        let snapshot = builder.with_policy(policy).unwrap();
        let publisher = Publisher::new(snapshot.clone());
        let questions = Questions { queue: Arc::new(ArrayQueue::new(64)), bell: Arc::new(NoBell) };
        let bells: Vec<Arc<dyn Wake>> = (0..setup.workers).map(|_| Arc::new(NoBell) as _).collect();
        let (mut commands, mut outlets, mut rings) = (Vec::new(), Vec::new(), Vec::new());
        let lease = Arc::new(Lease::free());
        let directory = Arc::new(Directory::new(4096, HashKey::new([9, 8, 7, 6])));
        let reserve = setup.reserve.unwrap_or(setup.capacity / 32);
        let affinity = Arc::new(Affinity::new(4096, HashKey::new([5, 4, 3, 2])));
        let workers = Links::mesh(&bells)
            .into_iter()
            .zip(0..)
            .map(|(links, id)| {
                let key = HashKey::new([
                    0x9e37_79b9_7f4a_7c15,
                    0xd1b5_4a32_d192_ed03,
                    0xaef1_7502_108e_f2d9,
                    0x632b_e593_8a41_7d6f + u64::from(id),
                ]);
                let (sender, receiver) = unbounded();
                commands.push(sender);
                let ring = Arc::new(TapRing::new(4 * batch::MOST, 2048));
                rings.push(ring.clone());
                let mut ports = Allocator::new(WorkerId(id), setup.workers, setup.range, key).unwrap();
                let sessions = match &setup.state {
                    None => Sessions::new(setup.capacity, setup.timeouts, key).unwrap().with_reserve(reserve),
                    Some(path) => {
                        let mut region = Region::open(&path.with_extension(id.to_string())).unwrap();
                        let (worker, workers, capacity) = (id.into(), setup.workers.into(), setup.capacity);
                        let identity = Identity { worker, workers, capacity, boot: [1; 16] };
                        let (sessions, _) = Sessions::in_region(&mut region, identity, setup.timeouts, key).unwrap();
                        let mut sessions = sessions.with_reserve(reserve);
                        let directory = (setup.workers > 1).then_some(&*directory);
                        let (policy, worker) = (&snapshot.policy, WorkerId(id));
                        sessions.take_up(now, &mut Adoption { policy, ports: &mut ports, directory, worker });
                        sessions
                    }
                };
                let outlet = Arc::new(Outlet::new(Arc::new(NoBell)));
                outlets.push(outlet.clone());
                let parts = Parts {
                    id: WorkerId(id),
                    io: MemoryIo::with_frames(frames(setup.frames)),
                    links,
                    affinity: affinity.clone(),
                    directory: (setup.workers > 1).then(|| directory.clone()),
                    tables: Tables {
                        sessions,
                        embryonic: Embryonic::new(setup.capacity, setup.embryonic),
                        eviction: Eviction::default(),
                        ports,
                        fragments: Fragments::new(64, 32, 2_000, key).unwrap(),
                        ids: Ids::new(id, setup.workers, key),
                        limiter: Limiter::new(key, now),
                        outbox: Outbox::new(outlet.clone(), 100),
                        watch: Watch { tap: Some(Box::new(everything(&ring, WorkerId(id)))), ..Watch::default() },
                    },
                    reader: publisher.reader(),
                    waiting: Waiting::new(questions.clone()),
                    commands: receiver,
                    counters: Arc::default(),
                    rules: Rules {
                        require_syn: setup.require_syn,
                        secret: HashKey::new([1, 3, 5, 7]),
                        reject_no_service: setup.reject,
                        reject_no_backend: setup.reject,
                        mss: setup.mss,
                    },
                    lease: lease.clone(),
                };
                Worker::new(parts, now)
            })
            .collect();
        let frames = setup.frames as u64 * u64::from(setup.workers);
        Self {
            workers,
            commands,
            outlets,
            rings,
            watching: Watching::Now(1),
            lease,
            publisher,
            builder,
            questions,
            now,
            hostile: false,
            ledger: Ledger::default(),
            frames,
        }
    }

    pub fn set_policy(&mut self, set: &PolicySet) {
        let snapshot = self.builder.with_policy(set).unwrap();
        self.publisher.publish(snapshot);
    }

    /// Ends a worker's sessions that match, by command; how many.
    pub fn flush(&mut self, worker: usize, filter: SessionFilter) -> u64 {
        let mut chunk = FlushChunk { filter, cursor: Some(0), ended: 0 };
        while chunk.cursor.is_some() {
            let (reply, answer) = bounded(1);
            self.commands[worker].send(Command::Flush { chunk, reply }).unwrap();
            self.turn();
            chunk = answer.try_recv().unwrap();
        }
        chunk.ended
    }

    pub fn set_network(&mut self, network: NetworkSpec) {
        let snapshot = self.builder.with_network(network);
        self.publisher.publish(snapshot);
    }

    /// Lets time pass, with turns all along: fewer of them in long times, so that fuzzers get around.
    pub fn pass(&mut self, ms: u32) {
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

    /// Turns until nothing moves; returns what was sent, by interface.
    pub fn run(&mut self) -> Vec<(InterfaceId, Vec<u8>)> {
        for _ in 0..8 {
            self.turn();
        }
        self.watch_or_not();
        self.check_frames();
        let mut sent = Vec::new();
        for worker in &mut self.workers {
            while let Some((interface, bytes)) = worker.io().sent() {
                if !self.hostile {
                    check_packet(&bytes);
                }
                sent.push((interface, bytes));
            }
        }
        sent
    }

    /// A packet arrives at a worker; what the gateway sends because of it.
    pub fn arrives(&mut self, worker: usize, interface: InterfaceId, packet: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
        let foretold = self.foretell(worker, interface, packet);
        let is_watched = matches!(self.watching, Watching::Now(_));
        assert!(self.workers[worker].io().inject(interface, packet));
        let sent = self.run();
        match foretold {
            Some(foretold) if is_watched => self.check_foretold(&foretold, worker, packet),
            Some(foretold) => foretold::check_sent(&foretold, &sent),
            None => {}
        }
        sent
    }

    /// A pod's packet at worker 0 that is expected to leave; what left.
    pub fn pod_sends(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut sent = self.arrives(0, INSIDE, packet);
        assert_eq!(sent.len(), 1, "one packet leaves: {:?}", self.drops());
        let (interface, bytes) = sent.remove(0);
        assert_eq!(interface, OUTSIDE);
        check_only_translated(packet, &bytes);
        bytes
    }

    /// A packet from outside at worker 0 that is expected to reach a pod; what the pod sees.
    pub fn far_sends(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut sent = self.arrives(0, OUTSIDE, packet);
        assert_eq!(sent.len(), 1, "one packet comes home: {:?}", self.drops());
        let (interface, bytes) = sent.remove(0);
        assert_eq!(interface, INSIDE);
        check_only_translated(packet, &bytes);
        bytes
    }

    /// No frame is lost: what devices, rings and waiting rooms hold is what there was.
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

    /// Packets that have not gone on: dropped, by whatever name, or waiting.
    pub fn kept(&self) -> u64 {
        self.drops().values().sum::<u64>() + self.workers.iter().map(|w| w.counters().waiting.get()).sum::<u64>()
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
