//! Property tests by simulation: gateways, delayed and lost messages, and restarts of the server; invariants are
//! checked at each step. A simulated gateway computes its lease like a real one: from when it sent the heartbeat that
//! was acknowledged.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};

use super::*;
use crate::authority::UnavailableLimit;
use crate::{Commitment, DesiredState, DrainBlockReason, Member};

const TTL: u64 = 600;
const NAMES: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Time passes, in milliseconds.
    Advance(u16),
    /// A gateway sends a heartbeat: delays to the server and back in milliseconds; `None`: lost.
    Heartbeat(usize, Option<u16>, Option<u16>),
    /// A gateway changes its desired state.
    SetState(usize, DesiredState),
    /// A gateway has a fault.
    Fault(usize),
    /// The gateways that can own a shard, by shard, as bit sets; and the limit of unavailable gateways.
    Placement([u8; 2], Option<UnavailableLimit>),
    /// A gateway's process dies and is replaced; whether the end of its stream is detected, and whether the new process
    /// knows the secret.
    Replace(usize, bool, bool),
    /// An impostor sends a heartbeat with a gateway's name: with the incarnation in the view, or with one of its own.
    Impostor(usize, bool),
    /// The gateways in the policy, as a bit set.
    Policy(u8),
    /// The server dies and is replaced, with this record.
    RestartServer(Restored),
    /// A backup of the record is made.
    Backup,
    /// Another server decides from here on: it has followed the record, or not.
    OtherServer(bool),
}

/// The record that a server finds.
#[derive(Clone, Copy, Debug)]
enum Restored {
    Last,
    /// That of the last backup.
    Backup,
    Nothing,
}

fn limit() -> impl Strategy<Value = Option<UnavailableLimit>> {
    let count = (0_u32..3).prop_map(UnavailableLimit::Count);
    prop::option::of(prop_oneof![count, (0_u32..=100).prop_map(UnavailableLimit::Percent)])
}

fn placement() -> impl Strategy<Value = Step> {
    ([0_u8..8, 0_u8..8], limit()).prop_map(|(groups, limit)| Step::Placement(groups, limit))
}

fn step() -> impl Strategy<Value = Step> {
    let delay = || prop_oneof![9 => (0_u16..80).prop_map(Some), 1 => Just(None), 1 => (0_u16..900).prop_map(Some)];
    let state = prop_oneof![
        4 => Just(DesiredState::Ready),
        1 => Just(DesiredState::Joining),
        1 => Just(DesiredState::Draining),
    ];
    let gateway = || 0..NAMES.len();
    prop_oneof![
        30 => (gateway(), delay(), delay()).prop_map(|(index, to, from)| Step::Heartbeat(index, to, from)),
        20 => (1_u16..200).prop_map(Step::Advance),
        2 => (300_u16..1500).prop_map(Step::Advance),
        6 => (gateway(), state).prop_map(|(index, state)| Step::SetState(index, state)),
        2 => gateway().prop_map(Step::Fault),
        1 => placement(),
        1 => (gateway(), any::<bool>(), any::<bool>())
            .prop_map(|(index, is_detected, knows_secret)| Step::Replace(index, is_detected, knows_secret)),
        3 => (gateway(), any::<bool>()).prop_map(|(index, repeats)| Step::Impostor(index, repeats)),
        1 => (1_u8..8).prop_map(Step::Policy),
        1 => prop_oneof![2 => Just(Restored::Last), 1 => Just(Restored::Backup), 1 => Just(Restored::Nothing)]
            .prop_map(Step::RestartServer),
        1 => Just(Step::Backup),
        1 => any::<bool>().prop_map(Step::OtherServer),
    ]
}

