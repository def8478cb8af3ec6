//! The connections of one worker: two entries each, one a direction, in a table of each address family.
//!
//! Sessions open whole or not at all ([`Sessions::commit`]), refresh by the packets of either direction, and end whole: the
//! sweep goes over the column of deadlines in slices, asks a session whose deadline has come when it last heard a packet,
//! and sets the next one or ends it. An ended session stays in the table as quarantined until its port may be used again.

pub mod copies;
pub mod embryonic;
pub mod entry;
pub mod eviction;
pub mod fairness;
mod flags;
pub mod image;
pub mod key;
pub mod migrate;
pub mod quarantine;
pub mod region;
pub mod room;
pub mod sctp;
pub mod table;
pub mod tcp;
#[cfg(test)]
pub(crate) mod tests;
pub mod timeout;
pub mod track;
pub mod tuple;
pub mod window;

use vipgate_mem::{Region, Storage, StorageError};

use crate::address::V6;
use crate::command::SessionState;
use crate::counters::{Direction, EndReason};
use crate::snapshot::network::{HopId, Routed};
use crate::snapshot::policy::Family;
use crate::time::Tick;
use crate::watch::log::Logged;
use crate::wire::sctp::Common;
use crate::wire::tcp::Segment;
use entry::{Entry, Flags, Slot};
use fairness::{Fairness, Holder};
use image::{Image, ImageOf};
use key::Key;
use table::{Full, Table};
use timeout::Timeouts;
use track::{Event, Noted};
use tuple::{HashKey, Tuple};

/// An address family that has sessions.
pub trait SessionFamily: Family + Routed + Logged {
    /// The family's table.
    fn table(sessions: &Sessions) -> &Table<Self>;
    /// The same, to change it.
    fn table_mut(sessions: &mut Sessions) -> &mut Table<Self>;
    /// The same, and what holders have.
    fn parts_mut(sessions: &mut Sessions) -> (&mut Table<Self>, &mut Fairness);
    /// An image of this family.
    fn image(image: ImageOf<Self>) -> Image;
}

impl SessionFamily for u32 {
    #[inline]
    fn table(sessions: &Sessions) -> &Table<Self> {
        &sessions.v4
    }

    #[inline]
    fn table_mut(sessions: &mut Sessions) -> &mut Table<Self> {
        &mut sessions.v4
    }

    fn parts_mut(sessions: &mut Sessions) -> (&mut Table<Self>, &mut Fairness) {
        (&mut sessions.v4, &mut sessions.fairness)
    }

    fn image(image: ImageOf<Self>) -> Image {
        Image::V4(image)
    }
}

impl SessionFamily for V6 {
    #[inline]
    fn table(sessions: &Sessions) -> &Table<Self> {
        &sessions.v6
    }

    #[inline]
    fn table_mut(sessions: &mut Sessions) -> &mut Table<Self> {
        &mut sessions.v6
    }

    fn parts_mut(sessions: &mut Sessions) -> (&mut Table<Self>, &mut Fairness) {
        (&mut sessions.v6, &mut sessions.fairness)
    }

    fn image(image: ImageOf<Self>) -> Image {
        Image::V6(image)
    }
}

/// A session that doesn't exist yet: everything is decided, nothing is changed.
#[derive(Clone, Copy, Debug)]
pub struct Draft<A: SessionFamily> {
    /// The first packet as it came.
    pub origin: Tuple<A>,
    /// The first packet as it goes.
    pub translated: Tuple<A>,
    /// Which way packets like the first one go.
    pub direction: Direction,
    /// Which way the answers go.
    pub reply_direction: Direction,
    /// The side that the first packet came from: see [`Flags::side`].
    pub origin_side: u8,
    /// The side that the answers come from.
    pub reply_side: u8,
    /// Where packets like the first one go next.
    pub next_hop: Option<HopId>,
    /// The generation that it was decided under.
    pub generation: u32,
}

