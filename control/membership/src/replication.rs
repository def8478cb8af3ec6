//! Session replication between gateways, as state machines without clock and I/O: `sender` serves all peers and
//! `receiver` one link; `send_state` decides what one peer is sent and when a full sync is necessary, `receive_state`
//! what received frames mean, `sync_rounds` which number listed sessions get. Module `peer` encodes their frames and
//! runs them over links.

#[cfg(test)]
mod fixtures;
pub mod receive_state;
pub mod receiver;
mod retry;
pub mod send_state;
pub mod sender;
pub mod status;
pub mod sync_rounds;

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use vipgate_dataplane::session::record::ReplicationRecord;

pub use self::receiver::Receiver;
pub use self::sender::Sender;
pub use self::status::ReplicationStatus;

/// Maximum number of unacknowledged frames per link. Bounds the receiver's queue, and the delay of heartbeats.
pub const WINDOW: usize = 16;

/// A frame of the replication protocol. Numbers start at 1 with each link and increase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumberedFrame {
    /// Session records: changes, or a part of a full sync.
    Sessions {
        /// Number of the frame.
        number: u64,
        records: Vec<ReplicationRecord>,
    },
    /// A full sync begins.
    SyncBegin {
        /// Number of the frame.
        number: u64,
        /// The sender's number of the round.
        round: u32,
        /// The view that it uses.
        view: u64,
        /// The last frame of the receiver that it had applied; 0: none.
        applied: u64,
    },
    /// The full sync is complete.
    SyncEnd {
        /// Number of the frame.
        number: u64,
        /// The sender's number of the round.
        round: u32,
        /// The version of the policy by which sessions were listed; empty: the receiver isn't in it.
        policy: Arc<str>,
    },
    /// The sender has released shards.
    Released {
        /// Number of the frame.
        number: u64,
        /// What it has released.
        release: Release,
    },
}

/// What a gateway has released: the shards that a view takes from it, and those that a policy gives to others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Release {
    /// The number of the view.
    pub view: u64,
    /// The version of the policy; empty: it has released none.
    pub policy: Arc<str>,
    /// How many policies its process has applied by then. Tells a policy that has come back from what it was before.
    pub applied: u64,
    /// The same of the receiver's last release that the gateway has received.
    pub seen: u64,
}

/// How long gateways wait for the release of what a policy has moved: a peer that is unreachable or has rejected the
/// policy doesn't send any.
pub fn policy_release_timeout(ttl: Duration) -> Duration {
    (ttl * 3).max(Duration::from_secs(3))
}

/// A peer has violated the protocol; how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ProtocolViolation(pub &'static str);