#[derive(Default)]
struct Gateway {
    incarnation: u64,
    /// The previous process, if this one knows its secret.
    predecessor: Option<u64>,
    state: DesiredState,
    has_fault: bool,
    view: Arc<MembershipView>,
    /// Whether it has a stream to the current server.
    is_connected: bool,
    /// A number above that of its view, if the server has had another one of the same number.
    used_number: u64,
    /// Until when it knows that it has a lease.
    lease_until: u64,
    /// When its last message arrives: streams preserve the order.
    heartbeat_arrival: u64,
    reply_arrival: u64,
}

enum Message {
    Heartbeat { heartbeat: Box<Heartbeat>, sent: u64, reply_delay: Option<u16> },
    View { to: usize, incarnation: u64, view: Arc<MembershipView>, lease_until: u64 },
}

struct Simulation<'a> {
    coverage: &'a Coverage,
    start: Instant,
    now: u64,
    state: MembershipState,
    /// A server that doesn't decide: it has decided before, or never.
    other: MembershipState,
    backup: Record,
    policy: u8,
    gateways: [Gateway; NAMES.len()],
    /// Messages in flight, by arrival and sequence number.
    messages: BTreeMap<(u64, u64), Message>,
    sequence: u64,
    /// Until when a process may hold a lease, whether or not it knows it yet.
    leases: BTreeMap<(usize, u64), u64>,
    /// Processes that may be deactivated in spite of a lease: they drain, or a server can't know that they were active.
    exempt: BTreeSet<(usize, u64)>,
    impostors: u64,
}

/// Commitment of a process; the simulation needs no secret behind it.
fn commitment(index: usize, incarnation: u64) -> Commitment {
    let mut commitment = [index as u8; 32];
    commitment[..8].copy_from_slice(&incarnation.to_be_bytes());
    commitment
}

impl<'a> Simulation<'a> {
    fn new(coverage: &'a Coverage) -> Self {
        let gateways = NAMES.map(|_| Gateway { incarnation: 1, state: DesiredState::Ready, ..Gateway::default() });
        let mut simulation = Self {
            coverage,
            start: Instant::now(),
            now: 0,
            state: MembershipState::new(Duration::from_millis(TTL)),
            other: MembershipState::new(Duration::from_millis(TTL)),
            backup: Record::default(),
            policy: 7,
            gateways,
            messages: BTreeMap::new(),
            sequence: 0,
            leases: BTreeMap::new(),
            exempt: BTreeSet::new(),
            impostors: 1000,
        };
        simulation.set_policy(7);
        simulation.state.begin_term(&Record::default().next_term());
        simulation
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    fn set_policy(&mut self, policy: u8) {
        self.policy = policy;
        let names = (0..NAMES.len()).filter(|index| policy & (1 << index) != 0).map(|index| Arc::from(NAMES[index]));
        self.state.set_policy(names);
    }

    /// Exempts gateways outside the policy: before recovery a server may not know that they were active.
    fn exempt_unknown_gateways(&mut self) {
        let unknown = (0..NAMES.len()).filter(|index| self.policy & (1 << index) == 0);
        self.exempt.extend(unknown.map(|index| (index, self.gateways[index].incarnation)));
    }

    fn enqueue(&mut self, arrival: u64, message: Message) {
        self.sequence += 1;
        self.messages.insert((arrival, self.sequence), message);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Advance(ms) => self.advance(self.now + u64::from(ms)),
            Step::Heartbeat(index, to, from) => self.send_heartbeat(index, to, from),
            Step::SetState(index, state) => {
                (self.gateways[index].state, self.gateways[index].has_fault) = (state, false);
            }
            Step::Fault(index) => {
                (self.gateways[index].state, self.gateways[index].has_fault) = (DesiredState::Draining, true);
            }
            Step::Placement(groups, limit) => {
                let group = |bits: u8| (0..NAMES.len()).filter(move |index| bits & (1 << index) != 0);
                let groups = groups.map(|bits| group(bits).map(|index| Arc::from(NAMES[index])).collect());
                self.state.set_shard_groups(Arc::new(BTreeSet::from(groups)));
                self.state.set_max_unavailable(limit);
                self.decide(|_, _| {});
            }
            Step::Impostor(index, repeats) => self.impostor(index, repeats),
            Step::Replace(index, is_detected, knows_secret) => {
                let incarnation = self.gateways[index].incarnation;
                self.leases.remove(&(index, incarnation));
                // Its messages arrive before the end of its stream; here, neither arrives.
                self.messages.retain(|_, message| !message.is_from(NAMES[index]));
                if is_detected {
                    self.state.stream_closed(NAMES[index], incarnation);
                }
                let predecessor = knows_secret.then_some(incarnation);
                let (incarnation, state) = (incarnation + 1, DesiredState::Joining);
                self.gateways[index] = Gateway { incarnation, predecessor, state, ..Gateway::default() };
            }
            Step::Policy(policy) => {
                self.set_policy(policy);
                if !self.state.recovered {
                    self.exempt_unknown_gateways();
                }
                self.decide(|_, _| {});
            }
            Step::OtherServer(follows) => self.change_server(follows),
            Step::Backup => self.backup = self.state.stored_record(),
            Step::RestartServer(restored) => self.restart_server(restored),
        }
    }

