//! Startup sequence, in three phases:
//!
//! 1. [`Startup::prepare`]: interfaces, network state, policy source, admin socket and metrics, sockets. Nothing is
//!    captured.
//! 2. [`Startup::initial_policy`]: the policy that is known, or drop everything and wait for one.
//! 3. [`Startup::run_engine`]: workers, steering program, resolver, group. Packets are captured only once everything
//!    that handles them is running.

mod devices;
mod engine;
mod group;
mod initial_policy;
mod network;
mod source;
mod state;
mod workers;

use std::sync::Arc;

use tokio::runtime::Handle;
use vipgate_common::Tasks;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::worker::command::Command;
use vipgate_xdp::device::XdpDevice;

use self::devices::SteeredInterfaces;
use self::initial_policy::InitialPolicy;
use self::source::OpenedSource;
use super::control::ControlLoop;
use crate::command_error::CommandError;
use crate::config::{Config, Overlay};
use crate::gateway::background::{BackgroundRuntime, Signals};
use crate::gateway::control::{Housekeeping, Membership};
use crate::gateway::neighbors::NeighborRequests;
use crate::gateway::reconciler::{Reconciler, ReconcilerTask};
use crate::gateway::servers::Servers;
use crate::gateway::{control, group as membership, session_store};
use crate::kernel::{Advertiser, Network, Resolver, ResolverLimits};
use crate::natlog::NatLog;
use crate::state::GatewayState;
use crate::{blocking_threads, privileges};

/// Starts a gateway; `None`: stopped by a signal before the initial policy.
pub(super) async fn start(config: Config) -> Result<Option<ControlLoop>, CommandError> {
    let mut startup = Startup::prepare(config).await?;
    let Some(initial) = startup.initial_policy().await? else {
        startup.servers.close().await;
        tracing::info!(event = "stopped", "stopped before the initial policy");
        return Ok(None);
    };
    startup.run_engine(initial).await.map(Some)
}

/// What a gateway has before its engine runs. Dropping it leaves the host as it was.
struct Startup {
    config: Config,
    /// The core of each worker.
    cores: Vec<usize>,
    tasks: Tasks,
    background: BackgroundRuntime,
    source: OpenedSource,
    network: Network,
    advertiser: Advertiser,
    builder: Builder,
    state: Arc<GatewayState>,
    servers: Servers,
    interfaces: SteeredInterfaces,
    /// The sockets of each worker.
    devices: Vec<XdpDevice>,
    /// Installed once the gateway waits for something.
    signals: Option<Signals>,
}

impl Startup {
    /// Opens everything that doesn't depend on policy.
    async fn prepare(mut config: Config) -> Result<Self, CommandError> {
        let nics = devices::find_nics(&config)?;
        let cores = devices::worker_cores(&config, &nics)?;
        // Before the first file there is read: the record of addresses.
        session_store::prepare(&mut config)?;
        // Before any other thread starts: threads inherit the CPU affinity.
        super::workers::avoid_worker_cores(&cores);
        blocking_threads::start(&Handle::current());
        let background = BackgroundRuntime::start()?;
        let source = source::open(&config, &background).await?;
        let network = network::open(&config).await?;
        // Early: it withdraws routes that a previous process has left.
        let advertiser = network::open_advertiser(&config).await?;
        let overlay = config.overlay.map(Overlay::tunnel_endpoint);
        let builder = Builder::new((*network.current()).clone()).with_overlay(overlay);
        let state = state::initial(&config, &source, network.current(), builder.snapshot().policy)?;
        let state = Arc::new(state);
        // Before the initial policy: operators need to see why there is none.
        let tasks = Tasks::default();
        let servers = Servers::start(&config, &state, &background, tasks.child()).await?;
        let (interfaces, devices) = SteeredInterfaces::open(&config, nics, cores.len(), network.current().frames())?;
        Ok(Self {
            config,
            cores,
            tasks,
            background,
            source,
            network,
            advertiser,
            builder,
            state,
            servers,
            interfaces,
            devices,
            signals: None,
        })
    }

