//! A world: the policy server, gateways, the network between them, and the sessions that were opened.

use std::cell::RefCell;
use std::rc::Rc;

use super::choices::{Choices, Delay};
use super::coverage::{Class, Counts};
use super::engine::Owner;
use super::env::{Env, Input, Invariant, ProcessInput, ServerInput};
use super::policies::{MAX_GATEWAYS, ModelPolicy, Placement, Policies, SHARDS};
use super::process::Process;
use super::server::Server;
use super::specs;
use super::steps::Step;
use super::succession::Left;
use super::table::State;
use crate::member;
use crate::succession::ClaimRefusal;

/// A session that was opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    pub(super) id: u32,
    pub(super) shard: usize,
    pub(super) port: u16,
    opened_at: u64,
    /// Whether it has ended.
    pub(super) is_closed: bool,
    /// Whether it may be lost: with the only gateway that had it, or with what was awaited for too long.
    pub(super) may_be_lost: bool,
    /// Whether a process that had it has died.
    pub(super) has_survived: bool,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    policies: Rc<RefCell<Policies>>,
    pub(super) env: Env,
    pub(super) server: Server,
    /// The live processes.
    pub(super) processes: Vec<Option<Process>>,
    incarnations: [u64; MAX_GATEWAYS],
    /// The policy that each gateway has on disk.
    cached: Vec<(Rc<ModelPolicy>, u64)>,
    /// What the last process of each gateway has left.
    left: Vec<Left>,
    pub(super) sessions: Vec<Session>,
    /// Shards of which two gateways were owners, or could be, since a release was awaited for too long.
    pub(super) tainted: [bool; SHARDS],
}

impl World {
    /// A world whose gateways of this policy have just been started.
    pub(super) fn new(
        policies: &Rc<RefCell<Policies>>,
        gateways: usize,
        placement: Placement,
        choices: Choices,
    ) -> Self {
        let policy = policies.borrow_mut().of(placement);
        let mut world = Self {
            policies: policies.clone(),
            env: Env::new(choices),
            server: Server::new(&policy),
            processes: (0..gateways).map(|_| None).collect(),
            incarnations: [0; MAX_GATEWAYS],
            cached: vec![(policy, 0); gateways],
            left: vec![Left::default(); gateways],
            sessions: Vec::new(),
            tainted: [false; SHARDS],
        };
        (0..gateways).for_each(|at| world.restart(at, true));
        world
    }

    /// An independent copy.
    pub(super) fn fork(&self) -> Self {
        let mut world = self.clone();
        world.processes.iter_mut().flatten().for_each(Process::detach);
        world
    }

    /// From here on, choices are these; sessions wait this long for their first record.
    pub(super) fn begin(&mut self, choices: Choices, record_age: u64) {
        (self.env.choices, self.env.record_age) = (choices, record_age);
        self.env.counts = Counts::default();
    }

    /// A gateway's process starts, with the policy that it has on disk.
    pub(super) fn restart(&mut self, at: usize, knows_secret: bool) {
        if self.processes[at].is_some() {
            return;
        }
        let predecessor = Some(self.incarnations[at]).filter(|it| *it > 0 && knows_secret);
        self.incarnations[at] += 1;
        let name = self.policies.borrow().names[at].clone();
        let (policy, rollout) = self.cached[at].clone();
        if self.incarnations[at] > 1 {
            self.env.count(Class::Restarted);
        }
        // Who doesn't know the secret is on another host, or was started after a reboot.
        let left = if knows_secret { self.left[at].clone() } else { Left::default() };
        let ids = (self.incarnations[at], predecessor);
        let process = Process::start((at, name), ids, (policy, rollout), left, &mut self.env);
        if process.is_second_successor() {
            self.env.count(Class::SucceededTwice);
        }
        self.env.suspended_until[at] = self.env.now;
        if self.server.rollout > rollout {
            let delay = 5 + self.env.delay(Delay::Server);
            self.deliver_policy(at, process.incarnation, delay);
        }
        self.processes[at] = Some(process);
    }

    fn deliver_policy(&mut self, at: usize, incarnation: u64, delay: u64) {
        let input = ProcessInput::Policy { policy: self.server.policy.clone(), rollout: self.server.rollout };
        self.env.schedule_for((at, incarnation), self.env.now + delay, input);
    }

