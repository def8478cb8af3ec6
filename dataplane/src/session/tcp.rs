//! TCP connection tracking (RFC 6146 section 3.5.2, RFC 7857 section 2, RFC 5961): effect of a segment on both
//! directions, and the state of the connection.
//!
//! Only segments in window (window.rs) change state (SYN, FIN, RST, numbers) or refresh the idle timer. All others are
//! forwarded without effect: the receiver sees more and challenges them. Where both directions have advanced unseen,
//! neither is trusted until a segment of one matches the other; unverified numbers are stored, but don't refresh the
//! timer by themselves. The initiator is confirmed as soon as it acknowledges the reply.
//!
//! The handshake needs no extra state: a SYN stores the first acknowledgement that may answer it in the other
//! direction, and a valid reply acknowledges between that and what was sent.

use super::flags::{Flags, Tracking};
use super::table::Table;
use super::track::{StateChange, Track, TrackOutcome, WindowPosition};
use super::window::{TOLERANCE, acknowledgement, is_between, is_in_window, later, matches_twin};
use crate::flow::address::Address;
use crate::flow::ids::Slot;
use crate::flow::time::Tick;
use crate::wire::tcp::{Flags as TcpFlags, Segment};

/// A direction that is idle for so long may take another path, so its numbers here may be stale.
const SILENCE_TIMEOUT_MS: u32 = 60_000;

/// Updates connection state with a segment of the direction in `slot`. The fast path, [`super::entry::Entry::advance`],
/// does the same for segments without SYN, FIN and RST that continue exactly where the last one of their direction
/// ended, unless they may confirm something.
#[inline(never)]
pub fn track_segment<A: Address>(table: &mut Table<A>, slot: Slot, segment: &Segment, now: Tick) -> TrackOutcome {
    let twin_slot = table.entry(slot).twin();
    let (entry, twin_entry) = (table.entry(slot), table.entry(twin_slot));
    let (mut own, mut twin) = (entry.track(), twin_entry.track());
    let is_twin_silent = now.since(twin_entry.last_seen()) > SILENCE_TIMEOUT_MS;
    let outcome = update(&mut own, &mut twin, segment, is_twin_silent);
    table.entry_mut(slot).set_track(own);
    table.entry_mut(twin_slot).set_track(twin);
    outcome
}

/// Applies a segment of `own` to both directions. `is_twin_silent`: the other direction has been silent for
/// `SILENCE_TIMEOUT_MS`.
pub fn update(own: &mut Track, twin: &mut Track, segment: &Segment, is_twin_silent: bool) -> TrackOutcome {
    if segment.flags.has(TcpFlags::RST) {
        track_rst(own, twin, segment)
    } else if segment.flags.has(TcpFlags::SYN) {
        track_syn(own, twin, segment)
    } else if is_in_window(own, twin, segment) {
        track_in_window(own, twin, segment)
    } else {
        track_out_of_window(own, twin, segment, is_twin_silent)
    }
}

/// Tracks a segment in window.
fn track_in_window(own: &mut Track, twin: &mut Track, segment: &Segment) -> TrackOutcome {
    let mut event = StateChange::None;
    let verifies_twin = !twin.is_trusted() && matches_twin(twin, segment);
    // The numbers of a connection that advanced unseen may be more than 2^31 old. It did advance if the segment also
    // matches numbers that the other direction only claimed.
    let has_advanced_unseen = verifies_twin && !twin.is_synchronized();
    let is_stale = has_advanced_unseen || !own.is_synchronized() || !(own.is_trusted() || twin.is_trusted());
    let newer = |known, new| if is_stale { new } else { later(known, new) };
    if verifies_twin {
        if twin.tracking.has(Tracking::UNVERIFIED_FIN) && !twin.flags.has(Flags::FIN) {
            twin.flags = twin.flags.with(Flags::FIN);
            event = StateChange::Closing;
        }
        mark_trusted(twin);
    }
    let end = segment.sequence.wrapping_add(segment.sequence_length);
    own.sequence = newer(own.sequence, end);
    if let Some(ack) = acknowledgement(segment) {
        if !own.is_unconfirmed() || !twin.has_sequence() {
            own.acknowledged = if own.acknowledged == 0 { ack } else { newer(own.acknowledged, ack) };
        } else if confirms_initiator(own, twin, ack) {
            // Overrides unverified numbers that may have been forged.
            (own.sequence, own.acknowledged) = (end, ack);
            own.tracking = own.tracking.with(Tracking::CONFIRMED);
        }
    }
    mark_trusted(own);
    mark_seen(own, twin);
    if segment.flags.has(TcpFlags::FIN) && !own.flags.has(Flags::FIN) {
        own.flags = own.flags.with(Flags::FIN);
        event = StateChange::Closing;
    }
    TrackOutcome::with_change(event)
}

