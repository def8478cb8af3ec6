//! Tests of the writer: when it writes, what, and what it reports if the disk fails or hangs.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, mpsc as blocking};
use std::time::Instant;

use proptest::prelude::*;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use vipgate_coverage::property;

use super::*;
use crate::xds::cache::{Cache, CacheContents, read};
use crate::xds::fixtures::key;
use crate::xds::resource::Kind;

type State = BTreeMap<Key, StoredResource>;
type Changes = Vec<(Key, Option<StoredResource>)>;

/// Timeout of each step, with a margin for slow machines.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A running writer, and what was confirmed.
struct Running {
    confirmations: mpsc::UnboundedSender<Confirmation>,
    status: Arc<ArcSwap<ServerStatus>>,
    task: JoinHandle<()>,
    state: State,
    confirmed_at: SystemTime,
}

impl Running {
    fn start(path: &Path, written: Option<State>, store: Store) -> Self {
        let status = Arc::new(ArcSwap::from_pointee(ServerStatus {
            connected: true,
            since: SystemTime::UNIX_EPOCH,
            error: None,
            confirmed_at: None,
            cache_error: None,
        }));
        let (confirmations, received) = mpsc::unbounded_channel();
        let mut writer = CacheWriter::new(path.to_owned(), status.clone(), received);
        let state = written.clone().unwrap_or_default();
        if let Some(written) = written {
            writer.set_written(written);
        }
        let task = tokio::spawn(writer.run(store));
        // Whole seconds, which every file system stores.
        let confirmed_at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        Self { confirmations, status, task, state, confirmed_at }
    }

    /// With the cache at this path.
    fn open(path: &Path) -> (Self, CacheContents) {
        let (cache, contents) = Cache::open(path).unwrap();
        let written = match &contents {
            CacheContents::Policy(resources, _) => Some(resources.clone()),
            _ => None,
        };
        (Self::start(path, written, store_at(path.to_owned(), Some(cache))), contents)
    }

    /// An acknowledged update; without changes, only a confirmation.
    fn confirm(&mut self, changed: Changes) {
        for (key, resource) in changed.clone() {
            match resource {
                Some(resource) => drop(self.state.insert(key, resource)),
                None => drop(self.state.remove(&key)),
            }
        }
        self.confirmed_at += Duration::from_secs(1);
        self.confirmations.send(Confirmation { changed, at: self.confirmed_at }).unwrap();
    }

    /// The same with two resources of this version.
    fn update(&mut self, version: u64) {
        self.confirm(["a", "b"].map(|name| (endpoint(name), Some(resource(version)))).into());
    }

    fn error(&self) -> Option<String> {
        self.status.load().cache_error.clone()
    }

    /// Drops the sender and waits for the end; returns what was confirmed.
    async fn stop(self) -> State {
        drop(self.confirmations);
        timeout(TEST_TIMEOUT, self.task).await.expect("it ends").unwrap();
        self.state
    }
}

/// Stores in the cache at this path, which is opened now.
fn opened(path: &Path) -> Store {
    store_at(path.to_owned(), Some(Cache::open(path).unwrap().0))
}

fn endpoint(name: &str) -> Key {
    key(Kind::Endpoint, name)
}

fn resource(version: u64) -> StoredResource {
    StoredResource { version: version.to_string(), body: version.to_le_bytes().to_vec().into() }
}

fn temp_path() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.cache");
    (dir, path)
}

async fn wait_until(mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TEST_TIMEOUT, wait).await.expect("in time");
}

fn file_has(path: &Path, state: &State) -> bool {
    matches!(read(path), Ok(CacheContents::Policy(resources, _)) if resources == *state)
}

/// The version of both resources in a cache.
fn version(contents: &CacheContents) -> u64 {
    let CacheContents::Policy(resources, _) = contents else { panic!("no policy: {contents:?}") };
    assert_eq!(resources.len(), 2, "{resources:?}");
    let versions: Vec<u64> = resources.values().map(|resource| resource.version.parse().unwrap()).collect();
    assert_eq!(versions[0], versions[1], "a mix of two states");
    versions[0]
}

fn version_at(path: &Path) -> u64 {
    version(&read(path).unwrap())
}

