//! A gateway's process: its group state, the snapshots that follow from it, and its membership client. Mirrors
//! `gateway/group.rs`, `gateway/control/membership.rs` and `heartbeat/stream.rs`, which do I/O around the same
//! decisions.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::members::MembersSpec;
use vipgate_dataplane::session::record::ReplicationRecord;

use super::choices::Delay;
use super::client::{Lease, ReportedState, Stream, address};
use super::coverage::Class;
use super::engine::Engine;
use super::env::{Env, ProcessInput};
use super::policies::{MAX_GATEWAYS, ModelPolicy, SHARDS, index_of};
use super::replication::Peer;
use super::succession::{Left, Succession};
use super::table::Table;
use crate::MembershipView;
use crate::group_state::{GroupState, MembershipSource};
use crate::replication::policy_release_timeout;
use crate::replication::sync_rounds::SyncRounds;
use crate::status::{Authority, MembershipStatus};
use crate::succession::PeerProcess;

/// The server's heartbeat timeout, milliseconds.
pub(super) const TTL: u64 = 600;

/// A record in the worker's replication queue.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) to: usize,
    pub(super) number: u64,
    pub(super) record: ReplicationRecord,
}

/// A record that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) to: usize,
    pub(super) number: u64,
    pub(super) id: u32,
}

/// A gateway's process.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what a process knows, not the state of a state machine")]
pub(super) struct Process {
    pub(super) index: usize,
    pub(super) name: Arc<str>,
    pub(super) incarnation: u64,
    pub(super) predecessor: Option<u64>,
    pub(super) started: Tick,
    pub(super) succession: Succession,
    pub(super) group: GroupState,
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
    /// The policy that the group state has.
    group_policy: u32,
    /// The latest snapshot, and the one that the worker uses.
    pub(super) latest: Engine,
    pub(super) used: Engine,
    pub(super) is_adopting: bool,
    published: MembersSpec,
    replication_epoch: u64,
    pending: Option<(u64, bool)>,
    pub(super) applied: u64,
    applied_policy: u32,
    active_since: u64,
    /// The view that links use.
    pub(super) peer_view: Arc<MembershipView>,
    pub(super) peers: [Option<Box<Peer>>; MAX_GATEWAYS],
    /// The process of each peer that counts.
    pub(super) processes: [Option<PeerProcess>; MAX_GATEWAYS],
    pub(super) has_peer_view: bool,
    pub(super) rounds: SyncRounds,
    pub(super) table: Table,
    pub(super) queue: VecDeque<Outgoing>,
    pub(super) last_numbers: [u64; MAX_GATEWAYS],
    pub(super) acknowledged: [u64; MAX_GATEWAYS],
    pub(super) unacknowledged: VecDeque<Sent>,
    /// Whether the worker is listing sessions.
    pub(super) is_listing: bool,
    /// Whether inputs of the group state have changed.
    pub(super) is_due: bool,
    deadline: Option<u64>,
    /// The shards that it has opened although a peer hadn't released them, since that was awaited for too long.
    pub(super) timed_out_releases: [bool; SHARDS],
}

/// How long gateways wait for a release by policy, by the TTL that they know.
fn release_timeout(ttl: Duration) -> u64 {
    policy_release_timeout(ttl).as_millis() as u64
}

fn new_group(name: &Arc<str>, index: usize, succession: &Succession) -> GroupState {
    let mut group = GroupState::new(name.clone(), Some(address(index)), MembershipSource::Server);
    group.set_claim(succession.claim.clone());
    group
}

