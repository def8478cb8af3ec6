//! Change equals rebuild: whatever happens to files, in whatever order, what a gateway has in force is what a fresh start on the
//! same files comes to, or what the rule of the last good state says.
//!
//! Random stories of changes go through the code as it runs in the product, by both ways: files, the gateway's feed, changes, the
//! engine's builder; and files, the policy server's store, publications, a stream, the xDS client's book, changes, the builder.
//! The rule is played by a slow model that looks at whole states of the disk and computes no difference.

mod disk;
mod model;
mod subjects;

use std::collections::BTreeMap;

use self::disk::Disk;
use self::model::Model;
use self::subjects::{Direct, Served};
use crate::xds::book::tests::world::Dice;

/// Stories, each from its own seed.
const STORIES: u64 = 60;
/// Looks at the files in a story.
const STEPS: usize = 12;

/// How often each class of change, and of outcome, was reached.
#[derive(Debug, Default)]
struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    fn count(&mut self, class: &'static str) {
        *self.0.entry(class).or_default() += 1;
    }
}

/// Everything that a run must have reached.
const CLASSES: &[&str] = &[
    "accept-empty: nothing was empty",
    "accept-empty: something went",
    "allowed: emptiness was believed",
    "files: added",
    "files: all removed",
    "files: blanked",
    "files: cut",
    "files: edited",
    "files: emptied to a list of nothing",
    "files: link to nothing",
    "files: mended",
    "files: not YAML",
    "files: not UTF-8",
    "files: removed",
    "files: renamed",
    "files: rewritten the same",
    "files: swapped",
    "first change: removes something",
    "folders: back",
    "folders: missing",
    "folders: missing, the only ones",
    "in force: as a fresh start",
    "in force: nothing, on purpose",
    "in force: not what a fresh start would be",
    "in force: waiting at the start",
    "objects: added",
    "objects: contradiction",
    "objects: moved",
    "objects: removed",
    "objects: tenant moved",
    "objects: wrong",
    "restart: of all",
    "restart: of the policy server",
    "source: unhealthy",
];

#[tokio::test]
async fn change_equals_rebuild() {
    let mut tally = Tally::default();
    for seed in 0..STORIES {
        story(seed, &mut tally).await;
    }
    let missed: Vec<_> = CLASSES.iter().filter(|class| !tally.0.contains_key(*class)).collect();
    assert!(missed.is_empty(), "never reached: {missed:?}; reached: {:#?}", tally.0);
    assert_eq!(tally.0.len(), CLASSES.len(), "each class is listed: {:#?}", tally.0);
}

/// One story: some start, then changes, each seen by both ways.
async fn story(seed: u64, tally: &mut Tally) {
    let mut dice = Dice(seed << 20);
    let allow_empty = dice.once_in(5);
    let mut disk = Disk::new(&mut dice);
    let mut model = Model::new(allow_empty);
    model.look(&disk.look());
    let mut direct = Direct::start(&disk, allow_empty).await;
    let mut served = Served::start(&disk, allow_empty).await;
    let mut log = vec![format!("seed {seed}, allow_empty {allow_empty}, start: {disk}")];
    check(&model, &direct, &served, &disk, &log, tally).await;
    for step in 0..STEPS {
        let had = model.in_force().map_or(0, |set| set.endpoints.len());
        match dice.roll(16) {
            0 => {
                log.push("accept-empty".to_owned());
                let expected = model.accept_empty();
                let (one, other) = (direct.accept_empty().await, served.accept_empty().await);
                assert_eq!((one, other), (expected, expected), "{log:#?}");
                let went = matches!(expected, Ok(objects) if objects > 0);
                tally.count(if went { "accept-empty: something went" } else { "accept-empty: nothing was empty" });
            }
            1 => {
                // A gateway that follows a server outlives it, and keeps what it has.
                let all = dice.once_in(2);
                log.push(format!("restart of {}", if all { "all" } else { "the policy server" }));
                tally.count(if all { "restart: of all" } else { "restart: of the policy server" });
                model = Model::new(allow_empty);
                model.look(&disk.look());
                direct = Direct::start(&disk, allow_empty).await;
                served = if all {
                    Served::start(&disk, allow_empty).await
                } else {
                    served.restart(&disk, allow_empty).await
                };
            }
            _ => {
                for _ in 0..=dice.roll(3) {
                    let class = disk.change(&mut dice, &model.ids());
                    tally.count(class);
                    log.push(format!("{class}: {disk}"));
                }
                model.look(&disk.look());
                direct.look(&log).await;
                served.look(&log).await;
                let has = model.in_force().map_or(0, |set| set.endpoints.len());
                if step == 0 && has < had {
                    tally.count("first change: removes something");
                }
            }
        }
        check(&model, &direct, &served, &disk, &log, tally).await;
    }
}

/// Both ways have in force what the model says, and that is what a fresh start comes to, unless the model says why not.
async fn check(model: &Model, direct: &Direct, served: &Served, disk: &Disk, log: &[String], tally: &mut Tally) {
    let expected = model.in_force();
    let built = expected.as_ref().map(subjects::built);
    assert_eq!(direct.in_force, built, "files of the gateway: {log:#?}");
    if built.is_some() || !served.is_older {
        assert_eq!(served.in_force, built, "by the policy server: {log:#?}");
    }
    let health = model.is_healthy();
    assert_eq!((direct.is_healthy(), served.is_healthy()), (health, health), "{log:#?}");
    assert_eq!((direct.states(), served.states()), (model.states(), model.states()), "{log:#?}");
    if !health {
        tally.count("source: unhealthy");
    }
    let fresh = Direct::start(disk, model.allow_empty).await;
    match (&built, model.is_as_written()) {
        (None, _) => tally.count("in force: waiting at the start"),
        (Some(_), true) => {
            if fresh.in_force.is_some() {
                assert_eq!(fresh.in_force, built, "a fresh start: {log:#?}");
                tally.count("in force: as a fresh start");
            } else {
                // Somebody has accepted that there is nothing, and a fresh start waits until it is accepted again.
                assert!(expected.is_some_and(|set| set.vips.is_empty() && set.endpoints.is_empty()), "{log:#?}");
                tally.count("in force: nothing, on purpose");
            }
        }
        (Some(_), false) => {
            if fresh.in_force != built {
                tally.count("in force: not what a fresh start would be");
            }
        }
    }
    if model.allow_empty && model.has_nothing() && built.is_some() {
        tally.count("allowed: emptiness was believed");
    }
}
