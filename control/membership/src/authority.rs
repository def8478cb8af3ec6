//! Membership state machine: heartbeats and the gateways of the policy go in; a membership view and leases come out.
//! Time is an argument.
//!
//! A lease runs from when its heartbeat was sent, the heartbeat timeout from when it was received, and the lease is
//! shorter: so a gateway whose heartbeats stop loses its lease before it is deactivated.
//!
//! Recovery without a store: a restarted server learns the last view from the gateways. It changes nothing until all
//! known gateways have reported, or two TTLs have passed. It grants leases after recovery, or after one TTL: then all
//! leases of the previous server have expired and can't contradict new ones. Only a store can tell which gateways left
//! the policy meanwhile, and under which view the previous server granted leases if a gateway knows a later one.

mod decide;
mod drain;
#[cfg(test)]
mod model;
mod record;
mod removal;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::drain::{ShardGroup, UnavailableLimit};
pub use self::record::MemberRecord;
use crate::{DrainBlock, Heartbeat, Member, MembershipView};

/// Limit of view numbers that are accepted from gateways, half of what a view may have: whatever a gateway claims,
/// there are always higher numbers left.
pub const MAX_REPORTED_NUMBER: u64 = 1 << 61;

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
    /// Whether recovery is complete: the previous server's last view is known.
    recovered: bool,
    /// Whether the view is from a store: then no gateway can know a later one.
    stored: bool,
    /// Lower limit of the next view number: a gateway or the store has this one.
    number_floor: u64,
    /// When the view was adopted from a gateway or the store: the timeout of gateways without a heartbeat runs from
    /// here.
    adopted_at: Option<Instant>,
    /// Leases granted under another view may be valid until then.
    grants_from: Option<Instant>,
    /// Heartbeat timeouts run from here at the earliest: the server itself was unable to receive before.
    timeouts_reset_at: Option<Instant>,
    /// Whether any lease was granted.
    granted: bool,
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
            stored: false,
            number_floor: 0,
            adopted_at: None,
            grants_from: None,
            timeouts_reset_at: None,
            granted: false,
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

    /// Adopts the view in the store; `None` if it has none.
    pub fn load(&mut self, now: Instant, view: Option<Arc<MembershipView>>) {
        let stored = view.unwrap_or_default();
        if stored.number < self.view.number {
            // The store has lost data. A view that was published can't be withdrawn; the next one gets a higher number.
            self.number_floor = self.number_floor.max(self.view.number);
            return;
        }
        self.stored = stored.number > 0;
        if stored != self.view {
            self.view = stored;
            self.adopted_at = Some(now);
        }
    }

    /// Forgets all heartbeats, and keeps view and policy: another server has received heartbeats until now. Its leases may
    /// be valid for a TTL, and gateways have as long to send a heartbeat to this one.
    pub fn restart(&mut self, now: Instant) {
        let ttl = self.ttl;
        let last = std::mem::replace(self, Self::new(ttl));
        self.policy = last.policy;
        self.shard_groups = last.shard_groups;
        self.max_unavailable = last.max_unavailable;
        self.view = last.view;
        self.stored = last.stored;
        self.number_floor = last.number_floor;
        self.adopted_at = Some(now);
    }

    /// Applies a heartbeat that another server has acknowledged.
    pub fn observe(&mut self, now: Instant, heartbeat: &Heartbeat) {
        self.started_at.get_or_insert(now);
        if !self.is_member(&heartbeat.gateway) {
            return;
        }
        match self.records.get_mut(&heartbeat.gateway).filter(|record| record.incarnation == heartbeat.incarnation) {
            Some(record) => record.renew(heartbeat, now),
            None => drop(self.records.insert(heartbeat.gateway.clone(), MemberRecord::from_heartbeat(heartbeat, now))),
        }
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
        // Views reported by gateways that the policy doesn't name are ignored.
        if let Some(reported) = &heartbeat.view
            && (self.policy.is_none() || self.is_in_policy(gateway))
        {
            self.learn_view(now, reported);
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

    /// Whether a heartbeat has another secret than the process that it claims to be. A view that another gateway has
    /// reported doesn't count: it must not lock out a process that shows a secret of this incarnation.
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
    pub fn grant(&mut self, now: Instant, name: &str, incarnation: u64) -> Option<Duration> {
        let is_active =
            self.view.member(name).is_some_and(|member| member.serving && member.incarnation == incarnation);
        let has_record = self.records.get(name).is_some_and(|record| record.incarnation == incarnation);
        let may_be_active = self.is_in_policy(name) || self.is_leaving(name, now);
        if !(is_active && has_record && may_be_active && self.may_grant(now)) {
            return None;
        }
        self.granted = true;
        Some(lease_duration(self.ttl))
    }

    /// Learns a view that a gateway got from another server.
    fn learn_view(&mut self, now: Instant, reported: &Arc<MembershipView>) {
        if reported.number < self.view.number || *reported == self.view || reported.number >= MAX_REPORTED_NUMBER {
            return;
        }
        if self.recovered || self.stored || reported.number == self.view.number {
            // Too late to adopt it: nobody can have a lease under it. But its number is used.
            self.number_floor = self.number_floor.max(reported.number);
            return;
        }
        self.view = reported.clone();
        self.adopted_at = Some(now);
        if self.granted {
            self.grants_from = Some(now + self.ttl);
        }
    }

    fn may_grant(&self, now: Instant) -> bool {
        let old_leases_expired = self.started_at.is_some_and(|started| now >= started + self.ttl);
        (self.recovered || self.stored || old_leases_expired) && self.grants_from.is_none_or(|from| now >= from)
    }

    /// Whether the policy names a gateway; while there is no policy, whether the view does.
    fn is_in_policy(&self, name: &str) -> bool {
        match &self.policy {
            Some(names) => names.contains(name),
            None => self.view.member(name).is_some(),
        }
    }

    fn is_member(&self, name: &str) -> bool {
        self.is_in_policy(name) || self.view.member(name).is_some()
    }
}

/// Duration of a lease. A tenth of the TTL is margin for clock drift, and for packets in flight when the lease expires.
fn lease_duration(ttl: Duration) -> Duration {
    ttl * 9 / 10
}
