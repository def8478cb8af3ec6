//! Receiver task: reactions to the end of a sync round, to rejected records and to evictions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prost::Message;
use tokio::time::timeout;
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::replication::sender::ReplicationSender;

use super::*;
use crate::membership::replication::ReplicationStatus;
use crate::membership::replication::receiver::RETRY_DELAY;
use crate::peer::proto::{Frame, Sessions, SyncBegin, SyncEnd};
use crate::peer::tests::session_record;
use crate::peer::{ReplicationWaker, record};

/// A worker whose purges can be made to keep sessions and whose table can be made full. Records the acknowledged epoch
/// of each purge.
#[derive(Debug)]
struct MockWorker {
    sender: ReplicationSender,
    keeps: AtomicBool,
    is_full: AtomicBool,
    epochs: std::sync::Mutex<Vec<u64>>,
}

impl Workers for MockWorker {
    fn count(&self) -> usize {
        1
    }

    fn replication_sender(&self, _: usize) -> &ReplicationSender {
        &self.sender
    }

    fn send(&self, _: usize, command: Command, _: std::time::Instant) -> bool {
        let (mut chunk, reply) = match command {
            Command::PurgeStandby { chunk, reply } => (chunk, reply),
            Command::ApplyRecords { records, reply, .. } => {
                let rejected = if self.is_full.load(Ordering::Relaxed) { records } else { Vec::new() };
                return reply.send(rejected).is_ok();
            }
            _ => panic!("unexpected command: {command:?}"),
        };
        self.epochs.lock().unwrap().push(chunk.acknowledged_epoch);
        (chunk.cursor, chunk.kept) = (None, self.keeps.load(Ordering::Relaxed));
        reply.send(chunk).is_ok()
    }

    fn replication_epoch(&self) -> u64 {
        1
    }

    fn gateway_id(&self, _: &str) -> Option<GatewayId> {
        Some(GatewayId(1))
    }

    fn worker_of(&self, _: &ReplicationRecord) -> usize {
        0
    }
}

struct Scenario {
    workers: Arc<MockWorker>,
    board: StatusPublisher,
    /// Received frames.
    frames: mpsc::Sender<Kind>,
    /// Frames sent to the peer.
    lane: mpsc::Receiver<Vec<u8>>,
    number: u64,
}

impl Scenario {
    /// Runs a receiver task with a scenario that feeds it frames.
    async fn run(scenario: impl AsyncFnOnce(Self)) {
        let sender = ReplicationSender::new(Arc::new(ReplicationWaker::default()));
        let (keeps, is_full, epochs) = (AtomicBool::new(false), AtomicBool::new(false), std::sync::Mutex::default());
        let workers = Arc::new(MockWorker { sender, keeps, is_full, epochs });
        let (board, turns) = (StatusPublisher::new(), ApplyLocks::default());
        board.set_peers(&["b".into()]);
        board.update("b", |peer| peer.replication.synced_frame = Some(1));
        let (events, _events) = mpsc::channel(16);
        let (sender, lane) = mpsc::channel(16);
        let (_view, view) = watch::channel(Arc::new(PeerView { number: 9, ..PeerView::default() }));
        let (peer, rounds) = (Arc::from("b"), SyncRounds::default());
        let intake = RecordReceiver {
            peer,
            workers: workers.clone(),
            sync_rounds: rounds,
            apply_locks: &turns,
            status: board.clone(),
            events,
            view,
            outgoing: sender,
            is_first: true,
        };
        let (frames, received) = mpsc::channel(16);
        tokio::select! {
            reason = intake.run(received) => panic!("{reason:?}"),
            () = scenario(Self { workers, board, frames, lane, number: 0 }) => {}
        }
    }

    /// The next frame sent to the peer.
    async fn sent(&mut self) -> Kind {
        let bytes = timeout(Duration::from_secs(100), self.lane.recv()).await.unwrap().unwrap();
        Frame::decode(&bytes[4..]).unwrap().kind.unwrap()
    }

