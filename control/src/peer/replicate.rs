//! Copies of sessions: what this gateway tells the others of its own, and what it takes of theirs. `outbound` and `inbound` decide
//! and know no socket; `pump` and `intake` carry it out.

pub(super) mod inbound;
pub(super) mod intake;
pub(super) mod outbound;
pub(super) mod pump;
pub(super) mod rounds;

/// Frames that may be on their way to a gateway unacknowledged: so it never has to hold more, and its beats never wait behind more.
pub(super) const WINDOW: usize = 16;

/// The most bytes that wait for a gateway, the frame included that was one too many.
#[cfg(test)]
pub(super) fn outbound_limit() -> usize {
    outbound::MOST_QUEUED + super::frame::LONGEST
}
