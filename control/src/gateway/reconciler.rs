//! Reconciler: applies changes of policy, membership and network. Builds snapshots, publishes them to the workers and
//! updates the steering maps.
//!
//! A policy of ten thousand Services takes some hundred milliseconds, and so does a failover in a large group; so each
//! change runs as a job on a blocking thread ([`ReconcilerTask`]), one at a time, while the control loop handles
//! signals, neighbors and leases.
//!
//! Order of a policy change: capture what is added, publish the snapshot, stop capturing what is removed. In between, a
//! packet may be dropped but never leaves untranslated. A change that can't be captured isn't published: it is held and
//! retried until it can (`held.rs`).

mod held;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::oneshot;
use vipgate_common::{Backoff, Blocking, spawn_blocking};
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::members::MembersSpec;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::policy::spec::{Announce, NetworkSpec};
use vipgate_dataplane::policy::validation::BuildError;
use vipgate_dataplane::worker::command::Command;
use vipgate_xdp::steering::Steering;

use crate::gateway::steering_tables;
use crate::gateway::steering_tables::PreviousTables;
use crate::state::{GatewayState, PolicyStatus};
use crate::xds::client::{ClientEvent, Rejection};
use crate::xds::resource::{CLUSTER, Key, Kind};
use crate::xds::store::PolicyUpdate;

/// Delay before what the steering program's maps couldn't take is written again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// A change to apply.
#[derive(Debug)]
pub(super) enum Job {
    /// An event of the policy source.
    Policy(ClientEvent),
    /// New membership.
    Members(MembersSpec),
    /// A network state with other local addresses.
    Network(Arc<NetworkSpec>),
    /// The retry of what the steering program's maps couldn't take.
    Retry,
}

/// A completed job.
#[derive(Debug)]
pub(super) enum JobResult {
    /// The event was applied or rejected.
    Policy,
    /// The membership was published to the workers.
    Members(MembersSpec),
    /// The network state was published to the workers.
    Network,
    /// Nothing was published: an update waits for the steering program's maps, or they were written again.
    Capture,
}

/// Applies changes; used by one job at a time.
pub(super) struct Reconciler {
    /// Has what is published; nothing of an update that is held.
    builder: Builder,
    publisher: Publisher,
    steering: Arc<Mutex<Steering>>,
    state: Arc<GatewayState>,
    local_addresses: Vec<IpAddr>,
    /// Local tunnel endpoints (VXLAN): of other gateways and of nodes.
    tunnels: Vec<SocketAddr>,
    /// The update that can't be captured yet, with those that have come after it.
    held: Option<PolicyUpdate>,
    /// Report that all accepted updates are in force.
    waiting: Vec<oneshot::Sender<()>>,
    /// The steering program is closed until its maps hold the initial policy.
    is_closed: bool,
    /// When to write again what has failed; `None`: nothing has.
    due: Option<Instant>,
    backoff: Backoff,
}

/// The reconciler: idle, or running a job on a blocking thread.
pub(super) struct ReconcilerTask {
    reconciler: Option<Box<Reconciler>>,
    job: Option<Blocking<(Box<Reconciler>, JobResult)>>,
}

impl ReconcilerTask {
    pub(super) fn new(reconciler: Reconciler) -> Self {
        Self { reconciler: Some(Box::new(reconciler)), job: None }
    }

    /// The reconciler, unless a job is running.
    pub(super) fn idle(&mut self) -> Option<&mut Reconciler> {
        self.reconciler.as_deref_mut()
    }

    /// Whether no job is running.
    pub(super) fn is_idle(&self) -> bool {
        self.reconciler.is_some()
    }

    /// When to start [`Job::Retry`], if no job is running.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.reconciler.as_ref()?.due
    }

    /// Whether the steering program is open; unknown, so false, while a job is running.
    pub(super) fn is_open(&self) -> bool {
        self.reconciler.as_ref().is_some_and(|reconciler| !reconciler.is_closed)
    }

    /// Starts a job, if none is running.
    pub(super) fn start(&mut self, job: Job) {
        let Some(mut reconciler) = self.reconciler.take() else { return };
        self.job = Some(spawn_blocking(move || {
            let result = reconciler.run(job);
            (reconciler, result)
        }));
    }

    /// Waits until the running job completes; forever if there is none. Cancel-safe.
    pub(super) async fn completed(&mut self) -> JobResult {
        let Some(job) = &mut self.job else { return std::future::pending().await };
        let (reconciler, result) = job.await;
        (self.reconciler, self.job) = (Some(reconciler), None);
        result
    }

    /// Whether all workers use the latest snapshot. Frees snapshots that no worker reads any more, on a blocking
    /// thread.
    pub(super) fn is_converged(&mut self) -> bool {
        let Some(reconciler) = &mut self.reconciler else { return false };
        let unread = reconciler.publisher.take_unreferenced();
        if !unread.is_empty() {
            spawn_blocking(move || drop(unread));
        }
        reconciler.publisher.retired() == 0
    }
}

