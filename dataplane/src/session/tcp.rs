//! TCP connection state (RFC 6146 section 3.5.2, RFC 7857 section 2, RFC 5961): what a segment does to the direction that it is of,
//! and what both directions together amount to.
//!
//! Only what stands in the window counts (window.rs): SYN, FIN, RST, numbers, and the right to keep the session alive. All else is passed
//! on, for the receiver knows better, and challenges it. Where both directions have gone on unseen, neither is believed until one says
//! what fits to the other; what only one says is remembered, and keeps nothing alive. Who opens a connection is confirmed as soon as it
//! acknowledges what it was answered.
//!
//! A handshake needs no more room than the numbers that it fills: a SYN writes the first acknowledgement that may answer it into the
//! other direction, and whatever answers must lie between that and what was sent.

use super::entry::Slot;
use super::flags::{Flags, Tracking};
use super::table::Table;
use super::track::{Event, Noted, Place, Track};
use super::window::{NEAR, acknowledgement, agrees, is_between, is_in_window, later};
use crate::address::Address;
use crate::time::Tick;
use crate::wire::tcp::{Flags as TcpFlags, Segment};

/// A direction that is silent for so long may go another way, while its numbers get old here.
const SILENCE_MS: u32 = 60_000;

/// Notes a segment of the direction in `slot`. The fast path does the same, [`super::entry::Entry::advance`], for segments without SYN,
/// FIN and RST that go on exactly where the last one of their direction ended, unless they may prove something.
#[inline(never)]
pub fn note<A: Address>(table: &mut Table<A>, slot: Slot, segment: &Segment, now: Tick) -> Noted {
    let twin_slot = table.entry(slot).twin();
    let (entry, twin_entry) = (table.entry(slot), table.entry(twin_slot));
    let (mut own, mut twin) = (entry.track(), twin_entry.track());
    let is_alone = now.since(twin_entry.last_seen()) > SILENCE_MS;
    let noted = follow(&mut own, &mut twin, segment, is_alone);
    table.entry_mut(slot).set_track(own);
    table.entry_mut(twin_slot).set_track(twin);
    noted
}

/// What a segment of `own` does to both directions. `is_alone`: the other one has been silent for long.
pub fn follow(own: &mut Track, twin: &mut Track, segment: &Segment, is_alone: bool) -> Noted {
    if segment.flags.has(TcpFlags::RST) {
        reset(own, twin, segment)
    } else if segment.flags.has(TcpFlags::SYN) {
        synchronize(own, twin, segment)
    } else if is_in_window(own, twin, segment) {
        accept(own, twin, segment)
    } else {
        lose(own, twin, segment, is_alone)
    }
}

/// Takes a segment in the window for what it says.
fn accept(own: &mut Track, twin: &mut Track, segment: &Segment) -> Noted {
    let mut event = Event::None;
    let has_agreed = !twin.is_sound() && agrees(twin, segment);
    // What was known of a connection that went on unseen may be more than half a circle old. It went on so if what the other direction
    // only claimed fits, too.
    let is_unseen = has_agreed && !twin.is_synchronized();
    let is_old = is_unseen || !own.is_synchronized() || !(own.is_sound() || twin.is_sound());
    let newer = |known, said| if is_old { said } else { later(known, said) };
    if has_agreed {
        if twin.tracking.has(Tracking::CLAIMS_FIN) && !twin.flags.has(Flags::FIN) {
            twin.flags = twin.flags.with(Flags::FIN);
            event = Event::Closing;
        }
        become_sound(twin);
    }
    let end = segment.sequence.wrapping_add(segment.space);
    own.sequence = newer(own.sequence, end);
    if let Some(ack) = acknowledgement(segment) {
        if !own.is_unconfirmed() || !twin.has_sequence() {
            own.acknowledged = if own.acknowledged == 0 { ack } else { newer(own.acknowledged, ack) };
        } else if confirms(own, twin, ack) {
            // Whatever others have said in its name.
            (own.sequence, own.acknowledged) = (end, ack);
            own.tracking = own.tracking.with(Tracking::CONFIRMED);
        }
    }
    become_sound(own);
    see(own, twin);
    if segment.flags.has(TcpFlags::FIN) && !own.flags.has(Flags::FIN) {
        own.flags = own.flags.with(Flags::FIN);
        event = Event::Closing;
    }
    Noted::event(event)
}

