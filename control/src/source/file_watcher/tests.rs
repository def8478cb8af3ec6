use std::fs::{create_dir, create_dir_all, write};
use std::os::unix::fs::symlink;

use notify::event::{CreateKind, DataChange, RemoveKind, RenameMode};
use tokio::time::timeout;

use super::*;
use crate::source::manifest_files::walk;

fn event(kind: EventKind, path: &str) -> Event {
    Event::new(kind).add_path(path.into())
}

const WRITTEN: EventKind = EventKind::Modify(ModifyKind::Data(DataChange::Any));
const CLOSED: EventKind = EventKind::Access(AccessKind::Close(AccessMode::Write));
const CREATED: EventKind = EventKind::Create(CreateKind::File);
const REMOVED: EventKind = EventKind::Remove(RemoveKind::File);

#[test]
fn read_events_are_ignored_and_write_events_are_not() {
    let mut pending = Pending::default();
    let is_read = |kind| EventKind::Access(kind);
    for kind in [AccessKind::Read, AccessKind::Open(AccessMode::Any), AccessKind::Close(AccessMode::Read)] {
        assert!(!pending.add(&Ok(event(is_read(kind), "/d/a.yaml"))));
    }
    assert!(pending.is_empty());
    for kind in [CLOSED, CREATED, EventKind::Any] {
        assert!(pending.add(&Ok(event(kind, "/d/a.yaml"))));
    }
    assert!(!pending.all && pending.files == ["/d/a.yaml".into()].into());
    assert!(pending.add(&Err(notify::Error::generic("events were lost"))) && pending.all);
    let overflow = Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
    let mut pending = Pending::default();
    assert!(pending.add(&Ok(overflow)) && pending.all);
}

#[test]
fn only_files_that_may_be_half_written_delay_a_scan_for_long() {
    let interval = |events: &[(EventKind, &str)]| {
        let mut pending = Pending::default();
        for (kind, path) in events {
            assert!(pending.add(&Ok(event(*kind, path))));
        }
        pending.quiet_interval()
    };
    let renamed = |mode| EventKind::Modify(ModifyKind::Name(mode));
    let complete: [&[(EventKind, &str)]; 3] = [
        &[(WRITTEN, "/d/a"), (WRITTEN, "/d/a"), (CLOSED, "/d/a")],
        &[(renamed(RenameMode::To), "/d/a")],
        &[(CREATED, "/d/.a"), (WRITTEN, "/d/.a"), (CLOSED, "/d/.a"), (renamed(RenameMode::From), "/d/.a")],
    ];
    for events in complete {
        assert_eq!(interval(events), COMPLETE_INTERVAL, "{events:?}");
    }
    let incomplete: [&[(EventKind, &str)]; 4] = [
        &[(WRITTEN, "/d/a")],
        &[(WRITTEN, "/d/a"), (CLOSED, "/d/b")],
        &[(CLOSED, "/d/a"), (WRITTEN, "/d/a")],
        &[(REMOVED, "/d/a")],
    ];
    for events in incomplete {
        assert_eq!(interval(events), DEBOUNCE_INTERVAL, "{events:?}");
    }
}

#[test]
fn too_many_files_are_all_files() {
    let events = Events::default();
    for i in 0..MAX_SUSPECTS {
        events.add(&Ok(event(CLOSED, &format!("/d/{i}"))));
    }
    assert!(matches!(events.take(), Suspects::Files(files) if files.len() == MAX_SUSPECTS));
    for i in 0..=MAX_SUSPECTS {
        events.add(&Ok(event(CLOSED, &format!("/d/{i}"))));
    }
    assert_eq!(events.take(), Suspects::All);
    assert_eq!(events.take(), Suspects::All, "a scan was due");
}

#[tokio::test]
async fn a_scan_waits_for_a_quiet_interval_up_to_the_quiet_timeout() {
    let mut watcher = FileWatcher::new();
    watcher.events.add(&Ok(event(WRITTEN, "/d/a")));
    let start = Instant::now();
    assert!(matches!(watcher.next().await, Suspects::Files(_)));
    assert!(start.elapsed() >= DEBOUNCE_INTERVAL, "a writer may have written half a file");
    // Events without a pause: the wait ends at the timeout.
    let notifier = watcher.events.clone();
    let writer = tokio::spawn(async move {
        loop {
            notifier.add(&Ok(event(WRITTEN, "/d/a")));
            tokio::task::yield_now().await;
        }
    });
    let start = Instant::now();
    watcher.next().await;
    let waited = start.elapsed();
    writer.abort();
    assert!(waited >= DEBOUNCE_TIMEOUT && waited < RESCAN_INTERVAL, "{waited:?}");
}

