//! File watcher: which manifest files may have changed.
//!
//! inotify events name files; what they mean for the policy is decided by reading ([`FileReader`](super::files)). A full
//! scan every few seconds finds what events miss: symlinks swapped above a watched directory, network file systems, lost
//! events.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{Config, Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use vipgate_common::Backoff;

use crate::privileges;
use crate::source::manifest_files::Walk;

/// Wait without events while a file is being written or something was created or removed: the writer is done.
const DEBOUNCE_INTERVAL: Duration = Duration::from_millis(20);
/// The same if every changed file was closed by its writer or renamed into place: none is half written. Files that a
/// writer changes together, with less than this between two of them, are one update.
const COMPLETE_INTERVAL: Duration = Duration::from_millis(10);
/// Longest wait for both, for writers that never pause.
const DEBOUNCE_TIMEOUT: Duration = Duration::from_millis(200);
/// Interval of scans without events.
const RESCAN_INTERVAL: Duration = Duration::from_secs(5);
/// The same after failed reads, at first.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// How often notifications are started without getting their thread: each time a file descriptor is lost.
const MAX_REFUSED_THREADS: u32 = 8;
/// Maximum number of files that are read one by one; of more, all are.
const MAX_SUSPECTS: usize = 256;

/// The files that may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suspects {
    /// Any file, and the directories themselves.
    All,
    /// Files in watched directories, by the paths of those as they were watched. Other files are as before.
    Files(BTreeSet<PathBuf>),
}

/// Watches directories.
#[derive(Debug)]
pub struct FileWatcher {
    events: Arc<Events>,
    /// `None`: not started yet.
    watcher: Option<RecommendedWatcher>,
    /// How often it has got no thread.
    refused_threads: u32,
    watched: BTreeSet<PathBuf>,
    rescan_interval: Duration,
    /// When to read again what couldn't be read.
    retry_at: Option<Instant>,
    /// Delay of the next scan after one with failed reads.
    backoff: Backoff,
}

/// Events since the last call of [`FileWatcher::next`].
#[derive(Debug, Default)]
struct Events {
    arrived: Notify,
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    /// Whether anything may have changed.
    all: bool,
    files: BTreeSet<PathBuf>,
    /// The files that may be half written.
    incomplete: HashSet<PathBuf>,
}

impl FileWatcher {
    /// A watcher without directories. While inotify is not available (the kernel limits instances and watches), it polls
    /// every few seconds.
    pub fn new() -> Self {
        let mut watcher = Self {
            events: Arc::default(),
            watcher: None,
            refused_threads: 0,
            watched: BTreeSet::new(),
            rescan_interval: RESCAN_INTERVAL,
            retry_at: None,
            backoff: Backoff::new((RETRY_INTERVAL, RESCAN_INTERVAL)),
        };
        if let Err(error) = watcher.start() {
            tracing::warn!(%error, "no file notifications yet: policy files are polled every {RESCAN_INTERVAL:?}");
        }
        watcher
    }

    /// Starts notifications.
    fn start(&mut self) -> notify::Result<()> {
        let receiver = self.events.clone();
        // The watcher's thread starts without capabilities.
        let watcher = privileges::run_unprivileged(|| notify::recommended_watcher(move |event| receiver.add(&event)))?;
        self.watcher = Some(running(watcher).inspect_err(|_| self.refused_threads += 1)?);
        Ok(())
    }

    /// Watches exactly these directories. Returns whether one of them is new: what was written to it before is no event.
    pub fn watch(&mut self, directories: &BTreeSet<PathBuf>) -> bool {
        let is_missing = self.watcher.is_none() && self.refused_threads < MAX_REFUSED_THREADS;
        if is_missing && self.start().is_ok() {
            tracing::info!("file notifications have started");
        }
        let Some(watcher) = &mut self.watcher else { return false };
        for removed in self.watched.difference(directories) {
            // Fails if the directory was deleted: the kernel has removed its watch already.
            let _ = watcher.unwatch(removed);
        }
        // All of them again: a directory that was deleted and created again has lost its watch. A failure is retried by
        // the next scan.
        let watch = |directory: &&PathBuf| watcher.watch(directory, RecursiveMode::NonRecursive).is_ok();
        let watched: BTreeSet<PathBuf> = directories.iter().filter(watch).cloned().collect();
        let has_new = !watched.is_subset(&self.watched);
        self.watched = watched;
        has_new
    }

    /// Requests a full scan, as if anything had changed.
    pub fn request_scan(&self) {
        self.events.pending().all = true;
        self.events.arrived.notify_one();
    }