/// A session that has just ended: its port and its place in the quota are free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended<A: SessionFamily> {
    /// Its first packet as it came.
    pub origin: Tuple<A>,
    /// Its first packet as it went.
    pub translated: Tuple<A>,
    /// Which way packets like the first one went.
    pub direction: Direction,
}

/// What happens to a session when its time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry<A: SessionFamily> {
    /// It has ended and counts no more; its port rests.
    Ended(EndReason, Ended<A>),
    /// Its port has rested long enough.
    Released(Ended<A>),
}

/// The connections of one worker.
#[derive(Debug)]
pub struct Sessions {
    v4: Table<u32>,
    v6: Table<V6>,
    key: HashKey,
    timeouts: Timeouts,
    /// Sessions that are this gateway's and aren't quarantined.
    open: u32,
    /// Copies of other gateways' sessions.
    copies: u32,
    capacity: u32,
    /// Those of the capacity that are only for holders below their fair share.
    reserve: u32,
    /// Standby sessions among those in the reserve, at most.
    standby_in_reserve: u32,
    fairness: Fairness,
}

impl Sessions {
    /// Room for `capacity` sessions of either family, in the process's own memory.
    ///
    /// # Errors
    /// When there is no memory for the tables.
    pub fn new(capacity: u32, timeouts: Timeouts, key: HashKey) -> Result<Self, StorageError> {
        Self::in_storage(capacity, timeouts, key, &mut Storage::Process)
    }

    /// Bytes that the tables take in a region, a header included; `None` for more sessions than a table could have.
    pub fn region_bytes(capacity: u32) -> Option<u64> {
        let entries = capacity.checked_mul(2)?;
        let header = Region::bytes_of::<region::Header>(1);
        Some(header + Table::<u32>::region_bytes(entries)? + Table::<V6>::region_bytes(entries)?)
    }

    fn in_storage(
        capacity: u32,
        timeouts: Timeouts,
        key: HashKey,
        storage: &mut Storage<'_>,
    ) -> Result<Self, StorageError> {
        let (v4, v6) = (Table::new(capacity * 2, storage)?, Table::new(capacity * 2, storage)?);
        let fairness = Fairness::new(capacity)?;
        Ok(Self { v4, v6, key, timeouts, open: 0, copies: 0, capacity, reserve: 0, standby_in_reserve: 0, fairness })
    }

    /// Sessions open now.
    pub fn open_count(&self) -> u32 {
        self.open
    }

    /// Sessions that count against the capacity.
    fn held(&self) -> u32 {
        self.open + self.copies
    }

    /// The timeouts in force.
    pub fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// The hash of a tuple's key.
    #[inline]
    pub fn hash_key<A: SessionFamily>(&self, key: &Key<A>) -> u64 {
        self.key.hash_key(key)
    }

    /// The hash of a tuple.
    #[inline]
    pub fn hash<A: SessionFamily>(&self, tuple: &Tuple<A>) -> u64 {
        self.key.hash(tuple)
    }

    /// The slot of the direction whose packets look like this, whatever its state.
    #[inline]
    pub fn find<A: SessionFamily>(&self, hash: u64, tuple: &Tuple<A>) -> Option<Slot> {
        A::table(self).find(hash, &Key::of(tuple))
    }

    /// Whether nobody, living or resting, uses the tuple as a key.
    #[inline]
    pub fn is_free<A: SessionFamily>(&self, tuple: &Tuple<A>) -> bool {
        self.find(self.hash(tuple), tuple).is_none()
    }

