//! Benchmark rig: a worker configured as in the gateway, over an in-memory device, so that only the packet path is
//! measured.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use crossbeam::channel::{Sender, unbounded};
use crossbeam::queue::ArrayQueue;
use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::io::batch::BATCH_SIZE;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::io::handoff::{Wake, WorkerLinks};
use vipgate_dataplane::io::{FrameAudit, PacketIo, Received};
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::members::MembersSpec;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, BackendSpec, BackendState, EgressSpec, EndpointSpec, HopSpec, InterfaceSpec, Limits,
    NeighborSpec, NetworkSpec, OnExhaustion, Role, RouteSpec, RouteTarget, Scope, ServicePortSpec, ServiceSpec,
    VipSpec,
};
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::SessionFamily;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::stage::context::SessionRules;
use vipgate_dataplane::wire::protocol;
use vipgate_dataplane::worker::Worker;
use vipgate_dataplane::worker::builder::{
    ControlLinks, SharedKeys, TableSizes, WorkerBuilder, WorkerInputs, WorkerKeys, WorkersConfig,
};
use vipgate_dataplane::worker::command::Command;
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;
use vipgate_mem::{Arena, Frame, HEADROOM};

use crate::packets::{
    BACKEND_PORT, BACKENDS, FIRST_POD, INSIDE_MAC, OUTSIDE_MAC, POD_MAC, PODS, ROUTER_MAC, SERVICE_PORT, VIP, VIP6,
    pod6,
};
use crate::peer_gateway;
use crate::peer_gateway::{ShardOwner, TunnelTags};

pub(crate) const INSIDE: InterfaceId = InterfaceId(0);
pub(crate) const OUTSIDE: InterfaceId = InterfaceId(1);
const ROUTER: u32 = 0xcb00_71fe;
const ROUTER6: V6 = V6 { high: 0x2001_0db8_0113_0000, low: 0xfe };
/// Name of the pods' policy.
const POLICY: &str = "bench";
/// When sessions are replicated: the gateway's default.
pub(crate) const DEFAULT_FIRST_RECORD: FirstRecord = FirstRecord::AtAge(50);
/// As many frames as a socket has, more than fit into the L1 cache.
const FRAMES: usize = 4096;

/// In-memory device.
#[derive(Debug)]
pub(crate) struct BenchIo {
    /// FIFO: frames rotate as on a fill ring.
    free: VecDeque<Frame>,
    received: Vec<Received>,
    pub(crate) sent: Vec<Frame>,
}

impl BenchIo {
    fn new() -> Result<Self> {
        let free = Arena::allocate(FRAMES, 2048).context("memory for frames")?.frames().into();
        Ok(Self { free, received: Vec::with_capacity(BATCH_SIZE), sent: Vec::with_capacity(FRAMES) })
    }

    /// Injects a packet of `size` bytes, written by `write`, as received on `interface`.
    pub(crate) fn inject(&mut self, interface: InterfaceId, size: u16, write: impl FnOnce(&mut [u8])) {
        let Some(mut frame) = self.free.pop_front() else { return };
        frame.reset(HEADROOM);
        frame.set_len(size);
        write(frame.bytes_mut());
        self.received.push(Received::new(frame, interface));
    }

    /// Calls `inspect` with each sent frame, then frees it.
    pub(crate) fn take_sent(&mut self, mut inspect: impl FnMut(&Frame)) {
        for frame in self.sent.drain(..) {
            inspect(&frame);
            self.free.push_back(frame);
        }
    }
}

