//! Heartbeats of a gateway to the policy server: when one is due and what it says, what a reply means for membership and
//! lease, and what the end of a stream does. If no server is reachable at the start, the last view of the previous
//! process counts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use vipgate_common::Backoff;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::replication::lease::MAX_LEASE_MS;

use crate::status::{Authority, MembershipStatus};
use crate::view::{DesiredState, DrainBlock, Heartbeat, MembershipView};

const HEARTBEATS_PER_LEASE: u32 = 4;
/// Maximum number of unacknowledged heartbeats.
const MAX_UNACKED: usize = 64;
/// Minimum and maximum timeout of a response.
const TIMEOUT_RANGE: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(5));
/// Delay after a rejection, whose cause an operator must fix.
const REJECTED_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Delay after connecting to a server without the membership service.
const NO_SERVICE_RETRY_DELAY: Duration = Duration::from_secs(5);

/// Membership that the previous process has had from the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerMembership {
    /// The last view.
    pub view: Arc<MembershipView>,
    /// Duration of a lease.
    pub ttl: Duration,
}

/// State that a gateway reports in heartbeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportedState {
    /// The state that it requests.
    pub desired_state: DesiredState,
    /// Number of the view that it has applied.
    pub seen_view: u64,
    /// Its fault, if it has one.
    pub unable: Option<Arc<str>>,
    /// Version of the policy that it has in force.
    pub policy_version: Option<Arc<str>>,
    /// Number of its active sessions.
    pub sessions: u64,
}

impl ReportedState {
    /// Takes another state, and keeps the number of sessions; whether that is a reason for a heartbeat of its own. A
    /// changed policy alone is none: the next one has it.
    pub fn update(&mut self, next: Self) -> bool {
        self.policy_version.clone_from(&next.policy_version);
        let next = Self { sessions: self.sessions, ..next };
        let is_new = *self != next;
        *self = next;
        is_new
    }
}

/// Reply of the server to a heartbeat, or a new view.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The heartbeat that it replies to; 0: none.
    pub sequence: u64,
    /// Duration of the lease, from when that heartbeat was sent; 0: none.
    pub lease_ms: u32,
    /// The view, if the reply has one.
    pub view: Option<MembershipView>,
    /// Why the drain is blocked, if it is.
    pub drain_block: Option<DrainBlock>,
}

/// What a reply means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    /// Until when the lease is extended.
    pub lease_until: Option<Tick>,
    /// Whether the server wasn't reachable before.
    pub is_found: bool,
}

/// A view that a server sends only if its record was lost or is from a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnexpectedView {
    #[error("the server has sent view {number}, older than view {known}")]
    Old { number: u64, known: u64 },
    #[error("the server has sent another view {0} than a server before: its record was lost")]
    Other(u64),
}

/// Why a stream has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// The server has no membership service.
    NoService,
    /// The server rejects this gateway, with the reason.
    Rejected(String),
    /// Another live process has the name, with the server's message.
    NameInUse(String),
    /// Any other error.
    Disconnected(String),
}

/// When to try again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Retry {
    /// With the next one of several servers, at once.
    NextServer,
    /// After the delay of reconnections.
    #[default]
    Backoff,
    After(Duration),
}

/// What the end of a stream means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    pub retry: Retry,
    /// The server has no membership service.
    pub has_no_service: bool,
    /// Which is new: the view is a fixed one.
    pub is_view_fixed: bool,
    /// Why the authority is lost, to be logged.
    pub lost: Option<String>,
    /// Another process has the name, to be logged.
    pub name_in_use: Option<String>,
    /// The number of the view by which this process takes the place of the previous one.
    pub place_taken: Option<u64>,
}