    /// The server gets a policy, and each gateway after a while.
    pub(super) fn set_policy(&mut self, placement: Placement, delays: [u16; MAX_GATEWAYS]) {
        let before = self.server.policy.placement;
        let policy = self.policies.borrow_mut().of(placement);
        if self.cached.iter().any(|(cached, rollout)| cached.number == policy.number && *rollout < self.server.rollout)
        {
            self.env.count(Class::PolicyReverted);
        }
        let added = (placement.gateways & !before.gateways).count_ones();
        let removed = (before.gateways & !placement.gateways).count_ones();
        self.env.counts.add(Class::GatewayAdded, added.into());
        self.env.counts.add(Class::GatewayRemoved, removed.into());
        self.server.set_policy(policy, &mut self.env);
        for (at, delay) in delays.into_iter().enumerate().take(self.processes.len()) {
            if let Some(incarnation) = self.processes[at].as_ref().map(|it| it.incarnation) {
                self.deliver_policy(at, incarnation, delay.into());
            }
        }
    }

    /// A process dies with all that it has in memory; whether the server detects the end of its stream.
    pub(super) fn crash(&mut self, at: usize, is_detected: bool) {
        let Some(process) = self.processes[at].take() else { return };
        self.env.count(Class::Crashed);
        self.excuse_sessions_of(&process);
        self.cached[at] = (process.policy.clone(), process.rollout);
        self.left[at] = process.succession.left(&process.name, self.env.now);
        let (from, incarnation) = process.id();
        for other in (0..self.processes.len()).filter(|other| *other != at) {
            self.env.break_links(at, other, Some(incarnation));
        }
        if is_detected {
            let stream = process.stream.number;
            self.env.send_to_server(from, ServerInput::StreamClosed { from, incarnation, stream });
        }
    }

    /// What only this process had may be lost: its replica has all that was replicated.
    fn excuse_sessions_of(&mut self, process: &Process) {
        for session in self.sessions.iter_mut().filter(|session| process.table.has(session.id)) {
            let replica = process.used.successor(session.shard);
            let replica = replica.and_then(|at| self.processes.get(at)?.as_ref());
            if replica.is_some_and(|replica| replica.table.has(session.id)) {
                session.has_survived = true;
            } else if !std::mem::replace(&mut session.may_be_lost, true) {
                self.env.count(Class::LostWithProcess);
            }
        }
    }

    /// A process opens a session in a shard, if it may.
    pub(super) fn open(&mut self, at: usize, shard: usize) {
        let Some(process) = self.processes[at].as_mut().filter(|it| it.may_open(shard, self.env.now)) else { return };
        if self.env.suspended_until[at] > self.env.now {
            return;
        }
        if !process.used.may_open(shard) {
            // The worker is the first one with the latest snapshot.
            process.used = process.latest.clone();
        }
        let id = (self.sessions.len() * SHARDS + shard) as u32;
        if self.sessions.len() == specs::MAX_SESSIONS {
            return;
        }
        let Some(port) = process.table.open(id, &process.used, &self.env) else { return };
        let shard = specs::shard_of(port);
        self.env.schedule_for(process.id(), self.env.now + self.env.record_age, ProcessInput::RecordDue);
        self.env.count(Class::Opened);
        // A gateway that knows no other one waits for nobody.
        self.tainted[shard] |= process.is_alone() && process.status.view.number == 0;
        let may_be_lost = self.tainted[shard];
        let opened_at = self.env.now;
        let session = Session { id, shard, port, opened_at, is_closed: false, may_be_lost, has_survived: false };
        self.sessions.push(session);
        if !may_be_lost {
            self.check_port(at);
        }
    }

    /// Invariant: no port is given out twice; the last session is the one that a gateway has just opened.
    fn check_port(&mut self, at: usize) {
        let Some((session, others)) = self.sessions.split_last() else { return };
        let is_given_out = |it: &&Session| it.port == session.port && !it.is_closed && !it.may_be_lost;
        let Some(other) = others.iter().find(is_given_out).copied() else { return };
        if self.is_unknown_to(at, &other) {
            // Only one of both can continue when the gateways reach each other again.
            self.sessions.iter_mut().filter(|it| it.port == other.port).for_each(|it| it.may_be_lost = true);
            return;
        }
        let session = *session;
        self.env.violate(Invariant::PortsOnce, || {
            format!("{at} gives out port {} of {other:?} again: {session:?}", other.port)
        });
    }