impl PacketIo for BenchIo {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        let count = limit.min(self.received.len());
        into.extend(self.received.drain(..count).inspect(|received| received.frame.prefetch()));
        count
    }

    fn tx(&mut self, _: InterfaceId, frame: Frame) -> Result<(), Frame> {
        self.sent.push(frame);
        Ok(())
    }

    fn allocate(&mut self, _length: usize) -> Option<Frame> {
        self.free.pop_front()
    }

    fn release(&mut self, frame: Frame) {
        self.free.push_back(frame);
    }

    fn flush(&mut self) {}

    fn wait(&mut self, _: Duration) {}

    fn audit(&self) -> FrameAudit {
        let (free, filled) = (self.free.len() as u64, self.received.len() as u64);
        FrameAudit { free, filled, in_flight: self.sent.len() as u64 }
    }
}

#[derive(Debug)]
struct NoopWaker;

impl Wake for NoopWaker {
    fn wake(&self) {}
}

/// A worker under test, with its clock and channels.
pub(crate) struct Rig {
    pub(crate) worker: Worker<BenchIo>,
    pub(crate) now: Tick,
    pub(crate) capacity: u32,
    /// Replication updates for the peer gateway.
    pub(crate) replication: Arc<ReplicationSender>,
    timeouts: Timeouts,
    commands: Sender<Command>,
}

/// Updates the membership of a rig.
#[derive(Debug)]
pub(crate) struct PolicyControl {
    builder: Builder,
    publisher: Publisher,
}

impl PolicyControl {
    /// Publishes a membership.
    pub(crate) fn set_members(&mut self, members: &MembersSpec) {
        let snapshot = self.builder.with_members(members);
        self.publisher.publish(snapshot);
    }
}

/// Capacity reserved for VIPs and pods below their fair share: the sessions opened by one batch.
const RESERVE: u32 = BATCH_SIZE as u32;

impl Rig {
    /// A worker with capacity for `sessions`, and 1024 pods behind one VIP of each family. No session expires during
    /// the measurement, but expiry runs.
    pub(crate) fn new(sessions: u32) -> Result<Self> {
        Self::with_timeouts(sessions, Self::long_timeouts())
    }