/// What is in the file after a write.
struct Written {
    begin: Instant,
    contents: CacheContents,
    /// The version of the last update that was sent by then.
    sent: u64,
}

#[tokio::test]
async fn many_changes_in_a_second_are_one_write_of_the_last_state() {
    let (_dir, path) = temp_path();
    let store = opened(&path);
    let (sent, writes) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::<Written>::new())));
    let recorded: Store = Arc::new({
        let (path, sent, writes) = (path.clone(), sent.clone(), writes.clone());
        move |content: Option<Vec<u8>>, at: SystemTime| {
            let begin = Instant::now();
            store(content, at)?;
            let (contents, sent) = (read(&path)?, sent.load(Ordering::SeqCst));
            writes.lock().unwrap().push(Written { begin, contents, sent });
            Ok(())
        }
    });
    let mut running = Running::start(&path, None, recorded);
    let started = Instant::now();
    for number in 1..=1500 {
        sent.store(number, Ordering::SeqCst);
        running.update(number);
        sleep(Duration::from_millis(1)).await;
    }
    wait_until(|| file_has(&path, &running.state)).await;
    // Nothing more is written.
    sleep(WRITE_INTERVAL + Duration::from_millis(200)).await;
    let elapsed = started.elapsed();
    assert_eq!((version_at(&path), running.error()), (1500, None));
    running.stop().await;
    let writes = std::mem::take(&mut *writes.lock().unwrap());
    assert!(writes.len() as u64 <= 2 + elapsed.as_secs(), "{} writes in {elapsed:?}", writes.len());
    for Written { contents, sent, .. } in &writes {
        assert!(version(contents) <= *sent, "newer than what was acknowledged");
    }
    for pair in writes.windows(2) {
        let interval = pair[1].begin - pair[0].begin;
        assert!(interval >= WRITE_INTERVAL, "{interval:?}");
        assert!(version(&pair[1].contents) > version(&pair[0].contents), "the same or an older state");
    }
}

#[test]
fn a_large_policy_is_written_less_often() {
    let mib = |size: usize| interval(size << 20);
    assert_eq!([mib(0), mib(2), mib(6), mib(30)], [1, 1, 2, 10].map(Duration::from_secs));
    assert!(interval(100_000_000) >= Duration::from_secs(30), "{:?}", interval(100_000_000));
}

/// Takes 2 s, the interval of a policy with this size.
#[tokio::test]
async fn changes_of_a_large_policy_wait_for_its_interval_and_a_stop_does_not() {
    let (_dir, path) = temp_path();
    let writes = Arc::new(Mutex::new(Vec::<Instant>::new()));
    let recorded: Store = Arc::new({
        let writes = writes.clone();
        move |content: Option<Vec<u8>>, _: SystemTime| {
            assert!(content.is_some());
            writes.lock().unwrap().push(Instant::now());
            Ok(())
        }
    });
    let (mut running, size) = (Running::start(&path, None, recorded), 7 << 20);
    let count = || writes.lock().unwrap().len();
    let large = StoredResource { version: "1".to_owned(), body: vec![0; size].into() };
    running.confirm(vec![(endpoint("a"), Some(large))]);
    wait_until(|| count() == 1).await;
    for version in 2..=4 {
        running.confirm(vec![(endpoint("b"), Some(resource(version)))]);
    }
    wait_until(|| count() == 2).await;
    let elapsed = {
        let writes = writes.lock().unwrap();
        writes[1] - writes[0]
    };
    assert!(elapsed >= interval(size), "{elapsed:?}");
    running.confirm(vec![(endpoint("b"), Some(resource(5)))]);
    let stopped = Instant::now();
    running.stop().await;
    assert!(stopped.elapsed() < interval(size) && count() == 3, "{} after {:?}", count(), stopped.elapsed());
}

/// A server that is reached again sends what is known.
#[tokio::test]
async fn what_is_stored_already_is_not_written_again() {
    let (_dir, path) = temp_path();
    let mut running = Running::open(&path).0;
    running.update(1);
    wait_until(|| file_has(&path, &running.state)).await;
    let inode = || fs::metadata(&path).unwrap().ino();
    let before = inode();
    running.update(1);
    let state = running.stop().await;
    assert!(file_has(&path, &state) && inode() == before);
}

