//! What follows policy, gateways and network: builds snapshots, and puts them in force. A policy of ten thousand Services takes some
//! hundred milliseconds, and so does what follows of a gateway's death where there are many; so the control thread lends it to a thread
//! that may take its time ([`Work`]), one change after the other, and goes on answering signals, neighbours and leases.
//!
//! A change of policy captures first what is new, then lets workers use it, then lets go what is gone: in between, a
//! packet may be dropped but never leaves untranslated.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::task::{JoinHandle, spawn_blocking};
use vipgate_dataplane::command::Command;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::check::BuildError;
use vipgate_dataplane::snapshot::members::MembersSpec;
use vipgate_dataplane::snapshot::publish::Publisher;
use vipgate_dataplane::snapshot::spec::{Announce, NetworkSpec};
use vipgate_xdp::steering::Steering;

use super::capture;
use super::state::{GatewayState, PolicyStatus};
use crate::source::intake::finished;
use crate::xds::book::Offer;
use crate::xds::client::{Event, Rejection};

/// What may take its time.
#[derive(Debug)]
pub(super) enum Job {
    /// What the source of policy says.
    Policy(Event),
    /// How gateways stand.
    Members(MembersSpec),
    /// A network with other addresses of the node's own.
    Network(Arc<NetworkSpec>),
}

/// What was done.
#[derive(Debug)]
pub(super) enum Done {
    /// Another policy may be in force.
    Policy,
    /// Workers were told how gateways stand.
    Members(MembersSpec),
    /// They were told of the network.
    Network,
}

/// What follows policy and network.
pub(super) struct Following {
    pub(super) builder: Builder,
    pub(super) publisher: Publisher,
    pub(super) steering: Arc<Mutex<Steering>>,
    pub(super) state: Arc<GatewayState>,
    pub(super) locals: Vec<IpAddr>,
    /// Where tunnels of other gateways and of nodes end.
    pub(super) tunnels: Vec<SocketAddr>,
}

/// Its place: with the control thread, or lent to a thread that does a job.
pub(super) struct Work {
    here: Option<Box<Following>>,
    away: Option<JoinHandle<(Box<Following>, Done)>>,
}

impl Work {
    pub(super) fn new(following: Following) -> Self {
        Self { here: Some(Box::new(following)), away: None }
    }

    /// What follows, unless a job is being done.
    pub(super) fn idle(&mut self) -> Option<&mut Following> {
        self.here.as_deref_mut()
    }

    /// Whether no job is being done.
    pub(super) fn is_idle(&self) -> bool {
        self.here.is_some()
    }

    /// Begins a job; only where none is being done.
    pub(super) fn begin(&mut self, job: Job) {
        let Some(mut following) = self.here.take() else { return };
        self.away = Some(spawn_blocking(move || {
            let done = following.run(job);
            (following, done)
        }));
    }

    /// Waits until the job is done; for ever if there is none. May be dropped and called again.
    pub(super) async fn done(&mut self) -> Done {
        let Some(away) = &mut self.away else { return std::future::pending().await };
        let (following, done) = finished(away.await);
        (self.here, self.away) = (Some(following), None);
        done
    }

    /// Whether no worker goes by an older snapshot than the last one. Frees those that none reads any more, beside this thread.
    pub(super) fn is_settled(&mut self) -> bool {
        let Some(following) = &mut self.here else { return false };
        let unread = following.publisher.take_unread();
        if !unread.is_empty() {
            spawn_blocking(move || drop(unread));
        }
        following.publisher.retired() == 0
    }
}

impl Following {
    fn run(&mut self, job: Job) -> Done {
        match job {
            Job::Policy(event) => {
                self.take(event);
                Done::Policy
            }
            Job::Members(spec) => {
                self.regroup(&spec);
                Done::Members(spec)
            }
            Job::Network(spec) => {
                self.network_changed(spec);
                Done::Network
            }
        }
    }

    /// Tells workers how gateways stand.
    fn regroup(&mut self, spec: &MembersSpec) {
        let owners: BTreeSet<IpAddr> = own_vips(&self.state).collect();
        let snapshot = self.builder.with_members(spec);
        let policy = snapshot.policy.clone();
        self.publisher.publish(snapshot);
        self.state.compiled.store(policy);
        self.state.workers.iter().for_each(|worker| worker.doorbell.wake());
        self.announce(Some(&owners));
    }

    /// Announces the VIPs that are this gateway's now, and weren't among these.
    pub(super) fn announce(&self, known: Option<&BTreeSet<IpAddr>>) {
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
        self.state.compiled.store(compiled);
        self.state.dealt.change(&change);
        self.announce(Some(&known));
        Ok(())
    }

    /// Whether the node has the same addresses as before.
    pub(super) fn has_same_locals(&self, spec: &NetworkSpec) -> bool {
        spec.locals == self.locals
    }

    pub(super) fn network_changed(&mut self, spec: Arc<NetworkSpec>) {
        if spec.locals != self.locals {
            self.locals.clone_from(&spec.locals);
            let wanted = capture::tables(&self.state.compiled.load(), &self.locals, &self.tunnels);
            let applied = self.steering.lock().unwrap_or_else(PoisonError::into_inner).apply(wanted);
            if let Err(error) = applied {
                tracing::error!(%error, "the steering program doesn't know the node's new addresses yet");
            }
        }
        self.publisher.put(self.builder.with_network((*spec).clone()));
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
