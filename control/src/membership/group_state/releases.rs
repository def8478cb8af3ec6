//! Releases: what other gateways have released, by view and by policy, and what this one has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::members::PolicyRelease;

use super::GroupState;
use crate::membership::replication::{Release, policy_release_timeout};
use crate::membership::{Member, MembershipView};

/// Releases by policy.
#[derive(Debug, Default)]
pub(super) struct PolicyReleases {
    /// Version of the policy.
    version: Arc<str>,
    /// Since when it is in force.
    since: Option<Instant>,
    /// Whether the engine awaits any.
    pub(super) are_awaited: bool,
    /// What peers have released, as published to the engine.
    pub(super) published: BTreeMap<Arc<str>, PolicyRelease>,
}

impl PolicyReleases {
    /// Sets the version of the policy in force.
    pub(super) fn set_version(&mut self, version: &Arc<str>, now: Instant) {
        if self.version != *version {
            (self.version, self.since) = (version.clone(), Some(now));
        }
    }
}

impl GroupState {
    /// Records the gateways that have to release shards before this gateway may open sessions in them. While it is
    /// active, only gateways that have become inactive since the last view, or were for a time, as their epochs show.
    /// When it becomes active, all.
    pub(super) fn await_releases(&mut self, view: &MembershipView, now: Instant) {
        let own =
            |view: &MembershipView| view.member(&self.name).filter(|member| member.serving).map(|member| member.epoch);
        let stays_active = own(&self.view).is_some() && own(&self.view) == own(view);
        let was_deactivated = |member: &Member| {
            let previous = self.view.member(&member.name);
            previous.is_none_or(|it| it.epoch != member.epoch || (it.serving && !member.serving))
        };
        let is_new = self.active_change.is_none() || self.view.number != view.number;
        let others = view.members.iter().filter(|member| is_new && member.name != self.name);
        let added = others.filter(|member| !stays_active || was_deactivated(member));
        let added: Vec<_> = added.map(|member| (member.name.clone(), (view.number, now))).collect();
        self.awaiting_release.extend(added);
        self.awaiting_release.retain(|name, _| view.member(name).is_some());
    }

    /// A gateway has released shards.
    pub(crate) fn mark_released(&mut self, gateway: Arc<str>, release: &Release) {
        let known = self.released.entry(gateway).or_default();
        *known = Release { view: release.view.max(known.view), policy: release.policy.clone() };
    }

    /// The version of the policy whose moved shards a gateway has released. When that was awaited for too long, it counts
    /// as done.
    pub(super) fn released_policy(&self, name: &str, now: Instant) -> Arc<str> {
        if self.policy_deadline().is_none_or(|deadline| now >= deadline) {
            return self.policy_releases.version.clone();
        }
        self.released.get(name).map(|release| release.policy.clone()).unwrap_or_default()
    }

    /// Updates what the engine knows of releases by policy: only while it awaits any, since each update is published to
    /// the workers.
    pub(super) fn update_policy_releases(&mut self, now: Instant) {
        let names: Vec<Arc<str>> = self.peers().cloned().collect();
        self.policy_releases.published.retain(|name, _| names.contains(name));
        for name in names {
            let known = self.policy_releases.published.contains_key(&name);
            if !known || self.policy_releases.are_awaited {
                let release = if known { self.released_policy(&name, now) } else { "".into() };
                self.policy_releases.published.insert(name, PolicyRelease::Version(release));
            }
        }
    }

    /// Until when releases by policy are awaited: a peer that is unreachable, that has rejected the policy or that
    /// belongs to an older version of the software doesn't send any.
    pub(super) fn policy_deadline(&self) -> Option<Instant> {
        self.policy_releases.since.map(|since| since + policy_release_timeout(self.ttl))
    }

    /// Whether all other gateways have released the shards that views have assigned to this gateway.
    pub(super) fn all_released(&self, now: Instant, tick: Tick) -> bool {
        let has_released = |(name, (number, received)): (&Arc<str>, &(u64, Instant))| {
            // Before the first lease, the TTL is unknown; without a lease no session can be opened anyway.
            let ttl_passed = self.is_granted && now >= *received + self.ttl;
            let Some(member) = self.view.member(name).filter(|_| !ttl_passed) else { return true };
            let released = self.released.get(&member.name).map_or(0, |release| release.view);
            let expired = !member.serving && member.lease_expired && self.has_promise_expired(&member.name, tick);
            // Incarnation 0: no process of that gateway has sent a heartbeat yet, so none holds a lease or a promise.
            expired || member.incarnation == 0 || released >= *number
        };
        self.active_change.is_some() && self.awaiting_release.iter().all(has_released)
    }

    /// Whether the last promise of this gateway to a peer has expired. While the server is unreachable, promises serve
    /// as its lease.
    pub(super) fn has_promise_expired(&self, name: &str, tick: Tick) -> bool {
        let promised = self.links.get(name).and_then(|peer| peer.echo_sent_at);
        promised.is_none_or(|promised| tick.reached(promised.plus(self.ttl_ms())))
    }

    /// Whether a peer has sent its sessions by the policy of this gateway.
    pub(super) fn has_policy(&self, peer: &str, now: Instant) -> bool {
        self.released_policy(peer, now) == self.policy_releases.version
    }

    /// Whether all active peers have got and released by the current policy what it has moved: none sends packets for
    /// shards of this gateway any more.
    pub(super) fn is_handed_over(&self, now: Instant) -> bool {
        let has_acknowledged = |name: &str| {
            let link = self.links.get(name).filter(|peer| peer.linked);
            link.is_some_and(|peer| peer.acknowledged_policy.as_ref() == Some(&self.policy_releases.version))
        };
        self.reachable().all(|peer| has_acknowledged(&peer.name) && self.has_policy(&peer.name, now))
    }
}
