//! The group of gateways: membership view, peer links and lease, and the membership that follows for the engine.
//! `Group` collects the inputs; `membership::group_state` decides.

mod refused_drain;
mod tunnel_authentication;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::members::MembersSpec;
use vipgate_dataplane::policy::spec::{ShardMapSpec, VipSpec};
use vipgate_dataplane::replication::apply::worker_of;
use vipgate_dataplane::replication::lease::MAX_LEASE_MS;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::worker::command::Command;
use vipgate_policy::compiler;
use vipgate_policy::compiler::Placed;

use self::tunnel_authentication::TunnelAuthentication;
use crate::clock;
use crate::config::{Config, PolicySource};
use crate::gateway::succession::{LeftMembership, TunnelSecrets, Writer};
use crate::heartbeat::{ClientHandle, ReportedState};
use crate::membership::group_state::{GroupState, MembershipSource};
use crate::membership::status::MembershipStatus;
use crate::membership::succession::Claim;
use crate::peer::{self, PeerEvent, Peers, PeersStatus, Release, Workers};
use crate::state::GatewayState;
use crate::state::group::{GroupStatus, RefusedDrains};
use crate::state::lease::{GroupLease, LeaseStatus};

/// Poll interval while workers don't use the latest view yet.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Membership of this gateway in the group, its lease and its peer links.
pub(super) struct Group {
    state: GroupState,
    tunnels: TunnelAuthentication,
    lease: Arc<GroupLease>,
    /// The membership client, with `policy.server`.
    client: Option<ClientHandle>,
    client_task: Option<JoinHandle<()>>,
    links: Option<PeerLinks>,
    /// Leaves the membership to the next process.
    writer: Option<Writer>,
    /// The view that was published but isn't used by all workers yet, and whether replica targets need a full sync
    /// after it.
    pending: Option<(u64, bool)>,
    /// The version of the policy that was published.
    policy_version: Arc<str>,
    /// The view that all workers use.
    applied: u64,
    /// The version of the policy that all workers use.
    applied_policy: Arc<str>,
    /// What peers have been sent as released.
    releases: BTreeMap<Arc<str>, Release>,
    /// The view of the last change of active members that was published.
    active_since: u64,
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
    /// The view that the links use.
    pub(super) view: Arc<peer::PeerView>,
}

/// The membership at startup, before the policy server has responded. With a membership authority, no gateway is
/// active.
pub(super) fn initial_members(config: &Config, peers: &[compiler::Peer]) -> MembersSpec {
    let tunnels = TunnelAuthentication::new(None);
    let mut state = initial_state(config);
    state.set_policy(peers, &"".into(), Instant::now());
    members(&mut state, &tunnels, Instant::now())
}

fn initial_state(config: &Config) -> GroupState {
    let source = match config.policy {
        PolicySource::Server(_) => MembershipSource::Server,
        PolicySource::Files(_) => MembershipSource::Static,
    };
    GroupState::new(config.name.as_str().into(), config.peer_tunnel_endpoint(), source)
}

