//! Neighbor resolution: makes the kernel resolve next hops, and keeps those in use resolved.
//!
//! The kernel doesn't see the gateway's packets (AF_XDP), so by itself it neither resolves a next hop nor detects a
//! changed MAC address. Since Linux 5.16 entries are marked as managed (`NTF_EXT_MANAGED`) and the kernel keeps them
//! resolved; before, they are probed periodically (`NTF_USE`), so that stale ones are revalidated.

mod request;
mod table;
mod task;

use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::warn;
use vipgate_dataplane::flow::ids::InterfaceId;

use self::task::ResolverTask;
use super::error::NetworkError;
use super::network::Network;

/// Queued commands; further ones are rejected and must be repeated.
const MAX_QUEUED_COMMANDS: usize = 1024;

/// A next hop: an address behind an interface.
type NextHop = (InterfaceId, IpAddr);

/// A command to the task.
#[derive(Debug)]
enum Command {
    /// Resolve this next hop.
    Resolve(NextHop),
    /// These next hops are in use.
    MarkInUse(Vec<NextHop>),
}

/// Rate and size limits of the resolver.
#[derive(Clone, Copy, Debug)]
pub struct ResolverLimits {
    /// Minimum time between two requests for one next hop. The kernel retransmits by itself, unless the entry is
    /// deleted.
    pub min_interval: Duration,
    /// Requests per second for all next hops.
    pub per_second: u32,
    /// Maximum number of tracked next hops: a new one evicts the least recently used. The kernel's own limit is
    /// net.ipv4.neigh.default.gc_thresh3.
    pub max_next_hops: usize,
    /// Interval of refreshing a next hop: whether the kernel still has it, and whether it still responds.
    pub refresh_interval: Duration,
}

impl Default for ResolverLimits {
    fn default() -> Self {
        Self {
            min_interval: Duration::from_millis(100),
            per_second: 256,
            max_next_hops: 4096,
            refresh_interval: Duration::from_secs(30),
        }
    }
}

/// Handle of the resolver task. Dropping it releases all next hops if the runtime is still running; [`Resolver::close`]
/// waits until they are released.
#[derive(Debug)]
pub struct Resolver {
    commands: mpsc::Sender<Command>,
    task: JoinHandle<()>,
}

impl Resolver {
    /// Starts the task in the current runtime, for the interfaces of `network` and in this thread's namespace. Restores
    /// the managed entries of a killed gateway.
    ///
    /// # Errors
    /// Changing neighbors isn't permitted, or netlink failed.
    pub async fn open(network: &Network, limits: ResolverLimits) -> Result<Self, NetworkError> {
        let task = ResolverTask::open(network, limits).await?;
        let (commands, receiver) = mpsc::channel(MAX_QUEUED_COMMANDS);
        // Not ended by its handle: it releases the next hops then.
        Ok(Self { commands, task: tokio::spawn(task.run(receiver)) })
    }

    /// Requests the resolution of a next hop that packets are queued for. Returns at once; the result is a change of
    /// the network state or a [`NeighborFailed`](super::NeighborFailed). Requests above the rate limit are ignored.
    ///
    /// Returns whether the request was queued; `false`: the queue is full.
    pub fn resolve(&self, interface: InterfaceId, address: IpAddr) -> bool {
        self.commands.try_send(Command::Resolve((interface, address))).is_ok()
    }

    /// Marks next hops as in use, to be repeated every [`ResolverLimits::refresh_interval`]: they are resolved before
    /// packets are queued for them, and still requested when they don't respond. Gateways of routes need no marking.
    ///
    /// Returns whether the command was queued; `false`: the queue is full.
    pub fn mark_in_use(&self, hops: Vec<(InterfaceId, IpAddr)>) -> bool {
        self.commands.try_send(Command::MarkInUse(hops)).is_ok()
    }

    /// Releases all next hops: the kernel's neighbor entries are no longer managed.
    pub async fn close(self) {
        drop(self.commands);
        if let Err(error) = self.task.await {
            warn!(%error, "the kernel may keep unused managed neighbors: the resolver task has ended early");
        }
    }
}