impl Reconciler {
    /// Without an update that waits.
    pub(super) fn new(
        builder: Builder,
        publisher: Publisher,
        steering: Arc<Mutex<Steering>>,
        state: Arc<GatewayState>,
        local_addresses: Vec<IpAddr>,
        tunnels: Vec<SocketAddr>,
    ) -> Self {
        let (held, waiting, is_closed, due, backoff) = (None, Vec::new(), false, None, Backoff::new(BACKOFF));
        Self { builder, publisher, steering, state, local_addresses, tunnels, held, waiting, is_closed, due, backoff }
    }

    fn run(&mut self, job: Job) -> JobResult {
        match job {
            Job::Policy(event) => self.handle_policy_event(event),
            Job::Retry => self.retry(),
            Job::Members(spec) => {
                self.apply_members(&spec);
                JobResult::Members(spec)
            }
            Job::Network(spec) => {
                self.apply_network(spec);
                JobResult::Network
            }
        }
    }

    /// Publishes new membership, and announces the VIPs that this gateway has become the owner of.
    fn apply_members(&mut self, spec: &MembersSpec) {
        let previous: BTreeSet<IpAddr> = own_vips(&self.state).collect();
        let snapshot = self.builder.with_members(spec);
        let policy = snapshot.policy.clone();
        self.publisher.publish(snapshot);
        self.state.compiled.store(policy);
        self.state.workers().iter().for_each(|worker| worker.doorbell.wake());
        self.announce(Some(&previous));
    }

    /// Announces the VIPs that this gateway owns, other than those in `previous`.
    pub(super) fn announce(&self, previous: Option<&BTreeSet<IpAddr>>) {
        announce(&self.state, previous);
    }

    /// Applies an update of the policy source, or holds it, or records that it was rejected.
    fn handle_policy_event(&mut self, event: ClientEvent) -> JobResult {
        match event {
            ClientEvent::Update(update, reply) => {
                let is_single = update.update_count == 1;
                match self.accept(*update) {
                    Ok((result, effect)) => {
                        // If the connection has closed, the server sends the update again.
                        let _ = reply.send(Ok(effect));
                        return result;
                    }
                    Err(rejection) => {
                        // The client retries a rejected batch update by update; each rejection is recorded then.
                        if is_single {
                            reject(&self.state, &rejection.to_string());
                        }
                        let _ = reply.send(Err(rejection));
                    }
                }
            }
            ClientEvent::Rejected(reason) => reject(&self.state, &reason),
        }
        JobResult::Policy
    }

    /// Publishes an update whose additions are captured, then stops capturing what it removes. Returns whether the maps
    /// have taken that, so whether it is in force.
    fn publish(
        &mut self,
        PolicyUpdate { update_count: updates, change, peers }: PolicyUpdate,
        before: PreviousTables,
    ) -> Result<bool, Rejection> {
        let status = self.state.policy.load_full();
        let previous: BTreeSet<IpAddr> = own_vips(&self.state).collect();
        let snapshot = self.builder.with_change(&change).map_err(|error| rejection(&error))?;
        let (generation, compiled) = (snapshot.generation, snapshot.policy.clone());
        self.report_vips_at_tunnel_endpoints(&compiled);
        self.publisher.publish(snapshot);
        self.state.compiled.store(compiled.clone());
        let is_released = self.release(&before.difference(&change, &self.builder));
        tracing::debug!(
            event = "policy_change",
            policies = change.policies.changed().count(),
            vips = change.vips.changed().count(),
            endpoints = change.endpoints.changed().count(),
            gone =
                change.policies.removed().count() + change.vips.removed().count() + change.endpoints.removed().count(),
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
            updates_applied: status.updates_applied + updates,
            last_error: None,
            peers: peers.into(),
            ..(*status).clone()
        }));
        self.state.placement.apply(&change);
        self.announce(Some(&previous));
        Ok(is_released)
    }

    fn report_vips_at_tunnel_endpoints(&self, policy: &Policy) {
        let of = |policy: &Policy| steering_tables::vips_at_tunnel_endpoints(policy, &self.tunnels);
        let before = of(&self.state.compiled.load());
        for (vip, private) in of(policy).into_iter().filter(|conflict| !before.contains(conflict)) {
            tracing::error!(
                event = "private_address_conflict",
                %vip,
                %private,
                "the private address {private} of the VIP {vip} is this gateway's address for peers, so the VIP can't be reached: \
                 name another NIC of the gateway in `spec.nic`"
            );
        }
    }

    /// Whether the local addresses are unchanged.
    pub(super) fn has_same_local_addresses(&self, spec: &NetworkSpec) -> bool {
        spec.locals == self.local_addresses
    }

    /// Publishes a network state; updates the steering maps if local addresses have changed.
    pub(super) fn apply_network(&mut self, spec: Arc<NetworkSpec>) {
        if spec.locals != self.local_addresses {
            self.set_local_addresses(spec.locals.clone());
        }
        self.publisher.replace(self.builder.with_network((*spec).clone()));
        self.state.network.store(spec);
        // Queued packets may wait for this neighbor.
        for worker in self.state.workers() {
            worker.doorbell.wake();
        }
    }
}

