//! Releases: what other gateways have released, by view and by policy, and what this one has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::members::PolicyRelease;

use super::GroupState;
use crate::replication::{Release, policy_release_timeout};
use crate::{Member, MembershipView};

/// A release that is awaited.
#[derive(Clone, Copy, Debug)]
pub(super) struct AwaitedRelease {
    /// The view for which a gateway has to release shards.
    view: u64,
    /// When that was received.
    since: Instant,
    /// Whether the gateway was active in the view before.
    was_active: bool,
}

/// Releases by policy.
#[derive(Clone, Debug, Default)]
pub(super) struct PolicyReleases {
    /// Version of the policy.
    version: Arc<str>,
    /// Since when it is in force.
    since: Option<Instant>,
    /// How many policies this process has applied.
    applied: u64,
    /// Since when the engine awaits any. How long doesn't begin anew with each policy: some gateways get one every second.
    awaited_since: Option<Instant>,
    /// What peers have released, as published to the engine.
    pub(super) published: BTreeMap<Arc<str>, PolicyRelease>,
    /// Since which view members are active, as published.
    published_since: u64,
}

impl PolicyReleases {
    /// Sets the version of the policy in force.
    pub(super) fn set_version(&mut self, version: &Arc<str>, now: Instant) {
        if self.version != *version {
            (self.version, self.since) = (version.clone(), Some(now));
            self.applied += 1;
        }
    }

    /// Sets whether the engine awaits any.
    pub(super) fn set_awaited(&mut self, awaited: bool, now: Instant) {
        self.awaited_since = self.awaited_since.or(Some(now)).filter(|_| awaited);
    }
}