/// The next segments of `own` are only counted, unless they may confirm it; those of the other direction, if they may confirm that.
fn see(own: &mut Track, twin: &mut Track) {
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

fn become_sound(track: &mut Track) {
    track.tracking = track.tracking.with(Tracking::SYNCHRONIZED).without(Tracking::LOST).without(Tracking::CLAIMS_FIN);
}

/// Whether an acknowledgement shows that whoever opened the connection receives its answers: it is of what was really sent, from the
/// answer to its SYN on.
fn confirms(own: &Track, twin: &Track, ack: u32) -> bool {
    let answers = twin.flags.has(Flags::SYN) && own.is_synchronized() && own.acknowledged != 0;
    ack == twin.sequence || (answers && is_between(ack, own.acknowledged, twin.sequence))
}

/// Notes a segment out of the window. If the other direction is lost as well, or silent, the connection may have gone on unseen, and what
/// this one says is remembered until the other one agrees.
///
/// Until then it keeps the session alive only if it goes on from what was remembered, as in a connection of which one direction goes
/// another way, or has too much in flight to fit. Whoever sends blind segments from outside can have one go on from another; so there the
/// other direction must have said something since that isn't known either.
fn lose(own: &mut Track, twin: &mut Track, segment: &Segment, is_alone: bool) -> Noted {
    let is_remembered = own.tracking.has(Tracking::LOST) && !own.is_synchronized();
    let goes_on = is_remembered && segment.sequence == own.sequence;
    own.suspect();
    if twin.is_sound() && !is_alone {
        return Noted::IGNORED;
    }
    own.sequence = segment.sequence.wrapping_add(segment.space);
    if !own.is_unconfirmed() {
        own.acknowledged = acknowledgement(segment).unwrap_or(0);
    }
    own.tracking = own.tracking.without(Tracking::SYNCHRONIZED).without(Tracking::CLAIMS_FIN);
    if segment.flags.has(TcpFlags::FIN) {
        own.tracking = own.tracking.with(Tracking::CLAIMS_FIN);
    }
    await_confirmation(twin);
    let is_credible = !own.flags.has(Flags::OUTSIDE) || !twin.is_synchronized();
    let place = if goes_on && is_credible { Place::Unknown } else { Place::OutOfWindow };
    Noted { event: Event::None, place }
}

/// Notes a SYN, alone or in answer to one.
fn synchronize(own: &mut Track, twin: &mut Track, segment: &Segment) -> Noted {
    let is_origin = own.flags.has(Flags::ORIGIN);
    if !segment.flags.opens() {
        return answer(own, twin, segment);
    }
    if is_origin && is_closed(own.flags, twin.flags) {
        own.tracking = own.tracking.without(Tracking::CONFIRMED);
        own.flags = own.flags.without(Flags::FIN).without(Flags::RST);
        (own.sequence, own.tracking) = (0, own.tracking.without(Tracking::SYNCHRONIZED));
        twin.tracking = Tracking::default();
        twin.flags = twin.flags.without(Flags::SYN).without(Flags::FIN).without(Flags::RST).without(Flags::SEEN);
        (own.acknowledged, twin.sequence) = (0, 0);
        begin(own, twin, segment);
        return Noted::event(Event::Reopened);
    }
    // Until it is answered, the last one to begin is as good as the one before. What comes then is said again, or for the receiver to
    // challenge; if it is real, a reset in the right place follows (RFC 5961 section 4).
    let is_handshake = if is_origin {
        own.is_unconfirmed() && (!twin.flags.has(Flags::SYN) || is_said_again(own, segment))
    } else {
        twin.is_unconfirmed() && !own.is_synchronized()
    };
    if !is_handshake {
        return Noted::IGNORED;
    }
    begin(own, twin, segment);
    if !is_origin {
        // Both open at once. What the other side acknowledges is real.
        own.tracking = own.tracking.without(Tracking::SYNCHRONIZED);
        own.flags = own.flags.without(Flags::SEEN);
    }
    Noted::NOTHING
}

/// Whether a SYN is one that has passed already, perhaps with data behind it.
fn is_said_again(own: &Track, segment: &Segment) -> bool {
    let end = segment.sequence.wrapping_add(segment.space);
    own.is_synchronized() && own.flags.has(Flags::SYN) && own.sequence.wrapping_sub(end) < NEAR
}

/// A SYN says where its sender begins.
fn begin(own: &mut Track, twin: &mut Track, segment: &Segment) {
    if !is_said_again(own, segment) {
        own.sequence = segment.sequence.wrapping_add(segment.space);
    }
    own.flags = own.flags.with(Flags::SYN);
    become_sound(own);
    twin.acknowledged = segment.sequence.wrapping_add(1);
    see(own, twin);
}

/// Notes a SYN that answers one.
fn answer(own: &mut Track, twin: &mut Track, segment: &Segment) -> Noted {
    let Some(ack) = acknowledgement(segment).filter(|_| !segment.flags.has(TcpFlags::FIN)) else {
        return Noted::IGNORED;
    };
    let is_answer = twin.has_sequence()
        && if own.acknowledged == 0 { ack == twin.sequence } else { is_between(ack, own.acknowledged, twin.sequence) };
    if own.is_unconfirmed() && is_answer {
        // Both have opened at once, and this side has received the other's SYN.
        own.tracking = own.tracking.with(Tracking::CONFIRMED);
        own.flags = own.flags.with(Flags::SYN).with(Flags::SEEN);
        (own.sequence, own.acknowledged) = (segment.sequence.wrapping_add(segment.space), ack);
        become_sound(own);
        become_sound(twin);
        return Noted::NOTHING;
    }
    if twin.is_unconfirmed() && is_answer {
        begin(own, twin, segment);
        own.acknowledged = ack;
        return Noted::NOTHING;
    }
    // Said again, for the acknowledgement was lost.
    if !is_in_window(own, twin, segment) {
        return Noted::IGNORED;
    }
    own.flags = own.flags.with(Flags::SYN);
    Noted::NOTHING
}

/// Notes a reset. One that isn't exactly where the receiver, or the sender's own last byte, says it must be is for the receiver to
/// challenge (RFC 5961 section 3.2); its answer makes the sender say the right number.
fn reset(own: &mut Track, twin: &Track, segment: &Segment) -> Noted {
    let is_sent = own.is_synchronized() && segment.sequence == own.sequence;
    let is_expected = twin.acknowledged != 0 && segment.sequence == twin.acknowledged;
    // The answer to a SYN, from nothing that listens (RFC 9293 section 3.10.7.1).
    let refuses = !own.flags.has(Flags::SYN)
        && twin.has_sequence()
        && acknowledgement(segment).is_some_and(|ack| {
            ack == twin.sequence || (own.acknowledged != 0 && is_between(ack, own.acknowledged, twin.sequence))
        });
    if !is_sent && !is_expected && !refuses {
        return Noted::IGNORED;
    }
    if own.flags.has(Flags::RST) {
        return Noted::NOTHING;
    }
    own.flags = own.flags.with(Flags::RST);
    Noted::event(Event::Closing)
}

/// Whether the connection of these two directions is over.
pub fn is_closed(one: Flags, other: Flags) -> bool {
    one.has(Flags::RST) || other.has(Flags::RST) || (one.has(Flags::FIN) && other.has(Flags::FIN))
}

#[cfg(test)]
mod tests;
