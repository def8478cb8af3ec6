//! The way up: configuration, policy, network, sockets, steering, workers, in this order, so that packets are captured
//! only when everything that handles them stands.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use crossbeam::channel::bounded;
use crossbeam::queue::ArrayQueue;
use tokio::sync::{Notify, mpsc};
use vipgate_dataplane::adopt::Adoption;
use vipgate_dataplane::fragments::Fragments;
use vipgate_dataplane::ids::Ids;
use vipgate_dataplane::io::InterfaceId;
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
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::tuple::HashKey;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::stage::open::Rules;
use vipgate_dataplane::waiting::{Questions, Waiting};
use vipgate_dataplane::worker::Parts;
use vipgate_xdp::attach::{self, Mode, ModeWish, OnExit};
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::multicast::AllMulticast;
use vipgate_xdp::nic::Nic;
use vipgate_xdp::open::{self, Plan, ZeroCopy};
use vipgate_xdp::steering::Steering;

use super::capture;
use super::control::{Gateway, check_own_addresses};
use super::feed::{EVENTS, Feed};
use super::figures::XdpFigures;
use super::group::{self, Group, GroupLease, LinkedWorkers, Links};
use super::kept::Keeper;
use super::state::{Dealt, GatewayState, PolicyStatus, SocketStatus, WorkerHandle};
use super::wait::{self, NoFigures};
use super::workers::{self, Threads};
use crate::config::{self, Config, Overlay, PolicySource, Unserved};
use crate::failure::Failure;
use crate::kernel::{Advertiser, Network, Place, Resolver, ResolverLimits, Wanted};
use crate::members::{self, MembersClient};
use crate::peer::{self, Bell, Identity, Peers};
use crate::policy::Viewer;
use crate::xds::book::Offer;
use crate::xds::client::{Client, ServerStatus};
use crate::{admin, metrics};

/// Questions about neighbours that wait for the control thread.
const QUESTIONS: usize = 1024;
/// Fragmented datagrams that a worker remembers at once, and fragments that wait for their first one.
const FRAGMENTED: u32 = 16_384;
const PARKED: u32 = 512;
/// Commands that wait for a worker.
const COMMANDS: usize = 64;
/// Of so many sessions, one client is remembered for its backend.
const CLIENTS_SHARE: usize = 16;
/// Of so many sessions, those to one VIP may be one while they aren't confirmed.
const EMBRYONIC_SHARE: u32 = 8;

/// Wakes the control thread.
#[derive(Debug, Default)]
pub(super) struct ControlBell(pub(super) Notify);

impl Wake for ControlBell {
    fn wake(&self) {
        self.0.notify_one();
    }
}

