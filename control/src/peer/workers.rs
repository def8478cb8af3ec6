//! Interface to the workers: the source of replication records to send, and the target of received ones.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};
use dashmap::DashMap;
use tokio::sync::{Notify, OwnedMutexGuard};
use vipgate_common::spawn_blocking;
use vipgate_dataplane::flow::ids::GatewayId;
use vipgate_dataplane::io::handoff::Wake;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::worker::command::Command;

/// A worker that doesn't reply within this time is stuck.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// The workers of this gateway.
pub trait Workers: Debug + Send + Sync + 'static {
    /// Number of workers.
    fn count(&self) -> usize;
    /// The sender side of a worker's replication queue.
    fn replication_sender(&self, worker: usize) -> &ReplicationSender;
    /// Sends a command and wakes the worker; false if its queue stays full until the deadline. Blocking: only called on
    /// threads that may block.
    fn send(&self, worker: usize, command: Command, deadline: Instant) -> bool;
    /// The replication epoch of the policy in force.
    fn replication_epoch(&self) -> u64;
    /// The id of a gateway; `None` while it isn't in the policy in force.
    fn gateway_id(&self, name: &str) -> Option<GatewayId>;
    /// The index of the worker that a standby session belongs to, less than [`Workers::count`].
    fn worker_of(&self, record: &ReplicationRecord) -> usize;
}

/// Wakes the send loop when a worker has queued records. Cheap while the loop isn't waiting.
#[derive(Debug, Default)]
pub struct ReplicationWaker {
    listening: AtomicBool,
    notify: Notify,
}

impl ReplicationWaker {
    /// Arms the waker for one wake-up. The caller must then check all queues once more for records queued before.
    pub(super) fn arm(&self) {
        // A worker that queues a record after our next check must see this, and vice versa: hence SeqCst.
        self.listening.store(true, SeqCst);
    }

    pub(super) async fn notified(&self) {
        self.notify.notified().await;
    }
}

impl Wake for ReplicationWaker {
    fn wake(&self) {
        if self.listening.swap(false, SeqCst) {
            self.notify.notify_one();
        }
    }
}

/// One lock per peer: serializes commands that apply its records. A link may end while a command is in progress; the
/// next link waits for it, so the purge at the end of a sync round never runs concurrently with the next round.
#[derive(Debug, Default)]
pub(super) struct ApplyLocks(DashMap<Arc<str>, Arc<tokio::sync::Mutex<()>>>);

/// Releases the lock when the last clone is dropped.
pub(super) type ApplyGuard = Arc<OwnedMutexGuard<()>>;

impl ApplyLocks {
    /// Acquires the lock of a gateway.
    pub(super) async fn lock(&self, gateway: &Arc<str>) -> ApplyGuard {
        // A clone: the map's own guard must not be held while this waits.
        let turn = self.0.entry(gateway.clone()).or_default().clone();
        Arc::new(turn.lock_owned().await)
    }
}

/// A worker's index, and a command with a channel for its reply.
pub(super) type WorkerRequest<T> = (usize, Box<dyn FnOnce(Sender<T>) -> Command + Send>);

/// Sends requests to workers concurrently, and waits for the replies on a blocking thread. The error is the index of a
/// worker that doesn't reply. If the caller is cancelled, `guard` is held until all replies have arrived.
pub(super) async fn request_all<T: Send + 'static>(
    workers: &Arc<dyn Workers>,
    requests: Vec<WorkerRequest<T>>,
    guard: impl Send + 'static,
) -> Result<Vec<T>, usize> {
    let workers = workers.clone();
    spawn_blocking(move || {
        let _guard = guard;
        let deadline = Instant::now() + REPLY_TIMEOUT;
        let mut sent: Vec<(usize, Receiver<T>)> = Vec::with_capacity(requests.len());
        for (worker, request) in requests {
            let (reply, response) = bounded(1);
            if !workers.send(worker, request(reply), deadline) {
                return Err(worker);
            }
            sent.push((worker, response));
        }
        sent.into_iter().map(|(worker, response)| response.recv_deadline(deadline).map_err(|_| worker)).collect()
    })
    .await
}
