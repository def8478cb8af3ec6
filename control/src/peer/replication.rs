//! Session replication over peer links: this gateway's sessions to replica targets, and standby sessions from peers.
//! `send_state` and `receive_state` are pure state machines; `send_loop` and `receiver` do the I/O.

pub(super) mod receive_state;
pub(super) mod receiver;
pub(super) mod send_loop;
pub(super) mod send_state;
pub(super) mod sync_rounds;

/// Maximum number of unacknowledged frames per link. Bounds the receiver's queue, and the delay of heartbeats.
pub(super) const WINDOW: usize = 16;

/// Maximum number of queued bytes per peer, including the frame that exceeds the limit.
#[cfg(test)]
pub(super) fn max_queued_bytes() -> usize {
    send_state::MAX_QUEUED_BYTES + super::frame::MAX_FRAME_BYTES
}
