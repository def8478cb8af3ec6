//! What is said of a subject: medians over its rounds, one line of JSON.

use hdrhistogram::Histogram;
use serde::Serialize;

use super::subject::{Placement, Subject};
use super::trial::{CoreCpu, Outcome, QUIET};
use crate::path::round2;

/// One round of a subject.
#[derive(Debug)]
pub(super) struct Round {
    /// At the highest rate of which nearly everything comes through.
    pub(super) peak: Outcome,
    /// At half of that.
    pub(super) half: Outcome,
    /// At twice of that.
    pub(super) overload: Option<Outcome>,
}

/// A line of the report.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    benchmark: &'static str,
    pub(super) subject: Subject,
    /// Where the kernel forwarded, if it did.
    nft_core: Option<Placement>,
    size: u16,
    flows: u32,
    offered_mpps: f64,
    pub(super) mpps: f64,
    loss: f64,
    /// At this rate, the delays.
    latency_mpps: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    overload: Option<Overload>,
    /// vipgate's rate divided by this subject's; in vipgate's own line by the first other one's.
    pub(super) ratio: Option<f64>,
    cpu_source: f64,
    cpu_gateway: Option<f64>,
    cpu_pressure: Option<f64>,
    /// Of source and gateway.
    cores: [CoreCpu; 2],
    rounds_mpps: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Overload {
    offered_mpps: f64,
    mpps: f64,
    /// What is still forwarded, of the peak.
    of_peak: f64,
}

impl Line {
    /// Sums rounds up; `None` when there are none.
    pub(super) fn new(subject: Subject, placement: Placement, size: u16, flows: u32, rounds: &[Round]) -> Option<Self> {
        let of = |value: &dyn Fn(&Round) -> f64| median(rounds.iter().map(value).collect());
        let delay = |quantile| of(&move |round| micros(&round.half.latency, quantile)).map(round2);
        let mpps = of(&|round| round.peak.mpps)?;
        // The round that has the median, for what has no median.
        let typical = rounds.iter().find(|round| round.peak.mpps.total_cmp(&mpps).is_eq())?;
        let overload = |value: &dyn Fn(&Outcome) -> f64| {
            median(rounds.iter().filter_map(|r| r.overload.as_ref().map(value)).collect())
        };
        let overload = overload(&|outcome| outcome.mpps).zip(overload(&|outcome| outcome.offered_mpps));
        Some(Self {
            benchmark: "wire",
            subject,
            nft_core: (subject == Subject::Nft).then_some(placement),
            size,
            flows,
            offered_mpps: round3(of(&|round| round.peak.offered_mpps)?),
            mpps: round3(mpps),
            loss: round5(of(&|round| round.peak.loss)?),
            latency_mpps: round3(of(&|round| round.half.mpps)?),
            p50_us: delay(0.5)?,
            p99_us: delay(0.99)?,
            p999_us: delay(0.999)?,
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

impl Line {
    /// What to know about the figures beside them.
    pub(super) fn warning(&self) -> Option<String> {
        let share = self.cpu_pressure.filter(|share| *share > QUIET)?;
        let (subject, percent) = (self.subject, share * 100.0);
        Some(format!(
            "{subject:?}: threads waited for a core in {percent:.0} % of the time: where other programs run beside the \
             benchmark, its figures are too low"
        ))
    }
}

/// Sets the ratio of each line; the first one is vipgate's.
pub(super) fn compare(lines: &mut [Line]) {
    if let [first, others @ ..] = lines {
        for other in others.iter_mut() {
            other.ratio = Some(round3(first.mpps / other.mpps));
        }
        first.ratio = others.first().and_then(|other| other.ratio);
    }
}

fn micros(latency: &Histogram<u64>, quantile: f64) -> f64 {
    latency.value_at_quantile(quantile) as f64 / 1e3
}

/// The middle one, the lower of two.
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
    fn the_median_is_a_value_that_was_measured() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.0));
        assert_eq!(median(vec![7.0]), Some(7.0));
        assert_eq!(median(vec![]), None);
    }
}