    async fn is_silent_for(&mut self, time: Duration) -> bool {
        timeout(time, self.lane.recv()).await.is_err()
    }

    /// Sets the epoch of the last full sync that the peer has acknowledged.
    fn set_acknowledged_epoch(&self, epoch: u64) {
        self.board.update("b", |peer| peer.replication.acknowledged_epoch = epoch);
    }

    fn status(&self) -> ReplicationStatus {
        self.board.subscribe().borrow().peers["b"].replication.clone()
    }

    /// Delivers the next frame and expects its acknowledgement.
    async fn frame(&mut self, kind: impl FnOnce(u64) -> Kind, rejected: bool) {
        self.number += 1;
        let number = self.number;
        self.frames.send(kind(number)).await.unwrap();
        assert_eq!(self.sent().await, Kind::Ack(Ack { number, refused: rejected }));
    }

    async fn begin(&mut self) {
        self.frame(|number| Kind::SyncBegin(SyncBegin { number, round: 1, view: 8, applied: Some(1) }), false).await;
    }

    async fn end(&mut self) {
        self.frame(|number| Kind::SyncEnd(SyncEnd { number, round: 1, policy: String::new() }), false).await;
    }

    async fn session(&mut self, rejected: bool) {
        let sessions = vec![record::encode(&session_record(1))];
        self.frame(|number| Kind::Sessions(Sessions { number, sessions }), rejected).await;
    }
}

const REQUEST: Kind = Kind::SyncRequest(SyncRequest {});

#[tokio::test]
async fn a_full_sync_is_requested_once_the_peer_has_received_the_kept_sessions() {
    Scenario::run(async |mut it: Scenario| {
        it.set_acknowledged_epoch(5);
        it.workers.keeps.store(true, Ordering::Relaxed);
        it.begin().await;
        it.end().await;
        it.set_acknowledged_epoch(5);
        assert!(it.is_silent_for(Duration::from_millis(50)).await, "a full sync would list the same sessions");
        assert!(it.status().in_sync_from, "none of the peer's sessions is missing");
        it.set_acknowledged_epoch(7);
        assert_eq!(it.sent().await, REQUEST);
        // The peer receives the kept sessions during its round, too late to list them.
        it.begin().await;
        it.set_acknowledged_epoch(8);
        it.end().await;
        assert_eq!(it.sent().await, REQUEST);
        it.workers.keeps.store(false, Ordering::Relaxed);
        it.begin().await;
        it.end().await;
        assert_eq!((it.status().in_sync_from, it.status().sync_view), (true, 8));
        it.set_acknowledged_epoch(9);
        assert!(it.is_silent_for(Duration::from_millis(50)).await, "no further request");
        assert_eq!(*it.workers.epochs.lock().unwrap(), [5, 7, 8]);
    })
    .await;
}

#[tokio::test]
async fn a_full_sync_is_requested_after_rejected_records() {
    Scenario::run(async |mut it: Scenario| {
        let full = |it: &Scenario, is_full| it.workers.is_full.store(is_full, Ordering::Relaxed);
        it.begin().await;
        full(&it, true);
        it.session(true).await;
        it.session(true).await;
        full(&it, false);
        it.session(false).await;
        it.end().await;
        let start = Instant::now();
        assert_eq!(it.sent().await, REQUEST);
        assert!(start.elapsed() > RETRY_DELAY / 2, "delayed");
        it.begin().await;
        it.session(false).await;
        it.end().await;
        assert!(it.is_silent_for(RETRY_DELAY + RETRY_DELAY / 2).await, "no further request");
    })
    .await;
}

#[tokio::test]
async fn a_full_sync_is_requested_after_evictions() {
    Scenario::run(async |mut it: Scenario| {
        it.begin().await;
        it.session(false).await;
        it.end().await;
        it.workers.sender.count_evicted();
        it.session(true).await;
        assert_eq!(it.sent().await, REQUEST);
        it.begin().await;
        it.session(false).await;
        it.end().await;
        assert!(it.is_silent_for(RETRY_DELAY + RETRY_DELAY / 2).await);
    })
    .await;
}
