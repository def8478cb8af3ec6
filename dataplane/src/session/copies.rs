//! Copies: sessions of shares that another gateway has, so that they can go on here. They lie in the same tables, marked, and no packet
//! is theirs: one that finds a copy goes to the gateway that has the session, or, when the share has become this gateway's, makes it
//! live. So neither a takeover nor its end looks at more sessions than packets come for.
//!
//! A copy holds its port here, too, so nobody gets it when the share changes hands. It ends when its gateway says so, or says no more of
//! it while it tells all; never by itself, for nobody tells of packets, unless a full table needs its place (eviction.rs).

use super::entry::{Entry, Flags, Slot};
use super::image::{Fate, Half, ImageOf};
use super::{Draft, Ended, SessionFamily, Sessions, deadline, ended};
use crate::counters::Direction;
use crate::time::Tick;

/// How often somebody looks at a copy that nothing happens to: seldom, and often once it would end if its share were this gateway's.
const LOOK_MS: u32 = 600_000;
const LOOK_AGAIN_MS: u32 = 10_000;
/// A copy of a share that has become this gateway's, and that no packet has come for, is kept for so long beyond its timeout: its former
/// gateway may still serve it, cut off from all others, and for as long nobody else is to have its port.
const KEEP_MS: u32 = 600_000;

/// State of a session that all gateways must know.
const TOLD: Flags = Flags(Flags::SYN.0 | Flags::FIN.0 | Flags::RST.0 | Flags::SEEN.0);

/// What became of a copy that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is new here: its port must be held.
    New(Slot),
    /// It was here, and is up to date now.
    Known,
    /// It has ended; its port rests.
    Ended,
    /// Nothing has changed: it has ended and wasn't here, or the session is this gateway's own.
    Unwanted,
}

/// Why a copy found no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Its holder has its fair share of a full table: it has no claim to more.
    OverShare,
    /// It should have one, and doesn't.
    NoRoom,
}

impl Sessions {
    /// Copies in the tables that haven't ended.
    pub fn copies(&self) -> u32 {
        self.copies
    }

    /// A session as a plain value; `slot` is that of its first direction.
    pub fn image<A: SessionFamily>(&self, slot: Slot, now: Tick) -> ImageOf<A> {
        let table = A::table(self);
        let entry = table.entry(slot);
        let half = |entry: &Entry<A>| Half {
            flags: entry.flags().0 & TOLD.0 | entry.own_side() | entry.confirmation(),
            idle_ms: now.since(entry.last_seen()),
            sequence: entry.known_sequence(),
            acknowledged: entry.acknowledged(),
            packets: entry.packets() as u32,
            bytes: entry.bytes(),
        };
        ImageOf {
            fate: if entry.flags().has(Flags::QUARANTINED) { Fate::Ended } else { Fate::Open },
            direction: entry.direction(),
            origin: entry.key(),
            translated: entry.to(),
            halves: [half(entry), half(table.entry(entry.twin()))],
        }
    }