    fn restart_server(&mut self, restored: Restored) {
        let last = self.state.stored_record();
        let (groups, limit) = (self.state.shard_groups.clone(), self.state.max_unavailable);
        let (record, class) = match restored {
            Restored::Last => (last, "restart"),
            Restored::Backup => (self.backup.clone(), "restart with a backup"),
            Restored::Nothing => (Record::default(), "restart without a record"),
        };
        self.coverage.count(class);
        self.state = MembershipState::new(Duration::from_millis(TTL));
        self.state.set_shard_groups(groups);
        self.state.set_max_unavailable(limit);
        self.state.begin_term(&record.next_term());
        self.set_policy(self.policy);
        self.exempt_unknown_gateways();
        self.lose_streams();
    }

    /// The end of all streams to a server: heartbeats on the way are lost, and gateways report again.
    fn lose_streams(&mut self) {
        self.messages.retain(|_, message| matches!(message, Message::View { .. }));
        self.gateways.iter_mut().for_each(|gateway| gateway.is_connected = false);
    }

    /// The other server decides from here on.
    fn change_server(&mut self, follows: bool) {
        let record = self.state.stored_record();
        std::mem::swap(&mut self.state, &mut self.other);
        self.other.leave_term();
        let (groups, limit) = (self.other.shard_groups.clone(), self.other.max_unavailable);
        if follows {
            self.state.follow(&record);
        }
        self.state.begin_term(&record.next_term());
        self.state.set_shard_groups(groups);
        self.state.set_max_unavailable(limit);
        self.set_policy(self.policy);
        self.exempt_unknown_gateways();
        self.lose_streams();
        self.coverage.count("another server decides");
    }

    /// One round of heartbeats without a fault: after five, all gateways are active.
    fn heartbeats_of_all(&mut self) {
        (0..NAMES.len()).for_each(|index| self.step(Step::Heartbeat(index, Some(5), Some(5))));
        self.step(Step::Advance(150));
    }

    fn send_heartbeat(&mut self, index: usize, delay: Option<u16>, reply_delay: Option<u16>) {
        let now = self.now;
        if !self.gateways[index].is_connected {
            // A new stream: replies on the old one are lost.
            self.messages.retain(|_, message| !matches!(message, Message::View { to, .. } if *to == index));
            let gateway = &self.gateways[index];
            self.leases.insert((index, gateway.incarnation), gateway.lease_until);
        }
        let gateway = &mut self.gateways[index];
        let heartbeat = Heartbeat {
            gateway: NAMES[index].into(),
            incarnation: gateway.incarnation,
            commitment: commitment(index, gateway.incarnation),
            predecessor: gateway.predecessor.map(|predecessor| Box::new(commitment(index, predecessor))),
            desired_state: gateway.state,
            seen_view: gateway.view.number,
            fingerprint: None,
            peer: None,
            tunnel_key: None,
            overlay: None,
            unable: gateway.has_fault.then(|| "a link is down".into()),
            policy_version: None,
            sessions: 0,
            known_view: gateway.view.number.max(gateway.used_number),
        };
        let Some(delay) = delay else { return self.coverage.count("heartbeat lost") };
        gateway.is_connected = true;
        gateway.heartbeat_arrival = gateway.heartbeat_arrival.max(now + u64::from(delay));
        let arrival = gateway.heartbeat_arrival;
        self.enqueue(arrival, Message::Heartbeat { heartbeat: Box::new(heartbeat), sent: now, reply_delay });
    }

