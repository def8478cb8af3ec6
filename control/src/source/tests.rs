//! Incremental updates equal a rebuild: after any sequence of file changes, the policy in force is that of a fresh
//! start on the same files, or what the last-good-state rule requires.
//!
//! Random scenarios run through the product's code: files, store, compiler, publications, the gateway's resource store,
//! deltas, the engine's builder. The oracle is a slow model that evaluates whole states of the disk without differences.

mod disk;
mod isolation;
mod model;
mod systems;

use std::collections::BTreeMap;

use vipgate_policy::compiler::Placement;

use self::disk::Disk;
use self::model::Model;
use self::systems::FileGateway;
use crate::xds::store::tests::generators::SeededRng;

/// Scenarios, each with its own seed.
const SCENARIOS: u64 = 60;
/// Steps of a scenario.
const STEPS: usize = 12;

/// Coverage counters: how often each class of change and outcome was reached.
#[derive(Debug, Default)]
struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    fn count(&mut self, class: &'static str) {
        *self.0.entry(class).or_default() += 1;
    }
}

/// The classes that a run must reach.
const CLASSES: &[&str] = &[
    "accept-empty: nothing was empty",
    "accept-empty: objects were removed",
    "allow_empty: the policy is empty",
    "files: added",
    "files: all removed",
    "files: emptied",
    "files: truncated",
    "files: edited",
    "files: replaced by an empty list",
    "files: dangling symlink",
    "files: repaired",
    "files: not YAML",
    "files: not UTF-8",
    "files: removed",
    "files: renamed",
    "files: rewritten unchanged",
    "files: swapped",
    "first change: removes objects",
    "directories: missing",
    "directories: missing, with all files",
    "directories: restored",
    "in force: equal to a fresh start",
    "in force: an accepted empty policy",
    "in force: different from a fresh start",
    "in force: waiting for a first policy",
    "objects: added",
    "objects: conflict",
    "objects: moved",
    "objects: removed",
    "objects: tenant moved",
    "objects: invalid",
    "restart",
    "source: unhealthy",
];

#[tokio::test]
async fn incremental_updates_equal_a_rebuild() {
    let mut coverage = Coverage::default();
    for seed in 0..SCENARIOS {
        Box::pin(scenario(seed, &mut coverage)).await;
    }
    let missed: Vec<_> = CLASSES.iter().filter(|class| !coverage.0.contains_key(*class)).collect();
    assert!(missed.is_empty(), "never reached: {missed:?}; reached: {:#?}", coverage.0);
    assert_eq!(coverage.0.len(), CLASSES.len(), "each class is listed: {:#?}", coverage.0);
}

/// One scenario: an initial state, then changes.
async fn scenario(seed: u64, coverage: &mut Coverage) {
    let mut dice = SeededRng(seed << 20);
    let allow_empty = dice.one_in(5);
    let mut disk = Disk::new(&mut dice);
    let mut model = Model::new(allow_empty);
    model.update(&disk.state());
    let mut gateway = FileGateway::start(&disk, allow_empty).await;
    let mut log = vec![format!("seed {seed}, allow_empty {allow_empty}, start: {disk}")];
    check(&model, &gateway, &disk, &log, coverage).await;
    for step in 0..STEPS {
        let before = model.in_force().map_or(0, |placement| placement.endpoints.len());
        match dice.below(16) {
            0 => {
                log.push("accept-empty".to_owned());
                let expected = model.accept_empty();
                assert_eq!(gateway.accept_empty().await, expected, "{log:#?}");
                let has_removed = matches!(expected, Ok(objects) if objects > 0);
                coverage.count(if has_removed {
                    "accept-empty: objects were removed"
                } else {
                    "accept-empty: nothing was empty"
                });
            }
            1 => {
                // Unused: with this draw, the scenarios are those that are known to reach every class.
                dice.one_in(2);
                log.push("restart".to_owned());
                coverage.count("restart");
                model = Model::new(allow_empty);
                model.update(&disk.state());
                gateway = FileGateway::start(&disk, allow_empty).await;
            }
            _ => {
                for _ in 0..=dice.below(3) {
                    let class = disk.change(&mut dice, &model.ids());
                    coverage.count(class);
                    log.push(format!("{class}: {disk}"));
                }
                model.update(&disk.state());
                gateway.reread(&log).await;
                let after = model.in_force().map_or(0, |placement| placement.endpoints.len());
                if step == 0 && after < before {
                    coverage.count("first change: removes objects");
                }
            }
        }
        check(&model, &gateway, &disk, &log, coverage).await;
    }
}

/// Checks that the gateway has the model's policy in force, and that it equals a fresh start, unless the model excludes
/// that.
async fn check(model: &Model, gateway: &FileGateway, disk: &Disk, log: &[String], coverage: &mut Coverage) {
    let expected = model.in_force();
    let built = expected.as_ref().map(systems::built);
    assert_eq!(gateway.in_force, built, "{log:#?}");
    let health = model.is_healthy();
    assert_eq!((gateway.is_healthy(), gateway.states()), (health, model.states()), "{log:#?}");
    if !health {
        coverage.count("source: unhealthy");
    }
    let fresh = FileGateway::start(disk, model.allow_empty).await;
    match (&built, model.is_as_written()) {
        (None, _) => coverage.count("in force: waiting for a first policy"),
        (Some(_), true) => {
            if fresh.in_force.is_some() {
                assert_eq!(fresh.in_force, built, "a fresh start: {log:#?}");
                coverage.count("in force: equal to a fresh start");
            } else {
                // The empty source was accepted; a fresh start waits until it is accepted again.
                let is_empty = |it: &Placement| it.vips.is_empty() && it.endpoints.is_empty();
                assert!(expected.as_ref().is_some_and(is_empty), "{log:#?}");
                coverage.count("in force: an accepted empty policy");
            }
        }
        (Some(_), false) => {
            if fresh.in_force != built {
                coverage.count("in force: different from a fresh start");
            }
        }
    }
    if model.allow_empty && model.has_nothing() && built.is_some() {
        coverage.count("allow_empty: the policy is empty");
    }
}
