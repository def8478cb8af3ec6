//! Report of a system under test: medians over its rounds, as one JSON object.

use hdrhistogram::Histogram;
use serde::Serialize;

use super::trial::{CoreUsage, MAX_CPU_PRESSURE, TrialResult};
use crate::path::round2;
use crate::wire::system_under_test::{Placement, SystemUnderTest};

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
    /// Where the kernel forwarded, for nft.
    nft_core: Option<Placement>,
    size: u16,
    flows: u32,
    offered_mpps: f64,
    pub(super) mpps: f64,
    loss: f64,
    /// Rate at which the latencies were measured.
    latency_mpps: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    overload: Option<Overload>,
    /// vipgate's rate divided by this system's; in vipgate's own report by that of the first other system.
    pub(super) ratio: Option<f64>,
    cpu_source: f64,
    cpu_gateway: Option<f64>,
    cpu_pressure: Option<f64>,
    /// Cores of source and gateway.
    cores: [CoreUsage; 2],
    rounds_mpps: Vec<f64>,
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
    pub(super) fn new(
        subject: SystemUnderTest,
        placement: Placement,
        size: u16,
        flows: u32,
        rounds: &[RoundResult],
    ) -> Option<Self> {
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
            nft_core: (subject == SystemUnderTest::Nft).then_some(placement),
            size,
            flows,
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
            cpu_source: typical.peak.cpu.source,
            cpu_gateway: typical.peak.cpu.gateway,
            cpu_pressure: typical.peak.cpu.pressure,
            cores: typical.peak.cpu.cores.clone(),
            rounds_mpps: rounds.iter().map(|round| round3(round.peak.mpps)).collect(),
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
            other.ratio = Some(round3(first.mpps / other.mpps));
        }
        first.ratio = others.first().and_then(|other| other.ratio);
    }
}

fn micros(latency: &Histogram<u64>, quantile: f64) -> f64 {
    latency.value_at_quantile(quantile) as f64 / 1e3
}

/// The median; of an even number of values, the lower one.
pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

fn round3(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

fn round5(number: f64) -> f64 {
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
}
