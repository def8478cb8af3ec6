//! A gateway as a member of its group: what follows from membership, links and policy for its engine, its peers, its
//! lease and its heartbeats, in one fixed order. `GroupState` has what is decided from the inputs of one moment; what is
//! here lasts from one snapshot to the next.
//!
//! A view takes effect in four steps: it is received, a snapshot is published, all workers use that, and then peers are
//! sent what this gateway has released and the server learns that the view is applied. Whatever depends on what the
//! workers do (leases by promises of peers, links, releases) goes by the view that is applied, not by the latest one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::members::{Authentication, MembersSpec};
use vipgate_policy::compiler;

use crate::group_state::{GroupState, MembershipSource, PeerState};
use crate::heartbeat::ReportedState;
use crate::replication::Release;
use crate::status::MembershipStatus;
use crate::succession::Claim;
use crate::{DrainBlock, MembershipView};

/// Which gateway this is.
#[derive(Clone, Debug)]
pub struct Identity {
    pub name: Arc<str>,
    /// Tunnel endpoint of this gateway.
    pub endpoint: Option<SocketAddr>,
    pub source: MembershipSource,
    /// This process, and its predecessors; `None`: it isn't distinguished from others of this name.
    pub claim: Option<Claim>,
}

/// An input of the member.
#[derive(Clone, Debug)]
pub enum Input {
    /// An operator drains the gateway, or ends that.
    Draining(bool),
    /// The fault that makes it unable to forward; `None`: it is able.
    Unable(Option<Arc<str>>),
    /// A gateway has released shards, and all their sessions have been received.
    Released { gateway: Arc<str>, release: Release },
    /// A snapshot was published to the workers, with this replication epoch.
    Published { snapshot: Snapshot, replication_epoch: u64 },
    /// What holds now, while no snapshot is being built.
    Observed(Box<Observation>),
}

/// What a snapshot was built for.
#[derive(Clone, Debug)]
pub enum Snapshot {
    Policy,
    /// For [`Effect::Publish`].
    Members(MembersSpec),
    /// For the network, or for what is captured: it changes nothing for the group.
    Other,
}

/// What holds at one moment.
#[derive(Clone, Debug)]
pub struct Observation {
    pub tick: Tick,
    pub policy: PolicyState,
    /// Membership; `None`: without a policy server.
    pub status: Option<MembershipStatus>,
    /// The peers; `None`: without links.
    pub peers: Option<BTreeMap<Arc<str>, PeerState>>,
    /// Authentication of tunnels; a gateway that isn't in it authenticates nothing.
    pub tunnels: BTreeMap<Arc<str>, Authentication>,
    /// Whether all workers use the latest snapshot.
    pub is_converged: bool,
}

/// The policy in the latest snapshot.
#[derive(Clone, Debug)]
pub struct PolicyState {
    pub gateways: Arc<[compiler::Peer]>,
    pub version: Arc<str>,
    /// Whether the engine awaits releases by policy.
    pub awaits_release: bool,
}

/// What is to be done, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// This process takes its predecessor's place: no peer counts as having what this process hasn't sent itself.
    TakePlace,
    /// Requests a full sync from a peer, since standby sessions may have been lost here.
    RequestSync(Arc<str>),
    /// Leaves the membership to the next process.
    Leave { view: Arc<MembershipView>, ttl: Duration },
    /// Sets whether a lease is required.
    RequireLease(bool),
    /// Extends the lease by promises of all peers.
    ExtendLease(Tick),
    /// The drain is given up, since the policy server refuses it.
    DrainRefused(DrainBlock),
    /// Publishes a membership to the workers; [`Input::Published`] follows.
    Publish(MembersSpec),
    /// Links are for this view from here on.
    UseView(Arc<MembershipView>),
    /// Starts a full sync to a peer.
    Resync(Arc<str>),
    /// Notifies a peer that this gateway has released shards.
    Release(Arc<str>, Release),
    /// Reports a state in heartbeats.
    Report(ReportedState),
}

/// A view that was published but isn't used by all workers yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    view: u64,
    /// Whether replica targets need a full sync after it.
    needs_sync: bool,
}

/// A gateway as a member of its group.
#[derive(Clone, Debug)]
pub struct Member {
    state: GroupState,
    /// The membership in the latest snapshot, and its replication epoch.
    published: MembersSpec,
    replication_epoch: u64,
    pending: Option<Pending>,
    /// The view of the last change of active members that was published.
    active_since: u64,
    /// The version of the policy in the latest snapshot.
    policy_version: Arc<str>,
    /// The view, and the version of the policy, that all workers use.
    applied: u64,
    applied_policy: Arc<str>,
    /// The view that links use.
    linked_view: Arc<MembershipView>,
    /// What peers have been sent as released.
    releases: BTreeMap<Arc<str>, Release>,
}

