//! The control thread's loop: policy, network, questions for neighbours, signals.
//!
//! A change of policy captures first what is new, then lets workers use it, then lets go what is gone: in between, a
//! packet may be dropped but never leaves untranslated.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::check::BuildError;
use vipgate_dataplane::snapshot::members::MembersSpec;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::snapshot::spec::{Announce, NetworkSpec};
use vipgate_dataplane::waiting::Questions;
use vipgate_xdp::multicast::AllMulticast;
use vipgate_xdp::steering::Steering;

use super::feed::Feed;
use super::group::Group;
use super::health::HealthChecks;
use super::kept::Keeper;
use super::start::ControlBell;
use super::state::{GatewayState, Order, PolicyStatus};
use super::workers::Threads;
use super::{capture, conflicts};
use crate::config::Config;
use crate::failure::Failure;
use crate::kernel::{Advertiser, Network, NetworkError, Resolver};
use crate::metrics::Monitored;
use crate::natlog::NatLog;
use crate::xds::book::Offer;
use crate::xds::client::{Event, Rejection};
use crate::{admin, metrics, systemd};

/// How often the control thread looks after itself: frees old snapshots, sees that workers live.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// The longest wait for whoever says who serves.
const MEETING: Duration = Duration::from_secs(2);

/// A gateway that stands.
pub(super) struct Gateway {
    pub(super) config: Config,
    pub(super) feed: Feed,
    pub(super) client: Option<JoinHandle<()>>,
    pub(super) network: Network,
    pub(super) advertiser: Advertiser,
    pub(super) resolver: Resolver,
    pub(super) builder: Builder,
    pub(super) publisher: Publisher,
    pub(super) steering: Arc<Mutex<Steering>>,
    pub(super) questions: Questions,
    pub(super) bell: Arc<ControlBell>,
    pub(super) threads: Threads,
    pub(super) group: Group,
    /// What workers were told of other gateways.
    pub(super) members: MembersSpec,
    pub(super) orders: mpsc::UnboundedReceiver<Order>,
    pub(super) nat_log: Option<NatLog>,
    pub(super) state: Arc<GatewayState>,
    pub(super) admin_socket: admin::Socket,
    pub(super) metrics_listener: TcpListener,
    pub(super) _multicast: Vec<AllMulticast>,
    pub(super) _keeper: Keeper,
}

