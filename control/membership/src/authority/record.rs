//! Per-gateway record: its last heartbeat, and a second process that contends for its name.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{HeartbeatOutcome, Rejection};
use crate::{Commitment, DesiredState, Fingerprint, Heartbeat, Member, TunnelKey};

/// A gateway's record.
#[derive(Clone, Debug)]
pub struct MemberRecord {
    /// Its process.
    pub incarnation: u64,
    /// Commitment to its secret. The incarnation proves nothing, since everybody sees it.
    pub(super) commitment: Commitment,
    /// The state that it requests.
    pub desired_state: DesiredState,
    /// Number of the view that it has applied.
    pub seen_view: u64,
    /// When its last heartbeat was received.
    pub(super) last_heartbeat: Instant,
    /// Whether the stream of that heartbeat has ended.
    pub(super) stream_closed: bool,
    fingerprint: Option<Fingerprint>,
    peer: Option<SocketAddr>,
    tunnel_key: Option<TunnelKey>,
    overlay: Option<SocketAddr>,
    unable: Option<Arc<str>>,
    /// Version of the policy that it has in force.
    pub policy_version: Option<Arc<str>>,
    /// Number of its active sessions.
    pub sessions: u64,
    /// Since when it has reported a fault, or none.
    fault_changed_at: Instant,
    contender: Option<Contender>,
}

/// Another process with the same name.
#[derive(Clone, Copy, Debug)]
struct Contender {
    incarnation: u64,
    since: Instant,
}

impl MemberRecord {
    pub(super) fn from_heartbeat(heartbeat: &Heartbeat, now: Instant) -> Self {
        Self {
            incarnation: heartbeat.incarnation,
            commitment: heartbeat.commitment,
            desired_state: heartbeat.desired_state,
            seen_view: heartbeat.seen_view,
            last_heartbeat: now,
            stream_closed: false,
            fingerprint: heartbeat.fingerprint,
            peer: heartbeat.peer,
            tunnel_key: heartbeat.tunnel_key,
            overlay: heartbeat.overlay,
            unable: heartbeat.unable.clone(),
            policy_version: heartbeat.policy_version.clone(),
            sessions: heartbeat.sessions,
            fault_changed_at: now,
            contender: None,
        }
    }

    /// Renews the record by a heartbeat of the same process.
    pub(super) fn renew(&mut self, heartbeat: &Heartbeat, now: Instant) {
        let is_unchanged = self.is_unable() == heartbeat.unable.is_some();
        let fault_changed_at = if is_unchanged { self.fault_changed_at } else { now };
        *self = Self { fault_changed_at, contender: self.contender, ..Self::from_heartbeat(heartbeat, now) };
    }

    pub(super) fn is_alive(&self, now: Instant, ttl: Duration) -> bool {
        now.saturating_duration_since(self.last_heartbeat) <= ttl
    }

    /// Handles a heartbeat of another process with this name. Most often the first one has died undetected. A successor
    /// that shows the first one's secret waits for half a TTL, in which that would have sent two heartbeats; any other
    /// process waits until the name is free.
    pub(super) fn contend(
        &mut self,
        heartbeat: &Heartbeat,
        now: Instant,
        ttl: Duration,
    ) -> Result<HeartbeatOutcome, Rejection> {
        let is_successor = heartbeat.predecessor.as_deref() == Some(&self.commitment);
        if is_successor && self.stream_closed {
            *self = Self::from_heartbeat(heartbeat, now);
            return Ok(HeartbeatOutcome::Accepted);
        }
        let contender = match self.contender {
            Some(contender) if contender.incarnation == heartbeat.incarnation => contender,
            _ => Contender { incarnation: heartbeat.incarnation, since: now },
        };
        self.contender = Some(contender);
        if self.last_heartbeat > contender.since {
            return Err(Rejection::NameInUse { gateway: heartbeat.gateway.clone(), incarnation: self.incarnation });
        }
        if !is_successor || now.saturating_duration_since(contender.since) < ttl / 2 {
            return Ok(HeartbeatOutcome::Deferred);
        }
        *self = Self::from_heartbeat(heartbeat, now);
        Ok(HeartbeatOutcome::Accepted)
    }

    /// Whether it can be activated.
    pub(super) fn is_ready(&self, member: &Member, number: u64, now: Instant, ttl: Duration) -> bool {
        self.desired_state == DesiredState::Ready && self.is_current(member, number, now, ttl)
    }

    /// Whether it can be activated as a fallback: it is draining because of a fault, not because an operator drains it.
    pub(super) fn is_fallback(&self, member: &Member, number: u64, now: Instant, ttl: Duration) -> bool {
        self.is_unable() && self.is_current(member, number, now, ttl)
    }

    /// Whether it reports a fault.
    pub fn is_unable(&self) -> bool {
        self.unable.is_some()
    }

    /// Whether its fault, or its end, is old enough that other gateways with the same cause have reported it, too:
    /// gateways behind one router detect its failure one after the other, within a probe interval and a heartbeat
    /// interval.
    pub(super) fn is_stable(&self, now: Instant, ttl: Duration) -> bool {
        now.saturating_duration_since(self.fault_changed_at) >= ttl / 2
    }

    /// Whether it is a gateway without a fault that has just started and will become ready.
    pub(super) fn is_starting(&self, now: Instant, ttl: Duration) -> bool {
        let is_new = now.saturating_duration_since(self.fault_changed_at) < 2 * ttl;
        is_new && self.is_connected(now, ttl) && !self.is_unable() && self.desired_state != DesiredState::Draining
    }

    /// Whether it is alive, and its stream open as far as known.
    pub(super) fn is_connected(&self, now: Instant, ttl: Duration) -> bool {
        !self.stream_closed && self.is_alive(now, ttl)
    }

    /// Whether it is alive and has applied the current view.
    fn is_current(&self, member: &Member, number: u64, now: Instant, ttl: Duration) -> bool {
        self.seen_view == number && self.incarnation == member.incarnation && self.is_connected(now, ttl)
    }

    /// Copies its identity and addresses to its member in a view.
    pub(super) fn copy_to(&self, member: &mut Member) {
        member.incarnation = self.incarnation;
        member.commitment = Some(self.commitment);
        member.fingerprint = self.fingerprint;
        member.peer = self.peer;
        member.tunnel_key = self.tunnel_key;
        member.overlay = self.overlay;
        member.unable.clone_from(&self.unable);
    }
}