/// Records that an update was rejected, and why.
pub(super) fn reject(state: &GatewayState, reason: &str) {
    let status = state.policy.load_full();
    // Broken files are read repeatedly until they are fixed; that counts as one rejection.
    if status.last_error.as_deref() == Some(reason) && state.server.is_none() {
        return;
    }
    tracing::error!(event = "policy_rejected", "policy rejected, the last good policy stays in force:\n{reason}");
    state.policy.store(Arc::new(PolicyStatus {
        updates_rejected: status.updates_rejected + 1,
        last_error: Some(reason.to_owned()),
        ..(*status).clone()
    }));
}

/// Rejects a VIP that is a local address: its traffic would be captured from the kernel.
pub(super) fn check_local_addresses(change: &PolicyChange, locals: &[IpAddr]) -> Result<(), Rejection> {
    match change.vips.changed().find(|vip| locals.binary_search(&vip.address).is_ok()) {
        None => Ok(()),
        Some(vip) => Err(Rejection {
            resource: Some(Key { kind: Kind::Vip, name: vip.address.to_string().into() }),
            reason: format!("{} is a local address of this gateway, so it can't be a VIP", vip.address),
        }),
    }
}

/// An engine error as a NACK, with the resource that the server sets aside. Limits of the whole policy have none.
pub(super) fn rejection(error: &BuildError) -> Rejection {
    let key = |kind, name: &Arc<str>| Some(Key { kind, name: name.clone() });
    let of_address = |kind, address: &IpAddr| Some(Key { kind, name: address.to_string().into() });
    let resource = match error {
        BuildError::TooManyVips { .. }
        | BuildError::TooManyEndpoints { .. }
        | BuildError::TooManyGateways { .. }
        | BuildError::TooManyBackendPorts { .. } => None,
        BuildError::InvalidShardMap { map, .. } | BuildError::ShardMapInUse { map, .. } => key(Kind::ShardMap, map),
        BuildError::BackendIsVip { service, .. }
        | BuildError::DuplicateFrontend { service, .. }
        | BuildError::InvalidService { service, .. } => key(Kind::Service, service),
        BuildError::UnknownPolicy { address, .. }
        | BuildError::UnknownVip { address, .. }
        | BuildError::EndpointIsVip { address } => of_address(Kind::Endpoint, address),
        // Of a VIP or an endpoint; the server knows which it is.
        BuildError::UnknownShardMap { of, .. } => of_address(Kind::Endpoint, of),
        BuildError::TooManyPrefixes { policy, .. } => key(Kind::EgressPolicy, policy),
        BuildError::PolicyInUse { name } => key(Kind::EgressPolicy, name),
        BuildError::VipInUse { vip } => of_address(Kind::Vip, vip),
        BuildError::TooManyClusterPrefixes { .. } => key(Kind::Cluster, &CLUSTER.into()),
        BuildError::InvalidNode { node, .. } => key(Kind::OverlayNode, node),
    };
    Rejection { resource, reason: error.to_string() }
}

/// The VIPs that this gateway announces by L2.
fn own_vips(state: &GatewayState) -> impl Iterator<Item = IpAddr> + use<> {
    let policy = state.compiled.load_full();
    let own = policy.vips().filter(|vip| vip.answers_arp_nd() && vip.announce == Announce::L2).map(|vip| vip.address);
    own.collect::<Vec<_>>().into_iter()
}

/// Announces the VIPs that this gateway owns, other than those in `previous`, through the first worker.
fn announce(state: &GatewayState, previous: Option<&BTreeSet<IpAddr>>) {
    let new: Vec<IpAddr> =
        own_vips(state).filter(|address| previous.is_none_or(|previous| !previous.contains(address))).collect();
    let Some(first) = state.workers().first() else { return };
    if !new.is_empty() && first.commands.try_send(Command::Announce(new)).is_err() {
        tracing::warn!("the command queue of worker 0 is full: VIPs are not announced; neighbors will resolve them");
    }
    first.doorbell.wake();
}
