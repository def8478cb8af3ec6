//! What the running gateway knows of itself: read by the admin socket and by metrics, written by the control thread.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use crossbeam::channel::Sender;
use tokio::sync::mpsc;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::counters::{Counter, DropReason, WorkerCounters};
use vipgate_dataplane::link::handoff::Wake;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::spec::{NetworkSpec, VipSpec};

use super::conflicts::Claims;
use super::feed::FilesHandle;
use super::group::GroupStatus;
use super::stalls::Stalls;
use super::tracking::TrackingStatus;
use crate::listener::{Limits, Room};
use crate::metrics;
use crate::natlog::NatLogStatus;
use crate::policy::Peer;
use crate::xds::client::ServerStatus;

/// The gateway as the rest of the control plane sees it.
#[derive(Debug)]
pub struct GatewayState {
    /// Its name, from the configuration.
    pub name: String,
    /// The Kubernetes node that it is on.
    pub node: String,
    /// Its zone, if it has one.
    pub zone: Option<String>,
    /// When the process began.
    pub started: Instant,
    /// Whether it forwards packets.
    pub ready: AtomicBool,
    /// Sessions that the table can hold, all workers together.
    pub session_capacity: u64,
    /// How the policy in force got there.
    pub policy: ArcSwap<PolicyStatus>,
    /// How things stand with the policy server, where policy comes from one.
    pub server: Option<Arc<ArcSwap<ServerStatus>>>,
    /// Policy in files, where it comes from there.
    pub files: Option<FilesHandle>,
    /// The policy in force, as the workers have it, with the owners of ports.
    pub compiled: ArcSwap<Policy>,
    /// The deal that it was made of.
    pub dealt: Dealt,
    /// Why health checks are not answered on the node's own addresses, by port.
    pub health_errors: ArcSwap<BTreeMap<u16, String>>,
    /// Other hosts that claim a VIP, by VIP.
    pub conflicts: ArcSwap<Claims>,
    /// The first and the last port that is given out.
    pub ports: (u16, u16),
    /// Blocks of ports that each VIP has.
    pub port_blocks: usize,
    /// The network in force.
    pub network: ArcSwap<NetworkSpec>,
    /// How its interfaces and next hops stand.
    pub tracking: ArcSwap<TrackingStatus>,
    /// How it stands with other gateways.
    pub group: ArcSwap<GroupStatus>,
    /// The log of translations, where there is one.
    pub nat_log: Option<Arc<NatLogStatus>>,
    /// Where the control thread takes orders; `None` before it does.
    pub orders: Option<mpsc::UnboundedSender<Order>>,
    /// How late the control thread was.
    pub stalls: Arc<Stalls>,
    /// The workers, by number.
    pub workers: Vec<WorkerHandle>,
    /// The sockets, as granted.
    pub sockets: Vec<SocketStatus>,
    /// The connections of its listeners.
    pub rooms: Rooms,
    /// Figures that only the device knows: steering outcomes, ring losses, frames.
    pub device: Arc<dyn DeviceFigures>,
}

/// Connections: all health checks together, and commands.
const HEALTH: Limits = Limits { connections: 256, per_address: 64 };
const ADMIN: Limits = Limits { connections: 128, per_address: 128 };

/// The connections of each listener.
#[derive(Clone, Debug)]
pub struct Rooms {
    /// Of monitoring.
    pub metrics: Arc<Room>,
    /// Of health checks, all ports together.
    pub health: Arc<Room>,
    /// Of commands.
    pub admin: Arc<Room>,
}

impl Rooms {
    /// All of them.
    pub fn all(&self) -> [&Room; 3] {
        [&self.metrics, &self.health, &self.admin]
    }
}

impl Default for Rooms {
    fn default() -> Self {
        Self { metrics: metrics::room(), health: Room::new("health", HEALTH), admin: Room::new("admin", ADMIN) }
    }
}

impl GatewayState {
    /// Why there is no policy yet, as far as the source of policy says.
    pub fn waits_for(&self) -> Option<String> {
        let server = self.server.as_ref().and_then(|server| server.load().error.clone());
        server.or_else(|| self.files.as_ref()?.status.health.load().waits_for())
    }
}

/// Who was dealt which part of each VIP: what the policy in force was made of, kept for questions of what would be.
#[derive(Debug, Default)]
pub struct Dealt(Mutex<BTreeMap<IpAddr, VipSpec>>);

