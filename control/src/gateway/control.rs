//! The control loop: waits for one event at a time and handles it. Long jobs run on blocking threads, see
//! `reconciler.rs`.

mod housekeeping;
mod membership;
mod shutdown;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::sleep_until;
use vipgate_common::Tasks;
use vipgate_dataplane::policy::spec::{Announce, NetworkSpec};
use vipgate_xdp::multicast::AllMulticast;

pub(super) use self::housekeeping::Housekeeping;
pub(super) use self::membership::Membership;
use super::tracking::Tracking;
use super::workers::WorkerThreads;
use crate::command_error::CommandError;
use crate::config::Config;
use crate::gateway::background::{BackgroundRuntime, SignalAction, Signals};
use crate::gateway::interface_lock::InterfaceLocks;
use crate::gateway::neighbors::NeighborRequests;
use crate::gateway::policy_source::PolicySubscription;
use crate::gateway::reconciler::{Job, JobResult, ReconcilerTask};
use crate::gateway::servers::Servers;
use crate::gateway::session_store::SessionStore;
use crate::kernel::{Advertiser, Network, NetworkError, Resolver};
use crate::natlog::NatLog;
use crate::state::{ControlCommand, GatewayState};
use crate::systemd;
use crate::xds::client::ClientEvent;

/// A started gateway, and the state of its control loop.
pub(super) struct ControlLoop {
    pub(super) config: Config,
    pub(super) state: Arc<GatewayState>,
    // What delivers events.
    pub(super) signals: Signals,
    pub(super) subscription: PolicySubscription,
    pub(super) network_changes: mpsc::Receiver<Result<Arc<NetworkSpec>, NetworkError>>,
    pub(super) commands: mpsc::UnboundedReceiver<ControlCommand>,
    pub(super) neighbors: NeighborRequests,
    pub(super) tracking: Tracking,
    pub(super) membership: Membership,
    pub(super) housekeeping: Housekeeping,
    // What events change.
    pub(super) reconciler: ReconcilerTask,
    pub(super) advertiser: Advertiser,
    pub(super) resolver: Resolver,
    pub(super) nat_log: Option<NatLog>,
    // What runs beside the control thread.
    pub(super) servers: Servers,
    pub(super) threads: WorkerThreads,
    pub(super) tasks: Tasks,
    pub(super) _background: BackgroundRuntime,
    pub(super) _locks: InterfaceLocks,
    pub(super) _multicast: Vec<AllMulticast>,
    pub(super) _session_store: SessionStore,
}

/// What the control loop waits for.
enum LoopEvent {
    Signal(SignalAction),
    /// The job of the reconciler has completed.
    JobCompleted(JobResult),
    /// The policy source has an update, while no job is running.
    Policy(ClientEvent),
    /// A view, a peer link or a deadline of membership.
    Membership,
    /// A link, a next hop, an XDP program or a deadline of tracking.
    Tracking,
    /// A command of the admin socket.
    Command(ControlCommand),
    /// The network has changed, while no job is running; `None`: it is no longer followed.
    Network(Option<Result<Arc<NetworkSpec>, NetworkError>>),
    /// Workers have requested neighbors.
    Neighbors,
    /// What the steering program's maps couldn't take is due to be retried, while no job is running.
    Retry,
    Housekeeping,
}

/// How much longer the start may take while policy waits for the kernel, or the gateway for its membership.
const STARTUP_EXTENSION: Duration = Duration::from_mins(1);

/// The end of the loop: stopped by a signal, or an error.
type End = Result<(), CommandError>;

impl ControlLoop {
    /// Runs a gateway until a signal ends it.
    ///
    /// # Errors
    /// When the gateway can't go on: a worker has died, an interface was recreated or has other queues, the network is
    /// no longer followed.
    pub(super) async fn run(mut self) -> Result<(), CommandError> {
        self.update_tracking();
        self.await_membership().await;
        self.housekeeping.start();
        let end = loop {
            self.update_membership_if_due();
            self.report_ready_once_forwarding();
            let event = self.next_event().await;
            if let ControlFlow::Break(end) = self.handle(event) {
                break end;
            }
        };
        self.shut_down(end).await
    }

    /// Reports that the gateway forwards packets, unless it has already, or doesn't yet: its steering program is still
    /// closed, or it waits for the policy server or its peers.
    fn report_ready_once_forwarding(&mut self) {
        let is_ready = self.state.ready.load(Ordering::Relaxed);
        if is_ready || !self.reconciler.is_open() || !self.membership.group.forwards() {
            return;
        }
        self.state.ready.store(true, Ordering::Relaxed);
        self.advertise();
        self.housekeeping.update_health_checks();
        tracing::info!(event = "ready", name = self.config.name, workers = self.state.workers().len(), "ready");
        systemd::ready();
    }

    async fn next_event(&mut self) -> LoopEvent {
        let is_idle = self.reconciler.is_idle();
        let retry_at = self.reconciler.retry_at();
        tokio::select! {
            signal = self.signals.next() => LoopEvent::Signal(signal),
            result = self.reconciler.completed() => LoopEvent::JobCompleted(result),
            event = self.subscription.next(), if is_idle => LoopEvent::Policy(event),
            () = self.membership.group.changed() => LoopEvent::Membership,
            () = self.tracking.changed() => LoopEvent::Tracking,
            Some(command) = self.commands.recv() => LoopEvent::Command(command),
            change = self.network_changes.recv(), if is_idle => LoopEvent::Network(change),
            () = self.neighbors.queued() => LoopEvent::Neighbors,
            () = sleep_until(retry_at.unwrap_or_else(Instant::now).into()), if retry_at.is_some() => LoopEvent::Retry,
            () = self.housekeeping.due() => LoopEvent::Housekeeping,
        }
    }

