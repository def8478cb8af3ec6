//! The policy server: the real membership state, and around it what `policyd/membership` does: streams, replies, views
//! for everybody, and the record, which a server may find as it was, from a backup, or not at all.

use std::rc::Rc;
use std::time::Duration;

use super::coverage::Class;
use super::env::{Env, Input, Notice, ProcessInput, ServerInput};
use super::policies::{MAX_GATEWAYS, ModelPolicy, NAMES, index_of};
use super::process::TTL;
use crate::authority::{HeartbeatOutcome, MembershipState, Record};
use crate::{DesiredState, Heartbeat, MembershipView};

/// A removed gateway that has become inactive needs so much time for what it still has to send.
const HAND_OVER_TIME: u64 = 500;

/// A gateway's stream, from its first heartbeat on.
#[derive(Clone, Debug)]
struct Stream {
    number: u32,
    incarnation: u64,
}

/// The record that the next server finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Restored {
    /// The last one.
    Last,
    /// The one of a backup: from when the world began, or when the last server has died.
    Backup,
    /// None.
    Nothing,
}

/// The policy server.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) state: MembershipState,
    pub(super) restored: Restored,
    stored: Record,
    pub(super) backup: Record,
    pub(super) policy: Rc<ModelPolicy>,
    pub(super) rollout: u64,
    streams: [Option<Stream>; MAX_GATEWAYS],
    /// The stream of the last accepted heartbeat.
    origins: [Option<u32>; MAX_GATEWAYS],
    deadline: Option<u64>,
    /// Removed gateways that had to leave the view before they had handed over.
    pub(super) forced_out: [bool; MAX_GATEWAYS],
    /// When removed gateways were deactivated because they had handed over.
    handed_over_at: [Option<u64>; MAX_GATEWAYS],
    /// When the last heartbeat of each gateway was received.
    last_heartbeats: [u64; MAX_GATEWAYS],
    /// Processes that may have a lease although they aren't active: a server without the last record can't know of
    /// gateways that the policy doesn't name.
    pub(super) exempt: [Option<u64>; MAX_GATEWAYS],
    recovers_until: u64,
    /// The processes when the last server has died.
    processes: [u64; MAX_GATEWAYS],
}

impl Server {
    pub(super) fn new(policy: &Rc<ModelPolicy>) -> Self {
        let mut server = Self {
            state: MembershipState::new(Duration::from_millis(TTL)),
            restored: Restored::Last,
            stored: Record::default(),
            backup: Record::default(),
            policy: policy.clone(),
            rollout: 0,
            streams: [const { None }; MAX_GATEWAYS],
            origins: [None; MAX_GATEWAYS],
            deadline: None,
            forced_out: [false; MAX_GATEWAYS],
            handed_over_at: [None; MAX_GATEWAYS],
            last_heartbeats: [0; MAX_GATEWAYS],
            exempt: [None; MAX_GATEWAYS],
            recovers_until: 0,
            processes: [0; MAX_GATEWAYS],
        };
        server.state.begin_term(&server.stored.next_term());
        server.load_policy();
        server
    }

    /// Makes a backup of the record; which one the next server finds.
    pub(super) fn begin(&mut self, restored: Restored) {
        (self.backup, self.restored) = (self.stored.clone(), restored);
    }

    fn load_policy(&mut self) {
        self.state.set_policy(self.policy.names.iter().cloned());
        self.state.set_shard_groups(self.policy.shard_groups.clone());
    }

    pub(super) fn set_policy(&mut self, policy: Rc<ModelPolicy>, env: &mut Env) {
        self.rollout += 1;
        self.policy = policy;
        self.load_policy();
        if self.restored != Restored::Last && (env.now < self.recovers_until || !env.is_server_up) {
            self.exempt_unknown_gateways();
        }
        if env.is_server_up {
            self.decide(env);
        }
    }

    /// Dies; the next server starts later.
    pub(super) fn stop(&mut self, starts_at: u64, incarnations: [u64; MAX_GATEWAYS], env: &mut Env) {
        env.is_server_up = false;
        env.drop_server_messages(None);
        for (at, stream) in self.streams.iter_mut().enumerate() {
            if let Some(stream) = stream.take() {
                let input = ProcessInput::StreamClosed { stream: stream.number, is_rejected: false };
                env.send_from_server((at, stream.incarnation), input);
            }
        }
        self.processes = incarnations;
        if self.restored != Restored::Last {
            self.exempt_unknown_gateways();
        }
        let found = match self.restored {
            Restored::Last => self.stored.clone(),
            Restored::Backup => self.backup.clone(),
            Restored::Nothing => Record::default(),
        };
        self.backup = std::mem::replace(&mut self.stored, found);
        env.schedule(starts_at, Input::Server(ServerInput::Start));
    }

    fn exempt_unknown_gateways(&mut self) {
        for at in (0..MAX_GATEWAYS).filter(|at| !self.policy.placement.has(*at)) {
            self.exempt[at] = Some(self.processes[at]);
            self.forced_out[at] = true;
        }
    }

    fn start(&mut self, env: &mut Env) {
        env.is_server_up = true;
        env.count(match self.restored {
            Restored::Last => Class::ServerRestarted,
            Restored::Backup => Class::ServerRestored,
            Restored::Nothing => Class::ServerRecovered,
        });
        self.state = MembershipState::new(Duration::from_millis(TTL));
        self.stored = self.stored.next_term();
        self.state.begin_term(&self.stored);
        self.recovers_until = env.now + 3 * TTL;
        self.load_policy();
        (self.origins, self.deadline) = ([None; MAX_GATEWAYS], None);
    }