    /// Takes in what another gateway tells of a session. `is_ours`: whether its share is this gateway's, which then knows better.
    ///
    /// # Errors
    /// When there is no room, or its ends are another session's.
    pub fn take<A: SessionFamily>(
        &mut self,
        image: &ImageOf<A>,
        round: u8,
        is_ours: bool,
        now: Tick,
    ) -> Result<Taken, Refused> {
        let known = self.find(self.hash(&image.origin), &image.origin);
        // A late update of the share's former owner counts until the session has gone on here.
        if is_ours && known.is_some_and(|slot| !A::table(self).entry(slot).is_copy()) {
            return Ok(Taken::Unwanted);
        }
        if let Some(slot) = known {
            let entry = *A::table(self).entry(slot);
            let is_same = entry.flags().has(Flags::ORIGIN) && entry.to() == image.translated;
            let rests = entry.flags().has(Flags::QUARANTINED);
            match image.fate {
                Fate::Ended if !is_same || rests => return Ok(Taken::Unwanted),
                Fate::Ended => {
                    self.demote::<A>(slot, now);
                    self.end_copy::<A>(slot, now);
                    return Ok(Taken::Ended);
                }
                // Whatever stands in its way has ended where it was: here it is told late.
                Fate::Open if !is_same => return Err(Refused::NoRoom),
                Fate::Open if rests => {
                    let room = self.room_for_standby(image)?;
                    self.wake::<A>(slot, now);
                    self.note_standby(room);
                }
                Fate::Open => self.demote::<A>(slot, now),
            }
            self.write::<A>(slot, &image.halves, round, now);
            return Ok(Taken::Known);
        }
        if image.fate == Fate::Ended {
            return Ok(Taken::Unwanted);
        }
        let reply = image.translated.reversed();
        let room = self.room_for_standby(image)?;
        if !self.is_free(&reply) {
            return Err(Refused::NoRoom);
        }
        let side = |half: &Half| Flags(half.flags).side();
        let draft = Draft {
            origin: image.origin,
            translated: image.translated,
            direction: image.direction,
            reply_direction: match image.direction {
                Direction::Inbound => Direction::ServiceReply,
                _ => Direction::Reply,
            },
            origin_side: side(&image.halves[0]),
            reply_side: side(&image.halves[1]),
            next_hop: None,
            generation: 0,
        };
        let slot = self.commit(&draft, now).map_err(|_| Refused::NoRoom)?;
        self.note_standby(room);
        self.demote::<A>(slot, now);
        self.write::<A>(slot, &image.halves, round, now);
        Ok(Taken::New(slot))
    }

