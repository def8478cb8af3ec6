//! Fair shares of one worker's session table (max-min fairness in two levels): a small demand is met in full, and the rest is divided
//! equally among holders of larger ones: first among VIPs, then within a VIP among its pods, and all clients of its Services together. A session
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
mod levels;

use counts::{Counts, Place, Record};
use histograms::{Histogram, Histograms};
use levels::{Cache, Levels};
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
    levels: Cache,
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
        Ok(Self { vips, members, histograms, levels: Cache::default(), held: 0, shared: capacity.into() })
    }

    /// From now on so many sessions are shared.
    pub(super) fn share(&mut self, sessions: u32) {
        self.shared = sessions.into();
    }

    /// From now on levels are those of the sessions that there are now. Until then they may be a little too high for those that have come
    /// meanwhile: as many as a batch or a command brings, which the reserve has room for.
    #[inline]
    pub(super) fn renew_levels(&mut self) {
        self.levels.forget();
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
            let left = self.histograms.count(member.bin) - 1;
            self.levels.note_end(vip.members, left);
            if left > 0 {
                member.bin = self.histograms.decrement(member.bin);
            } else {
                self.histograms.take(vip.members, member.bin);
                self.members.remove(place);
            }
        }
        let left = self.histograms.count(vip.bin) - 1;
        self.levels.note_end(Histograms::VIPS, left);
        if left > 0 {
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

    /// The share of each VIP that wants as much.
    fn levels_of_vips(&self) -> Levels {
        self.levels.get(Histograms::VIPS, || Levels::of(&self.histograms, Histograms::VIPS, self.held, self.shared))
    }

    /// The share of each member of a VIP that wants as much, where the VIP's is `share`.
    fn levels_of_members(&self, vip: &Record, share: u32) -> Levels {
        let of_vip = self.histograms.count(vip.bin).into();
        self.levels.get(vip.members, || Levels::of(&self.histograms, vip.members, of_vip, share.into()))
    }

    /// Whether one more session leaves a holder within its share, or its VIP. One of `ended` would have ended before.
    #[cold]
    pub(super) fn is_below(&self, holder: Holder, ended: Option<Holder>) -> bool {
        let count = |record: &Record| self.histograms.count(record.bin);
        let vip = self.vips.get(holder.vip);
        if vip.is_none() && self.vips.is_full() {
            return false;
        }
        let of_vip = vip.map_or(0, count);
        let levels = self.levels_of_vips();
        let is_of_vip = ended.is_some_and(|ended| ended.vip == holder.vip);
        let other = ended.filter(|_| !is_of_vip).and_then(|ended| self.vips.get(ended.vip)).map(count);
        if levels.is_within(of_vip, is_of_vip, other) {
            return true;
        }
        let Some(vip) = vip else { return false };
        let own = self.members.get(holder.member);
        if own.is_none() && self.members.is_full() {
            return false;
        }
        // With one session more than it has the VIP is above its share.
        let levels = self.levels_of_members(vip, levels.now.min(of_vip - u32::from(is_of_vip)));
        let is_own = ended == Some(holder);
        let other = ended.filter(|_| is_of_vip && !is_own).and_then(|ended| self.members.get(ended.member)).map(count);
        levels.is_within(own.map_or(0, count), is_own, other)
    }

    /// Whether a holder has more than its share, and its VIP, too: without one session each still has all of it.
    #[inline]
    pub(super) fn is_over(&self, holder: Holder) -> bool {
        let count = |record: &Record| self.histograms.count(record.bin);
        let Some(vip) = self.vips.get(holder.vip) else { return true };
        let share = self.levels_of_vips().now;
        count(vip) > share
            && (self.members.get(holder.member)).is_none_or(|own| count(own) > self.levels_of_members(vip, share).now)
    }

    /// Whether a holder's VIP has no less than VIPs have on average, and the holder no less than members of its VIP.
    #[inline]
    pub(super) fn is_large(&self, holder: Holder) -> bool {
        let count = |record: &Record| u64::from(self.histograms.count(record.bin));
        let Some(vip) = self.vips.get(holder.vip) else { return true };
        let members = u64::from(self.histograms.holders(vip.members));
        count(vip) * u64::from(self.vips.used()) >= self.held
            && self.members.get(holder.member).is_none_or(|own| count(own) * members >= count(vip))
    }
}

#[cfg(test)]
mod tests;