impl Dealt {
    /// The deal of a whole policy.
    pub fn of(whole: &PolicyChange) -> Self {
        let dealt = Self::default();
        dealt.change(whole);
        dealt
    }

    /// Takes in a change of policy.
    pub fn change(&self, change: &PolicyChange) {
        let mut vips = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for address in &change.gone.vips {
            vips.remove(address);
        }
        vips.extend(change.vips.iter().map(|vip| (vip.address, vip.clone())));
    }

    /// All VIPs, by address.
    pub fn vips(&self) -> Vec<VipSpec> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}

/// The way to one worker.
#[derive(Debug)]
pub struct WorkerHandle {
    /// The core that it is pinned to.
    pub core: usize,
    /// What it counts.
    pub counters: Arc<WorkerCounters>,
    /// Where it takes commands; it looks there between batches.
    pub commands: Sender<Command>,
    /// What it tells other gateways.
    pub outlet: Arc<Outlet>,
    /// Wakes it, should it sleep.
    pub doorbell: Arc<dyn Wake>,
}

/// What the control thread is told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Stop serving, or serve again.
    Drain(bool),
}

/// How the policy in force got there.
#[derive(Clone, Debug)]
pub struct PolicyStatus {
    /// Counts the changes that sessions are checked against.
    pub generation: u32,
    /// When it came into force.
    pub applied_at: SystemTime,
    /// Where it comes from: paths or a server's address.
    pub source: String,
    /// Updates that came into force, since start.
    pub updates_applied: u64,
    /// Updates that were rejected, since start.
    pub updates_rejected: u64,
    /// Why the last update was rejected or partly left out; `None` when the last one was fine.
    pub last_error: Option<String>,
    /// All gateways that the policy names.
    pub peers: Arc<[Peer]>,
}

impl PolicyStatus {
    /// Nothing is in force yet of what comes from there.
    pub(super) fn nothing_from(source: String) -> Self {
        Self {
            generation: 0,
            applied_at: SystemTime::now(),
            source,
            updates_applied: 0,
            updates_rejected: 0,
            last_error: None,
            peers: Arc::default(),
        }
    }
}

/// One AF_XDP socket as the kernel granted it.
#[derive(Clone, Debug)]
pub struct SocketStatus {
    /// Interface name.
    pub interface: String,
    /// Queue of the interface.
    pub queue: u32,
    /// The worker that polls it.
    pub worker: usize,
    /// `native` or `generic`.
    pub mode: &'static str,
    /// Whether frames are shared with the NIC instead of copied.
    pub zero_copy: bool,
}

impl GatewayState {
    /// What one worker has dropped, and what its rings have lost, by reason.
    pub fn drops(&self, worker: usize) -> [u64; DropReason::ALL.len()] {
        let mut drops = self.workers[worker].counters.drops.each_ref().map(Counter::get);
        let lost = self.device.ring_drops(worker);
        drops[DropReason::RxNoBuffer as usize] += lost.no_buffer;
        drops[DropReason::RxRingFull as usize] += lost.ring_full;
        drops[DropReason::RxTooLong as usize] += lost.too_long;
        drops
    }

    /// The same of all workers together.
    pub fn all_drops(&self) -> [u64; DropReason::ALL.len()] {
        let mut sums = [0; DropReason::ALL.len()];
        for worker in 0..self.workers.len() {
            for (sum, count) in sums.iter_mut().zip(self.drops(worker)) {
                *sum += count;
            }
        }
        sums
    }
}

/// Packets that the rings of one worker lost before it saw them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingDrops {
    /// For want of a frame in the fill ring.
    pub no_buffer: u64,
    /// For want of room in the receive ring.
    pub ring_full: u64,
    /// For being longer than a buffer.
    pub too_long: u64,
}

/// Figures that only the device knows.
pub trait DeviceFigures: Send + Sync + std::fmt::Debug {
    /// What the rings of a worker have lost.
    fn ring_drops(&self, worker: usize) -> RingDrops;

    /// Current values as (metric name without the prefix `vipgate_`, help, labels, value).
    fn figures(&self) -> Vec<Figure>;

    /// Whether a frame that comes in on an interface, by its kernel's number, is captured, or left to the kernel; `None` if that isn't
    /// known.
    fn captures(&self, frame: &[u8], ifindex: u32) -> Option<bool>;
}

/// One figure of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Name of the metric, without `vipgate_` and `_total`.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
    /// Whether it only grows.
    pub counter: bool,
    /// Labels and values.
    pub labels: Vec<(&'static str, String)>,
    /// Its value.
    pub value: u64,
}
