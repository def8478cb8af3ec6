//! What the ports promise, against a model that knows every port in use.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::allocator::{Allocator, Claim, Exhausted};
use super::pool::{PortPool, WorkerId};
use super::{BLOCK_PORTS, PortRange};
use crate::session::tuple::{HashKey, Tuple};
use crate::snapshot::policy::{Vip, VipId};
use crate::snapshot::shares::Shares;
use crate::snapshot::spec::Announce;
use crate::tally::property;
use crate::time::Tick;

/// A VIP of this pool.
pub(super) fn vip(pool: &Arc<PortPool>, reserved: &[u16]) -> Vip {
    Vip {
        address: [192, 0, 2, 10].into(),
        name: "Service a/b".into(),
        id: VipId(3),
        pool: pool.clone(),
        retired: false,
        announce: Announce::L2,
        reserved: reserved.into(),
        guaranteed: 0,
        shares: Shares::default(),
    }
}

fn allocator(worker: u8, workers: u8, range: PortRange, most_crowded: u8) -> Allocator {
    let key =
        HashKey::new([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaef1_7502_108e_f2d9, 0x632b_e593_8a41_7d6f]);
    Allocator::with_most_crowded(most_crowded, WorkerId(worker), workers, range, key).unwrap()
}

fn session(far: u32, port: u16) -> Tuple<u32> {
    Tuple { source: 0xc000_020a, destination: far, source_port: port, destination_port: 443, protocol: 6 }
}

/// A worker's ports, and its session table as a set.
struct Worker {
    id: WorkerId,
    ports: Allocator,
    sessions: BTreeSet<(u32, u16)>,
}

impl Worker {
    fn new(id: u8, workers: u8, range: PortRange, most_crowded: u8) -> Self {
        let ports = allocator(id, workers, range, most_crowded);
        Self { id: WorkerId(id), ports, sessions: BTreeSet::new() }
    }

    fn open(&mut self, vip: &Vip, far: u32, now: Tick) -> Result<u16, Exhausted> {
        let Self { ports, sessions, .. } = self;
        let port = ports
            .allocate((vip, None), &session(far, 0), Claim::Ordinary, now, |port| !sessions.contains(&(far, port)))?;
        assert!(sessions.insert((far, port)), "port {port} was given twice toward {far}");
        assert_eq!(vip.pool.owner(port), Some(self.id), "port {port} is somebody else's");
        assert!(!vip.reserved.contains(&port), "port {port} is reserved");
        Ok(port)
    }

