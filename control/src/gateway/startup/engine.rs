//! Startup of the engine: a worker for each core, with its tables.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::io::handoff::{Wake, WorkerLinks};
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::stage::context::SessionRules;
use vipgate_dataplane::worker::WorkerParts;
use vipgate_dataplane::worker::builder::{
    BuildError, ControlLinks, SharedKeys, TableSizes, WorkerBuilder, WorkerInputs, WorkerKeys, WorkersConfig,
};
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::doorbell::Doorbell;

use crate::clock;
use crate::command_error::CommandError;
use crate::config::{Config, DenyAction};
use crate::gateway::session_store::SessionStore;
use crate::peer::ReplicationWaker;
use crate::state::WorkerHandle;

/// Length of a worker's command queue.
const COMMAND_QUEUE_LEN: usize = 64;

/// Workers that aren't started yet, with their cores and doorbells, and their handles.
type BuiltWorkers = (Vec<(usize, WorkerParts<XdpDevice>, Arc<Doorbell>)>, Vec<WorkerHandle>);

/// What workers share with the control thread, membership and the peer links.
pub(super) struct Shared {
    pub(super) lease: Arc<Lease>,
    /// Wakes the peer links when a replication queue has records.
    pub(super) replication_wakeup: Arc<ReplicationWaker>,
    pub(super) neighbor_requests: ResolutionRequests,
}

/// Builds a worker for each core, with the stored sessions of the previous process.
pub(super) fn build_workers(
    config: &Config,
    cores: &[usize],
    devices: Vec<XdpDevice>,
    publisher: &Publisher,
    store: &mut SessionStore,
    shared: &Shared,
) -> Result<BuiltWorkers, CommandError> {
    let workers_config = workers_config(config, cores)?;
    let keys = cores.iter().map(|_| secret()).collect::<Result<_, _>>()?;
    store.migrate(workers_config.sizes.sessions, workers_config.timeouts, keys, clock::now())?;
    let Shared { lease, replication_wakeup, neighbor_requests } = shared;
    let control = ControlLinks { publisher, neighbor_requests, lease };
    let builder = WorkerBuilder::new(workers_config, control, SharedKeys::draw(secret)?);
    let doorbells: Vec<Arc<dyn Wake>> = devices.iter().map(|device| device.doorbell() as Arc<dyn Wake>).collect();
    let mut workers = Vec::new();
    let mut handles = Vec::new();
    for ((device, links), &core) in devices.into_iter().zip(WorkerLinks::mesh(&doorbells)).zip(cores) {
        let (sender, commands) = bounded(COMMAND_QUEUE_LEN);
        let replication = Arc::new(ReplicationSender::new(replication_wakeup.clone()));
        let doorbell = device.doorbell();
        let inputs = WorkerInputs {
            io: device,
            links,
            commands,
            replication: replication.clone(),
            keys: WorkerKeys::draw(secret)?,
        };
        let parts =
            builder.build(inputs, clock::now(), |request| store.open_table(request)).map_err(|error| match error {
                BuildError::Memory(error) => CommandError::runtime(error).context("sessions.capacity"),
                BuildError::Sessions(error) => error,
            })?;
        let counters = parts.counters.clone();
        handles.push(WorkerHandle { core, counters, commands: sender, replication, doorbell: doorbell.clone() });
        workers.push((core, parts, doorbell));
    }
    builder.claim_even_shares(workers.iter_mut().map(|(_, parts, _)| parts));
    Ok((workers, handles))
}

fn workers_config(config: &Config, cores: &[usize]) -> Result<WorkersConfig, CommandError> {
    let workers = u8::try_from(cores.len()).map_err(|_| CommandError::usage("workers.cores: at most 255 workers"))?;
    let mut sizes = TableSizes::for_sessions(config.sessions.capacity, workers)
        .ok_or_else(|| CommandError::usage("sessions.capacity: too many for one worker; list more cores"))?;
    let services = config.services;
    if let Some(max) = services.embryonic_per_vip {
        sizes.embryonic_per_vip = max.div_ceil(workers.into());
    }
    sizes.reserve = u32::try_from(config.sessions.reserve().div_ceil(workers.into())).unwrap_or(u32::MAX);
    Ok(WorkersConfig {
        workers,
        sizes,
        ports: port_range(config)?,
        timeouts: timeouts(config),
        fragment_timeout: milliseconds(config.sessions.timeouts.fragment),
        first_record: first_record(config),
        rules: SessionRules {
            require_syn: config.sessions.require_syn,
            cookie_key: secret()?,
            reject_no_service: services.no_service == DenyAction::Reject,
            reject_no_backend: services.no_backend == DenyAction::Reject,
            mss_clamp: config.sessions.mss_clamp,
        },
    })
}

/// When sessions are first replicated; without peers it doesn't matter.
fn first_record(config: &Config) -> FirstRecord {
    match config.peer.map_or(0, |peer| milliseconds(peer.replicate_after)) {
        0 => FirstRecord::WithReply,
        age => FirstRecord::AtAge(age),
    }
}

pub(super) fn port_range(config: &Config) -> Result<PortRange, CommandError> {
    let range = PortRange::new(config.ports.range.first, config.ports.range.last);
    range.ok_or_else(|| CommandError::usage("ports.range: the range is empty"))
}

fn timeouts(config: &Config) -> Timeouts {
    let configured = config.sessions.timeouts;
    Timeouts {
        tcp_established: milliseconds(configured.tcp_established),
        tcp_transitory: milliseconds(configured.tcp_transitory),
        udp: milliseconds(configured.udp),
        icmp: milliseconds(configured.icmp),
        quarantine: milliseconds(config.ports.quarantine),
    }
}

/// In milliseconds, at most what a worker's clock counts.
fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn random_u64() -> Result<u64, CommandError> {
    getrandom::u64().map_err(|error| CommandError::runtime(error).context("cannot get random bytes from the kernel"))
}

/// A random hash key.
fn secret() -> Result<HashKey, CommandError> {
    let mut words = [0_u64; 4];
    for word in &mut words {
        *word = random_u64()?;
    }
    Ok(HashKey::new(words))
}
