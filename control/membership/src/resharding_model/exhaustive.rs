//! A few short scenarios with all combinations of when each gateway gets the policy, and of which messages and snapshots
//! are late.

use std::cell::RefCell;
use std::rc::Rc;

use super::choices::{Choices, Enumeration};
use super::coverage::{Class, Counts};
use super::policies::{MAX_GATEWAYS, Order, Placement, Policies, SHARDS};
use super::steps::Step;
use super::world::World;
use super::{number, on_all_cores};

/// Gateways of a scenario.
const GATEWAYS: usize = 3;
/// So many choices are enumerated after the change, unless `VIPGATE_MODEL_DEPTH` says otherwise; later messages aren't
/// late.
const DEPTH: usize = 3;
/// How often each class must be reached at least.
const LEAST_COUNT: u64 = 50;
/// When a gateway gets a policy, in milliseconds: at once, while others use it already, or when they have stopped
/// waiting for it.
const POLICY_DELAYS: [u16; 3] = [0, 70, 3500];

/// A change, and what happens while it takes effect.
struct Scenario {
    name: &'static str,
    /// The policies: first the one that all have at the start.
    placements: Vec<Placement>,
    steps: Vec<Action>,
}

#[derive(Clone, Copy)]
enum Action {
    /// The policy with this number.
    Policy(usize),
    /// Something else.
    Step(Step),
    /// Time passes; all gateways try to open sessions, and get packets of those that there are.
    Traffic(u16),
}

/// A placement by the names of gateways, for instance `abc` and `bca`.
fn placement(first: &str, second: &str) -> Placement {
    let order = |names: &str| Order::new(&names.bytes().map(|name| usize::from(name - b'a')).collect::<Vec<_>>());
    let gateways = first.bytes().chain(second.bytes()).fold(0, |all, name| all | 1 << (name - b'a'));
    Placement { gateways, orders: [order(first), order(second)], has_map: true }
}

fn scenarios() -> Vec<Scenario> {
    use Action::{Policy, Step as Do, Traffic};
    let scenario = |name, placements: &[(&str, &str)], steps: &[Action]| Scenario {
        name,
        placements: placements.iter().map(|(first, second)| placement(first, second)).collect(),
        steps: steps.to_vec(),
    };
    let (abc, bca, cab) = ("abc", "bca", "cab");
    vec![
        scenario("a shard moves", &[(abc, bca), (bca, bca)], &[Policy(1), Traffic(4), Traffic(40), Traffic(100)]),
        scenario(
            "a shard moves and comes back",
            &[(abc, bca), (bca, bca)],
            &[Policy(1), Traffic(40), Policy(0), Traffic(40), Traffic(100)],
        ),
        scenario(
            "a shard moves on before it has arrived",
            &[(abc, bca), (bca, bca), (cab, bca)],
            &[Policy(1), Traffic(10), Policy(2), Traffic(40), Traffic(100)],
        ),
        scenario("a gateway is added", &[("ab", "ba"), ("cab", "bca")], &[Policy(1), Traffic(40), Traffic(300)]),
        scenario("a gateway is removed", &[(abc, cab), ("ab", "ba")], &[Policy(1), Traffic(40), Traffic(300)]),
        scenario(
            "the owner dies as its shard moves",
            &[(abc, bca), (bca, bca)],
            &[Policy(1), Traffic(10), Do(Step::Crash(0, true)), Traffic(40), Traffic(900)],
        ),
        scenario(
            "the new owner dies as its shard moves",
            &[(abc, bca), (bca, bca)],
            &[Policy(1), Traffic(10), Do(Step::Crash(1, false)), Traffic(40), Traffic(900)],
        ),
        scenario(
            "the link breaks as a shard moves",
            &[(abc, bca), (bca, bca)],
            &[Policy(1), Do(Step::Cut(0, 1)), Traffic(100), Do(Step::Heal(0, 1)), Traffic(300)],
        ),
        scenario(
            "the owner doesn't reach the server as its shard moves",
            &[(abc, bca), (bca, bca)],
            &[Do(Step::CutServer(0)), Policy(1), Traffic(700), Do(Step::HealServer(0)), Traffic(300)],
        ),
        scenario(
            "the owner drains as its shard moves",
            &[(abc, bca), (bca, bca)],
            &[Do(Step::Drain(0, true)), Policy(1), Traffic(100), Do(Step::Drain(0, false)), Traffic(300)],
        ),
        scenario(
            "the owner restarts without the server as its shard moves",
            &[(abc, bca), (bca, bca)],
            &[Policy(1), Traffic(10), Do(Step::Succession(0, 60, 1500)), Traffic(600), Traffic(1500)],
        ),
        scenario(
            "a gateway is removed as the server restarts",
            &[(abc, cab), ("ab", "ba")],
            &[Policy(1), Do(Step::RestartServer(100)), Traffic(60), Traffic(300)],
        ),
    ]
}

