//! Startup of the workers: session store, tables, threads.

use std::sync::Arc;

use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::stats::{FramePool, SocketStats};

use super::devices::Socket;
use super::engine::{Shared, build_workers};
use crate::command_error::CommandError;
use crate::config::Config;
use crate::gateway::session_store::SessionStore;
use crate::gateway::workers::WorkerThreads;
use crate::state::WorkerHandle;

/// The running workers, and what other parts share with them.
pub(super) struct StartedWorkers {
    pub(super) threads: WorkerThreads,
    pub(super) parts: EngineParts,
    pub(super) store: SessionStore,
    pub(super) shared: Shared,
}

/// What the admin socket and metrics show of the workers.
pub(super) struct EngineParts {
    pub(super) handles: Vec<WorkerHandle>,
    /// The sockets of each worker.
    pub(super) sockets: Vec<Vec<Socket>>,
    /// Ring statistics of each worker's sockets.
    pub(super) ring_stats: Vec<SocketStats>,
    /// The packet buffers of all workers.
    pub(super) pool: FramePool,
}

/// Builds the workers, with the stored sessions of the previous process, and starts their threads.
pub(super) fn start(
    config: &Config,
    cores: &[usize],
    devices: Vec<XdpDevice>,
    publisher: &Publisher,
    neighbor_requests: ResolutionRequests,
) -> Result<StartedWorkers, CommandError> {
    let mut store = SessionStore::open(config, cores.len())?;
    let shared = Shared { lease: Arc::new(Lease::unlimited()), replication_wakeup: Arc::default(), neighbor_requests };
    let (parts, handles) = build_workers(config, cores, devices, publisher, &mut store, &shared)?;
    let io = || parts.iter().map(|(_, parts, _)| &parts.io);
    let sockets = io().map(|device| device.sockets().collect()).collect();
    let ring_stats = io().map(XdpDevice::socket_stats).collect();
    let pool = io().next().map(XdpDevice::pool);
    let pool = pool.ok_or_else(|| CommandError::usage("workers.cores: at least one worker is needed"))?;
    tracing::info!(event = "frames", frames = pool.total(), pages = pool.pages(), "packet buffers allocated");
    let threads = WorkerThreads::start(parts, config.workers.idle, config.privileges)?;
    Ok(StartedWorkers { threads, parts: EngineParts { handles, sockets, ring_stats, pool }, store, shared })
}
