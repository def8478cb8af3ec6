//! The control thread's loop: signals, policy, gateways, network, questions for neighbours. What takes long is done elsewhere, see
//! `following.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use vipgate_dataplane::snapshot::members::MembersSpec;
use vipgate_dataplane::snapshot::spec::{Announce, NetworkSpec};
use vipgate_dataplane::waiting::Questions;
use vipgate_xdp::multicast::AllMulticast;

use super::conflicts;
use super::exhaustion::Shortages;
use super::feed::Feed;
use super::following::{Done, Following, Job, Work};
use super::group::Group;
use super::health::HealthChecks;
use super::kept::Keeper;
use super::services::{self, Services, Signals};
use super::start::ControlBell;
use super::state::{GatewayState, Order};
use super::tracking::Tracking;
use super::workers::Threads;
use crate::config::Config;
use crate::failure::Failure;
use crate::kernel::{Advertiser, LinkStatus, Network, NetworkError, Resolver};
use crate::metrics::Monitored;
use crate::natlog::NatLog;
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
    pub(super) following: Following,
    pub(super) services: Services,
    pub(super) signals: Signals,
    pub(super) questions: Questions,
    pub(super) bell: Arc<ControlBell>,
    pub(super) threads: Threads,
    pub(super) group: Group,
    pub(super) tracking: Tracking,
    /// What workers were told of other gateways.
    pub(super) members: MembersSpec,
    pub(super) orders: mpsc::UnboundedReceiver<Order>,
    pub(super) nat_log: Option<NatLog>,
    pub(super) admin_socket: admin::Socket,
    pub(super) metrics_listener: TcpListener,
    pub(super) _multicast: Vec<AllMulticast>,
    pub(super) _keeper: Keeper,
}

