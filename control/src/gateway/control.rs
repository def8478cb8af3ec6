//! The control thread's loop: policy, network, questions for neighbours, signals.
//!
//! A change of policy captures first what is new, then lets workers use it, then lets go what is gone: in between, a
//! packet may be dropped but never leaves untranslated.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use vipgate_dataplane::command::Command;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::snapshot::spec::{Announce, NetworkSpec, PolicySet};
use vipgate_dataplane::waiting::Questions;
use vipgate_xdp::multicast::AllMulticast;
use vipgate_xdp::steering::Steering;

use super::capture;
use super::kept::Keeper;
use super::start::ControlBell;
use super::state::{GatewayState, PolicyStatus};
use super::workers::Threads;
use crate::config::Config;
use crate::failure::Failure;
use crate::kernel::{Network, NetworkError, Resolver};
use crate::manifest::Foreign;
use crate::policy::{Follower, Options, compile_files};
use crate::{admin, metrics, systemd};

/// How often the control thread looks after itself: frees old snapshots, sees that workers live.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// A gateway that stands.
pub(super) struct Gateway {
    pub(super) config: Config,
    pub(super) paths: Vec<PathBuf>,
    pub(super) options: Options,
    pub(super) follower: Follower,
    pub(super) network: Network,
    pub(super) resolver: Resolver,
    pub(super) builder: Builder,
    pub(super) publisher: Publisher,
    pub(super) steering: Arc<Mutex<Steering>>,
    pub(super) questions: Questions,
    pub(super) bell: Arc<ControlBell>,
    pub(super) threads: Threads,
    pub(super) state: Arc<GatewayState>,
    pub(super) admin_socket: admin::Socket,
    pub(super) metrics_listener: TcpListener,
    pub(super) _multicast: Vec<AllMulticast>,
    pub(super) _keeper: Keeper,
}