/// Brings a gateway up; `None` when it was told to stop before it had a policy.
pub(super) async fn start(config: Config) -> Result<Option<Gateway>, Failure> {
    let nics = find_nics(&config)?;
    let cores = cores(&config, &nics)?;
    // Before any other thread starts: they inherit it.
    workers::leave_alone(&cores);
    let Opened { mut feed, source, server, offer, mut client } = open_feed(&config)?;
    let network = open_network(&config).await?;
    // Early, since what it removes is of a process that serves nobody any more.
    let advertiser = open_advertiser(&config).await?;
    let overlay = config.overlay.map(Overlay::end);
    let mut builder = Builder::new((*network.current()).clone()).at_overlay(overlay);
    let metrics_listener = metrics::bind(config.metrics.listen).await?;
    let admin_socket = admin::bind(&config.admin.socket).await?;
    let (mut steering, devices) = open_devices(&config, &nics, cores.len())?;
    let tunnels = config.tunnels();
    let multicast = join_multicast(&config, &nics);

    let mut status = PolicyStatus::nothing_from(source);
    let offer = take_known(offer, &mut builder, client.as_mut(), &network.current().locals)?;
    let running = client.map(|client| tokio::spawn(client.run()));
    let mut listeners = (metrics_listener, admin_socket);
    let (offer, answer, modes) = if let Some(offer) = offer {
        (offer, None, None)
    } else {
        // Closed until there is a policy: which pods' packets must not leave as they are, nobody knows.
        steering.close(true).map_err(Failure::runtime)?;
        let nothing = builder.snapshot().policy;
        steering.apply(capture::tables(&nothing, &network.current().locals, &tunnels)).map_err(Failure::runtime)?;
        let modes = attach_steering(&config, &nics, &mut steering)?;
        let state = Arc::new(state_without_workers(&config, status.clone(), server.clone(), nothing, &network)?);
        let Some(heard) = wait::for_policy(&state, &mut feed, &mut builder, listeners).await? else {
            return Ok(None);
        };
        status.updates_rejected = state.policy.load().updates_rejected;
        listeners = (metrics::bind(config.metrics.listen).await?, admin::bind(&config.admin.socket).await?);
        (heard.offer, Some(heard.answer), Some(modes))
    };
    let (metrics_listener, admin_socket) = listeners;
    // What others could have isn't this gateway's until it has asked.
    let members = group::at_start(&config, &offer.peers);
    let snapshot = builder.with_members(&members);
    let (policy, generation) = (snapshot.policy.clone(), snapshot.generation);
    let publisher = Publisher::new(snapshot);
    steering.apply(capture::tables(&policy, &network.current().locals, &tunnels)).map_err(Failure::runtime)?;

    let bell = Arc::new(ControlBell::default());
    let questions = Questions { queue: Arc::new(ArrayQueue::new(QUESTIONS)), bell: bell.clone() };
    let mut keeper = Keeper::open(&config, cores.len())?;
    let shared = Shared { lease: Arc::new(Lease::free()), news: Arc::default() };
    let (parts, handles) =
        make_workers(&config, &cores, devices, &publisher, &policy, &mut keeper, &questions, &shared)?;
    let losses = parts.iter().map(|(_, parts, _)| parts.io.losses()).collect();
    let pool = parts.first().map(|(_, parts, _)| parts.io.pool());
    let sockets = parts.iter().map(|(_, parts, _)| parts.io.sockets().collect::<Vec<_>>()).collect::<Vec<_>>();
    let threads = Threads::start(parts, config.workers.idle)?;

    let modes = match modes {
        Some(modes) => modes,
        None => attach_steering(&config, &nics, &mut steering)?,
    };
    // Policy captures what it covers by now; all else is the kernel's again.
    steering.close(false).map_err(Failure::runtime)?;
    // Last of what can fail: what it marks in the kernel it takes back only when it is closed.
    let resolver = Resolver::open(&network, ResolverLimits::default()).await.map_err(Failure::runtime)?;
    let steering = Arc::new(Mutex::new(steering));
    let sockets = granted(&nics, &modes, sockets);
    let counters = handles.iter().map(|handle| handle.counters.clone()).collect();
    let pool = pool.ok_or_else(|| Failure::usage("workers.cores: at least one worker is needed"))?;
    tracing::info!(event = "frames", frames = pool.total(), pages = pool.pages(), "memory for packets");
    let peers = offer.peers.into();
    let status = PolicyStatus { generation, applied_at: SystemTime::now(), updates_applied: 1, peers, ..status };
    let (ordered, orders) = mpsc::unbounded_channel();
    let state = Arc::new(GatewayState {
        orders: Some(ordered),
        dealt: Dealt::of(&offer.change),
        workers: handles,
        sockets,
        device: Arc::new(XdpFigures { steering: steering.clone(), losses, pool, counters }),
        ..state_without_workers(&config, status, server, policy, &network)?
    });
    let lease = Arc::new(GroupLease::new(shared.lease));
    let mut group = open_group(&config, &state, lease, shared.news)?;
    group.set_policy(&state.policy.load().peers);
    if let Some(answer) = answer {
        // The connection may be gone meanwhile; then the server asks again.
        let _ = answer.send(Ok(()));
    }
    Ok(Some(Gateway {
        config,
        feed,
        client: running,
        advertiser,
        resolver,
        network,
        builder,
        publisher,
        steering,
        questions,
        bell,
        threads,
        group,
        members,
        orders,
        state,
        admin_socket,
        metrics_listener,
        _multicast: multicast,
        _keeper: keeper,
    }))
}