/// The members that a gateway publishes to its engine before it knows any view.
fn members_at_start(mut group: GroupState, policy: &ModelPolicy, env: &Env) -> MembersSpec {
    group.set_policy(&policy.peers, &"".into(), env.instant());
    group.spec(env.instant(), env.tick())
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
        let new_group = || new_group(&name, index, &succession);
        let published = members_at_start(new_group(), &policy, env);
        let mut engine = Engine::new();
        engine.set_policy(&policy);
        engine.set_members(&published);
        let mut process = Self {
            group: new_group(),
            status: MembershipStatus {
                authority: Authority::Unknown,
                view: Arc::default(),
                ttl: Duration::from_millis(TTL),
                is_ttl_confirmed: false,
                drain_block: None,
            },
            stream: Stream::default(),
            reported: ReportedState::default(),
            lease: Lease::default(),
            policy_since: env.now,
            awaited_since: None,
            group_policy: 0,
            latest: engine.clone(),
            used: engine,
            is_adopting: false,
            published,
            replication_epoch: 0,
            pending: None,
            applied: 0,
            applied_policy: 0,
            active_since: 0,
            peer_view: Arc::default(),
            peers: [const { None }; MAX_GATEWAYS],
            processes: [const { None }; MAX_GATEWAYS],
            has_peer_view: false,
            rounds: SyncRounds::default(),
            table: Table::default(),
            queue: VecDeque::new(),
            last_numbers: [0; MAX_GATEWAYS],
            acknowledged: [0; MAX_GATEWAYS],
            unacknowledged: VecDeque::new(),
            is_listing: false,
            is_due: true,
            deadline: None,
            timed_out_releases: [false; SHARDS],
            index,
            name,
            incarnation,
            predecessor,
            started: env.tick(),
            succession,
            policy,
            rollout,
        };
        // In `GroupLease`, a lease that was never granted has expired.
        process.lease.is_required = true;
        env.schedule_for(process.id(), env.now, ProcessInput::Heartbeat);
        process.update(env);
        process
    }

    pub(super) fn id(&self) -> (usize, u64) {
        (self.index, self.incarnation)
    }

    pub(super) fn stream_number(&self) -> u32 {
        self.stream.number
    }

    /// Whether workers may open sessions in a shard: some of them may use the latest snapshot already.
    pub(super) fn may_open(&self, shard: usize, now: u64) -> bool {
        self.has_lease(now) && (self.used.may_open(shard) || (self.is_adopting && self.latest.may_open(shard)))
    }

    pub(super) fn handle(&mut self, input: ProcessInput, env: &mut Env) {
        match input {
            ProcessInput::Heartbeat => self.send_heartbeats(env),
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
            ProcessInput::Notice { stream, notice } => {
                if self.stream.is_open && self.stream.number == stream {
                    self.handle_notice(*notice, env);
                }
            }
            ProcessInput::StreamClosed { stream, is_rejected } => self.stream_closed(stream, is_rejected, env),
            ProcessInput::Link { link, message } => self.receive(link, message, env),
            ProcessInput::LinkDown { link } => self.link_down(link),
            ProcessInput::RecordDue { id } => self.send_record(id),
            ProcessInput::List { peer, request } => self.list(peer, request, env),
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
        self.published.gateways.iter_mut().for_each(|member| member.policy_release.forget());
        let is_new_epoch = self.note_epoch();
        self.mark_pending(is_new_epoch);
        self.is_due = true;
    }

    fn adopt_later(&mut self, env: &mut Env) {
        if !std::mem::replace(&mut self.is_adopting, true) {
            let at = env.now + env.delay(Delay::Snapshot);
            env.schedule_for(self.id(), at, ProcessInput::Adopted);
        }
        for shard in 0..SHARDS {
            let awaits = self.latest.shards[shard].former_owner.is_some();
            if awaits {
                env.count(Class::ReleaseAwaited);
            }
        }
    }

    fn note_epoch(&mut self) -> bool {
        let epoch = self.latest.replication_epoch();
        std::mem::replace(&mut self.replication_epoch, epoch) != epoch
    }

    /// See `ControlLoop::update_membership_if_due`.
    pub(super) fn update(&mut self, env: &mut Env) {
        if !self.is_due {
            return;
        }
        while std::mem::take(&mut self.is_due) {
            self.update_once(env);
            self.replicate(env);
        }
        let deadline = self.group.next_deadline(env.instant()).map(Env::milliseconds);
        if let Some(at) = deadline.filter(|at| self.deadline.is_none_or(|known| *at < known)) {
            self.deadline = deadline;
            env.schedule_for(self.id(), at, ProcessInput::Deadline);
        }
    }

    fn update_once(&mut self, env: &mut Env) {
        let now = env.instant();
        if self.group_policy != self.policy.number {
            self.group_policy = self.policy.number;
            self.group.set_policy(&self.policy.peers, &self.policy.version, now);
        }
        self.group.set_awaits_policy_release(self.latest.awaits_release, now);
        self.awaited_since = self.awaited_since.or(Some(env.now)).filter(|_| self.latest.awaits_release);
        self.group.set_status(&self.status, now);
        self.group.set_links(self.peer_states());
        self.leave_membership(env);
        for peer in self.group.sync_targets(now) {
            self.request_sync(index_of(&peer), env);
        }
        if self.pending.is_none() && self.applied > 0 {
            self.send_releases();
        }
        self.lease.is_required = self.group.needs_lease();
        if let Some(until) = self.group.lease_from_peers().map(Env::time_of)
            && until > self.lease.until
        {
            (self.lease.until, self.lease.promised_by) = (until, Some(self.status.view.clone()));
            env.count(Class::PeerLease);
            let named = self.status.view.member(&self.name).map(|member| member.incarnation);
            if named != Some(self.incarnation) {
                env.count(Class::SuccessorLease);
            }
        }
        let spec = self.group.spec(now, env.tick());
        if self.group.give_up_refused_drain().is_some() {
            env.count(Class::DrainRefused);
        }
        if spec != self.published {
            self.publish(spec, env);
        } else if self.pending.is_none() && self.applied != self.group.view().number {
            self.mark_pending(false);
        }
        if !self.is_adopting {
            self.mark_applied(env);
            self.is_due |= self.applied != self.group.view().number;
        }
        let reported = ReportedState {
            desired_state: self.group.desired_state(now),
            seen_view: self.applied,
            unable: self.group.unable().cloned(),
        };
        if reported != self.reported {
            self.reported = reported;
            self.send_heartbeat(env);
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
                let release = self.peers[at].as_ref().and_then(|peer| peer.released.as_ref());
                at != self.index
                    && self.latest.is_active(at)
                    && release.map(|it| &it.policy) != Some(&self.policy.version)
            };
            if has_timed_out && (0..MAX_GATEWAYS).any(is_missing) {
                self.timed_out_releases[shard] = true;
                env.count(Class::ReleaseTimedOut);
            } else if before.shards[shard].former_owner.is_some() {
                env.count(Class::ReleaseReceived);
            } else {
                env.count(Class::OpenedByView);
            }
        }
        self.adopt_later(env);
        let active = |spec: &MembersSpec| -> u8 {
            spec.gateways.iter().filter(|it| it.active).map(|it| 1 << index_of(&it.name)).sum()
        };
        let needs_sync = self.note_epoch() || active(&spec) != active(&self.published);
        self.published = spec;
        self.mark_pending(needs_sync);
        self.is_due = true;
    }

    /// See `Group::mark_pending`.
    fn mark_pending(&mut self, needs_sync: bool) {
        let was_pending = self.pending.is_some_and(|(_, needs_sync)| needs_sync);
        let since = self.group.active_since();
        let needs_sync = needs_sync || was_pending || std::mem::replace(&mut self.active_since, since) != since;
        self.pending = Some((self.group.view().number, needs_sync));
    }

    /// See `Group::mark_applied`.
    fn mark_applied(&mut self, env: &mut Env) {
        let Some((number, needs_sync)) = self.pending.take() else { return };
        self.applied = number;
        let view = self.group.view().clone();
        if view != self.peer_view && view.number >= self.peer_view.number {
            self.set_peer_view(view, env);
        }
        let peers: Vec<usize> = self.group.peers().map(|name| index_of(name)).collect();
        if needs_sync {
            for at in &peers {
                if let Some(peer) = &mut self.peers[*at] {
                    peer.outbound.require_sync();
                }
            }
        }
        if std::mem::replace(&mut self.applied_policy, self.policy.number) != self.policy.number {
            for at in peers {
                if self.peers[at].as_ref().is_some_and(|peer| peer.has_other_policy) {
                    self.request_sync(at, env);
                }
            }
        }
        self.send_releases();
        // Frames may wait for this view.
        self.process_inboxes(env);
    }

    /// See `Group::send_releases`.
    fn send_releases(&mut self) {
        for name in self.group.peers() {
            if let Some(peer) = &mut self.peers[index_of(name)] {
                peer.outbound.release(self.group.release_for(name, self.applied));
            }
        }
    }
}
