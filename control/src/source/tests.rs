//! Incremental updates equal a rebuild: after any sequence of file changes, the policy in force is that of a fresh
//! start on the same files, or what the last-good-state rule requires.
//!
//! Random scenarios run through the product's code in both pipelines: files, the gateway's policy source, deltas, the
//! engine's builder; and files, the policy server's store, publications, a stream, the xDS client's resource store,
//! deltas, the builder. The oracle is a slow model that evaluates whole states of the disk without differences.

mod disk;
mod isolation;
mod model;
mod systems;

use std::collections::BTreeMap;

use self::disk::Disk;
use self::model::Model;
use self::systems::{FileGateway, ServerGateway};
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
    "restart: of all",
    "restart: of the policy server",
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

/// One scenario: an initial state, then changes, each processed by both pipelines.
async fn scenario(seed: u64, coverage: &mut Coverage) {
    let mut dice = SeededRng(seed << 20);
    let allow_empty = dice.one_in(5);
    let mut disk = Disk::new(&mut dice);
    let mut model = Model::new(allow_empty);
    model.update(&disk.state());
    let mut direct = FileGateway::start(&disk, allow_empty).await;
    let mut served = ServerGateway::start(&disk, allow_empty).await;
    let mut log = vec![format!("seed {seed}, allow_empty {allow_empty}, start: {disk}")];
    check(&model, &direct, &served, &disk, &log, coverage).await;
    for step in 0..STEPS {
        let before = model.in_force().map_or(0, |set| set.endpoints.len());
        match dice.below(16) {
            0 => {
                log.push("accept-empty".to_owned());
                let expected = model.accept_empty();
                let (one, other) = (direct.accept_empty().await, served.accept_empty().await);
                assert_eq!((one, other), (expected, expected), "{log:#?}");
                let has_removed = matches!(expected, Ok(objects) if objects > 0);
                coverage.count(if has_removed {
                    "accept-empty: objects were removed"
                } else {
                    "accept-empty: nothing was empty"
                });
            }
            1 => {
                // A gateway of a policy server outlives it and keeps its policy.
                let all = dice.one_in(2);
                log.push(format!("restart of {}", if all { "all" } else { "the policy server" }));
                coverage.count(if all { "restart: of all" } else { "restart: of the policy server" });
                model = Model::new(allow_empty);
                model.update(&disk.state());
                direct = FileGateway::start(&disk, allow_empty).await;
                served = if all {
                    ServerGateway::start(&disk, allow_empty).await
                } else {
                    served.restart(&disk, allow_empty).await
                };
            }
            _ => {
                for _ in 0..=dice.below(3) {
                    let class = disk.change(&mut dice, &model.ids());
                    coverage.count(class);
                    log.push(format!("{class}: {disk}"));
                }
                model.update(&disk.state());
                direct.reread(&log).await;
                served.reread(&log).await;
                let after = model.in_force().map_or(0, |set| set.endpoints.len());
                if step == 0 && after < before {
                    coverage.count("first change: removes objects");
                }
            }
        }
        check(&model, &direct, &served, &disk, &log, coverage).await;
    }
}

/// Checks that both pipelines have the model's policy in force, and that it equals a fresh start, unless the model
/// excludes that.
async fn check(
    model: &Model,
    direct: &FileGateway,
    served: &ServerGateway,
    disk: &Disk,
    log: &[String],
    coverage: &mut Coverage,
) {
    let expected = model.in_force();
    let built = expected.as_ref().map(systems::built);
    assert_eq!(direct.in_force, built, "files of the gateway: {log:#?}");
    if built.is_some() || !served.gateway.is_older {
        assert_eq!(served.gateway.in_force, built, "by the policy server: {log:#?}");
    }
    let health = model.is_healthy();
    assert_eq!((direct.is_healthy(), served.is_healthy()), (health, health), "{log:#?}");
    assert_eq!((direct.states(), served.states()), (model.states(), model.states()), "{log:#?}");
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
                assert!(expected.is_some_and(|set| set.vips.is_empty() && set.endpoints.is_empty()), "{log:#?}");
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