/// Builds the policy that is known at once. One that can't be built is wrong where it comes from files; one from a cache is
/// forgotten.
fn take_known(
    offer: Option<Offer>,
    builder: &mut Builder,
    client: Option<&mut Client>,
    locals: &[IpAddr],
) -> Result<Option<Offer>, Failure> {
    let Some(offer) = offer else { return Ok(None) };
    let own = check_own_addresses(&offer.change, locals);
    match (builder.with_change(&offer.change), client) {
        (Ok(_), None) => own.map(|()| Some(offer)).map_err(Failure::usage),
        (Ok(_), Some(_)) => {
            // It was in force before: an address that the host has been given since is no reason to serve nobody.
            if let Err(rejection) = own {
                tracing::error!(event = "policy_warning", "{rejection}");
            }
            Ok(Some(offer))
        }
        (Err(error), None) => Err(Failure::usage(error)),
        (Err(error), Some(client)) => {
            client.forget(&error.to_string());
            Ok(None)
        }
    }
}

/// The source of policy, and what it says at once.
struct Opened {
    feed: Feed,
    /// For people.
    source: String,
    server: Option<Arc<ArcSwap<ServerStatus>>>,
    offer: Option<Offer>,
    client: Option<Client>,
}

fn open_feed(config: &Config) -> Result<Opened, Failure> {
    match &config.policy {
        PolicySource::Files(paths) => {
            let (feed, offer) = Feed::files(paths.clone(), Viewer::of(config)).map_err(Failure::usage)?;
            let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            let source = format!("files {}", paths.join(", "));
            Ok(Opened { feed, source, server: None, offer: Some(offer), client: None })
        }
        PolicySource::Server(server) => {
            let (sender, receiver) = mpsc::channel(EVENTS);
            let (client, offer) = Client::open(Viewer::of(config), server.clone(), sender);
            let source = format!("server {}", server.url);
            let status = Some(client.status());
            Ok(Opened { feed: Feed::Server(receiver), source, server: status, offer, client: Some(client) })
        }
    }
}

fn state_without_workers(
    config: &Config,
    status: PolicyStatus,
    server: Option<Arc<ArcSwap<ServerStatus>>>,
    policy: Arc<Policy>,
    network: &Network,
) -> Result<GatewayState, Failure> {
    Ok(GatewayState {
        name: config.name.clone(),
        node: config.node().to_owned(),
        zone: config.zone.clone(),
        started: Instant::now(),
        ready: AtomicBool::new(false),
        session_capacity: config.sessions.capacity,
        policy: ArcSwap::from_pointee(status),
        server,
        health_errors: ArcSwap::default(),
        conflicts: ArcSwap::default(),
        compiled: ArcSwap::new(policy),
        dealt: Dealt::default(),
        port_blocks: range(config)?.blocks(),
        network: ArcSwap::new(network.current()),
        group: ArcSwap::default(),
        orders: None,
        workers: Vec::new(),
        sockets: Vec::new(),
        device: Arc::new(NoFigures),
    })
}

