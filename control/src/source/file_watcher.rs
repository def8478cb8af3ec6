//! File watcher: reports changes of the content of manifest files and directories.
//!
//! inotify events trigger a scan at once. A scan every few seconds finds what events miss: symlinks swapped above a
//! watched directory, network file systems, lost events. Only content counts: a file that was touched, or replaced by
//! an identical one, is no change. Any event near a path triggers a scan of everything, so rename-over by editors,
//! directories that appear later and the `..data` symlink of a `ConfigMap` need no special case.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use vipgate_policy::fingerprint::Fingerprint;

use crate::privileges;
use crate::source::manifest_files::{ContentCache, Walk, walk};

/// A scan starts when there was no event for this long: the writer is done.
const DEBOUNCE_INTERVAL: Duration = Duration::from_millis(20);
/// Longest wait for [`DEBOUNCE_INTERVAL`], for writers that never pause.
const DEBOUNCE_TIMEOUT: Duration = Duration::from_millis(200);
/// Interval of scans without events.
const RESCAN_INTERVAL: Duration = Duration::from_secs(5);

/// State of the watched files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilesState {
    /// Fingerprint of their paths and content.
    pub fingerprint: u64,
    /// Number of files.
    pub files: usize,
}

/// Watches files. Create it before reading them: a change in between is reported.
#[derive(Debug)]
pub struct FileWatcher {
    paths: Vec<PathBuf>,
    last: FilesState,
    events: Arc<Notify>,
    watcher: Option<RecommendedWatcher>,
    watched: BTreeSet<PathBuf>,
    cache: ContentCache,
    rescan_interval: Duration,
}

impl FileWatcher {
    /// Scans the files; [`Self::changed`] compares with this state. If inotify is not available (the kernel limits
    /// instances and watches), it polls every few seconds.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let events = Arc::new(Notify::new());
        let notifier = events.clone();
        // The watcher's thread starts without capabilities.
        let watcher = privileges::run_unprivileged(|| {
            notify::recommended_watcher(move |event| {
                if may_change(&event) {
                    notifier.notify_one();
                }
            })
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "no file notifications: policy files are polled every {RESCAN_INTERVAL:?}");
        });
        let last = FilesState { fingerprint: 0, files: 0 };
        let mut watcher = Self {
            paths,
            last,
            events,
            watcher: watcher.ok(),
            watched: BTreeSet::new(),
            cache: ContentCache::default(),
            rescan_interval: RESCAN_INTERVAL,
        };
        // Watch before the scan: a change in between is an event.
        watcher.watch(&watch_directories(&watcher.paths, &walk(&watcher.paths)));
        watcher.last = scan(&walk(&watcher.paths), &mut watcher.cache);
        watcher
    }

    /// State at the last scan.
    pub fn last(&self) -> FilesState {
        self.last
    }

    /// Waits until the content of the files differs from the last state. Cancel safe.
    pub async fn changed(&mut self) -> FilesState {
        loop {
            if tokio::time::timeout(self.rescan_interval, self.events.notified()).await.is_ok() {
                self.wait_until_quiet().await;
            }
            let (paths, mut contents) = (self.paths.clone(), std::mem::take(&mut self.cache));
            let task = tokio::task::spawn_blocking(move || {
                let found = walk(&paths);
                let current = scan(&found, &mut contents);
                (watch_directories(&paths, &found), current, contents)
            });
            // If the task panicked or the runtime shuts down, the next scan starts with an empty cache.
            let Ok((directories, current, contents)) = task.await else { continue };
            self.cache = contents;
            if self.watch(&directories) || current != self.last {
                // Another scan finds what was written to a new directory before it was watched.
                self.events.notify_one();
            }
            if current != self.last {
                self.last = current;
                return current;
            }
        }
    }

    async fn wait_until_quiet(&self) {
        let deadline = Instant::now() + DEBOUNCE_TIMEOUT;
        while Instant::now() < deadline {
            let quiet = (Instant::now() + DEBOUNCE_INTERVAL).min(deadline);
            if timeout_at(quiet, self.events.notified()).await.is_err() {
                return;
            }
        }
    }

    /// Watches exactly these directories. Returns whether one of them is new.
    fn watch(&mut self, directories: &BTreeSet<PathBuf>) -> bool {
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
}

/// Whether an event may be a change: not a read. A scan causes read events itself, so reacting to them would loop.
fn may_change(event: &notify::Result<Event>) -> bool {
    let is_read = |kind| matches!(kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write));
    event.as_ref().map_or(true, |event| !is_read(event.kind))
}