    /// Makes a session a copy: its share is another gateway's now. Nothing happens to one that is a copy already.
    pub fn demote<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        let (origin, twin) = self.both::<A>(slot);
        let table = A::table_mut(self);
        if !table.entry(origin).is_live() {
            return;
        }
        for at in [origin, twin] {
            table.entry_mut(at).mark_copy();
        }
        table.set_deadline(origin, deadline(now.plus(LOOK_MS)));
        self.open -= 1;
        self.copies += 1;
    }

    /// Makes a copy live: its share is this gateway's now. It is checked against policy like one that was never checked.
    pub fn promote<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        let (origin, twin) = self.both::<A>(slot);
        let table = A::table_mut(self);
        debug_assert!(table.entry(origin).is_copy(), "only a copy becomes live");
        for at in [origin, twin] {
            let entry = table.entry_mut(at);
            entry.unmark_copy();
            entry.set_generation(0);
            entry.set_next_hop(None);
            entry.set_last_seen(now);
            entry.suspect();
        }
        self.copies -= 1;
        self.open += 1;
        self.renew::<A>(origin, now);
    }

    /// Ends a copy; its port rests like that of any session.
    pub fn end_copy<A: SessionFamily>(&mut self, slot: Slot, now: Tick) -> Ended<A> {
        let (origin, twin) = self.both::<A>(slot);
        let holder = self.holder::<A>(origin);
        let table = A::table_mut(self);
        debug_assert!(table.entry(origin).is_copy(), "only a copy ends like one");
        for at in [origin, twin] {
            let entry = table.entry_mut(at);
            entry.unmark_copy();
            entry.set_flags(entry.flags().with(Flags::QUARANTINED));
        }
        let rests = table.entry(origin).direction() == Direction::Egress;
        let ended = ended(table.entry(origin));
        let rest = if rests { self.timeouts.quarantine } else { 0 };
        A::table_mut(self).set_deadline(origin, deadline(now.plus(rest)));
        self.copies -= 1;
        self.fairness.close(holder);
        ended
    }

    /// Looks at a copy that nothing has happened to for long. One of a share that is this gateway's by now ends.
    pub(super) fn look_at_copy<A: SessionFamily>(&mut self, origin: Slot, is_ours: bool, now: Tick) {
        let entry = *A::table(self).entry(origin);
        let (_, timeout) = self.timeouts.state(&entry, A::table(self).entry(entry.twin()));
        let told = entry.last_seen().later(A::table(self).entry(entry.twin()).last_seen());
        let left = timeout.saturating_add(KEEP_MS).saturating_sub(now.since(told));
        if is_ours && left == 0 {
            self.end_copy::<A>(origin, now);
        } else {
            let next = left.clamp(LOOK_AGAIN_MS, LOOK_MS);
            A::table_mut(self).set_deadline(origin, deadline(now.plus(next)));
        }
    }

    /// The slot of a session's first direction, and the other one's.
    pub fn both<A: SessionFamily>(&self, slot: Slot) -> (Slot, Slot) {
        let entry = A::table(self).entry(slot);
        if entry.flags().has(Flags::ORIGIN) { (slot, entry.twin()) } else { (entry.twin(), slot) }
    }

    /// Makes a resting session a copy again: it has begun anew where it is.
    fn wake<A: SessionFamily>(&mut self, slot: Slot, now: Tick) {
        let (origin, twin) = self.both::<A>(slot);
        let table = A::table_mut(self);
        for at in [origin, twin] {
            let entry = table.entry_mut(at);
            entry.set_flags(entry.flags().without(Flags::QUARANTINED).without(TOLD));
        }
        self.open += 1;
        self.fairness.open(self.holder::<A>(origin));
        self.demote::<A>(slot, now);
    }

    /// Writes down what is told of a copy.
    fn write<A: SessionFamily>(&mut self, slot: Slot, halves: &[Half; 2], round: u8, now: Tick) {
        let (origin, twin) = self.both::<A>(slot);
        let table = A::table_mut(self);
        for (at, half) in [origin, twin].into_iter().zip(halves) {
            let entry = table.entry_mut(at);
            let kept = entry.flags().without(TOLD);
            entry.set_flags(kept.with(Flags(half.flags & TOLD.0)));
            entry.set_round(round);
            entry.set_last_seen(Tick(now.0.wrapping_sub(half.idle_ms)));
            entry.recall(half);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::{draft, sessions};

    /// What a gateway tells of such a session.
    fn told(port: u16, vip_port: u16) -> ImageOf<u32> {
        let mut of_another = sessions(4);
        let slot = of_another.commit(&draft(port, vip_port), Tick(1000)).unwrap();
        of_another.image(slot, Tick(1000))
    }

    #[test]
    fn a_copy_tells_what_it_was_told_and_lives_on_from_the_same_sides() {
        let mut here = sessions(4);
        let image = told(1, 2000);
        let Ok(Taken::New(slot)) = here.take(&image, 1, false, Tick(1000)) else { panic!("it is new") };
        assert_eq!(here.image(slot, Tick(1000)), image);
        here.promote::<u32>(slot, Tick(1000));
        assert_eq!(here.image(slot, Tick(1000)), image);
        assert_eq!((here.open_count(), here.copies()), (1, 0));
    }

    #[test]
    fn a_copy_ends_when_its_share_is_this_gateways_and_its_time_is_over_whichever_comes_last() {
        for is_late in [false, true] {
            let mut here = sessions(4);
            let Ok(Taken::New(slot)) = here.take(&told(1, 2000), 1, false, Tick(1000)) else { panic!("it is new") };
            let (_, timeout) = here.state::<u32>(slot);
            let ours_from = if is_late { timeout + KEEP_MS + 100_000 } else { 0 };
            let ends = (0..4_000_u32).map(|n| n * 500).find(|elapsed| {
                let now = Tick(1000 + elapsed);
                here.sweep::<u32>(0, u32::MAX, now, |_| *elapsed >= ours_from, |_| ());
                here.copies() == 0
            });
            let from = (timeout + KEEP_MS).max(ours_from);
            assert!((from..=from + LOOK_AGAIN_MS + 500).contains(&ends.unwrap()), "{ends:?} of {from}");
        }
    }

    #[test]
    fn a_copy_with_the_port_of_another_session_is_refused_and_so_is_one_too_many() {
        let mut here = sessions(2);
        assert!(matches!(here.take(&told(1, 2000), 1, false, Tick(1000)), Ok(Taken::New(_))));
        assert_eq!(
            here.take(&told(2, 2000), 1, false, Tick(1000)),
            Err(Refused::NoRoom),
            "answers would have two pods"
        );
        let unknown = told(2, 2000).origin;
        assert_eq!(here.find(here.hash(&unknown), &unknown), None);
        assert!(matches!(here.take(&told(2, 2001), 1, false, Tick(1000)), Ok(Taken::New(_))));
        assert_eq!(here.take(&told(3, 2002), 1, false, Tick(1000)), Err(Refused::OverShare), "two are all that fit");
        assert_eq!(here.copies(), 2);
    }
}
