//! Kept sessions in files of other numbers of workers and sessions: all of them go on, whenever a process dies on the way.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tempfile::TempDir;
use vipgate_dataplane::counters::Direction;
use vipgate_dataplane::session::Draft;
use vipgate_dataplane::session::migrate::open_former;
use vipgate_dataplane::session::tuple::Tuple;

use super::migrate::prepare;
use super::*;

const BOOT: [u8; 16] = [3; 16];
const CAPACITY: u32 = 100;
const SESSIONS: u16 = 90;

fn wanted(folder: &Path, workers: u32, capacity: u32) -> Wanted<'_> {
    let keys = (0..workers).map(|n| HashKey::new([1, 2, 3, n.into()])).collect();
    Wanted { folder, boot: BOOT, workers, capacity, timeouts: Timeouts::default(), keys, now: Tick(5_000) }
}

/// Session number n: its port tells it apart.
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

/// What a process with so many workers leaves.
fn leave(folder: &Path, workers: u32) {
    for worker in 0..workers {
        let mut region = Region::open(&path(folder, worker)).unwrap();
        let identity = Identity { worker, workers, capacity: CAPACITY, boot: BOOT };
        let key = HashKey::new([9, 9, 9, worker.into()]);
        let (mut sessions, _) = Sessions::in_region(&mut region, identity, Timeouts::default(), key).unwrap();
        for n in (0..SESSIONS).filter(|n| u32::from(*n) % workers == worker) {
            sessions.commit(&draft(n), Tick(1_000 + u32::from(n))).unwrap();
        }
    }
}

/// The sessions that are in the files of so many workers, which are all there is.
fn found(folder: &Path, workers: u32, capacity: u32) -> BTreeSet<u16> {
    let names: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names.len(), workers as usize, "nothing else is left: {names:?}");
    let mut all = BTreeSet::new();
    for worker in 0..workers {
        let (sessions, identity) = open_former(&mut Region::open(&path(folder, worker)).unwrap(), BOOT).unwrap();
        assert_eq!(identity, Identity { worker, workers, capacity, boot: BOOT });
        let is_here = |n: &u16| sessions.find(sessions.hash(&draft(*n).origin), &draft(*n).origin).is_some();
        for n in (0..SESSIONS).filter(is_here) {
            assert!(all.insert(n), "session {n} is in two files");
        }
    }
    all
}

#[test]
fn a_process_that_dies_at_any_step_loses_nothing() {
    let everything: BTreeSet<u16> = (0..SESSIONS).collect();
    for (workers, next) in [(2, 1), (1, 2)] {
        for dies_at in 0.. {
            let folder = TempDir::new().unwrap();
            leave(folder.path(), workers);
            let mut steps = 0;
            let mut dies = || {
                assert!(steps != dies_at, "the process dies");
                steps += 1;
            };
            let wanted = |workers| wanted(folder.path(), workers, CAPACITY);
            let lived = catch_unwind(AssertUnwindSafe(|| prepare(&wanted(next), &mut dies).map(drop).unwrap())).is_ok();
            // Every other time, the next start wants yet another number.
            let last = if dies_at % 2 == 0 { next } else { 3 };
            prepare(&wanted(last), &mut || ()).unwrap();
            assert_eq!(found(folder.path(), last, CAPACITY), everything, "{workers} to {next}, died at step {dies_at}");
            if lived {
                assert!(dies_at > 6, "only {dies_at} steps");
                break;
            }
        }
    }
}

#[test]
fn of_too_many_those_seen_last_go_on() {
    let folder = TempDir::new().unwrap();
    leave(folder.path(), 2);
    prepare(&wanted(folder.path(), 1, 40), &mut || ()).unwrap();
    assert_eq!(found(folder.path(), 1, 40), (SESSIONS - 40..SESSIONS).collect());
}

#[test]
fn files_that_fit_and_files_of_others_are_left_alone() {
    let folder = TempDir::new().unwrap();
    leave(folder.path(), 2);
    let before = [0, 1].map(|worker| fs::read(path(folder.path(), worker)).unwrap());
    prepare(&wanted(folder.path(), 2, CAPACITY), &mut || panic!("there is nothing to do")).unwrap();
    assert!([0, 1].map(|worker| fs::read(path(folder.path(), worker)).unwrap()) == before);
    // Another layout: the tables can't be read, and nothing is made of them.
    for worker in [0, 1] {
        let mut bytes = before[worker as usize].clone();
        bytes[8] = 99;
        fs::write(path(folder.path(), worker), bytes).unwrap();
    }
    prepare(&wanted(folder.path(), 1, CAPACITY), &mut || panic!("there is nothing to do")).unwrap();
    let held = Region::open(&path(folder.path(), 0)).unwrap();
    let error = prepare(&wanted(folder.path(), 1, CAPACITY), &mut || ()).unwrap_err();
    assert!(error.is_in_use(), "{error}");
    drop(held);
}
