//! Gateways that the policy doesn't name any more. Their shards have other owners by policy; until these have their
//! sessions, and routers have converged, they stay in the view and forward.

use std::time::{Duration, Instant};

use super::{HeartbeatOutcome, MemberRecord, MembershipState};
use crate::replication::policy_release_timeout;
use crate::{Heartbeat, Member};

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

    /// Renews the record of a removed gateway that still hands over. Another process of its name is unknown. A server
    /// that has just started knows its process from the view.
    pub(super) fn renew_removed(&mut self, heartbeat: &Heartbeat, now: Instant) -> HeartbeatOutcome {
        let gateway = &heartbeat.gateway;
        let is_in_view = self.view.member(gateway).is_some_and(|member| {
            member.incarnation == heartbeat.incarnation && member.commitment == Some(heartbeat.commitment)
        });
        if !self.is_leaving(gateway, now) {
            return HeartbeatOutcome::UnknownGateway;
        }
        match self.records.get_mut(gateway) {
            Some(record) if record.incarnation == heartbeat.incarnation => record.renew(heartbeat, now),
            None if is_in_view => {
                self.records.insert(gateway.clone(), MemberRecord::from_heartbeat(heartbeat, now));
            }
            Some(_) | None => return HeartbeatOutcome::UnknownGateway,
        }
        HeartbeatOutcome::Accepted
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
