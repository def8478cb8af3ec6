//! A worker as the gateway has it, over a device that only moves frames: what is measured is the packet path.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use crossbeam::channel::{Sender, unbounded};
use crossbeam::queue::ArrayQueue;
use vipgate_dataplane::address::Address;
use vipgate_dataplane::batch::MOST;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::fragments::Fragments;
use vipgate_dataplane::ids::Ids;
use vipgate_dataplane::io::{FrameAudit, InterfaceId, PacketIo, Received};
use vipgate_dataplane::limiter::Limiter;
use vipgate_dataplane::link::handoff::{Links, Wake};
use vipgate_dataplane::pipeline::Tables;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::ports::allocator::Allocator;
use vipgate_dataplane::ports::pool::WorkerId;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::tuple::HashKey;
use vipgate_dataplane::session::{SessionFamily, Sessions};
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, EgressSpec, EndpointSpec, HopSpec, InterfaceSpec, Limits, NeighbourSpec, NetworkSpec,
    OnExhaustion, PolicySet, Role, RouteSpec, RouteTarget, VipSpec,
};
use vipgate_dataplane::stage::open::Rules;
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::waiting::{Questions, Waiting};
use vipgate_dataplane::worker::{Parts, Worker};
use vipgate_mem::{Arena, Frame, HEADROOM};

use crate::packets::{FIRST_POD, INSIDE_MAC, OUTSIDE_MAC, POD_MAC, PODS, ROUTER_MAC, VIP};

pub(crate) const INSIDE: InterfaceId = InterfaceId(0);
pub(crate) const OUTSIDE: InterfaceId = InterfaceId(1);
const ROUTER: u32 = 0xcb00_71fe;
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
        into.extend(self.ready.drain(..count));
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
    _publisher: Publisher,
    _commands: Sender<Command>,
}

impl Rig {
    /// A worker with room for `sessions`, for 1024 pods behind one VIP.
    pub(crate) fn new(sessions: u32) -> Result<Self> {
        let mut builder = Builder::new(network());
        let publisher = Publisher::new(builder.with_policy(&policy())?);
        let key = HashKey::fixed();
        let (sender, commands) = unbounded();
        let bell: Arc<dyn Wake> = Arc::new(NoBell);
        let links = Links::mesh(std::slice::from_ref(&bell)).pop().context("one worker has links")?;
        // Nothing expires while it is measured; the sweep runs all the same.
        let timeouts = Timeouts { udp: 3_600_000, ..Timeouts::default() };
        let parts = Parts {
            id: WorkerId(0),
            io: BenchIo::new()?,
            links,
            directory: None,
            tables: Tables {
                sessions: Sessions::new(sessions, timeouts, key).context("memory for sessions")?,
                ports: Allocator::new(WorkerId(0), 1, PortRange::default(), key).context("memory for ports")?,
                fragments: Fragments::new(1024, 256, 2_000, key).context("memory for fragments")?,
                ids: Ids::new(0, 1, key),
                limiter: Limiter::new(key, Tick(1)),
            },
            reader: publisher.reader(),
            waiting: Waiting::new(Questions { queue: Arc::new(ArrayQueue::new(8)), bell }),
            commands,
            counters: Arc::default(),
            rules: Rules { require_syn: true, mss: None },
        };
        let now = Tick(1);
        Ok(Self { worker: Worker::new(parts, now), now, _publisher: publisher, _commands: sender })
    }

    /// Bytes of table for each session that it has room for.
    pub(crate) fn bytes_per_session(&self, sessions: u32) -> f64 {
        u32::table(&self.worker.tables().sessions).bytes() as f64 / f64::from(sessions)
    }
}

fn policy() -> PolicySet {
    let endpoint = |address: u32| EndpointSpec {
        address: address.to_ip(),
        name: String::new(),
        policy: 0,
        vips: vec![VIP.to_ip()],
    };
    PolicySet {
        version: "bench".into(),
        policies: vec![EgressSpec {
            name: "bench".into(),
            destinations: vec!["0.0.0.0/0".parse().unwrap_or_default()],
            excluded: Vec::new(),
            address_selection: AddressSelection::PerEndpoint,
            limits: Limits::default(),
            on_exhaustion: OnExhaustion::Drop,
        }],
        vips: vec![VipSpec {
            address: VIP.to_ip(),
            name: "bench".into(),
            announce: Announce::L2,
            reserved_ports: vec![],
        }],
        endpoints: (FIRST_POD..FIRST_POD + PODS).map(endpoint).collect(),
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
    let route = |prefix: &str, interface, gateway: Option<u32>| RouteSpec {
        prefix: prefix.parse().unwrap_or_default(),
        target: RouteTarget::Via(vec![HopSpec { interface, gateway: gateway.map(Address::to_ip) }]),
    };
    let pods = FIRST_POD..FIRST_POD + PODS;
    let pod = |address: u32| NeighbourSpec { interface: INSIDE, address: address.to_ip(), mac: POD_MAC };
    let router = NeighbourSpec { interface: OUTSIDE, address: ROUTER.to_ip(), mac: ROUTER_MAC };
    NetworkSpec {
        interfaces: vec![interface(INSIDE, Role::Inside, INSIDE_MAC), interface(OUTSIDE, Role::Outside, OUTSIDE_MAC)],
        routes: vec![route("10.1.0.0/16", INSIDE, None), route("0.0.0.0/0", OUTSIDE, Some(ROUTER))],
        neighbours: pods.map(pod).chain([router]).collect(),
        locals: Vec::new(),
    }
}
