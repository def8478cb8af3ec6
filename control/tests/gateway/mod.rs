//! A gateway without a dataplane: workers that answer like real ones from sessions in a list, behind the real admin
//! socket and the real metrics port, for the real command line to ask.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test file uses its part of it")]

pub mod group;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command as Process, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use crossbeam::channel::{Receiver, bounded};
use tempfile::TempDir;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use vipgate::gateway::group::GroupStatus;
use vipgate::gateway::state::{
    Dealt, DeviceFigures, Figure, GatewayState, Order, PolicyStatus, RingDrops, Rooms, SocketStatus, WorkerHandle,
};
use vipgate::gateway::tracking::{Capture, TrackedCapture, TrackingStatus};
use vipgate::kernel::{LinkState, LinkStatus};
use vipgate::policy::Peer;
use vipgate_dataplane::command::{Command, SessionFilter, SessionRecord, SessionState};
use vipgate_dataplane::counters::{Direction, DropReason, EndReason, WorkerCounters};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::link::handoff::Wake;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::spec::{
    Announce, BackendSpec, BackendState, ClusterSpec, EgressSpec, EndpointSpec, HealthSpec, InterfaceSpec, NetworkSpec,
    PolicySet, Role, Scope, ServicePortSpec, ServiceSpec, VipSpec,
};

/// What a worker of this gateway does with commands.
#[derive(Clone, Debug)]
pub enum Worker {
    /// Answers from these sessions, looking at so many at a time.
    Answers(Vec<SessionRecord>, usize),
    /// Takes commands and says nothing.
    Silent,
    /// Has ended.
    Dead,
}

/// One interface, which is as it should be.
fn tracking() -> TrackingStatus {
    let (id, name) = (InterfaceId(0), "gw-in".to_owned());
    let link = LinkStatus { id, name, ifindex: 2, role: Role::Inside, state: LinkState::Up, successor: None };
    let capture = TrackedCapture { interface: "gw-in".to_owned(), state: Capture::Attached, detached: 0 };
    TrackingStatus { links: vec![link], captures: vec![capture], ..TrackingStatus::default() }
}

#[derive(Debug)]
struct NoBell;

impl Wake for NoBell {
    fn wake(&self) {}
}

#[derive(Debug)]
struct Device;

impl DeviceFigures for Device {
    fn ring_drops(&self, worker: usize) -> RingDrops {
        RingDrops { no_buffer: 3 * worker as u64, ring_full: 0, too_long: 0 }
    }

    fn captures(&self, _: &[u8], _: u32) -> Option<bool> {
        None
    }

    fn figures(&self) -> Vec<Figure> {
        let figure = |name, counter, label: (&'static str, &str), value| Figure {
            name,
            help: "A figure of the device",
            counter,
            labels: vec![(label.0, label.1.to_owned())],
            value,
        };
        vec![
            figure("frames", false, ("place", "pool"), 4000),
            figure("ring_losses", true, ("cause", "fill_ring_empty"), 3),
            figure("frames", false, ("place", "total"), 4096),
        ]
    }
}

/// A running one. Everything is gone when it is dropped.
#[derive(Debug)]
pub struct Gateway {
    pub state: Arc<GatewayState>,
    pub folder: TempDir,
    pub metrics: SocketAddr,
    stop: watch::Sender<bool>,
    servers: Option<JoinHandle<()>>,
}

impl Gateway {
    pub fn start(workers: &[Worker]) -> Self {
        Self::start_with(workers, &policy())
    }

    pub fn start_with(workers: &[Worker], set: &PolicySet) -> Self {
        Self::start_in(workers, set, GroupStatus::default(), None)
    }