/// Marks `own` as seen, so that its next segments take the fast path, unless they may confirm the initiator. Clears the
/// mark of the other direction if its next segment may.
fn mark_seen(own: &mut Track, twin: &mut Track) {
    if !own.is_unconfirmed() || !twin.has_sequence() {
        own.flags = own.flags.with(Flags::SEEN);
    }
    await_confirmation(twin);
}

fn await_confirmation(track: &mut Track) {
    if track.is_unconfirmed() {
        track.flags = track.flags.without(Flags::SEEN);
    }
}

fn mark_trusted(track: &mut Track) {
    track.tracking =
        track.tracking.with(Tracking::SYNCHRONIZED).without(Tracking::OUT_OF_WINDOW).without(Tracking::UNVERIFIED_FIN);
}

/// Whether an acknowledgement proves that the initiator receives the replies: it is of data really sent, from the
/// answer to its SYN on.
fn confirms_initiator(own: &Track, twin: &Track, ack: u32) -> bool {
    let acks_reply = twin.flags.has(Flags::SYN) && own.is_synchronized() && own.acknowledged != 0;
    ack == twin.sequence || (acks_reply && is_between(ack, own.acknowledged, twin.sequence))
}

/// Tracks a segment out of window. If the other direction is unverified or silent as well, the connection may have
/// advanced unseen, and the segment's numbers are stored until the other direction matches.
///
/// Until then it refreshes the idle timer only if it continues the stored numbers, as in a connection of which one
/// direction takes another path or has too much in flight to match. An off-path sender can send segments that continue
/// each other; so from outside, the other direction must also have sent unverified numbers since.
fn track_out_of_window(own: &mut Track, twin: &mut Track, segment: &Segment, is_twin_silent: bool) -> TrackOutcome {
    let has_unverified_numbers = own.tracking.has(Tracking::OUT_OF_WINDOW) && !own.is_synchronized();
    let continues = has_unverified_numbers && segment.sequence == own.sequence;
    own.mark_stale();
    if twin.is_trusted() && !is_twin_silent {
        return TrackOutcome::IGNORED;
    }
    own.sequence = segment.sequence.wrapping_add(segment.sequence_length);
    if !own.is_unconfirmed() {
        own.acknowledged = acknowledgement(segment).unwrap_or(0);
    }
    own.tracking = own.tracking.without(Tracking::SYNCHRONIZED).without(Tracking::UNVERIFIED_FIN);
    if segment.flags.has(TcpFlags::FIN) {
        own.tracking = own.tracking.with(Tracking::UNVERIFIED_FIN);
    }
    await_confirmation(twin);
    let is_credible = !own.flags.has(Flags::OUTSIDE) || !twin.is_synchronized();
    let place = if continues && is_credible { WindowPosition::Unknown } else { WindowPosition::OutOfWindow };
    TrackOutcome { change: StateChange::None, position: place }
}

/// Tracks a SYN or SYN-ACK.
fn track_syn(own: &mut Track, twin: &mut Track, segment: &Segment) -> TrackOutcome {
    let is_origin = own.flags.has(Flags::ORIGIN);
    if !segment.flags.is_initial_syn() {
        return track_syn_ack(own, twin, segment);
    }
    if is_origin && is_closed(own.flags, twin.flags) {
        own.tracking = own.tracking.without(Tracking::CONFIRMED);
        own.flags = own.flags.without(Flags::FIN).without(Flags::RST);
        (own.sequence, own.tracking) = (0, own.tracking.without(Tracking::SYNCHRONIZED));
        twin.tracking = Tracking::default();
        twin.flags = twin.flags.without(Flags::SYN).without(Flags::FIN).without(Flags::RST).without(Flags::SEEN);
        (own.acknowledged, twin.sequence) = (0, 0);
        start_numbers(own, twin, segment);
        return TrackOutcome::with_change(StateChange::Reopened);
    }
    // Until there is a SYN-ACK, the latest SYN counts as much as an earlier one. After that it is a retransmission, or
    // for the receiver to challenge; if it is real, a reset with the right number follows (RFC 5961 section 4).
    let is_handshake = if is_origin {
        own.is_unconfirmed() && (!twin.flags.has(Flags::SYN) || is_retransmitted_syn(own, segment))
    } else {
        twin.is_unconfirmed() && !own.is_synchronized()
    };
    if !is_handshake {
        return TrackOutcome::IGNORED;
    }
    start_numbers(own, twin, segment);
    if !is_origin {
        // Simultaneous open. What the other side acknowledges is real.
        own.tracking = own.tracking.without(Tracking::SYNCHRONIZED);
        own.flags = own.flags.without(Flags::SEEN);
    }
    TrackOutcome::UNCHANGED
}

