//! Fair shares of one worker's session table: two-level max-min fairness. Small demands are met in full, and the rest
//! is divided equally among the holders of larger ones: first among VIPs, then within a VIP among its pods, with all
//! clients of its Services as one member. Active and standby sessions count for their holder, quarantined ones don't.
//!
//! ```text
//!   capacity |------------------------- shared --------------------------|-- reserve --|
//! ```
//! The shared part is first come, first served. The reserve is only for holders below their share; what they take of it
//! is compensated by evicting sessions of holders above theirs (see eviction.rs). There always are such holders then:
//! together, all hold more than the sum of the shares.
//!
//! A share is a level, as high as it can be while the part of all counts below it fits. A VIP's share is the level of
//! all VIPs in the shared capacity; a member's share is the level of its VIP's members in the VIP's share. So of two
//! holders, the one with more sessions never has a claim that the other lacks, and evicting a session for a new one
//! doesn't put its holder below its share.
//!
//! Counts are keyed by secret hashes of addresses, not by policy's IDs: they outlive every policy change, and hash
//! collisions can't be provoked from outside.

mod histograms;
mod holders;
mod levels;

use histograms::{Histogram, Histograms};
use levels::{LevelCache, Levels};
use vipgate_mem::MemoryError;

use self::holders::{HolderEntry, HolderTable, Position};
use super::entry::Entry;
use crate::flow::address::Address;
use crate::flow::ids::MAX_VIPS;
use crate::flow::tuple::HashKey;

/// Members (pods, and VIPs with inbound sessions) tracked per worker; those beyond it count for their VIP only.
const MAX_MEMBERS: u32 = 1 << 17;

/// Holder of a session: a VIP, and a member of it (a pod, or all clients together).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    vip: u64,
    member: u64,
}

impl Holder {
    /// The pod `member` with egress via `vip`; with `member` = `vip`, its clients.
    #[inline]
    pub(super) fn new<A: Address>(vip: A, member: A, key: &HashKey) -> Self {
        Self::in_packet_order([vip.swap_network_order(), member.swap_network_order()], key)
    }

    /// Holder of the session with this original-direction entry.
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

/// Session counts of all holders.
#[derive(Debug)]
pub struct Fairness {
    vips: HolderTable,
    members: HolderTable,
    histograms: Histograms,
    levels: LevelCache,
    /// Counted sessions.
    held: u64,
    /// Shared capacity: the sum of all shares.
    shared: u64,
}

impl Fairness {
    /// No sessions; the whole `capacity` is shared.
    pub(super) fn new(capacity: u32) -> Result<Self, MemoryError> {
        let max_vips = (2 * MAX_VIPS as u32).min(capacity);
        let (vips, members) = (HolderTable::new(max_vips)?, HolderTable::new(capacity.min(MAX_MEMBERS))?);
        let histograms = Histograms::new(vips.capacity(), members.capacity())?;
        Ok(Self { vips, members, histograms, levels: LevelCache::default(), held: 0, shared: capacity.into() })
    }

    /// Sets the shared capacity.
    pub(super) fn set_shared(&mut self, sessions: u32) {
        self.shared = sessions.into();
    }

    /// Invalidates the cached levels. Until the next call they may be a little too high for the sessions opened since:
    /// as many as a batch or a command brings, for which the reserve has capacity.
    #[inline]
    pub(super) fn invalidate_levels(&mut self) {
        self.levels.invalidate();
    }

    /// Counts a session that has opened.
    #[inline]
    pub(super) fn open(&mut self, holder: Holder) {
        let position = self.vips.position(holder.vip);
        let members = if let Some(vip) = self.vips.get_mut(position) {
            vip.bin = self.histograms.increment(vip.bin);
            vip.members
        } else if self.vips.is_full() {
            return;
        } else {
            self.insert_vip(position, holder)
        };
        self.held += 1;
        let position = self.members.position(holder.member);
        if let Some(member) = self.members.get_mut(position) {
            member.bin = self.histograms.increment(member.bin);
        } else if !self.members.is_full() {
            let bin = self.histograms.insert(members);
            self.members.insert(position, holder.member, bin, members);
        }
    }

    #[cold]
    fn insert_vip(&mut self, position: Position, holder: Holder) -> Histogram {
        let (bin, members) = (self.histograms.insert(Histograms::VIPS), self.histograms.create());
        self.vips.insert(position, holder.vip, bin, members);
        members
    }