    /// One of three: `group` says how it stands among them, and orders to it go to `orders`.
    pub fn start_in(
        workers: &[Worker],
        set: &PolicySet,
        group: GroupStatus,
        orders: Option<UnboundedSender<Order>>,
    ) -> Self {
        let mut handles = Vec::new();
        for (number, worker) in workers.iter().enumerate() {
            let (commands, inbox) = bounded(4);
            let counters: Arc<WorkerCounters> = Arc::default();
            count(&counters, number as u64);
            let outlet = Arc::new(Outlet::new(Arc::new(NoBell)));
            handles.push(WorkerHandle { core: number + 2, counters, commands, outlet, doorbell: Arc::new(NoBell) });
            let worker = worker.clone();
            // It ends when the last of those who could ask it is gone.
            std::thread::spawn(move || work(worker, &inbox));
        }
        let mut builder = Builder::new(network());
        builder.with_policy(set).unwrap();
        let compiled = builder.with_members(&group.spec).policy;
        let dealt = Dealt::of(&PolicyChange::between(&PolicySet::default(), set));
        let peers = group.spec.gateways.iter().map(|member| Peer {
            name: member.name.clone(),
            node: format!("node-of-{}", member.name).into(),
            zone: "zone-1".into(),
            address: None,
            pods: [].into(),
            uncovered: None,
        });
        let state = Arc::new(GatewayState {
            name: "gw-a".to_owned(),
            node: "node-1".to_owned(),
            zone: None,
            started: Instant::now(),
            ready: AtomicBool::new(true),
            session_capacity: 65_536,
            policy: ArcSwap::from_pointee(PolicyStatus {
                generation: 3,
                applied_at: SystemTime::now(),
                source: "files /etc/vipgate/policy".to_owned(),
                updates_applied: 2,
                updates_rejected: 1,
                last_error: Some("a.yaml:7: spec.addresses: \x1b[31mnot an address".to_owned()),
                peers: peers.collect(),
            }),
            server: None,
            files: None,
            compiled: ArcSwap::new(compiled),
            health_errors: ArcSwap::default(),
            tracking: ArcSwap::from_pointee(tracking()),
            group: ArcSwap::from_pointee(group),
            dealt,
            orders,
            conflicts: ArcSwap::default(),
            ports: (1024, 65_535),
            nat_log: None,
            stalls: Arc::default(),
            port_blocks: 1008,
            network: ArcSwap::from_pointee(network()),
            workers: handles,
            sockets: vec![SocketStatus {
                interface: "gw-in".to_owned(),
                queue: 0,
                worker: 0,
                mode: "native",
                zero_copy: true,
            }],
            rooms: Rooms::default(),
            device: Arc::new(Device),
        });
        let folder = TempDir::with_prefix("vipgate-admin-").unwrap();
        // One thread for all servers, as in a gateway.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (stop, stopped) = watch::channel(false);
        let path = folder.path().join("run/gateway.sock");
        let (socket, listener) = runtime.block_on(async {
            let listener = vipgate::metrics::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
            (vipgate::admin::bind(&path).await.unwrap(), listener)
        });
        let metrics = listener.local_addr().unwrap();
        let shared = state.clone();
        let servers = std::thread::spawn(move || {
            runtime.block_on(async {
                let metrics = tokio::spawn(vipgate::metrics::serve(
                    vipgate::metrics::Monitored::gateway(shared.clone()),
                    listener,
                    shared.rooms.metrics.clone(),
                    stopped.clone(),
                ));
                vipgate::admin::serve(shared, socket, stopped).await;
                metrics.await.unwrap();
            });
        });
        Self { state, folder, metrics, stop, servers: Some(servers) }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("run/gateway.sock")
    }

