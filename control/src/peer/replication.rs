//! Session replication over peer links: this gateway's sessions to replica targets, and standby sessions from peers.
//! `membership::replication` decides; `send_loop` and `receiver` do the I/O, `numbered` encodes frames.

pub(super) mod numbered;
pub(super) mod receiver;
pub(super) mod send_loop;

/// Maximum number of queued bytes per peer, including the frame that exceeds the limit.
#[cfg(test)]
pub(super) fn max_queued_bytes() -> usize {
    crate::membership::replication::send_state::MAX_QUEUED_BYTES + super::frame::MAX_FRAME_BYTES
}