/// Runs a gateway until a signal ends it.
pub(super) async fn follow(gateway: Gateway) -> Result<(), Failure> {
    let Gateway { config, mut feed, network, resolver, admin_socket, metrics_listener, .. } = gateway;
    let mut parts = Following {
        builder: gateway.builder,
        publisher: gateway.publisher,
        steering: gateway.steering,
        state: gateway.state,
        advertiser: gateway.advertiser,
        locals: network.current().locals.clone(),
        tunnels: config.tunnels(),
        members: gateway.members,
        nat_log: gateway.nat_log,
    };
    let (mut group, mut orders) = (gateway.group, gateway.orders);
    parts.announce(None);
    parts.meet(&mut group).await;
    let mut health = HealthChecks::new(parts.state.clone());
    let mut measured = Instant::now();
    let mut threads = gateway.threads;
    let no_signals = |error| Failure::runtime(format_args!("cannot listen to signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut reload = signal(SignalKind::hangup()).map_err(no_signals)?;
    let pace = systemd::watchdog_interval().map_or(HOUSEKEEPING, |limit| limit.min(HOUSEKEEPING));
    let mut housekeeping = tokio::time::interval(pace);
    let mut networks = follow_network(network);

    let (stop, stopped) = watch::channel(false);
    let servers = [
        tokio::spawn(admin::serve(parts.state.clone(), admin_socket, stopped.clone())),
        tokio::spawn(metrics::serve(Monitored::gateway(parts.state.clone()), metrics_listener, stopped)),
    ];
    parts.state.ready.store(true, Ordering::Relaxed);
    parts.advertise();
    health.follow();
    tracing::info!(event = "ready", name = config.name, workers = parts.state.workers.len(), "ready");
    systemd::ready();

    let end = loop {
        tokio::select! {
            _ = terminate.recv() => break Ok(()),
            _ = interrupt.recv() => break Ok(()),
            _ = reload.recv() => {
                reload_files(&feed);
            }
            event = feed.next() => {
                parts.take(event);
                parts.regroup(&mut group);
                health.follow();
            }
            () = group.changed() => parts.regroup(&mut group),
            Some(order) = orders.recv() => parts.obey(order, &mut group),
            change = networks.recv() => match change {
                Some(Ok(spec)) => parts.network_changed(spec),
                Some(Err(error)) => break Err(Failure::runtime(error)),
                None => break Err(Failure::runtime("nobody follows the network any more")),
            },
            () = gateway.bell.0.notified() => {
                while let Some(wanted) = gateway.questions.queue.pop() {
                    // Refused when too many are asked for already; workers ask again.
                    resolver.resolve(wanted.interface, wanted.address);
                }
            }
            _ = housekeeping.tick() => {
                parts.publisher.collect();
                group.watch_lease();
                health.follow();
                conflicts::follow(&parts.state, Instant::now());
                let since = std::mem::replace(&mut measured, Instant::now());
                measure_rates(&parts.state, since.elapsed());
                if !threads.are_alive() {
                    break Err(Failure::runtime("a worker thread died; see the log"));
                }
                // This loop and all workers live: what a watchdog wants to know.
                systemd::alive();
            }
        }
    };
    tracing::info!(event = "stopping", "stopping");
    systemd::stopping();
    // Before anything ends, so that routers send elsewhere what would be lost here.
    parts.advertiser.close().await;
    // The client of a policy server ends when nobody listens to it.
    drop(feed);
    if let Some(client) = gateway.client {
        let _ = tokio::time::timeout(Duration::from_secs(1), client).await;
    }
    group.close().await;
    parts.state.ready.store(false, Ordering::Relaxed);
    // Servers have nothing to lose: whoever asks now hears that nobody is there.
    let _ = stop.send(true);
    close(servers).await;
    let all_well = threads.stop();
    NatLog::close(parts.nat_log).await;
    resolver.close().await;
    if !all_well && end.is_ok() {
        return Err(Failure::runtime("a worker thread died; see the log"));
    }
    tracing::info!(event = "stopped", on_exit = ?config.xdp.on_exit, "stopped");
    end
}

/// Reads the policy again, where it is in files, beside the loop.
fn reload_files(feed: &Feed) {
    tracing::info!(event = "reload", "SIGHUP: reading the policy again, where it is in files");
    systemd::reloading();
    let files = feed.files.clone();
    tokio::spawn(async move {
        if let Some(files) = files {
            files.read().await;
        }
        systemd::ready();
    });
}

/// Waits for servers to end, but not for long.
async fn close(servers: [JoinHandle<()>; 2]) {
    for server in servers {
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
    }
}

/// Computes how many sessions backends get a second.
fn measure_rates(state: &GatewayState, since: Duration) {
    let ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    for service in state.compiled.load().services() {
        service.uses().for_each(|(_, usage)| usage.measure(ms));
    }
}

/// Follows the network in a task of its own, so that nothing interrupts it.
fn follow_network(mut network: Network) -> mpsc::Receiver<Result<Arc<NetworkSpec>, NetworkError>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let change = network.changed().await;
            let failed = change.is_err();
            // Nobody listens any more when the gateway stops.
            if sender.send(change).await.is_err() || failed {
                return;
            }
        }
    });
    receiver
}

/// What follows policy and network.
struct Following {
    builder: Builder,
    publisher: Publisher,
    steering: Arc<Mutex<Steering>>,
    state: Arc<GatewayState>,
    advertiser: Advertiser,
    locals: Vec<IpAddr>,
    /// Where tunnels of other gateways and of nodes end.
    tunnels: Vec<SocketAddr>,
    /// What the engine knows of other gateways.
    members: MembersSpec,
    nat_log: Option<NatLog>,
}

impl Following {
    /// Waits until it is known who serves, where that is known by somebody, but not for long.
    async fn meet(&mut self, group: &mut Group) {
        let until = tokio::time::Instant::now() + MEETING;
        self.regroup(group);
        while group.is_unknown() && tokio::time::timeout_at(until, group.changed()).await.is_ok() {
            self.regroup(group);
        }
    }

    fn obey(&mut self, order: Order, group: &mut Group) {
        let Order::Drain(draining) = order;
        tracing::info!(event = "drain", draining, "told to {}", if draining { "stop serving" } else { "serve again" });
        group.set_draining(draining);
        self.regroup(group);
    }

