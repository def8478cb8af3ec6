//! The way up: configuration, policy, network, sockets, steering, workers, in this order, so that packets are captured
//! only when everything that handles them stands.

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
use vipgate_dataplane::command::Command;
use vipgate_dataplane::io::{InterfaceId, MAX_MTU};
use vipgate_dataplane::link::handoff::Wake;
use vipgate_dataplane::link::lease::Lease;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::snapshot::spec::{InterfaceSpec, NetworkSpec};
use vipgate_dataplane::waiting::Questions;
use vipgate_xdp::attach::Mode;
use vipgate_xdp::nic::Nic;
use vipgate_xdp::steering::Steering;

use self::devices::{attach_steering, cores, find_nics, granted, join_multicast, on_exit, open_devices};
use self::engine::{Shared, make_workers, range};
use super::capture;
use super::control::Gateway;
use super::feed::{EVENTS, Feed, FilesHandle};
use super::figures::XdpFigures;
use super::following::{Following, check_own_addresses};
use super::group::{self, Group, GroupLease, LinkedWorkers, Links};
use super::identity;
use super::kept::Keeper;
use super::services::{Services, Signals};
use super::state::{Dealt, GatewayState, PolicyStatus, Rooms};
use super::tracking::{self, Tracking};
use super::wait::{self, NoFigures};
use super::workers::{self, Threads};
use crate::config::{Config, Overlay, PolicySource};
use crate::failure::Failure;
use crate::kernel::{Advertiser, Network, Place, Resolver, ResolverLimits, Wanted};
use crate::members::{self, MembersClient, Secret};
use crate::natlog::{NatLog, NatLogStatus};
use crate::peer::{self, Bell, Identity, Peers, TunnelSecret};
use crate::policy::{Follower, Viewer};
use crate::xds::book::Offer;
use crate::xds::client::{Client, ServerStatus};
use crate::{admin, metrics, privileges};

/// Questions about neighbours that wait for the control thread.
const QUESTIONS: usize = 1024;

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
    let services = Services::start()?;
    let Opened { mut feed, source, server, offer, mut client } = open_feed(&config, &services).await;
    let origin = (server, feed.files.clone());
    let network = open_network(&config).await?;
    check_mtus(&network.current())?;
    // Early, since what it removes is of a process that serves nobody any more.
    let advertiser = open_advertiser(&config).await?;
    let overlay = config.overlay.map(Overlay::end);
    let mut builder = Builder::new((*network.current()).clone()).at_overlay(overlay);
    let mut listeners = listen(&config, &services).await?;
    let (mut steering, devices) = open_devices(&config, &nics, cores.len())?;
    let (tunnels, multicast) = (config.tunnels(), join_multicast(&config, &nics));

    let mut status = PolicyStatus::nothing_from(source);
    let offer = take_known(offer, &mut builder, client.as_mut(), &network.current().locals)?;
    let running = client.map(|client| services.spawn(client.run()));
    let mut signals = None;
    let (offer, answer, modes) = if let Some(offer) = offer {
        (offer, None, None)
    } else {
        // Closed until there is a policy: which pods' packets must not leave as they are, nobody knows.
        steering.close(true).map_err(Failure::runtime)?;
        let nothing = builder.snapshot().policy;
        steering.apply(capture::tables(&nothing, &network.current().locals, &tunnels)).map_err(Failure::runtime)?;
        let modes = attach_steering(&config, &nics, &mut steering)?;
        let state = Arc::new(state_without_workers(&config, status.clone(), origin.clone(), nothing, &network)?);
        let signals = signals.insert(Signals::listen()?);
        let waited = wait::for_policy(&state, &mut feed, &mut builder, listeners, &services, signals).await?;
        let Some(heard) = waited else { return Ok(None) };
        status.updates_rejected = state.policy.load().updates_rejected;
        listeners = listen(&config, &services).await?;
        (heard.offer, Some(heard.answer), Some(modes))
    };
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
    let threads = Threads::start(parts, config.workers.idle, config.privileges)?;

    let modes = modes.map_or_else(|| attach_steering(&config, &nics, &mut steering), Ok)?;
    // Policy captures what it covers by now; all else is the kernel's again.
    steering.close(false).map_err(Failure::runtime)?;
    // Last of what can fail: what it marks in the kernel it takes back only when it is closed.
    let resolver = Resolver::open(&network, ResolverLimits::default()).await.map_err(Failure::runtime)?;
    let steering = Arc::new(Mutex::new(steering));
    let sockets = granted(&nics, &modes, sockets);
    let counters = handles.iter().map(|handle| handle.counters.clone()).collect();
    let pool = pool.ok_or_else(|| Failure::usage("workers.cores: at least one worker is needed"))?;
    tracing::info!(event = "frames", frames = pool.total(), pages = pool.pages(), "memory for packets");
    let (applied_at, peers) = (SystemTime::now(), offer.peers.into());
    let status = PolicyStatus { generation, applied_at, updates_applied: 1, peers, ..status };
    let (ordered, orders) = mpsc::unbounded_channel();
    let state = Arc::new(GatewayState {
        orders: Some(ordered),
        dealt: Dealt::of(&offer.change),
        workers: handles,
        sockets,
        device: Arc::new(XdpFigures::new(steering.clone(), losses, pool, counters)),
        ..state_without_workers(&config, status, origin, policy, &network)?
    });
    let mut group = open_group(&config, &state, Arc::new(GroupLease::new(shared.lease)), shared.news, &keeper)?;
    group.set_policy(&state.policy.load().peers);
    privileges::settle_gateway();
    if let Some(answer) = answer {
        // The connection may be gone meanwhile; then the server asks again.
        let _ = answer.send(Ok(()));
    }
    let tracking = track(&config, &network, (nics, modes), &steering);
    let locals = network.current().locals.clone();
    Ok(Some(Gateway {
        nat_log: start_nat_log(&config, &state, &services).await,
        tracking,
        config,
        feed,
        client: running,
        advertiser,
        resolver,
        network,
        following: Following { builder, publisher, steering, state, locals, tunnels },
        services,
        signals: signals.map_or_else(Signals::listen, Ok)?,
        questions,
        bell,
        threads,
        group,
        members,
        orders,
        admin_socket: listeners.1,
        metrics_listener: listeners.0,
        _multicast: multicast,
        _keeper: keeper,
    }))
}

