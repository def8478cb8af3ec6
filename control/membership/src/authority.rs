//! Membership state machine: heartbeats and the gateways of the policy go in; a membership view and leases come out.
//! Time is an argument.
//!
//! A lease runs from when its heartbeat was sent, the heartbeat timeout from when it was received, and the lease is
//! shorter: so a gateway whose heartbeats stop loses its lease before it is deactivated.
//!
//! One server decides, in a term of its own (`term`), by the record that the server before has left. It changes nothing
//! until all known gateways have reported, or two TTLs have passed, and grants leases after that, or after one TTL: then
//! all leases under views that the record may not tell of have expired. A server that has followed the record while
//! another one decided knows that it is the last one, and grants leases at once.

mod decide;
mod drain;
#[cfg(test)]
mod model;
mod record;
mod removal;
mod term;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::drain::{ShardGroup, UnavailableLimit};
pub use self::record::MemberRecord;
use self::term::Term;
pub use self::term::{MAX_REPORTED_NUMBER, Record};
use crate::{DrainBlock, Heartbeat, Member, MembershipView};

/// Outcome of a heartbeat that wasn't rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatOutcome {
    /// It is accepted.
    Accepted,
    /// Another process of this name may be alive; its next heartbeats, or their absence, will tell.
    Deferred,
    /// The policy has no gateway of this name.
    UnknownGateway,
}

/// Why a heartbeat is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// Two live processes use one name.
    #[error(
        "the name {gateway} is in use by another live process (incarnation {incarnation:016x}): stop one of them, or \
         give each a unique name"
    )]
    NameInUse {
        /// The name.
        gateway: Arc<str>,
        /// The process that has it.
        incarnation: u64,
    },
    /// The incarnation, which views show to everybody, without the secret it is derived from.
    #[error("the secret doesn't match incarnation {incarnation:016x} of gateway {gateway}: it is another process's")]
    InvalidSecret {
        /// The name.
        gateway: Arc<str>,
        /// The process that it claims to be.
        incarnation: u64,
    },
}

/// State of the membership.
#[derive(Clone, Debug)]
pub struct MembershipState {
    ttl: Duration,
    /// The gateways of the policy; `None` while there is no policy.
    policy: Option<BTreeSet<Arc<str>>>,
    view: Arc<MembershipView>,
    /// By name, the last heartbeat of each gateway.
    records: BTreeMap<Arc<str>, MemberRecord>,
    /// When the first heartbeat was received.
    started_at: Option<Instant>,
    /// Whether recovery is complete: the previous server's last view is known, or of no use any more.
    recovered: bool,
    term: Term,
    /// Heartbeat timeouts run from here at the earliest: the server itself was unable to receive before.
    timeouts_reset_at: Option<Instant>,
    /// When the policy was first known not to name a gateway of the view any more.
    removed_at: BTreeMap<Arc<str>, Instant>,
    /// The groups of gateways that can own a shard.
    shard_groups: Arc<BTreeSet<ShardGroup>>,
    /// The limit of unavailable gateways for drains.
    max_unavailable: Option<UnavailableLimit>,
    /// Why drains are blocked, by gateway, as of the last decision.
    drain_blocks: BTreeMap<Arc<str>, DrainBlock>,
}