    /// Ends some session at or behind `from`.
    fn close_one(&mut self, vip: &Vip, from: (u32, u16)) {
        let Some(&(far, port)) = self.sessions.range(from..).next().or(self.sessions.first()) else { return };
        self.sessions.remove(&(far, port));
        self.ports.release(vip, &session(far, port));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Open { worker: usize, far: u32, count: usize },
    Close { worker: usize, far: u32, port: u16, count: usize },
    CloseAll { worker: usize, far: u32 },
    GiveBack { worker: usize },
    Reserve { ports: Vec<u16> },
    Wait { ms: u32 },
}

const FIRST: u16 = 1030;
const LAST: u16 = 1030 + 230;
const FARS: u32 = 5;

fn step() -> impl Strategy<Value = Step> {
    let (worker, far, port) = (0..2_usize, 0..FARS, FIRST..=LAST);
    prop_oneof![
        6 => (worker.clone(), far.clone(), 1..200_usize)
            .prop_map(|(worker, far, count)| Step::Open { worker, far, count }),
        4 => (worker.clone(), far.clone(), port.clone(), 1..60_usize)
            .prop_map(|(worker, far, port, count)| Step::Close { worker, far, port, count }),
        1 => (worker.clone(), far).prop_map(|(worker, far)| Step::CloseAll { worker, far }),
        2 => worker.prop_map(|worker| Step::GiveBack { worker }),
        1 => prop::collection::btree_set(port, 0..80).prop_map(|ports| Step::Reserve { ports: ports.into_iter().collect() }),
        1 => (1..1500_u32).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// Two workers share a VIP; fewer maps than far sides, so that maps come and go.
#[test]
fn a_port_is_given_once_and_refused_only_when_there_is_none() {
    let classes = [
        "given",
        "refused by who has half",
        "refused by who has all",
        "closed",
        "given back",
        "reserved one is in use",
    ];
    property(ProptestConfig::with_cases(400), &prop::collection::vec(step(), 1..120), &classes, |steps, tally| {
        let range = PortRange::new(FIRST, LAST).unwrap();
        let pool = Arc::<PortPool>::default();
        let mut vip_now = vip(&pool, &[]);
        let mut workers = [Worker::new(0, 2, range, 3), Worker::new(1, 2, range, 3)];
        let mut now = Tick(5);
        for step in steps {
            let owned_before = pool.claimed();
            match step {
                Step::Open { worker, far, count } => {
                    let other = workers[1 - worker].ports.owned_blocks(vip_now.id);
                    let worker = &mut workers[worker];
                    for _ in 0..count {
                        if worker.open(&vip_now, far, now).is_ok() {
                            tally.count("given");
                            continue;
                        }
                        let missed = (FIRST..=LAST).find(|port| {
                            pool.owner(*port).is_none_or(|owner| owner == worker.id)
                                && !vip_now.reserved.contains(port)
                                && !worker.sessions.contains(&(far, *port))
                        });
                        prop_assert_eq!(missed, None, "refused toward {}", far);
                        prop_assert!(pool.is_asked_for_blocks(now));
                        tally.count(if other > 0 { "refused by who has half" } else { "refused by who has all" });
                        break;
                    }
                }
                Step::Close { worker, far, port, count } => {
                    for n in 0..count {
                        workers[worker].close_one(&vip_now, (far, port.wrapping_add(n as u16 * 7)));
                    }
                    tally.count("closed");
                }
                Step::CloseAll { worker, far } => {
                    let all: Vec<u16> = workers[worker].sessions.range((far, 0)..(far + 1, 0)).map(|s| s.1).collect();
                    for port in all {
                        workers[worker].close_one(&vip_now, (far, port));
                    }
                }
                Step::GiveBack { worker } => {
                    workers[worker].ports.give_back_unused(&vip_now, now);
                    tally.add("given back", (owned_before - pool.claimed()) as u64);
                }
                Step::Reserve { ports } => {
                    let in_use = |port| workers.iter().any(|it| it.sessions.iter().any(|session| session.1 == port));
                    tally.add("reserved one is in use", u64::from(ports.iter().any(|port| in_use(*port))));
                    vip_now = vip(&pool, &ports);
                }
                Step::Wait { ms } => now = now.plus(ms),
            }
            let owned = workers.each_ref().map(|worker| worker.ports.owned_blocks(vip_now.id) as usize);
            prop_assert_eq!(owned[0] + owned[1], pool.claimed());
        }
        Ok(())
    });
}

#[test]
fn every_port_of_the_range_but_the_reserved_ones_is_given_out_once() {
    let vip = vip(&Arc::default(), &[80, 1024, 2000, 65535]);
    let mut worker = Worker::new(0, 1, PortRange::default(), 64);
    while worker.open(&vip, 1, Tick(0)).is_ok() {}
    assert_eq!(worker.sessions.len(), 64_512 - 3);
    assert!(worker.sessions.iter().all(|&(_, port)| port >= 1024 && ![1024, 2000, 65535].contains(&port)));
}

#[test]
fn a_port_is_found_again_as_soon_as_it_is_released() {
    let vip = vip(&Arc::default(), &[]);
    let mut worker = Worker::new(0, 1, PortRange::new(5000, 5000).unwrap(), 64);
    assert_eq!(worker.open(&vip, 1, Tick(0)), Ok(5000));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Err(Exhausted));
    assert_eq!(worker.open(&vip, 2, Tick(0)), Ok(5000), "another far side");
    worker.close_one(&vip, (2, 0));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Err(Exhausted));
    worker.close_one(&vip, (1, 0));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Ok(5000));
}

#[test]
fn a_port_that_comes_free_unseen_is_found_within_a_block_a_millisecond() {
    let vip = vip(&Arc::default(), &[]);
    let mut worker = Worker::new(0, 1, PortRange::default(), 64);
    while worker.open(&vip, 1, Tick(0)).is_ok() {}
    worker.sessions.remove(&(1, 40_000));
    let found = (1..=1008).find(|&ms| worker.open(&vip, 1, Tick(ms)) == Ok(40_000));
    assert!(found.is_some(), "40000 is free, whoever freed it");
}

#[test]
fn a_port_that_is_used_unseen_is_not_given_out() {
    let vip = vip(&Arc::default(), &[]);
    let mut worker = Worker::new(0, 1, PortRange::default(), 64);
    while worker.open(&vip, 1, Tick(0)).is_ok() {}
    for port in 40_000..40_010 {
        worker.close_one(&vip, (1, port));
    }
    worker.sessions.extend((40_000..40_009).map(|port| (1, port)));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Ok(40_009));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Err(Exhausted));
}

