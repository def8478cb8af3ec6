//! Fair shares of one worker's session table (max-min fairness in two levels): whoever wants little has all of it, and the rest is for those
//! that want more, as much for each: first among VIPs, then within a VIP among its pods, and all clients of its Services together. A session
//! counts for its holder from when it opens until it ends, a standby session, too; a quarantined one doesn't.
//!
//! ```text
//!   capacity |-------------------- open to everyone ---------------------|-- reserve --|
//! ```
//! Whoever comes first may have all but the reserve. That is only for holders below their share; what they take of it is made up for by
//! sessions of holders above theirs (see eviction.rs). There always are such holders then: what all hold together is more than all shares.
//!
//! A level cuts off what is too much: as high as it can be while what is below it fits. A VIP's share is the level of all VIPs, in what the
//! table shares; a member's share is the level of its VIP's members, in the VIP's share. So nobody who has a session more than another one
//! has a claim that the other one hasn't, and a session that ends for a newcomer doesn't make its holder one.
//!
//! Counts belong to keyed hashes of addresses, not to policy's numbers: they outlive every change of policy, and nobody outside can choose
//! whose hash is whose.

mod counts;
mod histograms;

use counts::{Counts, Place, Record};
use histograms::{Histogram, Histograms};
use vipgate_mem::MemoryError;

use super::entry::Entry;
use super::tuple::HashKey;
use crate::address::Address;
use crate::snapshot::build::MOST_VIPS;

/// Pods, and VIPs with clients, that are told apart at a worker: more than fit are counted for their VIP alone.
const MOST_MEMBERS: u32 = 1 << 17;

/// Who holds a session: a VIP, and in it a pod of its, or its clients together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    vip: u64,
    member: u64,
}

impl Holder {
    /// The pod `member` that leaves as `vip`; with the VIP itself in its place, the clients that come to it.
    #[inline]
    pub(super) fn new<A: Address>(vip: A, member: A, key: &HashKey) -> Self {
        Self::in_packet_order([vip.in_packet_order(), member.in_packet_order()], key)
    }

    /// The holder of the session whose first direction this is.
    #[inline]
    pub(super) fn of<A: Address>(origin: &Entry<A>, key: &HashKey) -> Self {
        Self::in_packet_order(origin.vip_and_member(), key)
    }

    #[inline]
    fn in_packet_order<A: Address>([vip, member]: [A; 2], key: &HashKey) -> Self {
        let [vip, member] = key.hash_pair(vip, member);
        Self { vip, member }
    }
}

/// What all holders have.
#[derive(Debug)]
pub struct Fairness {
    vips: Counts,
    members: Counts,
    histograms: Histograms,
    /// Sessions that are counted.
    held: u64,
    /// Sessions that fit without the reserve: the sum of all shares.
    shared: u64,
}

impl Fairness {
    /// Nobody holds any of `capacity` sessions, all of which are shared.
    pub(super) fn new(capacity: u32) -> Result<Self, MemoryError> {
        let most_vips = (2 * MOST_VIPS as u32).min(capacity);
        let (vips, members) = (Counts::new(most_vips)?, Counts::new(capacity.min(MOST_MEMBERS))?);
        let histograms = Histograms::new(vips.capacity(), members.capacity())?;
        Ok(Self { vips, members, histograms, held: 0, shared: capacity.into() })
    }

    /// From now on so many sessions are shared.
    pub(super) fn share(&mut self, sessions: u32) {
        self.shared = sessions.into();
    }

    /// A holder has one more session.
    #[inline]
    pub(super) fn open(&mut self, holder: Holder) {
        let place = self.vips.place(holder.vip);
        let members = if let Some(vip) = self.vips.at(place) {
            vip.bin = self.histograms.increment(vip.bin);
            vip.members
        } else if self.vips.is_full() {
            return;
        } else {
            self.begin_vip(place, holder)
        };
        self.held += 1;
        let place = self.members.place(holder.member);
        if let Some(member) = self.members.at(place) {
            member.bin = self.histograms.increment(member.bin);
        } else if !self.members.is_full() {
            let bin = self.histograms.insert(members);
            self.members.insert(place, holder.member, bin, members);
        }
    }