    /// Sends an impostor's heartbeat. It must not be accepted while the gateway's process may have a lease, or is
    /// alive.
    fn impostor(&mut self, index: usize, repeats: bool) {
        self.impostors += 1;
        let incarnation = if repeats { self.gateways[index].incarnation } else { self.impostors };
        let heartbeat = Heartbeat {
            gateway: NAMES[index].into(),
            incarnation,
            commitment: commitment(9, self.impostors),
            predecessor: None,
            desired_state: DesiredState::Ready,
            seen_view: self.state.view().number,
            fingerprint: Some([9; 32]),
            peer: None,
            tunnel_key: None,
            overlay: None,
            unable: None,
            policy_version: None,
            sessions: 0,
            known_view: 0,
        };
        let (now, process) = (self.instant(), (index, self.gateways[index].incarnation));
        let record = self.state.record(NAMES[index]).filter(|record| record.incarnation == process.1);
        // A server without any heartbeat accepts the first process; only certificates prevent that.
        let Some(record) = record else { return };
        let has_timed_out = now.saturating_duration_since(record.last_heartbeat) > Duration::from_millis(TTL);
        let is_alive = !record.stream_closed && !has_timed_out;
        let has_lease =
            self.leases.get(&process).is_some_and(|until| *until > self.now) && !self.exempt.contains(&process);
        let coverage = self.coverage;
        let mut outcome = None;
        self.decide(|state, now| outcome = Some(state.heartbeat(now, &heartbeat)));
        let is_accepted = match outcome {
            Some(Ok(HeartbeatOutcome::Accepted)) => true,
            Some(Ok(HeartbeatOutcome::Deferred | HeartbeatOutcome::UnknownGateway) | Err(_)) | None => false,
        };
        assert!(
            !(is_accepted && (repeats || is_alive || has_lease)),
            "{process:?} is replaced: {is_alive} {has_lease}"
        );
        assert!(!repeats || matches!(outcome, Some(Err(Rejection::InvalidSecret { .. }))), "{outcome:?}");
        coverage.count(match (repeats, is_accepted) {
            (true, _) => "impostor repeats an incarnation",
            (false, true) => "impostor gets a free name",
            (false, false) => "impostor gets nothing",
        });
    }

