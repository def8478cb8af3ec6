//! Testbed for the command line and metrics: a gateway with mock workers, behind the real admin socket and metrics
//! port.
#![allow(unreachable_pub, reason = "a testbed of tests")]

pub mod group;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command as Process, Output, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use crossbeam::channel::{Receiver, bounded};
use tempfile::TempDir;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use vipgate::admin::Socket;
use vipgate::kernel::{LinkState, LinkStatus};
use vipgate::metric::Family;
use vipgate::metrics::Monitored;
use vipgate::metrics::definitions::{FRAMES, RING_LOSSES};
use vipgate::state::group::GroupStatus;
use vipgate::state::tracking::{InterfaceAttachment, ProgramAttachment, TrackingStatus};
use vipgate::state::{
    ControlCommand, DeviceStats, EngineHandle, GatewayState, ListenerConnections, PolicyStatus, RingDrops,
    SocketStatus, VipPlacement, WorkerHandle,
};
use vipgate::xds::tls::CertificateFiles;
use vipgate_common::Tasks;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::io::handoff::Wake;
use vipgate_dataplane::observe::counters::WorkerCounters;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::spec::{
    Announce, BackendSpec, BackendState, EgressSpec, EndpointSpec, HealthSpec, InterfaceSpec, NetworkSpec, Role, Scope,
    ServicePortSpec, ServiceSpec, VipSpec,
};
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::end_reason::EndReason;
use vipgate_dataplane::session::query::{SessionFilter, SessionInfo, SessionState};
use vipgate_dataplane::worker::command::{Command, PortUsage};
use vipgate_policy::compiler::Peer;

/// Behavior of a mock worker.
#[derive(Clone, Debug)]
pub enum Worker {
    /// Replies from these sessions, scanning this many per command.
    Replies(Vec<SessionInfo>, usize),
    /// Receives commands but doesn't reply.
    Silent,
    /// Has stopped.
    Stopped,
}

/// One interface without faults.
fn tracking() -> TrackingStatus {
    let (id, name) = (InterfaceId(0), "gw-in".to_owned());
    let link = LinkStatus { id, name, ifindex: 2, role: Role::Inside, state: LinkState::Up, successor: None };
    let guard = Some(ProgramAttachment::default());
    let attachment = InterfaceAttachment { interface: "gw-in".to_owned(), guard, ..InterfaceAttachment::default() };
    TrackingStatus { interfaces: vec![link], attachments: vec![attachment], ..TrackingStatus::default() }
}

#[derive(Debug)]
struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

#[derive(Debug)]
struct MockDevice;

impl DeviceStats for MockDevice {
    fn ring_drops(&self, worker: usize) -> RingDrops {
        RingDrops { no_buffer: 3 * worker as u64, ring_full: 0, too_long: 0 }
    }

    fn captures(&self, _: &[u8], _: u32) -> Option<bool> {
        None
    }

    fn metrics(&self) -> Vec<Family> {
        let by = |label, values: [(&str, u64); 2]| values.map(|(text, value)| (vec![(label, text.to_owned())], value));
        let loss = vec![("worker", "0".to_owned()), ("cause", "fill_ring_empty".to_owned())];
        vec![FRAMES.family(by("place", [("pool", 4000), ("total", 4096)]).into()), RING_LOSSES.family(vec![(loss, 3)])]
    }
}

/// Starts a mock worker.
fn start_worker(worker: Worker, number: u32) -> WorkerHandle {
    let (commands, inbox) = bounded(4);
    let counters: Arc<WorkerCounters> = Arc::default();
    count(&counters, number.into());
    let is_stopped = matches!(worker, Worker::Stopped);
    // Ends when the last sender of commands is dropped.
    let thread = std::thread::spawn(move || work(worker, &inbox));
    if is_stopped {
        // Its queue is closed before anybody sees the worker: otherwise it might accept a command.
        thread.join().unwrap();
    }
    WorkerHandle {
        core: number as usize + 2,
        counters,
        commands,
        replication: Arc::new(ReplicationSender::new(Arc::new(NoWake))),
        doorbell: Arc::new(NoWake),
    }
}

/// The state of a gateway with this policy and group status, without an engine.
fn state(policy: &PolicyChange, group: GroupStatus) -> GatewayState {
    let mut builder = Builder::new(network());
    builder.with_change(policy).unwrap();
    GatewayState {
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
            peers: group.spec.gateways.iter().map(|member| peer(&member.name)).collect(),
        }),
        server: None,
        certificates: CertificateFiles::default(),
        files: None,
        compiled: ArcSwap::new(builder.with_members(&group.spec).policy),
        health_errors: ArcSwap::default(),
        capture: ArcSwap::default(),
        tracking: ArcSwap::from_pointee(tracking()),
        group: ArcSwap::from_pointee(group),
        placement: VipPlacement::of(policy),
        conflicts: ArcSwap::default(),
        ports: (1024, 65_535),
        nat_log: None,
        stalls: Arc::default(),
        port_blocks: 1008,
        network: ArcSwap::from_pointee(network()),
        connections: ListenerConnections::default(),
        engine: OnceLock::new(),
    }
}