#[tokio::test]
async fn the_first_change_is_written_at_once_and_the_last_one_at_the_end() {
    let (_dir, path) = temp_path();
    let mut running = Running::open(&path).0;
    running.update(1);
    wait_until(|| file_has(&path, &running.state)).await;
    let started = Instant::now();
    running.update(2);
    running.update(3);
    running.stop().await;
    // Without waiting for the interval.
    assert!(started.elapsed() < WRITE_INTERVAL, "{:?}", started.elapsed());
    assert_eq!(version_at(&path), 3);
}

/// Takes 5 s, the interval of retries.
#[tokio::test]
async fn a_confirmation_changes_only_the_time_of_the_file() {
    let (_dir, path) = temp_path();
    let mut running = Running::open(&path).0;
    running.update(1);
    wait_until(|| file_has(&path, &running.state)).await;
    let inode = || fs::metadata(&path).unwrap().ino();
    let before = inode();
    running.confirm(vec![]);
    let expected = CacheContents::Policy(running.state.clone(), running.confirmed_at);
    wait_until(|| read(&path).unwrap() == expected).await;
    assert_eq!(inode(), before, "it was written again");
    // One that was removed is written again.
    fs::remove_file(&path).unwrap();
    running.confirm(vec![]);
    wait_until(|| file_has(&path, &running.state)).await;
    wait_until(|| running.error().is_none()).await;
    running.stop().await;
}

#[tokio::test]
async fn nothing_is_written_before_an_update() {
    let (_dir, path) = temp_path();
    fs::write(&path, "damaged").unwrap();
    Running::open(&path).0.stop().await;
    assert_eq!(fs::read(&path).unwrap(), b"damaged");
    // An update without changes is one: the policy may be empty.
    let mut running = Running::open(&path).0;
    running.confirm(vec![]);
    running.stop().await;
    assert!(file_has(&path, &State::new()));
}

/// Takes 5 s, the interval of retries.
#[tokio::test]
async fn a_failed_write_is_reported_and_repeated_with_the_newest_state() {
    let (_dir, path) = temp_path();
    let (store, is_full) = (opened(&path), Arc::new(AtomicBool::new(true)));
    let failing: Store = Arc::new({
        let is_full = is_full.clone();
        move |content: Option<Vec<u8>>, at: SystemTime| {
            if is_full.load(Ordering::SeqCst) { Err(io::Error::other("no space")) } else { store(content, at) }
        }
    });
    let mut running = Running::start(&path, None, failing);
    running.update(1);
    wait_until(|| running.error().is_some()).await;
    assert_eq!(running.error(), Some(format!("{}: no space", path.display())));
    running.update(2);
    is_full.store(false, Ordering::SeqCst);
    wait_until(|| running.error().is_none()).await;
    assert_eq!(version_at(&path), 2);
    // At the end it is tried once more.
    is_full.store(true, Ordering::SeqCst);
    running.update(3);
    wait_until(|| running.error().is_some()).await;
    is_full.store(false, Ordering::SeqCst);
    running.stop().await;
    assert_eq!(version_at(&path), 3);
}

/// Takes 5 s, the interval of retries.
#[tokio::test]
async fn a_cache_that_could_not_be_opened_is_opened_by_a_write() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("state");
    let path = directory.join("policy.cache");
    fs::write(&directory, "in the way").unwrap();
    Cache::open(&path).unwrap_err();
    let mut running = Running::start(&path, None, store_at(path.clone(), None));
    running.update(1);
    wait_until(|| running.error().is_some()).await;
    let error = running.error().unwrap();
    assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
    running.update(2);
    fs::remove_file(&directory).unwrap();
    wait_until(|| running.error().is_none()).await;
    assert_eq!(version_at(&path), 2);
    // From then on it is this process's.
    assert!(Cache::open_later(&path).unwrap_err().to_string().contains("in use by another process"));
    running.update(3);
    running.stop().await;
    assert_eq!(version_at(&path), 3);
}