/// Endpoints open and close as they like; the first is greedy. Who has less than its guarantee is never refused.
#[test]
fn who_has_less_than_its_guarantee_gets_a_port() {
    const GUARANTEE: usize = 40;
    let steps = prop::collection::vec((0_usize..8, 0_usize..400, prop::bool::weighted(0.3)), 1..60);
    let classes =
        ["guaranteed", "ordinary", "ordinary is refused", "guaranteed when no ordinary one is left", "closed"];
    property(ProptestConfig::with_cases(64), &(steps, 900_u16..1_100), &classes, |(steps, range), tally| {
        let mut vip = vip(&Arc::default(), &[65_535, 65_500]);
        vip.guaranteed = 8 * GUARANTEE as u32;
        let mut ports = allocator(0, 1, PortRange::new(65_535 - range, 65_535).unwrap(), 64);
        let mut open: [Vec<u16>; 8] = Default::default();
        let mut no_ordinary_left = false;
        for (endpoint, count, closes) in steps {
            for _ in 0..count {
                if closes {
                    let Some(port) = open[endpoint].pop() else { break };
                    ports.release(&vip, &session(1, port));
                    no_ordinary_left = false;
                    tally.count("closed");
                    continue;
                }
                let is_guaranteed = open[endpoint].len() < GUARANTEE;
                let claim = if is_guaranteed { Claim::Guaranteed } else { Claim::Ordinary };
                let is_free = |port| !open.iter().any(|ports| ports.contains(&port));
                let Ok(port) = ports.allocate((&vip, None), &session(1, 0), claim, Tick(0), is_free) else {
                    prop_assert!(!is_guaranteed, "endpoint {} has {} ports only", endpoint, open[endpoint].len());
                    tally.count("ordinary is refused");
                    no_ordinary_left = true;
                    break;
                };
                tally.count(match (is_guaranteed, no_ordinary_left) {
                    (true, true) => "guaranteed when no ordinary one is left",
                    (true, false) => "guaranteed",
                    (false, _) => "ordinary",
                });
                open[endpoint].push(port);
            }
        }
        Ok(())
    });
}

#[test]
fn what_was_known_of_a_block_goes_with_it() {
    let mut vip = vip(&Arc::default(), &[]);
    let mut ports = allocator(0, 1, PortRange::new(5000, 5000).unwrap(), 64);
    assert_eq!(ports.allocate((&vip, None), &session(1, 0), Claim::Ordinary, Tick(0), |_| false), Err(Exhausted));
    vip.retired = true;
    ports.give_back_unused(&vip, Tick(0));
    assert_eq!((ports.owned_blocks(vip.id), vip.pool.claimed()), (0, 0));
    let guesses = Cell::new(6);
    let free_behind_guesses = |_| guesses.replace(guesses.get().max(1) - 1) == 0;
    assert_eq!(ports.allocate((&vip, None), &session(1, 0), Claim::Ordinary, Tick(0), free_behind_guesses), Ok(5000));
}

#[test]
fn after_a_restart_a_worker_takes_its_share_only_where_it_has_sessions() {
    let vip = vip(&Arc::default(), &[]);
    let range = PortRange::new(1024, 1024 + 4 * 64 - 1).unwrap();
    let (mut one, mut two) = (allocator(0, 2, range, 64), allocator(1, 2, range, 64));
    assert!(one.adopt(&vip, 1024) && !two.adopt(&vip, 1024), "a block has one owner");
    one.claim_share(&vip);
    two.claim_share(&vip);
    assert_eq!([&one, &two].map(|ports| ports.owned_blocks(vip.id)), [2, 0]);
}

#[test]
fn workers_never_own_the_same_block_and_lend_what_they_do_not_use() {
    let vip = vip(&Arc::default(), &[]);
    let range = PortRange::new(1024, 1024 + 4 * 64 - 1).unwrap();
    let (mut one, mut two) = (Worker::new(0, 2, range, 64), Worker::new(1, 2, range, 64));
    two.open(&vip, 9, Tick(0)).unwrap();
    while one.open(&vip, 9, Tick(0)).is_ok() {}
    assert_eq!(one.sessions.len(), 2 * 64, "the first took its share; the second holds the other");
    two.ports.give_back_unused(&vip, Tick(2_000));
    assert_eq!(two.ports.owned_blocks(vip.id), 2, "nobody asks any more");
    assert_eq!(one.open(&vip, 9, Tick(2_000)), Err(Exhausted));
    two.ports.give_back_unused(&vip, Tick(2_100));
    while one.open(&vip, 9, Tick(3_000)).is_ok() {}
    assert_eq!(one.sessions.len(), 3 * 64, "the block without sessions has changed hands");
    let mut late = Worker::new(0, 2, range, 64);
    assert_eq!(late.open(&vip, 9, Tick(3_000)), Err(Exhausted), "nothing is left for who comes late");
}

