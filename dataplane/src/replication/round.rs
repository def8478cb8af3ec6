//! Full replication rounds: slices of a listing of records, and of a purge of what a round didn't name.

use std::sync::Arc;

use crate::flow::ids::GatewayId;
use crate::session::record::ReplicationRecord;

/// One slice of a full replication round to a gateway. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct RecordChunk {
    /// The replica target.
    pub target: GatewayId,
    /// The replication epoch of the last round that it has acknowledged in full; 0 if there is none.
    pub acknowledged_epoch: u64,
    /// Where to continue; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// The result; the worker fills it up to its capacity and never grows it.
    pub records: Vec<ReplicationRecord>,
    /// The membership view at the start of the round, and the replication epoch of its earlier slices. A worker that
    /// has another epoch or a later view lists nothing and marks no session as sent.
    pub expected: (u64, Option<u64>),
    /// The version of the policy by which the round's earlier slices were listed, and the result: the worker's. A worker
    /// that has another one lists nothing, either.
    pub policy: Option<Arc<str>>,
    /// The result: the worker's replication epoch, and the membership view since which the active members are the same.
    pub observed: (u64, u64),
}

/// One slice of a purge of standby sessions. Send it again until `cursor` is `None`.
#[derive(Debug)]
pub struct PurgeChunk {
    /// The owner of the shards.
    pub owner: GatewayId,
    /// The owner's last full round, modulo 16; what was part of it stays.
    pub round: u8,
    /// The membership view of that round.
    pub view: u64,
    /// The version of the owner's policy in that round; empty: this gateway isn't in it.
    pub policy: Arc<str>,
    /// The replication epoch of our last round that the owner had acknowledged in full before it began its own; 0 if
    /// there is none.
    pub acknowledged_epoch: u64,
    /// Where to continue; starts as `Some(0)`.
    pub cursor: Option<u64>,
    /// Standby sessions removed so far.
    pub removed: u64,
    /// The active members have changed since the round: nothing more is removed, and a new full round is needed.
    pub outdated: bool,
    /// The worker's policy has another version: nothing is removed, and a full round is needed once both are the same.
    pub has_other_policy: bool,
    /// Sessions that the owner may not have received were kept: a new full round is needed once it has them.
    pub kept: bool,
}

impl PurgeChunk {
    /// The first slice, by an owner's round with this number, view and version of the policy.
    pub fn first(owner: GatewayId, (round, view, policy): (u8, u64, Arc<str>), acknowledged_epoch: u64) -> Self {
        Self {
            owner,
            round,
            view,
            policy,
            acknowledged_epoch,
            cursor: Some(0),
            removed: 0,
            outdated: false,
            has_other_policy: false,
            kept: false,
        }
    }
}