/// Heartbeats over one stream after the other.
#[derive(Clone, Debug)]
pub struct Client {
    /// What all heartbeats say about the process.
    identity: Heartbeat,
    /// The membership when the previous process on this host has ended.
    former: Option<FormerMembership>,
    /// Whether this server was ever reached, by this process or its predecessor.
    was_reached: bool,
    /// Timeouts of connections until then.
    connect_timeout: Backoff,
    sequence: u64,
    /// Sequence numbers of unacknowledged heartbeats, and when they were sent.
    unacked: VecDeque<(u64, Tick)>,
    /// A number above that of the view, if a server has had another one of the same number.
    used_number: u64,
    /// When the last heartbeat was sent, and when the stream was opened or the last reply received.
    sent: Instant,
    received: Instant,
    /// Errors since the servers were last tried from the first one on.
    round_errors: Vec<String>,
}

impl Client {
    /// A client whose heartbeats have the fields of `identity` that don't change.
    pub fn new(now: Instant, identity: Heartbeat, former: Option<FormerMembership>) -> Self {
        Self {
            identity,
            was_reached: former.is_some(),
            former,
            connect_timeout: Backoff::new(TIMEOUT_RANGE),
            sequence: 0,
            unacked: VecDeque::new(),
            used_number: 0,
            sent: now,
            received: now,
            round_errors: Vec::new(),
        }
    }

    /// Begins a stream.
    pub fn begin_stream(&mut self, now: Instant) {
        (self.sequence, self.sent, self.received) = (0, now, now);
        self.unacked.clear();
    }

    /// The server has accepted the stream.
    pub fn opened(&mut self, now: Instant) {
        (self.sent, self.received) = (now, now);
    }

    /// The next heartbeat and its sequence number. `tick` is read before it is queued: time in the queue shortens the
    /// lease.
    pub fn next_heartbeat(
        &mut self,
        now: Instant,
        tick: Tick,
        reported: &ReportedState,
        status: &MembershipStatus,
    ) -> (u64, Heartbeat) {
        let ReportedState { desired_state, seen_view, unable, policy_version, sessions } = reported.clone();
        let known_view = status.view.number.max(self.used_number);
        self.sequence += 1;
        self.sent = now;
        if self.unacked.len() == MAX_UNACKED {
            self.unacked.pop_front();
        }
        self.unacked.push_back((self.sequence, tick));
        let identity = self.identity.clone();
        let heartbeat =
            Heartbeat { desired_state, seen_view, unable, policy_version, sessions, known_view, ..identity };
        (self.sequence, heartbeat)
    }

    /// When the next heartbeat is due.
    pub fn heartbeat_due(&self, status: &MembershipStatus) -> Instant {
        self.sent + status.ttl / HEARTBEATS_PER_LEASE
    }

    /// When the server must have replied.
    pub fn reply_due(&self, status: &MembershipStatus) -> Instant {
        self.received + self.response_timeout(status)
    }

    /// Timeout of a response. A server that was reached before must respond while there is time to reconnect before the
    /// lease expires; another one may have a longer round-trip time.
    pub fn response_timeout(&self, status: &MembershipStatus) -> Duration {
        if !self.was_reached {
            return self.connect_timeout.peek();
        }
        (status.ttl / 2).clamp(TIMEOUT_RANGE.0, TIMEOUT_RANGE.1)
    }

    /// The server hasn't accepted the stream within the timeout: the next one is twice as long.
    pub fn not_opened(&mut self, status: &MembershipStatus) -> StreamEnd {
        let end = self.no_reply(status);
        self.connect_timeout.next_delay();
        end
    }

    /// The server hasn't replied in time.
    pub fn no_reply(&self, status: &MembershipStatus) -> StreamEnd {
        StreamEnd::Disconnected(format!("no response within {} ms", self.response_timeout(status).as_millis()))
    }