/// A gateway of the policy.
fn peer(name: &Arc<str>) -> Peer {
    Peer {
        name: name.clone(),
        node: format!("node-of-{name}").into(),
        zone: "zone-1".into(),
        address: None,
        pods: [].into(),
        uncovered: None,
    }
}

/// Far more than the servers take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// A running gateway; stopped and removed when dropped.
#[derive(Debug)]
pub struct Gateway {
    pub state: Arc<GatewayState>,
    pub folder: TempDir,
    pub metrics: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    servers: Option<JoinHandle<()>>,
}

impl Gateway {
    pub fn start(workers: &[Worker]) -> Self {
        Self::start_with(workers, &policy())
    }

    pub fn start_with(workers: &[Worker], policy: &PolicyChange) -> Self {
        Self::start_group(workers, policy, GroupStatus::default(), None)
    }

    /// A gateway of a group with this status; control commands are sent to `control_commands`.
    pub fn start_group(
        workers: &[Worker],
        policy: &PolicyChange,
        group: GroupStatus,
        control_commands: Option<UnboundedSender<ControlCommand>>,
    ) -> Self {
        let gateway = Self::start_waiting(policy, group);
        gateway.start_engine(workers, control_commands);
        gateway
    }

    /// A gateway whose engine doesn't run yet.
    pub fn start_waiting(policy: &PolicyChange, group: GroupStatus) -> Self {
        let state = Arc::new(state(policy, group));
        let folder = TempDir::with_prefix("vipgate-admin-").unwrap();
        // One thread for all servers, as in a real gateway.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (stop, stopped) = oneshot::channel();
        let path = folder.path().join("run/gateway.sock");
        let (socket, listener) = runtime.block_on(async {
            let listener = vipgate::metrics::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
            (vipgate::admin::bind(&path).await.unwrap(), listener)
        });
        let metrics = listener.local_addr().unwrap();
        let shared = state.clone();
        let servers = std::thread::spawn(move || {
            let Socket { listener: admin, file: _file } = socket;
            runtime.block_on(async {
                let tasks = Tasks::default();
                let (monitored, connections) = (Monitored::gateway(shared.clone()), shared.connections.metrics.clone());
                tasks.spawn("metrics", vipgate::metrics::serve(monitored, listener, connections, tasks.clone()));
                tasks.spawn("admin socket", vipgate::admin::serve(shared, admin, tasks.clone()));
                // Fails when the sender is dropped: that is the stop.
                let _ = stopped.await;
                assert!(tasks.stop(STOP_TIMEOUT).await);
            });
        });
        Self { state, folder, metrics, stop: Some(stop), servers: Some(servers) }
    }

    /// Starts mock workers, like a gateway whose initial policy is in force.
    pub fn start_engine(&self, workers: &[Worker], control_commands: Option<UnboundedSender<ControlCommand>>) {
        let sockets =
            vec![SocketStatus { interface: "gw-in".to_owned(), queue: 0, worker: 0, mode: "native", zero_copy: true }];
        let engine = EngineHandle {
            workers: workers.iter().zip(0..).map(|(worker, number)| start_worker(worker.clone(), number)).collect(),
            sockets,
            device: Arc::new(MockDevice),
            commands: control_commands.unwrap_or_else(|| unbounded_channel().0),
        };
        self.state.engine.set(engine).expect("the engine runs already");
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("run/gateway.sock")
    }

    /// Stops the servers like a gateway that shuts down.
    pub fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(servers) = self.servers.take() {
            servers.join().unwrap();
        }
    }

    /// Runs `vipgate` against this gateway; returns exit code, stdout, stderr.
    pub fn vipgate(&self, arguments: &[&str]) -> (i32, String, String) {
        let socket = self.socket().display().to_string();
        vipgate(&[arguments, &["--socket", &socket]].concat())
    }

    /// Runs `vipgate` with `-o json`, expecting success.
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let (code, stdout, stderr) = self.vipgate(&[arguments, &["-o", "json"]].concat());
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
        serde_json::from_str(&stdout).unwrap()
    }

    /// Runs `vipgate`, expecting success; returns the table.
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

/// Runs `vipgate`; returns exit code, stdout, stderr.
pub fn vipgate(arguments: &[&str]) -> (i32, String, String) {
    let output: Output = program().args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    for marker in ["panicked", "RUST_BACKTRACE", "Os {", "Error(", "Status {"] {
        assert!(!stderr.contains(marker), "{arguments:?}: {stderr}");
    }
    (output.status.code().expect("no signal ended it"), stdout, stderr)
}