    /// Whether no protocol could have announced a session to a gateway: since it was opened, what each gateway that has
    /// it has sent was lost or stalled, or is on its way. A release that has arrived is the promise that nothing was.
    fn is_unknown_to(&self, at: usize, session: &Session) -> bool {
        let Some(process) = &self.processes[at] else { return false };
        let mut holders = self.processes.iter().flatten().filter(|it| it.table.has(session.id)).peekable();
        let is_cut_off = |holder: &Process| {
            let separated_until = self.env.separated_until[at][holder.index];
            let is_late = separated_until >= session.opened_at || self.env.carries(session.id);
            is_late && !process.has_release_of(holder.index)
        };
        !process.table.has_had(session.id) && holders.peek().is_some() && holders.all(is_cut_off)
    }

    /// A packet of a session reaches a gateway.
    pub(super) fn packet(&mut self, at: usize, session: usize) {
        let Some(session) = self.sessions.get(session).map(|session| (session.id, session.port)) else { return };
        let Some(process) = self.processes[at].as_mut() else { return };
        if self.env.suspended_until[at] > self.env.now {
            return;
        }
        match process.table.receive(session, &process.used, &self.env) {
            Some(State::Active) => self.env.count(Class::FailedOver),
            Some(State::Standby) => self.env.count(Class::Demoted),
            Some(State::Quarantined) | None => {}
        }
        process.replicate(&mut self.env);
        process.update(&mut self.env);
    }

    /// A session ends at its owner.
    pub(super) fn close(&mut self, session: usize) {
        let Some(session) = self.sessions.get_mut(session).filter(|session| !session.is_closed) else { return };
        let is_owner = |process: &&mut Process| {
            let is_active = process.table.find(session.id).is_some_and(|entry| entry.state == State::Active);
            is_active && process.used.owner(session.shard) == Owner::This
        };
        let Some(process) = self.processes.iter_mut().flatten().find(is_owner) else { return };
        if self.env.suspended_until[process.index] > self.env.now {
            return;
        }
        session.is_closed = true;
        self.env.count(Class::Closed);
        process.table.close(session.id, &process.used, &self.env);
        process.replicate(&mut self.env);
        process.update(&mut self.env);
    }

    /// Two gateways don't reach each other any more, or again.
    pub(super) fn cut(&mut self, a: usize, b: usize) {
        if a == b || !self.env.paths[a][b] {
            return;
        }
        (self.env.paths[a][b], self.env.paths[b][a]) = (false, false);
        self.env.separate(a, b, u64::MAX);
        self.env.count(Class::LinkBroken);
        self.env.break_links(a, b, None);
    }

    pub(super) fn heal(&mut self, a: usize, b: usize) {
        if !self.env.paths[a][b] {
            self.env.separate(a, b, self.env.now);
        }
        (self.env.paths[a][b], self.env.paths[b][a]) = (true, true);
    }

