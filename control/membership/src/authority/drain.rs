//! Drains: which draining members are deactivated, and which stay active, with the reason.
//!
//! A drain that would leave a shard without an owner is refused; one that exceeds the limit of unavailable gateways
//! waits, like an eviction for a PodDisruptionBudget of Kubernetes. Faults and crashes count against the limit and are
//! never held back by it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::decide::deactivate;
use super::{MemberRecord, MembershipState};
use crate::{DesiredState, DrainBlock, DrainBlockReason, Member};

/// The gateways that can own a shard, its home and its backups: sorted names.
pub type ShardGroup = Vec<Arc<str>>;

/// How many gateways may be unavailable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnavailableLimit {
    /// A number of gateways.
    Count(u32),
    /// A percentage of the policy's gateways, at most 100.
    Percent(u32),
}

impl UnavailableLimit {
    /// The limit for a policy with `total` gateways. Percentages are rounded up, as in a PodDisruptionBudget.
    pub fn of(self, total: usize) -> usize {
        match self {
            Self::Count(count) => count as usize,
            Self::Percent(percent) => (total * percent as usize).div_ceil(100),
        }
    }
}

impl MembershipState {
    /// Limits how many gateways of the policy may be unavailable for a further one to be drained; `None`: no limit.
    pub fn set_max_unavailable(&mut self, limit: Option<UnavailableLimit>) {
        self.max_unavailable = limit;
    }

    /// Replaces the groups of gateways that can own a shard.
    pub fn set_shard_groups(&mut self, groups: Arc<BTreeSet<ShardGroup>>) {
        self.shard_groups = groups;
    }

    /// Why the drain of an active gateway is blocked, as of the last decision; `None`: it isn't, or it doesn't drain.
    pub fn drain_block(&self, name: &str) -> Option<&DrainBlock> {
        self.drain_blocks.get(name)
    }

    /// Number of active gateways whose drain waits.
    pub fn waiting_drains(&self) -> usize {
        self.drain_blocks.values().filter(|block| block.reason != DrainBlockReason::NoBackup).count()
    }

    /// The gateways of the policy that are not active, or have a fault, and their limit for drains, if there is one.
    pub fn unavailable(&self) -> (Vec<Arc<str>>, Option<usize>) {
        let total = self.policy.as_ref().map_or(0, BTreeSet::len);
        (self.unavailable_among(&self.view.members), self.max_unavailable.map(|limit| limit.of(total)))
    }

    fn unavailable_among(&self, members: &[Member]) -> Vec<Arc<str>> {
        let is_able = |name: &str| find(members, name).is_some_and(|member| self.is_able(member));
        self.policy.iter().flatten().filter(|name| !is_able(name)).cloned().collect()
    }

    /// Deactivates draining members, unless that is blocked. A common cause of faults, such as the failure of a shared
    /// router, is detected by one gateway after the other, and so is its end: a member with a fault is deactivated only
    /// after it has reported that for a while, and only if another one has been without a fault for as long.
    pub(super) fn drain(&mut self, members: &mut [Member], number: u64, now: Instant) {
        let is_able = |member: &Member| self.is_in_policy(&member.name) && self.is_able(member);
        let is_stable =
            |member: &Member| self.records.get(&member.name).is_none_or(|record| record.is_stable(now, self.ttl));
        let is_draining =
            |record: &MemberRecord| record.desired_state == DesiredState::Draining && record.is_alive(now, self.ttl);
        let mut blocks = BTreeMap::new();
        for index in 0..members.len() {
            let member = &members[index];
            if !member.serving || !self.records.get(&member.name).is_some_and(is_draining) {
                continue;
            }
            let may_deactivate = if self.records.get(&member.name).is_some_and(MemberRecord::is_unable) {
                is_stable(member) && members.iter().any(|other| is_able(other) && is_stable(other))
            } else if let Some(block) = self.find_drain_block(member, members, now) {
                blocks.insert(member.name.clone(), block);
                false
            } else {
                true
            };
            if may_deactivate {
                deactivate(&mut members[index], number);
            }
        }
        self.drain_blocks = blocks;
    }

    /// Why an active member without a fault can't be deactivated now, if there is a reason. The limit comes first: a
    /// drain that exceeds it would wait in any case.
    fn find_drain_block(&self, member: &Member, members: &[Member], now: Instant) -> Option<DrainBlock> {
        let is_able = |name: &Arc<str>| {
            *name != member.name
                && self.is_in_policy(name)
                && find(members, name).is_some_and(|other| self.is_able(other))
        };
        if let Some(limit) = self.max_unavailable.filter(|_| self.is_in_policy(&member.name)) {
            let limit = limit.of(self.policy.as_ref().map_or(0, BTreeSet::len));
            let unavailable = self.unavailable_among(members);
            if unavailable.len() >= limit {
                let reason = DrainBlockReason::MaxUnavailable(u32::try_from(limit).unwrap_or(u32::MAX));
                return Some(DrainBlock { reason, gateways: unavailable });
            }
        }
        let all: ShardGroup = self.policy.iter().flatten().cloned().collect();
        let own_groups = self.shard_groups.iter().filter(|group| group.contains(&member.name));
        let group = std::iter::once(&all).chain(own_groups).find(|group| !group.iter().any(is_able))?;
        let others = || group.iter().filter(|name| **name != member.name);
        let starting: Vec<Arc<str>> = others().filter(|name| self.is_becoming_active(name, now)).cloned().collect();
        Some(if starting.is_empty() {
            DrainBlock { reason: DrainBlockReason::NoBackup, gateways: others().cloned().collect() }
        } else {
            DrainBlock { reason: DrainBlockReason::BecomingActive, gateways: starting }
        })
    }

    /// Whether an inactive gateway is alive, without a fault, and wants to be active.
    fn is_becoming_active(&self, name: &str, now: Instant) -> bool {
        self.is_in_policy(name)
            && self.records.get(name).is_some_and(|record| {
                record.desired_state != DesiredState::Draining && record.is_connected(now, self.ttl)
            })
    }
}

fn find<'a>(members: &'a [Member], name: &str) -> Option<&'a Member> {
    let index = members.binary_search_by(|member| (*member.name).cmp(name)).ok()?;
    members.get(index)
}
