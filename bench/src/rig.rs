//! A worker as the gateway has it, over a device that only moves frames: what is measured is the packet path.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use crossbeam::channel::{Sender, unbounded};
use crossbeam::queue::ArrayQueue;
use vipgate_dataplane::address::{Address, V6};
use vipgate_dataplane::batch::MOST;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::fragments::Fragments;
use vipgate_dataplane::ids::Ids;
use vipgate_dataplane::io::{FrameAudit, InterfaceId, PacketIo, Received};
use vipgate_dataplane::limiter::Limiter;
use vipgate_dataplane::link::affinity::Affinity;
use vipgate_dataplane::link::handoff::{Links, Wake};
use vipgate_dataplane::link::lease::Lease;
use vipgate_dataplane::link::outbox::Outbox;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::pipeline::Tables;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::ports::allocator::Allocator;
use vipgate_dataplane::ports::pool::WorkerId;
use vipgate_dataplane::session::embryonic::Embryonic;
use vipgate_dataplane::session::eviction::Eviction;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::tuple::HashKey;
use vipgate_dataplane::session::{SessionFamily, Sessions};
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, BackendSpec, BackendState, ClusterSpec, EgressSpec, EndpointSpec, HopSpec,
    InterfaceSpec, Limits, NeighbourSpec, NetworkSpec, OnExhaustion, PolicySet, Role, RouteSpec, RouteTarget, Scope,
    ServicePortSpec, ServiceSpec, VipSpec,
};
use vipgate_dataplane::stage::open::Rules;
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::waiting::{Questions, Waiting};
use vipgate_dataplane::watch::Watch;
use vipgate_dataplane::wire::protocol;
use vipgate_dataplane::worker::{Parts, Worker};
use vipgate_mem::{Arena, Frame, HEADROOM};

use crate::group::{self, Holder, Tags};
use crate::packets::{
    BACKEND_PORT, BACKENDS, FIRST_POD, INSIDE_MAC, OUTSIDE_MAC, POD_MAC, PODS, ROUTER_MAC, SERVICE_PORT, VIP, VIP6,
    pod6,
};

pub(crate) const INSIDE: InterfaceId = InterfaceId(0);
pub(crate) const OUTSIDE: InterfaceId = InterfaceId(1);
const ROUTER: u32 = 0xcb00_71fe;
const ROUTER6: V6 = V6 { high: 0x2001_0db8_0113_0000, low: 0xfe };
/// Name of the pods' policy.
const POLICY: &str = "bench";
/// How old sessions are when another gateway is told of them: the gateway's own default.
const COPY_AFTER_MS: u32 = 50;
/// As many frames as a socket has: they must not all stay in the first cache.
const FRAMES: usize = 4096;

/// Frames in, frames out.
#[derive(Debug)]
pub(crate) struct BenchIo {
    /// First in, first out: frames take turns, as they do on a fill ring.
    free: VecDeque<Frame>,
    ready: Vec<Received>,
    pub(crate) sent: Vec<Frame>,
}

impl BenchIo {
    fn new() -> Result<Self> {
        let free = Arena::allocate(FRAMES, 2048).context("memory for frames")?.frames().into();
        Ok(Self { free, ready: Vec::with_capacity(MOST), sent: Vec::with_capacity(FRAMES) })
    }

    /// Lets a packet of `size` bytes arrive, written by `write`.
    pub(crate) fn offer(&mut self, interface: InterfaceId, size: u16, write: impl FnOnce(&mut [u8])) {
        let Some(mut frame) = self.free.pop_front() else { return };
        frame.reset(HEADROOM);
        frame.set_len(size);
        write(frame.bytes_mut());
        self.ready.push(Received::new(frame, interface));
    }

    /// Takes back what was sent, after a look at it.
    pub(crate) fn collect(&mut self, mut look: impl FnMut(&Frame)) {
        for frame in self.sent.drain(..) {
            look(&frame);
            self.free.push_back(frame);
        }
    }
}

impl PacketIo for BenchIo {
    fn rx(&mut self, into: &mut Vec<Received>, limit: usize) -> usize {
        let count = limit.min(self.ready.len());
        into.extend(self.ready.drain(..count).inspect(|received| received.frame.prefetch()));
        count
    }

