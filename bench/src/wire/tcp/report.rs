//! Reports of TCP goodput: medians over rounds, as one JSON object per system, number of connections and direction.

use anyhow::Result;
use serde::Serialize;

use super::iperf::Goodput;
use super::losses::Counters;
use super::{DataDirection, Merging, Offloads};
use crate::path::round2;
use crate::usage;
use crate::wire::report::{Ratios, median, round3};
use crate::wire::system_under_test::SystemUnderTest;
use crate::wire::vipgate::Vipgate;

/// What all systems have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub(super) mtu: u16,
    pub(super) offloads: Offloads,
    pub(super) gro: Merging,
    pub(super) workers: u32,
}

/// One transfer.
#[derive(Clone, Debug)]
pub(super) struct Measurement {
    pub(super) round: u32,
    pub(super) system: SystemUnderTest,
    pub(super) streams: u32,
    pub(super) direction: DataDirection,
    /// Or why nothing could be measured.
    pub(super) result: Result<Goodput, String>,
}

/// A report, printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    subject: SystemUnderTest,
    direction: DataDirection,
    streams: u32,
    mtu: u16,
    offloads: Offloads,
    /// Where the kernel is the gateway.
    gro: Merging,
    workers: u32,
    /// Payload that the receiver's application read, Gbit/s; 0 if none passed.
    gbps: f64,
    /// Segments sent again, and those per gigabyte of payload.
    retransmits: f64,
    retransmits_per_gb: Option<f64>,
    /// The kernel's forwarding without SNAT.
    control_gbps: Option<f64>,
    /// vipgate's goodput divided by this system's of the same round; in vipgate's own report by that of the first other
    /// system. The median, and the lowest and highest.
    ratio: Option<f64>,
    ratio_spread: Option<[f64; 2]>,
    /// CPU usage of iperf3, in cores.
    cpu_sender: f64,
    cpu_receiver: f64,
    rounds_gbps: Vec<f64>,
    rounds_retransmits: Vec<u64>,
    /// What vipgate counted during the transfers of all rounds: drops by reason, hand-offs, received packets.
    #[serde(skip_serializing_if = "Counters::is_empty")]
    counters: Counters,
    /// Packets that interfaces and the kernel's backlog lost during the transfers of all rounds.
    #[serde(skip_serializing_if = "Counters::is_empty")]
    lost: Counters,
    /// Why rounds have no result: the first of the reasons.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    load_average: f64,
}

/// Prints the report of each system for each number of connections and each direction.
pub(super) fn print_reports(systems: &[SystemUnderTest], setting: Setting, measurements: &[Measurement]) -> Result<()> {
    let mut cases: Vec<(u32, DataDirection)> = Vec::new();
    for measurement in measurements {
        let case = (measurement.streams, measurement.direction);
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    for case in cases {
        let of_case: Vec<&Measurement> = measurements.iter().filter(|it| (it.streams, it.direction) == case).collect();
        for &system in systems {
            println!("{}", serde_json::to_string(&Report::new(system, systems, setting, case, &of_case))?);
        }
    }
    Ok(())
}

impl Report {
    /// `measurements` are those of the case, of all systems.
    fn new(
        subject: SystemUnderTest,
        systems: &[SystemUnderTest],
        setting: Setting,
        (streams, direction): (u32, DataDirection),
        measurements: &[&Measurement],
    ) -> Self {
        let rates = |system| rates(system, measurements);
        let own: Vec<&Measurement> = measurements.iter().copied().filter(|it| it.system == subject).collect();
        let successes: Vec<&Goodput> = own.iter().filter_map(|it| it.result.as_ref().ok()).collect();
        let of_rounds = |value: fn(&Goodput) -> f64| median(successes.iter().map(|it| value(it)).collect());
        let other = match subject {
            SystemUnderTest::Vipgate => systems.iter().copied().find(|it| *it != subject),
            SystemUnderTest::Nft | SystemUnderTest::Ovs | SystemUnderTest::Xdp | SystemUnderTest::Plain => {
                Some(subject)
            }
        };
        let ratios = other.and_then(|other| Ratios::of_rounds(&rates(SystemUnderTest::Vipgate), &rates(other)));
        Self {
            benchmark: "wire_tcp",
            subject,
            direction,
            streams,
            mtu: setting.mtu,
            offloads: setting.offloads,
            gro: setting.gro,
            workers: setting.workers,
            gbps: round3(median(rates(subject)).unwrap_or_default()),
            retransmits: of_rounds(|it| it.retransmits as f64).unwrap_or_default(),
            retransmits_per_gb: retransmits_per_gb(&successes),
            control_gbps: median(rates(SystemUnderTest::Plain)).map(round3),
            ratio: ratios.map(|it| it.median),
            ratio_spread: ratios.map(|it| it.spread),
            cpu_sender: round2(of_rounds(|it| it.cpu[0]).unwrap_or_default()),
            cpu_receiver: round2(of_rounds(|it| it.cpu[1]).unwrap_or_default()),
            rounds_gbps: rates(subject).into_iter().map(round3).collect(),
            rounds_retransmits: successes.iter().map(|it| it.retransmits).collect(),
            counters: sum(successes.iter().map(|it| &it.counters)),
            lost: sum(successes.iter().map(|it| &it.lost)),
            error: own.iter().find_map(|it| it.result.as_ref().err().cloned()),
            load_average: usage::load_average(),
        }
    }
}

fn sum<'a>(rounds: impl Iterator<Item = &'a Counters>) -> Counters {
    let mut sums = Counters::new();
    for (name, count) in rounds.flatten() {
        *sums.entry(name.clone()).or_insert(0) += count;
    }
    sums
}