/// Loads the steering program and connects it to the sockets of all workers; nothing is captured yet.
fn open_devices(config: &Config, nics: &[Nic], workers: usize) -> Result<(Steering, Vec<XdpDevice>), Failure> {
    let mut steering = Steering::load().map_err(Failure::runtime)?;
    let devices = open::open(&Plan {
        interfaces: nics.to_vec(),
        workers,
        zero_copy: match config.xdp.zero_copy {
            config::ZeroCopy::Auto => ZeroCopy::Auto,
            config::ZeroCopy::Always => ZeroCopy::Always,
            config::ZeroCopy::Never => ZeroCopy::Never,
        },
        busy_poll: config.xdp.busy_poll,
    })
    .map_err(open_failure)?;
    for (nic, number) in nics.iter().zip(0..) {
        steering.add_interface(nic.ifindex, InterfaceId(number)).map_err(Failure::runtime)?;
    }
    for (interface, queue, fd, _) in devices.iter().flat_map(XdpDevice::sockets) {
        steering.connect(interface, queue, fd).map_err(Failure::runtime)?;
    }
    Ok((steering, devices))
}

/// Puts the steering program on the interfaces: from here on, packets are captured.
fn attach_steering(config: &Config, nics: &[Nic], steering: &mut Steering) -> Result<Vec<Mode>, Failure> {
    let wish = match config.xdp.mode {
        config::XdpMode::Auto => ModeWish::Auto,
        config::XdpMode::Native => ModeWish::Native,
        config::XdpMode::Generic => ModeWish::Generic,
    };
    let on_exit = match config.xdp.on_exit {
        config::OnExit::Drop => OnExit::Drop,
        config::OnExit::Pass => OnExit::Pass,
    };
    attach::attach(steering, nics, wish, on_exit).map_err(Failure::runtime)
}

/// Interface, queue, descriptor, zero copy: a socket as its device tells.
type Socket = (InterfaceId, u32, i32, bool);

/// The sockets as the kernel granted them, by worker; the log says so, too.
fn granted(nics: &[Nic], modes: &[Mode], sockets: Vec<Vec<Socket>>) -> Vec<SocketStatus> {
    let all = sockets.into_iter().zip(0..).flat_map(|(sockets, worker)| sockets.into_iter().map(move |s| (worker, s)));
    let status = all.map(|(worker, (interface, queue, _, zero_copy))| {
        let (interface, mode) = (nics[usize::from(interface.0)].name.clone(), modes[usize::from(interface.0)].name());
        tracing::info!(event = "socket", interface, queue, worker, mode, zero_copy, "AF_XDP socket granted");
        SocketStatus { interface, queue, worker, mode, zero_copy }
    });
    status.collect()
}

fn find_nics(config: &Config) -> Result<Vec<Nic>, Failure> {
    let found: Result<Vec<_>, _> = config.interfaces.iter().map(|interface| Nic::find(&interface.name)).collect();
    found.map_err(Failure::runtime)
}

async fn open_network(config: &Config) -> Result<Network, Failure> {
    let wanted = config.interfaces.iter().zip(0..).map(|(interface, number)| Wanted {
        id: InterfaceId(number),
        name: interface.name.clone(),
        role: interface.role.into(),
    });
    Network::open(wanted.collect()).await.map_err(Failure::runtime)
}

async fn open_advertiser(config: &Config) -> Result<Advertiser, Failure> {
    let place = Place { table: config.bgp.table, metric: config.bgp.metric };
    // This very program, whatever has been installed in its place meanwhile.
    Advertiser::open(place, "/proc/self/exe".into()).await.map_err(Failure::runtime)
}

/// The core of each worker: as configured, or one for each queue that all interfaces have.
fn cores(config: &Config, nics: &[Nic]) -> Result<Vec<usize>, Failure> {
    let available: Vec<usize> = core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    if let Some(cores) = &config.workers.cores {
        if let Some(missing) = cores.iter().find(|core| !available.contains(core)) {
            return Err(Failure::usage(format_args!(
                "workers.cores: this machine has no core {missing} (it has {available:?})"
            )));
        }
        return Ok(cores.clone());
    }
    // With more queues than cores, a worker polls several.
    let queues = nics.iter().map(|nic| nic.queues as usize).min().unwrap_or(1);
    let cores: Vec<usize> = available.into_iter().take(queues.max(1)).collect();
    Ok(if cores.is_empty() { vec![0] } else { cores })
}