    fn tx(&mut self, _: InterfaceId, frame: Frame) -> Result<(), Frame> {
        self.sent.push(frame);
        Ok(())
    }

    fn take(&mut self) -> Option<Frame> {
        self.free.pop_front()
    }

    fn give(&mut self, frame: Frame) {
        self.free.push_back(frame);
    }

    fn flush(&mut self) {}

    fn wait(&mut self, _: Duration) {}

    fn audit(&self) -> FrameAudit {
        let (free, filled) = (self.free.len() as u64, self.ready.len() as u64);
        FrameAudit { free, filled, in_flight: self.sent.len() as u64 }
    }
}

#[derive(Debug)]
struct NoBell;

impl Wake for NoBell {
    fn wake(&self) {}
}

/// A worker and what keeps it alive.
pub(crate) struct Rig {
    pub(crate) worker: Worker<BenchIo>,
    pub(crate) now: Tick,
    pub(crate) capacity: u32,
    /// What the other gateway of a group is told.
    pub(crate) outlet: Arc<Outlet>,
    timeouts: Timeouts,
    pub(crate) commands: Sender<Command>,
}

/// What changes the policy of a rig.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) builder: Builder,
    pub(crate) publisher: Publisher,
}

/// Sessions of a table that only holders below their fair share may have: as many as a batch opens.
const RESERVE: u32 = MOST as u32;

impl Rig {
    /// A worker with room for `sessions`, for 1024 pods behind one VIP of each family. Nothing expires while it is measured; the
    /// sweep runs all the same.
    pub(crate) fn new(sessions: u32) -> Result<Self> {
        Self::with(sessions, Self::lasting())
    }

    /// Tells the worker something, which it hears in its next turn.
    pub(crate) fn tell(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| anyhow!("the worker takes no commands"))
    }

    /// Timeouts with which nothing expires while it is measured.
    pub(crate) fn lasting() -> Timeouts {
        Timeouts { udp: 3_600_000, ..Timeouts::default() }
    }

    /// The same with timeouts.
    pub(crate) fn with(sessions: u32, timeouts: Timeouts) -> Result<Self> {
        // Nobody changes the policy: the worker keeps it by itself.
        let (rig, _) = Self::beside(sessions, timeouts, PolicySet::default())?;
        Ok(rig)
    }

    /// The same with more policy beside that of the pods, and what changes it all.
    pub(crate) fn beside(sessions: u32, timeouts: Timeouts, mut more: PolicySet) -> Result<(Self, Control)> {
        let own = policy();
        more.policies.extend(own.policies);
        more.vips.extend(own.vips);
        more.endpoints.extend(own.endpoints);
        more.services.extend(own.services);
        Self::under(sessions, timeouts, &more)
    }

    /// One of two gateways: see [`group`]. Everything is its own, and the other one takes copies if it is `linked`.
    pub(crate) fn in_group(sessions: u32, timeouts: Timeouts, linked: bool, tags: Tags) -> Result<(Self, Control)> {
        let mut set = policy();
        group::share(&mut set);
        let (rig, mut control) = Self::under(sessions, timeouts, &set)?;
        group::agree(&mut control, Holder::This, linked, tags);
        Ok((rig, control))
    }

    fn under(sessions: u32, timeouts: Timeouts, set: &PolicySet) -> Result<(Self, Control)> {
        let mut builder = Builder::new(network());
        let publisher = Publisher::new(builder.with_policy(set)?);
        let key = HashKey::fixed();
        let (sender, commands) = unbounded();
        let bell: Arc<dyn Wake> = Arc::new(NoBell);
        let outlet = Arc::new(Outlet::new(bell.clone()));
        let links = Links::mesh(std::slice::from_ref(&bell)).pop().context("one worker has links")?;
        let parts = Parts {
            id: WorkerId(0),
            io: BenchIo::new()?,
            links,
            affinity: Arc::new(Affinity::new(sessions as usize / 16, key)),
            directory: None,
            tables: Tables {
                // What the packet path has by default, beside the sessions that are measured.
                sessions: Sessions::new(sessions + RESERVE, timeouts, key)
                    .context("memory for sessions")?
                    .with_reserve(RESERVE),
                embryonic: Embryonic::new(sessions.saturating_mul(4), u32::MAX),
                eviction: Eviction::default(),
                ports: Allocator::new(WorkerId(0), 1, PortRange::default(), key).context("memory for ports")?,
                fragments: Fragments::new(1024, 256, 2_000, key).context("memory for fragments")?,
                ids: Ids::new(0, 1, key),
                limiter: Limiter::new(key, Tick(1)),
                outbox: Outbox::new(outlet.clone(), COPY_AFTER_MS),
                watch: Watch::default(),
            },
            reader: publisher.reader(),
            waiting: Waiting::new(Questions { queue: Arc::new(ArrayQueue::new(8)), bell }),
            commands,
            counters: Arc::default(),
            rules: Rules {
                require_syn: true,
                secret: key,
                reject_no_service: false,
                reject_no_backend: true,
                mss: None,
            },
            lease: Arc::new(Lease::free()),
        };
        let now = Tick(1);
        let worker = Worker::new(parts, now);
        let rig = Self { worker, now, capacity: sessions, outlet, timeouts, commands: sender };
        Ok((rig, Control { builder, publisher }))
    }

    /// Bytes of a family's table, and the pages that it lies on.
    pub(crate) fn table<A: SessionFamily>(&self) -> (usize, &'static str) {
        let table = A::table(&self.worker.tables().sessions);
        (table.bytes(), table.pages().name())
    }

    /// Lets time pass until no session is left, and no port rests.
    pub(crate) fn expire_all(&mut self) {
        self.now = self.now.plus(self.timeouts.udp);
        while u32::table(&self.worker.tables().sessions).occupied() > 0 {
            self.now = self.now.plus(10);
            self.worker.turn(self.now);
        }
    }

    /// Drops by reason, to say why something went wrong.
    pub(crate) fn drops(&self) -> Vec<(&'static str, u64)> {
        let all = DropReason::ALL.iter().map(|&r| (r.name(), self.worker.counters().drops[r as usize].get()));
        all.filter(|(_, count)| *count > 0).collect()
    }
}

