//! The control loop: signals, policy, membership, network and neighbor requests. Long jobs run on blocking threads, see
//! `reconciler.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use vipgate_dataplane::policy::members::MembersSpec;
use vipgate_dataplane::policy::spec::{Announce, NetworkSpec};
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;
use vipgate_xdp::multicast::AllMulticast;

use super::group::Group;
use super::tracking::Tracking;
use super::workers::WorkerThreads;
use crate::command_error::CommandError;
use crate::config::Config;
use crate::gateway::background::{BackgroundRuntime, Signals};
use crate::gateway::health_checks::HealthChecks;
use crate::gateway::policy_source::PolicySubscription;
use crate::gateway::port_exhaustion::PortExhaustionLog;
use crate::gateway::reconciler::{Job, JobResult, Reconciler, ReconcilerTask};
use crate::gateway::session_store::SessionStore;
use crate::gateway::startup::ControlDoorbell;
use crate::gateway::{address_conflicts, background};
use crate::kernel::{Advertiser, LinkStatus, Network, NetworkError, Resolver};
use crate::metrics::Monitored;
use crate::natlog::NatLog;
use crate::state::{ControlCommand, GatewayState};
use crate::{admin, metrics, systemd};

/// Interval of housekeeping: frees old snapshots, checks that the workers are alive.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum wait at startup for the membership authority.
const MEMBERSHIP_TIMEOUT: Duration = Duration::from_secs(2);

/// A started gateway.
pub(super) struct Gateway {
    pub(super) config: Config,
    pub(super) subscription: PolicySubscription,
    pub(super) client: Option<JoinHandle<()>>,
    pub(super) network: Network,
    pub(super) advertiser: Advertiser,
    pub(super) resolver: Resolver,
    pub(super) reconciler: Reconciler,
    pub(super) background: BackgroundRuntime,
    pub(super) signals: Signals,
    pub(super) neighbor_requests: ResolutionRequests,
    pub(super) doorbell: Arc<ControlDoorbell>,
    pub(super) threads: WorkerThreads,
    pub(super) group: Group,
    pub(super) tracking: Tracking,
    /// The membership that was published to the workers.
    pub(super) members: MembersSpec,
    pub(super) commands: mpsc::UnboundedReceiver<ControlCommand>,
    pub(super) nat_log: Option<NatLog>,
    pub(super) admin_socket: admin::Socket,
    pub(super) metrics_listener: TcpListener,
    pub(super) _multicast: Vec<AllMulticast>,
    pub(super) _session_store: SessionStore,
}

/// Starts the resolution of the neighbors that workers have requested.
fn resolve_neighbors(requests: &ResolutionRequests, resolver: &Resolver) {
    while let Some(request) = requests.queue.pop() {
        // Fails when too many are in progress; workers repeat the request.
        resolver.resolve(request.interface, request.address);
    }
}

/// Reads what the workers have counted since the last time.
fn poll_workers(state: &GatewayState, shortages: &mut PortExhaustionLog, now: Instant, elapsed: Duration) {
    address_conflicts::poll(state, now);
    shortages.update(state, now);
    measure_rates(state, elapsed);
}