/// Goodput of a system by round; 0 in rounds without a result.
fn rates(system: SystemUnderTest, measurements: &[&Measurement]) -> Vec<f64> {
    let mut own: Vec<&Measurement> = measurements.iter().copied().filter(|it| it.system == system).collect();
    own.sort_by_key(|it| it.round);
    own.iter().map(|it| it.result.as_ref().map_or(0.0, |goodput| goodput.gbps)).collect()
}

/// Segments sent again per gigabyte of payload, over all rounds.
fn retransmits_per_gb(rounds: &[&Goodput]) -> Option<f64> {
    let gigabytes: f64 = rounds.iter().map(|it| it.gbps / 8.0 * it.seconds).sum();
    let retransmits: u64 = rounds.iter().map(|it| it.retransmits).sum();
    (gigabytes > 0.0).then(|| round2(retransmits as f64 / gigabytes))
}

/// vipgate's counters: drops by reason, and sums of all workers. Empty if the gateway doesn't reply.
pub(super) fn counters(vipgate: &Vipgate) -> Counters {
    let drops = vipgate.query("drops").unwrap_or_default();
    let mut counters: Counters =
        drops.as_object().into_iter().flatten().filter_map(|(name, it)| Some((name.clone(), it.as_u64()?))).collect();
    let status = vipgate.query("status").unwrap_or_default();
    for worker in status["workers"].as_array().into_iter().flatten() {
        for name in ["received", "handoffs"] {
            *counters.entry(name.to_owned()).or_insert(0) += worker[name].as_u64().unwrap_or_default();
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const SETTING: Setting = Setting { mtu: 1500, offloads: Offloads::Off, gro: Merging::On, workers: 2 };

    fn measured(round: u32, system: SystemUnderTest, gbps: f64) -> Measurement {
        let goodput = Goodput { gbps, retransmits: 2, seconds: 2.0, ..Goodput::default() };
        Measurement { round, system, streams: 1, direction: DataDirection::Upload, result: Ok(goodput) }
    }

    fn report(subject: SystemUnderTest, measurements: &[Measurement]) -> Value {
        let systems = [SystemUnderTest::Vipgate, SystemUnderTest::Nft, SystemUnderTest::Plain];
        let measurements: Vec<&Measurement> = measurements.iter().collect();
        let case = (1, DataDirection::Upload);
        serde_json::to_value(Report::new(subject, &systems, SETTING, case, &measurements)).unwrap()
    }

    #[test]
    fn the_ratio_is_that_to_the_first_other_system_round_by_round() {
        use SystemUnderTest::{Nft, Plain, Vipgate};
        let measurements = [
            measured(0, Vipgate, 4.0),
            measured(0, Nft, 1.0),
            measured(0, Plain, 8.0),
            measured(1, Vipgate, 2.0),
            measured(1, Nft, 2.0),
            measured(1, Plain, 8.0),
        ];
        let vipgate = report(Vipgate, &measurements);
        assert_eq!((vipgate["ratio"].as_f64(), vipgate["control_gbps"].as_f64()), (Some(1.0), Some(8.0)));
        assert_eq!(vipgate["ratio_spread"], serde_json::json!([1.0, 4.0]));
        // 4 segments in 1.5 GB.
        assert_eq!(vipgate["retransmits_per_gb"].as_f64(), Some(2.67));
        assert_eq!(report(Plain, &measurements)["ratio"].as_f64(), Some(0.25));
    }

    #[test]
    fn a_failure_is_a_goodput_of_zero_with_its_reason() {
        use SystemUnderTest::{Nft, Vipgate};
        let failed = Measurement { result: Err("the MTU is too large".to_owned()), ..measured(0, Vipgate, 0.0) };
        let vipgate = report(Vipgate, &[failed, measured(0, Nft, 1.0)]);
        assert_eq!(vipgate["gbps"].as_f64(), Some(0.0));
        assert_eq!(vipgate["error"], "the MTU is too large");
        assert_eq!(vipgate["ratio"].as_f64(), Some(0.0));
    }
}