    #[cold]
    fn begin_vip(&mut self, place: Place, holder: Holder) -> Histogram {
        let (bin, members) = (self.histograms.insert(Histograms::VIPS), self.histograms.create());
        self.vips.insert(place, holder.vip, bin, members);
        members
    }

    /// A holder has one session less.
    #[inline]
    pub(super) fn close(&mut self, holder: Holder) {
        let at_vip = self.vips.place(holder.vip);
        let Some(vip) = self.vips.at(at_vip) else { return };
        let place = self.members.place(holder.member);
        if let Some(member) = self.members.at(place) {
            if self.histograms.count(member.bin) > 1 {
                member.bin = self.histograms.decrement(member.bin);
            } else {
                self.histograms.take(vip.members, member.bin);
                self.members.remove(place);
            }
        }
        if self.histograms.count(vip.bin) > 1 {
            vip.bin = self.histograms.decrement(vip.bin);
        } else if self.histograms.holders(vip.members) == 0 {
            self.histograms.take(Histograms::VIPS, vip.bin);
            self.histograms.remove(vip.members);
            self.vips.remove(at_vip);
        } else {
            // One that wasn't counted when it opened, the table of VIPs being full then.
            return;
        }
        self.held -= 1;
    }

    /// VIPs with sessions.
    pub(super) fn vips(&self) -> u32 {
        self.vips.used()
    }

    /// Sessions of a VIP.
    pub(super) fn of_vip<A: Address>(&self, vip: A, key: &HashKey) -> u32 {
        self.vips.get(Holder::new(vip, vip, key).vip).map_or(0, |vip| self.histograms.count(vip.bin))
    }

    /// Sessions of a holder, and how many members its VIP has.
    pub(super) fn of_member(&self, holder: Holder) -> (u32, u32) {
        let own = self.members.get(holder.member).map_or(0, |member| self.histograms.count(member.bin));
        (own, self.vips.get(holder.vip).map_or(0, |vip| self.histograms.holders(vip.members)))
    }

    /// The share of each VIP that wants as much, in sessions: what is above it doesn't fit. More than any has, if all of them fit.
    pub(super) fn level(&self) -> u32 {
        self.histograms.level(Histograms::VIPS, self.held.saturating_sub(self.shared))
    }

    /// Whether one more session leaves a holder within its share, or its VIP. One of `ended` would have ended before.
    #[cold]
    pub(super) fn is_below(&self, holder: Holder, ended: Option<Holder>) -> bool {
        let count = |record: &Record| self.histograms.count(record.bin);
        let vip = self.vips.get(holder.vip);
        if vip.is_none() && self.vips.is_full() {
            return false;
        }
        // What another one has in excess makes no room by its end.
        let makes_room = |ended: Option<&Record>, level: u32| u64::from(ended.is_some_and(|it| count(it) <= level));
        let is_of_vip = ended.is_some_and(|ended| ended.vip == holder.vip);
        let of_vip = vip.map_or(0, count) + u32::from(!is_of_vip);
        let other = ended.filter(|_| !is_of_vip).and_then(|ended| self.vips.get(ended.vip));
        let within = self.held + u64::from(!is_of_vip) - self.histograms.excess(Histograms::VIPS, of_vip);
        if within.saturating_sub(makes_room(other, of_vip)) <= self.shared {
            return true;
        }
        let Some(vip) = vip else { return false };
        let own = self.members.get(holder.member);
        if own.is_none() && self.members.is_full() {
            return false;
        }
        let is_own = ended == Some(holder);
        let of_member = own.map_or(0, count) + u32::from(!is_own);
        let other = ended.filter(|_| is_of_vip && !is_own).and_then(|ended| self.members.get(ended.member));
        let all = u64::from(count(vip)) + u64::from(!is_own);
        let within = all.saturating_sub(self.histograms.excess(vip.members, of_member));
        // With that one session the VIP has more than its share.
        let share = self.level().min(of_vip - 1);
        within.saturating_sub(makes_room(other, of_member)) <= share.into()
    }