/// Runs a gateway until a signal ends it.
pub(super) async fn follow(gateway: Gateway) -> Result<(), Failure> {
    let Gateway { config, paths, options, network, resolver, admin_socket, metrics_listener, .. } = gateway;
    let mut parts = Following {
        builder: gateway.builder,
        publisher: gateway.publisher,
        steering: gateway.steering,
        state: gateway.state,
        locals: network.current().locals.clone(),
    };
    let mut threads = gateway.threads;
    let no_signals = |error| Failure::runtime(format_args!("cannot listen to signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut reload = signal(SignalKind::hangup()).map_err(no_signals)?;
    let mut files = follow_files(gateway.follower);
    let pace = systemd::watchdog_interval().map_or(HOUSEKEEPING, |limit| limit.min(HOUSEKEEPING));
    let mut housekeeping = tokio::time::interval(pace);
    let mut networks = follow_network(network);

    let (stop, stopped) = watch::channel(false);
    let servers = [
        tokio::spawn(admin::serve(parts.state.clone(), admin_socket, stopped.clone())),
        tokio::spawn(metrics::serve(parts.state.clone(), metrics_listener, stopped)),
    ];
    parts.state.ready.store(true, Ordering::Relaxed);
    tracing::info!(event = "ready", name = config.name, workers = parts.state.workers.len(), "ready");
    systemd::ready();

    let end = loop {
        tokio::select! {
            _ = terminate.recv() => break Ok(()),
            _ = interrupt.recv() => break Ok(()),
            _ = reload.recv() => {
                tracing::info!(event = "reload", "SIGHUP: reading the policy again");
                systemd::reloading();
                parts.policy_changed(&paths, &options);
                systemd::ready();
            }
            Some(()) = files.recv() => parts.policy_changed(&paths, &options),
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
    parts.state.ready.store(false, Ordering::Relaxed);
    // Servers have nothing to lose: whoever asks now hears that nobody is there.
    let _ = stop.send(true);
    for server in servers {
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
    }
    let all_well = threads.stop();
    resolver.close().await;
    if !all_well && end.is_ok() {
        return Err(Failure::runtime("a worker thread died; see the log"));
    }
    tracing::info!(event = "stopped", on_exit = ?config.xdp.on_exit, "stopped");
    end
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

/// Follows the policy's files in a task of its own.
fn follow_files(mut follower: Follower) -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            follower.changed().await;
            if sender.send(()).await.is_err() {
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
    locals: Vec<IpAddr>,
}

impl Following {
    fn policy_changed(&mut self, paths: &[PathBuf], options: &Options) {
        let compiled = compile_files(paths, Foreign::Ignore, options);
        let status = self.state.policy.load_full();
        match compiled.accept() {
            Ok((set, _)) if set == *status.set && status.last_error.is_none() => {}
            Ok((set, warnings)) => {
                for warning in &warnings {
                    tracing::warn!(event = "policy_warning", "{warning}");
                }
                if let Err(reason) = self.put_in_force(set) {
                    self.reject(&reason);
                }
            }
            Err(complaints) => self.reject(&complaints.to_string()),
        }
    }

    fn put_in_force(&mut self, set: PolicySet) -> Result<(), String> {
        let before = self.state.policy.load_full();
        let snapshot = self.builder.with_policy(&set).map_err(|error| error.to_string())?;
        let (generation, compiled) = (snapshot.generation, snapshot.policy.clone());
        let wanted = capture::tables(&set, &self.locals);
        {
            let mut steering = self.steering.lock().unwrap_or_else(PoisonError::into_inner);
            // What is new is captured before workers know it, and what is gone until they have forgotten it.
            let mut both = capture::tables(&before.set, &self.locals);
            both.endpoints.extend(wanted.endpoints.clone());
            both.vips.extend(wanted.vips.clone());
            both.cidrs.clone_from(&wanted.cidrs);
            steering.apply(both).map_err(|error| error.to_string())?;
            self.publisher.publish(snapshot);
            if let Err(error) = steering.apply(wanted) {
                tracing::error!(%error, "what policy no longer covers is still captured; the next change tries again");
            }
        }
        let known: BTreeSet<IpAddr> = before.set.vips.iter().map(|vip| vip.address).collect();
        tracing::info!(
            event = "policy",
            version = set.version,
            generation,
            vips = set.vips.len(),
            endpoints = set.endpoints.len(),
            "policy in force"
        );
        self.state.policy.store(Arc::new(PolicyStatus {
            set: Arc::new(set),
            generation,
            applied_at: SystemTime::now(),
            updates_applied: before.updates_applied + 1,
            last_error: None,
            ..(*before).clone()
        }));
        self.state.compiled.store(compiled);
        announce(&self.state, Some(&known));
        Ok(())
    }

    fn reject(&self, reason: &str) {
        let before = self.state.policy.load_full();
        if before.last_error.as_deref() == Some(reason) {
            return;
        }
        tracing::error!(event = "policy_rejected", "policy rejected, the last good one stays in force:\n{reason}");
        self.state.policy.store(Arc::new(PolicyStatus {
            updates_rejected: before.updates_rejected + 1,
            last_error: Some(reason.to_owned()),
            ..(*before).clone()
        }));
    }

    fn network_changed(&mut self, spec: Arc<NetworkSpec>) {
        if spec.locals != self.locals {
            self.locals.clone_from(&spec.locals);
            let wanted = capture::tables(&self.state.policy.load().set, &self.locals);
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

/// Lets the first worker announce the VIPs that the gateway has taken over: all but those that are `known` already.
pub(super) fn announce(state: &GatewayState, known: Option<&BTreeSet<IpAddr>>) {
    let policy = state.policy.load();
    let ours = policy.set.vips.iter().filter(|vip| vip.announce == Announce::L2).map(|vip| vip.address);
    let new: Vec<IpAddr> = ours.filter(|address| known.is_none_or(|known| !known.contains(address))).collect();
    let Some(first) = state.workers.first() else { return };
    if !new.is_empty() && first.commands.try_send(Command::Announce(new)).is_err() {
        tracing::warn!("the first worker is too busy to announce VIPs; neighbours will ask for them");
    }
    first.doorbell.wake();
}
