//! Sender state for one peer: changed records as they are queued by the workers, and a full sync when records could be
//! missing. Bounded: records that don't fit are dropped, which makes a full sync necessary.
//!
//! A full sync starts when few frames are unacknowledged, and requests chunks of sessions from one worker after the
//! other. While a request to a worker is outstanding, its queue must not be read: a chunk that followed newer records
//! would revert them.

mod frame_queue;

use std::sync::Arc;

use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::session::standby::MAX_RECORDS_APPLIED;

pub use self::frame_queue::EncodeFrame;
use self::frame_queue::{Content, FrameQueue};
use super::{NumberedFrame, ProtocolViolation, Release};

/// Maximum number of queued bytes per peer.
pub const MAX_QUEUED_BYTES: usize = 4 << 20;
/// Chunks are requested only while fewer bytes than this are queued, to leave capacity for changed records.
const SYNC_QUEUE_LIMIT: usize = 1 << 20;

/// Highest record number by worker; 0: none.
type RecordNumbers = Vec<u64>;

/// Progress of a full sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SyncProgress {
    /// A full sync is necessary.
    Required,
    /// Chunks are being requested from the workers.
    InProgress { worker: usize, cursor: u64, requested: bool },
    /// All frames of the round are queued or sent.
    Queued,
    /// The peer has acknowledged the end of the round.
    Complete,
}

/// A request to a worker for a chunk of its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRequest {
    /// The number of the round.
    pub round: u32,
    /// The number of the worker.
    pub worker: usize,
    /// Where in its tables the chunk begins.
    pub cursor: u64,
    /// The view at the start of the round, and the replication epoch of the previous replies.
    pub expected: (u64, Option<u64>),
}

/// Sender state for one peer.
#[derive(Clone, Debug)]
pub struct SendState {
    workers: usize,
    linked: bool,
    batch: Vec<ReplicationRecord>,
    batch_numbers: RecordNumbers,
    frames: FrameQueue,
    sync: SyncProgress,
    round: u32,
    /// The view that this gateway uses.
    view: u64,
    /// The view at the start of the current round.
    begun_by: u64,
    /// A view that the workers already used when a round with an older view was aborted: the next round waits for it.
    min_view: u64,
    /// The replication epoch of the current round, once a worker has replied.
    epoch: Option<u64>,
    /// The version of the policy by which the workers list sessions in the current round, once one has replied.
    policy: Option<Arc<str>>,
    /// The epoch of the last round that the peer has completely acknowledged: it has all records that were to be
    /// replicated to it by then. Lower where records may be missing.
    pub acknowledged_epoch: u64,
    /// The initial value of `acknowledged_epoch`, inherited from a previous process. Never reset below it: the state of
    /// sessions left by that process is unknown anyway. Sessions of this process are replicated in later epochs.
    inherited_epoch: u64,
    /// The last round that was aborted: the acknowledgement of an earlier one says nothing about what it has listed.
    aborted: u32,
    /// Number of the current round's SyncBegin frame, and of the last frame with rejected records.
    begin: u64,
    last_rejected: u64,
    /// Number of the last SyncEnd frame.
    end: u64,
    /// The last frame of the peer that is applied here.
    applied: u64,
    /// Numbers of dropped records; covered by the next round.
    missed: RecordNumbers,
    /// Numbers of dropped records that the current round covers.
    covered: RecordNumbers,
    /// The release that the peer has to know of, and whether its frame is queued.
    release: Option<(Release, bool)>,
    /// The last release that the peer has acknowledged.
    pub released: Option<Release>,
    /// Records sent, including those of full syncs.
    pub sent: u64,
    /// Full syncs begun.
    pub resyncs: u64,
}

