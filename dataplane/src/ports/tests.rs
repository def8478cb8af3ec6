//! Port allocation against a reference model that has every port in use.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use vipgate_coverage::{Coverage, property};

use super::allocator::{AllocationClass, Allocator, Exhausted, PortShard};
use super::pool::PortPool;
use super::vip::VipPorts;
use super::{BLOCK_PORTS, PortRange};
use crate::flow::ids::{VipId, WorkerId};
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};

/// The ports of a VIP with this pool.
pub(super) fn vip(pool: &Arc<PortPool>, reserved: &[u16]) -> VipPorts {
    VipPorts { id: VipId(3), pool: pool.clone(), retired: false, reserved: reserved.into(), guaranteed: 0 }
}

fn allocator(worker: u8, workers: u8, range: PortRange, max_maps: u8) -> Allocator {
    let key =
        HashKey::new([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaef1_7502_108e_f2d9, 0x632b_e593_8a41_7d6f]);
    Allocator::with_max_maps(max_maps, WorkerId(worker), workers, range, key).unwrap()
}

fn session(remote: u32, port: u16) -> Tuple<u32> {
    Tuple { source: 0xc000_020a, destination: remote, source_port: port, destination_port: 443, protocol: 6 }
}

/// A worker's allocator, and its session table as a set.
struct Worker {
    id: WorkerId,
    ports: Allocator,
    sessions: BTreeSet<(u32, u16)>,
}

impl Worker {
    fn new(id: u8, workers: u8, range: PortRange, max_maps: u8) -> Self {
        let ports = allocator(id, workers, range, max_maps);
        Self { id: WorkerId(id), ports, sessions: BTreeSet::new() }
    }

    fn open(&mut self, vip: &VipPorts, remote: u32, now: Tick) -> Result<u16, Exhausted> {
        let Self { ports, sessions, .. } = self;
        let port =
            ports.allocate((vip, PortShard::ALL), &session(remote, 0), AllocationClass::Ordinary, now, |port| {
                !sessions.contains(&(remote, port))
            })?;
        assert!(sessions.insert((remote, port)), "port {port} was allocated twice toward {remote}");
        assert_eq!(vip.pool.owner(port), Some(self.id), "port {port} is owned by another worker");
        assert!(!vip.reserved.contains(&port), "port {port} is reserved");
        Ok(port)
    }

