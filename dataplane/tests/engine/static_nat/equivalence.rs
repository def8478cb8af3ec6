//! A gateway with private addresses in a cloud and one without send the same: random packets, batches, and policy changes, with the
//! same random seed. Each policy change gives the VIPs other private addresses, exchanges them, or takes them away.

use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};

use crate::batch_boundaries::run::{Batches, ScenarioRun, Setting};
use crate::batch_boundaries::script::{Action, scenarios};
use crate::batch_boundaries::{COMMON_CLASSES, batches, config, count_coverage};

fn compare(scenario: &[Action], batches: &Batches, workers: u8, coverage: &Coverage) -> Result<(), TestCaseError> {
    let plain = ScenarioRun::play(scenario, batches, Setting::new(workers));
    let in_cloud = ScenarioRun::play_in_cloud(scenario, batches, Setting::new(workers));
    count_coverage(scenario, &plain, coverage);
    coverage.add("translated", in_cloud.translated);
    prop_assert_eq!(&plain.counter_changes, &in_cloud.counter_changes);
    prop_assert_eq!(plain.sent.len(), in_cloud.sent.len());
    for (one, other) in plain.sent.iter().zip(&in_cloud.sent) {
        prop_assert_eq!((one.interface, one.epoch, one.process), (other.interface, other.epoch, other.process));
        prop_assert_eq!(&one.bytes, &other.bytes, "sent by the cloud");
    }
    Ok(())
}

#[test]
fn a_gateway_in_a_cloud_sends_what_one_without_private_addresses_sends() {
    for (cases, workers) in [(250, 1), (120, 2)] {
        let classes: Vec<_> = COMMON_CLASSES.into_iter().chain(["translated"]).collect();
        // Replies that don't wait for their packets are only among the scenarios of one worker, and connections to Services.
        let strategy = (scenarios(workers == 1), batches());
        let seeds = "tests/engine/static_nat/equivalence.regressions";
        property(config(cases, seeds), &strategy, &classes, |(scenario, batches), coverage| {
            compare(&scenario, &batches, workers, coverage)
        });
    }
}