    /// Lets time pass.
    pub(super) fn advance(&mut self, duration: u64) {
        let until = self.env.now + duration;
        while self.env.violation.is_none()
            && let Some(input) = self.env.next(until)
        {
            self.handle(input);
        }
        self.env.now = until;
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Server(input) => self.server.handle(input, &mut self.env),
            Input::Connect(a, b) => self.connect(a, b),
            Input::Process { to, incarnation, input } => {
                let Some(process) = self.processes[to].as_mut().filter(|it| it.incarnation == incarnation) else {
                    return;
                };
                let is_heartbeat = matches!(input, ProcessInput::Heartbeat);
                process.handle(input, &mut self.env);
                if is_heartbeat {
                    self.dial(to);
                }
                self.check();
            }
        }
    }

    /// Connects a gateway to those with higher numbers, as far as it isn't.
    fn dial(&mut self, from: usize) {
        for to in from + 1..self.processes.len() {
            if self.env.paths[from][to] {
                self.count_refusal(from, to);
            }
            if self.can_link(from, to) && self.processes[from].as_ref().is_some_and(|it| !it.is_linked(to)) {
                let at = self.env.now + self.env.delay(Delay::Link);
                self.env.schedule(at, Input::Connect(from, to));
            }
        }
    }

    fn can_link(&self, a: usize, b: usize) -> bool {
        let (Some(one), Some(other)) = (&self.processes[a], &self.processes[b]) else { return false };
        self.env.paths[a][b] && one.expects(other) && other.expects(one)
    }

    fn count_refusal(&mut self, a: usize, b: usize) {
        let (Some(one), Some(other)) = (&self.processes[a], &self.processes[b]) else { return };
        let refusals = [one.refusal(other), other.refusal(one)];
        if refusals.contains(&Some(ClaimRefusal::PredecessorLinked)) {
            self.env.count(Class::PredecessorLinked);
        }
    }

    fn connect(&mut self, a: usize, b: usize) {
        let is_suspended = |at: usize| self.env.suspended_until[at] > self.env.now;
        if !self.can_link(a, b) || is_suspended(a) || is_suspended(b) {
            return;
        }
        if self.processes[a].as_ref().is_some_and(|it| it.is_linked(b)) {
            return;
        }
        let Ok([Some(one), Some(other)]) = self.processes.get_disjoint_mut([a, b]) else { return };
        let link = self.env.open_link([one.id(), other.id()]);
        let certificates = [one.presented(), other.presented()];
        one.accept(other.id(), &mut self.env);
        other.accept(one.id(), &mut self.env);
        one.link_up(other.id(), certificates[1], link);
        other.link_up(one.id(), certificates[0], link);
        for process in [one, other] {
            process.replicate(&mut self.env);
            process.update(&mut self.env);
        }
    }

    pub(super) fn step(&mut self, step: Step) {
        match step {
            Step::Advance(duration) => self.advance(duration.into()),
            Step::Open(at, shard) => {
                let order = (0..self.processes.len()).map(|step| (at + step) % self.processes.len());
                let may_open = |at: &usize| {
                    self.processes[*at].as_ref().is_some_and(|process| process.may_open(shard, self.env.now))
                };
                if let Some(at) = order.into_iter().find(may_open) {
                    self.open(at, shard);
                }
            }
            Step::Packet(at, session) => self.packet(at, session),
            Step::Close(session) => self.close(session),
            Step::Policy(placement, delays) => self.set_policy(placement, delays),
            Step::Crash(at, is_detected) => self.crash(at, is_detected),
            Step::Restart(at, knows_secret) => self.restart(at, knows_secret),
            Step::Succession(at, away, server_away) => {
                self.stop_server(server_away.into());
                self.crash(at, false);
                self.advance(away.into());
                self.restart(at, true);
            }
            Step::Suspend(at, duration) => {
                if self.processes[at].is_some() {
                    self.env.count(Class::Suspended);
                    let until = self.env.now + u64::from(duration);
                    self.env.suspended_until[at] = self.env.suspended_until[at].max(until);
                }
            }
            Step::Drain(at, draining) => self.order(at, member::Input::Draining(draining)),
            Step::Fault(at, is_unable) => {
                self.order(at, member::Input::Unable(is_unable.then(|| "a link is down".into())));
            }
            Step::Cut(a, b) => self.cut(a, b),
            Step::Heal(a, b) => self.heal(a, b),
            Step::Stall(a, b, duration) => {
                self.env.count(Class::LinkStalled);
                self.env.stall_links(a, b, duration.into());
            }
            Step::CutServer(at) => {
                self.env.server_paths[at] = false;
                self.env.drop_server_messages(Some(at));
            }
            Step::HealServer(at) => self.env.server_paths[at] = true,
            Step::RestartServer(duration) => self.stop_server(duration.into()),
        }
        self.check();
    }

    fn stop_server(&mut self, duration: u64) {
        if self.env.is_server_up {
            let starts_at = self.env.now + duration;
            self.server.stop(starts_at, self.incarnations, &mut self.env);
        }
    }

    fn order(&mut self, at: usize, input: member::Input) {
        let Some(process) = &mut self.processes[at] else { return };
        if self.env.suspended_until[at] > self.env.now {
            return self.env.schedule_for(process.id(), self.env.now, ProcessInput::Order(input));
        }
        process.handle(ProcessInput::Order(input), &mut self.env);
    }
}
