//! Startup sequence: configuration, policy, network, sockets, steering program, workers. In this order, so that packets
//! are captured only once everything that handles them is running.

mod devices;
mod engine;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use crossbeam::queue::ArrayQueue;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::MAX_MTU;
use vipgate_dataplane::io::handoff::Wake;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::policy::spec::{InterfaceSpec, NetworkSpec};
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::worker::command::Command;
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;
use vipgate_xdp::attach::Mode;
use vipgate_xdp::nic::Nic;
use vipgate_xdp::stats::FramePool;
use vipgate_xdp::steering::Steering;

use self::devices::{attach_steering, find_nics, join_multicast, on_exit, open_devices, socket_status, worker_cores};
use self::engine::{Shared, build_workers, port_range};
use super::control::Gateway;
use super::group;
use super::group::{Group, PeerLinks, ReplicationWorkers};
use super::tracking::{self, Tracking};
use super::workers::{self, WorkerThreads};
use crate::command_error::CommandError;
use crate::config::{Config, Overlay, PolicySource};
use crate::gateway::background::{BackgroundRuntime, Signals};
use crate::gateway::device_stats::XdpStats;
use crate::gateway::initial_policy::NoDeviceStats;
use crate::gateway::policy_source::{MAX_PENDING_EVENTS, PolicySubscription};
use crate::gateway::reconciler::{Reconciler, check_local_addresses};
use crate::gateway::session_store::SessionStore;
use crate::gateway::{initial_policy, process_secret, steering_tables};
use crate::heartbeat::HeartbeatClient;
use crate::kernel::{Advertiser, InterfaceConfig, Network, Resolver, ResolverLimits, RouteTable};
use crate::natlog::{NatLog, NatLogStatus};
use crate::peer::{self, Identity, Peers, ReplicationWaker, TunnelSecret};
use crate::source::file_watcher::FileWatcher;
use crate::state::files::FileSourceHandle;
use crate::state::lease::GroupLease;
use crate::state::{GatewayState, ListenerConnections, PolicyStatus, VipPlacement};
use crate::xds::client::{Client, ServerStatus};
use crate::xds::store::PolicyUpdate;
use crate::{admin, clock, heartbeat, metrics, privileges};

/// Maximum number of neighbor requests that wait for the control thread.
const MAX_NEIGHBOR_REQUESTS: usize = 1024;

/// Wakes the control thread.
#[derive(Debug, Default)]
pub(super) struct ControlDoorbell(pub(super) Notify);

impl Wake for ControlDoorbell {
    fn wake(&self) {
        self.0.notify_one();
    }
}

/// The packet buffers of the first worker's device, which all share.
fn allocated(pool: Option<FramePool>) -> Result<FramePool, CommandError> {
    let pool = pool.ok_or_else(|| CommandError::usage("workers.cores: at least one worker is needed"))?;
    tracing::info!(event = "frames", frames = pool.total(), pages = pool.pages(), "packet buffers allocated");
    Ok(pool)
}

/// A builder of snapshots with the network as it is now, and no policy.
fn initial_builder(config: &Config, network: &Network) -> Builder {
    Builder::new((*network.current()).clone()).with_overlay(config.overlay.map(Overlay::tunnel_endpoint))
}

/// What workers share with the control thread, whose doorbell wakes it for requested neighbors.
fn shared_with_workers(doorbell: &Arc<ControlDoorbell>) -> Shared {
    let queue = Arc::new(ArrayQueue::new(MAX_NEIGHBOR_REQUESTS));
    let neighbor_requests = ResolutionRequests { queue, waker: doorbell.clone() };
    Shared { lease: Arc::new(Lease::unlimited()), replication_wakeup: Arc::default(), neighbor_requests }
}

/// Programs the steering tables for a policy.
fn steer(
    steering: &mut Steering,
    policy: &Policy,
    network: &Network,
    tunnels: &[SocketAddr],
) -> Result<(), CommandError> {
    let tables = steering_tables::for_policy(policy, &network.current().locals, tunnels);
    steering.apply(tables).map_err(CommandError::runtime)
}

