//! A gateway's process in a world: the real `Member`, `Client`, `Sender` and `Receiver`, and around them what is beside
//! the decisions: its worker, the snapshots that are built for it, its clock and its wires.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::members::MembersSpec;

use super::choices::Delay;
use super::coverage::Class;
use super::engine::Engine;
use super::env::{Env, ProcessInput};
use super::frames;
use super::links::Peer;
use super::policies::{MAX_GATEWAYS, ModelPolicy, SHARDS, index_of};
use super::stream::{Lease, Stream, address, heartbeats};
use super::succession::{Left, Succession};
use super::table::Table;
use crate::MembershipView;
use crate::group_state::MembershipSource;
use crate::heartbeat::{Client, ReportedState};
use crate::member::{Effect, Identity, Input, Member, Observation, PolicyState, Snapshot, initial_members};
use crate::replication::sync_rounds::SyncRounds;
use crate::replication::{Sender, policy_release_timeout};
use crate::status::MembershipStatus;
use crate::succession::PeerProcess;

/// The server's heartbeat timeout, milliseconds.
pub(super) const TTL: u64 = 600;
/// Interval of heartbeats to peers.
const HEARTBEAT_INTERVAL: u64 = 135;

/// A gateway's process.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) index: usize,
    pub(super) name: Arc<str>,
    pub(super) incarnation: u64,
    pub(super) started: Tick,
    pub(super) succession: Succession,
    pub(super) member: Member,
    pub(super) client: Client,
    pub(super) status: MembershipStatus,
    pub(super) stream: Stream,
    pub(super) reported: ReportedState,
    pub(super) lease: Lease,
    /// The policy in force, which number of all policies of the server it is, and since when it is in force.
    pub(super) policy: Rc<ModelPolicy>,
    pub(super) rollout: u64,
    policy_since: u64,
    /// Since when releases by policy are awaited.
    awaited_since: Option<u64>,
    /// The latest snapshot, and the one that the worker uses.
    pub(super) latest: Engine,
    pub(super) used: Engine,
    pub(super) is_adopting: bool,
    /// The view that links use.
    pub(super) peer_view: Arc<MembershipView>,
    pub(super) peers: [Option<Box<Peer>>; MAX_GATEWAYS],
    /// The process of each peer that counts.
    pub(super) processes: [Option<PeerProcess>; MAX_GATEWAYS],
    pub(super) sender: Sender,
    pub(super) rounds: SyncRounds,
    pub(super) table: Table,
    /// Whether inputs of the member have changed.
    pub(super) is_due: bool,
    deadline: Option<u64>,
    /// The shards that it has opened although a peer hadn't released them, since that was awaited for too long.
    pub(super) timed_out_releases: [bool; SHARDS],
}

/// How long gateways wait for a release by policy, by the TTL that they know.
fn release_timeout(ttl: Duration) -> u64 {
    policy_release_timeout(ttl).as_millis() as u64
}

impl Process {
    pub(super) fn start(
        (index, name): (usize, Arc<str>),
        (incarnation, predecessor): (u64, Option<u64>),
        (policy, rollout): (Rc<ModelPolicy>, u64),
        left: Left,
        env: &mut Env,
    ) -> Self {
        let succession = Succession::new(&name, incarnation, left);
        let identity = Identity {
            name: name.clone(),
            endpoint: Some(address(index)),
            source: MembershipSource::Server,
            claim: Some(succession.claim.clone()),
        };
        let published = initial_members(&identity, &policy.peers, env.instant(), env.tick());
        let mut engine = Engine::new();
        engine.set_policy(&policy);
        engine.set_members(&published);
        let mut process = Self {
            member: Member::new(&identity, published),
            client: Client::new(
                env.instant(),
                heartbeats(index, incarnation, predecessor, &succession),
                succession.former(),
            ),
            status: MembershipStatus::default(),
            stream: Stream::default(),
            reported: ReportedState::default(),
            lease: Lease::default(),
            policy_since: env.now,
            awaited_since: None,
            latest: engine.clone(),
            used: engine,
            is_adopting: false,
            peer_view: Arc::default(),
            peers: [const { None }; MAX_GATEWAYS],
            processes: [const { None }; MAX_GATEWAYS],
            sender: Sender::new(1, frames::encode),
            rounds: SyncRounds::default(),
            table: Table::default(),
            is_due: true,
            deadline: None,
            timed_out_releases: [false; SHARDS],
            index,
            name,
            incarnation,
            started: env.tick(),
            succession,
            policy,
            rollout,
        };
        // In `GroupLease`, a lease that was never granted has expired.
        process.lease.is_required = true;
        env.schedule_for(process.id(), env.now, ProcessInput::Heartbeat);
        process.update(env);
        process.drive_client(env);
        process
    }

