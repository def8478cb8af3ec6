//! The group of gateways: membership client, peer links and lease. What follows from them is decided by
//! `membership::member`: here its inputs come in, and its effects go out.

mod refused_drain;
mod tunnel_authentication;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::policy::members::MembersSpec;
use vipgate_dataplane::policy::spec::{ShardMapSpec, VipSpec};
use vipgate_dataplane::replication::apply::worker_of;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::worker::command::Command;
use vipgate_policy::compiler;
use vipgate_policy::compiler::Placed;

use self::tunnel_authentication::TunnelAuthentication;
use crate::clock;
use crate::config::{Config, PolicySource};
use crate::gateway::succession::{LeftMembership, TunnelSecrets, Writer};
use crate::heartbeat::ClientHandle;
use crate::membership::group_state::MembershipSource;
use crate::membership::member::{self, Effect, Identity, Input, Member, Observation, PolicyState, Snapshot};
use crate::membership::status::MembershipStatus;
use crate::membership::succession::Claim;
use crate::membership::{DrainBlock, MembershipView};
use crate::peer::{self, PeerEvent, PeerStatus, Peers, PeersStatus, Workers};
use crate::state::GatewayState;
use crate::state::group::{GroupStatus, RefusedDrains};
use crate::state::lease::{GroupLease, LeaseStatus};

/// Poll interval while workers don't use the latest view yet.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Membership of this gateway in the group, its lease and its peer links.
pub(super) struct Group {
    name: Arc<str>,
    member: Member,
    tunnels: TunnelAuthentication,
    lease: Arc<GroupLease>,
    /// The membership client, with `policy.server`.
    client: Option<ClientHandle>,
    client_task: Option<JoinHandle<()>>,
    links: Option<PeerLinks>,
    /// Leaves the membership to the next process.
    writer: Option<Writer>,
    refused_drains: RefusedDrains,
    /// Whether the lease was valid when its status was last logged.
    lease_valid: bool,
}

/// This process, and what it leaves to the next one.
pub(super) struct Process {
    pub(super) claim: Claim,
    pub(super) tunnel_secrets: TunnelSecrets,
    pub(super) writer: Option<Writer>,
}

/// Links to the peers.
pub(super) struct PeerLinks {
    pub(super) peers: Peers,
    pub(super) events: mpsc::Receiver<PeerEvent>,
    pub(super) status: watch::Receiver<Arc<PeersStatus>>,
}

/// The membership at startup, before the policy server has responded.
pub(super) fn initial_members(config: &Config, peers: &[compiler::Peer]) -> MembersSpec {
    member::initial_members(&identity(config, None), peers, Instant::now(), clock::now())
}

fn identity(config: &Config, claim: Option<Claim>) -> Identity {
    let source = match config.policy {
        PolicySource::Server(_) => MembershipSource::Server,
        PolicySource::Files(_) => MembershipSource::Fixed,
    };
    Identity { name: config.name.as_str().into(), endpoint: config.peer_tunnel_endpoint(), source, claim }
}

/// The workers as used by the peer links for replication.
#[derive(Debug)]
pub(super) struct ReplicationWorkers(pub(super) Arc<GatewayState>);

impl Workers for ReplicationWorkers {
    fn count(&self) -> usize {
        self.0.workers().len()
    }

    fn replication_sender(&self, worker: usize) -> &ReplicationSender {
        &self.0.workers()[worker].replication
    }

    fn send(&self, worker: usize, command: Command, until: Instant) -> bool {
        let handle = &self.0.workers()[worker];
        let sent = handle.commands.send_deadline(command, until).is_ok();
        handle.doorbell.wake();
        sent
    }

    fn replication_epoch(&self) -> u64 {
        self.0.compiled.load().members().replication_epoch()
    }

    fn gateway_id(&self, name: &str) -> Option<GatewayId> {
        self.0.compiled.load().members().id(name)
    }

    fn worker_of(&self, record: &ReplicationRecord) -> usize {
        let workers = u8::try_from(self.0.workers().len()).unwrap_or(u8::MAX);
        worker_of(record, &self.0.compiled.load(), workers).0.into()
    }
}

/// Effects that the control loop has to do.
#[derive(Default)]
struct Outcome {
    publish: Option<MembersSpec>,
    refused_drain: Option<DrainBlock>,
}

impl PeerLinks {
    fn perform(&self, effect: Effect) {
        match effect {
            Effect::TakePlace => self.peers.take_place(),
            Effect::RequestSync(peer) => self.peers.request_sync(&peer),
            Effect::UseView(view) => self.peers.set_view(&Arc::new(peer::PeerView::of(&view))),
            Effect::Resync(peer) => self.peers.resync(&peer),
            Effect::Release(peer, release) => self.peers.release(&peer, release),
            Effect::Leave { .. }
            | Effect::RequireLease(_)
            | Effect::ExtendLease(_)
            | Effect::DrainRefused(_)
            | Effect::Publish(_)
            | Effect::Report(_) => {}
        }
    }
}