fn initial_state(identity: &Identity) -> GroupState {
    let mut state = GroupState::new(identity.name.clone(), identity.endpoint, identity.source);
    if let Some(claim) = identity.claim.clone() {
        state.set_claim(claim);
    }
    state
}

/// The membership at startup, before the policy server has responded. With a membership authority, no gateway is
/// active.
pub fn initial_members(identity: &Identity, gateways: &[compiler::Peer], now: Instant, tick: Tick) -> MembersSpec {
    let mut state = initial_state(identity);
    state.set_policy(gateways, &"".into(), now);
    state.spec(now, tick)
}

impl Member {
    /// A member without a view yet, whose first snapshot has this membership.
    pub fn new(identity: &Identity, published: MembersSpec) -> Self {
        Self {
            state: initial_state(identity),
            published,
            replication_epoch: 0,
            pending: None,
            active_since: 0,
            policy_version: "".into(),
            applied: 0,
            applied_policy: "".into(),
            linked_view: Arc::default(),
            releases: BTreeMap::new(),
        }
    }

    /// Processes an input.
    pub fn input(&mut self, now: Instant, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Draining(draining) => self.state.set_draining(draining),
            Input::Unable(reason) => {
                self.state.set_unable(reason);
                // Also while a snapshot is being built: another gateway has to become active in its place.
                effects.push(self.report(now));
            }
            Input::Released { gateway, release } => self.state.mark_released(gateway, &release),
            Input::Published { snapshot, replication_epoch } => self.published(snapshot, replication_epoch),
            Input::Observed(observation) => self.observe(now, *observation, &mut effects),
        }
        effects
    }

    /// Decides what follows from what holds now.
    fn observe(&mut self, now: Instant, observation: Observation, effects: &mut Vec<Effect>) {
        let Observation { tick, policy, status, peers, tunnels, is_converged } = observation;
        self.set_policy(policy, now);
        if let Some(status) = status {
            self.set_status(&status, now, effects);
        }
        if let Some(peers) = peers {
            self.state.set_links(peers);
            effects.extend(self.state.sync_targets(now).into_iter().map(Effect::RequestSync));
        }
        if self.pending.is_none() && self.applied > 0 {
            // A peer has applied a policy since.
            self.send_releases(effects);
        }
        self.update_lease(effects);
        let spec = self.members(now, tick, &tunnels);
        effects.extend(self.state.give_up_refused_drain().map(Effect::DrainRefused));
        if spec == self.published {
            if self.has_unapplied_view() {
                self.mark_pending(false);
            }
            if is_converged {
                self.mark_applied(effects);
            }
        } else {
            effects.push(Effect::Publish(spec));
        }
        effects.push(self.report(now));
    }

    fn set_policy(&mut self, policy: PolicyState, now: Instant) {
        self.state.set_policy(&policy.gateways, &policy.version, now);
        self.state.set_awaits_policy_release(policy.awaits_release, now);
        self.policy_version = policy.version;
    }

    fn set_status(&mut self, status: &MembershipStatus, now: Instant, effects: &mut Vec<Effect>) {
        let had_taken_place = self.state.has_taken_place();
        self.state.set_status(status, now);
        if self.state.has_taken_place() && !had_taken_place {
            effects.push(Effect::TakePlace);
        }
        // Once it is known how long leases last.
        if status.view.number > 0 && status.is_ttl_confirmed {
            effects.push(Effect::Leave { view: status.view.clone(), ttl: status.ttl });
        }
    }

    /// Promises count under the view that all workers use: until then, some open sessions by an older view, in shards
    /// that this one has given to others.
    fn update_lease(&self, effects: &mut Vec<Effect>) {
        effects.push(Effect::RequireLease(self.state.needs_lease()));
        let promised = self.state.lease_from_peers().filter(|_| self.applied == self.state.view().number);
        effects.extend(promised.map(Effect::ExtendLease));
    }

    /// The membership for the engine, with the authentication of tunnels.
    fn members(&mut self, now: Instant, tick: Tick, tunnels: &BTreeMap<Arc<str>, Authentication>) -> MembersSpec {
        let mut spec = self.state.spec(now, tick);
        // Without an authority, nobody distributes keys.
        if self.state.needs_lease() {
            let others = spec.gateways.iter_mut().filter(|member| Some(&member.name) != spec.this.as_ref());
            for member in others {
                member.authentication = tunnels.get(&member.name).copied().unwrap_or(Authentication::Rejected);
            }
        }
        spec
    }

    /// A snapshot was published.
    fn published(&mut self, snapshot: Snapshot, replication_epoch: u64) {
        // A new replication epoch: other replica targets than before need a full sync, be it due to a view or to policy.
        let is_new_epoch = std::mem::replace(&mut self.replication_epoch, replication_epoch) != replication_epoch;
        match snapshot {
            // Peers wait for what the new policy gives to them.
            Snapshot::Policy => {
                self.published.gateways.iter_mut().for_each(|member| member.policy_release.forget());
                self.mark_pending(is_new_epoch);
            }
            Snapshot::Members(spec) => {
                let needs_sync = is_new_epoch || active_members(&spec) != active_members(&self.published);
                self.published = spec;
                self.mark_pending(needs_sync);
            }
            Snapshot::Other => {}
        }
    }

    /// The current view is in the latest snapshot. `needs_sync`: replica targets need a full sync.
    fn mark_pending(&mut self, needs_sync: bool) {
        let was_needed = self.pending.is_some_and(|pending| pending.needs_sync);
        // A peer that was inactive in a view that this gateway missed may have lost its standby sessions.
        let since = self.state.active_since();
        let has_changed = std::mem::replace(&mut self.active_since, since) != since;
        let needs_sync = needs_sync || was_needed || has_changed;
        self.pending = Some(Pending { view: self.state.view().number, needs_sync });
    }

    /// Whether there is a new view that doesn't change the published membership.
    fn has_unapplied_view(&self) -> bool {
        self.pending.is_none() && self.applied != self.state.view().number
    }

    /// All workers use the latest snapshot: links get its view, and peers full syncs and what this gateway has released.
    fn mark_applied(&mut self, effects: &mut Vec<Effect>) {
        while let Some(Pending { view, needs_sync }) = self.pending.take() {
            self.applied = view;
            let has_new_policy = self.applied_policy != self.policy_version;
            self.applied_policy.clone_from(&self.policy_version);
            // Not earlier: workers handle what arrives over the links by the view that they use.
            if self.linked_view != *self.state.view() {
                self.linked_view = self.state.view().clone();
                effects.push(Effect::UseView(self.linked_view.clone()));
            }
            if needs_sync {
                effects.extend(self.state.peers().cloned().map(Effect::Resync));
            }
            if has_new_policy {
                // Peers that were ahead: by the policy from before, this gateway may have removed what they count on here.
                effects.extend(self.state.peers_ahead().cloned().map(Effect::RequestSync));
            }
            self.send_releases(effects);
            if self.has_unapplied_view() {
                // It has come meanwhile, and changes nothing.
                self.mark_pending(false);
            }
        }
    }

    /// Sends peers what this gateway has released, as far as they don't have it: behind what they have to get first.
    fn send_releases(&mut self, effects: &mut Vec<Effect>) {
        let is_peer = |name: &Arc<str>| self.state.view().member(name).is_some();
        self.releases.retain(|name, _| is_peer(name));
        for peer in self.state.peers() {
            let release = self.state.release_for(peer, self.applied);
            if self.releases.get(peer) != Some(&release) {
                effects.push(Effect::Release(peer.clone(), release.clone()));
                self.releases.insert(peer.clone(), release);
            }
        }
    }

    fn report(&self, now: Instant) -> Effect {
        Effect::Report(ReportedState {
            desired_state: self.state.desired_state(now),
            seen_view: self.applied,
            unable: self.state.unable().cloned(),
            policy_version: Some(self.applied_policy.clone()).filter(|version| !version.is_empty()),
            sessions: 0,
        })
    }

    /// When to observe again although nothing has changed.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        self.state.next_deadline(now)
    }

    /// Whether not all workers use the latest membership or policy yet.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Whether it is unknown yet if there is a membership authority.
    pub fn is_authority_unknown(&self) -> bool {
        self.state.is_authority_unknown()
    }

    /// Whether this gateway forwards packets.
    pub fn forwards(&self, has_lease: bool) -> bool {
        self.state.forwards(has_lease)
    }

    /// What is decided from the inputs of one moment.
    pub fn state(&self) -> &GroupState {
        &self.state
    }

    /// The membership in the latest snapshot.
    pub fn published_members(&self) -> &MembersSpec {
        &self.published
    }

    /// The number of the view that all workers use.
    pub fn applied(&self) -> u64 {
        self.applied
    }
}

/// Names of the active members.
pub fn active_members(spec: &MembersSpec) -> Vec<&str> {
    spec.gateways.iter().filter(|member| member.active).map(|member| &*member.name).collect()
}

#[cfg(test)]
mod tests;
