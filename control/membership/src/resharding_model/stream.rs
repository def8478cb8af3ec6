//! A process's stream to the server: timers and messages around the real `Client`, and the lease that workers check.

use std::net::SocketAddr;
use std::sync::Arc;

use super::coverage::Class;
use super::env::{Env, Notice, ProcessInput, ServerInput};
use super::process::Process;
use super::succession::Succession;
use crate::heartbeat::{Reply, Retry, StreamEnd};
use crate::status::MembershipStatus;
use crate::{Commitment, Heartbeat, MembershipView};

/// How long until the next stream, milliseconds.
const RETRY_DELAY: u64 = 50;

/// The stream to the server.
#[derive(Clone, Debug, Default)]
pub(super) struct Stream {
    pub(super) number: u32,
    is_open: bool,
    is_first: bool,
    retry_at: u64,
    timer: Option<u64>,
}

/// The lease, as workers check it.
#[derive(Clone, Debug, Default)]
pub(super) struct Lease {
    until: u64,
    /// If it is by the promises of peers: the view that has these.
    promised_by: Option<Arc<MembershipView>>,
    pub(super) is_required: bool,
}

/// Commitment of a process; the model needs no secret behind it.
fn commitment(index: usize, incarnation: u64) -> Commitment {
    let mut commitment = [index as u8; 32];
    commitment[..8].copy_from_slice(&incarnation.to_be_bytes());
    commitment
}

pub(super) fn address(index: usize) -> SocketAddr {
    SocketAddr::from(([10, 2, 0, index as u8 + 1], 4790))
}

/// What all heartbeats of a process say.
pub(super) fn heartbeats(
    index: usize,
    incarnation: u64,
    predecessor: Option<u64>,
    succession: &Succession,
) -> Heartbeat {
    Heartbeat {
        commitment: commitment(index, incarnation),
        predecessor: predecessor.map(|predecessor| Box::new(commitment(index, predecessor))),
        fingerprint: Some(succession.own),
        peer: Some(address(index)),
        ..Heartbeat::minimal(super::policies::NAMES[index], incarnation, crate::DesiredState::default(), 0)
    }
}

impl Process {
    /// Whether its lease is by the promises of its peers, and a gateway that was added since wasn't one of them.
    pub(super) fn has_lease_unknown_to(&self, other: &Self) -> bool {
        self.lease.is_required && self.lease.promised_by.as_ref().is_some_and(|it| it.member(&other.name).is_none())
    }

    /// Whether it is the only gateway that it knows of, and needs no lease. Not by what it requires itself: one that
    /// requires none by mistake has no excuse.
    pub(super) fn is_alone(&self) -> bool {
        let in_view = self.status.view.members.iter().map(|member| &member.name);
        self.policy.names.iter().chain(in_view).all(|name| *name == self.name)
    }

    pub(super) fn has_lease(&self, now: u64) -> bool {
        !self.lease.is_required || now < self.lease.until
    }

    pub(super) fn extend_lease_by_peers(&mut self, until: u64, env: &mut Env) {
        if until <= self.lease.until {
            return;
        }
        (self.lease.until, self.lease.promised_by) = (until, Some(self.status.view.clone()));
        env.count(Class::PeerLease);
        let named = self.status.view.member(&self.name).map(|member| member.incarnation);
        if named != Some(self.incarnation) {
            env.count(Class::SuccessorLease);
        }
    }

    pub(super) fn stream_timer(&mut self, env: &mut Env) {
        if self.stream.timer.take_if(|at| *at <= env.now).is_some() {
            self.drive_client(env);
        }
    }

    /// Does what is due by time, and sets the timer.
    pub(super) fn drive_client(&mut self, env: &mut Env) {
        let now = env.instant();
        if self.stream.is_open && now >= self.client.reply_due(&self.status) {
            let end = self.client.no_reply(&self.status);
            self.end_stream(end, env);
        } else if self.stream.is_open && now >= self.client.heartbeat_due(&self.status) {
            self.send_heartbeat(env);
        }
        if !self.stream.is_open && env.now >= self.stream.retry_at {
            let number = self.stream.number + 1;
            self.stream = Stream { number, is_open: true, is_first: true, ..self.stream.clone() };
            self.client.begin_stream(env.instant());
            self.send_heartbeat(env);
        }
        self.set_stream_timer(env);
    }