    /// Ends one session at or behind `from`.
    fn close_one(&mut self, vip: &VipPorts, from: (u32, u16)) {
        let Some(&(remote, port)) = self.sessions.range(from..).next().or(self.sessions.first()) else { return };
        self.sessions.remove(&(remote, port));
        self.ports.release(vip, &session(remote, port));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Open { worker: usize, remote: u32, count: usize },
    Close { worker: usize, remote: u32, port: u16, count: usize },
    CloseAll { worker: usize, remote: u32 },
    ReleaseBlocks { worker: usize },
    Reserve { ports: Vec<u16> },
    Wait { ms: u32 },
}

const FIRST: u16 = 1030;
const LAST: u16 = 1030 + 230;
const REMOTES: u32 = 5;

fn step() -> impl Strategy<Value = Step> {
    let (worker, remote, port) = (0..2_usize, 0..REMOTES, FIRST..=LAST);
    prop_oneof![
        6 => (worker.clone(), remote.clone(), 1..200_usize)
            .prop_map(|(worker, remote, count)| Step::Open { worker, remote, count }),
        4 => (worker.clone(), remote.clone(), port.clone(), 1..60_usize)
            .prop_map(|(worker, remote, port, count)| Step::Close { worker, remote, port, count }),
        1 => (worker.clone(), remote).prop_map(|(worker, remote)| Step::CloseAll { worker, remote }),
        2 => worker.prop_map(|worker| Step::ReleaseBlocks { worker }),
        1 => prop::collection::btree_set(port, 0..80)
            .prop_map(|ports| Step::Reserve { ports: ports.into_iter().collect() }),
        1 => (1..1500_u32).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// The classes of steps that a run must reach.
const CLASSES: [&str; 6] = [
    "allocated",
    "refused with half of the blocks",
    "refused with all blocks",
    "closed",
    "block released",
    "reserved port in use",
];

/// Opens sessions toward a remote until a port is refused.
fn open_sessions(
    workers: &mut [Worker; 2],
    worker: usize,
    vip: &VipPorts,
    (remote, count): (u32, usize),
    now: Tick,
    coverage: &Coverage,
) -> TestCaseResult {
    let other = workers[1 - worker].ports.owned_blocks(vip.id);
    let worker = &mut workers[worker];
    for _ in 0..count {
        if worker.open(vip, remote, now).is_ok() {
            coverage.count("allocated");
            continue;
        }
        let missed = (FIRST..=LAST).find(|port| {
            vip.pool.owner(*port).is_none_or(|owner| owner == worker.id)
                && !vip.reserved.contains(port)
                && !worker.sessions.contains(&(remote, *port))
        });
        prop_assert_eq!(missed, None, "refused toward {}", remote);
        prop_assert!(vip.pool.has_block_request(now));
        coverage.count(if other > 0 { "refused with half of the blocks" } else { "refused with all blocks" });
        break;
    }
    Ok(())
}

/// Two workers share a VIP; there are fewer maps than remotes, so that maps are evicted.
#[test]
fn a_port_is_allocated_once_and_refused_only_when_none_is_free() {
    property(ProptestConfig::with_cases(400), &prop::collection::vec(step(), 1..120), &CLASSES, |steps, coverage| {
        let range = PortRange::new(FIRST, LAST).unwrap();
        let pool = Arc::<PortPool>::default();
        let mut vip_now = vip(&pool, &[]);
        let mut workers = [Worker::new(0, 2, range, 3), Worker::new(1, 2, range, 3)];
        let mut now = Tick(5);
        for step in steps {
            let owned_before = pool.claimed();
            match step {
                Step::Open { worker, remote, count } => {
                    open_sessions(&mut workers, worker, &vip_now, (remote, count), now, coverage)?;
                }
                Step::Close { worker, remote, port, count } => {
                    for n in 0..count {
                        workers[worker].close_one(&vip_now, (remote, port.wrapping_add(n as u16 * 7)));
                    }
                    coverage.count("closed");
                }
                Step::CloseAll { worker, remote } => {
                    let all: Vec<u16> =
                        workers[worker].sessions.range((remote, 0)..(remote + 1, 0)).map(|s| s.1).collect();
                    for port in all {
                        workers[worker].close_one(&vip_now, (remote, port));
                    }
                }
                Step::ReleaseBlocks { worker } => {
                    workers[worker].ports.release_unused_blocks(&vip_now, now);
                    coverage.add("block released", (owned_before - pool.claimed()) as u64);
                }
                Step::Reserve { ports } => {
                    let in_use = |port| workers.iter().any(|it| it.sessions.iter().any(|session| session.1 == port));
                    coverage.add("reserved port in use", u64::from(ports.iter().any(|port| in_use(*port))));
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
fn a_released_port_is_reallocated_at_once() {
    let vip = vip(&Arc::default(), &[]);
    let mut worker = Worker::new(0, 1, PortRange::new(5000, 5000).unwrap(), 64);
    assert_eq!(worker.open(&vip, 1, Tick(0)), Ok(5000));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Err(Exhausted));
    assert_eq!(worker.open(&vip, 2, Tick(0)), Ok(5000), "another remote");
    worker.close_one(&vip, (2, 0));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Err(Exhausted));
    worker.close_one(&vip, (1, 0));
    assert_eq!(worker.open(&vip, 1, Tick(0)), Ok(5000));
}

#[test]
fn a_port_freed_without_release_is_found_at_one_block_per_millisecond() {
    let vip = vip(&Arc::default(), &[]);
    let mut worker = Worker::new(0, 1, PortRange::default(), 64);
    while worker.open(&vip, 1, Tick(0)).is_ok() {}
    worker.sessions.remove(&(1, 40_000));
    let found = (1..=1008).find(|&ms| worker.open(&vip, 1, Tick(ms)) == Ok(40_000));
    assert!(found.is_some(), "40000 is free, though it was not released");
}

#[test]
fn a_port_used_without_allocation_is_not_allocated() {
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

/// Endpoints open and close sessions at random. One below its guarantee is never refused.
#[test]
fn an_endpoint_below_its_guarantee_gets_a_port() {
    const GUARANTEE: usize = 40;
    let steps = prop::collection::vec((0_usize..8, 0_usize..400, prop::bool::weighted(0.3)), 1..60);
    let classes = ["guaranteed", "ordinary", "ordinary is refused", "guaranteed when ordinary is exhausted", "closed"];
    property(ProptestConfig::with_cases(64), &(steps, 900_u16..1_100), &classes, |(steps, range), coverage| {
        let mut vip = vip(&Arc::default(), &[65_535, 65_500]);
        vip.guaranteed = 8 * GUARANTEE as u32;
        let mut ports = allocator(0, 1, PortRange::new(65_535 - range, 65_535).unwrap(), 64);
        let mut open: [Vec<u16>; 8] = Default::default();
        let mut is_ordinary_exhausted = false;
        for (endpoint, count, closes) in steps {
            for _ in 0..count {
                if closes {
                    let Some(port) = open[endpoint].pop() else { break };
                    ports.release(&vip, &session(1, port));
                    is_ordinary_exhausted = false;
                    coverage.count("closed");
                    continue;
                }
                let is_guaranteed = open[endpoint].len() < GUARANTEE;
                let claim = if is_guaranteed { AllocationClass::Guaranteed } else { AllocationClass::Ordinary };
                let is_free = |port| !open.iter().any(|ports| ports.contains(&port));
                let Ok(port) = ports.allocate((&vip, PortShard::ALL), &session(1, 0), claim, Tick(0), is_free) else {
                    prop_assert!(!is_guaranteed, "endpoint {} has {} ports only", endpoint, open[endpoint].len());
                    coverage.count("ordinary is refused");
                    is_ordinary_exhausted = true;
                    break;
                };
                coverage.count(match (is_guaranteed, is_ordinary_exhausted) {
                    (true, true) => "guaranteed when ordinary is exhausted",
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
fn a_released_block_is_forgotten_by_the_maps() {
    let mut vip = vip(&Arc::default(), &[]);
    let mut ports = allocator(0, 1, PortRange::new(5000, 5000).unwrap(), 64);
    assert_eq!(
        ports.allocate((&vip, PortShard::ALL), &session(1, 0), AllocationClass::Ordinary, Tick(0), |_| false),
        Err(Exhausted)
    );
    vip.retired = true;
    ports.release_unused_blocks(&vip, Tick(0));
    assert_eq!((ports.owned_blocks(vip.id), vip.pool.claimed()), (0, 0));
    let probes = Cell::new(6);
    let free_after_probes = |_| probes.replace(probes.get().max(1) - 1) == 0;
    assert_eq!(
        ports.allocate((&vip, PortShard::ALL), &session(1, 0), AllocationClass::Ordinary, Tick(0), free_after_probes),
        Ok(5000)
    );
}

#[test]
fn after_a_restart_a_worker_claims_its_even_share_only_of_vips_with_sessions() {
    let vip = vip(&Arc::default(), &[]);
    let range = PortRange::new(1024, 1024 + 4 * 64 - 1).unwrap();
    let (mut one, mut two) = (allocator(0, 2, range, 64), allocator(1, 2, range, 64));
    assert!(one.reserve(&vip, 1024) && !two.reserve(&vip, 1024), "a block has one owner");
    one.claim_even_share(&vip);
    two.claim_even_share(&vip);
    assert_eq!([&one, &two].map(|ports| ports.owned_blocks(vip.id)), [2, 0]);
}

#[test]
fn a_block_has_one_owner_and_unused_blocks_are_released_on_request() {
    let vip = vip(&Arc::default(), &[]);
    let range = PortRange::new(1024, 1024 + 4 * 64 - 1).unwrap();
    let (mut one, mut two) = (Worker::new(0, 2, range, 64), Worker::new(1, 2, range, 64));
    two.open(&vip, 9, Tick(0)).unwrap();
    while one.open(&vip, 9, Tick(0)).is_ok() {}
    assert_eq!(one.sessions.len(), 2 * 64, "each worker has its even share");
    two.ports.release_unused_blocks(&vip, Tick(2_000));
    assert_eq!(two.ports.owned_blocks(vip.id), 2, "the request has timed out");
    assert_eq!(one.open(&vip, 9, Tick(2_000)), Err(Exhausted));
    two.ports.release_unused_blocks(&vip, Tick(2_100));
    while one.open(&vip, 9, Tick(3_000)).is_ok() {}
    assert_eq!(one.sessions.len(), 3 * 64, "the block without sessions has changed its owner");
    let mut late = Worker::new(0, 2, range, 64);
    assert_eq!(late.open(&vip, 9, Tick(3_000)), Err(Exhausted), "no block is left");
}

/// Session table of one destination that counts its lookups.
struct OneDestination {
    vip: VipPorts,
    ports: Allocator,
    used: RefCell<Vec<bool>>,
    open: Vec<u16>,
    lookups: Cell<u64>,
    random: u64,
}

impl OneDestination {
    const RANGE: usize = 64_512;

    fn new() -> Self {
        let ports = allocator(0, 1, PortRange::default(), 1);
        let used = RefCell::new(vec![false; 1 << 16]);
        Self { vip: vip(&Arc::default(), &[]), ports, used, open: Vec::new(), lookups: Cell::new(0), random: 1 }
    }

    /// Opens a session; returns the number of lookups.
    fn open(&mut self) -> u64 {
        let before = self.lookups.get();
        let is_free = |port: u16| {
            self.lookups.set(self.lookups.get() + 1);
            !self.used.borrow()[usize::from(port)]
        };
        let port = self
            .ports
            .allocate((&self.vip, PortShard::ALL), &session(1, 0), AllocationClass::Ordinary, Tick(0), is_free)
            .unwrap();
        assert!(!std::mem::replace(&mut self.used.borrow_mut()[usize::from(port)], true));
        self.open.push(port);
        self.lookups.get() - before
    }

    /// Closes a random session.
    fn close(&mut self) {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (self.random >> 33) as usize % self.open.len();
        let port = self.open.swap_remove(at);
        self.used.borrow_mut()[usize::from(port)] = false;
        self.ports.release(&self.vip, &session(1, port));
    }

    /// Lets another destination evict the only map.
    fn evict_map(&mut self) {
        let tries = Cell::new(0);
        let is_free = |_| tries.replace(tries.get() + 1) > 6;
        self.ports
            .allocate((&self.vip, PortShard::ALL), &session(2, 0), AllocationClass::Ordinary, Tick(0), is_free)
            .unwrap();
    }

    /// Opens sessions up to `count`; returns the lookups in all, and the most for one.
    fn fill(&mut self, count: usize) -> (u64, u64) {
        let lookups: Vec<u64> = (self.open.len()..count).map(|_| self.open()).collect();
        (lookups.iter().sum(), lookups.iter().copied().max().unwrap_or(0))
    }

    /// Closes one session and opens another, `rounds` times; returns the lookups in all, and the most for one.
    fn churn(&mut self, rounds: usize) -> (u64, u64) {
        let mut lookups = (0, 0);
        for _ in 0..rounds {
            self.close();
            let once = self.open();
            lookups = (lookups.0 + once, lookups.1.max(once));
        }
        lookups
    }
}

#[test]
fn the_last_percent_of_the_ports_costs_at_most_five_times_the_lookups_of_the_first() {
    const ROUNDS: usize = 20_000;
    let mut table = OneDestination::new();
    let (sparse, sparse_max) = table.fill(OneDestination::RANGE / 10);
    let (at_10, at_10_max) = table.churn(ROUNDS);
    let (rising, rising_max) = table.fill(OneDestination::RANGE / 100 * 99);
    let (at_99, at_99_max) = table.churn(ROUNDS);
    table.evict_map();
    let (rebuilt, rebuilt_max) = table.churn(ROUNDS);
    let (last, last_max) = table.fill(OneDestination::RANGE);
    let (at_100, at_100_max) = table.churn(ROUNDS);
    println!("lookups to 10 %: {sparse}, max {sparse_max}; at 10 %: {at_10} for {ROUNDS}, max {at_10_max}");
    println!("from 10 % to 99 %: {rising}, max {rising_max}; at 99 %: {at_99} for {ROUNDS}, max {at_99_max}");
    println!("at 99 % after the map was evicted: {rebuilt} for {ROUNDS}, max {rebuilt_max}");
    println!("from 99 % to 100 %: {last}, max {last_max}; at 100 %: {at_100} for {ROUNDS}, max {at_100_max}");
    assert!(at_99 <= 5 * at_10, "{at_99} lookups at 99 %, {at_10} at 10 %, for {ROUNDS} sessions");
    assert!(rebuilt <= 5 * at_10, "{rebuilt} lookups at 99 % to rebuild the map, {at_10} at 10 %");
    assert!(at_100 <= 5 * at_10, "{at_100} lookups for the last port, {at_10} at 10 %, for {ROUNDS} sessions");
    assert!(sparse_max.max(at_10_max) <= 8);
    let max = rising_max.max(at_99_max).max(last_max).max(at_100_max);
    assert!(max <= 3 * BLOCK_PORTS as u64, "{max} lookups for one port");
}
