//! Model check of resharding: whatever policy, drains, faults, crashes and the network do, no port is given out twice,
//! no session is lost while a gateway lives that has it, and each shard has an owner in the end.
//!
//! A world has a policy server, two to four gateways, links between them, and one VIP with two shards. It is driven by
//! the real decisions: `MembershipState` at the server; `Member`, `Client`, `PeerProcess`, `Sender` and `Receiver` at each
//! gateway. The engine is the real one, too: each gateway has snapshots of a `Builder`, and a worker with its sessions,
//! which gets commands and packets. What is here is the world around them: wires, clocks, faults. Time is a number of
//! milliseconds.
//!
//! ```text
//!   server.rs   streams, record   ==heartbeats, views==>  stream.rs   lease
//!   world.rs    steps, sessions         links.rs   frames, heartbeats  <====>  other processes
//!   env.rs      clock, network, queue of inputs     process.rs   snapshots    worker.rs, table.rs, engine.rs, specs.rs
//!   succession.rs   what a process leaves to the next one of its gateway
//!   invariants.rs   what holds at each step, and in the end, when everything is healed and has converged
//! ```
//! Random worlds (`steps`) are generated from their number, so a failure names the world, and its shortest script.
//! `VIPGATE_MODEL_WORLDS` sets how many there are. `exhaustive` has short scenarios with all combinations of when
//! gateways get a policy, and of which messages and snapshots are late.
//!
//! Left out: packets in flight between gateways, several workers of one gateway, expiry and eviction of sessions,
//! `sessions.state`, several policy servers.

mod choices;
mod coverage;
mod engine;
mod env;
mod exhaustive;
mod frames;
mod invariants;
mod links;
mod policies;
mod process;
mod server;
mod specs;
mod steps;
mod stream;
mod succession;
mod table;
mod worker;
mod world;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::thread;

use self::choices::Choices;
use self::coverage::Counts;
use self::env::Violation;
use self::policies::{Placement, Policies};
use self::steps::Script;
use self::world::World;

/// Worlds of an ordinary run.
const WORLDS: u64 = 3_000;
/// How often each class must be reached at least.
const LEAST_COUNT: u64 = 3;

/// Runs worlds. Those with the same first policy begin with a copy of one in which all gateways are active.
struct Runner {
    policies: Rc<RefCell<Policies>>,
    started: HashMap<(usize, Placement), World>,
}

impl Runner {
    fn new() -> Self {
        Self { policies: Rc::new(RefCell::new(Policies::new())), started: HashMap::new() }
    }

    /// A world in which all gateways of this policy are active.
    fn started(&mut self, gateways: usize, placement: Placement) -> World {
        let policies = &self.policies;
        let start = || {
            let mut world = World::new(policies, gateways, placement, Choices::random(0));
            world.converge(false);
            assert!(world.env.violation.is_none(), "{placement:?}: {:?}", world.env.violation);
            world
        };
        self.started.entry((gateways, placement)).or_insert_with(start).fork()
    }

    fn run(&mut self, seed: u64, script: &Script) -> World {
        let mut world = self.started(script.gateways, script.placements[0]);
        world.begin(Choices::random(!seed), script.record_age);
        world.server.begin(script.restored);
        for step in &script.steps {
            if world.env.violation.is_none() {
                world.step(*step);
            }
        }
        if world.env.violation.is_none() {
            world.converge(script.restarts);
        }
        world
    }

    /// The script without steps that aren't necessary for the violation.
    fn minimize(&mut self, seed: u64, script: &Script, violation: &Violation) -> Script {
        let mut script = script.clone();
        loop {
            let without = |at: usize| {
                let mut shorter = script.clone();
                shorter.steps.remove(at);
                shorter
            };
            let is_same = |runner: &mut Self, it: &Script| {
                runner.run(seed, it).env.violation.is_some_and(|it| it.invariant == violation.invariant)
            };
            let mut shorter = (0..script.steps.len()).map(without);
            let Some(found) = shorter.find(|it| is_same(self, it)) else { return script };
            script = found;
        }
    }

    /// Runs the world of a number; the message of a violation.
    fn check(&mut self, seed: u64, counts: &mut Counts) -> Result<(), String> {
        let script = Script::random(seed);
        let world = self.run(seed, &script);
        counts.merge(&world.env.counts);
        let Some(violation) = world.env.violation else { return Ok(()) };
        let shortest = self.minimize(seed, &script, &violation);
        let of_shortest = self.run(seed, &shortest).env.violation;
        let of_shortest = of_shortest.map(|it| it.to_string()).unwrap_or_default();
        Err(format!("world {seed}: {violation}\nits shortest script: {of_shortest}\n{shortest}"))
    }
}

/// Names the world that was running when its thread panicked.
struct Running(u64);

impl Drop for Running {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("world {} has panicked", self.0);
        }
    }
}

fn run_worlds(first: u64, step: u64, end: u64) -> Result<Counts, String> {
    let (mut runner, mut counts) = (Runner::new(), Counts::default());
    for seed in (first..end).step_by(step as usize) {
        let _running = Running(seed);
        runner.check(seed, &mut counts)?;
    }
    Ok(counts)
}

/// Runs one part of some work on each core.
fn on_all_cores<T: Send>(work: impl Fn(u64, u64) -> T + Sync) -> Vec<T> {
    let cores = thread::available_parallelism().map_or(2, |cores| cores.get() as u64);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..cores)
            .map(|core| {
                scope.spawn({
                    let work = &work;
                    move || work(core, cores)
                })
            })
            .collect();
        threads.into_iter().map(|it| it.join().expect("a world has panicked")).collect()
    })
}

/// A number in the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|it| it.parse().expect("a number"))
}

#[test]
fn no_port_is_given_out_twice_and_no_session_is_without_an_owner() {
    let (first, worlds) = (number("VIPGATE_MODEL_FIRST").unwrap_or(0), number("VIPGATE_MODEL_WORLDS"));
    let worlds = worlds.unwrap_or(WORLDS);
    let mut counts = Counts::default();
    for result in on_all_cores(|core, cores| run_worlds(first + core, cores, first + worlds)) {
        counts.merge(&result.unwrap_or_else(|violation| panic!("{violation}")));
    }
    if worlds >= WORLDS {
        counts.assert_reached(coverage::ALL, LEAST_COUNT);
    }
}