/// The wait for the end of writing may be cut short by another event of its owner.
#[tokio::test]
async fn a_cancelled_wait_loses_no_event() {
    let mut watcher = FileWatcher::new();
    watcher.events.add(&Ok(event(WRITTEN, "/d/a")));
    assert!(timeout(DEBOUNCE_INTERVAL / 4, watcher.next()).await.is_err());
    let suspects = timeout(RESCAN_INTERVAL / 2, watcher.next()).await;
    assert_eq!(suspects, Ok(Suspects::Files(["/d/a".into()].into())));
}

#[tokio::test]
async fn without_events_it_polls() {
    let mut watcher = FileWatcher { rescan_interval: Duration::from_millis(50), ..FileWatcher::new() };
    assert_eq!(timeout(Duration::from_secs(2), watcher.next()).await, Ok(Suspects::All));
}

#[test]
fn failed_reads_are_tried_again_soon_and_then_less_often() {
    let mut watcher = FileWatcher::new();
    // The clock goes on meanwhile.
    let is_due_after = |watcher: &FileWatcher, milliseconds: u64, before: Instant| {
        let (delay, expected) = (watcher.retry_at.unwrap() - before, Duration::from_millis(milliseconds));
        expected <= delay && delay < 2 * expected
    };
    for expected in [200, 400, 800, 1600, 3200, 5000, 5000] {
        let before = Instant::now();
        watcher.note_reads(true, true);
        assert!(is_due_after(&watcher, expected, before), "{expected} ms: {watcher:?}");
    }
    watcher.note_reads(false, false);
    assert!(watcher.retry_at.is_some(), "other files can be read: the scan is still due");
    watcher.note_reads(false, true);
    assert_eq!(watcher.retry_at, None);
    let before = Instant::now();
    watcher.note_reads(true, false);
    let first = watcher.retry_at;
    watcher.note_reads(true, false);
    assert!(is_due_after(&watcher, 200, before) && watcher.retry_at == first, "a file is no scan");
}

#[tokio::test]
async fn events_do_not_delay_the_scan_after_failed_reads() {
    let mut watcher = FileWatcher::new();
    watcher.note_reads(true, true);
    let start = Instant::now();
    let mut scans = 0;
    while scans == 0 && start.elapsed() < RESCAN_INTERVAL / 2 {
        watcher.events.add(&Ok(event(CLOSED, "/d/a")));
        scans += u32::from(watcher.next().await == Suspects::All);
    }
    assert!(scans == 1 && start.elapsed() >= RETRY_INTERVAL, "{:?}", start.elapsed());
}

#[tokio::test]
async fn notifications_that_could_not_be_started_are_started_later() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().canonicalize().unwrap();
    let mut watcher = FileWatcher { watcher: None, ..FileWatcher::new() };
    assert!(watcher.watch(&[directory.clone()].into()), "what was written before is no event");
    write(directory.join("a.yaml"), "1").unwrap();
    let suspects = timeout(RESCAN_INTERVAL / 2, watcher.next()).await;
    assert_eq!(suspects, Ok(Suspects::Files([directory.join("a.yaml")].into())));
    // Each start without a thread costs a descriptor.
    let refused_threads = MAX_REFUSED_THREADS;
    let mut watcher = FileWatcher { watcher: None, refused_threads, ..FileWatcher::new() };
    assert!(!watcher.watch(&[directory].into()));
}

/// As notify's when the kernel has refused its thread.
struct WithoutThread;

impl Watcher for WithoutThread {
    fn new<F: notify::EventHandler>(_: F, _: Config) -> notify::Result<Self> {
        Ok(Self)
    }

    fn watch(&mut self, _: &Path, _: RecursiveMode) -> notify::Result<()> {
        panic!("watched without a thread")
    }

    fn unwatch(&mut self, _: &Path) -> notify::Result<()> {
        panic!("unwatched without a thread")
    }

    fn configure(&mut self, _: Config) -> notify::Result<bool> {
        Err(notify::Error::generic("internal channel disconnect"))
    }

    fn kind() -> notify::WatcherKind {
        notify::WatcherKind::Inotify
    }
}

impl Drop for WithoutThread {
    fn drop(&mut self) {
        panic!("dropped without a thread");
    }
}

#[test]
fn a_watcher_without_its_thread_is_an_error() {
    assert!(running(WithoutThread).is_err());
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