    pub(super) fn id(&self) -> (usize, u64) {
        (self.index, self.incarnation)
    }

    /// Whether workers may open sessions in a shard: some of them may use the latest snapshot already.
    pub(super) fn may_open(&self, shard: usize, now: u64) -> bool {
        self.has_lease(now) && (self.used.may_open(shard) || (self.is_adopting && self.latest.may_open(shard)))
    }

    /// Whether a peer has released to it what the last change of active members has taken from that one.
    pub(super) fn has_release_of(&self, peer: usize) -> bool {
        let replication = self.peers[peer].as_ref().map(|peer| &peer.replication);
        let release = replication.and_then(|it| it.peer_released.as_ref());
        release.is_some_and(|release| release.view >= self.member.state().active_since())
    }

    pub(super) fn handle(&mut self, input: ProcessInput, env: &mut Env) {
        match input {
            ProcessInput::Heartbeat => {
                env.schedule_for(self.id(), env.now + HEARTBEAT_INTERVAL, ProcessInput::Heartbeat);
                if !self.has_lease(env.now) && self.used.shards.iter().any(|shard| shard.may_open) {
                    env.count(Class::LeaseExpired);
                }
                self.send_heartbeats_to_peers(env);
                self.receivers_tick(env);
            }
            ProcessInput::StreamTimer => self.stream_timer(env),
            ProcessInput::Order(input) => self.input(input, env),
            ProcessInput::Adopted => {
                self.used = self.latest.clone();
                (0..SHARDS).for_each(|shard| self.timed_out_releases[shard] &= self.used.may_open(shard));
                (self.is_adopting, self.is_due) = (false, true);
            }
            ProcessInput::Deadline => {
                if self.deadline.take_if(|deadline| *deadline <= env.now).is_some() {
                    self.is_due = true;
                }
            }
            ProcessInput::Policy { policy, rollout } => self.apply_policy(policy, rollout, env),
            ProcessInput::Notice { stream, notice } => self.receive_notice(stream, *notice, env),
            ProcessInput::StreamClosed { stream, is_rejected } => self.stream_closed(stream, is_rejected, env),
            ProcessInput::Link { link, message } => self.receive(link, message, env),
            ProcessInput::LinkDown { link } => self.link_down(link),
            ProcessInput::RecordDue => self.table.turn(&self.used, env),
            ProcessInput::List { request } => self.list(&request, env),
        }
        self.replicate(env);
        self.update(env);
    }

    fn apply_policy(&mut self, policy: Rc<ModelPolicy>, rollout: u64, env: &mut Env) {
        if rollout <= self.rollout {
            return;
        }
        env.count(Class::PolicyApplied);
        self.rollout = rollout;
        if policy.number == self.policy.number {
            return;
        }
        (self.policy, self.policy_since) = (policy, env.now);
        self.latest.set_policy(&self.policy);
        self.adopt_later(env);
        self.published(Snapshot::Policy, env);
    }

    fn adopt_later(&mut self, env: &mut Env) {
        if !std::mem::replace(&mut self.is_adopting, true) {
            let at = env.now + env.delay(Delay::Snapshot);
            env.schedule_for(self.id(), at, ProcessInput::Adopted);
        }
        for shard in 0..SHARDS {
            let awaits = self.latest.awaits_release && self.latest.shards[shard].awaits_release;
            if awaits {
                env.count(Class::ReleaseAwaited);
            }
        }
    }

