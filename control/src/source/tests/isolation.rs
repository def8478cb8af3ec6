//! No tenant changes what another gets: worlds of tenants with ordinary and hostile objects, random ones and focused ones in
//! turn, through the product's sources, store, compiler, publications, and a gateway's resource store and builder.
//!
//! After each batch of changes, what is published for one tenant and said of its objects equals that of a world without the
//! others, but for contention that `docs/security-model.md` names; every address leaves with a VIP of its own pod's
//! namespace or not at all (one outside of the cluster that no pod has: of a namespace that lists it); gateways take what
//! is published, in whole and as a change; and a fresh start with the same objects brings the same into force.
//!
//! `VIPGATE_ORACLE_SECONDS` sets for how long worlds are tried (`make oracle`), `VIPGATE_ORACLE_FIRST` the number of the first
//! one, and `VIPGATE_ORACLE_WORLDS` how many there are at most. A failure prints the smallest history that fails.

mod acts;
mod checks;
mod entries;
mod focus;
mod history;
mod objects;
mod pipeline;
mod shrink;
mod sources;
mod tenant;
mod watchdog;
mod world;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::time::{Duration, Instant};

use vipgate_coverage::Coverage;

use self::checks::Observation;
use self::history::History;
use self::pipeline::Pipeline;
use self::sources::Source;
use self::watchdog::Watchdog;
use self::world::{Change, Shape};
use super::systems::Subscriber;
use crate::xds::store::tests::generators::SeededRng;

/// Worlds without the variables: always the same ones, less than two minutes.
const WORLDS: u64 = 100;
/// Worlds through each of the product's sources.
const REAL_WORLDS: u64 = 6;

/// Outcomes that must be reached, besides every act and ordinary change.
const OUTCOMES: [&str; 22] = [
    "a ready endpoint serves",
    "address of several pods",
    "address of several pods, and nobody has it",
    "address outside of the cluster",
    "address that others claim, too",
    "VIP that others share",
    "contention: of two kinds",
    "contention: the younger gives way",
    "entry: readable again",
    "entry: unreadable",
    "outcome: closed",
    "outcome: ignored with a warning",
    "outcome: in force as it was readable last",
    "outcome: not all objects are known",
    "outcome: set aside",
    "outcome: unaffected",
    "restart",
    "the protected tenant has what it has alone",
    "VG0408",
    "VG0417",
    "VG0419",
    "VG0504",
];

/// Random numbers.
#[derive(Debug)]
struct Dice(SeededRng);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(SeededRng(seed << 20))
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound)
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.0.one_in(n)
    }
}

fn pick<'a, T>(dice: &mut Dice, items: &'a [T]) -> &'a T {
    &items[dice.below(items.len())]
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}

#[test]
fn no_tenant_changes_what_another_gets() {
    let seconds = number("VIPGATE_ORACLE_SECONDS").map(Duration::from_secs);
    let first = number("VIPGATE_ORACLE_FIRST").unwrap_or(0);
    let chosen = number("VIPGATE_ORACLE_WORLDS");
    let max = chosen.or(seconds.is_none().then_some(WORLDS));
    let classes: Vec<&str> = acts::all().iter().map(|(class, _)| *class).collect();
    let ordinary = tenant::CHANGES.iter().map(|(class, _)| *class);
    let classes: Vec<&str> = classes.into_iter().chain(ordinary).chain(OUTCOMES).collect();
    let (coverage, start) = (Coverage::default(), Instant::now());
    let mut worlds = 0;
    while max.is_none_or(|max| worlds < max) && seconds.is_none_or(|seconds| start.elapsed() < seconds) {
        check_world(first + worlds, None, &coverage);
        worlds += 1;
    }
    println!("{worlds} worlds from {first} in {:?}: {coverage:?}", start.elapsed());
    if chosen.is_none() {
        coverage.assert_reached(&classes);
    }
}

#[test]
fn nor_does_one_through_the_files_of_a_directory() {
    (0..REAL_WORLDS).for_each(|seed| check_world(seed, Some(Shape::Files), &Coverage::default()));
}