impl MembershipState {
    /// An empty state. A gateway without heartbeats for longer than `ttl` is considered dead.
    pub fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            policy: None,
            view: Arc::default(),
            records: BTreeMap::new(),
            started_at: None,
            recovered: false,
            term: Term::default(),
            timeouts_reset_at: None,
            removed_at: BTreeMap::new(),
            shard_groups: Arc::default(),
            max_unavailable: None,
            drain_blocks: BTreeMap::new(),
        }
    }

    /// Heartbeat timeout.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// The current membership view.
    pub fn view(&self) -> &Arc<MembershipView> {
        &self.view
    }

    /// A gateway's last heartbeat.
    pub fn record(&self, name: &str) -> Option<&MemberRecord> {
        self.records.get(name)
    }

    /// Whether the policy names any gateway.
    pub fn has_policy(&self) -> bool {
        self.policy.as_ref().is_some_and(|names| !names.is_empty())
    }

    /// Replaces the gateways of the policy.
    pub fn set_policy(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.policy = Some(names.into_iter().collect());
    }

    /// Applies a heartbeat.
    ///
    /// # Errors
    /// When a live process has the name already, or the secret isn't that of the claimed process.
    pub fn heartbeat(&mut self, now: Instant, heartbeat: &Heartbeat) -> Result<HeartbeatOutcome, Rejection> {
        let gateway = &heartbeat.gateway;
        if self.has_invalid_secret(heartbeat) {
            return Err(Rejection::InvalidSecret { gateway: gateway.clone(), incarnation: heartbeat.incarnation });
        }
        self.started_at.get_or_insert(now);
        // What gateways report that neither the policy nor the view names is ignored.
        if self.policy.is_none() || self.is_in_policy(gateway) || self.is_leaving(gateway, now) {
            self.learn_number(now, heartbeat.known_view);
        }
        if !self.is_in_policy(gateway) {
            return Ok(self.renew_removed(heartbeat, now));
        }
        let is_free = self.is_name_free(now, gateway);
        let was_active = !self.recovered && self.is_active_in_view(heartbeat);
        match self.records.get_mut(gateway) {
            Some(record) if record.incarnation == heartbeat.incarnation => record.renew(heartbeat, now),
            // During recovery, another process has reached this server first.
            Some(record) if was_active => *record = MemberRecord::from_heartbeat(heartbeat, now),
            Some(record) if !is_free => return record.contend(heartbeat, now, self.ttl),
            _ => {
                self.records.insert(gateway.clone(), MemberRecord::from_heartbeat(heartbeat, now));
            }
        }
        Ok(HeartbeatOutcome::Accepted)
    }

    /// Whether a heartbeat has another secret than the process that it claims to be. A view doesn't count: one that somebody
    /// has mended must not lock out a process that shows a secret of this incarnation.
    fn has_invalid_secret(&self, heartbeat: &Heartbeat) -> bool {
        let record = self.records.get(&heartbeat.gateway).filter(|it| it.incarnation == heartbeat.incarnation);
        record.is_some_and(|record| record.commitment != heartbeat.commitment)
    }

    /// Whether a heartbeat is of the active process in the previous server's view, which is proved by its secret.
    fn is_active_in_view(&self, heartbeat: &Heartbeat) -> bool {
        self.view.member(&heartbeat.gateway).is_some_and(|member| {
            member.serving && member.incarnation == heartbeat.incarnation && member.commitment.is_some()
        })
    }

    /// Whether another process may take a name: the stream of the previous one has ended and it has no valid lease, or
    /// its heartbeats have timed out. An active gateway has had a lease for each heartbeat.
    fn is_name_free(&self, now: Instant, name: &str) -> bool {
        let Some(record) = self.records.get(name) else { return true };
        let is_active = |member: &Member| member.serving && member.incarnation == record.incarnation;
        let has_lease =
            self.view.member(name).is_some_and(is_active) && now < record.last_heartbeat + lease_duration(self.ttl);
        self.has_timed_out(name, now) || record.stream_closed && !has_lease
    }

    /// Records that the stream of a process has ended. The process may reconnect; another one may take its name.
    pub fn stream_closed(&mut self, name: &str, incarnation: u64) {
        if let Some(record) = self.records.get_mut(name).filter(|record| record.incarnation == incarnation) {
            record.stream_closed = true;
        }
    }

    /// Restarts all heartbeat timeouts: this server was unable to receive until now.
    pub fn reset_timeouts(&mut self, now: Instant) {
        self.timeouts_reset_at = Some(now);
    }

    /// The duration of the lease for an accepted heartbeat, from when that was sent; `None` if there is no lease.
    pub fn grant(&self, now: Instant, name: &str, incarnation: u64) -> Option<Duration> {
        let is_active =
            self.view.member(name).is_some_and(|member| member.serving && member.incarnation == incarnation);
        let has_record = self.records.get(name).is_some_and(|record| record.incarnation == incarnation);
        let may_be_active = self.is_in_policy(name) || self.is_leaving(name, now);
        if !(is_active && has_record && may_be_active && self.may_grant(now)) {
            return None;
        }
        Some(lease_duration(self.ttl))
    }

    fn may_grant(&self, now: Instant) -> bool {
        let old_leases_expired = self.started_at.is_some_and(|started| now >= started + self.ttl);
        (self.recovered || self.term.is_followed() || old_leases_expired) && !self.is_outdated()
    }

    /// Whether the policy names a gateway; while there is no policy, whether the view does.
    fn is_in_policy(&self, name: &str) -> bool {
        match &self.policy {
            Some(names) => names.contains(name),
            None => self.view.member(name).is_some(),
        }
    }
}

/// Duration of a lease. A tenth of the TTL is margin for clock drift, and for packets in flight when the lease expires.
fn lease_duration(ttl: Duration) -> Duration {
    ttl * 9 / 10
}