/// Runs a gateway until a signal ends it.
pub(super) async fn run(gateway: Gateway) -> Result<(), CommandError> {
    let Gateway { config, mut subscription, network, resolver, background, mut signals, .. } = gateway;
    let state = gateway.reconciler.state.clone();
    let mut control = ControlLoop {
        state: state.clone(),
        work: ReconcilerTask::new(gateway.reconciler),
        advertiser: gateway.advertiser,
        members: gateway.members,
        nat_log: gateway.nat_log,
        replication_epoch: 0,
        is_membership_due: false,
    };
    let (mut group, mut tracking, mut commands) = (gateway.group, gateway.tracking, gateway.commands);
    control.track(&mut tracking, &mut group);
    control.await_membership(&mut group).await;
    let mut health = HealthChecks::new(state.clone());
    let (mut rates_measured, mut shortages) = (Instant::now(), PortExhaustionLog::default());
    let mut threads = gateway.threads;
    let interval = systemd::watchdog_interval().map_or(HOUSEKEEPING_INTERVAL, |limit| limit.min(HOUSEKEEPING_INTERVAL));
    let mut housekeeping = tokio::time::interval(interval);
    let mut networks = follow_network(network);
    let stall_watch = tokio::spawn(state.stalls.clone().measure());

    let (stop, stopped) = watch::channel(false);
    let connections = state.connections.metrics.clone();
    let servers = [
        background.spawn(admin::serve(state.clone(), gateway.admin_socket, stopped.clone())),
        background.spawn(metrics::serve(
            Monitored::gateway(state.clone()),
            gateway.metrics_listener,
            connections,
            stopped,
        )),
    ];
    state.ready.store(true, Ordering::Relaxed);
    control.advertise();
    health.update();
    tracing::info!(event = "ready", name = config.name, workers = state.workers.len(), "ready");
    systemd::ready();

    let end = loop {
        control.update_membership_if_due(&mut group);
        tokio::select! {
            signal = signals.next() => match signal {
                background::SignalAction::Stop => break Ok(()),
                background::SignalAction::Reload => reload_files(&subscription),
            },
            result = control.work.completed() => {
                let is_policy = matches!(result, JobResult::Policy);
                control.finish_job(result, &mut group);
                if is_policy {
                    health.update();
                }
            }
            event = subscription.next(), if control.work.is_idle() => control.work.start(Job::Policy(event)),
            () = group.changed() => control.is_membership_due = true,
            () = tracking.changed() => if let Some(end) = control.handle_tracking_change(&mut tracking, &mut group) {
                break Err(end);
            },
            Some(command) = commands.recv() => control.handle_command(command, &mut group),
            change = networks.recv(), if control.work.is_idle() => match change {
                Some(Ok(spec)) => control.apply_network(spec),
                Some(Err(error)) => break Err(CommandError::runtime(error)),
                None => break Err(CommandError::runtime("the network watch has ended")),
            },
            () = gateway.doorbell.0.notified() => {
                resolve_neighbors(&gateway.neighbor_requests, &resolver);
            }
            _ = housekeeping.tick() => {
                control.work.is_converged();
                group.log_lease_changes();
                health.update();
                let now = Instant::now();
                poll_workers(&state, &mut shortages, now, now - std::mem::replace(&mut rates_measured, now));
                if !threads.are_alive() {
                    break Err(CommandError::runtime("a worker thread died; see the log"));
                }
                // Watchdog: this loop and all workers are alive.
                systemd::notify_watchdog();
            }
        }
    };
    tracing::info!(event = "stopping", "stopping");
    systemd::stopping();
    stall_watch.abort();
    // First, so that routers stop sending traffic here.
    control.advertiser.close().await;
    // The policy server's client ends when its receiver is dropped.
    drop(subscription);
    if let Some(client) = gateway.client {
        let _ = tokio::time::timeout(Duration::from_secs(1), client).await;
    }
    group.close().await;
    state.ready.store(false, Ordering::Relaxed);
    let _ = stop.send(true);
    close(servers).await;
    let none_panicked = threads.stop();
    NatLog::close(control.nat_log).await;
    resolver.close().await;
    if !none_panicked && end.is_ok() {
        return Err(CommandError::runtime("a worker thread died; see the log"));
    }
    tracing::info!(event = "stopped", on_exit = ?config.xdp.on_exit, "stopped");
    end
}

/// Reloads policy files, if there are any, in a task of its own.
fn reload_files(subscription: &PolicySubscription) {
    tracing::info!(event = "reload", "SIGHUP: reloading policy files");
    systemd::reloading();
    let files = subscription.files.clone();
    tokio::spawn(async move {
        if let Some(files) = files {
            files.reload().await;
        }
        systemd::ready();
    });
}

/// Waits for servers to end, at most one second each.
async fn close(servers: [JoinHandle<()>; 2]) {
    for server in servers {
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
    }
}

/// Computes the rate of new sessions of each backend.
fn measure_rates(state: &GatewayState, elapsed: Duration) {
    let ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    for service in state.compiled.load().services() {
        service.backend_usage().for_each(|(_, usage)| usage.measure(ms));
    }
}

/// Watches the network in a task of its own, also while the control loop is busy.
fn follow_network(mut network: Network) -> mpsc::Receiver<Result<Arc<NetworkSpec>, NetworkError>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let change = network.changed().await;
            let failed = change.is_err();
            // The receiver is dropped when the gateway stops.
            if sender.send(change).await.is_err() || failed {
                return;
            }
        }
    });
    receiver
}

/// State of the control loop.
struct ControlLoop {
    state: Arc<GatewayState>,
    work: ReconcilerTask,
    advertiser: Advertiser,
    /// The membership that was published to the workers.
    members: MembersSpec,
    nat_log: Option<NatLog>,
    /// The replication epoch of the latest snapshot.
    replication_epoch: u64,
    /// The membership, or the policy that names its members, has changed.
    is_membership_due: bool,
}