    /// Takes in how gateways stand.
    fn regroup(&mut self, group: &mut Group) {
        group.set_policy(&self.state.policy.load().peers);
        let spec = group.settle(Instant::now());
        if spec != self.members {
            let owners: BTreeSet<IpAddr> = own_vips(&self.state).collect();
            let moved = serving(&spec) != serving(&self.members);
            let snapshot = self.builder.with_members(&spec);
            let policy = snapshot.policy.clone();
            self.publisher.publish(snapshot);
            self.compiled(policy);
            self.state.workers.iter().for_each(|worker| worker.doorbell.wake());
            tracing::info!(event = "group", serving = ?serving(&spec), "who serves, or how, has changed");
            self.members = spec;
            group.told(moved);
            self.announce(Some(&owners));
            self.advertise();
        } else if group.is_behind() {
            group.told(false);
        }
        if group.is_pending() && self.publisher.collect() == 0 {
            group.acts();
        }
        group.wish();
        group.watch_lease();
        self.state.group.store(Arc::new(group.status(&self.members)));
    }

    /// Notes the policy that workers have by now.
    fn compiled(&self, policy: Arc<Policy>) {
        if let Some(log) = &self.nat_log {
            log.put(&policy);
        }
        self.state.compiled.store(policy);
    }

    /// Announces the VIPs that are this gateway's now, and weren't among these.
    fn announce(&self, known: Option<&BTreeSet<IpAddr>>) {
        announce(&self.state, known);
    }

    /// Takes in what the source of policy says.
    fn take(&mut self, event: Event) {
        match event {
            Event::Offer(offer, answer) => {
                let is_one = offer.updates == 1;
                let outcome = self.put_in_force(*offer);
                // Which of several it is shows when each is offered.
                if let Err(rejection) = outcome.as_ref()
                    && is_one
                {
                    reject(&self.state, &rejection.to_string());
                }
                // The connection may be gone meanwhile; then the server asks again.
                let _ = answer.send(outcome);
            }
            Event::Refused(reason) => reject(&self.state, &reason),
        }
    }

    fn put_in_force(&mut self, Offer { updates, change, peers }: Offer) -> Result<(), Rejection> {
        check_own_addresses(&change, &self.locals)?;
        let before = self.state.policy.load_full();
        let known: BTreeSet<IpAddr> = own_vips(&self.state).collect();
        let capture = capture::Before::of(&change, &self.builder);
        let snapshot = self.builder.with_change(&change).map_err(|error| rejection(&error))?;
        let (generation, compiled) = (snapshot.generation, snapshot.policy.clone());
        let (more, less) = capture.difference(&change, &self.builder);
        {
            let mut steering = self.steering.lock().unwrap_or_else(PoisonError::into_inner);
            // What is new is captured before workers know it, and what is gone until they have forgotten it.
            let mut captured = steering.extend(more);
            if captured.is_err() || steering.is_unsure() {
                captured = steering.apply(capture::tables(&compiled, &self.locals, &self.tunnels));
            }
            if let Err(error) = captured {
                tracing::error!(%error, "what policy covers is not captured in full; the next change tries again");
            }
            self.publisher.publish(snapshot);
            if let Err(error) = steering.reduce(less) {
                tracing::error!(%error, "what policy no longer covers is still captured; the next change tries again");
            }
        }
        tracing::debug!(
            event = "policy_change",
            policies = change.policies.len(),
            vips = change.vips.len(),
            endpoints = change.endpoints.len(),
            gone = change.gone.policies.len() + change.gone.vips.len() + change.gone.endpoints.len(),
        );
        tracing::info!(
            event = "policy",
            version = change.version,
            generation,
            vips = compiled.live_vips().count(),
            endpoints = compiled.endpoint_count(),
            "policy in force"
        );
        self.state.policy.store(Arc::new(PolicyStatus {
            generation,
            applied_at: SystemTime::now(),
            updates_applied: before.updates_applied + updates,
            last_error: None,
            peers: peers.into(),
            ..(*before).clone()
        }));
        self.compiled(compiled);
        self.state.dealt.change(&change);
        self.announce(Some(&known));
        self.advertise();
        Ok(())
    }

    /// Lets a BGP daemon announce what is served here: VIPs that routing announces, once the gateway is ready.
    fn advertise(&self) {
        let policy = self.state.compiled.load();
        let served = policy.vips().filter(|vip| vip.is_ours() && vip.announce == Announce::Bgp);
        self.advertiser.set(served.map(|vip| vip.address).collect());
    }