/// Starts a gateway; `None`: stopped by a signal before the initial policy.
pub(super) async fn start(config: Config) -> Result<Option<Gateway>, CommandError> {
    let nics = find_nics(&config)?;
    let cores = worker_cores(&config, &nics)?;
    // Before any other thread starts: threads inherit the CPU affinity.
    workers::avoid_worker_cores(&cores);
    let background = BackgroundRuntime::start()?;
    let OpenedSource { mut subscription, description, server, update, mut client } =
        open_source(&config, &background).await;
    let source = (server, subscription.files.clone());
    let network = open_network(&config).await?;
    check_mtus(&network.current())?;
    // Early: it withdraws routes that a previous process has left.
    let advertiser = open_advertiser(&config).await?;
    let mut builder = initial_builder(&config, &network);
    let mut listeners = listen(&config, &background).await?;
    let (mut steering, devices) = open_devices(&config, &nics, cores.len())?;
    let (tunnels, multicast) = (config.tunnel_endpoints(), join_multicast(&config, &nics));

    let mut status = PolicyStatus::empty(description);
    let update = build_known(update, &mut builder, client.as_mut(), &network.current().locals)?;
    let running = client.map(|client| background.spawn(client.run()));
    let mut signals = None;
    let (update, reply, modes) = if let Some(update) = update {
        (update, None, None)
    } else {
        // Drop everything until there is a policy: without one, it is unknown which pods' packets must not leave
        // untranslated.
        steering.set_closed(true).map_err(CommandError::runtime)?;
        let empty = builder.snapshot().policy;
        steer(&mut steering, &empty, &network, &tunnels)?;
        let modes = attach_steering(&config, &nics, &mut steering)?;
        let state = Arc::new(state_without_workers(&config, status.clone(), source.clone(), empty, &network)?);
        let signals = signals.insert(Signals::install()?);
        let initial =
            initial_policy::wait_for_policy(&state, &mut subscription, &mut builder, listeners, &background, signals)
                .await?;
        let Some(initial) = initial else { return Ok(None) };
        status.updates_rejected = state.policy.load().updates_rejected;
        listeners = listen(&config, &background).await?;
        (initial.update, Some(initial.reply), Some(modes))
    };
    // Until the policy server has been asked, shards that other gateways could own aren't this gateway's.
    let members = group::initial_members(&config, &update.peers);
    let snapshot = builder.with_members(&members);
    let (policy, generation) = (snapshot.policy.clone(), snapshot.generation);
    let publisher = Publisher::new(snapshot);
    steer(&mut steering, &policy, &network, &tunnels)?;

    let doorbell = Arc::new(ControlDoorbell::default());
    let mut store = SessionStore::open(&config, cores.len())?;
    let shared = shared_with_workers(&doorbell);
    let (parts, handles) = build_workers(&config, &cores, devices, &publisher, &mut store, &shared)?;
    let losses = parts.iter().map(|(_, parts, _)| parts.io.socket_stats()).collect();
    let pool = parts.first().map(|(_, parts, _)| parts.io.pool());
    let sockets = parts.iter().map(|(_, parts, _)| parts.io.sockets().collect::<Vec<_>>()).collect::<Vec<_>>();
    let threads = WorkerThreads::start(parts, config.workers.idle, config.privileges)?;

    let modes = modes.map_or_else(|| attach_steering(&config, &nics, &mut steering), Ok)?;
    // What policy covers is captured; everything else passes to the kernel again.
    steering.set_closed(false).map_err(CommandError::runtime)?;
    // Last of the steps that can fail: its neighbor entries in the kernel are removed only by `close`.
    let resolver = Resolver::open(&network, ResolverLimits::default()).await.map_err(CommandError::runtime)?;
    let steering = Arc::new(Mutex::new(steering));
    let sockets = socket_status(&nics, &modes, sockets);
    let counters = handles.iter().map(|handle| handle.counters.clone()).collect();
    let pool = allocated(pool)?;
    let peers = update.peers.into();
    let status = PolicyStatus { generation, applied_at: SystemTime::now(), updates_applied: 1, peers, ..status };
    let (command_sender, commands) = mpsc::unbounded_channel();
    let state = Arc::new(GatewayState {
        commands: Some(command_sender),
        placement: VipPlacement::of(&update.change),
        workers: handles,
        sockets,
        device: Arc::new(XdpStats::new(steering.clone(), losses, pool, counters)),
        ..state_without_workers(&config, status, source, policy, &network)?
    });
    let mut group =
        open_group(&config, &state, Arc::new(GroupLease::new(shared.lease)), shared.replication_wakeup, &store)?;
    group.set_policy(&state.policy.load().peers);
    privileges::restrict_control_thread();
    // If the connection has closed, the server sends the update again.
    let _ = reply.map(|reply| reply.send(Ok(())));
    let tracking = track(&config, &network, (nics, modes), &steering);
    let local_addresses = network.current().locals.clone();
    Ok(Some(Gateway {
        nat_log: start_nat_log(&config, &state, &background).await,
        tracking,
        config,
        subscription,
        client: running,
        advertiser,
        resolver,
        network,
        reconciler: Reconciler { builder, publisher, steering, state, local_addresses, tunnels },
        background,
        signals: signals.map_or_else(Signals::install, Ok)?,
        neighbor_requests: shared.neighbor_requests,
        doorbell,
        threads,
        group,
        members,
        commands,
        admin_socket: listeners.1,
        metrics_listener: listeners.0,
        _multicast: multicast,
        _session_store: store,
    }))
}

