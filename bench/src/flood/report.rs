//! What is said of a kind of flood: one line of JSON.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use vipgate_tests::flood::Kind;

use super::Reading;
use super::tenant::Tally;
use crate::path::{median, round2};

/// What is to be left of a tenant's goodput while another one is flooded.
const GOODPUT: f64 = 0.95;

/// What happens meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing.
    Quiet,
    /// The same packets, to an address that the gateway doesn't capture.
    Control,
    /// The flood.
    Flood,
}

impl Phase {
    /// In the order of a round.
    pub(super) const ALL: [Self; 3] = [Self::Quiet, Self::Control, Self::Flood];
}

/// What came of one phase.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    seconds: f64,
    bytes: u64,
    p50_us: u64,
    p99_us: u64,
    opening_p99_us: u64,
    asked: u64,
    served: u64,
    lost: u64,
    wrong: u64,
    sent: u64,
    sessions: u64,
    drops: BTreeMap<String, u64>,
    gateway_cpu: f64,
    pressure: f64,
}

impl Measured {
    /// What tenant A noticed, and what the gateway counted.
    pub(super) fn new(tally: &Mutex<Tally>, sent: u64, before: &Reading, after: &Reading) -> Self {
        let tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = (after.at - before.at).as_secs_f64();
        let since = |reason: &String, count: &u64| count - before.drops.get(reason).copied().unwrap_or(0);
        let drops = after.drops.iter().map(|(reason, count)| (reason.clone(), since(reason, count)));
        Self {
            seconds,
            bytes: tally.bytes,
            p50_us: tally.delays.value_at_quantile(0.5),
            p99_us: tally.delays.value_at_quantile(0.99),
            opening_p99_us: tally.openings.value_at_quantile(0.99),
            asked: tally.asked,
            served: tally.served,
            lost: tally.lost,
            wrong: tally.wrong,
            sent,
            sessions: after.sessions,
            drops: drops.filter(|(_, count)| *count > 0).collect(),
            // A tick is a hundredth of a second.
            gateway_cpu: (after.gateway - before.gateway) as f64 / 100.0 / seconds,
            pressure: before.pressure.zip(after.pressure).map_or(0.0, |(a, b)| (b - a) as f64 / 1e6 / seconds),
        }
    }
}

/// One value for each phase.
#[derive(Clone, Copy, Debug, Serialize)]
struct Phases<T> {
    quiet: T,
    control: T,
    flood: T,
}

/// New connections: how many began, and how many were served.
#[derive(Clone, Copy, Debug, Serialize)]
struct New {
    asked: u64,
    served: u64,
    p99_us: f64,
}

/// A line of the report. Rates and delays are medians of the rounds, counts their sums.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    benchmark: &'static str,
    kind: &'static str,
    family: &'static str,
    capacity: u32,
    rounds: usize,
    /// Packets a second that were to be sent (0: as many as possible), and that were.
    flood_pps: u32,
    sent_pps: Phases<f64>,
    goodput_mbps: Phases<f64>,
    /// Of each round, against its quiet phase.
    goodput_ratio: f64,
    control_ratio: f64,
    p50_us: Phases<f64>,
    p99_us: Phases<f64>,
    new_connections: Phases<New>,
    /// Connections of tenant A that stood and ended.
    lost_connections: Phases<u64>,
    /// Answers that were meant for others.
    wrong: u64,
    /// In the table at the end of a flood, at most.
    sessions: u64,
    /// In floods.
    drops: BTreeMap<String, u64>,
    /// Cores that the gateway's process kept busy.
    gateway_cpu: Phases<f64>,
    /// The share of the time in which anybody waited for a core: high when others compute beside the benchmark.
    cpu_pressure: Phases<f64>,
    met: bool,
}