/// What is the configuration's fault is said as such.
fn open_failure(error: open::OpenError) -> Failure {
    match error {
        open::OpenError::TooFewQueues { .. } => Failure::usage(format_args!("workers.cores: {error}")),
        open::OpenError::TooManyQueues { .. } => Failure::usage(format_args!("interfaces: {error}")),
        open::OpenError::Umem { .. } | open::OpenError::Socket { .. } => Failure::runtime(error),
    }
}

/// Neighbour solicitations for VIPs come by multicast, which NICs filter out unless somebody asks for it.
fn join_multicast(config: &Config, nics: &[Nic]) -> Vec<AllMulticast> {
    let outside =
        config.interfaces.iter().zip(nics).filter(|(interface, _)| interface.role != config::InterfaceRole::Inside);
    outside
        .filter_map(|(_, nic)| match AllMulticast::join(nic.ifindex) {
            Ok(membership) => Some(membership),
            Err(error) => {
                tracing::warn!(interface = nic.name, %error, "cannot ask for multicast; IPv6 VIPs may not be found");
                None
            }
        })
        .collect()
}

type MadeWorkers = (Vec<(usize, Parts<XdpDevice>, Arc<vipgate_xdp::doorbell::Doorbell>)>, Vec<WorkerHandle>);

fn make_workers(
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
    let mut parts: Vec<(usize, Parts<XdpDevice>, _)> = Vec::new();
    let mut handles = Vec::new();
    for (((device, links), &core), number) in devices.into_iter().zip(Rings::mesh(&bells)).zip(cores).zip(0..) {
        let no_memory = |error| Failure::runtime(format_args!("sessions.capacity: {error}"));
        let id = WorkerId(number);
        let mut ports = Allocator::new(id, count, range, secret()?).map_err(no_memory)?;
        let mut adoption = Adoption { policy, ports: &mut ports, directory: directory.as_deref(), worker: id };
        let (timeouts, now) = (timeouts(config), workers::now());
        let sessions = keeper.sessions(number.into(), capacity, timeouts, secret()?, now, &mut adoption)?;
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
                ports,
                fragments,
                ids: Ids::new(number, count, secret()?),
                limiter: Limiter::new(secret()?, now),
                outbox: Outbox::new(outlet, copy_after(config)),
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
struct Shared {
    lease: Arc<Lease>,
    /// Rung when there is something to tell.
    news: Arc<Bell>,
}

/// Begins to hear of other gateways, and to be heard of.
fn open_group(
    config: &Config,
    state: &Arc<GatewayState>,
    lease: Arc<GroupLease>,
    news: Arc<Bell>,
) -> Result<Group, Failure> {
    let PolicySource::Server(server) = &config.policy else { return Ok(Group::new(config, lease, None, None)) };
    let name: Arc<str> = config.name.as_str().into();
    let incarnation = secret_number()?.max(1);
    let identity = Identity::generate().map_err(Failure::runtime)?;
    let plan = members::Plan {
        name: name.clone(),
        incarnation,
        server: server.clone(),
        fingerprint: identity.fingerprint().0,
        peer: config.tunnel(),
        lease: lease.clone(),
    };
    let links = match &config.peer {
        None => None,
        Some(peer) => {
            let (peers, events) = Peers::start(peer::Plan {
                name,
                incarnation,
                identity,
                listen: SocketAddr::new(peer.address, peer.port),
                heartbeat: peer.heartbeat,
                versions: peer::VERSIONS,
                workers: Arc::new(LinkedWorkers(state.clone())),
                bell: news,
                clock: workers::now,
            })
            .map_err(Failure::usage)?;
            let status = peers.status();
            Some(Links { peers, events, status, view: Arc::default() })
        }
    };
    let (client, handle) = MembersClient::open(plan);
    Ok(Group::new(config, lease, Some((handle, tokio::spawn(client.run()))), links))
}

fn range(config: &Config) -> Result<PortRange, Failure> {
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