/// Neither is anything written where there can't be a cache.
#[tokio::test]
async fn a_cache_that_is_not_opened_is_not_written() {
    let (_dir, path) = temp_path();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut running = Running::start(&path, None, store_at(path.clone(), None));
    running.update(1);
    let status = running.status.clone();
    running.stop().await;
    let expected = format!("{}: it is a pipe, not a regular file", path.display());
    assert_eq!(status.load().cache_error.as_deref(), Some(&*expected));
    assert!(!fs::metadata(&path).unwrap().is_file(), "the pipe is still there");
    // Another gateway's cache.
    fs::remove_file(&path).unwrap();
    let mut owner = Running::open(&path).0;
    owner.update(1);
    wait_until(|| file_has(&path, &owner.state)).await;
    let mut running = Running::start(&path, None, store_at(path.clone(), None));
    running.update(2);
    let (status, started) = (running.status.clone(), Instant::now());
    running.stop().await;
    let expected = format!("{}: is in use by another process: each gateway needs its own", path.display());
    assert_eq!((status.load().cache_error.as_deref(), version_at(&path)), (Some(&*expected), 1));
    assert!(started.elapsed() < Duration::from_secs(2), "it doesn't wait for the lock: {:?}", started.elapsed());
    owner.stop().await;
}

/// Takes 5 s, the time after which a write is reported.
#[tokio::test]
async fn a_hanging_disk_is_reported_and_delays_nothing() {
    let (_dir, path) = temp_path();
    let store = opened(&path);
    let (release, released) = blocking::channel::<()>();
    let released = Mutex::new(released);
    let hanging: Store = Arc::new(move |content: Option<Vec<u8>>, at: SystemTime| {
        // Ends when the sender is dropped.
        let _ = released.lock().unwrap().recv();
        store(content, at)
    });
    let mut running = Running::start(&path, None, hanging);
    running.update(1);
    wait_until(|| running.error().is_some()).await;
    let expected = format!("{}: not written within 5 s: the disk doesn't respond", path.display());
    assert_eq!(running.error(), Some(expected));
    assert!(!path.exists());
    for number in 2..=1000 {
        running.update(number);
    }
    drop(release);
    wait_until(|| file_has(&path, &running.state)).await;
    wait_until(|| running.error().is_none()).await;
    running.stop().await;
}

fn changes() -> impl Strategy<Value = Changes> {
    let kind = prop::sample::select(Kind::ALL.to_vec());
    let value = prop::option::weighted(0.7, ("[0-9a-f]{0,16}", prop::collection::vec(any::<u8>(), 0..40)));
    // Few names, so that keys repeat; sometimes any other.
    let name = prop_oneof![4 => "[ab]", 1 => "\\PC{0,3}"];
    let change = (kind, name, value).prop_map(|(kind, name, value)| {
        (key(kind, &name), value.map(|(version, body)| StoredResource { version, body: body.into() }))
    });
    prop::collection::vec(change, 0..6)
}

#[test]
fn a_restart_has_exactly_what_was_acknowledged() {
    let classes = ["new", "changed", "removed", "unknown", "no change", "reopened"];
    let updates = prop::collection::vec((changes(), any::<bool>()), 1..8);
    property(ProptestConfig::with_cases(64), &updates, &classes, |updates, coverage| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (_dir, path) = temp_path();
        runtime.block_on(async {
            let (mut running, initial) = Running::open(&path);
            prop_assert_eq!(initial, CacheContents::Empty);
            for (changes, reopens) in updates {
                coverage.add("no change", u64::from(changes.is_empty()));
                for (key, resource) in &changes {
                    coverage.count(match (running.state.contains_key(key), resource.is_some()) {
                        (false, true) => "new",
                        (true, true) => "changed",
                        (true, false) => "removed",
                        (false, false) => "unknown",
                    });
                }
                running.confirm(changes);
                if reopens {
                    let confirmed_at = running.confirmed_at;
                    let state = running.stop().await;
                    coverage.add("reopened", u64::from(!state.is_empty()));
                    let (reopened, contents) = Running::open(&path);
                    prop_assert_eq!(contents, CacheContents::Policy(state, confirmed_at));
                    running = reopened;
                }
            }
            let state = running.stop().await;
            prop_assert!(file_has(&path, &state));
            Ok(())
        })
    });
}