/// Whether a SYN is a retransmission, perhaps with data sent after it.
fn is_retransmitted_syn(own: &Track, segment: &Segment) -> bool {
    let end = segment.sequence.wrapping_add(segment.sequence_length);
    own.is_synchronized() && own.flags.has(Flags::SYN) && own.sequence.wrapping_sub(end) < TOLERANCE
}

/// Stores the initial sequence number of a SYN.
fn start_numbers(own: &mut Track, twin: &mut Track, segment: &Segment) {
    if !is_retransmitted_syn(own, segment) {
        own.sequence = segment.sequence.wrapping_add(segment.sequence_length);
    }
    own.flags = own.flags.with(Flags::SYN);
    mark_trusted(own);
    twin.acknowledged = segment.sequence.wrapping_add(1);
    mark_seen(own, twin);
}

fn track_syn_ack(own: &mut Track, twin: &mut Track, segment: &Segment) -> TrackOutcome {
    let Some(ack) = acknowledgement(segment).filter(|_| !segment.flags.has(TcpFlags::FIN)) else {
        return TrackOutcome::IGNORED;
    };
    let acks_syn = twin.has_sequence()
        && if own.acknowledged == 0 { ack == twin.sequence } else { is_between(ack, own.acknowledged, twin.sequence) };
    if own.is_unconfirmed() && acks_syn {
        // Simultaneous open: this side has received the other's SYN.
        own.tracking = own.tracking.with(Tracking::CONFIRMED);
        own.flags = own.flags.with(Flags::SYN).with(Flags::SEEN);
        (own.sequence, own.acknowledged) = (segment.sequence.wrapping_add(segment.sequence_length), ack);
        mark_trusted(own);
        mark_trusted(twin);
        return TrackOutcome::UNCHANGED;
    }
    if twin.is_unconfirmed() && acks_syn {
        start_numbers(own, twin, segment);
        own.acknowledged = ack;
        return TrackOutcome::UNCHANGED;
    }
    // A retransmission, since the acknowledgement was lost.
    if !is_in_window(own, twin, segment) {
        return TrackOutcome::IGNORED;
    }
    own.flags = own.flags.with(Flags::SYN);
    TrackOutcome::UNCHANGED
}

/// Tracks a reset. One whose number is neither the one that the receiver expects nor that of the sender's own last byte
/// is for the receiver to challenge (RFC 5961 section 3.2); the challenge ACK makes a real sender use the right number.
fn track_rst(own: &mut Track, twin: &Track, segment: &Segment) -> TrackOutcome {
    let is_sent = own.is_synchronized() && segment.sequence == own.sequence;
    let is_expected = twin.acknowledged != 0 && segment.sequence == twin.acknowledged;
    // Reset in reply to a SYN to a closed port (RFC 9293 section 3.10.7.1).
    let is_refusal = !own.flags.has(Flags::SYN)
        && twin.has_sequence()
        && acknowledgement(segment).is_some_and(|ack| {
            ack == twin.sequence || (own.acknowledged != 0 && is_between(ack, own.acknowledged, twin.sequence))
        });
    if !is_sent && !is_expected && !is_refusal {
        return TrackOutcome::IGNORED;
    }
    if own.flags.has(Flags::RST) {
        return TrackOutcome::UNCHANGED;
    }
    own.flags = own.flags.with(Flags::RST);
    TrackOutcome::with_change(StateChange::Closing)
}

/// Whether the connection of these two directions is closed.
pub fn is_closed(one: Flags, other: Flags) -> bool {
    one.has(Flags::RST) || other.has(Flags::RST) || (one.has(Flags::FIN) && other.has(Flags::FIN))
}

#[cfg(test)]
mod tests;
