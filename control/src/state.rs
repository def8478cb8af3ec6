//! State of the running gateway: written by the control thread, read by the admin socket and metrics.

pub mod capture;
pub mod conflicts;
pub mod fault;
pub mod files;
pub mod group;
pub mod lease;
pub mod tracking;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use crossbeam::channel::Sender;
use tokio::sync::mpsc;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::io::handoff::Wake;
use vipgate_dataplane::observe::counters::{Counter, WorkerCounters};
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::{NetworkSpec, ShardMapSpec, VipSpec};
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::worker::command::Command;
use vipgate_policy::compiler::Peer;

use self::capture::CaptureStatus;
use self::conflicts::Claims;
use self::files::FileSourceHandle;
use self::group::GroupStatus;
use self::tracking::TrackingStatus;
use crate::listener::{self, ConnectionLimiter, Limits};
use crate::metric::Family;
use crate::natlog::NatLogStatus;
use crate::stalls::Stalls;
use crate::xds::client::ServerStatus;
use crate::xds::tls::CertificateFiles;

/// State of a gateway, shared within the control plane.
#[derive(Debug)]
pub struct GatewayState {
    /// Name, from the configuration.
    pub name: String,
    /// Kubernetes node that it runs on.
    pub node: String,
    /// Zone, if configured.
    pub zone: Option<String>,
    /// Start of the process.
    pub started: Instant,
    /// Whether it forwards packets.
    pub ready: AtomicBool,
    /// Capacity of the session tables of all workers.
    pub session_capacity: u64,
    /// Status of the policy in force.
    pub policy: ArcSwap<PolicyStatus>,
    /// Status of the policy server connection, with `policy.server`.
    pub server: Option<Arc<ArcSwap<ServerStatus>>>,
    /// Its certificates for the policy server.
    pub certificates: CertificateFiles,
    /// The file source, with `policy.files`.
    pub files: Option<FileSourceHandle>,
    /// The policy in force as compiled for the workers, with the owners of port blocks.
    pub compiled: ArcSwap<Policy>,
    /// The placement that the policy in force was built from.
    pub placement: VipPlacement,
    /// Errors of health check listeners (`healthCheckNodePort`), by port.
    pub health_errors: ArcSwap<BTreeMap<u16, String>>,
    /// Address conflicts: other hosts that claim a VIP, by VIP.
    pub conflicts: ArcSwap<Claims>,
    /// First and last SNAT port.
    pub ports: (u16, u16),
    /// Number of port blocks of each VIP.
    pub port_blocks: usize,
    /// The network state in force.
    pub network: ArcSwap<NetworkSpec>,
    /// Status of the steering program's maps.
    pub capture: ArcSwap<CaptureStatus>,
    /// Status of interfaces and next hops.
    pub tracking: ArcSwap<TrackingStatus>,
    /// Status within the group of gateways.
    pub group: ArcSwap<GroupStatus>,
    /// Status of the NAT log, if configured.
    pub nat_log: Option<Arc<NatLogStatus>>,
    /// Event-loop stalls of the control thread.
    pub stalls: Arc<Stalls>,
    /// Connections of the listeners, and their limits.
    pub connections: ListenerConnections,
    /// The workers and their devices; unset until the initial policy is in force.
    pub engine: OnceLock<EngineHandle>,
}

/// The running engine and its control thread, as used by the admin socket and metrics.
#[derive(Debug)]
pub struct EngineHandle {
    /// The workers, by index.
    pub workers: Vec<WorkerHandle>,
    /// The AF_XDP sockets.
    pub sockets: Vec<SocketStatus>,
    /// Statistics of the device: steering outcomes, ring losses, frames.
    pub device: Arc<dyn DeviceStats>,
    /// Command queue of the control thread.
    pub commands: mpsc::UnboundedSender<ControlCommand>,
}

/// Connection limits: of all health check ports together, and of the admin socket.
const HEALTH_LIMITS: Limits = Limits { connections: 256, per_address: 64 };
const ADMIN_LIMITS: Limits = Limits { connections: 128, per_address: 128 };

/// Connections and limits of each listener.
#[derive(Clone, Debug)]
pub struct ListenerConnections {
    /// Of the metrics port.
    pub metrics: Arc<ConnectionLimiter>,
    /// Of all health check ports together.
    pub health: Arc<ConnectionLimiter>,
    /// Of the admin socket.
    pub admin: Arc<ConnectionLimiter>,
}

impl ListenerConnections {
    /// All listeners.
    pub fn all(&self) -> [&ConnectionLimiter; 3] {
        [&self.metrics, &self.health, &self.admin]
    }
}

impl Default for ListenerConnections {
    fn default() -> Self {
        Self {
            metrics: ConnectionLimiter::new("metrics", listener::METRICS_LIMITS),
            health: ConnectionLimiter::new("health", HEALTH_LIMITS),
            admin: ConnectionLimiter::new("admin", ADMIN_LIMITS),
        }
    }
}

impl GatewayState {
    /// Why there is no policy yet, as reported by the policy source.
    pub fn no_policy_reason(&self) -> Option<String> {
        let server = self.server.as_ref().and_then(|server| server.load().error.clone());
        server.or_else(|| self.files.as_ref()?.status.health.load().waiting_reason())
    }

