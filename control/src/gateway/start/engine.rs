//! The way up of the engine: a worker for each core, with its tables.

use std::sync::Arc;

use crossbeam::channel::bounded;
use vipgate_dataplane::adopt::Adoption;
use vipgate_dataplane::fragments::Fragments;
use vipgate_dataplane::ids::Ids;
use vipgate_dataplane::limiter::Limiter;
use vipgate_dataplane::link::affinity::Affinity;
use vipgate_dataplane::link::directory::Directory;
use vipgate_dataplane::link::handoff::{Links as Rings, Wake};
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
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::stage::open::Rules;
use vipgate_dataplane::waiting::{Questions, Waiting};
use vipgate_dataplane::watch::Watch;
use vipgate_dataplane::worker::Parts;
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::doorbell::Doorbell;

use crate::config::{Config, Unserved};
use crate::failure::Failure;
use crate::gateway::kept::Keeper;
use crate::gateway::state::WorkerHandle;
use crate::gateway::workers;
use crate::peer::Bell;

/// Fragmented datagrams that a worker remembers at once, and fragments that wait for their first one.
const FRAGMENTED: u32 = 16_384;
const PARKED: u32 = 512;
/// Commands that wait for a worker.
const COMMANDS: usize = 64;
/// Of so many sessions, one client is remembered for its backend.
const CLIENTS_SHARE: usize = 16;
/// Of so many sessions, those to one VIP may be one while they aren't confirmed.
const EMBRYONIC_SHARE: u32 = 8;

/// Workers that don't run yet, by core, and what they are reached by.
pub(super) type MadeWorkers = (Vec<(usize, Parts<XdpDevice>, Arc<Doorbell>)>, Vec<WorkerHandle>);

/// Makes a worker for each core, with the sessions that are kept of a former process.
pub(super) fn make_workers(
    config: &Config,
    cores: &[usize],
    devices: Vec<XdpDevice>,
    publisher: &Publisher,
    policy: &Policy,
    keeper: &mut Keeper,
    questions: &Questions,
    shared: &Shared,
) -> Result<MadeWorkers, Failure> {
    let count = u8::try_from(cores.len()).map_err(|_| Failure::usage("workers.cores: at most 255 workers"))?;
    let capacity = u32::try_from(config.sessions.capacity.div_ceil(count.into()))
        .map_err(|_| Failure::usage("sessions.capacity: too many for one worker; list more cores"))?;
    let range = range(config)?;
    let bells: Vec<Arc<dyn Wake>> = devices.iter().map(|device| device.doorbell() as Arc<dyn Wake>).collect();
    let flows = usize::try_from(config.sessions.capacity).unwrap_or(usize::MAX);
    // A client's session is known by both directions.
    let directory = if count > 1 { Some(Arc::new(Directory::new(2 * flows, secret()?))) } else { None };
    let affinity = Arc::new(Affinity::new(flows / CLIENTS_SHARE, secret()?));
    let services = config.services;
    let rules = Rules {
        require_syn: config.sessions.require_syn,
        secret: secret()?,
        reject_no_service: services.no_service == Unserved::Reject,
        reject_no_backend: services.no_backend == Unserved::Reject,
        mss: config.sessions.mss_clamp,
    };
    let embryonic = services.embryonic_per_vip.map_or(capacity / EMBRYONIC_SHARE, |most| most.div_ceil(count.into()));
    let reserve = u32::try_from(config.sessions.reserve().div_ceil(count.into())).unwrap_or(u32::MAX);
    let keys = (0..count).map(|_| secret()).collect::<Result<_, _>>()?;
    keeper.migrate(capacity, timeouts(config), keys, workers::now())?;
    let mut parts: Vec<(usize, Parts<XdpDevice>, _)> = Vec::new();
    let mut handles = Vec::new();
    for (((device, links), &core), number) in devices.into_iter().zip(Rings::mesh(&bells)).zip(cores).zip(0..) {
        let no_memory = |error| Failure::runtime(format_args!("sessions.capacity: {error}"));
        let id = WorkerId(number);
        let mut ports = Allocator::new(id, count, range, secret()?).map_err(no_memory)?;
        let mut adoption = Adoption { policy, ports: &mut ports, directory: directory.as_deref(), worker: id };
        let (timeouts, now) = (timeouts(config), workers::now());
        let sessions = keeper.sessions(number.into(), capacity, timeouts, secret()?, now, &mut adoption)?;
        let sessions = sessions.with_reserve(reserve);
        let fragments = Fragments::new(FRAGMENTED, PARKED, fragment_timeout(config), secret()?).map_err(no_memory)?;
        let (sender, commands) = bounded(COMMANDS);
        let outlet = Arc::new(Outlet::new(shared.news.clone()));
        let counters = Arc::default();
        let doorbell = device.doorbell();
        handles.push(WorkerHandle {
            core,
            counters: Arc::clone(&counters),
            commands: sender,
            outlet: outlet.clone(),
            doorbell: doorbell.clone(),
        });
        let worker = Parts {
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
                fragments,
                ids: Ids::new(number, count, secret()?),
                limiter: Limiter::new(secret()?, now),
                outbox: Outbox::new(outlet, copy_after(config)),
                watch: Watch::default(),
            },
            reader: publisher.reader(),
            waiting: Waiting::new(questions.clone()),
            commands,
            counters,
            rules,
            lease: shared.lease.clone(),
        };
        parts.push((core, worker, doorbell));
    }
    for (_, worker, _) in &mut parts {
        policy.vips().for_each(|vip| worker.tables.ports.claim_share(vip));
    }
    Ok((parts, handles))
}

/// What workers have in common with those who follow other gateways.
pub(super) struct Shared {
    pub(super) lease: Arc<Lease>,
    /// Rung when there is something to tell.
    pub(super) news: Arc<Bell>,
}

pub(super) fn range(config: &Config) -> Result<PortRange, Failure> {
    let range = PortRange::new(config.ports.range.first, config.ports.range.last);
    range.ok_or_else(|| Failure::usage("ports.range: it is empty"))
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

/// Milliseconds that a session is old before other gateways hear of it.
fn copy_after(config: &Config) -> u32 {
    config.peer.map_or(0, |peer| u32::try_from(peer.copy_after.as_millis()).unwrap_or(u32::MAX))
}

fn secret_number() -> Result<u64, Failure> {
    getrandom::u64().map_err(|error| Failure::runtime(format_args!("the kernel gives no random numbers: {error}")))
}

/// A key that nobody outside knows.
fn secret() -> Result<HashKey, Failure> {
    let mut words = [0_u64; 4];
    for word in &mut words {
        *word = secret_number()?;
    }
    Ok(HashKey::new(words))
}
