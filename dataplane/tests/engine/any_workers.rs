//! The number of workers, and the queue of each packet, don't affect the output: the same scenario, packet by packet, with one
//! worker and with two or three, where every packet arrives on a queue drawn for it. Clients that policy excludes, pods
//! without a policy, frontends that share pods and ports, a backend outside and one without a policy are among them.

use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};

use crate::batch_boundaries::run::{Batches, Queues, ScenarioRun, Setting, World};
use crate::batch_boundaries::script::{Action, scenarios_beside_services};
use crate::batch_boundaries::{compare, config, count_coverage};

/// Classes that scenarios reach.
const CLASSES: [&str; 19] = [
    "whole",
    "first fragment first",
    "first fragment later",
    "overlap",
    "reply to a packet",
    "fragmented reply",
    "error",
    "time",
    "NoPod",
    "OtherVip",
    "NoBackend",
    "Flush",
    "Restart",
    "egress",
    "inbound",
    "service_reply",
    "unchanged",
    "drop no_policy",
    "handed off",
];

fn compare_workers(scenario: &[Action], workers: u8, seed: u64, coverage: &Coverage) -> Result<(), TestCaseError> {
    let one = Setting { world: World::SharedBackends, ..Setting::new(1) };
    let several = Setting { workers, queues: Queues::Any(seed), ..one };
    let alone = ScenarioRun::play(scenario, &Batches::one_by_one(), one);
    let beside = ScenarioRun::play(scenario, &Batches::one_by_one(), several);
    count_coverage(scenario, &beside, coverage);
    compare(&alone, &beside, workers)
}

#[test]
fn any_number_of_workers_and_any_queues_send_the_same() {
    let strategy = (scenarios_beside_services(), 2_u8..=3, any::<u64>());
    property(
        config(300, "tests/engine/any_workers.regressions"),
        &strategy,
        &CLASSES,
        |(scenario, workers, seed), coverage| compare_workers(&scenario, workers, seed, coverage),
    );
}