    /// Sends a command to the worker, which handles it in its next iteration.
    pub(crate) fn send_command(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| anyhow!("the worker's command channel is closed"))
    }

    /// Timeouts longer than a measurement.
    pub(crate) fn long_timeouts() -> Timeouts {
        Timeouts { udp: 3_600_000, ..Timeouts::default() }
    }

    /// Like [`Rig::new`], with timeouts.
    pub(crate) fn with_timeouts(sessions: u32, timeouts: Timeouts) -> Result<Self> {
        // The policy isn't updated, and the worker holds it.
        let (rig, _) = Self::build((sessions, timeouts), DEFAULT_FIRST_RECORD, &base_policy())?;
        Ok(rig)
    }

    /// One of two gateways (`peer_gateway.rs`), the owner of all shards. Sessions are replicated to the peer if it is
    /// `linked`.
    pub(crate) fn with_peer(
        sessions: u32,
        timeouts: Timeouts,
        linked: bool,
        tags: TunnelTags,
    ) -> Result<(Self, PolicyControl)> {
        let (rig, mut control) = Self::with_unlinked_peer((sessions, timeouts), DEFAULT_FIRST_RECORD)?;
        control.set_members(&peer_gateway::membership(ShardOwner::Local, linked, tags));
        Ok((rig, control))
    }

    /// The same with a link over which sessions are replicated from `first_record` on.
    pub(crate) fn with_linked_peer(
        (sessions, timeouts): (u32, Timeouts),
        first_record: FirstRecord,
    ) -> Result<(Self, PolicyControl)> {
        let (rig, mut control) = Self::with_unlinked_peer((sessions, timeouts), first_record)?;
        control.set_members(&peer_gateway::membership(ShardOwner::Local, true, TunnelTags::Disabled));
        Ok((rig, control))
    }

    fn with_unlinked_peer(table: (u32, Timeouts), first_record: FirstRecord) -> Result<(Self, PolicyControl)> {
        let mut policy = base_policy();
        peer_gateway::assign_shards(&mut policy);
        Self::build(table, first_record, &policy)
    }

    fn build(
        (sessions, timeouts): (u32, Timeouts),
        first_record: FirstRecord,
        policy: &PolicyChange,
    ) -> Result<(Self, PolicyControl)> {
        let mut builder = Builder::new(network());
        let publisher = Publisher::new(builder.with_change(policy)?);
        let key = HashKey::fixed();
        let (sender, commands) = unbounded();
        let waker: Arc<dyn Wake> = Arc::new(NoopWaker);
        let replication = Arc::new(ReplicationSender::new(waker.clone()));
        let links = WorkerLinks::mesh(std::slice::from_ref(&waker)).pop().context("no worker links")?;
        let lease = Arc::new(Lease::unlimited());
        let neighbor_requests = ResolutionRequests { queue: Arc::new(ArrayQueue::new(8)), waker };
        let control = ControlLinks { publisher: &publisher, neighbor_requests: &neighbor_requests, lease: &lease };
        let config = worker_config((sessions, timeouts), first_record, key)?;
        let inputs = WorkerInputs {
            io: BenchIo::new()?,
            links,
            commands,
            replication: replication.clone(),
            keys: WorkerKeys::same(key),
        };
        let now = Tick(1);
        let shared = SharedKeys { affinity: key, directory: key };
        let parts = WorkerBuilder::new(config, control, shared)
            .build(inputs, now, |request| request.in_memory())
            .context("memory for tables")?;
        let worker = Worker::new(parts, now);
        let rig = Self { worker, now, capacity: sessions, replication, timeouts, commands: sender };
        Ok((rig, PolicyControl { builder, publisher }))
    }

    /// Size of a family's session table in bytes, and its page size.
    pub(crate) fn table_memory<A: SessionFamily>(&self) -> (usize, &'static str) {
        let table = A::table(&self.worker.tables().sessions);
        (table.bytes(), table.pages().name())
    }

    /// Advances the clock until all sessions have expired and no port is quarantined.
    pub(crate) fn expire_all(&mut self) {
        self.now = self.now.plus(self.timeouts.udp);
        while u32::table(&self.worker.tables().sessions).occupied() > 0 {
            self.now = self.now.plus(10);
            self.worker.turn(self.now);
        }
    }

    /// Non-zero drop counters, for error messages.
    pub(crate) fn drops(&self) -> Vec<(&'static str, u64)> {
        let drops = DropReason::ALL.iter().map(|&r| (r.name(), self.worker.counters().drops[r as usize].get()));
        drops.filter(|(_, count)| *count > 0).collect()
    }
}

/// Defaults of the gateway, except for the sizes: capacity for `sessions`, and few fragments.
fn worker_config(
    (sessions, timeouts): (u32, Timeouts),
    first_record: FirstRecord,
    key: HashKey,
) -> Result<WorkersConfig> {
    let sizes = TableSizes::for_sessions(sessions.into(), 1).context("too many sessions")?;
    Ok(WorkersConfig {
        workers: 1,
        sizes: TableSizes {
            sessions: sessions + RESERVE,
            reserve: RESERVE,
            embryonic_queue: sessions.saturating_mul(4),
            embryonic_per_vip: u32::MAX,
            datagrams: 1024,
            queued_fragments: 256,
            ..sizes
        },
        ports: PortRange::default(),
        timeouts,
        fragment_timeout: 2_000,
        first_record,
        rules: SessionRules {
            require_syn: true,
            cookie_key: key,
            reject_no_service: false,
            reject_no_backend: true,
            mss_clamp: None,
        },
    })
}