    fn handle(&mut self, event: LoopEvent) -> ControlFlow<End> {
        match event {
            LoopEvent::Signal(SignalAction::Stop) => return ControlFlow::Break(Ok(())),
            LoopEvent::Signal(SignalAction::Reload) => self.reload_files(),
            LoopEvent::JobCompleted(result) => self.finish_job(result),
            LoopEvent::Policy(event) => self.reconciler.start(Job::Policy(event)),
            LoopEvent::Membership => self.membership.is_due = true,
            LoopEvent::Tracking => return self.handle_tracking_change(),
            LoopEvent::Command(command) => self.handle_command(command),
            LoopEvent::Network(Some(Ok(spec))) => self.apply_network(spec),
            LoopEvent::Network(Some(Err(error))) => return ControlFlow::Break(Err(CommandError::runtime(error))),
            LoopEvent::Network(None) => {
                return ControlFlow::Break(Err(CommandError::runtime("the network watch has ended")));
            }
            LoopEvent::Retry => self.reconciler.start(Job::Retry),
            LoopEvent::Neighbors => self.neighbors.resolve(&self.resolver),
            LoopEvent::Housekeeping => return self.keep_house(),
        }
        ControlFlow::Continue(())
    }

    /// Reloads policy files, if there are any, in a task of its own.
    fn reload_files(&self) {
        tracing::info!(event = "reload", "SIGHUP: reloading policy files");
        systemd::reloading();
        let files = self.subscription.files.clone();
        self.tasks.spawn_until_stopped("reload", async move {
            if let Some(files) = files {
                files.reload().await;
            }
            systemd::ready();
        });
    }

    fn handle_command(&mut self, command: ControlCommand) {
        let ControlCommand::SetDraining(draining) = command;
        let command = if draining { "drain" } else { "undrain" };
        tracing::info!(event = "drain", draining, "{command} requested");
        self.membership.group.set_draining(draining);
        self.membership.is_due = true;
    }

    /// Updates the status of interfaces and next hops.
    fn update_tracking(&mut self) {
        let (network, policy) = (self.state.network.load(), self.state.compiled.load());
        let status = self.tracking.update(&network, &policy, Instant::now());
        self.membership.group.set_unable(status.unable.clone());
        self.state.tracking.store(Arc::new(status));
    }

    /// Updates the status of interfaces and next hops, and the desired state in the group.
    fn handle_tracking_change(&mut self) -> ControlFlow<End> {
        self.update_tracking();
        self.membership.is_due = true;
        match self.state.tracking.load().restart_reason() {
            Some(reason) => ControlFlow::Break(Err(CommandError::runtime(reason))),
            None => ControlFlow::Continue(()),
        }
    }

    /// Handles the result of a job.
    fn finish_job(&mut self, result: JobResult) {
        let is_policy = matches!(result, JobResult::Policy);
        self.record_result(result);
        if is_policy {
            self.housekeeping.update_health_checks();
        }
    }

    /// Applies a network change: at once, or as a job if local addresses have changed and the steering maps must
    /// follow.
    fn apply_network(&mut self, spec: Arc<NetworkSpec>) {
        match self.reconciler.idle() {
            Some(reconciler) if reconciler.has_same_local_addresses(&spec) => reconciler.apply_network(spec),
            _ => self.reconciler.start(Job::Network(spec)),
        }
    }

    /// Updates the routes for the BGP daemon: the VIPs with `announce: BGP` that this gateway owns.
    fn advertise(&self) {
        let policy = self.state.compiled.load();
        let advertised = policy.vips().filter(|vip| vip.is_ours() && vip.announce == Announce::Bgp);
        self.advertiser.set(advertised.map(|vip| vip.address).collect());
    }

    /// Periodic checks: snapshots, lease, counters of the workers, worker threads.
    fn keep_house(&mut self) -> ControlFlow<End> {
        self.reconciler.is_converged();
        self.membership.group.log_lease_changes();
        self.membership.group.report_sessions(self.state.sum(|counters| counters.sessions.get()));
        self.housekeeping.run();
        if !self.threads.are_alive() {
            return ControlFlow::Break(Err(CommandError::runtime("a worker thread died; see the log")));
        }
        if !self.state.ready.load(Ordering::Relaxed) {
            let reason = if self.reconciler.is_open() {
                "waits for the policy server, or for the other gateways"
            } else {
                "policy waits for the XDP program's maps"
            };
            systemd::extend_startup(reason, STARTUP_EXTENSION);
        }
        // Watchdog: this loop and all workers are alive.
        systemd::notify_watchdog();
        ControlFlow::Continue(())
    }
}

/// Follows the network in a task of its own, also while the control loop is busy.
pub(super) fn follow_network(
    mut network: Network,
    tasks: &Tasks,
) -> mpsc::Receiver<Result<Arc<NetworkSpec>, NetworkError>> {
    let (sender, receiver) = mpsc::channel(1);
    tasks.spawn_until_stopped("network", async move {
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
