//! Report of a system under test: medians over its rounds, as one JSON object.

use hdrhistogram::Histogram;
use serde::Serialize;

use super::config::Placement;
use super::trial::{CoreUsage, MAX_CPU_PRESSURE, TrialResult};
use crate::path::round2;
use crate::usage;
use crate::wire::system_under_test::SystemUnderTest;

/// Result of one round.
#[derive(Debug)]
pub(super) struct RoundResult {
    /// At the peak rate within the loss tolerance.
    pub(super) peak: TrialResult,
    /// At half the peak rate.
    pub(super) half: TrialResult,
    /// At twice the peak rate.
    pub(super) overload: Option<TrialResult>,
}

/// The report, printed as JSON.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    benchmark: &'static str,
    pub(super) subject: SystemUnderTest,
    /// Where the kernel forwarded.
    nft_core: Option<Placement>,
    size: u16,
    flows: u32,
    /// What the source alone sends: the maximum into a veth that drops everything.
    control_mpps: f64,
    offered_mpps: f64,
    pub(super) mpps: f64,
    loss: f64,
    /// Rate at which the latencies were measured.
    latency_mpps: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    overload: Option<Overload>,
    /// vipgate's rate divided by this system's of the same round; in vipgate's own report by that of the first other
    /// system. The median, and the lowest and highest.
    ratio: Option<f64>,
    ratio_spread: Option<[f64; 2]>,
    cpu_source: f64,
    cpu_gateway: Option<f64>,
    cpu_pressure: Option<f64>,
    /// Cores of source and gateway.
    cores: [CoreUsage; 2],
    rounds_mpps: Vec<f64>,
    /// Of the machine, over the last minute: this benchmark and others.
    load_average: f64,
}

/// What was measured: the same for all systems.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) size: u16,
    pub(super) flows: u32,
    pub(super) placement: Placement,
    /// The source's maximum, the median of the rounds.
    pub(super) control_mpps: f64,
}

#[derive(Debug, Serialize)]
struct Overload {
    offered_mpps: f64,
    mpps: f64,
    /// Forwarded rate relative to the peak.
    of_peak: f64,
}

impl Report {
    /// Aggregates the rounds; `None` when there are none.
    pub(super) fn new(subject: SystemUnderTest, case: Case, rounds: &[RoundResult]) -> Option<Self> {
        let of_rounds = |value: &dyn Fn(&RoundResult) -> f64| median(rounds.iter().map(value).collect());
        let latency = |quantile| of_rounds(&move |round| micros(&round.half.latency, quantile)).map(round2);
        let mpps = of_rounds(&|round| round.peak.mpps)?;
        // The round with the median rate, for values without a median.
        let typical = rounds.iter().find(|round| round.peak.mpps.total_cmp(&mpps).is_eq())?;
        let overload = |value: &dyn Fn(&TrialResult) -> f64| {
            median(rounds.iter().filter_map(|r| r.overload.as_ref().map(value)).collect())
        };
        let overload = overload(&|outcome| outcome.mpps).zip(overload(&|outcome| outcome.offered_mpps));
        Some(Self {
            benchmark: "wire",
            subject,
            nft_core: subject.is_placeable().then_some(case.placement),
            size: case.size,
            flows: case.flows,
            control_mpps: round3(case.control_mpps),
            offered_mpps: round3(of_rounds(&|round| round.peak.offered_mpps)?),
            mpps: round3(mpps),
            loss: round5(of_rounds(&|round| round.peak.loss)?),
            latency_mpps: round3(of_rounds(&|round| round.half.mpps)?),
            p50_us: latency(0.5)?,
            p99_us: latency(0.99)?,
            p999_us: latency(0.999)?,
            overload: overload.map(|(forwarded, offered)| Overload {
                offered_mpps: round3(offered),
                mpps: round3(forwarded),
                of_peak: round3(forwarded / mpps),
            }),
            ratio: None,
            ratio_spread: None,
            cpu_source: typical.peak.cpu.source,
            cpu_gateway: typical.peak.cpu.gateway,
            cpu_pressure: typical.peak.cpu.pressure,
            cores: typical.peak.cpu.cores.clone(),
            rounds_mpps: rounds.iter().map(|round| round3(round.peak.mpps)).collect(),
            load_average: usage::load_average(),
        })
    }
}

impl Report {
    /// A warning if the CPUs were contended during the measurement.
    pub(super) fn warning(&self) -> Option<String> {
        let share = self.cpu_pressure.filter(|share| *share > MAX_CPU_PRESSURE)?;
        let (subject, percent) = (self.subject, share * 100.0);
        Some(format!(
            "{subject:?}: CPU pressure of {percent:.0} %: if other programs are running, the measured rates are too low"
        ))
    }
}

/// Sets the ratio of each report; the first one is vipgate's.
pub(super) fn set_ratios(reports: &mut [Report]) {
    if let [first, others @ ..] = reports {
        for other in others.iter_mut() {
            let ratios = Ratios::of_rounds(&first.rounds_mpps, &other.rounds_mpps);
            (other.ratio, other.ratio_spread) = (ratios.map(|it| it.median), ratios.map(|it| it.spread));
        }
        (first.ratio, first.ratio_spread) = others.first().map_or((None, None), |it| (it.ratio, it.ratio_spread));
    }
}

/// Ratios of two systems, round by round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ratios {
    pub(super) median: f64,
    /// The lowest and the highest.
    pub(super) spread: [f64; 2],
}

impl Ratios {
    /// The rates of one system divided by those of another; rounds in which the other one forwarded nothing have no ratio.
    pub(super) fn of_rounds(rates: &[f64], others: &[f64]) -> Option<Self> {
        let pairs = rates.iter().zip(others).filter(|(_, other)| **other > 0.0);
        let ratios: Vec<f64> = pairs.map(|(rate, other)| rate / other).collect();
        let lowest = ratios.iter().copied().min_by(f64::total_cmp)?;
        let highest = ratios.iter().copied().max_by(f64::total_cmp)?;
        Some(Self { median: round3(median(ratios)?), spread: [round3(lowest), round3(highest)] })
    }
}

pub(super) fn micros(latency: &Histogram<u64>, quantile: f64) -> f64 {
    latency.value_at_quantile(quantile) as f64 / 1e3
}

/// The median; of an even number of values, the lower one.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

pub(super) fn round3(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

pub(super) fn round5(number: f64) -> f64 {
    (number * 1e5).round() / 1e5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.0));
        assert_eq!(median(vec![7.0]), Some(7.0));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn ratios_are_those_of_the_same_round() {
        let ratios = Ratios::of_rounds(&[2.0, 3.0, 8.0], &[1.0, 3.0, 2.0]);
        assert_eq!(ratios, Some(Ratios { median: 2.0, spread: [1.0, 4.0] }));
        assert_eq!(
            Ratios::of_rounds(&[2.0, 3.0], &[0.0, 3.0]),
            Some(Ratios { median: 1.0, spread: [1.0, 1.0] }),
            "nothing was forwarded in the first round"
        );
        assert_eq!(Ratios::of_rounds(&[1.0], &[0.0]), None);
    }
}
