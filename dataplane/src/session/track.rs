//! What connection state knows of one direction, and what any packet may prove: that its sender receives what it is answered.

use super::entry::{DIRECTION, DIRECTION_BITS, Entry, PROTOCOL, Slot};
use super::flags::{Flags, Tracking};
use super::image::Half;
use super::table::Table;
use super::window::later_acknowledgement;
use crate::address::Address;
use crate::wire::protocol;

/// What connection state knows of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Track {
    /// See [`super::entry::Entry::sequence`].
    pub sequence: u32,
    /// See [`super::entry::Entry::acknowledged`].
    pub acknowledged: u32,
    /// What has passed.
    pub flags: Flags,
    /// How far it is to be believed.
    pub tracking: Tracking,
}

impl Track {
    /// Whether it is the direction of the first packet, whose sender hasn't shown yet that it receives anything.
    pub(super) fn is_unconfirmed(&self) -> bool {
        self.flags.has(Flags::ORIGIN) && !self.tracking.has(Tracking::CONFIRMED)
    }

    /// Whether its numbers are its sender's, and the last segment agreed with them.
    pub(super) fn is_sound(&self) -> bool {
        self.is_synchronized() && !self.tracking.has(Tracking::LOST)
    }

    /// Whether its numbers are its sender's.
    pub(super) fn is_synchronized(&self) -> bool {
        self.tracking.has(Tracking::SYNCHRONIZED)
    }

    /// Whether it has a sequence number at all.
    pub(super) fn has_sequence(&self) -> bool {
        self.sequence != 0 || self.is_synchronized()
    }

    /// Both directions may have gone on where nobody saw them: at another gateway, or without one. The next segment of either is judged
    /// by what the other one says.
    pub(super) fn suspect(&mut self) {
        self.tracking = self.tracking.with(Tracking::LOST);
        self.flags = self.flags.without(Flags::SEEN);
    }
}

impl<A: Address> Entry<A> {
    /// Whether its sender has shown that it receives what it is answered: it acknowledges exactly what was sent (TCP), uses the tag that
    /// was chosen for it (SCTP), or goes on after an answer. What a flood from invented addresses can't.
    pub fn is_confirmed(&self) -> bool {
        self.tracking().has(Tracking::CONFIRMED)
    }

    /// Whether it is confirmed, as other gateways are told.
    pub(super) fn confirmation(&self) -> u8 {
        Half::KNOWS_CONFIRMATION | if self.is_confirmed() { Half::CONFIRMED } else { 0 }
    }

    /// Its sequence, as other gateways are told: 0 if nobody has confirmed it.
    pub(super) fn known_sequence(&self) -> u32 {
        let is_claimed = self.tail[PROTOCOL] == protocol::TCP && !self.track().is_synchronized();
        if is_claimed { 0 } else { self.sequence }
    }

    /// How far it is to be believed.
    #[inline]
    pub fn tracking(&self) -> Tracking {
        Tracking(self.tail[DIRECTION] & Tracking::ALL.0)
    }

    /// Sets how far it is to be believed.
    pub(super) fn set_tracking(&mut self, tracking: Tracking) {
        self.tail[DIRECTION] = self.tail[DIRECTION] & DIRECTION_BITS | tracking.0 & Tracking::ALL.0;
    }

    /// What connection state knows of it.
    #[inline]
    pub(super) fn track(&self) -> Track {
        let (sequence, acknowledged) = (self.sequence, self.acknowledged);
        Track { sequence, acknowledged, flags: self.flags(), tracking: self.tracking() }
    }

    /// Sets what connection state knows of it.
    #[inline]
    pub(super) fn set_track(&mut self, track: Track) {
        (self.sequence, self.acknowledged) = (track.sequence, track.acknowledged);
        self.set_flags(track.flags);
        self.set_tracking(track.tracking);
    }

    /// TCP: the sequence number behind the last byte sent in this direction. SCTP: the verification tag of its packets.
    #[inline]
    pub fn sequence(&self) -> u32 {
        self.sequence
    }

    /// TCP: the last acknowledgement sent in this direction; before its sender is confirmed, the first one that it may send. SCTP: the
    /// verification tag that its packets will have if a handshake comes to its end. 0: none.
    #[inline]
    pub fn acknowledged(&self) -> u32 {
        self.acknowledged
    }

    /// A session begins anew: nothing is known of its numbers.
    pub(super) fn forget_numbers(&mut self) {
        (self.sequence, self.acknowledged) = (0, 0);
        self.set_tracking(Tracking::default());
    }

    /// It may have gone on where nobody saw it: see [`Track::suspect`].
    pub(super) fn suspect(&mut self) {
        if self.tail[PROTOCOL] == protocol::TCP {
            let mut track = self.track();
            track.suspect();
            self.set_track(track);
        }
    }

    /// TCP: a segment goes on exactly where the last one ended. The fast path's part of [`tcp::note`](super::tcp::note).
    #[inline]
    pub fn advance(&mut self, end: u32, acknowledgement: Option<u32>) {
        self.sequence = end;
        if let Some(ack) = acknowledgement {
            self.acknowledged = later_acknowledgement(self.acknowledged, ack);
        }
    }
}

/// What a packet did to its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    /// What both directions, and other gateways, must know of.
    pub event: Event,
    /// Where it stands.
    pub place: Place,
}

/// What a packet did that both directions must know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing.
    None,
    /// It says FIN for the first time, or resets the connection: the timeout may be shorter now.
    Closing,
    /// It opens the connection anew after it had closed, or (SCTP) with other tags.
    Reopened,
}

/// Where a packet stands in its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Where it can.
    InWindow,
    /// Where only somebody stands who doesn't see the connection: nothing follows from it, and it keeps nothing alive.
    OutOfWindow,
    /// Nobody knows: it goes on from what was remembered of its direction, and either comes from inside or the other direction is lost,
    /// too. It keeps the session alive, and is believed when the other one agrees.
    Unknown,
}

impl Noted {
    /// Nothing happened.
    pub const NOTHING: Self = Self { event: Event::None, place: Place::InWindow };
    /// It has no effect.
    pub(super) const IGNORED: Self = Self { event: Event::None, place: Place::OutOfWindow };

    /// Something that both directions must know of.
    pub(super) fn event(event: Event) -> Self {
        Self { event, ..Self::NOTHING }
    }
}

/// Notes a packet of a protocol without handshake, of the direction in `slot`, that is its first, or the first since the other side's
/// first. That is what confirms whoever began the session: it goes on after it was answered. Who can't receive answers can time a packet
/// like that, too, but pays with one more for each session, and only where something answers.
#[cold]
pub fn note_first<A: Address>(table: &mut Table<A>, slot: Slot) {
    let twin_slot = table.entry(slot).twin();
    let (mut own, mut twin) = (table.entry(slot).track(), table.entry(twin_slot).track());
    own.flags = own.flags.with(Flags::SEEN);
    if !own.flags.has(Flags::ORIGIN) {
        if twin.is_unconfirmed() {
            twin.flags = twin.flags.without(Flags::SEEN);
        }
    } else if twin.flags.has(Flags::SEEN) {
        own.tracking = own.tracking.with(Tracking::CONFIRMED);
    }
    table.entry_mut(slot).set_track(own);
    table.entry_mut(twin_slot).set_track(twin);
}