impl Group {
    /// A group without a membership view yet; the first snapshot has this membership.
    pub(super) fn new(
        config: &Config,
        published: MembersSpec,
        lease: Arc<GroupLease>,
        connections: Option<(ClientHandle, JoinHandle<()>, Option<PeerLinks>, Process)>,
    ) -> Self {
        let group = |claim, tunnels| Self {
            name: config.name.as_str().into(),
            member: Member::new(&identity(config, claim), published),
            tunnels,
            lease,
            client: None,
            client_task: None,
            links: None,
            writer: None,
            refused_drains: RefusedDrains::default(),
            lease_valid: true,
        };
        let Some((client, task, links, Process { claim, tunnel_secrets, writer })) = connections else {
            return group(None, TunnelAuthentication::new(None));
        };
        let tunnels = TunnelAuthentication::new(Some(tunnel_secrets.own)).with_inherited(tunnel_secrets.inherited);
        Self { client: Some(client), client_task: Some(task), links, writer, ..group(Some(claim), tunnels) }
    }

    /// Waits until an input has changed or a deadline has passed. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        let due = match (self.member.is_pending(), self.next_deadline(Instant::now())) {
            (true, _) => Some(POLL_INTERVAL),
            (false, due) => due.map(|due| due.saturating_duration_since(Instant::now())),
        };
        let deadline = async {
            match due {
                Some(due) => tokio::time::sleep(due).await,
                None => std::future::pending().await,
            }
        };
        let membership = async {
            if let Some(client) = &mut self.client
                && client.status.changed().await.is_ok()
            {
                return;
            }
            std::future::pending::<()>().await;
        };
        let (events, links_status) = match &mut self.links {
            Some(PeerLinks { events, status, .. }) => (Some(events), Some(status)),
            None => (None, None),
        };
        let event = async {
            match events {
                Some(events) => events.recv().await,
                None => std::future::pending().await,
            }
        };
        let links = async {
            if let Some(status) = links_status
                && status.changed().await.is_ok()
            {
                return;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = deadline => {}
            () = membership => {}
            () = links => {}
            event = event => match event {
                Some(event) => self.handle_event(event),
                None => std::future::pending().await,
            },
        }
    }

    /// The next deadline at which the membership may change without new input.
    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let keys = self.tunnels.deadlines().filter(|deadline| *deadline > now && self.member.state().needs_lease());
        self.member.next_deadline(now).into_iter().chain(keys).min()
    }

    fn handle_event(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Released { gateway, release } => drop(self.input(Input::Released { gateway, release })),
            PeerEvent::RelayedView { gateway, view } => {
                let number = view.number;
                if self.client.as_ref().is_some_and(|client| client.apply_relayed_view(view)) {
                    tracing::info!(
                        event = "view_relayed",
                        gateway = &*gateway,
                        view = number,
                        "membership view relayed by gateway {gateway}, since the policy server is unreachable"
                    );
                }
            }
            // Also in the status of the links.
            PeerEvent::Synced { .. } => {}
        }
    }

    /// Starts or ends draining.
    pub(super) fn set_draining(&mut self, draining: bool) {
        self.input(Input::Draining(draining));
        self.refused_drains.last = None;
    }

    /// Sets the fault that makes this gateway unable to forward; `None`: able.
    pub(super) fn set_unable(&mut self, reason: Option<Arc<str>>) {
        self.input(Input::Unable(reason));
    }

    /// A snapshot was published to the workers.
    pub(super) fn published(&mut self, snapshot: Snapshot, replication_epoch: u64) {
        self.input(Input::Published { snapshot, replication_epoch });
    }

    /// Observes what holds now, while no job is running; returns the membership to publish to the workers, if it is
    /// another one.
    pub(super) fn observe(
        &mut self,
        policy: PolicyState,
        is_converged: bool,
        placement: impl FnOnce() -> (Vec<ShardMapSpec>, Vec<VipSpec>),
    ) -> Option<MembersSpec> {
        let status = self.client.as_mut().map(|client| client.status.borrow_and_update().clone());
        if let Some(status) = &status {
            self.promise_under(status);
            self.tunnels.update(&self.name, &status.view, Instant::now(), status.ttl);
        }
        let peer_state = |(name, peer): (&Arc<str>, &PeerStatus)| (name.clone(), peer.into());
        let links = self.links.as_mut();
        let peers = links.map(|links| links.status.borrow_and_update().peers.iter().map(peer_state).collect());
        let now = Instant::now();
        let observation =
            Observation { tick: clock::now(), policy, status, peers, tunnels: self.tunnels.all(now), is_converged };
        let outcome = self.input_at(now, Input::Observed(Box::new(observation)));
        if let Some(block) = outcome.refused_drain {
            self.log_refused_drain(&block, placement());
        }
        outcome.publish
    }

    /// Peers get promises under the latest view from here on. Before the member knows it, since from then on the TTL of
    /// leases under earlier views runs.
    fn promise_under(&self, status: &MembershipStatus) {
        if let Some(links) = &self.links {
            links.peers.set_lease_duration(status.longest_lease());
            links.peers.set_promised_view(&Arc::new(peer::PeerView::of(&status.view)));
        }
    }

    fn input(&mut self, input: Input) -> Outcome {
        self.input_at(Instant::now(), input)
    }

    fn input_at(&mut self, now: Instant, input: Input) -> Outcome {
        let mut outcome = Outcome::default();
        for effect in self.member.input(now, input) {
            match effect {
                Effect::Leave { view, ttl } => self.leave_membership(view, ttl),
                Effect::RequireLease(required) => self.lease.set_required(required),
                Effect::ExtendLease(until) => self.lease.extend_by_peers(until),
                Effect::DrainRefused(block) => outcome.refused_drain = Some(block),
                Effect::Publish(spec) => outcome.publish = Some(spec),
                Effect::Report(reported) => {
                    if let Some(client) = &self.client {
                        client.reported.send_if_modified(|current| current.update(reported));
                    }
                }
                Effect::TakePlace
                | Effect::RequestSync(_)
                | Effect::UseView(_)
                | Effect::Resync(_)
                | Effect::Release(..) => {
                    if let Some(links) = &self.links {
                        links.perform(effect);
                    }
                }
            }
        }
        outcome
    }

    /// Leaves the latest membership to the next process.
    fn leave_membership(&self, view: Arc<MembershipView>, ttl: Duration) {
        let Some(writer) = &self.writer else { return };
        let links = self.links.as_ref().map(|links| links.status.borrow().clone()).unwrap_or_default();
        let successors = links.peers.iter().filter_map(|(name, peer)| Some((name.clone(), peer.successor?)));
        writer.leave(LeftMembership { view, ttl, successors: successors.collect() });
    }

    /// A drain is given up that the policy server refuses, since some of these VIPs would have no active gateway.
    fn log_refused_drain(&mut self, block: &DrainBlock, (shard_maps, vips): (Vec<ShardMapSpec>, Vec<VipSpec>)) {
        let placed = Placed { vips: &vips, shard_maps: &shard_maps, endpoints: &[] };
        let reason = refused_drain::reason(block, &self.name, self.member.state().view(), placed);
        tracing::warn!(event = "drain_refused", reason, "the drain is refused, this gateway stays active: {reason}");
        self.refused_drains.count += 1;
        self.refused_drains.last = Some(reason.into());
    }

    /// Whether it is unknown yet if there is a membership authority.
    pub(super) fn is_authority_unknown(&self) -> bool {
        self.member.is_authority_unknown()
    }

    /// Whether this gateway forwards packets.
    pub(super) fn forwards(&self) -> bool {
        self.member.forwards(self.lease.status() != LeaseStatus::Expired)
    }

    /// The number of active sessions for the next heartbeats.
    pub(super) fn report_sessions(&self, sessions: u64) {
        let Some(client) = &self.client else { return };
        client.reported.send_if_modified(|current| {
            current.sessions = sessions;
            false
        });
    }

    /// The current status.
    pub(super) fn status(&self) -> GroupStatus {
        let state = self.member.state();
        GroupStatus {
            authority: self.client.as_ref().map(|client| client.status.borrow().authority),
            view: state.view().clone(),
            links: self.links.as_ref().map(|links| links.status.borrow().clone()).unwrap_or_default(),
            draining: state.is_draining(),
            drain_block: state.drain_block().cloned(),
            refused_drains: self.refused_drains.clone(),
            spec: self.member.published_members().clone(),
            lease: Some(self.lease.clone()),
        }
    }

    /// Logs when the lease expires and when it is renewed. A lease that was never granted doesn't count as expired.
    pub(super) fn log_lease_changes(&mut self) {
        self.lease.expire();
        let (valid, view) = (self.lease.status() != LeaseStatus::Expired, self.member.state().view().number);
        if valid == self.lease_valid || (!valid && !self.lease.was_granted()) {
            return;
        }
        self.lease_valid = valid;
        if valid {
            tracing::info!(event = "lease_renewed", view, "the lease is renewed, or no longer required");
        } else if self.member.state().is_active() {
            tracing::warn!(
                event = "lease_expired",
                view,
                "the lease has expired: this gateway opens no sessions in its shards until it is renewed; check the \
                 latency to the policy server"
            );
        } else {
            tracing::info!(event = "lease_expired", view, "the lease of this inactive gateway has expired");
        }
    }

    /// Closes the links and the membership client. Other gateways notice by the lease.
    pub(super) async fn close(self) {
        drop(self.client);
        drop(self.links);
        if let Some(task) = self.client_task {
            let _ = tokio::time::timeout(Duration::from_secs(1), task).await;
        }
    }
}