    /// Notes whether reads have failed, of a scan or of single files. Then the next scan is due soon, also while events
    /// arrive, and later each time that it fails.
    pub fn note_reads(&mut self, have_failed: bool, is_scan: bool) {
        if is_scan {
            self.retry_at = have_failed.then(|| Instant::now() + self.backoff.next_delay());
            if !have_failed {
                self.backoff.reset();
            }
        } else if have_failed && self.retry_at.is_none() {
            self.retry_at = Some(Instant::now() + self.backoff.peek());
        }
    }

    /// Waits for events and the end of writing, or until the next scan is due. Cancel safe.
    pub async fn next(&mut self) -> Suspects {
        let rescan_at = Instant::now() + self.rescan_interval;
        let scan_at = self.retry_at.map_or(rescan_at, |retry_at| retry_at.min(rescan_at));
        if !self.events.pending().is_empty() || timeout_at(scan_at, self.events.arrived.notified()).await.is_ok() {
            self.wait_until_quiet().await;
        }
        let suspects = self.events.take();
        if self.retry_at.is_some_and(|retry_at| retry_at <= Instant::now()) { Suspects::All } else { suspects }
    }

    async fn wait_until_quiet(&self) {
        let deadline = Instant::now() + DEBOUNCE_TIMEOUT;
        while Instant::now() < deadline {
            let quiet = (Instant::now() + self.events.pending().quiet_interval()).min(deadline);
            if timeout_at(quiet, self.events.arrived.notified()).await.is_err() {
                return;
            }
        }
    }
}

/// A watcher that has its thread. Without one, any other call panics, even the drop.
fn running<W: Watcher>(mut watcher: W) -> notify::Result<W> {
    match watcher.configure(Config::default()) {
        Ok(_) => Ok(watcher),
        Err(error) => {
            std::mem::forget(watcher);
            Err(error)
        }
    }
}

impl Default for FileWatcher {
    fn default() -> Self {
        Self::new()
    }
}

impl Events {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, event: &notify::Result<Event>) {
        if self.pending().add(event) {
            self.arrived.notify_one();
        }
    }

    /// Everything so far; nothing: a scan was due.
    fn take(&self) -> Suspects {
        let Pending { all, files, .. } = std::mem::take(&mut *self.pending());
        if all || files.is_empty() { Suspects::All } else { Suspects::Files(files) }
    }
}

impl Pending {
    fn is_empty(&self) -> bool {
        !self.all && self.files.is_empty()
    }

    fn quiet_interval(&self) -> Duration {
        if self.all || !self.incomplete.is_empty() { DEBOUNCE_INTERVAL } else { COMPLETE_INTERVAL }
    }

    /// Adds an event; returns whether it may be a change.
    fn add(&mut self, event: &notify::Result<Event>) -> bool {
        let event = match event {
            Ok(event) if is_read(event.kind) => return false,
            Ok(event) if !event.need_rescan() && !event.paths.is_empty() => event,
            _ => {
                self.all = true;
                return true;
            }
        };
        for path in &event.paths {
            self.files.insert(path.clone());
            match event.kind {
                EventKind::Access(_) | EventKind::Modify(ModifyKind::Name(_)) => drop(self.incomplete.remove(path)),
                EventKind::Modify(ModifyKind::Metadata(_)) => {}
                _ => drop(self.incomplete.insert(path.clone())),
            }
        }
        self.all |= self.files.len() > MAX_SUSPECTS;
        true
    }
}

/// Whether an event is a read. A scan causes read events itself, so reacting to them would loop.
fn is_read(kind: EventKind) -> bool {
    matches!(kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write))
}

/// The directories to watch for these paths, symlinks resolved.
pub(super) fn watch_directories(paths: &[PathBuf], found: &Walk) -> BTreeSet<PathBuf> {
    let mut directories = BTreeSet::new();
    // Paths that are not symlinks are in one of `found.directories`.
    for path in paths.iter().chain(&found.links) {
        // Its parent, or the nearest ancestor that exists.
        let parent = path.ancestors().skip(1).find(|ancestor| ancestor.is_dir());
        add(&mut directories, parent.filter(|parent| *parent != Path::new("")).unwrap_or(Path::new(".")));
        if let Ok(target) = path.canonicalize() {
            target.parent().into_iter().for_each(|parent| add(&mut directories, parent));
        }
    }
    found.directories.iter().for_each(|directory| add(&mut directories, directory));
    directories
}

fn add(directories: &mut BTreeSet<PathBuf>, directory: &Path) {
    directories.extend(directory.canonicalize());
}

#[cfg(test)]
mod tests;