/// Begins to follow interfaces, next hops and the steering program.
fn track(
    config: &Config,
    network: &Network,
    (nics, modes): (Vec<Nic>, Vec<Mode>),
    steering: &Arc<Mutex<Steering>>,
) -> Tracking {
    let (on_exit, steering, health) = (on_exit(config), steering.clone(), config.health.clone());
    Tracking::new(tracking::Plan { network, nics, modes, on_exit, steering, health })
}

/// Begins to log translations, if that is wanted.
async fn start_nat_log(config: &Config, state: &GatewayState, services: &Services) -> Option<NatLog> {
    let (settings, status) = (config.nat_log?, state.nat_log.clone()?);
    let ports = state.ports;
    let (log, sessions) = services.run(async move { NatLog::start(&settings, ports, status) }).await;
    log.put(&state.compiled.load_full());
    for worker in state.workers.iter().filter(|_| sessions.is_some()) {
        // Its queue of commands is empty: it has just begun.
        let _ = worker.commands.try_send(Command::LogSessions(sessions.clone()));
        worker.doorbell.wake();
    }
    Some(log)
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

/// The sockets of whoever asks.
async fn listen(config: &Config, services: &Services) -> Result<(TcpListener, admin::Socket), Failure> {
    let failed = |error: io::Error| Failure::runtime(format_args!("metrics.listen: {error}"));
    // Opened here, since a port below 1024 takes a capability, and answered there.
    let metrics = metrics::bind(config.metrics.listen).await?.into_std().map_err(failed)?;
    let socket = config.admin.socket.clone();
    let both = async move { Ok((TcpListener::from_std(metrics).map_err(failed)?, admin::bind(&socket).await?)) };
    services.run(both).await
}

async fn open_feed(config: &Config, services: &Services) -> Opened {
    match &config.policy {
        PolicySource::Files(paths) => {
            let follower = Some(Follower::new(paths.clone()));
            let files = Feed::files(paths.clone(), Viewer::of(config), config.allow_empty, follower);
            let (feed, offer) = services.run(files).await;
            let source = feed.files.as_ref().map(|files| files.status.name.clone()).unwrap_or_default();
            Opened { feed, source, server: None, offer, client: None }
        }
        PolicySource::Server(server) => {
            let (sender, receiver) = mpsc::channel(EVENTS);
            let (client, offer) = Client::open(Viewer::of(config), server.clone(), sender);
            let source = format!("server {}", server.url);
            let status = Some(client.status());
            Opened { feed: Feed::server(receiver), source, server: status, offer, client: Some(client) }
        }
    }
}

fn state_without_workers(
    config: &Config,
    status: PolicyStatus,
    (server, files): (Option<Arc<ArcSwap<ServerStatus>>>, Option<FilesHandle>),
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
        files,
        health_errors: ArcSwap::default(),
        conflicts: ArcSwap::default(),
        compiled: ArcSwap::new(policy),
        dealt: Dealt::default(),
        ports: (config.ports.range.first, config.ports.range.last),
        port_blocks: range(config)?.blocks(),
        network: ArcSwap::new(network.current()),
        tracking: ArcSwap::default(),
        group: ArcSwap::default(),
        nat_log: config.nat_log.as_ref().map(|settings| Arc::new(NatLogStatus::new(settings))),
        orders: None,
        stalls: Arc::default(),
        workers: Vec::new(),
        sockets: Vec::new(),
        rooms: Rooms::default(),
        device: Arc::new(NoFigures),
    })
}