    /// Advances time and processes messages and deadlines on the way.
    fn advance(&mut self, until: u64) {
        loop {
            let arrival = self.messages.first_key_value().map(|((arrival, _), _)| *arrival);
            let deadline =
                self.state.next_deadline().map(|it| it.saturating_duration_since(self.start).as_millis() as u64);
            let deadline = deadline.filter(|deadline| *deadline > self.now);
            let next = arrival.into_iter().chain(deadline).min().filter(|next| *next <= until);
            let Some(next) = next else { break };
            self.now = self.now.max(next);
            if arrival == Some(next) {
                let (_, message) = self.messages.pop_first().unwrap();
                self.deliver(message);
            } else {
                self.decide(|_, _| {});
            }
        }
        self.now = until;
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::View { to, incarnation, view, lease_until } => {
                let gateway = &mut self.gateways[to];
                if gateway.incarnation == incarnation {
                    gateway.lease_until = gateway.lease_until.max(lease_until);
                    if view.number > gateway.view.number {
                        gateway.view = view;
                    } else if view.number == gateway.view.number && view != gateway.view {
                        gateway.used_number = view.number + 1;
                        self.coverage.count("another view of the same number");
                    }
                }
            }
            Message::Heartbeat { heartbeat, sent, reply_delay } => {
                let index = NAMES.iter().position(|name| *name == &*heartbeat.gateway).unwrap();
                let mut outcome = Ok(HeartbeatOutcome::UnknownGateway);
                self.decide(|state, now| outcome = state.heartbeat(now, &heartbeat));
                // Only one process per name is alive here, so a new one is accepted eventually.
                self.coverage.count(match outcome {
                    Ok(HeartbeatOutcome::Accepted) => "accepted",
                    Ok(HeartbeatOutcome::Deferred) => "deferred",
                    Ok(HeartbeatOutcome::UnknownGateway) => "unknown gateway",
                    Err(_) => "rejected",
                });
                self.reply(index, &heartbeat, sent, reply_delay);
            }
        }
    }

    fn reply(&mut self, index: usize, heartbeat: &Heartbeat, sent: u64, delay: Option<u16>) {
        let process = (index, heartbeat.incarnation);
        let mut lease_until = 0;
        if self.state.is_outdated() {
            assert_eq!(self.state.grant(self.instant(), &heartbeat.gateway, heartbeat.incarnation), None);
            return self.coverage.count("no reply: the record is outdated");
        }
        if let Some(lease) = self.state.grant(self.instant(), &heartbeat.gateway, heartbeat.incarnation) {
            let until = sent + lease.as_millis() as u64;
            let latest = self.leases.entry(process).or_default();
            *latest = until.max(*latest);
            lease_until = until;
            self.exempt.remove(&process);
            self.check_leases();
            self.coverage.count("lease granted");
            let is_removed = !self.policy_names().any(|name| name == NAMES[index]);
            self.coverage.add("lease granted to a removed gateway", u64::from(is_removed));
        } else {
            self.coverage.count("no lease");
        }
        let Some(delay) = delay else { return self.coverage.count("reply lost") };
        let gateway = &mut self.gateways[index];
        gateway.reply_arrival = gateway.reply_arrival.max(self.now + u64::from(delay));
        let arrival = gateway.reply_arrival;
        let view = self.state.view().clone();
        self.enqueue(arrival, Message::View { to: index, incarnation: heartbeat.incarnation, view, lease_until });
    }

    /// Invariant: a process that may hold a lease is active.
    fn check_leases(&self) {
        for (process, until) in self.leases.iter().filter(|(_, until)| **until > self.now) {
            let member = self.state.view().member(NAMES[process.0]);
            let is_active = member.is_some_and(|member| member.serving && member.incarnation == process.1);
            assert!(
                is_active || self.exempt.contains(process),
                "{process:?} has a lease until {until}, now {}",
                self.now
            );
        }
    }

    /// Applies an event, lets the state decide, and checks the change of the view.
    fn decide(&mut self, event: impl FnOnce(&mut MembershipState, Instant)) {
        let now = self.instant();
        event(&mut self.state, now);
        let before = self.state.view().clone();
        let (was_outdated, used_number) = (self.state.is_outdated(), self.state.term.used_number);
        self.state.decide(now);
        let after = self.state.view().clone();
        self.check_drain_blocks();
        if before == after {
            return;
        }
        assert!(after.number > before.number);
        self.coverage.add("numbers skipped", u64::from(after.number > before.number + 1));
        for old in &before.members {
            let new = after.member(&old.name);
            assert!(new.is_none_or(|new| new.epoch >= old.epoch));
            if new.is_none() {
                assert!(!self.policy_names().any(|name| *name == *old.name));
                self.coverage.count(if old.serving { "removed: timeout" } else { "removed: inactive" });
            }
            if old.serving && !new.is_some_and(|new| new.serving) {
                assert!(new.is_none_or(|new| new.epoch == after.number && new.epoch > old.epoch));
                self.check_deactivation(old);
            }
        }
        for new in after.active_members().filter(|new| before.member(&new.name).is_some_and(|old| !old.serving)) {
            let record = self.state.record(&new.name).unwrap();
            assert_eq!(record.seen_view, if was_outdated { used_number } else { before.number });
            assert!(record.desired_state == DesiredState::Ready || record.is_unable());
            self.coverage.count("activated");
            if record.is_unable() {
                // Only if no other is active.
                let is_in_policy = |name: &str| {
                    NAMES.iter().position(|it| *it == name).is_some_and(|index| self.policy & (1 << index) != 0)
                };
                let mut others = after.active_members().filter(|it| is_in_policy(&it.name));
                assert!(others.all(|it| self.state.record(&it.name).is_some_and(MemberRecord::is_unable)));
                self.coverage.count("activated with a fault");
            }
        }
        if was_outdated {
            // Who was active by the last view, nobody could ask; none is drained.
            return self.coverage.count("went on after an unknown view");
        }
        self.check_faults(&before, &after);
        self.check_drains(&before, &after);
    }

    fn is_able(&self, name: &str) -> bool {
        let has_fault = self.state.record(name).is_some_and(MemberRecord::is_unable);
        self.state.view().member(name).is_some_and(|member| member.serving) && !has_fault
    }

    fn policy_names(&self) -> impl Iterator<Item = &'static str> {
        let policy = self.policy;
        NAMES.into_iter().enumerate().filter(move |(index, _)| policy & (1 << index) != 0).map(|(_, name)| name)
    }

    /// Invariant: a drain of a gateway without a fault leaves an active one without a fault to each shard that it could
    /// own, and no more gateways unavailable than the limit.
    fn check_drains(&self, before: &MembershipView, after: &MembershipView) {
        let is_drained = |old: &&Member| {
            let record = self.state.record(&old.name).filter(|record| record.incarnation == old.incarnation);
            let is_inactive = after.member(&old.name).is_some_and(|new| !new.serving && !new.lease_expired);
            is_inactive && record.is_some_and(|it| it.desired_state == DesiredState::Draining && !it.is_unable())
        };
        for old in before.active_members().filter(is_drained) {
            let groups = self.state.shard_groups.iter().filter(|group| group.contains(&old.name));
            let in_policy: BTreeSet<&str> = self.policy_names().collect();
            for group in groups {
                let is_owner = |name: &Arc<str>| in_policy.contains(&**name) && self.is_able(name);
                assert!(group.iter().any(is_owner), "{} was drained, none of {group:?} is left", old.name);
                self.coverage.count("drained: its shards have an owner");
            }
            let unavailable = in_policy.iter().filter(|name| !self.is_able(name)).count();
            if let Some(limit) = self.state.max_unavailable.filter(|_| in_policy.contains(&*old.name)) {
                let limit = limit.of(in_policy.len());
                assert!(unavailable <= limit, "{} was drained: {unavailable} of {limit}", old.name);
                self.coverage.count("drained within the limit");
            }
        }
    }

    /// Invariant: only an active gateway that drains without a fault is blocked, and with a reason that holds.
    fn check_drain_blocks(&self) {
        for name in NAMES {
            let Some(block) = self.state.drain_block(name).filter(|_| self.state.recovered) else { continue };
            let record = self.state.record(name).expect("it has sent a heartbeat");
            assert!(record.desired_state == DesiredState::Draining && self.is_able(name));
            match block.reason {
                DrainBlockReason::MaxUnavailable(limit) => {
                    assert!(block.gateways.len() >= limit as usize);
                    self.coverage.count("blocked: limit");
                }
                DrainBlockReason::BecomingActive => self.coverage.count("blocked: becoming active"),
                DrainBlockReason::NoBackup => self.coverage.count("blocked: refused"),
            }
            let is_unavailable =
                |other: &Arc<str>| !self.policy_names().any(|it| *it == **other) || !self.is_able(other);
            assert!(block.gateways.iter().all(|other| **other != *name && is_unavailable(other)), "{block:?}");
        }
    }

    /// Invariant: a member is deactivated for a fault only while one without a fault is active.
    fn check_faults(&self, before: &MembershipView, after: &MembershipView) {
        let has_fault = |name: &str| self.state.record(name).is_some_and(MemberRecord::is_unable);
        let is_active = |name: &str| after.member(name).is_some_and(|it| it.serving);
        let is_same = |old: &Member| after.member(&old.name).is_some_and(|it| it.incarnation == old.incarnation);
        for old in before.active_members().filter(|old| has_fault(&old.name) && !is_active(&old.name) && is_same(old)) {
            if after.member(&old.name).is_some_and(|it| it.lease_expired) {
                continue;
            }
            let has_able_member = after.active_members().any(|it| !has_fault(&it.name));
            assert!(has_able_member, "{} was deactivated, and no member without a fault is active", old.name);
            self.coverage.count("deactivated: fault");
        }
    }

    /// Invariant: a member isn't deactivated while it may hold a lease, unless it is draining.
    fn check_deactivation(&mut self, old: &Member) {
        let index = NAMES.iter().position(|name| *name == &*old.name).unwrap();
        let process = (index, old.incarnation);
        let record = self.state.record(&old.name).filter(|record| record.incarnation == old.incarnation);
        self.coverage.count(match record {
            None => "deactivated: another process",
            Some(record) if record.desired_state == DesiredState::Draining => "deactivated: draining",
            Some(_) => "deactivated: timeout",
        });
        if record.is_some_and(|record| record.desired_state == DesiredState::Draining) {
            self.exempt.insert(process);
        }
        let until = self.leases.get(&process).copied().unwrap_or_default();
        assert!(until <= self.now || self.exempt.contains(&process), "{process:?} until {until}, now {}", self.now);
    }
}

