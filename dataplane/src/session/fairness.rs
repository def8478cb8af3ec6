//! Fair shares of one worker's session table (max-min fairness in two levels): every VIP with sessions has an equal share, and within a VIP
//! each of its pods, and all clients of its Services together. A session counts for its holder from when it opens until it ends, a standby
//! session, too; a quarantined one doesn't.
//!
//! ```text
//!   capacity |-------------------- open to everyone ---------------------|-- reserve --|
//! ```
//! Whoever comes first may have all but the reserve. That is only for holders below their share; what they take of it is made up for by
//! sessions of holders above theirs (see eviction.rs). There always are such holders then: what all hold together is more than all shares.
//!
//! Counts belong to keyed hashes of addresses, not to policy's numbers: they outlive every change of policy, and nobody outside can choose
//! whose hash is whose.

use vipgate_mem::{MemoryError, Slab};

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
    /// Sessions that fit without the reserve: the sum of all shares.
    shared: u64,
}

impl Fairness {
    /// Nobody holds any of `capacity` sessions, all of which are shared.
    pub(super) fn new(capacity: u32) -> Result<Self, MemoryError> {
        let most_vips = (2 * MOST_VIPS as u32).min(capacity);
        let (vips, members) = (Counts::new(most_vips)?, Counts::new(capacity.min(MOST_MEMBERS))?);
        Ok(Self { vips, members, shared: capacity.into() })
    }

    /// From now on so many sessions are shared.
    pub(super) fn share(&mut self, sessions: u32) {
        self.shared = sessions.into();
    }

    /// A holder has one more session.
    #[inline]
    pub(super) fn open(&mut self, holder: Holder) {
        self.vips.add(holder.vip);
        if self.members.add(holder.member) == 1 {
            self.come(holder);
        }
    }

    #[cold]
    fn come(&mut self, holder: Holder) {
        if let Some(vip) = self.vips.get_mut(holder.vip) {
            vip.members += 1;
        }
    }

    /// A holder has one session less.
    #[inline]
    pub(super) fn close(&mut self, holder: Holder) {
        if self.members.take(holder.member) {
            self.go(holder);
        }
        self.vips.take(holder.vip);
    }

    #[cold]
    fn go(&mut self, holder: Holder) {
        if let Some(vip) = self.vips.get_mut(holder.vip) {
            vip.members = vip.members.saturating_sub(1);
        }
    }

    /// VIPs with sessions.
    pub(super) fn vips(&self) -> u32 {
        self.vips.used
    }

    /// Sessions of a VIP.
    pub(super) fn of_vip<A: Address>(&self, vip: A, key: &HashKey) -> u32 {
        self.vips.get(Holder::new(vip, vip, key).vip).map_or(0, |record| record.count)
    }

    /// Sessions of a holder, and how many members its VIP has.
    pub(super) fn of_member(&self, holder: Holder) -> (u32, u32) {
        let own = self.members.get(holder.member).map_or(0, |record| record.count);
        (own, self.vips.get(holder.vip).map_or(0, |record| record.members))
    }

    /// Whether one more session leaves a holder within its share, or its VIP. One of `ended` would have ended before.
    #[cold]
    pub(super) fn is_below(&self, holder: Holder, ended: Option<Holder>) -> bool {
        let is_last = |counts: &Counts, hash: u64| counts.get(hash).is_some_and(|record| record.count == 1);
        let other = ended.filter(|ended| ended.member != holder.member);
        let vip_gone = other.is_some_and(|ended| ended.vip != holder.vip && is_last(&self.vips, ended.vip));
        let known = self.vips.get(holder.vip);
        let vips = self.vips.used + u32::from(known.is_none()) - u32::from(vip_gone);
        let ended_here = u32::from(ended.is_some_and(|it| it.vip == holder.vip));
        let vip = known.map_or(0, |record| record.count).saturating_sub(ended_here);
        let all = u64::from(vips);
        if (u64::from(vip) + 1) * all <= self.shared {
            return true;
        }
        let own = self.members.get(holder.member);
        if own.is_none() && self.members.is_full() {
            return false;
        }
        let member_gone = other.is_some_and(|ended| ended.vip == holder.vip && is_last(&self.members, ended.member));
        let members = known.map_or(0, |record| record.members) + u32::from(own.is_none()) - u32::from(member_gone);
        let own = own.map_or(0, |record| record.count).saturating_sub(u32::from(ended == Some(holder)));
        (u64::from(own) + 1) * u64::from(members) * all <= self.shared
    }

    /// Whether a holder has more than its share, and its VIP, too: without one session each still has all of it.
    #[inline]
    pub(super) fn is_over(&self, holder: Holder) -> bool {
        let all = u64::from(self.vips.used);
        let Some(vip) = self.vips.get(holder.vip).filter(|vip| u64::from(vip.count) * all > self.shared) else {
            return false;
        };
        let own = self.members.get(holder.member);
        own.is_none_or(|own| u64::from(own.count) * u64::from(vip.members) * all > self.shared)
    }

    /// Whether a holder's VIP has no less than VIPs have on average, and the holder no less than members of its VIP: of `held` sessions.
    #[inline]
    pub(super) fn is_large(&self, holder: Holder, held: u32) -> bool {
        let Some(vip) = self.vips.get(holder.vip) else { return true };
        let own = self.members.get(holder.member);
        u64::from(vip.count) * u64::from(self.vips.used) >= u64::from(held)
            && own.is_none_or(|own| u64::from(own.count) * u64::from(vip.members) >= u64::from(vip.count))
    }
}

/// What belongs to one hash.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Record {
    hash: u64,
    /// Sessions; 0 is an empty place.
    count: u32,
    /// Of a VIP: its members with sessions.
    members: u32,
}

