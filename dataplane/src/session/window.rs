//! TCP window check of tracked connections (RFC 5961, RFC 9293 section 3.10.7.4): an off-path sender must guess the
//! numbers of a segment that passes it.
//!
//! For each direction, the tracker has the sequence number behind its last byte and its last acknowledgement. A segment
//! is in window if one of its two numbers equals one of those, or both are within [`TOLERANCE`] of the range between
//! them. In an idle connection 4 of 2^32 blind segments match: a guess of 30 bits, where an exact reset takes 32. Each
//! doubling of the data in flight beyond [`TOLERANCE`] makes the second condition easier by one bit, and the first by
//! none. So no window scale needs to be known or stored: what is really lost before the gateway is sent again exactly
//! where the last segment ended.

use super::track::Track;
use crate::wire::tcp::{Flags, Segment};

/// Distance that a number may have from the expected range, if the other number is as near.
pub const TOLERANCE: u32 = 1 << 15;
/// The largest possible window (RFC 7323 section 2.3).
const MAX_WINDOW: u32 = 1 << 30;

/// The later of a known and a new number: a number behind the known one by no more than a window was reordered,
/// anything else is ahead. So one side may send up to 3 GiB unseen, modulo 4 GiB, while the other one sends nothing.
#[inline]
pub(super) fn later(known: u32, new: u32) -> u32 {
    if known.wrapping_sub(new) <= MAX_WINDOW { known } else { new }
}

/// The later of two acknowledgements; a known one of 0 means that there is none.
#[inline]
pub(super) fn later_acknowledgement(known: u32, new: u32) -> u32 {
    if known == 0 { new } else { later(known, new) }
}

/// Whether a number is from `low` to `high`.
#[inline]
pub(super) fn is_between(number: u32, low: u32, high: u32) -> bool {
    number.wrapping_sub(low) <= high.wrapping_sub(low)
}

/// Whether a number is within [`TOLERANCE`] of the range from `low` to `high`.
fn is_near(number: u32, low: u32, high: u32) -> bool {
    let flight = high.wrapping_sub(low);
    let (low, flight) = if flight < MAX_WINDOW { (low, flight) } else { (high, 0) };
    number.wrapping_sub(low.wrapping_sub(TOLERANCE)) <= flight + 2 * TOLERANCE
}

/// The acknowledgement number of a segment with ACK.
#[inline]
pub(super) fn acknowledgement(segment: &Segment) -> Option<u32> {
    segment.flags.has(Flags::ACK).then_some(segment.acknowledgment)
}

/// Whether a segment of `own` is in window.
pub(super) fn is_in_window(own: &Track, twin: &Track, segment: &Segment) -> bool {
    let sequence = segment.sequence;
    let sent = own.is_synchronized().then_some(own.sequence);
    let expected = (twin.acknowledged != 0).then_some(twin.acknowledged);
    // Keep-alives and zero-window probes are one byte before it (RFC 9293 section 3.8.4).
    let is_expected = |at| sequence == at || sequence.wrapping_add(1) == at;
    if sent == Some(sequence) || expected.is_some_and(is_expected) {
        return true;
    }
    let Some(ack) = acknowledgement(segment) else { return false };
    let acked = (own.is_synchronized() && own.acknowledged != 0).then_some(own.acknowledged);
    let twin_sent = twin.has_sequence().then_some(twin.sequence);
    if acked == Some(ack) || twin_sent == Some(ack) {
        return true;
    }
    let near = |number, low: Option<u32>, high: Option<u32>| {
        low.or(high).zip(high.or(low)).is_some_and(|(low, high)| is_near(number, low, high))
    };
    near(sequence, expected, sent) && near(ack, acked, twin_sent)
}

/// Whether a segment matches the numbers of the other direction by itself. If it does, both are real: an off-path
/// sender forges one side only.
pub(super) fn matches_twin(twin: &Track, segment: &Segment) -> bool {
    let Some(ack) = acknowledgement(segment) else { return false };
    if twin.acknowledged == 0 || !twin.has_sequence() {
        return false;
    }
    let (expected, twin_sent) = (twin.acknowledged, twin.sequence);
    let flight = segment.sequence.wrapping_sub(expected);
    let unacknowledged = twin_sent.wrapping_sub(ack);
    (flight == 0 && unacknowledged < MAX_WINDOW)
        || (unacknowledged == 0 && flight < MAX_WINDOW)
        || (is_near(segment.sequence, expected, expected) && is_near(ack, twin_sent, twin_sent))
}