    fn set_stream_timer(&mut self, env: &mut Env) {
        let of_client = self.client.reply_due(&self.status).min(self.client.heartbeat_due(&self.status));
        let due = if self.stream.is_open { Env::milliseconds(of_client) } else { self.stream.retry_at };
        let due = due.max(env.now + 1);
        if self.stream.timer.is_none_or(|at| due < at) {
            self.stream.timer = Some(due);
            env.schedule_for(self.id(), due, ProcessInput::StreamTimer);
        }
    }

    pub(super) fn send_heartbeat(&mut self, env: &mut Env) {
        if !self.stream.is_open {
            return;
        }
        let is_first = std::mem::take(&mut self.stream.is_first);
        let (sent, heartbeat) = self.client.next_heartbeat(env.instant(), env.tick(), &self.reported, &self.status);
        let (from, stream, heartbeat) = (self.index, self.stream.number, Box::new(heartbeat));
        env.send_to_server(from, ServerInput::Heartbeat { from, stream, is_first, sent, heartbeat });
    }

    /// The server has closed a stream.
    pub(super) fn stream_closed(&mut self, stream: u32, is_rejected: bool, env: &mut Env) {
        if self.stream.is_open && self.stream.number == stream {
            let reason = String::new();
            self.end_stream(
                if is_rejected { StreamEnd::Rejected(reason) } else { StreamEnd::Disconnected(reason) },
                env,
            );
            self.set_stream_timer(env);
        }
    }

    fn end_stream(&mut self, end: StreamEnd, env: &mut Env) {
        let ended = self.client.ended(end, false, &mut self.status);
        if ended.place_taken.is_some() {
            env.count(Class::PlaceTaken);
        }
        let delay = match ended.retry {
            Retry::NextServer => 0,
            Retry::Backoff => RETRY_DELAY,
            Retry::After(delay) => delay.as_millis() as u64,
        };
        (self.stream.is_open, self.stream.retry_at, self.is_due) = (false, env.now + delay, true);
        let (from, incarnation, stream) = (self.index, self.incarnation, self.stream.number);
        env.send_to_server(from, ServerInput::StreamClosed { from, incarnation, stream });
    }

    pub(super) fn receive_notice(&mut self, stream: u32, notice: Notice, env: &mut Env) {
        if !self.stream.is_open || self.stream.number != stream {
            return;
        }
        let Notice { sent, lease, view, drain_block } = notice;
        let lease_ms = lease.map_or(0, |lease| lease as u32);
        let reply = Reply { sequence: sent.unwrap_or(0), lease_ms, view: Some((*view).clone()), drain_block };
        let before = self.status.clone();
        match self.client.reply(env.instant(), reply, &self.reported, &mut self.status) {
            Ok(accepted) => {
                if let Some(until) = accepted.lease_until.map(Env::time_of).filter(|it| *it > self.lease.until) {
                    (self.lease.until, self.lease.promised_by) = (until, None);
                }
            }
            Err(error) => self.end_stream(StreamEnd::Disconnected(error.to_string()), env),
        }
        self.is_due |= is_different(&before, &self.status);
        self.set_stream_timer(env);
    }

    pub(super) fn apply_relayed_view(&mut self, view: Arc<MembershipView>, env: &mut Env) {
        if self.status.apply_relayed_view(view) {
            self.is_due = true;
            env.count(Class::RelayedView);
        }
    }
}

fn is_different(before: &MembershipStatus, after: &MembershipStatus) -> bool {
    let is_same_view = Arc::ptr_eq(&before.view, &after.view) || before.view == after.view;
    let rest = |it: &MembershipStatus| (it.authority, it.ttl, it.is_ttl_confirmed);
    !is_same_view || rest(before) != rest(after) || before.drain_block != after.drain_block
}
