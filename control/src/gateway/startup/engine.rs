//! Startup of the engine: a worker for each core, with its tables.

use std::sync::Arc;

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::ids::WorkerId;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::io::handoff::{Wake, WorkerLinks as Rings};
use vipgate_dataplane::observe::Observer;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::ports::allocator::Allocator;
use vipgate_dataplane::reassembly::VirtualReassembly;
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::replication::queue::ReplicationQueue;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::affinity::AffinityTable;
use vipgate_dataplane::session::embryonic::Embryonic;
use vipgate_dataplane::session::eviction::Eviction;
use vipgate_dataplane::session::flow_directory::FlowDirectory;
use vipgate_dataplane::session::restore::Restorer;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::stage::context::{SessionRules, Tables};
use vipgate_dataplane::stage::reply_limiter::ReplyLimiter;
use vipgate_dataplane::wire::ip_id::IpIdAllocator;
use vipgate_dataplane::worker::WorkerParts;
use vipgate_dataplane::worker::neighbor_queue::{NeighborQueue, ResolutionRequests};
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::doorbell::Doorbell;

use crate::clock;
use crate::command_error::CommandError;
use crate::config::{Config, DenyAction};
use crate::gateway::session_store::SessionStore;
use crate::peer::ReplicationWaker;
use crate::state::WorkerHandle;

/// Virtual reassembly limits of a worker: tracked datagrams, and fragments that wait for their first fragment.
const MAX_DATAGRAMS: u32 = 16_384;
const MAX_QUEUED_FRAGMENTS: u32 = 512;
/// Length of a worker's command queue.
const COMMAND_QUEUE_LEN: usize = 64;
/// Sessions for each entry of the client affinity table.
const SESSIONS_PER_CLIENT: usize = 16;
/// Table entries for each embryonic session that a VIP may have.
const SESSIONS_PER_EMBRYONIC: u32 = 8;

/// Workers that aren't started yet, with their cores and doorbells, and their handles.
type BuiltWorkers = (Vec<(usize, WorkerParts<XdpDevice>, Arc<Doorbell>)>, Vec<WorkerHandle>);

