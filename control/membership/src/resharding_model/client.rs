//! A process's membership client: heartbeats to the server and to peers, views and leases. Mirrors `heartbeat/stream.rs`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::coverage::Class;
use super::env::{Env, Message, Notice, ProcessInput, ServerInput};
use super::process::Process;
use crate::status::Authority;
use crate::{Commitment, DesiredState, Heartbeat, MembershipView};

/// Interval of heartbeats: four in a lease.
const HEARTBEAT_INTERVAL: u64 = 135;
/// Without a response for this long, a stream ends.
const RESPONSE_TIMEOUT: u64 = 300;
/// How long until the next stream, and after a rejection.
const RETRY_DELAY: u64 = 50;
const REJECTED_RETRY_DELAY: u64 = 1000;

/// The state that heartbeats report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReportedState {
    pub(super) desired_state: DesiredState,
    pub(super) seen_view: u64,
    pub(super) unable: Option<Arc<str>>,
}

/// The stream to the server.
#[derive(Clone, Debug, Default)]
pub(super) struct Stream {
    pub(super) number: u32,
    pub(super) is_open: bool,
    pub(super) is_first: bool,
    pub(super) received_at: u64,
    pub(super) retry_at: u64,
}

/// The lease, as workers check it.
#[derive(Clone, Debug, Default)]
pub(super) struct Lease {
    pub(super) until: u64,
    /// If it is by the promises of peers: the view that has these.
    pub(super) promised_by: Option<Arc<MembershipView>>,
    pub(super) is_required: bool,
}

/// Commitment of a process; the model needs no secret behind it.
pub(super) fn commitment(index: usize, incarnation: u64) -> Commitment {
    let mut commitment = [index as u8; 32];
    commitment[..8].copy_from_slice(&incarnation.to_be_bytes());
    commitment
}

pub(super) fn address(index: usize) -> SocketAddr {
    SocketAddr::from(([10, 2, 0, index as u8 + 1], 4790))
}

impl Process {
    /// Whether its lease is by the promises of its peers, and a gateway that was added since wasn't one of them.
    pub(super) fn has_lease_unknown_to(&self, other: &Self) -> bool {
        self.lease.is_required && self.lease.promised_by.as_ref().is_some_and(|it| it.member(&other.name).is_none())
    }

    /// Whether it is the only gateway that it knows of, and needs no lease.
    pub(super) fn is_alone(&self) -> bool {
        !self.lease.is_required
    }

    pub(super) fn has_lease(&self, now: u64) -> bool {
        !self.lease.is_required || now < self.lease.until
    }

    /// Sends the heartbeats that are due, to the server and to peers.
    pub(super) fn send_heartbeats(&mut self, env: &mut Env) {
        env.schedule_for(self.id(), env.now + HEARTBEAT_INTERVAL, ProcessInput::Heartbeat);
        if self.stream.is_open && env.now - self.stream.received_at >= RESPONSE_TIMEOUT {
            self.end_stream(0, true, env);
        }
        if !self.stream.is_open && env.now >= self.stream.retry_at {
            let number = self.stream.number + 1;
            self.stream = Stream { number, is_open: true, is_first: true, received_at: env.now, retry_at: 0 };
        }
        self.send_heartbeat(env);
        if !self.has_lease(env.now) && self.used.shards.iter().any(|shard| shard.may_open) {
            env.count(Class::LeaseExpired);
        }
        let message = Message::Heartbeat { sent: env.tick(), view: self.peer_view.number };
        for link in self.peers.iter().flatten().filter_map(|peer| peer.link) {
            env.send_to_peer(link, self.index, message.clone());
        }
        self.check_timers(env);
    }

    pub(super) fn send_heartbeat(&mut self, env: &mut Env) {
        if !self.stream.is_open {
            return;
        }
        let known_view = self.status.view.clone();
        let is_first = std::mem::take(&mut self.stream.is_first);
        let heartbeat = Heartbeat {
            gateway: self.name.clone(),
            incarnation: self.incarnation,
            commitment: commitment(self.index, self.incarnation),
            predecessor: self.predecessor.map(|predecessor| Box::new(commitment(self.index, predecessor))),
            desired_state: self.reported.desired_state,
            seen_view: self.reported.seen_view,
            fingerprint: Some(self.succession.own),
            peer: Some(address(self.index)),
            tunnel_key: None,
            overlay: None,
            unable: self.reported.unable.clone(),
            policy_version: None,
            sessions: 0,
            view: (is_first && known_view.number > 0).then_some(known_view),
        };
        let (from, stream, sent) = (self.index, self.stream.number, env.now);
        env.send_to_server(
            from,
            ServerInput::Heartbeat { from, stream, is_first, sent, heartbeat: Box::new(heartbeat) },
        );
    }

    /// The server has closed a stream.
    pub(super) fn stream_closed(&mut self, stream: u32, is_rejected: bool, env: &mut Env) {
        if self.stream.is_open && self.stream.number == stream {
            self.end_stream(if is_rejected { REJECTED_RETRY_DELAY } else { RETRY_DELAY }, !is_rejected, env);
        }
    }

    /// See `HeartbeatClient::report_end`.
    fn end_stream(&mut self, retry_delay: u64, is_away: bool, env: &mut Env) {
        self.stream.is_open = false;
        self.stream.retry_at = env.now + retry_delay;
        if self.status.authority == Authority::Reachable {
            self.status.authority = Authority::Unreachable;
        }
        if self.status.authority == Authority::Unknown
            && is_away
            && let Some(former) = self.succession.former.take()
        {
            let status = &mut self.status;
            status.authority = Authority::Unreachable;
            (status.view, status.ttl, status.is_ttl_confirmed) = (former.view, former.ttl, true);
            env.count(Class::PlaceTaken);
        }
        self.status.drain_block = None;
        self.is_due = true;
        let (from, incarnation, stream) = (self.index, self.incarnation, self.stream.number);
        env.send_to_server(from, ServerInput::StreamClosed { from, incarnation, stream });
    }

    /// See `HeartbeatStream::handle_notice`.
    pub(super) fn handle_notice(&mut self, notice: Notice, env: &mut Env) {
        let Notice { sent, lease, view, drain_block } = notice;
        if view.number < self.status.view.number {
            return self.end_stream(RETRY_DELAY, true, env);
        }
        self.stream.received_at = env.now;
        let status = &mut self.status;
        let before = (status.authority, status.drain_block.clone(), status.is_ttl_confirmed);
        status.authority = Authority::Reachable;
        if view != status.view {
            status.view = view;
            self.is_due = true;
        }
        if sent.is_some() {
            status.drain_block = drain_block;
        }
        if let Some(lease) = lease {
            (status.ttl, status.is_ttl_confirmed) = (Duration::from_millis(lease), true);
        }
        self.is_due |= before != (status.authority, status.drain_block.clone(), status.is_ttl_confirmed);
        let is_applied = self.reported.seen_view == self.status.view.number;
        if let (Some(sent), Some(lease), true) = (sent, lease, is_applied)
            && sent + lease > self.lease.until
        {
            (self.lease.until, self.lease.promised_by) = (sent + lease, None);
        }
    }

    /// See `ClientHandle::apply_relayed_view`.
    pub(super) fn apply_relayed_view(&mut self, view: Arc<MembershipView>, env: &mut Env) {
        if self.status.authority == Authority::Unreachable && view.number > self.status.view.number {
            self.status.view = view;
            self.is_due = true;
            env.count(Class::RelayedView);
        }
    }
}
