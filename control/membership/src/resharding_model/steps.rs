//! The steps of random worlds.

use std::fmt;

use super::choices::Random;
use super::policies::{MAX_GATEWAYS, Order, Placement, SHARDS};
use super::server::Restored;

/// A step of a world. Gateways and sessions are numbers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Time passes, in milliseconds.
    Advance(u16),
    /// A session is opened in a shard, by this gateway if that may do so, else by another one.
    Open(usize, usize),
    /// A packet of a session reaches a gateway.
    Packet(usize, usize),
    /// A session ends.
    Close(usize),
    /// Another policy, and after how many milliseconds each gateway has it.
    Policy(Placement, [u16; MAX_GATEWAYS]),
    /// A process dies; whether the server detects the end of its stream.
    Crash(usize, bool),
    /// A process starts; whether it knows the secret of the previous one.
    Restart(usize, bool),
    /// A process dies and the next one starts after this many milliseconds, while the server is away for so long.
    Succession(usize, u16, u16),
    /// A process is suspended.
    Suspend(usize, u16),
    /// An operator drains a gateway, or ends that.
    Drain(usize, bool),
    /// A gateway has a fault, or none any more.
    Fault(usize, bool),
    /// Two gateways don't reach each other any more.
    Cut(usize, usize),
    Heal(usize, usize),
    /// Messages between two gateways are delayed.
    Stall(usize, usize, u16),
    /// A gateway doesn't reach the server any more.
    CutServer(usize),
    HealServer(usize),
    /// The server dies, and the next one starts after a while.
    RestartServer(u16),
}

/// A random world: its gateways, its policies and its steps.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) gateways: usize,
    /// What a server finds that starts.
    pub(super) restored: Restored,
    pub(super) record_age: u64,
    /// Whether dead processes start again in the end.
    pub(super) restarts: bool,
    pub(super) placements: Vec<Placement>,
    pub(super) steps: Vec<Step>,
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gateways, restored, record_age, restarts, placements, steps } = self;
        writeln!(f, "{gateways} gateways, {:?}, record: {restored:?}, record age: {record_age}", placements[0])?;
        steps.iter().try_for_each(|step| writeln!(f, "  {step:?}"))?;
        writeln!(f, "  in the end, processes start again: {restarts}")
    }
}

impl Script {
    /// The script of a seed.
    pub(super) fn random(seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let gateways = random.one_of(&[2, 3, 3, 3, 3, 4]);
        // Few policies, so that some of them come back.
        let count = 2 + random.below(2);
        let mut placements = vec![first_placement(random, gateways)];
        for _ in 0..count {
            let last = placements[random.below(placements.len() as u64) as usize];
            placements.push(next_placement(random, gateways, last));
        }
        let length = 10 + random.below(30);
        let mut current = 0;
        let steps = (0..length).map(|_| step(random, gateways, &placements, &mut current)).collect();
        Self {
            gateways,
            restored: random.one_of(&[Restored::Last, Restored::Last, Restored::Backup, Restored::Nothing]),
            record_age: random.one_of(&[0, 0, 40]),
            restarts: random.percent(60),
            placements,
            steps,
        }
    }
}

fn shuffled(random: &mut Random, gateways: &mut [usize]) {
    for at in (1..gateways.len()).rev() {
        gateways.swap(at, random.below(at as u64 + 1) as usize);
    }
}

fn order(random: &mut Random, gateways: u8) -> Order {
    let mut all: Vec<usize> = (0..MAX_GATEWAYS).filter(|at| gateways >> at & 1 == 1).collect();
    shuffled(random, &mut all);
    if all.len() > 1 && random.percent(20) {
        all.pop();
    }
    Order::new(&all)
}

/// One of a few, since worlds with the same one share their beginning. Not always with all gateways, so that some can be
/// added.
fn first_placement(random: &mut Random, gateways: usize) -> Placement {
    let left_out = if random.percent(40) { random.below(gateways as u64) as usize } else { gateways };
    let mut all: Vec<usize> = (0..gateways).filter(|at| *at != left_out).collect();
    let gateways = all.iter().map(|at| 1 << at).sum();
    let orders = [(); SHARDS].map(|()| {
        all.rotate_left(random.below(2) as usize);
        Order::new(&all)
    });
    Placement { gateways, orders, has_map: random.percent(50) }
}

/// A policy after another one: with a gateway more or less, in an order that stays otherwise, or in another order.
fn next_placement(random: &mut Random, gateways: usize, last: Placement) -> Placement {
    let gateway = random.below(gateways as u64) as usize;
    let bit = 1 << gateway;
    let others = last.gateways & !bit;
    match random.below(4) {
        0 | 1 if last.gateways & bit == 0 => {
            let gateways = last.gateways | bit;
            let orders = last.orders.map(|order| {
                let mut list: Vec<usize> = order.iter().collect();
                list.insert(random.below(list.len() as u64 + 1) as usize, gateway);
                Order::new(&list)
            });
            Placement { gateways, orders, ..last }
        }
        0 | 1 if others != 0 => {
            let orders = last.orders.map(|it| {
                let list: Vec<usize> = it.iter().filter(|it| *it != gateway).collect();
                if list.is_empty() { order(random, others) } else { Order::new(&list) }
            });
            Placement { gateways: others, orders, ..last }
        }
        _ => Placement { orders: [(); SHARDS].map(|()| order(random, last.gateways)), ..last },
    }
}

/// Until each gateway has a policy: most often soon; sometimes late, and rarely later than its release is awaited.
fn policy_delay(random: &mut Random) -> u16 {
    let limit = match random.below(100) {
        0..60 => 30,
        60..90 => 400,
        90..99 => 1500,
        _ => 4000,
    };
    random.below(limit) as u16
}

fn step(random: &mut Random, gateways: usize, placements: &[Placement], current: &mut usize) -> Step {
    let count = gateways as u64;
    let at = random.below(count) as usize;
    let other = (at + 1 + random.below(count - 1) as usize) % gateways;
    match random.below(100) {
        0..21 => Step::Advance(1 + random.below(60) as u16),
        21 => Step::Succession(at, random.below(700) as u16, 500 + random.below(4000) as u16),
        22..34 => Step::Advance(60 + random.below(300) as u16),
        34..36 => Step::Advance(600 + random.below(900) as u16),
        36..56 => Step::Open(at, random.below(SHARDS as u64) as usize),
        56..63 => Step::Packet(at, random.below(6) as usize),
        63..65 => Step::Close(random.below(6) as usize),
        65..75 => {
            *current = (*current + 1 + random.below(placements.len() as u64 - 1) as usize) % placements.len();
            let mut delays = [0; MAX_GATEWAYS];
            for delay in &mut delays {
                *delay = policy_delay(random);
            }
            Step::Policy(placements[*current], delays)
        }
        75..78 => Step::Crash(at, random.percent(50)),
        78..80 => Step::Restart(at, random.percent(70)),
        80..82 => Step::Suspend(at, 50 + random.below(1200) as u16),
        82..86 => Step::Drain(at, random.percent(75)),
        86..88 => Step::Fault(at, random.percent(60)),
        88..91 => Step::Cut(at, other),
        91..93 => Step::Heal(at, other),
        93..95 => Step::Stall(at, other, 50 + random.below(350) as u16),
        95..97 => Step::CutServer(at),
        97..98 => Step::HealServer(at),
        98 => Step::RestartServer(random.below(1000) as u16),
        _ => Step::Advance(1 + random.below(10) as u16),
    }
}
