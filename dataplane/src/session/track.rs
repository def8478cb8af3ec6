//! Connection tracking state of one direction, and confirmation: proof that the initiator receives the replies.

use super::entry::{DIRECTION, DIRECTION_BITS, Entry, PROTOCOL};
use super::flags::{Flags, Tracking};
use super::table::Table;
use super::window::later_acknowledgement;
use crate::flow::address::Address;
use crate::flow::ids::Slot;
use crate::session::record::DirectionRecord;
use crate::wire::protocol;

/// Connection tracking state of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Track {
    /// See [`super::entry::Entry::sequence`].
    pub sequence: u32,
    /// See [`super::entry::Entry::acknowledged`].
    pub acknowledged: u32,
    /// What was seen.
    pub flags: Flags,
    /// What of it is verified.
    pub tracking: Tracking,
}

impl Track {
    /// Whether it is the original direction of a session whose initiator isn't confirmed yet.
    pub(super) fn is_unconfirmed(&self) -> bool {
        self.flags.has(Flags::ORIGIN) && !self.tracking.has(Tracking::CONFIRMED)
    }

    /// Whether its numbers are verified and the last segment matched them.
    pub(super) fn is_trusted(&self) -> bool {
        self.is_synchronized() && !self.tracking.has(Tracking::OUT_OF_WINDOW)
    }

    /// Whether its numbers are verified.
    pub(super) fn is_synchronized(&self) -> bool {
        self.tracking.has(Tracking::SYNCHRONIZED)
    }

    /// Whether it has a sequence number, verified or not.
    pub(super) fn has_sequence(&self) -> bool {
        self.sequence != 0 || self.is_synchronized()
    }

    /// Marks a direction that may have advanced unseen: via another gateway, or past this one. The next segment of
    /// either direction is verified against the other direction.
    pub(super) fn mark_stale(&mut self) {
        self.tracking = self.tracking.with(Tracking::OUT_OF_WINDOW);
        self.flags = self.flags.without(Flags::SEEN);
    }
}

impl<A: Address> Entry<A> {
    /// Whether the initiator has proven that it receives the replies: it acknowledges exactly what was sent (TCP), uses
    /// the verification tag that was chosen for it (SCTP), or sends again after a reply. A flood from spoofed addresses
    /// can't.
    pub fn is_confirmed(&self) -> bool {
        self.tracking().has(Tracking::CONFIRMED)
    }

    /// Confirmation flags for a replication record.
    pub(super) fn confirmation_flags(&self) -> u8 {
        if self.is_confirmed() { DirectionRecord::CONFIRMED } else { 0 }
    }

    /// Sequence number for a replication record: 0 if it isn't verified.
    pub(super) fn verified_sequence(&self) -> u32 {
        let is_unverified = self.tail[PROTOCOL] == protocol::TCP && !self.track().is_synchronized();
        if is_unverified { 0 } else { self.sequence }
    }

    /// What packets have shown of this direction: see [`Entry::progress_since`].
    #[inline]
    pub fn milestones(&self) -> (Flags, Tracking) {
        (self.flags(), self.tracking())
    }

    /// What a packet of this direction has shown for the first time, given what [`Entry::milestones`] were before it.
    #[inline]
    pub fn progress_since(&self, (flags, tracking): (Flags, Tracking)) -> Progress {
        const REPLY: u8 = Flags::SEEN.0 | Flags::SYN.0;
        if self.flags().has(Flags::ORIGIN) {
            let is_new = self.is_confirmed() && !tracking.has(Tracking::CONFIRMED);
            return if is_new { Progress::Confirmed } else { Progress::None };
        }
        let is_new = self.flags().0 & REPLY & !flags.0 != 0;
        if is_new { Progress::Replied } else { Progress::None }
    }

    /// Tracking bits: what is verified.
    #[inline]
    pub fn tracking(&self) -> Tracking {
        Tracking(self.tail[DIRECTION] & Tracking::ALL.0)
    }

    /// Sets the tracking bits.
    pub(super) fn set_tracking(&mut self, tracking: Tracking) {
        self.tail[DIRECTION] = self.tail[DIRECTION] & DIRECTION_BITS | tracking.0 & Tracking::ALL.0;
    }

    /// Connection tracking state.
    #[inline]
    pub(super) fn track(&self) -> Track {
        let (sequence, acknowledged) = (self.sequence, self.acknowledged);
        Track { sequence, acknowledged, flags: self.flags(), tracking: self.tracking() }
    }

    /// Sets the connection tracking state.
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

    /// TCP: the last acknowledgement sent in this direction; before the initiator is confirmed, the first one that it
    /// may send. SCTP: the verification tag that its packets will have once a pending handshake completes. 0: none.
    #[inline]
    pub fn acknowledged(&self) -> u32 {
        self.acknowledged
    }

    /// Clears the numbers of a reopened session.
    pub(super) fn reset_numbers(&mut self) {
        (self.sequence, self.acknowledged) = (0, 0);
        self.set_tracking(Tracking::default());
    }

    /// Marks a TCP direction that may have advanced unseen: see `Track::mark_stale`.
    pub(super) fn mark_stale(&mut self) {
        if self.tail[PROTOCOL] == protocol::TCP {
            let mut track = self.track();
            track.mark_stale();
            self.set_track(track);
        }
    }

    /// TCP: a segment continues exactly where the last one ended. The fast path of
    /// [`tcp::track_segment`](super::tcp::track_segment).
    #[inline]
    pub fn advance(&mut self, end: u32, acknowledgement: Option<u32>) {
        self.sequence = end;
        if let Some(ack) = acknowledgement {
            self.acknowledged = later_acknowledgement(self.acknowledged, ack);
        }
    }
}

/// Effect of a packet on its session's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackOutcome {
    /// State change that concerns both directions and is replicated.
    pub change: StateChange,
    /// Position relative to the window.
    pub position: WindowPosition,
}

/// State change of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateChange {
    /// No change.
    None,
    /// First FIN, or a reset: the timeout may be shorter now.
    Closing,
    /// A closed connection was reopened, or (SCTP) an association restarted with new tags.
    Reopened,
}

/// Position of a packet relative to the window of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowPosition {
    InWindow,
    /// Out of window, as of an off-path sender: no state changes, and the idle timer keeps running.
    OutOfWindow,
    /// Unverified: it continues the unverified numbers of its direction, and either comes from inside or the other
    /// direction is unverified, too. It refreshes the idle timer, and is trusted once the other direction matches.
    Unknown,
}

/// What a packet is the first one of its session to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing.
    None,
    /// The session is answered. Also of the first reply since a gap (see `Track::mark_stale`).
    Replied,
    /// The initiator receives the replies.
    Confirmed,
}

impl TrackOutcome {
    /// In window, no state change.
    pub const UNCHANGED: Self = Self { change: StateChange::None, position: WindowPosition::InWindow };
    /// Out of window, no effect.
    pub(super) const IGNORED: Self = Self { change: StateChange::None, position: WindowPosition::OutOfWindow };

    /// In window, with a state change.
    pub(super) fn with_change(event: StateChange) -> Self {
        Self { change: event, ..Self::UNCHANGED }
    }
}

/// Tracks the first packet of a direction of a protocol without handshake, or the first one since the other direction's
/// first. The initiator is confirmed when it sends again after a reply. A spoofing sender can time such a packet, too,
/// but needs one more packet for each session, and only where something replies.
#[cold]
pub fn track_first<A: Address>(table: &mut Table<A>, slot: Slot) {
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
