//! Whether a table has room for one more session, and for whom: anyone's as long as there is more than the reserve, then only those of
//! holders below their fair share (see fairness.rs).

use std::net::IpAddr;

use super::copies::Refused;
use super::entry::{Entry, Flags, Slot};
use super::fairness::Holder;
use super::image::ImageOf;
use super::{SessionFamily, Sessions};
use crate::address::V6;
use crate::batch;

/// What room there is for one more session of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Anyone has it.
    Free,
    /// Its holder has it, having less than its fair share: somebody else's session makes up for it between batches.
    Reserved,
    /// None.
    None,
}

impl Sessions {
    /// The same tables with so many of their sessions kept for holders below their fair share; without, whoever comes first has all.
    #[must_use]
    pub fn with_reserve(mut self, reserve: u32) -> Self {
        self.reserve = reserve.min(self.capacity / 2);
        self.fairness.share(self.shared());
        self
    }

    /// Sessions that anyone may have, first come, first served.
    pub(super) fn shared(&self) -> u32 {
        self.capacity - self.reserve
    }

    /// Sessions that are only for holders below their fair share.
    pub fn reserve(&self) -> u32 {
        self.reserve
    }

    /// Sessions that each VIP may have, whatever others want; more, as far as others want fewer.
    pub fn fair_share(&self) -> u32 {
        self.shared() / self.fairness.vips().max(1)
    }

    /// Sessions and standby sessions of a VIP.
    pub fn of_vip<A: SessionFamily>(&self, vip: A) -> u32 {
        self.fairness.of_vip(vip, &self.key)
    }

    /// The same of an address of either family.
    pub fn of_vip_at(&self, vip: IpAddr) -> u32 {
        match vip {
            IpAddr::V4(v4) => self.of_vip(v4.to_bits()),
            IpAddr::V6(v6) => self.of_vip(V6::from_bits(v6.to_bits())),
        }
    }

    /// Sessions and standby sessions of a member of a VIP (see [`Sessions::room`]), and how many members with sessions the VIP has.
    pub fn of_member<A: SessionFamily>(&self, vip: A, member: A) -> (u32, u32) {
        self.fairness.of_member(Holder::new(vip, member, &self.key))
    }

    /// Who holds the session in a slot.
    pub(crate) fn holder<A: SessionFamily>(&self, slot: Slot) -> Holder {
        let (origin, _) = self.both::<A>(slot);
        Holder::of(A::table(self).entry(origin), &self.key)
    }

    /// Whether one more session fits, whosever it is.
    pub fn has_room<A: SessionFamily>(&self) -> bool {
        self.has_room_after::<A>(0, 0)
    }

    /// Whether one more fits once so many of those that are open have ended, and so many are gone from the table.
    fn has_room_after<A: SessionFamily>(&self, ended: u32, gone: u32) -> bool {
        self.held().saturating_sub(ended) < self.capacity && A::table(self).has_room(2_u32.saturating_sub(2 * gone))
    }

    /// What room there is for a session of the pod `member` that leaves as `vip`, or, with the VIP itself in its place, of a client that
    /// comes to it. The open session in the slot `ended` would have ended before, and so many would be gone from the table.
    #[inline]
    pub fn room<A: SessionFamily>(&self, vip: A, member: A, ended: Option<Slot>, gone: u32) -> Room {
        let held = self.held() - u32::from(ended.is_some());
        if !self.has_room_after::<A>(ended.is_some().into(), gone) {
            Room::None
        } else if held < self.shared() {
            Room::Free
        } else {
            self.reserved(Holder::new(vip, member, &self.key), ended.map(|slot| self.holder::<A>(slot)))
        }
    }

    /// What room there is for a standby session: up to half of the reserve is for those of holders below their share, so that a flood
    /// here takes nobody's standby sessions.
    pub(super) fn room_for_standby<A: SessionFamily>(&self, image: &ImageOf<A>) -> Result<Room, Refused> {
        let has_room = self.has_room::<A>();
        if has_room && self.held() < self.shared() {
            return Ok(Room::Free);
        }
        let origin = Entry::new(image.origin, image.translated, image.direction, Flags::ORIGIN);
        if self.reserved(Holder::of(&origin, &self.key), None) == Room::None {
            return Err(Refused::OverShare);
        }
        // A batch of new sessions finds room in the rest.
        let most = (self.reserve / 2).min(self.reserve.saturating_sub(batch::MOST as u32));
        if has_room && self.overdrawn() < most { Ok(Room::Reserved) } else { Err(Refused::NoRoom) }
    }

    /// How many of those in the reserve are standby sessions. Sessions that others would miss don't make up for these.
    pub(super) fn overdrawn_by_standby(&self) -> u32 {
        self.standby_in_reserve.min(self.overdrawn()).min(self.copies)
    }

    /// Forgets those that have ended or become live, before new sessions take their places.
    #[inline]
    pub(crate) fn recount_standby(&mut self) {
        if self.standby_in_reserve > 0 {
            self.standby_in_reserve = self.overdrawn_by_standby();
        }
    }

    /// Notes that a standby session has come to its place.
    pub(super) fn note_standby(&mut self, room: Room) {
        if room == Room::Reserved {
            // One of those in the reserve may have ended since.
            self.standby_in_reserve = self.standby_in_reserve.min(self.overdrawn() - 1) + 1;
        }
    }

    #[cold]
    fn reserved(&self, holder: Holder, ended: Option<Holder>) -> Room {
        if self.fairness.is_below(holder, ended) { Room::Reserved } else { Room::None }
    }

    /// Whether the holder of a session, and its VIP, don't have less than others have on average. Without a reserve all are the same.
    pub(super) fn is_large<A: SessionFamily>(&self, slot: Slot) -> bool {
        self.reserve == 0 || self.fairness.is_large(self.holder::<A>(slot))
    }

    /// Whether the holder of a session has more than its fair share, and its VIP, too.
    pub(super) fn is_over<A: SessionFamily>(&self, slot: Slot) -> bool {
        self.fairness.is_over(self.holder::<A>(slot))
    }

    /// Sessions that are in the reserve: others must make up for them.
    pub(crate) fn overdrawn(&self) -> u32 {
        self.held().saturating_sub(self.shared())
    }

    /// Whether so many more fit without the reserve, of either family.
    pub(super) fn has_room_for(&self, more: u32) -> bool {
        let most = 2 * more;
        self.held() + more <= self.shared() && self.v4.has_room(most) && self.v6.has_room(most)
    }
}