    pub(super) fn handle(&mut self, input: ServerInput, env: &mut Env) {
        match input {
            ServerInput::Start => self.start(env),
            _ if !env.is_server_up => {}
            ServerInput::Deadline => {
                if self.deadline.take_if(|deadline| *deadline <= env.now).is_some() {
                    self.decide(env);
                }
            }
            ServerInput::StreamClosed { from, incarnation, stream } => {
                if self.streams[from].as_ref().is_some_and(|it| it.number == stream) {
                    self.streams[from] = None;
                }
                if self.origins[from] == Some(stream) {
                    self.origins[from] = None;
                    self.state.stream_closed(NAMES[from], incarnation);
                    self.decide(env);
                }
            }
            ServerInput::Heartbeat { from, stream, is_first, sent, heartbeat } => {
                let incarnation = heartbeat.incarnation;
                let is_open = |it: &Stream| it.number == stream && it.incarnation == incarnation;
                if is_first || self.streams[from].as_ref().is_some_and(is_open) {
                    self.process((from, stream), sent, &heartbeat, env);
                } else {
                    // The stream was never opened here.
                    env.send_from_server(
                        (from, incarnation),
                        ProcessInput::StreamClosed { stream, is_rejected: false },
                    );
                }
            }
        }
    }

    fn process(&mut self, (from, number): (usize, u32), sent: u64, heartbeat: &Heartbeat, env: &mut Env) {
        let incarnation = heartbeat.incarnation;
        self.last_heartbeats[from] = env.now;
        let is_known =
            self.streams[from].as_ref().is_some_and(|it| (it.incarnation, it.number) >= (incarnation, number));
        if !is_known {
            self.streams[from] = Some(Stream { number, incarnation });
        }
        let outcome = self.state.heartbeat(env.instant(), heartbeat);
        self.decide(env);
        let to = (from, incarnation);
        if self.state.is_outdated() {
            env.count(Class::RecordOutdated);
            self.streams[from] = None;
            return env.send_from_server(to, ProcessInput::StreamClosed { stream: number, is_rejected: false });
        }
        let Ok(outcome) = outcome else {
            return env.send_from_server(to, ProcessInput::StreamClosed { stream: number, is_rejected: true });
        };
        let mut lease = None;
        if outcome == HeartbeatOutcome::Accepted {
            self.origins[from] = Some(number);
            lease = self.state.grant(env.instant(), &heartbeat.gateway, incarnation);
        }
        if lease.is_some() {
            self.exempt[from] = None;
        }
        let notice = Notice {
            sent: Some(sent),
            lease: lease.map(|lease| lease.as_millis() as u64),
            view: self.state.view().clone(),
            drain_block: self.state.drain_block(&heartbeat.gateway).cloned(),
        };
        env.send_from_server(to, ProcessInput::Notice { stream: number, notice: Box::new(notice) });
    }

    /// Decides on the next view, and sends it to everybody.
    fn decide(&mut self, env: &mut Env) {
        let before = self.state.view().clone();
        let was_outdated = self.state.is_outdated();
        self.state.decide(env.instant());
        let after = self.state.view().clone();
        if before != after {
            self.note_changes(&before, &after, env);
            self.stored = self.state.stored_record();
            if was_outdated {
                env.count(Class::RecordRenewed);
            }
            for (at, stream) in self.streams.iter().enumerate() {
                let Some(stream) = stream else { continue };
                let notice = Notice { sent: None, lease: None, view: after.clone(), drain_block: None };
                let input = ProcessInput::Notice { stream: stream.number, notice: Box::new(notice) };
                env.send_from_server((at, stream.incarnation), input);
            }
        }
        let deadline = self.state.next_deadline().map(|at| Env::milliseconds(at).max(env.now + 1));
        if let Some(at) = deadline.filter(|at| self.deadline.is_none_or(|known| *at < known)) {
            self.deadline = Some(at);
            env.schedule(at, Input::Server(ServerInput::Deadline));
        }
    }

    fn note_changes(&mut self, before: &MembershipView, after: &MembershipView, env: &mut Env) {
        for old in &before.members {
            let at = index_of(&old.name);
            let record = self.state.record(&old.name).filter(|record| record.incarnation == old.incarnation);
            let Some(new) = after.member(&old.name) else {
                env.count(Class::LeftView);
                let is_silent = env.now >= self.last_heartbeats[at] + TTL;
                let is_orphaned = [before, after].iter().any(|view| view.active_members().next().is_none());
                // It has no way to give its sessions to one of them.
                let is_cut_off = after.active_members().any(|member| !env.paths[at][index_of(&member.name)]);
                let is_early = self.handed_over_at[at].is_none_or(|since| env.now < since + HAND_OVER_TIME);
                if is_silent || is_orphaned || is_cut_off || is_early {
                    env.count(Class::ForcedOut);
                    self.forced_out[at] = true;
                }
                continue;
            };
            if old.serving == new.serving && old.epoch == new.epoch {
                continue;
            }
            env.count(match record {
                _ if !old.serving && new.serving => Class::Activated,
                None => Class::Replaced,
                Some(_) if new.lease_expired => Class::TimedOut,
                Some(record) if record.is_unable() => Class::Unable,
                Some(record) if record.desired_state == DesiredState::Draining => Class::Drained,
                Some(_) => continue,
            });
            let is_removed = !self.policy.placement.has(at);
            let is_voluntary = record.is_some_and(|it| it.desired_state == DesiredState::Draining && !it.is_unable());
            self.handed_over_at[at] = Some(env.now).filter(|_| is_removed && is_voluntary && !new.serving);
        }
    }
}