fn base_policy() -> PolicyChange {
    let endpoint = |address, vip| EndpointSpec {
        address,
        name: "".into(),
        policy: POLICY.into(),
        vips: vec![vip],
        gateway: None,
        slot: None,
        remarks: vec![],
    };
    let vip = |address: IpAddr| VipSpec {
        address,
        name: "bench".into(),
        announce: Announce::L2,
        reserved_ports: vec![],
        shards: vec![],
        shard_map: None,
        private: vec![],
    };
    let v4 = (FIRST_POD..FIRST_POD + PODS).map(|pod| endpoint(pod.to_ip(), VIP.to_ip()));
    let v6 = (FIRST_POD..FIRST_POD + PODS).map(|pod| endpoint(pod6(pod).to_ip(), VIP6.to_ip()));
    let backend = |address| BackendSpec {
        address,
        name: "".into(),
        ports: vec![BACKEND_PORT],
        weight: 1,
        state: BackendState::Ready,
        external: true,
        internal: true,
    };
    let backends = (FIRST_POD..FIRST_POD + BACKENDS).map(Address::to_ip);
    let backends = backends.chain((FIRST_POD..FIRST_POD + BACKENDS).map(|pod| pod6(pod).to_ip())).map(backend);
    let service = ServiceSpec {
        name: "Service bench/dns".into(),
        vips: vec![VIP.to_ip(), VIP6.to_ip()],
        ports: vec![ServicePortSpec { name: "dns".into(), protocol: protocol::UDP, port: SERVICE_PORT }],
        backends: backends.collect(),
        source_ranges: Vec::new(),
        affinity: None,
        table_size: 4093,
        external: Scope::Cluster,
        internal: Scope::Cluster,
        health: None,
    };
    PolicyChange {
        version: "bench".into(),
        policies: vec![EgressSpec {
            name: POLICY.into(),
            destinations: ["0.0.0.0/0", "::/0"].iter().filter_map(|net| net.parse().ok()).collect(),
            excluded: Vec::new(),
            address_selection: AddressSelection::PerEndpoint,
            limits: Limits::default(),
            on_exhaustion: OnExhaustion::Drop,
        }]
        .into(),
        vips: vec![vip(VIP.to_ip()), vip(VIP6.to_ip())].into(),
        endpoints: v4.chain(v6).collect(),
        services: vec![service].into(),
        ..PolicyChange::default()
    }
}

fn network() -> NetworkSpec {
    let interface = |id: InterfaceId, role, mac| InterfaceSpec {
        id,
        name: format!("bench{}", id.0),
        ifindex: u32::from(id.0) + 1,
        role,
        mac,
        mtu: 1500,
        up: true,
        addresses: Vec::new(),
        frames: FrameLayout::default(),
        partial_checksums: false,
    };
    let route = |prefix: &str, interface, gateway: Option<IpAddr>| RouteSpec {
        prefix: prefix.parse().unwrap_or_default(),
        target: RouteTarget::Via(vec![HopSpec { interface, gateway }]),
    };
    let pods = (FIRST_POD..FIRST_POD + PODS).flat_map(|pod| [pod.to_ip(), pod6(pod).to_ip()]);
    let neighbor = |interface, address: IpAddr, mac| NeighborSpec { interface, address, mac };
    let routers = [ROUTER.to_ip(), ROUTER6.to_ip()];
    NetworkSpec {
        interfaces: vec![interface(INSIDE, Role::Inside, INSIDE_MAC), interface(OUTSIDE, Role::Outside, OUTSIDE_MAC)],
        routes: vec![
            route("10.1.0.0/16", INSIDE, None),
            route("fd00:1::/64", INSIDE, None),
            route("10.2.0.0/24", INSIDE, None),
            route("0.0.0.0/0", OUTSIDE, Some(routers[0])),
            route("::/0", OUTSIDE, Some(routers[1])),
        ],
        neighbors: pods
            .map(|address| neighbor(INSIDE, address, POD_MAC))
            .chain(routers.map(|address| neighbor(OUTSIDE, address, ROUTER_MAC)))
            .chain([neighbor(INSIDE, peer_gateway::PEER.into(), peer_gateway::PEER_MAC)])
            .collect(),
        locals: Vec::new(),
    }
}