    /// Stops the servers as a gateway does when it is told to stop.
    pub fn stop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(servers) = self.servers.take() {
            servers.join().unwrap();
        }
    }

    /// Runs `vipgate` against this gateway: exit code, stdout, stderr.
    pub fn vipgate(&self, arguments: &[&str]) -> (i32, String, String) {
        let socket = self.socket().display().to_string();
        vipgate(&[arguments, &["--socket", &socket]].concat())
    }

    /// Runs `vipgate` with `-o json` to success.
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let (code, stdout, stderr) = self.vipgate(&[arguments, &["-o", "json"]].concat());
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
        serde_json::from_str(&stdout).unwrap()
    }

    /// Runs `vipgate` to success; its table.
    pub fn table(&self, arguments: &[&str]) -> String {
        let (code, stdout, stderr) = self.vipgate(arguments);
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
        stdout
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Runs the program: exit code, stdout, stderr.
pub fn vipgate(arguments: &[&str]) -> (i32, String, String) {
    let output: Output = program().args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    for trace in ["panicked", "RUST_BACKTRACE", "Os {", "Error(", "Status {"] {
        assert!(!stderr.contains(trace), "{arguments:?}: {stderr}");
    }
    (output.status.code().expect("no signal ended it"), stdout, stderr)
}

pub fn program() -> Process {
    Process::new(env!("CARGO_BIN_EXE_vipgate"))
}

/// Answers commands until nobody can send any more.
fn work(worker: Worker, inbox: &Receiver<Command>) {
    let (mut sessions, slice) = match worker {
        Worker::Answers(sessions, slice) => (sessions, slice),
        Worker::Silent => {
            let mut unanswered = Vec::new();
            while let Ok(command) = inbox.recv() {
                unanswered.push(command);
            }
            return;
        }
        Worker::Dead => return,
    };
    while let Ok(command) = inbox.recv() {
        match command {
            Command::Sessions { mut chunk, reply } => {
                let mut at = usize::try_from(chunk.cursor.unwrap()).unwrap();
                let end = (at + slice).min(sessions.len());
                while at < end && chunk.records.len() < chunk.records.capacity() {
                    chunk.records.extend(Some(sessions[at]).filter(|session| matches(session, &chunk.filter)));
                    at += 1;
                }
                chunk.cursor = (at < sessions.len()).then_some(at as u64);
                let _ = reply.try_send(chunk);
            }
            Command::Flush { mut chunk, reply } => {
                let before = sessions.len();
                sessions.retain(|session| !matches(session, &chunk.filter));
                chunk.ended += (before - sessions.len()) as u64;
                chunk.cursor = None;
                let _ = reply.try_send(chunk);
            }
            Command::Drops { chunk, reply } => drop(reply.try_send(chunk)),
            Command::Ports { mut chunk, reply } => {
                chunk.cursor = None;
                let _ = reply.try_send(chunk);
            }
            Command::Announce(_)
            | Command::Defend(_)
            | Command::Copies { .. }
            | Command::Take { .. }
            | Command::Purge { .. }
            | Command::Explain { .. }
            | Command::Capture(_)
            | Command::LogSessions(_) => {}
        }
    }
}

fn matches(session: &SessionRecord, filter: &SessionFilter) -> bool {
    filter.endpoint.is_none_or(|address| session.endpoint.ip() == address)
        && filter.vip.is_none_or(|address| session.vip.ip() == address)
        && filter.remote.is_none_or(|address| session.remote.ip() == address)
        && filter.protocol.is_none_or(|protocol| session.protocol == protocol)
        && filter.state.is_none_or(|state| session.state == state)
}

/// Worker `n` has counted these, all different.
fn count(counters: &WorkerCounters, n: u64) {
    for direction in Direction::ALL.iter().take(2) {
        for _ in 0..=n {
            counters.forwarded(*direction, 1, 100);
        }
    }
    counters.dropped(DropReason::NoService);
    counters.drops[DropReason::Ttl as usize].add(n);
    counters.received.add(1000 + n);
    counters.handoffs.add(5);
    counters.sessions.set(20 + n);
    counters.sessions_created.add(30);
    counters.copies.set(8 + n);
    counters.copies_refused.add(n);
    counters.out_of_window.add(6 + n);
    counters.sessions_taken_over.add(2);
    counters.sessions_ended[EndReason::Flushed as usize].add(7);
}

/// Session number `n` of a pod: TCP when `n` is even, else UDP.
pub fn session(n: u16) -> SessionRecord {
    SessionRecord {
        protocol: if n.is_multiple_of(2) { 6 } else { 17 },
        direction: if n.is_multiple_of(2) { Direction::Egress } else { Direction::Inbound },
        endpoint: format!("10.1.0.11:{}", 40_000 + n).parse().unwrap(),
        vip: format!("203.0.113.10:{}", 1024 + n).parse().unwrap(),
        remote: "198.51.100.10:443".parse().unwrap(),
        state: if n.is_multiple_of(2) { SessionState::Established } else { SessionState::Opening },
        idle_ms: 12_345,
        expires_ms: 7_440_000,
        packets_out: 10,
        bytes_out: 1000,
        packets_in: 20,
        bytes_in: 2000,
    }
}

pub fn sessions(count: u16) -> Vec<SessionRecord> {
    (0..count).map(session).collect()
}

/// Two VIPs, two endpoints; the second endpoint has no VIP.
pub fn policy() -> PolicySet {
    let vip = |address: &str, announce, reserved_ports| VipSpec {
        address: address.parse().unwrap(),
        name: "Service tenant-a/api".into(),
        announce,
        reserved_ports,
        shares: vec![],
    };
    PolicySet {
        version: "5f2c".to_owned(),
        policies: vec![EgressSpec {
            name: "EgressPolicy tenant-a/out".into(),
            destinations: vec![],
            excluded: vec![],
            address_selection: vipgate_dataplane::snapshot::spec::AddressSelection::PerEndpoint,
            limits: vipgate_dataplane::snapshot::spec::Limits::default(),
            on_exhaustion: vipgate_dataplane::snapshot::spec::OnExhaustion::Reject,
        }],
        vips: vec![
            vip("203.0.113.10", Announce::L2, vec![80, 443]),
            vip("203.0.113.11", Announce::Bgp, (30_000..30_010).collect()),
        ],
        endpoints: vec![
            EndpointSpec {
                address: "10.1.0.11".parse().unwrap(),
                name: "tenant-a/api-0".into(),
                policy: "EgressPolicy tenant-a/out".into(),
                vips: vec!["203.0.113.10".parse().unwrap()],
                gateway: None,
                remarks: vec![],
            },
            EndpointSpec {
                address: "fd00:1::11".parse().unwrap(),
                name: "".into(),
                policy: "EgressPolicy tenant-a/out".into(),
                vips: vec![],
                gateway: None,
                remarks: vec![],
            },
        ],
        services: vec![service()],
        nodes: Vec::new(),
        cluster: ClusterSpec::default(),
    }
}

/// One Service with a backend that takes sessions, and one that drains.
fn service() -> ServiceSpec {
    let backend = |address: &str, name: &str, weight, state| BackendSpec {
        address: address.parse().unwrap(),
        name: name.into(),
        ports: vec![8080],
        weight,
        state,
        external: state == BackendState::Ready,
        internal: state == BackendState::Ready,
    };
    ServiceSpec {
        name: "Service tenant-a/api".into(),
        vips: vec!["203.0.113.10".parse().unwrap()],
        ports: vec![ServicePortSpec { name: "http".into(), protocol: 6, port: 80 }],
        backends: vec![
            backend("10.1.0.11", "tenant-a/api-0", 5, BackendState::Ready),
            backend("10.1.0.12", "", 1, BackendState::Terminating),
        ],
        source_ranges: vec![],
        affinity: Some(60),
        table_size: 251,
        external: Scope::Local,
        internal: Scope::Cluster,
        health: Some(HealthSpec { port: 30_000, local_endpoints: 1 }),
    }
}

fn network() -> NetworkSpec {
    NetworkSpec {
        interfaces: vec![InterfaceSpec {
            id: InterfaceId(0),
            name: "gw-in".to_owned(),
            ifindex: 7,
            role: Role::Inside,
            mac: [2, 0, 0, 0, 0, 0x1a],
            mtu: 1500,
            up: true,
            addresses: vec!["10.1.0.1".parse().unwrap(), "fd00:1::1".parse().unwrap()],
        }],
        ..NetworkSpec::default()
    }
}
