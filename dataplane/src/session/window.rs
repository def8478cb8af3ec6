//! Where a segment may stand in its connection (RFC 5961, RFC 9293 section 3.10.7.4): what somebody who doesn't see the connection
//! would have to guess.
//!
//! Numbers known of a connection are, of either direction, the sequence number behind its last byte and its last acknowledgement. A
//! segment is believed if one of its two numbers is exactly one of those, or both are within [`NEAR`] of what is between them. Of an idle
//! connection that are 4 of 2^32 blind segments: a guess of 30 bits, where a reset in the right place takes 32. Each doubling of what is
//! in flight beyond [`NEAR`] makes the last way easier by a bit, and the others by none. So no window needs to be known, and no entry
//! holds its scale: what is really lost on the way here is sent again, exactly where the last segment ended.

use super::track::Track;
use crate::wire::tcp::{Flags, Segment};

/// How far a number may be from what is expected, if the other one is as near.
pub const NEAR: u32 = 1 << 15;
/// No window is larger (RFC 7323 section 2.3).
const LARGEST: u32 = 1 << 30;

/// The later one of a number that is known and one that is said now: what is behind by no more than a window was overtaken on its way, and
/// all else is ahead. So a side may say up to 3 GiB unseen, modulo 4 GiB, while the other one says nothing.
#[inline]
pub(super) fn later(known: u32, said: u32) -> u32 {
    if known.wrapping_sub(said) <= LARGEST { known } else { said }
}

/// The later one of two acknowledgements, of which the known one is 0 before there is any.
#[inline]
pub(super) fn later_acknowledgement(known: u32, said: u32) -> u32 {
    if known == 0 { said } else { later(known, said) }
}

/// Whether a number is from `low` to `high`.
#[inline]
pub(super) fn is_between(number: u32, low: u32, high: u32) -> bool {
    number.wrapping_sub(low) <= high.wrapping_sub(low)
}

/// Whether a number is near those from `low` to `high`.
fn is_near(number: u32, low: u32, high: u32) -> bool {
    let flight = high.wrapping_sub(low);
    let (low, flight) = if flight < LARGEST { (low, flight) } else { (high, 0) };
    number.wrapping_sub(low.wrapping_sub(NEAR)) <= flight + 2 * NEAR
}

/// The acknowledgement of a segment that has one.
#[inline]
pub(super) fn acknowledgement(segment: &Segment) -> Option<u32> {
    segment.flags.has(Flags::ACK).then_some(segment.acknowledgement)
}

/// Whether a segment of `own` stands where its sender can.
pub(super) fn is_in_window(own: &Track, twin: &Track, segment: &Segment) -> bool {
    let sequence = segment.sequence;
    let sent = own.is_synchronized().then_some(own.sequence);
    let expected = (twin.acknowledged != 0).then_some(twin.acknowledged);
    // Keep-alives and probes of closed windows stand one before (RFC 9293 section 3.8.4).
    let is_expected = |at| sequence == at || sequence.wrapping_add(1) == at;
    if sent == Some(sequence) || expected.is_some_and(is_expected) {
        return true;
    }
    let Some(ack) = acknowledgement(segment) else { return false };
    let said = (own.is_synchronized() && own.acknowledged != 0).then_some(own.acknowledged);
    let heard = twin.has_sequence().then_some(twin.sequence);
    if said == Some(ack) || heard == Some(ack) {
        return true;
    }
    let near = |number, low: Option<u32>, high: Option<u32>| {
        low.or(high).zip(high.or(low)).is_some_and(|(low, high)| is_near(number, low, high))
    };
    near(sequence, expected, sent) && near(ack, said, heard)
}

/// Whether a segment of `own` fits to what the other direction says, by that alone: then both are real, for nobody sends in the name of
/// both sides.
pub(super) fn agrees(twin: &Track, segment: &Segment) -> bool {
    let Some(ack) = acknowledgement(segment) else { return false };
    if twin.acknowledged == 0 || !twin.has_sequence() {
        return false;
    }
    let (expected, heard) = (twin.acknowledged, twin.sequence);
    let flight = segment.sequence.wrapping_sub(expected);
    let unacknowledged = heard.wrapping_sub(ack);
    (flight == 0 && unacknowledged < LARGEST)
        || (unacknowledged == 0 && flight < LARGEST)
        || (is_near(segment.sequence, expected, expected) && is_near(ack, heard, heard))
}