impl SendState {
    /// State before the first link. A previous process has replicated its sessions up to this epoch.
    pub fn new(workers: usize, acknowledged_epoch: u64, encode: EncodeFrame) -> Self {
        Self {
            workers,
            linked: false,
            batch: Vec::new(),
            batch_numbers: vec![0; workers],
            frames: FrameQueue::new(encode),
            sync: SyncProgress::Required,
            round: 0,
            view: 0,
            begun_by: 0,
            min_view: 0,
            epoch: None,
            policy: None,
            acknowledged_epoch,
            inherited_epoch: acknowledged_epoch,
            aborted: 0,
            begin: 0,
            last_rejected: 0,
            end: 0,
            applied: 0,
            missed: vec![0; workers],
            covered: vec![0; workers],
            release: None,
            released: None,
            sent: 0,
            resyncs: 0,
        }
    }

    /// Sets the view that this gateway uses.
    pub fn set_view(&mut self, view: u64) {
        self.view = view;
    }

    /// Number of queued bytes.
    pub fn queued(&self) -> usize {
        self.frames.queued_bytes()
    }

    /// Whether the peer has acknowledged a full sync, with no records missing since.
    pub fn in_sync(&self) -> bool {
        self.sync == SyncProgress::Complete
    }

    /// The SyncEnd frame of the last round, if the peer has acknowledged it and nothing is missing since. A round of the
    /// peer that began when it had applied that frame lists all that this gateway has ever listed for it.
    pub fn synced_frame(&self) -> Option<u64> {
        self.in_sync().then_some(self.end)
    }

    /// Frames of the peer up to a number are applied here.
    pub fn set_applied(&mut self, number: u64) {
        self.applied = number;
    }

    /// A link has come up: a full sync is necessary, since the peer's state is unknown.
    pub fn link_up(&mut self) {
        self.link_down();
        self.linked = true;
        // A new process of the peer doesn't know it.
        self.release = self.release.take().or_else(|| Some((self.released.take()?, false)));
        self.frames.restart_numbers();
        (self.last_rejected, self.end, self.applied) = (0, 0, 0);
    }

    /// The peer has restarted: records acknowledged by its previous process may be missing.
    pub fn peer_restarted(&mut self) {
        self.acknowledged_epoch = 0;
    }

    /// What a previous process has replicated doesn't count.
    pub fn disinherit(&mut self) {
        (self.inherited_epoch, self.acknowledged_epoch) = (0, 0);
        self.require_sync();
    }

    /// The link has gone down.
    pub fn link_down(&mut self) {
        self.require_sync();
        for content in self.frames.drop_unacknowledged() {
            self.mark_missed(content);
        }
        self.linked = false;
    }

    /// Makes a full sync necessary. Drops queued frames, since the sync covers them.
    pub fn require_sync(&mut self) {
        if matches!(self.sync, SyncProgress::InProgress { .. } | SyncProgress::Queued) {
            // Workers treat sessions that they have listed as replicated, and which of them arrive is unknown until the
            // end of the round is acknowledged.
            self.acknowledged_epoch = self.acknowledged_epoch.min(self.inherited_epoch);
            self.aborted = self.round;
        }
        self.sync = SyncProgress::Required;
        self.batch.clear();
        let numbers = std::mem::replace(&mut self.batch_numbers, vec![0; self.workers]);
        merge_max(&mut self.missed, &numbers);
        let covered = std::mem::replace(&mut self.covered, vec![0; self.workers]);
        merge_max(&mut self.missed, &covered);
        for content in self.frames.drop_queued() {
            self.mark_missed(content);
        }
    }

    fn mark_missed(&mut self, content: Content) {
        match content {
            Content::Sessions { numbers, .. } | Content::End { numbers, .. } => merge_max(&mut self.missed, &numbers),
            Content::Begin => {}
            // Unless a later one is pending.
            Content::Released(release) => {
                let pending = self.release.take().map_or(release, |(pending, _)| pending);
                self.release = Some((pending, false));
            }
        }
    }