pub fn program() -> Process {
    Process::new(env!("CARGO_BIN_EXE_vipgate"))
}

/// Replies to commands until the channel is closed.
fn work(worker: Worker, inbox: &Receiver<Command>) {
    let (mut sessions, chunk_size) = match worker {
        Worker::Replies(sessions, chunk_size) => (sessions, chunk_size),
        Worker::Silent => {
            let mut pending = Vec::new();
            while let Ok(command) = inbox.recv() {
                pending.push(command);
            }
            return;
        }
        Worker::Stopped => return,
    };
    while let Ok(command) = inbox.recv() {
        match command {
            Command::Sessions { mut chunk, reply } => {
                let mut at = usize::try_from(chunk.cursor.unwrap()).unwrap();
                let end = (at + chunk_size).min(sessions.len());
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
                let of_vip = |vip| PortUsage { vip, used: 1, sessions: sessions.len() as u32 };
                chunk.records.extend(chunk.only.map(of_vip));
                chunk.cursor = None;
                let _ = reply.try_send(chunk);
            }
            Command::Announce(_)
            | Command::Defend(_)
            | Command::ListRecords { .. }
            | Command::ApplyRecords { .. }
            | Command::PurgeStandby { .. }
            | Command::Trace { .. }
            | Command::Capture(_)
            | Command::LogSessions(_) => {}
        }
    }
}

fn matches(session: &SessionInfo, filter: &SessionFilter) -> bool {
    filter.endpoint.is_none_or(|address| session.endpoint.ip() == address)
        && filter.vip.is_none_or(|address| session.vip.ip() == address)
        && filter.remote.is_none_or(|address| session.remote.ip() == address)
        && filter.protocol.is_none_or(|protocol| session.protocol == protocol)
        && filter.state.is_none_or(|state| session.state == state)
}

/// Sets the counters of worker `n`, to different values.
/// Dropped packets of both workers.
pub fn dropped(reason: DropReason) -> u64 {
    match reason {
        DropReason::NoService => 2,
        DropReason::Ttl => 1,
        DropReason::RxNoBuffer => 3,
        _ => 0,
    }
}

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
    counters.standby_sessions.set(8 + n);
    counters.standby_rejected.add(n);
    counters.out_of_window.add(6 + n);
    counters.sessions_failed_over.add(2);
    counters.sessions_ended[EndReason::Flushed as usize].add(7);
}

/// Session `n` of a pod: TCP if `n` is even, else UDP.
pub fn session(n: u16) -> SessionInfo {
    SessionInfo {
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

pub fn sessions(count: u16) -> Vec<SessionInfo> {
    (0..count).map(session).collect()
}

/// A policy with two VIPs and two endpoints; the second endpoint has no VIP.
pub fn policy() -> PolicyChange {
    let vip = |address: &str, announce, reserved_ports| VipSpec {
        address: address.parse().unwrap(),
        name: "Service tenant-a/api".into(),
        announce,
        reserved_ports,
        shards: vec![],
        shard_map: None,
        private: vec![],
    };
    PolicyChange {
        version: "5f2c".to_owned(),
        policies: vec![EgressSpec {
            name: "EgressPolicy tenant-a/out".into(),
            destinations: vec![],
            excluded: vec![],
            address_selection: vipgate_dataplane::policy::spec::AddressSelection::PerEndpoint,
            limits: vipgate_dataplane::policy::spec::Limits::default(),
            on_exhaustion: vipgate_dataplane::policy::spec::OnExhaustion::Reject,
        }]
        .into(),
        vips: vec![
            vip("203.0.113.10", Announce::L2, vec![80, 443]),
            vip("203.0.113.11", Announce::Bgp, (30_000..30_010).collect()),
        ]
        .into(),
        endpoints: vec![
            EndpointSpec {
                address: "10.1.0.11".parse().unwrap(),
                name: "tenant-a/api-0".into(),
                policy: "EgressPolicy tenant-a/out".into(),
                vips: vec!["203.0.113.10".parse().unwrap()],
                gateway: None,
                slot: None,
                remarks: vec![],
            },
            EndpointSpec {
                address: "fd00:1::11".parse().unwrap(),
                name: "".into(),
                policy: "EgressPolicy tenant-a/out".into(),
                vips: vec![],
                gateway: None,
                slot: None,
                remarks: vec![],
            },
        ]
        .into(),
        services: vec![service()].into(),
        ..PolicyChange::default()
    }
}

/// A Service with a ready and a terminating backend.
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
            frames: FrameLayout::default(),
            partial_checksums: false,
        }],
        ..NetworkSpec::default()
    }
}
