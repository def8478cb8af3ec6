//! Session replication between gateways, as state machines without clock and I/O: `sender` serves all peers and
//! `receiver` one link; `send_state` decides what one peer is sent and when a full sync is necessary, `receive_state`
//! what received frames mean, `sync_rounds` which number listed sessions get. Module `peer` encodes their frames and
//! runs them over links.
//!
//! What is numbered here:
//!
//! | number | what it counts | who gives it | what it is for |
//! |---|---|---|---|
//! | view | the authority's decisions, each term from its own first number on | policy server | both ends of a round know the same owners: a round waits for its view, and one of an older view than the last change of active members is repeated |
//! | policy version | a hash | policy server | the same for the order of owners |
//! | replication epoch | changes of the replica of any shard in this gateway's snapshots | engine | a round is of one epoch |
//! | acknowledged epoch | the epoch of the last round that a peer has completely applied | sender | sessions of shards whose replica is newer may be missing there: they are listed, and not purged here |
//! | inherited epoch | what the previous process had reached, from which the acknowledged one never falls | sender | sessions that were left by it aren't listed again, unless this process takes its place |
//! | round | full syncs to one peer | sender | a late reply of a worker belongs to none; an aborted round acknowledges nothing |
//! | round of a standby session | 1 to 15, given out again | receiver | what the last round hasn't listed is purged |
//! | frame | frames of one link, from 1 | sender | acknowledgements, the window, which of two rounds in both directions was first (`applied`) |
//! | record | records of one worker for one peer, whatever the link | engine | a session counts as replicated |
//!
//! A round of its own for a standby session can't be the sender's: sessions of all owners share four bits. A frame isn't
//! a record's number, since links end and workers go on.

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
