//! The next view, when it is time for one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Roster, Seat};
use crate::members::{Member, View, Wish};

/// The smallest step of time that counts.
const STEP: Duration = Duration::from_millis(1);

impl Roster {
    /// Changes the view as far as anything asks for that. What it was may be compared with what it is.
    pub fn decide(&mut self, now: Instant) {
        if self.floor > 0 && self.floor >= self.view.number {
            self.overtake();
        }
        if !self.settle(now) {
            return;
        }
        let number = self.view.number + 1;
        let mut members = self.view.members.clone();
        self.dismiss(&mut members, now);
        self.admit(&mut members, number);
        for member in &mut members {
            self.update(member, number, now);
        }
        self.promote(&mut members, now);
        self.relieve(&mut members, number, now);
        if members != self.view.members {
            let mut view = View { number, serving_changes: self.view.most_serving_changes(), members };
            view.serving_changes += u64::from(!view.serves_alike(&self.view));
            self.view = Arc::new(view);
            let (policy, view) = (&self.policy, &self.view);
            self.seats.retain(|name, _| {
                policy.as_ref().is_some_and(|policy| policy.contains(name)) || view.member(name).is_some()
            });
        }
    }

    /// When `decide` should be called again, if nothing else happens before.
    pub fn due(&self) -> Option<Instant> {
        if !self.settled {
            return self.begun.map(|begun| begun + self.ttl * 2);
        }
        // Who is silent through our fault is given the whole time again.
        let heard = self.view.serving().filter_map(|member| self.heard(&member.name).max(self.deaf_until));
        heard.min().map(|last| last + self.ttl + STEP)
    }

    /// Whether it is known where the server before stopped.
    fn settle(&mut self, now: Instant) -> bool {
        let Some(begun) = self.begun else { return false };
        let known = |name: &Arc<str>| self.seats.contains_key(name);
        // Who serves may have a lease until it has spoken itself: another process of its name can't say so.
        let has_spoken = |member: &Member| {
            let seat = self.seats.get(&member.name);
            seat.is_some_and(|seat| !member.serving || seat.incarnation == member.incarnation)
        };
        let all_have_spoken = self.view.members.iter().all(has_spoken)
            && self.policy.as_ref().is_some_and(|names| names.iter().all(known));
        self.settled = self.settled || all_have_spoken || now >= begun + self.ttl * 2;
        self.settled
    }

    /// Somebody knows a higher number, or another view with this one. Epochs and counts rise with it: what was told under that
    /// number must not look newer than what comes now.
    fn overtake(&mut self) {
        let number = self.floor + 1;
        let members = self.view.members.iter().map(|member| Member { epoch: number, ..member.clone() }).collect();
        self.view = Arc::new(View { number, serving_changes: number, members });
    }

    /// Since when a gateway is silent.
    fn heard(&self, name: &str) -> Option<Instant> {
        self.seats.get(name).map(|seat| seat.last).or(self.taken_over).or(self.begun)
    }

    pub(super) fn is_silent(&self, name: &str, now: Instant) -> bool {
        let heard = self.heard(name).max(self.deaf_until);
        heard.is_none_or(|last| now.saturating_duration_since(last) > self.ttl)
    }

    /// Gateways that the policy has no more go when their last lease is over: they get no other.
    fn dismiss(&self, members: &mut Vec<Member>, now: Instant) {
        let Some(policy) = &self.policy else { return };
        members.retain(|it| policy.contains(&it.name) || (it.serving && !self.is_silent(&it.name, now)));
    }

    fn admit(&self, members: &mut Vec<Member>, number: u64) {
        for name in self.policy.iter().flatten() {
            if let Err(at) = members.binary_search_by(|member| member.name.cmp(name)) {
                members.insert(at, Member::new(name.clone(), number));
            }
        }
    }

    fn update(&self, member: &mut Member, number: u64, now: Instant) {
        let seat = self.seats.get(&member.name);
        let is_another = seat.is_some_and(|seat| seat.incarnation != member.incarnation);
        let is_silent = self.is_silent(&member.name, now);
        if member.serving && (is_another || is_silent) {
            stop(member, number);
            member.lapsed = is_silent && !is_another;
        }
        if let Some(seat) = seat {
            seat.describe(member);
        }
    }

    /// Who is ready serves; and where nobody would serve, and no able one is about to, whoever lives, even if it has said that it can't do
    /// so well.
    fn promote(&self, members: &mut [Member], now: Instant) {
        let (number, ttl) = (self.view.number, self.ttl);
        self.promote_if(members, |seat, member| seat.is_ready(member, number, now, ttl));
        let is_coming = |member: &Member| self.seats.get(&member.name).is_some_and(|seat| seat.is_coming(now, ttl));
        let serves = |member: &Member| self.is_in_policy(&member.name) && (member.serving || is_coming(member));
        if !members.iter().any(serves) {
            self.promote_if(members, |seat, member| seat.is_makeshift(member, number, now, ttl));
        }
    }

    /// Whether it serves, and has not said that it can't do so well.
    fn is_able(&self, member: &Member) -> bool {
        member.serving && !self.seats.get(&member.name).is_some_and(Seat::is_unable)
    }

    /// What is new with this view, nobody can have seen.
    fn promote_if(&self, members: &mut [Member], is_fit: impl Fn(&Seat, &Member) -> bool) {
        for member in members.iter_mut().filter(|member| !member.serving && self.is_in_policy(&member.name)) {
            let is_known = self.view.member(&member.name).is_some_and(|old| old.incarnation == member.incarnation);
            let seat = self.seats.get(&member.name);
            member.serving = is_known && seat.is_some_and(|seat| is_fit(seat, member));
            member.lapsed &= !member.serving;
        }
    }

    /// Who wants to stop does, as long as an able one is left; while none is, those go on who can't do so well. What befalls all, such as
    /// the death of the router that they share, shows at one after the other, and so does its end: who is unable stops only when it has
    /// said so for a while, and for one that has been able for as long.
    fn relieve(&self, members: &mut [Member], number: u64, now: Instant) {
        let counts = |member: &Member| self.is_in_policy(&member.name) && self.is_able(member);
        let is_steady = |member: &Member| self.seats.get(&member.name).is_none_or(|seat| seat.is_steady(now, self.ttl));
        let mut able = members.iter().filter(|member| counts(member)).count();
        for at in 0..members.len() {
            let member = &members[at];
            let wants_to_stop = |seat: &Seat| seat.wish == Wish::Draining && seat.is_fresh(now, self.ttl);
            if !member.serving || !self.seats.get(&member.name).is_some_and(wants_to_stop) {
                continue;
            }
            let is_able = usize::from(counts(member));
            let may_stop = if self.seats.get(&member.name).is_some_and(Seat::is_unable) {
                is_steady(member) && members.iter().any(|other| counts(other) && is_steady(other))
            } else {
                able > is_able
            };
            if may_stop {
                stop(&mut members[at], number);
                able -= is_able;
            }
        }
    }
}

fn stop(member: &mut Member, number: u64) {
    member.serving = false;
    member.lapsed = false;
    member.epoch = number;
}