/// Builds a worker for each core, with the stored sessions of the previous process.
pub(super) fn build_workers(
    config: &Config,
    cores: &[usize],
    devices: Vec<XdpDevice>,
    publisher: &Publisher,
    policy: &Policy,
    store: &mut SessionStore,
    neighbor_requests: &ResolutionRequests,
    shared: &Shared,
) -> Result<BuiltWorkers, CommandError> {
    let count = u8::try_from(cores.len()).map_err(|_| CommandError::usage("workers.cores: at most 255 workers"))?;
    let capacity = u32::try_from(config.sessions.capacity.div_ceil(count.into()))
        .map_err(|_| CommandError::usage("sessions.capacity: too many for one worker; list more cores"))?;
    let range = port_range(config)?;
    let doorbells: Vec<Arc<dyn Wake>> = devices.iter().map(|device| device.doorbell() as Arc<dyn Wake>).collect();
    let total_capacity = usize::try_from(config.sessions.capacity).unwrap_or(usize::MAX);
    // Inbound sessions have an entry for each direction.
    let directory = if count > 1 { Some(Arc::new(FlowDirectory::new(2 * total_capacity, secret()?))) } else { None };
    let affinity = Arc::new(AffinityTable::new(total_capacity / SESSIONS_PER_CLIENT, secret()?));
    let services = config.services;
    let rules = SessionRules {
        require_syn: config.sessions.require_syn,
        cookie_key: secret()?,
        reject_no_service: services.no_service == DenyAction::Reject,
        reject_no_backend: services.no_backend == DenyAction::Reject,
        mss_clamp: config.sessions.mss_clamp,
    };
    let embryonic =
        services.embryonic_per_vip.map_or(capacity / SESSIONS_PER_EMBRYONIC, |max| max.div_ceil(count.into()));
    let reserve = u32::try_from(config.sessions.reserve().div_ceil(count.into())).unwrap_or(u32::MAX);
    let keys = (0..count).map(|_| secret()).collect::<Result<_, _>>()?;
    store.migrate(capacity, timeouts(config), keys, clock::now())?;
    let mut parts: Vec<(usize, WorkerParts<XdpDevice>, _)> = Vec::new();
    let mut handles = Vec::new();
    for (((device, links), &core), index) in devices.into_iter().zip(Rings::mesh(&doorbells)).zip(cores).zip(0..) {
        let no_memory = |error| CommandError::runtime(format_args!("sessions.capacity: {error}"));
        let id = WorkerId(index);
        let mut ports = Allocator::new(id, count, range, secret()?).map_err(no_memory)?;
        let mut restorer = Restorer { policy, ports: &mut ports, directory: directory.as_deref(), worker: id };
        let (timeouts, now) = (timeouts(config), clock::now());
        let sessions = store.open_table(index.into(), capacity, timeouts, secret()?, now, &mut restorer)?;
        let sessions = sessions.with_reserve(reserve);
        let timeout = fragment_timeout(config);
        let fragments =
            VirtualReassembly::new(MAX_DATAGRAMS, MAX_QUEUED_FRAGMENTS, timeout, secret()?).map_err(no_memory)?;
        let (sender, commands) = bounded(COMMAND_QUEUE_LEN);
        let replication = Arc::new(ReplicationSender::new(shared.replication_wakeup.clone()));
        let counters = Arc::default();
        let doorbell = device.doorbell();
        handles.push(WorkerHandle {
            core,
            counters: Arc::clone(&counters),
            commands: sender,
            replication: replication.clone(),
            doorbell: doorbell.clone(),
        });
        let worker = WorkerParts {
            id,
            io: device,
            links,
            affinity: affinity.clone(),
            directory: directory.clone(),
            tables: Tables {
                sessions,
                embryonic: Embryonic::new(capacity, embryonic),
                eviction: Eviction::default(),
                ports,
                reassembly: fragments,
                ip_ids: IpIdAllocator::new(index, count, secret()?),
                reply_limiter: ReplyLimiter::new(secret()?, now),
                replication_queue: ReplicationQueue::new(replication, replication_delay(config)),
                observer: Observer::default(),
            },
            reader: publisher.reader(),
            neighbor_queue: NeighborQueue::new(neighbor_requests.clone()),
            commands,
            counters,
            rules,
            lease: shared.lease.clone(),
        };
        parts.push((core, worker, doorbell));
    }
    for (_, worker, _) in &mut parts {
        policy.vips().for_each(|vip| worker.tables.ports.claim_even_share(&vip.ports));
    }
    Ok((parts, handles))
}

/// State that workers share with membership and the peer links.
pub(super) struct Shared {
    pub(super) lease: Arc<Lease>,
    /// Wakes the peer links when a replication queue has records.
    pub(super) replication_wakeup: Arc<ReplicationWaker>,
}

pub(super) fn port_range(config: &Config) -> Result<PortRange, CommandError> {
    let range = PortRange::new(config.ports.range.first, config.ports.range.last);
    range.ok_or_else(|| CommandError::usage("ports.range: the range is empty"))
}

fn timeouts(config: &Config) -> Timeouts {
    let ms = |duration: std::time::Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
    let configured = config.sessions.timeouts;
    Timeouts {
        tcp_established: ms(configured.tcp_established),
        tcp_transitory: ms(configured.tcp_transitory),
        udp: ms(configured.udp),
        icmp: ms(configured.icmp),
        quarantine: ms(config.ports.quarantine),
    }
}

fn fragment_timeout(config: &Config) -> u32 {
    u32::try_from(config.sessions.timeouts.fragment.as_millis()).unwrap_or(u32::MAX)
}

/// Age in milliseconds at which a session is replicated.
fn replication_delay(config: &Config) -> u32 {
    config.peer.map_or(0, |peer| u32::try_from(peer.replicate_after.as_millis()).unwrap_or(u32::MAX))
}

fn random_u64() -> Result<u64, CommandError> {
    getrandom::u64()
        .map_err(|error| CommandError::runtime(format_args!("cannot get random bytes from the kernel: {error}")))
}

/// A random hash key.
fn secret() -> Result<HashKey, CommandError> {
    let mut words = [0_u64; 4];
    for word in &mut words {
        *word = random_u64()?;
    }
    Ok(HashKey::new(words))
}