#[test]
fn nor_does_one_through_etcd() {
    (0..REAL_WORLDS).for_each(|seed| check_world(seed, Some(Shape::Etcd), &Coverage::default()));
}

#[test]
fn nor_does_one_through_an_api_server() {
    (0..REAL_WORLDS).for_each(|seed| check_world(seed, Some(Shape::Kubernetes), &Coverage::default()));
}

/// Checks one world; `shape`: through the product's source of this shape.
fn check_world(seed: u64, shape: Option<Shape>, coverage: &Coverage) {
    let history = History::of_world(seed, shape, coverage);
    let source = || match shape {
        Some(shape) => Source::real(shape),
        None => Source::quick(history.setting.shape),
    };
    let Err(message) = attempt(&history, source(), seed, coverage) else { return };
    eprintln!(
        "world {seed} fails: {message}\nVIPGATE_ORACLE_FIRST={seed} VIPGATE_ORACLE_WORLDS=1 runs it alone; shrinking it"
    );
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let fails = |history: &History| {
        let source = Source::quick(history.setting.shape);
        attempt(history, source, seed, &Coverage::default()).is_err_and(|other| kind_of(&other) == kind_of(&message))
    };
    let smallest = if fails(&history) { shrink::shrink(history.clone(), fails) } else { history };
    let last = attempt(&smallest, Source::quick(smallest.setting.shape), seed, &Coverage::default());
    set_hook(hook);
    panic!("world {seed}: {}\n{}", last.err().unwrap_or(message), describe(&smallest));
}

/// The words of a message before the values that it shows.
fn kind_of(message: &str) -> String {
    message.chars().take_while(|c| *c != ':').filter(|c| !c.is_ascii_digit()).take(60).collect()
}

/// Runs a history; the message of what fails.
fn attempt(history: &History, source: Source, seed: u64, coverage: &Coverage) -> Result<(), String> {
    let result = catch_unwind(AssertUnwindSafe(|| run(history, source, seed, coverage)));
    result.map_err(|panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
    })
}

fn run(history: &History, source: Source, seed: u64, coverage: &Coverage) {
    let watchdog = Watchdog::new(format!("VIPGATE_ORACLE_FIRST={seed} VIPGATE_ORACLE_WORLDS=1"));
    let setting = history.setting;
    let mut whole = Pipeline::new(setting, source);
    let mut alone = Pipeline::new(setting, Source::quick(setting.shape));
    let mut gateway = Subscriber::new("gw-a");
    for batch in &history.batches {
        if batch.is_restart {
            whole.restart();
            alone.restart();
            gateway = gateway.of_next_server();
        }
        whole.apply(batch.changes.iter());
        let of_protected: Vec<Change> = batch.changes.iter().filter_map(|it| history.without_others(it)).collect();
        alone.apply(of_protected.iter());
        let (outcome, alone_outcome) = (whole.compile(&watchdog), alone.compile(&watchdog));
        let objects = whole.entries.objects();
        let (whole, alone) = ((&whole, &outcome), (&alone, &alone_outcome));
        let observation = Observation { history, whole, alone, objects };
        checks::check(&observation, coverage);
        if whole.0.entries.has_unknown() {
            coverage.count("outcome: not all objects are known");
        } else {
            checks::check_fresh(&observation, &whole.0.fresh(&watchdog), coverage);
        }
        let placement = outcome.placement.clone().expect("a placement");
        gateway.publish(placement);
        gateway.check_whole();
    }
}

/// The setting and the changes of a history.
fn describe(history: &History) -> String {
    let change = |change: &Change| match change {
        Change::Put(_, value) => value.to_string(),
        other => format!("{other:?}"),
    };
    let batches = history.batches.iter().map(|batch| {
        let changes: Vec<String> = batch.changes.iter().map(change).collect();
        format!("--- {}\n{}\n", if batch.is_restart { "after a restart" } else { "" }, changes.join("\n"))
    });
    format!("{:?}\nprotected: {}\n{}", history.setting, history.protected, batches.collect::<String>())
}
