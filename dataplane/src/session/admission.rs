//! Admission control of the session table: while it is fuller than its shared part, only holders below their fair share
//! may open sessions, in the reserve (see fairness.rs).

use std::net::IpAddr;

use super::entry::{Entry, Flags};
use super::fairness::Holder;
use super::{SessionFamily, Sessions};
use crate::flow::address::of_family;
use crate::flow::ids::Slot;
use crate::io::batch;
use crate::session::record::FamilyRecord;
use crate::session::standby::RecordRejected;

/// Admission of one more session of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Admitted in the shared part.
    Shared,
    /// Admitted in the reserve, since its holder is below its fair share: another holder's session is evicted for it
    /// between batches.
    Reserved,
    /// Not admitted.
    Rejected,
}

impl Sessions {
    /// Sets the reserve: sessions that only holders below their fair share may open. Without one, capacity is first
    /// come, first served.
    #[must_use]
    pub fn with_reserve(mut self, reserve: u32) -> Self {
        self.reserve = reserve.min(self.capacity / 2);
        self.fairness.set_shared(self.shared_capacity());
        self
    }

    /// Capacity of the shared part: first come, first served.
    pub(super) fn shared_capacity(&self) -> u32 {
        self.capacity - self.reserve
    }

    /// Capacity of the reserve: only for holders below their fair share.
    pub fn reserve(&self) -> u32 {
        self.reserve
    }

    /// Guaranteed sessions of each VIP; a VIP may have more as far as others need fewer.
    pub fn fair_share(&self) -> u32 {
        self.shared_capacity() / self.fairness.vips().max(1)
    }

    /// Active and standby sessions of a VIP.
    pub fn vip_sessions<A: SessionFamily>(&self, vip: A) -> u32 {
        self.fairness.vip_sessions(vip, &self.key)
    }

    /// Active and standby sessions of a VIP of either family.
    pub fn vip_sessions_at(&self, vip: IpAddr) -> u32 {
        of_family!(vip, it => self.vip_sessions(it))
    }

    /// Active and standby sessions of a member of a VIP (see [`Sessions::admission`]), and the VIP's number of members
    /// with sessions.
    pub fn member_sessions<A: SessionFamily>(&self, vip: A, member: A) -> (u32, u32) {
        self.fairness.member_sessions(Holder::new(vip, member, &self.key))
    }

    /// Holder of the session in a slot.
    pub(crate) fn holder<A: SessionFamily>(&self, slot: Slot) -> Holder {
        let (origin, _) = self.slot_pair::<A>(slot);
        Holder::of(A::table(self).entry(origin), &self.key)
    }

    /// Whether one more session fits, of any holder.
    pub fn has_capacity<A: SessionFamily>(&self) -> bool {
        self.has_capacity_after::<A>(0, 0)
    }

    /// Whether one more session fits after so many active ones have ended and so many are removed from the table.
    fn has_capacity_after<A: SessionFamily>(&self, ended: u32, removed: u32) -> bool {
        self.in_use().saturating_sub(ended) < self.capacity
            && A::table(self).has_capacity(2_u32.saturating_sub(2 * removed))
    }

    /// Admission of an egress session of the pod `member` with `vip`, or, with `member` = `vip`, of an inbound session
    /// to it. `ended`: slot of a session that would end first; `removed`: sessions that would be removed from the table
    /// first.
    #[inline]
    pub fn admission<A: SessionFamily>(&self, vip: A, member: A, ended: Option<Slot>, removed: u32) -> Admission {
        let held = self.in_use() - u32::from(ended.is_some());
        if !self.has_capacity_after::<A>(ended.is_some().into(), removed) {
            Admission::Rejected
        } else if held < self.shared_capacity() {
            Admission::Shared
        } else {
            self.reserve_admission(Holder::new(vip, member, &self.key), ended.map(|slot| self.holder::<A>(slot)))
        }
    }

    /// Admission of a standby session: up to half of the reserve is for those of holders below their share, so that a
    /// flood on this gateway displaces no standby sessions.
    pub(super) fn standby_admission<A: SessionFamily>(
        &self,
        record: &FamilyRecord<A>,
    ) -> Result<Admission, RecordRejected> {
        let has_capacity = self.has_capacity::<A>();
        if has_capacity && self.in_use() < self.shared_capacity() {
            return Ok(Admission::Shared);
        }
        let origin = Entry::new(record.origin, record.translated, record.direction, Flags::ORIGIN);
        if self.reserve_admission(Holder::of(&origin, &self.key), None) == Admission::Rejected {
            return Err(RecordRejected::OverShare);
        }
        // The rest is enough for a batch of new sessions.
        let limit = (self.reserve / 2).min(self.reserve.saturating_sub(batch::BATCH_SIZE as u32));
        if has_capacity && self.reserve_in_use() < limit {
            Ok(Admission::Reserved)
        } else {
            Err(RecordRejected::NoCapacity)
        }
    }

    /// Standby sessions in the reserve. They are not compensated by evicting confirmed sessions.
    pub(super) fn standby_reserve_in_use(&self) -> u32 {
        self.standby_in_reserve.min(self.reserve_in_use()).min(self.standby)
    }

    /// Updates the count of standby sessions in the reserve after some have ended or been promoted, before new sessions
    /// take their places.
    #[inline]
    pub(crate) fn recount_standby_reserve(&mut self) {
        if self.standby_in_reserve > 0 {
            self.standby_in_reserve = self.standby_reserve_in_use();
        }
    }

    /// Counts a standby session that was admitted.
    pub(super) fn note_standby_admitted(&mut self, admission: Admission) {
        if admission == Admission::Reserved {
            // One of those in the reserve may have ended since the last count.
            self.standby_in_reserve = self.standby_in_reserve.min(self.reserve_in_use() - 1) + 1;
        }
    }

    #[cold]
    fn reserve_admission(&self, holder: Holder, ended: Option<Holder>) -> Admission {
        if self.fairness.is_below_share(holder, ended) { Admission::Reserved } else { Admission::Rejected }
    }

    /// Whether the holder of a session, and its VIP, have no fewer than others on average. Without a reserve all count
    /// as such.
    pub(super) fn is_above_average<A: SessionFamily>(&self, slot: Slot) -> bool {
        self.reserve == 0 || self.fairness.is_above_average(self.holder::<A>(slot))
    }

    /// Whether both the holder of a session and its VIP are above their fair shares.
    pub(super) fn is_over_share<A: SessionFamily>(&self, slot: Slot) -> bool {
        self.fairness.is_over_share(self.holder::<A>(slot))
    }

    /// Sessions in the reserve, which evictions must compensate.
    pub(crate) fn reserve_in_use(&self) -> u32 {
        self.in_use().saturating_sub(self.shared_capacity())
    }

    /// Whether so many more fit in the shared part, of either family.
    pub(super) fn has_shared_capacity_for(&self, more: u32) -> bool {
        let entries = 2 * more;
        self.in_use() + more <= self.shared_capacity() && self.v4.has_capacity(entries) && self.v6.has_capacity(entries)
    }
}