    /// Adds a changed record from a worker's replication queue.
    pub fn push(&mut self, worker: usize, number: u64, record: &ReplicationRecord) {
        if !self.linked || self.sync == SyncProgress::Required {
            self.missed[worker] = self.missed[worker].max(number);
            self.sync = SyncProgress::Required;
            return;
        }
        self.batch_numbers[worker] = self.batch_numbers[worker].max(number);
        self.add_to_batch(record);
        if self.queued() > MAX_QUEUED_BYTES {
            self.require_sync();
        }
    }

    fn add_to_batch(&mut self, record: &ReplicationRecord) {
        self.batch.push(*record);
        if self.batch.len() == MAX_RECORDS_APPLIED {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let records = std::mem::take(&mut self.batch);
        let count = records.len() as u64;
        let numbers = std::mem::replace(&mut self.batch_numbers, vec![0; self.workers]);
        self.frames.push(Content::Sessions { numbers, count }, |number| NumberedFrame::Sessions { number, records });
    }

    /// The next request to a worker, if one is due. Until its reply, that worker's replication queue must not be read.
    pub fn next_request(&mut self) -> Option<ChunkRequest> {
        if !self.linked {
            return None;
        }
        if self.sync == SyncProgress::Required && self.frames.is_window_half_open() && self.view >= self.min_view {
            self.round = self.round.wrapping_add(1);
            self.resyncs += 1;
            self.covered = std::mem::replace(&mut self.missed, vec![0; self.workers]);
            (self.begun_by, self.epoch, self.begin) = (self.view, None, self.frames.next_number());
            self.policy = None;
            let (round, view, applied) = (self.round, self.view, self.applied);
            self.frames.push(Content::Begin, |number| NumberedFrame::SyncBegin { number, round, view, applied });
            self.sync = SyncProgress::InProgress { worker: 0, cursor: 0, requested: false };
            if self.workers == 0 {
                self.end();
            }
        }
        match self.sync {
            SyncProgress::InProgress { worker, cursor, requested: false } if self.queued() < SYNC_QUEUE_LIMIT => {
                Some(ChunkRequest { round: self.round, worker, cursor, expected: (self.begun_by, self.epoch) })
            }
            SyncProgress::InProgress { .. }
            | SyncProgress::Required
            | SyncProgress::Queued
            | SyncProgress::Complete => None,
        }
    }

    /// The version of the policy of the current round, once a worker has replied.
    pub fn round_policy(&self) -> Option<Arc<str>> {
        self.policy.clone()
    }

    /// Notes that the request was sent.
    pub fn request_sent(&mut self) {
        if let SyncProgress::InProgress { requested, .. } = &mut self.sync {
            *requested = true;
        }
    }

    /// Checks a reply's replication epoch, the view of the last change of active members, and the version of the policy.
    /// The ownership of shards must be the same throughout a round and match its view and policy, else the peer would
    /// purge sessions that another round has listed. If it isn't, the round is aborted and a new full sync is necessary.
    pub fn check_ownership(&mut self, request: ChunkRequest, (epoch, since): (u64, u64), policy: &Arc<str>) {
        if request.round != self.round || !matches!(self.sync, SyncProgress::InProgress { .. }) {
            return;
        }
        let is_same_epoch = *self.epoch.get_or_insert(epoch) == epoch;
        let is_same_policy = self.policy.get_or_insert_with(|| policy.clone()) == policy;
        if !is_same_epoch || !is_same_policy || since > self.begun_by {
            self.min_view = since;
            self.require_sync();
        }
    }

    /// Adds a worker's chunk of records, and its cursor for the next one.
    pub fn add_chunk(&mut self, request: ChunkRequest, records: &[ReplicationRecord], cursor: Option<u64>) {
        let expected = SyncProgress::InProgress { worker: request.worker, cursor: request.cursor, requested: true };
        if request.round != self.round || self.sync != expected {
            return;
        }
        // Frames keep the order of events: older changed records first.
        self.flush();
        for record in records {
            self.add_to_batch(record);
        }
        self.flush();
        match cursor {
            Some(cursor) => self.sync = SyncProgress::InProgress { worker: request.worker, cursor, requested: false },
            None if request.worker + 1 < self.workers => {
                self.sync = SyncProgress::InProgress { worker: request.worker + 1, cursor: 0, requested: false };
            }
            None => self.end(),
        }
    }

    fn end(&mut self) {
        let numbers = std::mem::replace(&mut self.covered, vec![0; self.workers]);
        let (round, begin, epoch) = (self.round, self.begin, self.epoch.unwrap_or(0));
        let content = Content::End { round, begin, epoch, numbers };
        self.end = self.frames.next_number();
        let policy = self.policy.clone().unwrap_or_default();
        self.frames.push(content, |number| NumberedFrame::SyncEnd { number, round, policy });
        self.sync = SyncProgress::Queued;
    }

    /// Queues a Released frame, to be sent after the full sync.
    pub fn release(&mut self, release: Release) {
        let is_known = match &self.release {
            Some((pending, _)) => *pending == release,
            None => self.released.as_ref() == Some(&release),
        };
        if !is_known {
            self.release = Some((release, false));
        }
    }

    /// All replication queues have been read to their end.
    pub fn queues_drained(&mut self) {
        let is_synced = match self.sync {
            SyncProgress::Queued | SyncProgress::Complete => true,
            SyncProgress::Required | SyncProgress::InProgress { .. } => false,
        };
        if let (true, true, Some((release, false))) = (self.linked, is_synced, self.release.clone()) {
            self.flush();
            self.release = Some((release.clone(), true));
            let content = Content::Released(release.clone());
            self.frames.push(content, |number| NumberedFrame::Released { number, release });
        }
    }

    /// The next frame to send, if the window permits.
    pub fn next_frame(&mut self) -> Option<Vec<u8>> {
        if !self.linked || !self.frames.is_window_open() {
            return None;
        }
        if self.frames.is_empty() {
            // Only now: while other frames are queued, the batch can grow.
            self.flush();
        }
        let (bytes, records) = self.frames.send_next()?;
        self.sent += records;
        Some(bytes)
    }

    /// The peer has rejected records of this frame for lack of capacity, or this is the end of a round by another policy
    /// than its own, by which it may give up what it got. It will request a full sync later; until a round that begins
    /// after this frame is acknowledged, no epoch counts as acknowledged.
    pub fn records_rejected(&mut self, number: u64) {
        self.last_rejected = self.last_rejected.max(number);
        self.acknowledged_epoch = self.acknowledged_epoch.min(self.inherited_epoch);
    }

    /// The peer has applied all frames up to a number. Returns the highest record numbers in them by worker.
    ///
    /// # Errors
    /// If the frame was never sent.
    pub fn frames_acknowledged(&mut self, number: u64) -> Result<Vec<u64>, ProtocolViolation> {
        let mut all = vec![0; self.workers];
        for content in self.frames.acknowledge(number)? {
            match content {
                Content::Sessions { numbers, .. } => merge_max(&mut all, &numbers),
                Content::Begin => {}
                Content::End { round, begin, epoch, numbers } => {
                    merge_max(&mut all, &numbers);
                    // Even if another full sync is necessary: the peer has the records of that epoch.
                    if self.last_rejected < begin && round >= self.aborted {
                        self.acknowledged_epoch = self.acknowledged_epoch.max(epoch);
                    }
                    if round == self.round && self.sync == SyncProgress::Queued {
                        self.sync = SyncProgress::Complete;
                    }
                }
                Content::Released(release) => {
                    self.release = self.release.take().filter(|(pending, _)| *pending != release);
                    self.released = Some(release);
                }
            }
        }
        Ok(all)
    }
}

fn merge_max(to: &mut RecordNumbers, by: &[u64]) {
    to.iter_mut().zip(by).for_each(|(to, by)| *to = (*to).max(*by));
}

#[cfg(test)]
mod tests;