impl GroupState {
    /// Records the gateways that have to release shards before this gateway may open sessions in them. While it is
    /// active, only gateways that have become inactive since the last view, or were for a time, as their epochs show; or
    /// that were active and aren't in the view any more. When it becomes active, all.
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
        let gone = self.view.active_members().filter(|it| view.member(&it.name).is_none() && it.name != self.name);
        let names: Vec<Arc<str>> = added.chain(gone).map(|member| member.name.clone()).collect();
        let mut awaiting = std::mem::take(&mut self.awaiting_release);
        awaiting.retain(|name, it| view.member(name).is_some() || !self.has_timed_out(name, it, now));
        for name in names {
            let may_hold_lease = |it: &AwaitedRelease| it.was_active && !self.has_timed_out(&name, it, now);
            let was_active = self.is_active_member(&name) || awaiting.get(&name).is_some_and(may_hold_lease);
            awaiting.insert(name, AwaitedRelease { view: view.number, since: now, was_active });
        }
        self.awaiting_release = awaiting;
    }

    /// Gateways that the view doesn't have any more, but that may hold a lease.
    pub(super) fn gone(&self) -> impl Iterator<Item = &Arc<str>> {
        self.awaiting_release.keys().filter(|name| self.view.member(name).is_none())
    }

    /// Whether a release by view isn't awaited any more. A gateway that is inactive, or not in the view at all, has no
    /// lease when the TTL has passed. An active one may have one under this view, and derive other owners from another
    /// policy.
    fn has_timed_out(&self, name: &str, awaited: &AwaitedRelease, now: Instant) -> bool {
        self.awaited_until(name, awaited).is_some_and(|until| now >= until)
    }

    /// Until when a release by view is awaited. Before the first lease, the TTL is unknown; without a lease no session
    /// can be opened anyway, unless no other gateway is left.
    fn awaited_until(&self, name: &str, awaited: &AwaitedRelease) -> Option<Instant> {
        let member = self.view.member(name);
        let is_active = member.is_some_and(|member| member.serving);
        let timeout = if is_active || !self.is_granted { policy_release_timeout(self.ttl) } else { self.ttl };
        (self.is_granted || member.is_none()).then(|| awaited.since + timeout)
    }

    /// When releases by view may not be awaited any more.
    pub(super) fn awaited_deadlines(&self) -> impl Iterator<Item = Instant> {
        self.awaiting_release.iter().filter_map(|(name, awaited)| self.awaited_until(name, awaited))
    }

    /// A gateway has released shards.
    pub fn mark_released(&mut self, gateway: Arc<str>, release: &Release) {
        let known = self.released.entry(gateway).or_default();
        *known = Release { view: release.view.max(known.view), ..release.clone() };
    }

    /// Forgets which policy gateways have released whose process is another one in a new view.
    pub(super) fn forget_releases(&mut self, view: &MembershipView) {
        for (name, release) in &mut self.released {
            let incarnation = |view: &MembershipView| view.member(name).map(|member| member.incarnation);
            if incarnation(view) != incarnation(&self.view) {
                *release = Release { view: release.view, ..Release::default() };
            }
        }
    }

    /// What this gateway has released to a peer once its workers use a view and the policy.
    pub fn release_for(&self, peer: &str, view: u64) -> Release {
        let PolicyReleases { version, applied, .. } = &self.policy_releases;
        let (policy, applied) = (version.clone(), *applied);
        Release { view, policy, applied, seen: self.released.get(peer).map_or(0, |it| it.applied) }
    }

    /// The version of the policy whose moved shards a gateway has released. When that was awaited for too long, it counts
    /// as done: a peer that is unreachable or has rejected the policy doesn't send any.
    fn released_policy(&self, name: &str, awaited_since: Option<Instant>, now: Instant) -> Arc<str> {
        if awaited_since.is_none_or(|since| now >= since + policy_release_timeout(self.ttl)) {
            return self.policy_releases.version.clone();
        }
        // A policy may come back. Then a gateway may have released it long ago, and use another one by now; and may not
        // know yet that this gateway doesn't use that one any more.
        let is_current = |release: &&Release| release.seen == self.policy_releases.applied;
        self.released.get(name).filter(is_current).map(|release| release.policy.clone()).unwrap_or_default()
    }

    /// Updates what the engine knows of releases by policy: only while it awaits any, since each update is published to
    /// the workers, and with each change of active members, which gives it shards.
    pub(super) fn update_policy_releases(&mut self, now: Instant) {
        let names: Vec<Arc<str>> = self.peers().cloned().collect();
        let (active_since, releases) = (self.active_since(), &mut self.policy_releases);
        let is_due = releases.awaited_since.is_some() || releases.published_since != active_since;
        releases.published_since = active_since;
        releases.published.retain(|name, _| names.contains(name));
        let awaited_since = releases.awaited_since.or(releases.since);
        for name in names {
            if is_due || !self.policy_releases.published.contains_key(&name) {
                let release = self.released_policy(&name, awaited_since, now);
                self.policy_releases.published.insert(name, PolicyRelease::Version(release));
            }
        }
    }

    /// Until when releases by policy are awaited.
    pub(super) fn policy_deadlines(&self) -> impl Iterator<Item = Instant> {
        let timeout = policy_release_timeout(self.ttl);
        let PolicyReleases { awaited_since, since, .. } = self.policy_releases;
        awaited_since.into_iter().chain(since).map(move |since| since + timeout)
    }

    /// Whether all other gateways have released the shards that views have assigned to this gateway.
    pub(super) fn all_released(&self, now: Instant, tick: Tick) -> bool {
        let has_released = |(name, awaited): (&Arc<str>, &AwaitedRelease)| {
            let has_timed_out = self.has_timed_out(name, awaited, now);
            let Some(member) = self.view.member(name).filter(|_| !has_timed_out) else { return has_timed_out };
            let released = self.released.get(&member.name).map_or(0, |release| release.view);
            let expired = !member.serving && member.lease_expired && self.has_promise_expired(&member.name, tick);
            // No process of that gateway has sent a heartbeat yet, so none holds a lease or a promise; unless it was
            // active before, and was removed and added again.
            let is_unused = member.incarnation == 0 && !awaited.was_active;
            expired || is_unused || released >= awaited.view
        };
        self.active_change.is_some() && self.awaiting_release.iter().all(has_released)
    }

    /// Whether the last promise of this gateway to a peer has expired, be it of this process or of its predecessor. While
    /// the server is unreachable, promises serve as its lease.
    pub(super) fn has_promise_expired(&self, name: &str, tick: Tick) -> bool {
        let promised = self.links.get(name).and_then(|peer| peer.echo_sent_at).or(self.started);
        promised.is_none_or(|promised| tick.reached(promised.plus(self.ttl_ms())))
    }

    /// Whether a peer has sent its sessions by the policy of this gateway.
    pub(super) fn has_policy(&self, peer: &str, now: Instant) -> bool {
        self.released_policy(peer, self.policy_releases.since, now) == self.policy_releases.version
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