/// The membership for the engine, with the authentication of tunnels.
fn members(state: &mut GroupState, tunnels: &TunnelAuthentication, now: Instant) -> MembersSpec {
    let mut spec = state.spec(now, clock::now());
    let has_view = state.needs_lease();
    for member in &mut spec.gateways {
        // Without an authority there are no keys.
        if has_view && Some(&member.name) != spec.this.as_ref() {
            member.authentication = tunnels.for_peer(&member.name, now);
        }
    }
    spec
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

impl Group {
    /// A group without a membership view yet.
    pub(super) fn new(
        config: &Config,
        lease: Arc<GroupLease>,
        client: Option<(ClientHandle, JoinHandle<()>)>,
        links: Option<PeerLinks>,
        process: Option<Process>,
    ) -> Self {
        let (client, client_task) = client.unzip();
        let (mut state, mut writer, mut secrets) = (initial_state(config), None, None);
        if let Some(process) = process {
            state.set_claim(process.claim);
            (writer, secrets) = (process.writer, Some(process.tunnel_secrets));
        }
        let (own, inherited) = secrets.map_or((None, None), |secrets| (Some(secrets.own), secrets.inherited));
        Self {
            state,
            tunnels: TunnelAuthentication::new(own).with_inherited(inherited),
            lease,
            client,
            client_task,
            links,
            writer,
            pending: None,
            policy_version: "".into(),
            applied: 0,
            applied_policy: "".into(),
            releases: BTreeMap::new(),
            active_since: 0,
            refused_drains: RefusedDrains::default(),
            lease_valid: true,
        }
    }

    /// Waits until an input has changed or a deadline has passed. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        let due = match (self.pending, self.next_deadline(Instant::now())) {
            (Some(_), _) => Some(POLL_INTERVAL),
            (None, due) => due.map(|due| due.saturating_duration_since(Instant::now())),
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
        let keys = self.tunnels.deadlines().filter(|deadline| *deadline > now && self.state.needs_lease());
        self.state.next_deadline(now).into_iter().chain(keys).min()
    }

    fn handle_event(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Released { gateway, release } => self.state.mark_released(gateway, &release),
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

    /// Sets the policy in force, and its gateways.
    pub(super) fn set_policy(&mut self, gateways: &[compiler::Peer], policy: &Policy) {
        if *self.policy_version != *policy.version() {
            self.policy_version = policy.version().into();
        }
        let now = Instant::now();
        self.state.set_policy(gateways, &self.policy_version, now);
        self.state.set_awaits_policy_release(policy.awaits_policy_release(), now);
    }

    /// Starts or ends draining.
    pub(super) fn set_draining(&mut self, draining: bool) {
        self.state.set_draining(draining);
        self.refused_drains.last = None;
    }

    /// Gives up a drain that the policy server refuses, since some of these VIPs would have no active gateway.
    pub(super) fn give_up_refused_drain(&mut self, placement: impl FnOnce() -> (Vec<ShardMapSpec>, Vec<VipSpec>)) {
        let Some(block) = self.state.give_up_refused_drain() else { return };
        let (shard_maps, vips) = placement();
        let placed = Placed { vips: &vips, shard_maps: &shard_maps, endpoints: &[] };
        let reason = refused_drain::reason(&block, self.state.name(), self.state.view(), placed);
        tracing::warn!(event = "drain_refused", reason, "the drain is refused, this gateway stays active: {reason}");
        self.refused_drains.count += 1;
        self.refused_drains.last = Some(reason.into());
    }

    /// Sets the fault that makes this gateway unable to forward; `None`: able.
    pub(super) fn set_unable(&mut self, reason: Option<Arc<str>>) {
        self.state.set_unable(reason);
    }

    /// Processes all inputs; returns the membership to publish to the engine.
    pub(super) fn update(&mut self, now: Instant) -> MembersSpec {
        if let Some(client) = &mut self.client {
            let status: MembershipStatus = client.status.borrow_and_update().clone();
            if let Some(links) = &self.links {
                // Before the first lease it is unknown.
                let longest = Duration::from_millis(MAX_LEASE_MS.into());
                links.peers.set_lease_duration(if status.is_ttl_confirmed { status.ttl } else { longest });
                // First, since from here on the TTL of leases under earlier views runs.
                links.peers.set_promised_view(&Arc::new(peer::PeerView::of(&status.view)));
            }
            self.state.set_status(&status, now);
            self.tunnels.update(self.state.name(), &status.view, now, status.ttl);
        }
        if let Some(links) = &mut self.links {
            let status = links.status.borrow_and_update().clone();
            self.state.set_links(status.peers.iter().map(|(name, peer)| (name.clone(), peer.into())).collect());
            for gateway in self.state.sync_targets(now) {
                links.peers.request_sync(&gateway);
            }
        }
        self.leave_membership();
        if self.pending.is_none() && self.applied > 0 {
            // A peer has applied a policy since.
            self.send_releases();
        }
        self.lease.set_required(self.state.needs_lease());
        if let Some(until) = self.state.lease_from_peers() {
            self.lease.extend_by_peers(until);
        }
        members(&mut self.state, &self.tunnels, now)
    }

    /// Leaves the latest membership to the next process, once it is known how long leases last.
    fn leave_membership(&self) {
        let (Some(writer), Some(client)) = (&self.writer, &self.client) else { return };
        let (view, ttl, is_ttl_confirmed) = {
            let status = client.status.borrow();
            (status.view.clone(), status.ttl, status.is_ttl_confirmed)
        };
        if view.number == 0 || !is_ttl_confirmed {
            return;
        }
        let links = self.links.as_ref().map(|links| links.status.borrow().clone()).unwrap_or_default();
        let successors = links.peers.iter().filter_map(|(name, peer)| Some((name.clone(), peer.successor?)));
        writer.leave(LeftMembership { view, ttl, successors: successors.collect() });
    }

    /// Records that the current view was published to the workers. `needs_sync`: replica targets need a full sync.
    pub(super) fn mark_pending(&mut self, needs_sync: bool) {
        let was_pending = self.pending.is_some_and(|(_, needs_sync)| needs_sync);
        // A peer that was inactive in a view that this gateway missed may have lost its standby sessions.
        let since = self.state.active_since();
        let needs_sync = needs_sync || was_pending || std::mem::replace(&mut self.active_since, since) != since;
        self.pending = Some((self.state.view().number, needs_sync));
    }

    /// All workers use the published view: passes it to the links, releases shards to the peers and starts full syncs.
    pub(super) fn mark_applied(&mut self) {
        let Some((number, needs_sync)) = self.pending.take() else { return };
        self.applied = number;
        let has_new_policy = self.applied_policy != self.policy_version;
        if has_new_policy {
            self.applied_policy.clone_from(&self.policy_version);
        }
        if let Some(links) = &mut self.links {
            // Not earlier: workers handle what arrives over the links by the view that they use.
            let view = Arc::new(peer::PeerView::of(self.state.view()));
            if *view != *links.view {
                links.peers.set_view(&view);
                links.view = view;
            }
            if needs_sync {
                self.state.peers().for_each(|peer| links.peers.resync(peer));
            }
            if has_new_policy {
                // Peers that were ahead: by the policy from before, this gateway may have removed what they count on here.
                let status = links.status.borrow().clone();
                let is_ahead =
                    |peer: &&Arc<str>| status.peers.get(*peer).is_some_and(|it| it.replication.has_other_policy);
                self.state.peers().filter(is_ahead).for_each(|peer| links.peers.request_sync(peer));
            }
        }
        self.send_releases();
    }

    /// Sends peers what this gateway has released, as far as they don't have it: behind what they have to get first.
    fn send_releases(&mut self) {
        let Some(links) = &self.links else { return };
        let is_peer = |name: &Arc<str>| self.state.view().member(name).is_some();
        self.releases.retain(|name, _| is_peer(name));
        for peer in self.state.peers() {
            let release = self.state.release_for(peer, self.applied);
            if self.releases.get(peer) != Some(&release) {
                links.peers.release(peer, release.clone());
                self.releases.insert(peer.clone(), release);
            }
        }
    }

    /// Whether there is a new view that doesn't change the published membership.
    pub(super) fn has_unapplied_view(&self) -> bool {
        self.pending.is_none() && self.applied != self.state.view().number
    }

    /// Whether it is unknown yet if there is a membership authority.
    pub(super) fn is_authority_unknown(&self) -> bool {
        self.state.is_authority_unknown()
    }

    /// Whether this gateway forwards packets.
    pub(super) fn forwards(&self) -> bool {
        self.state.forwards(self.lease.status() != LeaseStatus::Expired)
    }

    /// Whether not all workers use the published view yet.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Passes the desired state of this gateway to the membership client, which sends it in heartbeats.
    pub(super) fn publish_desired_state(&self) {
        let Some(client) = &self.client else { return };
        let desired = ReportedState {
            desired_state: self.state.desired_state(Instant::now()),
            seen_view: self.applied,
            unable: self.state.unable().cloned(),
            policy_version: Some(self.applied_policy.clone()).filter(|version| !version.is_empty()),
            sessions: client.reported.borrow().sessions,
        };
        client.reported.send_if_modified(|current| {
            // A changed policy alone is no reason for a heartbeat of its own: the next one has it.
            current.policy_version.clone_from(&desired.policy_version);
            let is_new = *current != desired;
            *current = desired;
            is_new
        });
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
    pub(super) fn status(&self, spec: &MembersSpec) -> GroupStatus {
        GroupStatus {
            authority: self.client.as_ref().map(|client| client.status.borrow().authority),
            view: self.state.view().clone(),
            links: self.links.as_ref().map(|links| links.status.borrow().clone()).unwrap_or_default(),
            draining: self.state.is_draining(),
            drain_block: self.state.drain_block().cloned(),
            refused_drains: self.refused_drains.clone(),
            spec: spec.clone(),
            lease: Some(self.lease.clone()),
        }
    }

    /// Logs when the lease expires and when it is renewed. A lease that was never granted doesn't count as expired.
    pub(super) fn log_lease_changes(&mut self) {
        self.lease.expire();
        let (valid, view) = (self.lease.status() != LeaseStatus::Expired, self.state.view().number);
        if valid == self.lease_valid || (!valid && !self.lease.was_granted()) {
            return;
        }
        self.lease_valid = valid;
        if valid {
            tracing::info!(event = "lease_renewed", view, "the lease is renewed, or no longer required");
        } else if self.state.is_active() {
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