/// Starts to track interfaces, next hops and the steering program.
fn track(
    config: &Config,
    network: &Network,
    (nics, modes): (Vec<Nic>, Vec<Mode>),
    steering: &Arc<Mutex<Steering>>,
) -> Tracking {
    let (on_exit, steering, health) = (on_exit(config), steering.clone(), config.health.clone());
    Tracking::new(tracking::TrackingConfig { network, nics, modes, on_exit, steering, health })
}

/// Starts the NAT log, if configured.
async fn start_nat_log(config: &Config, state: &GatewayState, background: &BackgroundRuntime) -> Option<NatLog> {
    let (settings, status) = (config.nat_log?, state.nat_log.clone()?);
    let ports = state.ports;
    let (log, sessions) = background.run(async move { NatLog::start(&settings, ports, status) }).await;
    log.set_policy(&state.compiled.load_full());
    for worker in state.workers.iter().filter(|_| sessions.is_some()) {
        // Can't fail: the worker has just started, so its command queue is empty.
        let _ = worker.commands.try_send(Command::LogSessions(sessions.clone()));
        worker.doorbell.wake();
    }
    Some(log)
}

/// Builds the policy that is known at startup. An invalid one is an error if it comes from files, and discarded if it
/// comes from the cache.
fn build_known(
    update: Option<PolicyUpdate>,
    builder: &mut Builder,
    client: Option<&mut Client>,
    locals: &[IpAddr],
) -> Result<Option<PolicyUpdate>, CommandError> {
    let Some(update) = update else { return Ok(None) };
    let check = check_local_addresses(&update.change, locals);
    match (builder.with_change(&update.change), client) {
        (Ok(_), None) => check.map(|()| Some(update)).map_err(CommandError::usage),
        (Ok(_), Some(_)) => {
            // It was in force before. A local address that the host has got since then must not stop the gateway.
            if let Err(rejection) = check {
                tracing::error!(event = "policy_warning", "{rejection}");
            }
            Ok(Some(update))
        }
        (Err(error), None) => Err(CommandError::usage(error)),
        (Err(error), Some(client)) => {
            client.discard_cached(&error.to_string());
            Ok(None)
        }
    }
}

/// The policy source, and the policy that it has at startup.
struct OpenedSource {
    subscription: PolicySubscription,
    /// For display.
    description: String,
    server: Option<Arc<ArcSwap<ServerStatus>>>,
    update: Option<PolicyUpdate>,
    client: Option<Client>,
}

/// Opens the listeners of metrics and the admin socket.
async fn listen(config: &Config, background: &BackgroundRuntime) -> Result<(TcpListener, admin::Socket), CommandError> {
    let failed = |error: io::Error| CommandError::runtime(error).context("metrics.listen");
    // Bound on this thread, since a port below 1024 requires a capability; served by the background runtime.
    let metrics = metrics::bind(config.metrics.listen).await?.into_std().map_err(failed)?;
    let socket = config.admin.socket.clone();
    let both = async move { Ok((TcpListener::from_std(metrics).map_err(failed)?, admin::bind(&socket).await?)) };
    background.run(both).await
}

async fn open_source(config: &Config, background: &BackgroundRuntime) -> OpenedSource {
    match &config.policy {
        PolicySource::Files(paths) => {
            let follower = Some(FileWatcher::new(paths.clone()));
            let files = PolicySubscription::files(paths.clone(), config.locality(), config.allow_empty, follower);
            let (subscription, update) = background.run(files).await;
            let description = subscription.files.as_ref().map(|files| files.status.name.clone()).unwrap_or_default();
            OpenedSource { subscription, description, server: None, update, client: None }
        }
        PolicySource::Server(server) => {
            let (sender, receiver) = mpsc::channel(MAX_PENDING_EVENTS);
            let (client, update) = Client::open(config.locality(), server.clone(), sender);
            let description = format!("server {}", server.url);
            let status = Some(client.status());
            let subscription = PolicySubscription::server(receiver);
            OpenedSource { subscription, description, server: status, update, client: Some(client) }
        }
    }
}