    /// Whether a holder has more than its share, and its VIP, too, where the share of VIPs is `level`: without one session each still has
    /// all of it.
    #[inline]
    pub(super) fn is_over(&self, holder: Holder, level: u32) -> bool {
        let count = |record: &Record| self.histograms.count(record.bin);
        let Some(vip) = self.vips.get(holder.vip) else { return true };
        if count(vip) <= level {
            return false;
        }
        let is_over =
            |own| u64::from(count(vip)).saturating_sub(self.histograms.excess(vip.members, own)) > level.into();
        self.members.get(holder.member).is_none_or(|own| is_over(count(own)))
    }

    /// Whether a holder's VIP has no less than VIPs have on average, and the holder no less than members of its VIP: of `held` sessions.
    #[inline]
    pub(super) fn is_large(&self, holder: Holder, held: u32) -> bool {
        let count = |record: &Record| u64::from(self.histograms.count(record.bin));
        let Some(vip) = self.vips.get(holder.vip) else { return true };
        let members = u64::from(self.histograms.holders(vip.members));
        count(vip) * u64::from(self.vips.used()) >= u64::from(held)
            && self.members.get(holder.member).is_none_or(|own| count(own) * members >= count(vip))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_beyond_those_that_are_told_apart_count_for_their_vip() {
        let key = HashKey::new([11, 22, 33, 44]);
        let mut fairness = Fairness::new(4).unwrap();
        fairness.share(4);
        let pod = |n: u32| Holder::new(7, 100 + n, &key);
        (0..5).for_each(|n| fairness.open(pod(n)));
        assert_eq!(
            (fairness.of_vip(7, &key), fairness.of_member(pod(3)), fairness.of_member(pod(4))),
            (5, (1, 4), (0, 4))
        );
        assert!(!fairness.is_below(pod(4), None) && fairness.is_over(pod(4), 4), "by its VIP alone");
        assert!(fairness.level() == 4 && fairness.is_over(pod(3), 4), "five can't have one of four each");
        fairness.share(5);
        assert!(!fairness.is_over(pod(3), fairness.level()));
        (0..5).rev().for_each(|n| fairness.close(pod(n)));
        assert_eq!((fairness.of_vip(7, &key), fairness.vips(), fairness.members.used()), (0, 0, 0));
    }

    #[test]
    fn one_vip_has_all_three_have_a_third_and_a_newcomer_has_its_part() {
        let key = HashKey::new([11, 22, 33, 44]);
        let mut fairness = Fairness::new(1000).unwrap();
        fairness.share(900);
        let is_over = |fairness: &Fairness, holder| fairness.is_over(holder, fairness.level());
        let [one, two, three] = [1, 2, 3].map(|vip| Holder::new(vip, vip, &key));
        (0..899).for_each(|_| fairness.open(one));
        assert!(fairness.is_below(one, None) && !is_over(&fairness, one));
        fairness.open(one);
        assert!(!fairness.is_below(one, None) && !is_over(&fairness, one), "it has its share, which is all");
        assert!(fairness.is_below(one, Some(one)), "its own session makes room");
        fairness.open(two);
        assert!(fairness.is_below(two, None) && is_over(&fairness, one), "a half each");
        (0..448).for_each(|_| fairness.open(two));
        assert!(fairness.is_below(two, None) && !is_over(&fairness, two));
        assert!(fairness.is_below(three, None));
        fairness.open(three);
        assert!(!fairness.is_below(two, None) && !is_over(&fairness, two), "it leaves what it doesn't want");
        assert!(is_over(&fairness, one) && fairness.level() == 450);
        (0..299).for_each(|_| fairness.open(three));
        assert!(!fairness.is_below(three, None) && !is_over(&fairness, three), "a third each");
        assert!(is_over(&fairness, two) && is_over(&fairness, one) && fairness.level() == 300);
        let pod = Holder::new(1, 99, &key);
        assert!(fairness.is_below(pod, None), "its VIP has more than its share, but none of that is its own");
    }
}