/// Runs a gateway until a signal ends it.
pub(super) async fn follow(gateway: Gateway) -> Result<(), Failure> {
    let Gateway { config, mut feed, network, resolver, admin_socket, metrics_listener, services, mut signals, .. } =
        gateway;
    let state = gateway.following.state.clone();
    let mut parts = Parts {
        state: state.clone(),
        work: Work::new(gateway.following),
        advertiser: gateway.advertiser,
        members: gateway.members,
        nat_log: gateway.nat_log,
        replication_epoch: 0,
        is_regroup_due: false,
    };
    let (mut group, mut tracking, mut orders) = (gateway.group, gateway.tracking, gateway.orders);
    parts.track(&mut tracking, &mut group);
    parts.meet(&mut group).await;
    let mut health = HealthChecks::new(state.clone());
    let (mut measured, mut shortages) = (Instant::now(), Shortages::default());
    let mut threads = gateway.threads;
    let pace = systemd::watchdog_interval().map_or(HOUSEKEEPING, |limit| limit.min(HOUSEKEEPING));
    let mut housekeeping = tokio::time::interval(pace);
    let mut networks = follow_network(network);
    let late = tokio::spawn(state.stalls.clone().watch());

    let (stop, stopped) = watch::channel(false);
    let room = state.rooms.metrics.clone();
    let servers = [
        services.spawn(admin::serve(state.clone(), admin_socket, stopped.clone())),
        services.spawn(metrics::serve(Monitored::gateway(state.clone()), metrics_listener, room, stopped)),
    ];
    state.ready.store(true, Ordering::Relaxed);
    parts.advertise();
    health.follow();
    tracing::info!(event = "ready", name = config.name, workers = state.workers.len(), "ready");
    systemd::ready();

    let end = loop {
        parts.regroup_if_due(&mut group);
        tokio::select! {
            order = signals.next() => match order {
                services::Order::Stop => break Ok(()),
                services::Order::Reload => reload_files(&feed),
            },
            done = parts.work.done() => {
                let is_policy = matches!(done, Done::Policy);
                parts.finish(done, &mut group);
                if is_policy {
                    health.follow();
                }
            }
            event = feed.next(), if parts.work.is_idle() => parts.work.begin(Job::Policy(event)),
            () = group.changed() => parts.is_regroup_due = true,
            () = tracking.changed() => if let Some(end) = parts.follow_tracking(&mut tracking, &mut group) {
                break Err(end);
            },
            Some(order) = orders.recv() => parts.obey(order, &mut group),
            change = networks.recv(), if parts.work.is_idle() => match change {
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
                parts.work.is_settled();
                group.watch_lease();
                health.follow();
                conflicts::follow(&state, Instant::now());
                shortages.follow(&state, Instant::now());
                let since = std::mem::replace(&mut measured, Instant::now());
                measure_rates(&state, since.elapsed());
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
    late.abort();
    // Before anything ends, so that routers send elsewhere what would be lost here.
    parts.advertiser.close().await;
    // The client of a policy server ends when nobody listens to it.
    drop(feed);
    if let Some(client) = gateway.client {
        let _ = tokio::time::timeout(Duration::from_secs(1), client).await;
    }
    group.close().await;
    state.ready.store(false, Ordering::Relaxed);
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

/// What the loop holds of a gateway that follows policy, gateways and network.
struct Parts {
    state: Arc<GatewayState>,
    work: Work,
    advertiser: Advertiser,
    /// What the engine knows of other gateways.
    members: MembersSpec,
    nat_log: Option<NatLog>,
    /// The replication epoch that the engine goes by.
    replication_epoch: u64,
    /// Something is new of gateways, or of the policy that names them.
    is_regroup_due: bool,
}

impl Parts {
    /// Waits until it is known who serves, where that is known by somebody, but not for long.
    async fn meet(&mut self, group: &mut Group) {
        if let Some(following) = self.work.idle() {
            following.announce(None);
        }
        let until = tokio::time::Instant::now() + MEETING;
        loop {
            self.is_regroup_due = true;
            self.regroup_if_due(group);
            while !self.work.is_idle() {
                let done = self.work.done().await;
                self.finish(done, group);
            }
            if !group.is_unknown() || tokio::time::timeout_at(until, group.changed()).await.is_err() {
                return;
            }
        }
    }

    fn obey(&mut self, order: Order, group: &mut Group) {
        let Order::Drain(draining) = order;
        tracing::info!(event = "drain", draining, "told to {}", if draining { "stop serving" } else { "serve again" });
        group.set_draining(draining);
        self.is_regroup_due = true;
    }

    /// Takes in how interfaces and next hops stand.
    fn track(&self, tracking: &mut Tracking, group: &mut Group) {
        let (network, policy) = (self.state.network.load(), self.state.compiled.load());
        let status = tracking.settle(&network, &policy, Instant::now());
        group.set_unable(status.unable.clone());
        self.state.tracking.store(Arc::new(status));
    }

    /// The same, and what follows of it for the group; or why this process has to end.
    fn follow_tracking(&mut self, tracking: &mut Tracking, group: &mut Group) -> Option<Failure> {
        self.track(tracking, group);
        // At once, also while a job is being done: others are to serve in its place.
        group.wish();
        self.is_regroup_due = true;
        let status = self.state.tracking.load();
        let made_anew = |link: &LinkStatus| {
            Failure::runtime(format_args!(
                "interface {} was made anew: this process ends, so that the next one takes up the new device and the sessions \
                 (systemd starts it at once)",
                link.name
            ))
        };
        status.recreated().map(made_anew)
    }

    /// Takes in how gateways stand, as soon as nothing else is being done.
    fn regroup_if_due(&mut self, group: &mut Group) {
        if !self.is_regroup_due || !self.work.is_idle() {
            return;
        }
        self.is_regroup_due = false;
        group.set_policy(&self.state.policy.load().peers);
        let spec = group.settle(Instant::now());
        if spec != self.members {
            self.work.begin(Job::Members(spec));
        } else if group.is_behind() {
            group.told(false);
        }
        if group.is_pending() && self.work.is_settled() {
            group.acts();
        }
        group.wish();
        group.watch_lease();
        self.state.group.store(Arc::new(group.status(&self.members)));
    }

    /// Takes in what was done.
    fn finish(&mut self, done: Done, group: &mut Group) {
        // Whoever is to have sessions by now that it wasn't to have before is told all, whether that follows of a view or of policy.
        let epoch = self.state.compiled.load().members().replication_epoch();
        let has_moved = std::mem::replace(&mut self.replication_epoch, epoch) != epoch;
        match done {
            Done::Policy if has_moved => group.told(true),
            Done::Policy => {}
            Done::Members(spec) => {
                let moved = has_moved || serving(&spec) != serving(&self.members);
                tracing::info!(event = "group", serving = ?serving(&spec), "who serves, or how, has changed");
                self.members = spec;
                group.told(moved);
            }
            Done::Network => return,
        }
        if let Some(log) = &self.nat_log {
            log.put(&self.state.compiled.load_full());
        }
        self.advertise();
        self.is_regroup_due = true;
    }

    /// Takes in another network: at once, but where the steering program must learn addresses, too.
    fn network_changed(&mut self, spec: Arc<NetworkSpec>) {
        match self.work.idle() {
            Some(following) if following.has_same_locals(&spec) => following.network_changed(spec),
            _ => self.work.begin(Job::Network(spec)),
        }
    }

    /// Lets a BGP daemon announce what is served here: VIPs that routing announces, once the gateway is ready.
    fn advertise(&self) {
        let policy = self.state.compiled.load();
        let served = policy.vips().filter(|vip| vip.is_ours() && vip.announce == Announce::Bgp);
        self.advertiser.set(served.map(|vip| vip.address).collect());
    }
}

/// The gateways that serve, as the engine was told.
fn serving(spec: &MembersSpec) -> Vec<&str> {
    spec.gateways.iter().filter(|member| member.serving).map(|member| &*member.name).collect()
}