fn state_without_workers(
    config: &Config,
    status: PolicyStatus,
    (server, files): (Option<Arc<ArcSwap<ServerStatus>>>, Option<FileSourceHandle>),
    policy: Arc<Policy>,
    network: &Network,
) -> Result<GatewayState, CommandError> {
    Ok(GatewayState {
        name: config.name.clone(),
        node: config.node().to_owned(),
        zone: config.zone.clone(),
        started: Instant::now(),
        ready: AtomicBool::new(false),
        session_capacity: config.sessions.capacity,
        policy: ArcSwap::from_pointee(status),
        server,
        files,
        health_errors: ArcSwap::default(),
        conflicts: ArcSwap::default(),
        compiled: ArcSwap::new(policy),
        placement: VipPlacement::default(),
        ports: (config.ports.range.first, config.ports.range.last),
        port_blocks: port_range(config)?.blocks(),
        network: ArcSwap::new(network.current()),
        tracking: ArcSwap::default(),
        group: ArcSwap::default(),
        nat_log: config.nat_log.as_ref().map(|settings| Arc::new(NatLogStatus::new(settings))),
        commands: None,
        stalls: Arc::default(),
        workers: Vec::new(),
        sockets: Vec::new(),
        connections: ListenerConnections::default(),
        device: Arc::new(NoDeviceStats),
    })
}

async fn open_network(config: &Config) -> Result<Network, CommandError> {
    let wanted = config.interfaces.iter().zip(0..).map(|(interface, number)| InterfaceConfig {
        id: InterfaceId(number),
        name: interface.name.clone(),
        role: interface.role.into(),
    });
    Network::open(wanted.collect()).await.map_err(CommandError::runtime)
}

/// Rejects interfaces whose MTU is larger than a frame: longer packets would be lost.
fn check_mtus(network: &NetworkSpec) -> Result<(), CommandError> {
    match network.interfaces.iter().find(|interface| interface.mtu > interface.usable_mtu()) {
        None => Ok(()),
        Some(InterfaceSpec { name, mtu, .. }) => Err(CommandError::runtime(format!(
            "interface {name} has an MTU of {mtu}, but the gateway receives packets of at most {MAX_MTU} bytes: longer \
             ones would be lost; run `ip link set dev {name} mtu {MAX_MTU}`, or less, here and on hosts that send to it"
        ))),
    }
}

async fn open_advertiser(config: &Config) -> Result<Advertiser, CommandError> {
    let place = RouteTable { table: config.bgp.table, metric: config.bgp.metric };
    // The running executable, even if another version has been installed since.
    Advertiser::open(place, "/proc/self/exe".into()).await.map_err(CommandError::runtime)
}

/// Joins the group of gateways: starts the membership client and the peer links.
fn open_group(
    config: &Config,
    state: &Arc<GatewayState>,
    lease: Arc<GroupLease>,
    replication_bell: Arc<ReplicationWaker>,
    store: &SessionStore,
) -> Result<Group, CommandError> {
    let PolicySource::Server(server) = &config.policy else { return Ok(Group::new(config, lease, None, None, None)) };
    let name: Arc<str> = config.name.as_str().into();
    let no_random = |error| CommandError::runtime(error).context("cannot get random bytes from the kernel");
    let secret = process_secret::generate().map_err(no_random)?;
    let incarnation = secret.incarnation();
    // If the previous process is still running, its secret stays with it.
    let predecessor = if store.is_in_use() { None } else { process_secret::exchange(config, &secret) };
    let identity = Identity::generate().map_err(CommandError::runtime)?;
    let tunnel_secret = TunnelSecret::generate().map_err(CommandError::runtime)?;
    let plan = heartbeat::ClientConfig {
        name: name.clone(),
        secret,
        predecessor,
        server: server.clone(),
        fingerprint: identity.fingerprint().0,
        tunnel_key: *tunnel_secret.public(),
        peer: config.peer_tunnel_endpoint(),
        lease: lease.clone(),
    };
    let links = match &config.peer {
        None => None,
        Some(peer) => {
            let (peers, events) = Peers::start(peer::PeerConfig {
                name,
                incarnation,
                identity,
                listen: SocketAddr::new(peer.address, peer.port),
                heartbeat: peer.heartbeat,
                versions: peer::PROTOCOL_VERSIONS,
                workers: Arc::new(ReplicationWorkers(state.clone())),
                waker: replication_bell,
                clock: clock::now,
            })
            .map_err(CommandError::usage)?;
            let status = peers.status();
            Some(PeerLinks { peers, events, status, view: Arc::default() })
        }
    };
    let (client, handle) = HeartbeatClient::open(plan);
    Ok(Group::new(config, lease, Some((handle, tokio::spawn(client.run()))), links, Some(tunnel_secret)))
}