impl ControlLoop {
    /// Waits until the membership authority has responded, or [`MEMBERSHIP_TIMEOUT`] has passed.
    async fn await_membership(&mut self, group: &mut Group) {
        if let Some(reconciler) = self.work.idle() {
            reconciler.announce(None);
        }
        let deadline = tokio::time::Instant::now() + MEMBERSHIP_TIMEOUT;
        loop {
            self.is_membership_due = true;
            self.update_membership_if_due(group);
            while !self.work.is_idle() {
                let result = self.work.completed().await;
                self.finish_job(result, group);
            }
            if !group.is_authority_unknown() || tokio::time::timeout_at(deadline, group.changed()).await.is_err() {
                return;
            }
        }
    }

    fn handle_command(&mut self, command: ControlCommand, group: &mut Group) {
        let ControlCommand::SetDraining(draining) = command;
        let command = if draining { "drain" } else { "undrain" };
        tracing::info!(event = "drain", draining, "{command} requested");
        group.set_draining(draining);
        self.is_membership_due = true;
    }

    /// Updates the status of interfaces and next hops.
    fn track(&self, tracking: &mut Tracking, group: &mut Group) {
        let (network, policy) = (self.state.network.load(), self.state.compiled.load());
        let status = tracking.update(&network, &policy, Instant::now());
        group.set_unable(status.unable.clone());
        self.state.tracking.store(Arc::new(status));
    }

    /// Updates the status of interfaces and next hops, and the desired state in the group. Returns an error if this
    /// process has to end.
    fn handle_tracking_change(&mut self, tracking: &mut Tracking, group: &mut Group) -> Option<CommandError> {
        self.track(tracking, group);
        // Also while a job is running: another gateway has to become active in its place.
        group.publish_desired_state();
        self.is_membership_due = true;
        let status = self.state.tracking.load();
        let recreated = |link: &LinkStatus| {
            CommandError::runtime(format!(
                "interface {} was recreated: the process exits, so that the next one uses the new device and restores \
                 the sessions (systemd restarts it at once)",
                link.name
            ))
        };
        status.recreated().map(recreated)
    }

    /// Updates the membership if it may have changed and no job is running.
    fn update_membership_if_due(&mut self, group: &mut Group) {
        if !self.is_membership_due || !self.work.is_idle() {
            return;
        }
        self.is_membership_due = false;
        group.set_policy(&self.state.policy.load().peers);
        let spec = group.update(Instant::now());
        if spec != self.members {
            self.work.start(Job::Members(spec));
        } else if group.has_unapplied_view() {
            group.mark_pending(false);
        }
        if group.is_pending() && self.work.is_converged() {
            group.mark_applied();
        }
        group.publish_desired_state();
        group.log_lease_changes();
        self.state.group.store(Arc::new(group.status(&self.members)));
    }

    /// Handles the result of a job.
    fn finish_job(&mut self, result: JobResult, group: &mut Group) {
        // A new replication epoch: other replica targets than before need a full sync, be it due to a view or to
        // policy.
        let epoch = self.state.compiled.load().members().replication_epoch();
        let is_new_epoch = std::mem::replace(&mut self.replication_epoch, epoch) != epoch;
        match result {
            JobResult::Policy if is_new_epoch => group.mark_pending(true),
            JobResult::Policy => {}
            JobResult::Members(spec) => {
                let needs_sync = is_new_epoch || active(&spec) != active(&self.members);
                tracing::info!(event = "group", serving = ?active(&spec), "membership changed");
                self.members = spec;
                group.mark_pending(needs_sync);
            }
            JobResult::Network => return,
        }
        if let Some(log) = &self.nat_log {
            log.set_policy(&self.state.compiled.load_full());
        }
        self.advertise();
        self.is_membership_due = true;
    }

    /// Applies a network change: at once, or as a job if local addresses have changed and the steering maps must
    /// follow.
    fn apply_network(&mut self, spec: Arc<NetworkSpec>) {
        match self.work.idle() {
            Some(reconciler) if reconciler.has_same_local_addresses(&spec) => reconciler.apply_network(spec),
            _ => self.work.start(Job::Network(spec)),
        }
    }

    /// Updates the routes for the BGP daemon: the VIPs with `announce: BGP` that this gateway owns.
    fn advertise(&self) {
        let policy = self.state.compiled.load();
        let advertised = policy.vips().filter(|vip| vip.is_ours() && vip.announce == Announce::Bgp);
        self.advertiser.set(advertised.map(|vip| vip.address).collect());
    }
}

/// Names of the active members.
fn active(spec: &MembersSpec) -> Vec<&str> {
    spec.gateways.iter().filter(|member| member.active).map(|member| &*member.name).collect()
}