    fn network_changed(&mut self, spec: Arc<NetworkSpec>) {
        if spec.locals != self.locals {
            self.locals.clone_from(&spec.locals);
            let wanted = capture::tables(&self.state.compiled.load(), &self.locals, &self.tunnels);
            let applied = self.steering.lock().unwrap_or_else(PoisonError::into_inner).apply(wanted);
            if let Err(error) = applied {
                tracing::error!(%error, "the steering program doesn't know the node's new addresses yet");
            }
        }
        self.publisher.publish(self.builder.with_network((*spec).clone()));
        self.state.network.store(spec);
        // Packets may wait for just this neighbour.
        for worker in &self.state.workers {
            worker.doorbell.wake();
        }
    }
}

/// Says that an update is refused, and why.
pub(super) fn reject(state: &GatewayState, reason: &str) {
    let before = state.policy.load_full();
    // Files are read again and again until they are mended; that is one rejection.
    if before.last_error.as_deref() == Some(reason) && state.server.is_none() {
        return;
    }
    tracing::error!(event = "policy_rejected", "policy rejected, the last good one stays in force:\n{reason}");
    state.policy.store(Arc::new(PolicyStatus {
        updates_rejected: before.updates_rejected + 1,
        last_error: Some(reason.to_owned()),
        ..(*before).clone()
    }));
}

/// A VIP is on no interface: an address of the gateway's own would be taken from its kernel.
pub(super) fn check_own_addresses(change: &PolicyChange, locals: &[IpAddr]) -> Result<(), Rejection> {
    match change.vips.iter().find(|vip| locals.binary_search(&vip.address).is_ok()) {
        None => Ok(()),
        Some(vip) => Err(Rejection {
            resource: Some(format!("Vip {}", vip.address)),
            reason: format!("{} is an address of this gateway's own kernel, so it can't be a VIP", vip.address),
        }),
    }
}

/// What the engine finds wrong, as the server named it.
pub(super) fn rejection(error: &BuildError) -> Rejection {
    let resource = match error {
        BuildError::TooManyVips { .. } | BuildError::TooManyEndpoints { .. } | BuildError::TooManyBackends { .. } => {
            None
        }
        BuildError::BackendIsVip { service, .. }
        | BuildError::FrontendTwice { service, .. }
        | BuildError::Service { service, .. } => Some(service.to_string()),
        BuildError::UnknownPolicy { address, .. }
        | BuildError::UnknownVip { address, .. }
        | BuildError::EndpointIsVip { address }
        | BuildError::Twice { address } => Some(format!("Endpoint {address}")),
        BuildError::PolicyTwice { name } | BuildError::PolicyInUse { name } => Some(format!("EgressPolicy {name}")),
        BuildError::VipInUse { vip } => Some(format!("Vip {vip}")),
        BuildError::TooManyRanges { .. } => Some("Cluster cluster".to_owned()),
        BuildError::Node { node, .. } => Some(format!("OverlayNode {node}")),
    };
    Rejection { resource, reason: error.to_string() }
}

/// The gateways that serve, as the engine was told.
fn serving(spec: &MembersSpec) -> Vec<&str> {
    spec.gateways.iter().filter(|member| member.serving).map(|member| &*member.name).collect()
}

/// The VIPs that are announced from here: this gateway's, and not by routes.
fn own_vips(state: &GatewayState) -> impl Iterator<Item = IpAddr> + use<> {
    let policy = state.compiled.load_full();
    let own = policy.vips().filter(|vip| vip.is_answered() && vip.announce == Announce::L2).map(|vip| vip.address);
    own.collect::<Vec<_>>().into_iter()
}

/// Lets the first worker announce the VIPs that the gateway has taken over: all but those that are `known` already.
fn announce(state: &GatewayState, known: Option<&BTreeSet<IpAddr>>) {
    let new: Vec<IpAddr> =
        own_vips(state).filter(|address| known.is_none_or(|known| !known.contains(address))).collect();
    let Some(first) = state.workers.first() else { return };
    if !new.is_empty() && first.commands.try_send(Command::Announce(new)).is_err() {
        tracing::warn!("the first worker is too busy to announce VIPs; neighbours will ask for them");
    }
    first.doorbell.wake();
}