/// The directories to watch for these paths, symlinks resolved.
fn watch_directories(paths: &[PathBuf], found: &Walk) -> BTreeSet<PathBuf> {
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

/// The current state of the files. For an unreadable file, the error counts as its content.
fn scan(found: &Walk, contents: &mut ContentCache) -> FilesState {
    let mut fingerprint = Fingerprint::default();
    for (path, error) in &found.errors {
        fingerprint.add(format!("{}\n{:?}\n", path.display(), error.kind()).as_bytes());
    }
    for path in &found.files {
        fingerprint.add(path.as_os_str().as_encoded_bytes());
        match contents.read(path) {
            Ok(content) => fingerprint.add(&content.fingerprint().to_le_bytes()),
            Err(error) => fingerprint.add(format!("\n{:?}\n", error.kind()).as_bytes()),
        }
    }
    contents.retain(&found.files);
    FilesState { fingerprint: fingerprint.finish(), files: found.files.len() }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, create_dir_all, remove_file, rename, write};
    use std::os::unix::fs::symlink;

    use tokio::time::timeout;

    use super::*;

    /// Far below [`RESCAN_INTERVAL`]: a change within it was found by an event.
    const EVENT_TIMEOUT: Duration = Duration::from_secs(2);

    async fn next(watcher: &mut FileWatcher) -> FilesState {
        timeout(EVENT_TIMEOUT, watcher.changed()).await.expect("a change")
    }

    #[tokio::test]
    async fn writes_renames_and_removals_are_reported_once_each() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        write(at("a.yaml"), "1").unwrap();
        let mut watcher = FileWatcher::new(vec![dir.path().to_owned()]);
        write(at("a.yaml"), "2").unwrap();
        let second = next(&mut watcher).await;
        write(at(".a.yaml.swp"), "3").unwrap();
        rename(at(".a.yaml.swp"), at("a.yaml")).unwrap();
        let third = next(&mut watcher).await;
        assert_ne!(second.fingerprint, third.fingerprint);
        create_dir(at("deep")).unwrap();
        write(at("deep/b.yaml"), "4").unwrap();
        assert_eq!(next(&mut watcher).await.files, 2);
        write(at("deep/b.yaml"), "5").unwrap();
        assert_eq!(next(&mut watcher).await.files, 2);
        remove_file(at("deep/b.yaml")).unwrap();
        assert_eq!(next(&mut watcher).await, third);
        // Other files and rewritten identical content are no change.
        write(at("notes.txt"), "x").unwrap();
        write(at("a.yaml"), "3").unwrap();
        assert!(timeout(Duration::from_millis(400), watcher.changed()).await.is_err());
    }

    #[tokio::test]
    async fn a_change_between_creation_and_the_first_wait_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let mut watcher = FileWatcher::new(vec![dir.path().to_owned()]);
        write(dir.path().join("a.yaml"), "1").unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(next(&mut watcher).await.files, 1);
    }

    #[tokio::test]
    async fn a_path_created_later_is_watched() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mut watcher = FileWatcher::new(vec![at("one/two/p.yaml"), at("three")]);
        create_dir_all(at("one/two")).unwrap();
        write(at("one/two/p.yaml"), "1").unwrap();
        while next(&mut watcher).await.files < 1 {}
        create_dir(at("three")).unwrap();
        write(at("three/q.yaml"), "1").unwrap();
        while next(&mut watcher).await.files < 2 {}
        write(at("one/two/p.yaml"), "2").unwrap();
        next(&mut watcher).await;
    }

    #[tokio::test]
    async fn a_directory_deleted_and_created_again_is_still_watched() {
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("policy");
        create_dir(&policy).unwrap();
        let mut watcher = FileWatcher::new(vec![policy.clone()]);
        for content in ["1", "2", "3"] {
            std::fs::remove_dir_all(&policy).unwrap();
            create_dir(&policy).unwrap();
            write(policy.join("a.yaml"), content).unwrap();
            while next(&mut watcher).await.files < 1 {}
            tokio::time::sleep(Duration::from_millis(50)).await;
            write(policy.join("a.yaml"), format!("{content} again")).unwrap();
            next(&mut watcher).await;
        }
    }

    #[tokio::test]
    async fn a_swapped_symlink_of_a_config_map_is_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (version, content) in [("..v1", "1"), ("..v2", "2")] {
            create_dir(at(version)).unwrap();
            write(at(version).join("p.yaml"), content).unwrap();
        }
        symlink("..v1", at("..data")).unwrap();
        symlink("..data/p.yaml", at("p.yaml")).unwrap();
        for paths in [vec![dir.path().to_owned()], vec![at("p.yaml")]] {
            let mut watcher = FileWatcher::new(paths);
            let before = watcher.last();
            let target = if std::fs::read_link(at("..data")).unwrap() == Path::new("..v1") { "..v2" } else { "..v1" };
            symlink(target, at("..data_tmp")).unwrap();
            rename(at("..data_tmp"), at("..data")).unwrap();
            let after = next(&mut watcher).await;
            assert_eq!((before.files, after.files), (1, 1));
        }
    }

    #[tokio::test]
    async fn changes_of_a_writer_that_never_pauses_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        let mut watcher = FileWatcher::new(vec![path.clone()]);
        let writer = tokio::task::spawn_blocking(move || {
            for i in 0..150 {
                write(&path, i.to_string()).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        next(&mut watcher).await;
        assert!(!writer.is_finished(), "reported only after the writer was done");
        writer.await.unwrap();
    }

    #[tokio::test]
    async fn a_scan_waits_for_a_quiet_interval_up_to_the_quiet_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let mut watcher = FileWatcher::new(vec![dir.path().to_owned()]);
        (watcher.watcher, watcher.events) = (None, Arc::default());
        let start = Instant::now();
        watcher.wait_until_quiet().await;
        assert!(start.elapsed() >= DEBOUNCE_INTERVAL, "a writer may have written half a file");
        // Events without a pause: the wait ends at the timeout.
        let notifier = watcher.events.clone();
        let writer = tokio::spawn(async move {
            loop {
                notifier.notify_one();
                tokio::task::yield_now().await;
            }
        });
        let start = Instant::now();
        watcher.wait_until_quiet().await;
        let waited = start.elapsed();
        writer.abort();
        assert!(waited >= DEBOUNCE_TIMEOUT && waited < RESCAN_INTERVAL, "{waited:?}");
    }

    #[test]
    fn read_events_are_ignored_and_write_events_are_not() {
        let event = |kind| may_change(&Ok(Event::new(kind)));
        assert!(!event(EventKind::Access(AccessKind::Read)));
        assert!(!event(EventKind::Access(AccessKind::Open(AccessMode::Read))));
        assert!(!event(EventKind::Access(AccessKind::Close(AccessMode::Read))));
        assert!(event(EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(event(EventKind::Create(notify::event::CreateKind::File)));
        assert!(event(EventKind::Any));
        assert!(may_change(&Err(notify::Error::generic("events were lost"))));
    }

    #[test]
    fn the_error_of_an_unreadable_file_counts_as_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let (missing, file) = (dir.path().join("missing"), dir.path().join("a.yaml"));
        write(&file, "1").unwrap();
        let state = |paths: &[PathBuf]| scan(&walk(paths), &mut ContentCache::default());
        let without = state(std::slice::from_ref(&file));
        let with = state(&[file.clone(), missing.clone()]);
        assert_eq!((without.files, with.files), (1, 1));
        assert_ne!(with.fingerprint, without.fingerprint);
        assert_ne!(with.fingerprint, state(&[file, dir.path().join("absent")]).fingerprint, "the path counts");
    }

    #[test]
    fn the_parents_of_each_path_and_of_each_symlink_target_are_watched() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().canonicalize().unwrap().join(name);
        create_dir_all(at("real/deep")).unwrap();
        create_dir(at("links")).unwrap();
        write(at("real/deep/p.yaml"), "1").unwrap();
        symlink(at("real/deep/p.yaml"), at("links/p.yaml")).unwrap();
        let watched = |path: PathBuf| -> Vec<PathBuf> {
            let paths = [path];
            watch_directories(&paths, &walk(&paths)).into_iter().collect()
        };
        assert_eq!(watched(at("links/p.yaml")), [at("links"), at("real/deep")]);
        assert_eq!(watched(at("real")), [at(""), at("real"), at("real/deep")].map(|it| it.canonicalize().unwrap()));
        // A missing path: its nearest ancestor that exists.
        assert_eq!(watched(at("real/later/p.yaml")), [at("real")]);
        let current = std::env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(watched(PathBuf::from("not-there.yaml")), [current], "a bare name is in the current directory");
    }

    #[tokio::test]
    async fn a_scan_does_not_trigger_another_scan() {
        // Two directories deep, so that other processes in /tmp don't disturb the test.
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("policy");
        create_dir(&policy).unwrap();
        write(policy.join("a.yaml"), "1").unwrap();
        let mut watcher = FileWatcher::new(vec![policy.clone()]);
        write(policy.join("a.yaml"), "2").unwrap();
        next(&mut watcher).await;
        // Events of the change itself are over by then.
        assert!(timeout(Duration::from_millis(500), watcher.changed()).await.is_err());
        scan(&walk(&watcher.paths), &mut ContentCache::default());
        assert!(timeout(Duration::from_millis(200), watcher.events.notified()).await.is_err());
        write(policy.join("a.yaml"), "2").unwrap();
        assert!(timeout(Duration::from_millis(200), watcher.events.notified()).await.is_ok());
    }

    #[tokio::test]
    async fn without_events_it_polls() {
        let dir = tempfile::tempdir().unwrap();
        let mut watcher = FileWatcher::new(vec![dir.path().to_owned()]);
        watcher.watcher = None;
        watcher.events = Arc::default();
        watcher.rescan_interval = Duration::from_millis(50);
        write(dir.path().join("a.yaml"), "1").unwrap();
        assert_eq!(next(&mut watcher).await.files, 1);
    }
}
