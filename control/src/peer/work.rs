//! The workers as links see them: where their news come from, where copies go.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};
use tokio::sync::{Notify, OwnedMutexGuard};
use vipgate_dataplane::command::Command;
use vipgate_dataplane::link::handoff::Wake;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::session::image::Image;
use vipgate_dataplane::snapshot::members::GatewayId;

/// A worker that doesn't answer within this time has a problem.
const PATIENCE: Duration = Duration::from_secs(5);

/// The workers of this gateway.
pub trait Workers: Debug + Send + Sync + 'static {
    /// How many there are.
    fn count(&self) -> usize;
    /// What one of them tells other gateways.
    fn outlet(&self, worker: usize) -> &Outlet;
    /// Hands a command over and wakes the worker; false if that can't be until then. May wait: it is called where that is allowed.
    fn send(&self, worker: usize, command: Command, until: Instant) -> bool;
    /// The replication epoch of the policy in force.
    fn replication_epoch(&self) -> u64;
    /// The number of a gateway; `None` while policy doesn't know it.
    fn gateway(&self, name: &str) -> Option<GatewayId>;
    /// The number of the worker that a copy belongs to: below [`Workers::count`].
    fn place(&self, image: &Image) -> usize;
}

/// What outlets ring when there is news. Cheap while somebody is at them anyway.
#[derive(Debug, Default)]
pub struct Bell {
    listening: AtomicBool,
    notify: Notify,
}

impl Bell {
    /// Asks to be woken, until the next time: what came before is to be looked for once more.
    pub(super) fn listen(&self) {
        // Whoever puts something in after our next look must see this, and the other way around: hence SeqCst.
        self.listening.store(true, SeqCst);
    }

    pub(super) async fn rung(&self) {
        self.notify.notified().await;
    }
}

impl Wake for Bell {
    fn wake(&self) {
        if self.listening.swap(false, SeqCst) {
            self.notify.notify_one();
        }
    }
}

/// Whose turn it is to tell our workers of a gateway's sessions. A link may end with a command under way; the next one waits for it, so
/// that what is forgotten at the end of a round isn't what the next one has named.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<HashMap<Arc<str>, Arc<tokio::sync::Mutex<()>>>>);

/// Is over with its last clone.
pub(super) type Turn = Arc<OwnedMutexGuard<()>>;

impl Turns {
    /// Waits for a gateway's turn.
    pub(super) async fn take(&self, gateway: &Arc<str>) -> Turn {
        let turn = self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(gateway.clone()).or_default().clone();
        Arc::new(turn.lock_owned().await)
    }
}

/// A worker's number, and the command that it answers where it is told.
pub(super) type Question<T> = (usize, Box<dyn FnOnce(Sender<T>) -> Command + Send>);

/// Asks workers, all at once, and waits for their answers on a thread of its own; the number of one that doesn't answer is the error. Whoever asks
/// may be gone meanwhile: `turn` is held until all is done.
pub(super) async fn ask<T: Send + 'static>(
    workers: &Arc<dyn Workers>,
    questions: Vec<Question<T>>,
    turn: impl Send + 'static,
) -> Result<Vec<T>, usize> {
    let workers = workers.clone();
    let exchanged = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let until = Instant::now() + PATIENCE;
        let mut asked: Vec<(usize, Receiver<T>)> = Vec::with_capacity(questions.len());
        for (worker, question) in questions {
            let (reply, answer) = bounded(1);
            if !workers.send(worker, question(reply), until) {
                return Err(worker);
            }
            asked.push((worker, answer));
        }
        asked.into_iter().map(|(worker, answer)| answer.recv_deadline(until).map_err(|_| worker)).collect()
    });
    // Without its threads, the process ends.
    exchanged.await.unwrap_or(Err(0))
}
