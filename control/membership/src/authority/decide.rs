//! Decision on the next membership view: which gateways join, become active or inactive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{MemberRecord, MembershipState};
use crate::{Member, MembershipView};

/// Resolution of timeouts.
const RESOLUTION: Duration = Duration::from_millis(1);

impl MembershipState {
    /// Replaces the view by the next one if anything changes; compare `view` before and after.
    pub fn decide(&mut self, now: Instant) {
        self.recovered = self.recovered || self.recovers_at().is_some_and(|at| now >= at);
        if !self.recovered {
            return;
        }
        let has_skipped = self.skip_used_numbers(now);
        let number = if has_skipped { self.view.number } else { self.term.next_number(self.view.number) };
        let mut members = self.view.members.clone();
        self.remove_former(&mut members, now);
        self.add_new(&mut members, number);
        for member in &mut members {
            self.update(member, number, now);
        }
        self.activate(&mut members, now);
        self.drain(&mut members, number, now);
        if members != self.view.members {
            let mut view = MembershipView { number, serving_changes: self.view.serving_changes, members };
            view.serving_changes += u64::from(!view.has_same_active_members(&self.view));
            self.view = Arc::new(view);
            let (policy, view) = (&self.policy, &self.view);
            self.records.retain(|name, _| {
                policy.as_ref().is_some_and(|policy| policy.contains(name)) || view.member(name).is_some()
            });
        }
    }

    /// When `decide` must be called again if no event comes before.
    pub fn next_deadline(&self) -> Option<Instant> {
        if !self.recovered {
            return self.recovers_at();
        }
        let last = self
            .view
            .active_members()
            .filter_map(|member| self.last_heartbeat(&member.name).max(self.timeouts_reset_at));
        let timeouts = last.map(|last| last + self.ttl + RESOLUTION);
        timeouts.chain(self.departures()).min()
    }

    /// When recovery is complete: all gateways have reported, or had time to, and no lease is left that the record doesn't
    /// tell of. `None`: none has reported yet.
    fn recovers_at(&self) -> Option<Instant> {
        let started = self.started_at?;
        let reported = if self.have_all_reported() { started } else { started + self.ttl * 2 };
        Some(self.term.leases_expire_at(self.ttl).map_or(reported, |at| at.max(reported)))
    }

    fn have_all_reported(&self) -> bool {
        let is_known = |name: &Arc<str>| self.records.contains_key(name);
        // An active process may have a lease; only a heartbeat of its own, not of another process with its name, counts
        // as its report.
        let has_reported = |member: &Member| {
            let record = self.records.get(&member.name);
            record.is_some_and(|record| !member.serving || record.incarnation == member.incarnation)
        };
        self.view.members.iter().all(has_reported)
            && self.policy.as_ref().is_some_and(|names| names.iter().all(is_known))
    }

    /// The start of a gateway's heartbeat timeout.
    fn last_heartbeat(&self, name: &str) -> Option<Instant> {
        self.records.get(name).map(|record| record.last_heartbeat).or(self.started_at)
    }

    pub(super) fn has_timed_out(&self, name: &str, now: Instant) -> bool {
        let last = self.last_heartbeat(name).max(self.timeouts_reset_at);
        last.is_none_or(|last| now.saturating_duration_since(last) > self.ttl)
    }

    /// Adds gateways that the policy names.
    pub(super) fn add_new(&self, members: &mut Vec<Member>, number: u64) {
        for name in self.policy.iter().flatten() {
            if let Err(index) = members.binary_search_by(|member| member.name.cmp(name)) {
                members.insert(index, Member::new(name.clone(), number));
            }
        }
    }

    /// Deactivates a member whose heartbeats timed out or whose process was replaced, and updates it from its record.
    fn update(&self, member: &mut Member, number: u64, now: Instant) {
        let record = self.records.get(&member.name);
        let is_replaced = record.is_some_and(|record| record.incarnation != member.incarnation);
        let has_timed_out = self.has_timed_out(&member.name, now);
        if member.serving && (is_replaced || has_timed_out) {
            deactivate(member, number);
            member.lease_expired = has_timed_out && !is_replaced;
        }
        if let Some(record) = record {
            record.copy_to(member);
        }
    }

    /// Activates members that are ready. If then none is active, and none without a fault is starting, activates live
    /// members with a fault.
    fn activate(&self, members: &mut [Member], now: Instant) {
        let (number, ttl) = (self.view.number, self.ttl);
        self.activate_if(members, |record, member| record.is_ready(member, number, now, ttl));
        let is_starting =
            |member: &Member| self.records.get(&member.name).is_some_and(|record| record.is_starting(now, ttl));
        let is_expected = |member: &Member| self.is_in_policy(&member.name) && (member.serving || is_starting(member));
        if !members.iter().any(is_expected) {
            self.activate_if(members, |record, member| record.is_fallback(member, number, now, ttl));
        }
    }

    /// Whether a member is active and reports no fault.
    pub(super) fn is_able(&self, member: &Member) -> bool {
        member.serving && !self.records.get(&member.name).is_some_and(MemberRecord::is_unable)
    }

    /// Activates inactive members that are fit. A process that is new in this view can't have applied the current one
    /// yet.
    fn activate_if(&self, members: &mut [Member], is_fit: impl Fn(&MemberRecord, &Member) -> bool) {
        for member in members.iter_mut().filter(|member| !member.serving && self.is_in_policy(&member.name)) {
            let is_known = self.view.member(&member.name).is_some_and(|old| old.incarnation == member.incarnation);
            let record = self.records.get(&member.name);
            member.serving = is_known && record.is_some_and(|record| is_fit(record, member));
            member.lease_expired &= !member.serving;
        }
    }
}

pub(super) fn deactivate(member: &mut Member, number: u64) {
    member.serving = false;
    member.lease_expired = false;
    member.epoch = number;
}