    /// The workers, by index; none until the initial policy is in force.
    pub fn workers(&self) -> &[WorkerHandle] {
        self.engine.get().map_or(&[], |engine| &engine.workers)
    }

    /// The AF_XDP sockets of the workers.
    pub fn sockets(&self) -> &[SocketStatus] {
        self.engine.get().map_or(&[], |engine| &engine.sockets)
    }

    /// Statistics of the device, if there are workers.
    pub fn device(&self) -> Option<&dyn DeviceStats> {
        self.engine.get().map(|engine| &*engine.device)
    }

    /// Sum of a counter or gauge over all workers.
    pub fn sum(&self, of: impl Fn(&WorkerCounters) -> u64) -> u64 {
        self.workers().iter().map(|worker| of(&worker.counters)).sum()
    }

    /// Drops of one worker by reason, including those at its rings.
    pub fn drops(&self, worker: usize) -> [u64; DropReason::ALL.len()] {
        let mut drops = self.workers()[worker].counters.drops.each_ref().map(Counter::get);
        let lost = self.device().map(|device| device.ring_drops(worker)).unwrap_or_default();
        drops[DropReason::RxNoBuffer as usize] += lost.no_buffer;
        drops[DropReason::RxRingFull as usize] += lost.ring_full;
        drops[DropReason::RxTooLong as usize] += lost.too_long;
        drops
    }

    /// Drops of all workers by reason.
    pub fn all_drops(&self) -> [u64; DropReason::ALL.len()] {
        let mut sums = [0; DropReason::ALL.len()];
        for worker in 0..self.workers().len() {
            for (sum, count) in sums.iter_mut().zip(self.drops(worker)) {
                *sum += count;
            }
        }
        sums
    }
}

/// Placement of VIPs and their shards: input of the policy in force, kept to compute what a membership change would
/// move.
#[derive(Debug, Default)]
pub struct VipPlacement(Mutex<PlacedVips>);

#[derive(Debug, Default)]
struct PlacedVips {
    vips: BTreeMap<IpAddr, Arc<VipSpec>>,
    shard_maps: BTreeMap<Arc<str>, Arc<ShardMapSpec>>,
}

impl VipPlacement {
    /// The placement of a full policy.
    pub fn of(policy: &PolicyChange) -> Self {
        let placement = Self::default();
        placement.apply(policy);
        placement
    }

    /// Applies a change of policy.
    pub fn apply(&self, change: &PolicyChange) {
        let mut placed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change.vips.apply_to(&mut placed.vips);
        change.shard_maps.apply_to(&mut placed.shard_maps);
    }

    /// All shard maps, by name, and all VIPs, by address.
    pub fn get(&self) -> (Vec<ShardMapSpec>, Vec<VipSpec>) {
        let placed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shard_maps = placed.shard_maps.values().map(|map| (**map).clone());
        (shard_maps.collect(), placed.vips.values().map(|vip| (**vip).clone()).collect())
    }
}

/// Handle of a worker.
#[derive(Debug)]
pub struct WorkerHandle {
    /// CPU core that it is pinned to.
    pub core: usize,
    pub counters: Arc<WorkerCounters>,
    /// Command queue, polled between batches.
    pub commands: Sender<Command>,
    /// Sender side of its replication queue.
    pub replication: Arc<ReplicationSender>,
    /// Wakes it if it sleeps.
    pub doorbell: Arc<dyn Wake>,
}

/// A command to the control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlCommand {
    /// Start (`true`) or end (`false`) draining.
    SetDraining(bool),
}

/// Status of the policy in force.
#[derive(Clone, Debug)]
pub struct PolicyStatus {
    /// Policy generation that sessions are revalidated against.
    pub generation: u32,
    /// When it came into force.
    pub applied_at: SystemTime,
    /// Policy source, for display: paths or a server's address.
    pub source: String,
    /// Updates applied since start.
    pub updates_applied: u64,
    /// Updates rejected since start.
    pub updates_rejected: u64,
    /// Why the last update was rejected; `None` if it was applied.
    pub last_error: Option<String>,
    /// All gateways in the policy.
    pub peers: Arc<[Peer]>,
}

impl PolicyStatus {
    /// No policy in force yet.
    pub(crate) fn empty(source: String) -> Self {
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
    /// RX/TX queue of the interface.
    pub queue: u32,
    /// Worker that polls it.
    pub worker: usize,
    /// XDP mode: `native` or `generic`.
    pub mode: &'static str,
    /// Whether the socket is in zero-copy mode.
    pub zero_copy: bool,
}

/// Packets lost at the rings of one worker before it received them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingDrops {
    /// Fill ring empty.
    pub no_buffer: u64,
    /// RX ring full.
    pub ring_full: u64,
    /// Longer than a frame.
    pub too_long: u64,
}

/// Statistics that only the device has.
pub trait DeviceStats: Send + Sync + std::fmt::Debug {
    /// Losses at the rings of a worker.
    fn ring_drops(&self, worker: usize) -> RingDrops;

    /// Current values of the device's metrics, see [`DEVICE_METRICS`](crate::metrics::definitions::DEVICE_METRICS).
    fn metrics(&self) -> Vec<Family>;

    /// Whether the steering program captures a frame received on an interface; `None` if that can't be determined.
    fn captures(&self, frame: &[u8], ifindex: u32) -> Option<bool>;
}