/// A session table of one destination, that counts how often it is asked.
struct Hot {
    vip: Vip,
    ports: Allocator,
    used: RefCell<Vec<bool>>,
    open: Vec<u16>,
    asked: Cell<u64>,
    random: u64,
}

impl Hot {
    const RANGE: usize = 64_512;

    fn new() -> Self {
        let ports = allocator(0, 1, PortRange::default(), 1);
        let used = RefCell::new(vec![false; 1 << 16]);
        Self { vip: vip(&Arc::default(), &[]), ports, used, open: Vec::new(), asked: Cell::new(0), random: 1 }
    }

    /// Opens a session; returns how many questions that took.
    fn open(&mut self) -> u64 {
        let before = self.asked.get();
        let is_free = |port: u16| {
            self.asked.set(self.asked.get() + 1);
            !self.used.borrow()[usize::from(port)]
        };
        let port = self.ports.allocate((&self.vip, None), &session(1, 0), Claim::Ordinary, Tick(0), is_free).unwrap();
        assert!(!std::mem::replace(&mut self.used.borrow_mut()[usize::from(port)], true));
        self.open.push(port);
        self.asked.get() - before
    }

    /// Closes any session.
    fn close(&mut self) {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (self.random >> 33) as usize % self.open.len();
        let port = self.open.swap_remove(at);
        self.used.borrow_mut()[usize::from(port)] = false;
        self.ports.release(&self.vip, &session(1, port));
    }

    /// Lets another destination take the only map.
    fn lose_map(&mut self) {
        let tries = Cell::new(0);
        let is_free = |_| tries.replace(tries.get() + 1) > 6;
        self.ports.allocate((&self.vip, None), &session(2, 0), Claim::Ordinary, Tick(0), is_free).unwrap();
    }

    /// Fills up to `count` sessions; returns the questions in all, and the most for one.
    fn fill(&mut self, count: usize) -> (u64, u64) {
        let asked: Vec<u64> = (self.open.len()..count).map(|_| self.open()).collect();
        (asked.iter().sum(), asked.iter().copied().max().unwrap_or(0))
    }

    /// One session goes, one comes, `rounds` times; returns the questions in all, and the most for one.
    fn churn(&mut self, rounds: usize) -> (u64, u64) {
        let mut asked = (0, 0);
        for _ in 0..rounds {
            self.close();
            let once = self.open();
            asked = (asked.0 + once, asked.1.max(once));
        }
        asked
    }
}

#[test]
fn the_last_percent_of_the_ports_costs_no_more_questions_than_the_first() {
    const ROUNDS: usize = 20_000;
    let mut hot = Hot::new();
    let (sparse, sparse_most) = hot.fill(Hot::RANGE / 10);
    let (at_10, at_10_most) = hot.churn(ROUNDS);
    let (rising, rising_most) = hot.fill(Hot::RANGE / 100 * 99);
    let (at_99, at_99_most) = hot.churn(ROUNDS);
    hot.lose_map();
    let (anew, anew_most) = hot.churn(ROUNDS);
    let (last, last_most) = hot.fill(Hot::RANGE);
    let (at_100, at_100_most) = hot.churn(ROUNDS);
    println!("questions to 10 %: {sparse}, most {sparse_most}; at 10 %: {at_10} for {ROUNDS}, most {at_10_most}");
    println!("from 10 % to 99 %: {rising}, most {rising_most}; at 99 %: {at_99} for {ROUNDS}, most {at_99_most}");
    println!("at 99 % with the map to be made anew: {anew} for {ROUNDS}, most {anew_most}");
    println!("from 99 % to 100 %: {last}, most {last_most}; at 100 %: {at_100} for {ROUNDS}, most {at_100_most}");
    assert!(at_99 <= 5 * at_10, "{at_99} questions at 99 %, {at_10} at 10 %, for {ROUNDS} sessions");
    assert!(anew <= 5 * at_10, "{anew} questions at 99 % to make the map anew, {at_10} at 10 %");
    assert!(at_100 <= 5 * at_10, "{at_100} questions for the last port, {at_10} at 10 %, for {ROUNDS} sessions");
    assert!(sparse_most.max(at_10_most) <= 8);
    let most = rising_most.max(at_99_most).max(last_most).max(at_100_most);
    assert!(most <= 3 * BLOCK_PORTS as u64, "{most} questions for one port");
}