/// A pod as policy has it.
pub(crate) fn pod(address: IpAddr, vips: Vec<IpAddr>) -> EndpointSpec {
    EndpointSpec { address, name: "".into(), policy: POLICY.into(), vips, gateway: None, remarks: vec![] }
}

fn policy() -> PolicySet {
    let endpoint = |address, vip| pod(address, vec![vip]);
    let vip = |address: IpAddr| VipSpec {
        address,
        name: "bench".into(),
        announce: Announce::L2,
        reserved_ports: vec![],
        shares: vec![],
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
    PolicySet {
        version: "bench".into(),
        policies: vec![EgressSpec {
            name: POLICY.into(),
            destinations: ["0.0.0.0/0", "::/0"].iter().filter_map(|net| net.parse().ok()).collect(),
            excluded: Vec::new(),
            address_selection: AddressSelection::PerEndpoint,
            limits: Limits::default(),
            on_exhaustion: OnExhaustion::Drop,
        }],
        vips: vec![vip(VIP.to_ip()), vip(VIP6.to_ip())],
        endpoints: v4.chain(v6).collect(),
        services: vec![service],
        nodes: Vec::new(),
        cluster: ClusterSpec::default(),
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
    };
    let route = |prefix: &str, interface, gateway: Option<IpAddr>| RouteSpec {
        prefix: prefix.parse().unwrap_or_default(),
        target: RouteTarget::Via(vec![HopSpec { interface, gateway }]),
    };
    let pods = (FIRST_POD..FIRST_POD + PODS).flat_map(|pod| [pod.to_ip(), pod6(pod).to_ip()]);
    let neighbour = |interface, address: IpAddr, mac| NeighbourSpec { interface, address, mac };
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
        neighbours: pods
            .map(|address| neighbour(INSIDE, address, POD_MAC))
            .chain(routers.map(|address| neighbour(OUTSIDE, address, ROUTER_MAC)))
            .chain([neighbour(INSIDE, group::OTHER.into(), group::OTHER_MAC)])
            .collect(),
        locals: Vec::new(),
    }
}
