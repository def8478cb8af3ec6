//! Gateways that the policy doesn't name any more. Their shards have other owners by policy; until these have their
//! sessions, and routers have converged, they stay in the view and forward.

use std::time::{Duration, Instant};

use super::{HeartbeatOutcome, MembershipState};
use crate::membership::replication::policy_release_timeout;
use crate::membership::{Heartbeat, Member};

impl MembershipState {
    /// Removes gateways that the policy doesn't name and that have had time to hand over, active ones when their last
    /// lease has expired.
    pub(super) fn remove_former(&mut self, members: &mut Vec<Member>, now: Instant) {
        let Some(policy) = &self.policy else { return };
        let is_removed = |name: &str| !policy.contains(name) && members.iter().any(|member| *member.name == *name);
        self.removed_at.retain(|name, _| is_removed(name));
        for member in members.iter().filter(|member| !policy.contains(&member.name)) {
            self.removed_at.entry(member.name.clone()).or_insert(now);
        }
        members.retain(|member| {
            let stays = member.serving || self.is_leaving(&member.name, now);
            self.is_in_policy(&member.name) || (stays && !self.has_timed_out(&member.name, now))
        });
    }

    /// When removed gateways leave the view at the latest.
    pub(super) fn departures(&self) -> impl Iterator<Item = Instant> {
        let inactive = |name: &str| self.view.member(name).is_some_and(|member| !member.serving);
        self.removed_at.iter().filter(move |(name, _)| inactive(name)).map(|(_, at)| *at + self.departure())
    }

    /// Renews the record of a removed gateway that still hands over. Another process of its name is unknown.
    pub(super) fn renew_removed(&mut self, heartbeat: &Heartbeat, now: Instant) -> HeartbeatOutcome {
        let is_leaving = self.is_leaving(&heartbeat.gateway, now);
        let record = self.records.get_mut(&heartbeat.gateway);
        match record.filter(|record| is_leaving && record.incarnation == heartbeat.incarnation) {
            Some(record) => {
                record.renew(heartbeat, now);
                HeartbeatOutcome::Accepted
            }
            None => HeartbeatOutcome::UnknownGateway,
        }
    }

    /// Whether a gateway of the view that the policy doesn't name has time left to hand over.
    pub(super) fn is_leaving(&self, name: &str, now: Instant) -> bool {
        let is_early = self.removed_at.get(name).is_none_or(|removed| now < *removed + self.departure());
        is_early && self.view.member(name).is_some()
    }

    /// Time in which a removed gateway hands over: its last lease expires before other gateways stop waiting for its
    /// release of the policy that has removed it.
    fn departure(&self) -> Duration {
        policy_release_timeout(self.ttl).saturating_sub(self.ttl)
    }
}
