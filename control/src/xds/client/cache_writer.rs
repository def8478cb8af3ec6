//! Writer of the policy cache, of gateways and of nodes' agents: a task beside the client's, so that neither an update nor
//! its acknowledgment waits for the disk. It keeps the acknowledged resources and writes the newest state, all of it: at
//! once, after that at most once in an interval that grows with its size, and at the end of the client.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::time::{sleep, timeout};
use vipgate_common::{Blocking, LoggedErrors, spawn_blocking};

use super::ServerStatus;
use crate::xds::cache::{Cache, encode};
use crate::xds::resource::Key;
use crate::xds::store::StoredResource;

/// Minimum time between two writes of a small policy.
pub(super) const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// What a policy that changes all the time may cost the disk: one of 100 MB is written every half a minute.
const BYTES_PER_SECOND: u64 = 3 << 20;
/// Minimum time to the next attempt after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// A write that takes longer is reported before its end.
const SLOW_WRITE: Duration = Duration::from_secs(5);

/// Stores new content, if there is any, and when it was last confirmed. May block.
pub(crate) type Store = Arc<dyn Fn(Option<Vec<u8>>, SystemTime) -> io::Result<()> + Send + Sync>;

/// Stores in the cache at a path. One that couldn't be opened yet is opened first. The lock is held as long as this is
/// used.
pub(super) fn store_at(path: PathBuf, cache: Option<Cache>) -> Store {
    let cache = Mutex::new(cache);
    Arc::new(move |content: Option<Vec<u8>>, confirmed_at| {
        let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = match cache.take() {
            Some(opened) => opened,
            None => Cache::open_later(&path)?,
        };
        cache.insert(opened).store(content.as_deref(), confirmed_at)
    })
}

/// The policy is the server's at a point in time.
#[derive(Debug)]
pub(crate) struct Confirmation {
    /// What acknowledged updates have changed since the last one.
    pub(crate) changed: Vec<(Key, Option<StoredResource>)>,
    pub(crate) at: SystemTime,
}

/// The writer; it doesn't run yet.
#[derive(Debug)]
pub(crate) struct CacheWriter {
    path: PathBuf,
    confirmations: mpsc::UnboundedReceiver<Confirmation>,
    /// All that were acknowledged.
    resources: BTreeMap<Key, StoredResource>,
    /// Whether the file has them.
    is_written: bool,
    /// When they were last confirmed, unless that is stored.
    confirmed_at: Option<SystemTime>,
    status: Arc<ArcSwap<ServerStatus>>,
    logged: LoggedErrors,
}

impl CacheWriter {
    /// Of a cache without policy.
    pub(crate) fn new(
        path: PathBuf,
        status: Arc<ArcSwap<ServerStatus>>,
        confirmations: mpsc::UnboundedReceiver<Confirmation>,
    ) -> Self {
        let (resources, logged) = (BTreeMap::new(), LoggedErrors::default());
        Self { path, confirmations, resources, is_written: false, confirmed_at: None, status, logged }
    }

    /// The file has this policy.
    pub(crate) fn set_written(&mut self, resources: BTreeMap<Key, StoredResource>) {
        (self.resources, self.is_written) = (resources, true);
    }

    /// The policy of the file isn't used; the next update replaces it.
    pub(super) fn discard(&mut self) {
        (self.resources, self.is_written) = (BTreeMap::new(), false);
    }

    /// Stores what is confirmed until the sender is dropped; then what isn't stored yet, once.
    pub(crate) async fn run(mut self, store: Store) {
        while self.wait().await {
            let pause = self.store(&store).await;
            // Ends with the sender.
            let _ = timeout(pause, self.receive_all()).await;
        }
        self.store(&store).await;
    }

    /// Receives all that has arrived; waits until there is something to store. False: the sender is dropped.
    async fn wait(&mut self) -> bool {
        loop {
            match self.confirmations.try_recv() {
                Ok(confirmation) => self.confirm(confirmation),
                Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) if self.confirmed_at.is_some() => return true,
                Err(TryRecvError::Empty) => match self.confirmations.recv().await {
                    Some(confirmation) => self.confirm(confirmation),
                    None => return false,
                },
            }
        }
    }

    async fn receive_all(&mut self) {
        while let Some(confirmation) = self.confirmations.recv().await {
            self.confirm(confirmation);
        }
    }

    fn confirm(&mut self, Confirmation { changed, at }: Confirmation) {
        for (key, resource) in changed {
            self.is_written &= self.resources.get(&key) == resource.as_ref();
            match resource {
                Some(resource) => drop(self.resources.insert(key, resource)),
                None => drop(self.resources.remove(&key)),
            }
        }
        self.confirmed_at = Some(at);
    }

    /// Stores what isn't stored; returns how long the disk is left alone after that.
    async fn store(&mut self, store: &Store) -> Duration {
        let Some(confirmed_at) = self.confirmed_at.take() else { return WRITE_INTERVAL };
        let content = (!self.is_written).then(|| encode(&self.resources));
        let pause = interval(content.as_ref().map_or(0, Vec::len));
        // What changes from here on is for the next write.
        self.is_written = true;
        let store = store.clone();
        let outcome = self.receive_during(spawn_blocking(move || store(content, confirmed_at))).await;
        let error = outcome.err().map(|error| error.to_string());
        let is_stored = error.is_none();
        if !is_stored {
            self.is_written = false;
            self.confirmed_at = self.confirmed_at.or(Some(confirmed_at));
        }
        self.report(error);
        if is_stored { pause } else { pause.max(RETRY_INTERVAL) }
    }

    /// Waits for the disk. What arrives meanwhile is received: nothing piles up while the disk hangs.
    async fn receive_during(&mut self, mut write: Blocking<io::Result<()>>) -> io::Result<()> {
        let mut slow = pin!(sleep(SLOW_WRITE));
        let (mut is_open, mut is_slow) = (true, false);
        loop {
            tokio::select! {
                outcome = &mut write => return outcome,
                confirmation = self.confirmations.recv(), if is_open => match confirmation {
                    Some(confirmation) => self.confirm(confirmation),
                    None => is_open = false,
                },
                () = &mut slow, if !is_slow => {
                    is_slow = true;
                    let limit = SLOW_WRITE.as_secs();
                    self.report(Some(format!("not written within {limit} s: the disk doesn't respond")));
                }
            }
        }
    }

    /// Shows why the file doesn't have what was confirmed; `None`: it has.
    fn report(&mut self, error: Option<String>) {
        let error = error.map(|error| format!("{}: {error}", self.path.display()));
        match &error {
            None => _ = self.logged.clear(),
            Some(error) if self.logged.is_new(error) => {
                tracing::error!(event = "policy_cache_failed", error, "the policy cache can't be written");
            }
            Some(_) => {}
        }
        ServerStatus::change(&self.status, |status| status.cache_error.clone_from(&error));
    }
}

/// Minimum time between two writes of so many bytes.
fn interval(bytes: usize) -> Duration {
    WRITE_INTERVAL.max(Duration::from_secs(bytes as u64 / BYTES_PER_SECOND))
}

#[cfg(test)]
mod tests;
