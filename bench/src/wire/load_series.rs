//! Series of offered loads: what a system forwards of each, one line per point.

use anyhow::Result;
use serde::Serialize;

use super::Bench;
use super::config::Placement;
use super::report::{Case, Ratios, median, micros, round3, round5};
use super::trial::TrialResult;
use crate::path::round2;
use crate::usage;
use crate::wire::system_under_test::SystemUnderTest;
use crate::wire::testbed::Testbed;

/// A point, printed as JSON: medians of its rounds.
#[derive(Debug, Serialize)]
struct Point {
    benchmark: &'static str,
    subject: SystemUnderTest,
    nft_core: Option<Placement>,
    size: u16,
    flows: u32,
    /// What the source alone sends: the maximum into a veth that drops everything.
    control_mpps: f64,
    /// What was to be offered; the source offers less if it can't.
    load_mpps: f64,
    offered_mpps: f64,
    mpps: f64,
    loss: f64,
    p50_us: f64,
    p99_us: f64,
    /// vipgate's rate divided by this system's of the same round: the median, and the lowest and highest.
    ratio: Option<f64>,
    ratio_spread: Option<[f64; 2]>,
    rounds_mpps: Vec<f64>,
    load_average: f64,
}

/// Measures all loads with each system, in alternating rounds.
pub(super) fn run(bench: &Bench<'_>, systems: &[SystemUnderTest]) -> Result<()> {
    let loads = &bench.options.loads;
    // By system and load.
    let mut results: Vec<Vec<Vec<TrialResult>>> =
        systems.iter().map(|_| loads.iter().map(|_| Vec::new()).collect()).collect();
    let mut controls = Vec::new();
    for _ in 0..bench.options.rounds {
        controls.push(bench.measure_source()?);
        for (&system, results) in systems.iter().zip(&mut results) {
            let round = bench.in_context(system, measure(bench, system))?;
            results.iter_mut().zip(round).for_each(|(results, result)| results.push(result));
        }
    }
    let case = bench.case(controls);
    for (&system, by_load) in systems.iter().zip(&results) {
        for (at, (&load, rounds)) in loads.iter().zip(by_load).enumerate() {
            let reference = results.first().and_then(|vipgate| vipgate.get(at)).map(|rounds| rates(rounds));
            let reference = reference.filter(|_| system != SystemUnderTest::Vipgate);
            if let Some(point) = Point::new(system, case, load, rounds, reference.as_deref()) {
                println!("{}", serde_json::to_string(&point)?);
            }
        }
    }
    Ok(())
}

/// One round of a system: all loads, one after the other.
fn measure(bench: &Bench<'_>, system: SystemUnderTest) -> Result<Vec<TrialResult>> {
    let testbed = Testbed::build()?;
    let running = system.start(&testbed, bench.config, bench.flows)?;
    let trial = bench.trial(&testbed, system, &running);
    trial.open_all_flows()?;
    bench.options.loads.iter().map(|&load| trial.run_undisturbed(Some(load), bench.duration())).collect()
}

fn rates(rounds: &[TrialResult]) -> Vec<f64> {
    rounds.iter().map(|round| round.mpps).collect()
}

impl Point {
    /// Aggregates the rounds; `None` when there are none.
    fn new(
        subject: SystemUnderTest,
        case: Case,
        load: f64,
        rounds: &[TrialResult],
        vipgate: Option<&[f64]>,
    ) -> Option<Self> {
        let of_rounds = |value: &dyn Fn(&TrialResult) -> f64| median(rounds.iter().map(value).collect());
        let ratios = vipgate.and_then(|vipgate| Ratios::of_rounds(vipgate, &rates(rounds)));
        Some(Self {
            benchmark: "wire_load",
            subject,
            nft_core: subject.is_placeable().then_some(case.placement),
            size: case.size,
            flows: case.flows,
            control_mpps: round3(case.control_mpps),
            load_mpps: load,
            offered_mpps: round3(of_rounds(&|round| round.offered_mpps)?),
            mpps: round3(of_rounds(&|round| round.mpps)?),
            loss: round5(of_rounds(&|round| round.loss)?),
            p50_us: round2(of_rounds(&|round| micros(&round.latency, 0.5))?),
            p99_us: round2(of_rounds(&|round| micros(&round.latency, 0.99))?),
            ratio: ratios.map(|it| it.median),
            ratio_spread: ratios.map(|it| it.spread),
            rounds_mpps: rates(rounds).into_iter().map(round3).collect(),
            load_average: usage::load_average(),
        })
    }
}