impl World {
    /// All gateways try to open sessions in all shards, and get packets of all sessions.
    fn traffic(&mut self) {
        for at in 0..self.processes.len() {
            (0..SHARDS).for_each(|shard| self.open(at, shard));
            (0..self.sessions.len()).for_each(|session| self.packet(at, session));
        }
        self.check();
    }

    fn act(&mut self, action: Action, placements: &[Placement], delays: [u16; MAX_GATEWAYS]) {
        match action {
            Action::Policy(number) => self.set_policy(placements[number], delays),
            Action::Step(step) => self.step(step),
            Action::Traffic(duration) => {
                self.traffic();
                self.advance(duration.into());
                self.traffic();
            }
        }
    }
}

impl Scenario {
    /// The world at the start: all gateways are active.
    fn started(&self) -> World {
        let policies = Rc::new(RefCell::new(Policies::new()));
        let mut world = World::new(&policies, GATEWAYS, self.placements[0], Choices::random(0));
        world.converge(false);
        assert!(world.env.violation.is_none(), "{}: {:?}", self.name, world.env.violation);
        world
    }

    /// Runs it with policies delayed like this, and all choices; the message of a violation.
    fn run(&self, start: &World, delays: [u16; MAX_GATEWAYS], counts: &mut Counts) -> Result<(), String> {
        let mut next = Some(Enumeration::new(number("VIPGATE_MODEL_DEPTH").map_or(DEPTH, |depth| depth as usize)));
        while let Some(choices) = next {
            let mut world = start.fork();
            world.begin(Choices::random(0), 0);
            world.traffic();
            world.advance(300);
            world.begin(Choices::Enumerated(choices), 0);
            for action in &self.steps {
                if world.env.violation.is_none() {
                    world.act(*action, &self.placements, delays);
                }
            }
            if world.env.violation.is_none() {
                world.converge(true);
            }
            counts.merge(&world.env.counts);
            if let Some(violation) = &world.env.violation {
                return Err(format!("{}, {delays:?}: {violation}\n{:?}", self.name, world.env.choices));
            }
            let Choices::Enumerated(choices) = world.env.choices else { break };
            next = choices.next();
        }
        Ok(())
    }
}

/// All delays of a policy at each gateway.
fn all_delays() -> impl Iterator<Item = [u16; MAX_GATEWAYS]> {
    let count = POLICY_DELAYS.len();
    (0..count.pow(GATEWAYS as u32)).map(move |number| {
        let mut delays = [0; MAX_GATEWAYS];
        delays.iter_mut().take(GATEWAYS).enumerate().for_each(|(at, delay)| {
            *delay = POLICY_DELAYS[number / count.pow(at as u32) % count];
        });
        delays
    })
}

#[test]
fn no_order_of_events_violates_an_invariant_in_short_scenarios() {
    let mut counts = Counts::default();
    let results = on_all_cores(|core, cores| {
        let mut counts = Counts::default();
        for scenario in scenarios() {
            let start = scenario.started();
            for (_, delays) in (0..).zip(all_delays()).filter(|(number, _)| number % cores == core) {
                scenario.run(&start, delays, &mut counts)?;
            }
        }
        Ok::<_, String>(counts)
    });
    for result in results {
        counts.merge(&result.unwrap_or_else(|violation| panic!("{violation}")));
    }
    let classes = [
        Class::Opened,
        Class::FailedOver,
        Class::Demoted,
        Class::ReleaseReceived,
        Class::ReleaseTimedOut,
        Class::SurvivedCrash,
        Class::SuccessorLease,
        Class::GatewayAdded,
        Class::LeftView,
        Class::Converged,
    ];
    counts.assert_reached(&classes, LEAST_COUNT);
}