    /// Builds the policy that is known, or waits for one and drops everything until then. `None`: stopped by a signal.
    async fn initial_policy(&mut self) -> Result<Option<InitialPolicy>, CommandError> {
        let locals = &self.network.current().locals;
        let (known, mut client) = (self.source.known.take(), self.source.client.take());
        let known = initial_policy::build_known(known, &mut self.builder, client.as_mut(), locals)?;
        if let Some(client) = client {
            self.source.subscription.set_client(self.background.spawn(client.run()));
        }
        if known.is_some() {
            return Ok(known);
        }
        // Without a policy, it is unknown which pods' packets must not leave untranslated.
        self.interfaces.set_closed(true)?;
        let programmed = self.interfaces.program(&self.state.compiled.load(), locals, &self.config.tunnel_endpoints());
        programmed.map_err(CommandError::runtime)?;
        self.interfaces.attach(&self.config)?;
        let signals = self.signals.insert(Signals::install()?);
        Ok(initial_policy::wait(&self.state, &mut self.source.subscription, &mut self.builder, signals).await)
    }

    /// Puts the initial policy in force: starts the workers and captures packets.
    async fn run_engine(mut self, initial: InitialPolicy) -> Result<ControlLoop, CommandError> {
        let config = self.config;
        // Until the policy server has been asked, shards that other gateways could own aren't this gateway's.
        let members = membership::initial_members(&config, &initial.update.peers);
        let snapshot = self.builder.with_members(&members);
        let (policy, generation) = (snapshot.policy.clone(), snapshot.generation);
        let publisher = Publisher::new(snapshot);
        let (local_addresses, tunnels) = (self.network.current().locals.clone(), config.tunnel_endpoints());
        let programmed = self.interfaces.program(&policy, &local_addresses, &tunnels);
        if programmed.is_err() {
            // Before any packet arrives.
            self.interfaces.set_closed(true)?;
        }
        let neighbors = NeighborRequests::new();
        let workers = workers::start(&config, &self.cores, self.devices, &publisher, neighbors.sender().clone())?;
        self.interfaces.attach(&config)?;
        if programmed.is_ok() {
            // What policy covers is captured; everything else passes to the kernel again.
            self.interfaces.set_closed(false)?;
        }
        let signals = self.signals.map_or_else(Signals::install, Ok)?;
        // Last of the steps that can fail: its neighbor entries in the kernel are removed only by `close`.
        let resolver = Resolver::open(&self.network, ResolverLimits::default()).await.map_err(CommandError::runtime)?;
        state::set_policy(&self.state, &initial.update, policy, generation);
        let commands = state::set_engine(&self.state, &self.interfaces, workers.parts);
        let group = match group::join(&config, &self.state, members, workers.shared, &workers.store, &self.tasks) {
            Ok(group) => group,
            Err(error) => {
                resolver.close().await;
                return Err(error);
            }
        };
        privileges::restrict_control_thread();
        let nat_log = start_nat_log(&config, &self.state, &self.background).await;
        let state = self.state;
        let steering = self.interfaces.steering.clone();
        let mut reconciler =
            Reconciler::new(self.builder, publisher, steering, state.clone(), local_addresses, tunnels);
        reconciler.start(programmed, initial.into_reply());
        Ok(ControlLoop {
            tracking: self.interfaces.track(&config, &self.network),
            network_changes: control::follow_network(self.network, &self.tasks),
            membership: Membership::new(group),
            housekeeping: Housekeeping::new(state.clone(), self.tasks.clone()),
            reconciler: ReconcilerTask::new(reconciler),
            subscription: self.source.subscription,
            advertiser: self.advertiser,
            servers: self.servers,
            signals,
            commands,
            neighbors,
            resolver,
            nat_log,
            threads: workers.threads,
            config,
            state,
            tasks: self.tasks,
            _background: self.background,
            _locks: self.interfaces.locks,
            _multicast: self.interfaces.multicast,
            _session_store: workers.store,
        })
    }
}

/// Starts the NAT log, if configured.
async fn start_nat_log(config: &Config, state: &GatewayState, background: &BackgroundRuntime) -> Option<NatLog> {
    let (settings, status) = (config.nat_log?, state.nat_log.clone()?);
    let ports = state.ports;
    let (log, sessions) = background.run(async move { NatLog::start(&settings, ports, status) }).await;
    log.set_policy(&state.compiled.load_full());
    for worker in state.workers().iter().filter(|_| sessions.is_some()) {
        // Can't fail: the worker has just started, so its command queue holds a few queries at most.
        let _ = worker.commands.try_send(Command::LogSessions(sessions.clone()));
        worker.doorbell.wake();
    }
    Some(log)
}