/// Records by hash: open addressing with linear probing, at most half full, and nothing is left behind by what is gone.
#[derive(Debug)]
struct Counts {
    records: Slab<Record>,
    mask: usize,
    used: u32,
}

impl Counts {
    fn new(most: u32) -> Result<Self, MemoryError> {
        let places = (2 * most as usize).next_power_of_two();
        Ok(Self { records: Slab::new(places)?, mask: places - 1, used: 0 })
    }

    fn is_full(&self) -> bool {
        self.used as usize > self.mask / 2
    }

    /// Where the record of a hash is, or would be.
    #[inline]
    fn place(&self, hash: u64) -> usize {
        let records = &*self.records;
        let mut at = hash as usize & self.mask;
        while records[at].count != 0 && records[at].hash != hash {
            at = (at + 1) & self.mask;
        }
        at
    }

    #[inline]
    fn get(&self, hash: u64) -> Option<&Record> {
        Some(&self.records[self.place(hash)]).filter(|record| record.count != 0)
    }

    #[inline]
    fn get_mut(&mut self, hash: u64) -> Option<&mut Record> {
        let at = self.place(hash);
        Some(&mut self.records[at]).filter(|record| record.count != 0)
    }

    /// Counts one more, and says how many there are; 0, and nothing is counted, if a new record has no room.
    #[inline]
    fn add(&mut self, hash: u64) -> u32 {
        let at = self.place(hash);
        let record = &mut self.records[at];
        if record.count == 0 {
            return self.begin(at, hash);
        }
        record.count += 1;
        record.count
    }

    #[cold]
    fn begin(&mut self, at: usize, hash: u64) -> u32 {
        if self.is_full() {
            return 0;
        }
        self.used += 1;
        self.records[at] = Record { hash, count: 1, members: 0 };
        1
    }

    /// Counts one less, if any is counted; whether that was the last one.
    #[inline]
    fn take(&mut self, hash: u64) -> bool {
        let at = self.place(hash);
        let record = &mut self.records[at];
        match record.count {
            0 => false,
            1 => {
                self.close_gap(at);
                true
            }
            more => {
                record.count = more - 1;
                false
            }
        }
    }

    /// Moves what stands behind an empty place, and belongs at it or before, to where searches find it.
    #[cold]
    fn close_gap(&mut self, mut gap: usize) {
        self.used -= 1;
        let mask = self.mask;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let record = self.records[at];
            if record.count == 0 {
                break;
            }
            // Whatever stands at least as far from its home as from the gap may stand in it.
            let from_home = at.wrapping_sub(record.hash as usize) & mask;
            if from_home >= at.wrapping_sub(gap) & mask {
                self.records[gap] = record;
                gap = at;
            }
        }
        self.records[gap] = Record::default();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_are_those_of_a_map_however_crowded_it_is(steps in prop::collection::vec((0..24_u64, prop::bool::weighted(0.6)), 1..200)) {
            // Twelve records of 32; hashes are at home in eight neighbouring places, one of them the last one.
            let mut counts = Counts::new(12).unwrap();
            let hash = |n: u64| 28 + n % 8 + (n << 32);
            let mut model: HashMap<u64, u32> = HashMap::new();
            for (n, adds) in steps {
                let is_full = counts.is_full() && !model.contains_key(&n);
                if adds {
                    let counted = counts.add(hash(n));
                    let own = (!is_full).then(|| model.entry(n).or_default());
                    prop_assert_eq!(counted, own.map_or(0, |own| { *own += 1; *own }));
                } else {
                    let is_last = model.get(&n) == Some(&1);
                    prop_assert_eq!(counts.take(hash(n)), is_last);
                    model.get_mut(&n).into_iter().for_each(|own| *own -= 1);
                    model.retain(|_, own| *own > 0);
                }
                prop_assert_eq!(counts.used as usize, model.len());
                for n in 0..24 {
                    prop_assert_eq!(counts.get(hash(n)).map(|record| record.count), model.get(&n).copied());
                }
            }
        }
    }

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
        assert!(!fairness.is_below(pod(4), None) && fairness.is_over(pod(4)), "by its VIP alone");
        assert!(!fairness.is_over(pod(3)));
        (0..5).rev().for_each(|n| fairness.close(pod(n)));
        assert_eq!((fairness.of_vip(7, &key), fairness.vips(), fairness.members.used), (0, 0, 0));
    }

    #[test]
    fn one_vip_has_all_three_have_a_third_and_a_newcomer_has_its_part() {
        let key = HashKey::new([11, 22, 33, 44]);
        let mut fairness = Fairness::new(1000).unwrap();
        fairness.share(900);
        let [one, two, three] = [1, 2, 3].map(|vip| Holder::new(vip, vip, &key));
        (0..899).for_each(|_| fairness.open(one));
        assert!(fairness.is_below(one, None) && !fairness.is_over(one));
        fairness.open(one);
        assert!(!fairness.is_below(one, None) && !fairness.is_over(one), "it has its share, which is all");
        assert!(fairness.is_below(one, Some(one)), "its own session makes room");
        fairness.open(two);
        assert!(fairness.is_below(two, None) && fairness.is_over(one), "a half each");
        (0..448).for_each(|_| fairness.open(two));
        assert!(fairness.is_below(two, None) && !fairness.is_over(two));
        assert!(fairness.is_below(three, None));
        fairness.open(three);
        assert!(!fairness.is_below(two, None) && fairness.is_over(two) && fairness.is_over(one), "a third each");
        let pod = Holder::new(1, 99, &key);
        assert!(fairness.is_below(pod, None), "its VIP has more than its share, but none of that is its own");
    }
}
