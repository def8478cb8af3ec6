//! Status of session replication with one peer: what sender and receiver know of each other, and what is reported.

use super::Release;

/// Status of session replication with one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicationStatus {
    /// Receiving: a full sync has ended since the link came up.
    pub in_sync_from: bool,
    /// The peer's view at the start of that sync; 0: none yet.
    pub sync_view: u64,
    /// Sending: the peer has acknowledged a full sync since the last time that records could be missing.
    pub in_sync_to: bool,
    /// The replication epoch of the last full sync that the peer has completely acknowledged; 0: none.
    pub acknowledged_epoch: u64,
    /// Sending: the last frame of that sync, while `in_sync_to` holds.
    pub synced_frame: Option<u64>,
    /// Receiving: the last frame that is applied.
    pub applied: u64,
    /// Receiving: the last full sync was by another policy than this gateway's, so it has removed nothing.
    pub has_other_policy: bool,
    /// Records sent, including those of full syncs.
    pub sent: u64,
    /// Records received and applied.
    pub received: u64,
    /// Standby sessions removed because a sync round didn't list them.
    pub purged: u64,
    /// Bytes queued for sending.
    pub queued_bytes: usize,
    /// Number of full syncs started.
    pub resyncs: u64,
    /// The last release of moved shards by this gateway that the peer has acknowledged.
    pub released: Option<Release>,
    /// What the peer has released last, and the highest view.
    pub peer_released: Option<Release>,
}

impl ReplicationStatus {
    /// A link has come up: frames are numbered from 1 again.
    pub fn link_up(&mut self) {
        self.link_down();
        (self.synced_frame, self.applied) = (None, 0);
    }

    /// The link has gone down.
    pub fn link_down(&mut self) {
        (self.in_sync_from, self.in_sync_to) = (false, false);
    }

    /// Whether the peer has acknowledged a full sync that ended with this frame or an earlier one, with no records
    /// missing since.
    pub(super) fn is_synced_by(&self, frame: u64) -> bool {
        self.synced_frame.is_some_and(|end| end <= frame)
    }

    /// The peer has released shards.
    pub(super) fn peer_has_released(&mut self, release: &Release) {
        let view = self.peer_released.take().map_or(0, |last| last.view).max(release.view);
        self.peer_released = Some(Release { view, ..release.clone() });
    }
}