    /// Counts a session that has ended.
    #[inline]
    pub(super) fn close(&mut self, holder: Holder) {
        let vip_position = self.vips.position(holder.vip);
        let Some(vip) = self.vips.get_mut(vip_position) else { return };
        let position = self.members.position(holder.member);
        if let Some(member) = self.members.get_mut(position) {
            let left = self.histograms.count(member.bin) - 1;
            self.levels.note_end(vip.members, left);
            if left > 0 {
                member.bin = self.histograms.decrement(member.bin);
            } else {
                self.histograms.remove_holder(vip.members, member.bin);
                self.members.remove(position);
            }
        }
        let left = self.histograms.count(vip.bin) - 1;
        self.levels.note_end(Histograms::VIPS, left);
        if left > 0 {
            vip.bin = self.histograms.decrement(vip.bin);
        } else if self.histograms.holders(vip.members) == 0 {
            self.histograms.remove_holder(Histograms::VIPS, vip.bin);
            self.histograms.remove(vip.members);
            self.vips.remove(vip_position);
        } else {
            // A session that wasn't counted when it opened, since the table of VIPs was full then.
            return;
        }
        self.held -= 1;
    }

    /// VIPs with sessions.
    pub(super) fn vips(&self) -> u32 {
        self.vips.used()
    }

    /// Sessions of a VIP.
    pub(super) fn vip_sessions<A: Address>(&self, vip: A, key: &HashKey) -> u32 {
        self.vips.get(Holder::new(vip, vip, key).vip).map_or(0, |vip| self.histograms.count(vip.bin))
    }

    /// Sessions of a holder, and the number of members of its VIP.
    pub(super) fn member_sessions(&self, holder: Holder) -> (u32, u32) {
        let own = self.members.get(holder.member).map_or(0, |member| self.histograms.count(member.bin));
        (own, self.vips.get(holder.vip).map_or(0, |vip| self.histograms.holders(vip.members)))
    }

    /// Share of each VIP with at least that demand.
    fn levels_of_vips(&self) -> Levels {
        self.levels.get(Histograms::VIPS, || Levels::of(&self.histograms, Histograms::VIPS, self.held, self.shared))
    }

    /// Share of each member with at least that demand, of a VIP with this share.
    fn levels_of_members(&self, vip: &HolderEntry, share: u32) -> Levels {
        let of_vip = self.histograms.count(vip.bin).into();
        self.levels.get(vip.members, || Levels::of(&self.histograms, vip.members, of_vip, share.into()))
    }

    /// Whether with one more session a holder, or its VIP, is within its share. A session of `ended` would end first.
    #[cold]
    pub(super) fn is_below_share(&self, holder: Holder, ended: Option<Holder>) -> bool {
        let count = |record: &HolderEntry| self.histograms.count(record.bin);
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
        // With one session more the VIP is above its share.
        let levels = self.levels_of_members(vip, levels.now.min(of_vip - u32::from(is_of_vip)));
        let is_own = ended == Some(holder);
        let other = ended.filter(|_| is_of_vip && !is_own).and_then(|ended| self.members.get(ended.member)).map(count);
        levels.is_within(own.map_or(0, count), is_own, other)
    }

    /// Whether both a holder and its VIP are above their shares: with one session less, each still has all of its
    /// share.
    #[inline]
    pub(super) fn is_over_share(&self, holder: Holder) -> bool {
        let count = |record: &HolderEntry| self.histograms.count(record.bin);
        let Some(vip) = self.vips.get(holder.vip) else { return true };
        let share = self.levels_of_vips().now;
        count(vip) > share
            && (self.members.get(holder.member)).is_none_or(|own| count(own) > self.levels_of_members(vip, share).now)
    }

    /// Shares with one more session: of each VIP, and of each member of this holder's VIP. `None` if its VIP has no
    /// sessions.
    pub(super) fn shares(&self, holder: Holder) -> Option<(u32, u32)> {
        let vip = self.vips.get(holder.vip)?;
        let levels = self.levels_of_vips();
        let of_members = self.levels_of_members(vip, levels.now.min(self.histograms.count(vip.bin)));
        Some((levels.with_one_more, of_members.with_one_more))
    }

    /// Whether a holder's VIP has no fewer than the average VIP, and the holder no fewer than the average member of its
    /// VIP.
    #[inline]
    pub(super) fn is_above_average(&self, holder: Holder) -> bool {
        let count = |record: &HolderEntry| u64::from(self.histograms.count(record.bin));
        let Some(vip) = self.vips.get(holder.vip) else { return true };
        let members = u64::from(self.histograms.holders(vip.members));
        count(vip) * u64::from(self.vips.used()) >= self.held
            && self.members.get(holder.member).is_none_or(|own| count(own) * members >= count(vip))
    }
}

#[cfg(test)]
mod tests;