impl Message {
    fn is_from(&self, name: &str) -> bool {
        matches!(self, Self::Heartbeat { heartbeat, .. } if *heartbeat.gateway == *name)
    }
}

#[test]
fn a_lease_expires_before_its_gateway_is_deactivated_and_view_numbers_only_increase() {
    let classes = [
        "lease granted",
        "lease granted to a removed gateway",
        "removed: timeout",
        "removed: inactive",
        "no lease",
        "heartbeat lost",
        "reply lost",
        "deferred",
        "unknown gateway",
        "activated",
        "deactivated: timeout",
        "deactivated: draining",
        "deactivated: another process",
        "deactivated: fault",
        "drained: its shards have an owner",
        "drained within the limit",
        "blocked: limit",
        "blocked: becoming active",
        "blocked: refused",
        "activated with a fault",
        "impostor repeats an incarnation",
        "impostor gets a free name",
        "impostor gets nothing",
        "restart",
        "restart with a backup",
        "restart without a record",
        "no reply: the record is outdated",
        "went on after an unknown view",
        "another server decides",
    ];
    property(
        ProptestConfig::with_cases(600),
        &(prop::option::of(placement()), prop::collection::vec(step(), 1..250)),
        &classes,
        |(running_with, steps), coverage| {
            let mut simulation = Simulation::new(coverage);
            if let Some(placement) = running_with {
                simulation.step(placement);
                (0..6).for_each(|_| simulation.heartbeats_of_all());
            }
            for step in steps {
                simulation.step(step);
            }
            Ok(())
        },
    );
}

/// Without faults all gateways become active, and stay so over a restart of the server.
#[test]
fn all_gateways_become_active_without_faults() {
    let coverage = Coverage::default();
    let mut simulation = Simulation::new(&coverage);
    for round in 0..60 {
        if round == 30 {
            simulation.step(Step::RestartServer(Restored::Last));
        }
        simulation.heartbeats_of_all();
        assert!(round < 5 || simulation.state.view().active_members().count() == NAMES.len(), "round {round}");
    }
}
