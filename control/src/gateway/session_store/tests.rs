//! Migration of stored sessions to other numbers of workers and capacities: no crash loses sessions.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tempfile::TempDir;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::session::Draft;
use vipgate_dataplane::session::persistence::open_former;

use super::migrate::prepare;
use super::*;

const BOOT: [u8; 16] = [3; 16];
const CAPACITY: u32 = 100;
const SESSIONS: u16 = 90;

fn target(directory: &Path, workers: u32, capacity: u32) -> MigrationTarget<'_> {
    let keys = (0..workers).map(|n| HashKey::new([1, 2, 3, n.into()])).collect();
    MigrationTarget { directory, boot: BOOT, workers, capacity, timeouts: Timeouts::default(), keys, now: Tick(5_000) }
}

/// Session `n`, identified by its port.
fn draft(n: u16) -> Draft<u32> {
    let origin = Tuple { source: 0x0a00_0001, destination: 9, source_port: n, destination_port: 53, protocol: 17 };
    Draft {
        origin,
        translated: Tuple { source: 0xc000_0201, source_port: 1024 + 64 * n, ..origin },
        direction: Direction::Egress,
        reply_direction: Direction::Reply,
        origin_side: 1,
        reply_side: 2,
        next_hop: None,
        generation: 3,
    }
}

/// Writes the files of a process with that many workers.
fn write_tables(directory: &Path, workers: u32) {
    for worker in 0..workers {
        let region = Region::open(&worker_file(directory, worker)).unwrap();
        let identity = Identity { worker, workers, capacity: CAPACITY, boot: BOOT };
        let key = HashKey::new([9, 9, 9, worker.into()]);
        let (mut sessions, _) = Sessions::in_region(region, identity, Timeouts::default(), key).unwrap();
        for n in (0..SESSIONS).filter(|n| u32::from(*n) % workers == worker) {
            sessions.commit(&draft(n), Tick(1_000 + u32::from(n))).unwrap();
        }
    }
}

/// The sessions in the files of that many workers; no other files exist.
fn stored(directory: &Path, workers: u32, capacity: u32) -> BTreeSet<u16> {
    let names: Vec<_> = fs::read_dir(directory).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names.len(), workers as usize, "unexpected files: {names:?}");
    let mut all = BTreeSet::new();
    for worker in 0..workers {
        let (sessions, identity) = open_former(Region::open(&worker_file(directory, worker)).unwrap(), BOOT).unwrap();
        assert_eq!(identity, Identity { worker, workers, capacity, boot: BOOT });
        let is_stored = |n: &u16| sessions.find(sessions.hash(&draft(*n).origin), &draft(*n).origin).is_some();
        for n in (0..SESSIONS).filter(is_stored) {
            assert!(all.insert(n), "session {n} is in two files");
        }
    }
    all
}

#[test]
fn a_crash_at_any_step_loses_no_session() {
    let all: BTreeSet<u16> = (0..SESSIONS).collect();
    for (workers, next) in [(2, 1), (1, 2)] {
        for crash_step in 0.. {
            let directory = TempDir::new().unwrap();
            write_tables(directory.path(), workers);
            let mut steps = 0;
            let mut crash = || {
                assert!(steps != crash_step, "the process crashes");
                steps += 1;
            };
            let target = |workers| target(directory.path(), workers, CAPACITY);
            let completed =
                catch_unwind(AssertUnwindSafe(|| prepare(&target(next), &mut crash).map(drop).unwrap())).is_ok();
            // Every other restart has yet another number of workers.
            let last = if crash_step % 2 == 0 { next } else { 3 };
            prepare(&target(last), &mut || ()).unwrap();
            let found = stored(directory.path(), last, CAPACITY);
            assert_eq!(found, all, "{workers} to {next}, crash at step {crash_step}");
            if completed {
                assert!(crash_step > 6, "only {crash_step} steps");
                break;
            }
        }
    }
}