    /// Processes a reply. `reported` is the state that the gateway reports.
    ///
    /// # Errors
    /// When the stream must be closed.
    pub fn reply(
        &mut self,
        now: Instant,
        reply: Reply,
        reported: &ReportedState,
        status: &mut MembershipStatus,
    ) -> Result<Accepted, UnexpectedView> {
        let Reply { sequence, lease_ms, view, drain_block } = reply;
        self.received = now;
        let known = status.view.number;
        if let Some(view) = view.as_ref().filter(|view| view.number < known) {
            return Err(UnexpectedView::Old { number: view.number, known });
        }
        if view.as_ref().is_some_and(|view| view.number == known && *view != *status.view) {
            self.used_number = known + 1;
            return Err(UnexpectedView::Other(known));
        }
        let is_found = status.authority != Authority::Reachable;
        self.was_reached = true;
        self.round_errors.clear();
        status.authority = Authority::Reachable;
        if let Some(view) = view.filter(|view| *view != *status.view) {
            status.view = Arc::new(view);
        }
        // Unsolicited updates are about the view alone.
        if sequence > 0 {
            status.drain_block = drain_block;
        }
        let lease_ms = lease_ms.min(MAX_LEASE_MS);
        if lease_ms > 0 {
            (status.ttl, status.is_ttl_confirmed) = (Duration::from_millis(lease_ms.into()), true);
        }
        // A lease is granted under the view, and valid only once the gateway has applied it.
        let is_applied = reported.seen_view == status.view.number;
        let mut lease_until = None;
        while let Some((number, sent)) = self.unacked.pop_front_if(|(number, _)| *number <= sequence) {
            if number == sequence && lease_ms > 0 && is_applied {
                lease_until = Some(sent.plus(lease_ms));
            }
        }
        Ok(Accepted { lease_until, is_found })
    }

    /// A stream has ended, or couldn't be opened. `has_more`: whether another server is to be tried before the first one
    /// again.
    pub fn ended(&mut self, end: StreamEnd, has_more: bool, status: &mut MembershipStatus) -> Ended {
        let end = match end {
            // A server that was the authority stays so: some other server answers at its address.
            StreamEnd::NoService if self.was_reached => {
                StreamEnd::Disconnected("the server has no membership service any more".to_owned())
            }
            end => end,
        };
        let previous = status.authority;
        // A server that rejects this gateway is there, and decides.
        let is_away = matches!(end, StreamEnd::Disconnected(_)) && !has_more;
        let former = self.former.take_if(|_| previous == Authority::Unknown && is_away);
        status.authority = match end {
            StreamEnd::NoService => Authority::Fixed,
            _ if previous == Authority::Reachable || former.is_some() => Authority::Unreachable,
            _ => previous,
        };
        status.drain_block = None;
        let mut ended = Ended {
            has_no_service: end == StreamEnd::NoService,
            is_view_fixed: end == StreamEnd::NoService && previous != Authority::Fixed,
            place_taken: former.as_ref().map(|former| former.view.number),
            ..Ended::default()
        };
        if let Some(FormerMembership { view, ttl }) = former {
            (status.view, status.ttl, status.is_ttl_confirmed) = (view, ttl, true);
        }
        match end {
            StreamEnd::NoService => ended.retry = Retry::After(NO_SERVICE_RETRY_DELAY),
            StreamEnd::Rejected(reason) => {
                (ended.retry, ended.lost) = (Retry::After(REJECTED_RETRY_DELAY), Some(reason));
            }
            StreamEnd::NameInUse(reason) => {
                (ended.retry, ended.name_in_use) = (Retry::After(REJECTED_RETRY_DELAY), Some(reason));
            }
            StreamEnd::Disconnected(reason) => {
                if has_more {
                    ended.retry = Retry::NextServer;
                }
                ended.lost = self.loss(reason, previous == Authority::Reachable || !has_more);
            }
        }
        ended
    }

    /// The errors of all servers. That one of several doesn't lead, or is dead, matters only if no other one accepts
    /// heartbeats.
    fn loss(&mut self, reason: String, is_lost: bool) -> Option<String> {
        if !self.round_errors.contains(&reason) {
            self.round_errors.push(reason);
        }
        is_lost.then(|| std::mem::take(&mut self.round_errors).join("; "))
    }
}

#[cfg(test)]
mod tests;