    /// Opens a session. Both keys must be free; the slot is that of the first packet's direction.
    ///
    /// # Errors
    /// When there is no room; nothing has changed then.
    pub fn commit<A: SessionFamily>(&mut self, draft: &Draft<A>, now: Tick) -> Result<Slot, Full> {
        if self.held() >= self.capacity {
            return Err(Full);
        }
        let reply_key = draft.translated.reversed();
        let mut origin =
            Entry::new(draft.origin, draft.translated, draft.direction, Flags::ORIGIN.with_side(draft.origin_side));
        let mut reply = Entry::new(
            reply_key,
            draft.origin.reversed(),
            draft.reply_direction,
            Flags::default().with_side(draft.reply_side),
        );
        for entry in [&mut origin, &mut reply] {
            entry.set_generation(draft.generation);
            entry.set_last_seen(now);
        }
        origin.set_next_hop(draft.next_hop);
        let (origin_hash, reply_hash) = (self.hash(&draft.origin), self.hash(&reply_key));
        let (_, timeout) = self.timeouts.state(&origin, &reply);
        let table = A::table_mut(self);
        let reply_slot = table.insert(reply_hash, reply)?;
        origin.set_twin(reply_slot);
        let Ok(slot) = table.insert(origin_hash, origin) else {
            table.remove(reply_hash, reply_slot);
            return Err(Full);
        };
        table.entry_mut(reply_slot).set_twin(slot);
        table.set_deadline(slot, deadline(now.plus(timeout)));
        self.open += 1;
        self.fairness.open(Holder::of(&origin, &self.key));
        Ok(slot)
    }

    /// Notes a TCP segment of the direction in `slot`.
    #[inline]
    pub fn note_segment<A: SessionFamily>(&mut self, slot: Slot, segment: &Segment, now: Tick) -> Noted {
        let noted = tcp::note(A::table_mut(self), slot, segment, now);
        self.after::<A>(noted, slot, now)
    }

    /// Notes an SCTP packet of the direction in `slot`.
    pub fn note_association<A: SessionFamily>(&mut self, slot: Slot, packet: &Common, now: Tick) -> Noted {
        let noted = sctp::note(A::table_mut(self), slot, packet);
        self.after::<A>(noted, slot, now)
    }

    /// Notes what happened to a connection: its timeout may be another one now.
    #[inline]
    fn after<A: SessionFamily>(&mut self, noted: Noted, slot: Slot, now: Tick) -> Noted {
        if noted.event != Event::None {
            let (origin, _) = self.both::<A>(slot);
            self.renew::<A>(origin, now);
        }
        noted
    }

    /// Sets the deadline of a session anew, from its state and now.
    fn renew<A: SessionFamily>(&mut self, origin: Slot, now: Tick) {
        let (_, timeout) = self.state::<A>(origin);
        A::table_mut(self).set_deadline(origin, deadline(now.plus(timeout)));
    }

    /// What a session is, and how long it may be silent.
    pub fn state<A: SessionFamily>(&self, origin: Slot) -> (SessionState, u32) {
        let table = A::table(self);
        let entry = table.entry(origin);
        self.timeouts.state(entry, table.entry(entry.twin()))
    }

    /// Ends a session now. Its port rests, or is free at once where nothing rests.
    pub fn end<A: SessionFamily>(&mut self, slot: Slot, now: Tick) -> Expiry<A> {
        self.end_because(slot, EndReason::Policy, now)
    }

    /// The same, for another reason.
    pub fn end_because<A: SessionFamily>(&mut self, slot: Slot, reason: EndReason, now: Tick) -> Expiry<A> {
        let (origin, twin) = self.both::<A>(slot);
        let holder = self.holder::<A>(origin);
        let table = A::table_mut(self);
        let ended = ended(table.entry(origin));
        for at in [origin, twin] {
            let flags = table.entry(at).flags();
            debug_assert!(!flags.has(Flags::QUARANTINED), "a session ended twice");
            table.entry_mut(at).set_flags(flags.with(Flags::QUARANTINED));
        }
        // A client's session has no port that could rest.
        let rests = A::table(self).entry(origin).direction() == Direction::Egress;
        let rest = if rests { self.timeouts.quarantine } else { 0 };
        A::table_mut(self).set_deadline(origin, deadline(now.plus(rest)));
        self.open -= 1;
        self.fairness.close(holder);
        Expiry::Ended(reason, ended)
    }