    fn published(&mut self, snapshot: Snapshot, env: &mut Env) {
        let replication_epoch = self.latest.replication_epoch();
        self.input(Input::Published { snapshot, replication_epoch }, env);
    }

    /// Passes an input to the member; it observes what holds afterwards.
    pub(super) fn input(&mut self, input: Input, env: &mut Env) {
        for effect in self.member.input(env.instant(), input) {
            self.perform(effect, env);
        }
        self.is_due = true;
    }

    /// The member observes what holds, if that may have changed.
    pub(super) fn update(&mut self, env: &mut Env) {
        if !self.is_due {
            return;
        }
        while std::mem::take(&mut self.is_due) {
            let observation = self.observation(env);
            for effect in self.member.input(env.instant(), Input::Observed(Box::new(observation))) {
                self.perform(effect, env);
            }
            self.replicate(env);
        }
        let deadline = self.member.next_deadline(env.instant()).map(Env::milliseconds);
        if let Some(at) = deadline.filter(|at| self.deadline.is_none_or(|known| *at < known)) {
            self.deadline = deadline;
            env.schedule_for(self.id(), at, ProcessInput::Deadline);
        }
    }

    fn observation(&mut self, env: &Env) -> Observation {
        let awaits_release = self.latest.awaits_release;
        self.awaited_since = self.awaited_since.or(Some(env.now)).filter(|_| awaits_release);
        let (gateways, version) = (self.policy.peers.clone(), self.policy.version.clone());
        Observation {
            tick: env.tick(),
            policy: PolicyState { gateways, version, awaits_release },
            status: Some(self.status.clone()),
            peers: Some(self.peer_states()),
            tunnels: BTreeMap::new(),
            is_converged: !self.is_adopting,
        }
    }

    fn perform(&mut self, effect: Effect, env: &mut Env) {
        match effect {
            Effect::TakePlace => self.sender.take_place(),
            Effect::RequestSync(peer) => self.request_sync(index_of(&peer), env),
            Effect::Leave { view, ttl } => self.leave_membership(view, ttl, env),
            Effect::RequireLease(is_required) => self.lease.is_required = is_required,
            Effect::ExtendLease(until) => self.extend_lease_by_peers(Env::time_of(until), env),
            Effect::DrainRefused(_) => env.count(Class::DrainRefused),
            Effect::Publish(spec) => self.publish(spec, env),
            Effect::UseView(view) => self.set_peer_view(view, env),
            Effect::Resync(peer) => self.sender.require_sync(&peer),
            Effect::Release(peer, release) => self.sender.release(&peer, release),
            Effect::Report(reported) => {
                if self.reported.update(reported) {
                    self.send_heartbeat(env);
                }
            }
        }
    }

    fn publish(&mut self, spec: MembersSpec, env: &mut Env) {
        let before = self.latest.clone();
        self.latest.set_members(&spec);
        for shard in 0..SHARDS {
            if !self.latest.may_open(shard) || before.may_open(shard) {
                continue;
            }
            let awaited_since = self.awaited_since.unwrap_or(self.policy_since);
            let has_timed_out = env.now >= awaited_since + release_timeout(self.status.ttl);
            let is_missing = |at: usize| {
                let release = self.peers[at].as_ref().and_then(|peer| peer.replication.peer_released.as_ref());
                at != self.index
                    && self.latest.is_active(at)
                    && release.map(|it| &it.policy) != Some(&self.policy.version)
            };
            if has_timed_out && (0..MAX_GATEWAYS).any(is_missing) {
                self.timed_out_releases[shard] = true;
                env.count(Class::ReleaseTimedOut);
            } else if before.awaits_release && before.shards[shard].awaits_release {
                env.count(Class::ReleaseReceived);
            } else {
                env.count(Class::OpenedByView);
            }
        }
        self.adopt_later(env);
        self.published(Snapshot::Members(spec), env);
    }
}