async fn open_network(config: &Config) -> Result<Network, Failure> {
    let wanted = config.interfaces.iter().zip(0..).map(|(interface, number)| Wanted {
        id: InterfaceId(number),
        name: interface.name.clone(),
        role: interface.role.into(),
    });
    Network::open(wanted.collect()).await.map_err(Failure::runtime)
}

/// A link may carry longer packets than frames receive: those would vanish.
fn check_mtus(network: &NetworkSpec) -> Result<(), Failure> {
    match network.interfaces.iter().find(|interface| interface.mtu > interface.carried()) {
        None => Ok(()),
        Some(InterfaceSpec { name, mtu, .. }) => Err(Failure::runtime(format_args!(
            "interface {name} has an MTU of {mtu}, but the longest packet that the gateway receives has {MAX_MTU} bytes: longer ones would be lost; \
             `ip link set dev {name} mtu {MAX_MTU}`, or less, there and at whoever sends to it"
        ))),
    }
}

async fn open_advertiser(config: &Config) -> Result<Advertiser, Failure> {
    let place = Place { table: config.bgp.table, metric: config.bgp.metric };
    // This very program, whatever has been installed in its place meanwhile.
    Advertiser::open(place, "/proc/self/exe".into()).await.map_err(Failure::runtime)
}

/// Begins to hear of other gateways, and to be heard of.
fn open_group(
    config: &Config,
    state: &Arc<GatewayState>,
    lease: Arc<GroupLease>,
    news: Arc<Bell>,
    keeper: &Keeper,
) -> Result<Group, Failure> {
    let PolicySource::Server(server) = &config.policy else { return Ok(Group::new(config, lease, None, None, None)) };
    let name: Arc<str> = config.name.as_str().into();
    let no_random = |error| Failure::runtime(format_args!("the kernel gives no random numbers: {error}"));
    let secret = Secret::generate().map_err(no_random)?;
    let incarnation = secret.incarnation();
    // While the process before lives, its secret is its own.
    let predecessor = if keeper.is_in_use() { None } else { identity::exchange(config, &secret) };
    let identity = Identity::generate().map_err(Failure::runtime)?;
    let tunnel_secret = TunnelSecret::generate().map_err(Failure::runtime)?;
    let plan = members::Plan {
        name: name.clone(),
        secret,
        predecessor,
        server: server.clone(),
        fingerprint: identity.fingerprint().0,
        tunnel_key: *tunnel_secret.public(),
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
    Ok(Group::new(config, lease, Some((handle, tokio::spawn(client.run()))), links, Some(tunnel_secret)))
}