#[test]
fn a_smaller_table_keeps_the_most_recently_used_sessions() {
    let directory = TempDir::new().unwrap();
    write_tables(directory.path(), 2);
    prepare(&target(directory.path(), 1, 40), &mut || ()).unwrap();
    assert_eq!(stored(directory.path(), 1, 40), (SESSIONS - 40..SESSIONS).collect());
}

#[test]
fn matching_unreadable_and_locked_files_are_not_changed() {
    let directory = TempDir::new().unwrap();
    write_tables(directory.path(), 2);
    let before = [0, 1].map(|worker| fs::read(worker_file(directory.path(), worker)).unwrap());
    prepare(&target(directory.path(), 2, CAPACITY), &mut || panic!("no step is expected")).unwrap();
    assert!([0, 1].map(|worker| fs::read(worker_file(directory.path(), worker)).unwrap()) == before);
    // Another layout version: the tables can't be read and aren't migrated.
    for worker in [0, 1] {
        let mut bytes = before[worker as usize].clone();
        bytes[8] = 99;
        fs::write(worker_file(directory.path(), worker), bytes).unwrap();
    }
    prepare(&target(directory.path(), 1, CAPACITY), &mut || panic!("no step is expected")).unwrap();
    let held = Region::open(&worker_file(directory.path(), 0)).unwrap();
    let error = prepare(&target(directory.path(), 1, CAPACITY), &mut || ()).unwrap_err();
    assert!(error.is_in_use(), "{error}");
    drop(held);
}

#[test]
fn a_directory_that_cannot_be_read_is_not_an_empty_one() {
    let directory = TempDir::new().unwrap();
    write_tables(directory.path(), 1);
    // Not a directory: the same path of the code as without file descriptors.
    let file = worker_file(directory.path(), 0);
    assert!(migrate::worker_files(&file).is_err() && all_files(&file).is_err());
    assert!(prepare(&target(&file, 2, CAPACITY), &mut || panic!("no step is expected")).is_err());
    assert_eq!(stored(directory.path(), 1, CAPACITY), (0..SESSIONS).collect());
}

#[test]
fn one_process_at_a_time_has_the_lock_of_a_directory() {
    let directory = TempDir::new().unwrap();
    let lock = lock_directory(directory.path(), Duration::ZERO).unwrap().unwrap();
    assert!(lock_directory(directory.path(), Duration::ZERO).unwrap().is_none());
    let exiting = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(lock);
    });
    let lock = lock_directory(directory.path(), LOCK_TIMEOUT).unwrap();
    assert!(lock.is_some(), "a process that is exiting is waited for");
    exiting.join().unwrap();
}

#[test]
fn a_refusal_of_the_kernel_is_not_a_file_system_without_locks() {
    let directory = TempDir::new().unwrap();
    assert!(lock_directory(&directory.path().join("missing"), Duration::ZERO).is_err());
    for error in [Errno::NOLCK, Errno::NOMEM, Errno::IO] {
        assert!(!has_no_locks(&error.into()), "{error}");
    }
    assert!(has_no_locks(&Errno::BADF.into()) && has_no_locks(&Errno::OPNOTSUPP.into()));
}

#[test]
fn files_have_the_origin_of_their_directory_and_boot() {
    let (one, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let origin = |directory: &TempDir, boot, in_use| {
        let directory = Some(directory.path().to_owned());
        let lock = directory.as_deref().and_then(|directory| lock_directory(directory, Duration::ZERO).unwrap());
        let (locks, in_memory) = (Vec::new(), Vec::new());
        SessionStore { directory, lock, boot, workers: 1, locks, in_use, in_memory }.origin()
    };
    let first = origin(&one, BOOT, false);
    assert!(first.is_some() && origin(&one, BOOT, false) == first, "also of the next process");
    assert_ne!(origin(&other, BOOT, false), first, "a copy");
    assert_ne!(origin(&one, [4; 16], false), first, "of before the last boot");
    assert_eq!(origin(&one, BOOT, true), None, "another process uses the tables");
    let _running = lock_directory(one.path(), Duration::ZERO).unwrap();
    assert_eq!(origin(&one, BOOT, false), None, "another process is running");
}