impl Line {
    /// Sums rounds up.
    pub(super) fn new(kind: Kind, ipv6: bool, capacity: u32, flood_pps: u32, rounds: &[[Measured; 3]]) -> Self {
        let phases = |of: &dyn Fn(&Measured) -> f64| {
            let of = |at: usize| round2(median(rounds.iter().map(|round| of(&round[at])).collect()));
            Phases { quiet: of(0), control: of(1), flood: of(2) }
        };
        let sums =
            |of: fn(&Measured) -> u64| [0, 1, 2].map(|at| rounds.iter().map(|round| of(&round[at])).sum::<u64>());
        let rate = |measured: &Measured| measured.bytes as f64 / measured.seconds;
        let ratio =
            |at: usize| median(rounds.iter().map(|round| rate(&round[at]) / rate(&round[0]).max(1.0)).collect());
        let (asked, served) = (sums(|it| it.asked), sums(|it| it.served));
        let opening = phases(&|it| it.opening_p99_us as f64);
        let new = |at: usize, p99_us| New { asked: asked[at], served: served[at], p99_us };
        let [quiet, control, flood] = sums(|it| it.lost);
        let mut drops = BTreeMap::new();
        for (reason, count) in rounds.iter().flat_map(|round| &round[2].drops) {
            *drops.entry(reason.clone()).or_default() += count;
        }
        let goodput_ratio = ratio(2);
        let lost_connections = Phases { quiet, control, flood };
        let wrong = sums(|it| it.wrong).iter().sum();
        Self {
            benchmark: "flood",
            kind: kind.name(),
            family: if ipv6 { "ipv6" } else { "ipv4" },
            capacity,
            rounds: rounds.len(),
            flood_pps,
            sent_pps: phases(&|it| it.sent as f64 / it.seconds),
            goodput_mbps: phases(&|it| rate(it) * 8.0 / 1e6),
            goodput_ratio: thousandths(goodput_ratio),
            control_ratio: thousandths(ratio(1)),
            p50_us: phases(&|it| it.p50_us as f64),
            p99_us: phases(&|it| it.p99_us as f64),
            new_connections: Phases {
                quiet: new(0, opening.quiet),
                control: new(1, opening.control),
                flood: new(2, opening.flood),
            },
            lost_connections,
            wrong,
            sessions: rounds.iter().map(|round| round[2].sessions).max().unwrap_or(0),
            drops,
            gateway_cpu: phases(&|it| it.gateway_cpu),
            cpu_pressure: phases(&|it| it.pressure),
            met: goodput_ratio >= GOODPUT && served[2] == asked[2] && asked[2] > 0 && flood == 0 && wrong == 0,
        }
    }

    /// What is missed, as a sentence.
    pub(super) fn missed(&self) -> Option<String> {
        let New { asked, served, .. } = self.new_connections.flood;
        let control = self.new_connections.control;
        let is_machine = self.control_ratio < GOODPUT || control.served < control.asked;
        let why = if is_machine { "; the control misses it as well: this machine is too busy to tell" } else { "" };
        (!self.met).then(|| {
            format!(
                "{} with a table of {}: {:.1} % of the goodput, {served} of {asked} new connections served, {} of those that stood \
                 lost{why}",
                self.kind,
                self.capacity,
                self.goodput_ratio * 100.0,
                self.lost_connections.flood,
            )
        })
    }
}

fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(flood: Measured) -> [Measured; 3] {
        let quiet = Measured { seconds: 1.0, bytes: 1000, asked: 10, served: 10, ..Measured::default() };
        [quiet.clone(), quiet, flood]
    }

    #[test]
    fn a_flood_that_costs_goodput_or_a_connection_is_named() {
        let line = |flood| Line::new(Kind::Syn, false, 1024, 0, &[round(flood)]);
        let good = Measured { seconds: 1.0, bytes: 960, asked: 10, served: 10, ..Measured::default() };
        assert_eq!((line(good.clone()).met, line(good.clone()).missed()), (true, None));
        assert!(!line(Measured { bytes: 940, ..good.clone() }).met);
        assert!(!line(Measured { lost: 1, ..good.clone() }).met);
        let refused = line(Measured { served: 9, ..good });
        assert!(refused.missed().unwrap().contains("9 of 10 new connections"), "{:?}", refused.missed());
    }

    #[test]
    fn a_machine_that_is_too_busy_is_named() {
        let slow = Measured { seconds: 1.0, bytes: 900, asked: 10, served: 10, ..Measured::default() };
        let [quiet, ..] = round(slow.clone());
        let line = Line::new(Kind::Udp, true, 1024, 0, &[[quiet, slow.clone(), slow]]);
        assert!(line.missed().unwrap().contains("too busy"));
    }
}