    /// Takes a session out of the tables at once, open or not: only where none of the batch's packets is of it.
    pub fn remove<A: SessionFamily>(&mut self, origin: Slot) -> Ended<A> {
        let entry = *A::table(self).entry(origin);
        let twin = *A::table(self).entry(entry.twin());
        let (hash, twin_hash) = (self.hash(&entry.key()), self.hash(&twin.key()));
        let table = A::table_mut(self);
        table.remove(hash, origin);
        table.remove(twin_hash, entry.twin());
        if entry.is_copy() {
            self.copies -= 1;
        } else if !entry.flags().has(Flags::QUARANTINED) {
            self.open -= 1;
        }
        if !entry.flags().has(Flags::QUARANTINED) {
            self.fairness.close(Holder::of(&entry, &self.key));
        }
        ended(&entry)
    }

    /// Looks at the deadlines of up to `slots` slots from `cursor` on and acts on those that have come. Returns where to
    /// go on; `None` at the end of the table. `is_ours` says of a copy whether its share is this gateway's.
    pub fn sweep<A: SessionFamily>(
        &mut self,
        cursor: u32,
        slots: u32,
        now: Tick,
        is_ours: impl Fn(&Entry<A>) -> bool,
        mut happened: impl FnMut(Expiry<A>),
    ) -> Option<u32> {
        let mut at = cursor;
        let end = cursor.saturating_add(slots).min(A::table(self).slots());
        while at < end {
            let Some(offset) = first_due(A::table(self).deadlines(at, end - at), now) else { break };
            let slot = Slot(at + offset as u32);
            if let Some(expiry) = self.expire::<A>(slot, &is_ours, now) {
                happened(expiry);
            }
            at = slot.0 + 1;
        }
        (end < A::table(self).slots()).then_some(end)
    }

    fn expire<A: SessionFamily>(
        &mut self,
        origin: Slot,
        is_ours: impl Fn(&Entry<A>) -> bool,
        now: Tick,
    ) -> Option<Expiry<A>> {
        let table = A::table(self);
        let entry = *table.entry(origin);
        let twin = *table.entry(entry.twin());
        if entry.flags().has(Flags::QUARANTINED) {
            return Some(Expiry::Released(self.remove(origin)));
        }
        if entry.is_copy() {
            self.look_at_copy::<A>(origin, is_ours(&entry), now);
            return None;
        }
        let (_, timeout) = self.timeouts.state(&entry, &twin);
        let silent_since = entry.last_seen().later(twin.last_seen());
        let expires = silent_since.plus(timeout);
        if !now.reached(expires) {
            A::table_mut(self).set_deadline(origin, deadline(expires));
            return None;
        }
        let reason = Timeouts::end_reason(entry.key().protocol, entry.flags(), twin.flags());
        Some(self.end_because(origin, reason, now))
    }
}

/// The first deadline that has come. Almost none has, so they are asked many at once, without a branch for each.
fn first_due(deadlines: &[u32], now: Tick) -> Option<usize> {
    const AT_ONCE: usize = 64;
    let is_due = |deadline: u32| (deadline != 0) & now.reached(Tick(deadline));
    for (part, from) in deadlines.chunks(AT_ONCE).zip((0..).step_by(AT_ONCE)) {
        if part.iter().fold(false, |any, &deadline| any | is_due(deadline)) {
            return part.iter().position(|&deadline| is_due(deadline)).map(|at| from + at);
        }
    }
    None
}

/// A deadline as the column holds it: 0 stands for none, so the one tick that is 0 comes a millisecond later.
fn deadline(tick: Tick) -> u32 {
    tick.0.max(1)
}

fn ended<A: SessionFamily>(origin: &Entry<A>) -> Ended<A> {
    Ended { origin: origin.key(), translated: origin.to(), direction: origin.direction() }
}
