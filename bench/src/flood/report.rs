//! What is said of a kind of flood: one line of JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use vipgate_tests::flood::Kind;

use super::Played;
use super::tenant::{Tally, hold};
use crate::path::{median, round2};

/// What is to be left of a tenant's goodput while another one is flooded.
const GOODPUT: f64 = 0.95;
/// How much larger the share of late handshakes may be than in the quiet and control phases. At 200 connections a second and three rounds of
/// 2 s that is 12 of 1200: above chance, and below a loss of 1 SYN in 50.
const LATE_MARGIN: f64 = 0.01;

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
    late: u64,
    lost: u64,
    wrong: u64,
    answered: u64,
    sent: u64,
    sessions: u64,
    drops: BTreeMap<String, u64>,
    gateway_cpu: f64,
    pressure: f64,
}

impl Measured {
    /// What tenant A noticed, and what the gateway counted.
    pub(super) fn new(played: &Played) -> Self {
        let Played { tally, around, length, sent, before, after } = played;
        let around = |of: fn(&Tally) -> u64| around.iter().map(|tally| of(&hold(tally))).sum::<u64>();
        let [lost, wrong] = [around(|it| it.lost), around(|it| it.wrong)];
        let tally = hold(tally);
        let since = |reason: &String, count: &u64| count - before.drops.get(reason).copied().unwrap_or(0);
        let drops = after.drops.iter().map(|(reason, count)| (reason.clone(), since(reason, count)));
        // Readings take their time, and more of it the busier the gateway is: rates are those of the phase alone.
        let watched = (after.at - before.at).as_secs_f64();
        Self {
            seconds: length.as_secs_f64(),
            bytes: tally.bytes,
            p50_us: tally.delays.value_at_quantile(0.5),
            p99_us: tally.delays.value_at_quantile(0.99),
            opening_p99_us: tally.openings.value_at_quantile(0.99),
            asked: tally.asked,
            served: tally.served,
            late: tally.late,
            lost: tally.lost + lost,
            wrong: tally.wrong + wrong,
            answered: after.answered - before.answered,
            sent: *sent,
            sessions: after.sessions,
            drops: drops.filter(|(_, count)| *count > 0).collect(),
            // A tick is a hundredth of a second.
            gateway_cpu: (after.gateway - before.gateway) as f64 / 100.0 / watched,
            pressure: before.pressure.zip(after.pressure).map_or(0.0, |(a, b)| (b - a) as f64 / 1e6 / watched),
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

/// New connections: how many began, were served, and needed a retransmission in their handshake.
#[derive(Clone, Copy, Debug, Serialize)]
struct New {
    asked: u64,
    served: u64,
    late: u64,
    p99_us: f64,
}

impl New {
    fn late_share(&self) -> f64 {
        self.late as f64 / self.asked.max(1) as f64
    }
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
    /// Of all floods, against the best quiet phase: the median, and the worst.
    goodput_ratio: f64,
    worst_goodput_ratio: f64,
    /// Of all controls, each against its own round's quiet phase, which has the same connections: what the machine costs.
    control_ratio: f64,
    p50_us: Phases<f64>,
    p99_us: Phases<f64>,
    new_connections: Phases<New>,
    /// Connections of tenant A that stood, and ended or got no more replies.
    lost_connections: Phases<u64>,
    /// Answers that were meant for others.
    wrong: u64,
    /// SYNs that tenant B's backends answered in floods; 0 where its pods are silent.
    backend_answers: u64,
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
        let best = rounds.iter().map(|round| rate(&round[0])).fold(1.0, f64::max);
        let ratios: Vec<f64> = rounds.iter().map(|round| rate(&round[2]) / best).collect();
        let controls = rounds.iter().map(|round| rate(&round[1]) / rate(&round[0]).max(1.0));
        let [asked, served, late] = [sums(|it| it.asked), sums(|it| it.served), sums(|it| it.late)];
        let opening = phases(&|it| it.opening_p99_us as f64);
        let new = |at: usize, p99_us| New { asked: asked[at], served: served[at], late: late[at], p99_us };
        let [quiet, control, flood] = sums(|it| it.lost);
        let mut drops = BTreeMap::new();
        for (reason, count) in rounds.iter().flat_map(|round| &round[2].drops) {
            *drops.entry(reason.clone()).or_default() += count;
        }
        let line = Self {
            benchmark: "flood",
            kind: kind.name(),
            family: if ipv6 { "ipv6" } else { "ipv4" },
            capacity,
            rounds: rounds.len(),
            flood_pps,
            sent_pps: phases(&|it| it.sent as f64 / it.seconds),
            goodput_mbps: phases(&|it| rate(it) * 8.0 / 1e6),
            worst_goodput_ratio: thousandths(ratios.iter().copied().fold(f64::INFINITY, f64::min)),
            goodput_ratio: thousandths(median(ratios)),
            control_ratio: thousandths(median(controls.collect())),
            p50_us: phases(&|it| it.p50_us as f64),
            p99_us: phases(&|it| it.p99_us as f64),
            new_connections: Phases {
                quiet: new(0, opening.quiet),
                control: new(1, opening.control),
                flood: new(2, opening.flood),
            },
            lost_connections: Phases { quiet, control, flood },
            wrong: sums(|it| it.wrong).iter().sum(),
            backend_answers: sums(|it| it.answered)[2],
            sessions: rounds.iter().map(|round| round[2].sessions).max().unwrap_or(0),
            drops,
            gateway_cpu: phases(&|it| it.gateway_cpu),
            cpu_pressure: phases(&|it| it.pressure),
            met: false,
        };
        Self { met: line.is_met(), ..line }
    }

    fn is_met(&self) -> bool {
        let New { asked, served, .. } = self.new_connections.flood;
        let is_served = asked > 0 && served == asked && !self.is_late();
        self.goodput_ratio >= GOODPUT && is_served && self.lost() == 0 && self.wrong == 0
    }

    /// Whether handshakes lose more packets than without the flood.
    fn is_late(&self) -> bool {
        let Phases { quiet, control, flood } = self.new_connections;
        flood.late_share() > quiet.late_share().max(control.late_share()) + LATE_MARGIN
    }

    /// Connections that were lost, whenever: each stood to stay.
    fn lost(&self) -> u64 {
        let Phases { quiet, control, flood } = self.lost_connections;
        quiet + control + flood
    }

    /// Whether tenant B's backends have answered anything.
    pub(super) fn is_answered(&self) -> bool {
        self.backend_answers > 0
    }

    /// What is missed, as a sentence.
    pub(super) fn missed(&self) -> Option<String> {
        let New { asked, served, late, .. } = self.new_connections.flood;
        let Phases { quiet, control, .. } = self.new_connections;
        let is_machine = self.control_ratio < GOODPUT || control.served < control.asked;
        let why = if is_machine { "; the control misses it as well: this machine is too busy to tell" } else { "" };
        (!self.met).then(|| {
            format!(
                "{} with a table of {}: {:.1} % of the goodput, {:.1} % in the worst round, {served} of {asked} new connections served, \
                 {late} of them late ({} when quiet, {} in the control), {} of those that stood lost{why}",
                self.kind,
                self.capacity,
                self.goodput_ratio * 100.0,
                self.worst_goodput_ratio * 100.0,
                quiet.late,
                control.late,
                self.lost(),
            )
        })
    }
}

fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use anyhow::Result;

    use super::super::Reading;
    use super::super::tenant::Stage;
    use super::*;

    /// A phase of a second without any fault.
    fn good(bytes: u64) -> Measured {
        Measured { seconds: 1.0, bytes, asked: 100, served: 100, ..Measured::default() }
    }

    fn line(rounds: &[[Measured; 3]]) -> Line {
        Line::new(Kind::Syn, false, 1024, 0, rounds)
    }

    fn flooded(flood: Measured) -> Line {
        line(&[[good(1000), good(1000), flood]])
    }

    #[test]
    fn a_flood_that_costs_goodput_or_a_connection_is_named() {
        assert_eq!((flooded(good(960)).met, flooded(good(960)).missed()), (true, None));
        assert!(!flooded(good(940)).met);
        assert!(!flooded(Measured { wrong: 1, ..good(960) }).met);
        let refused = flooded(Measured { served: 99, ..good(960) });
        assert!(refused.missed().unwrap().contains("99 of 100 new connections"), "{:?}", refused.missed());
        for phase in 0..3 {
            let mut round = [good(1000), good(1000), good(1000)];
            round[phase].lost = 1;
            let lost = line(&[round]).missed().unwrap();
            assert!(lost.contains("1 of those that stood lost"), "{lost}");
        }
    }

    #[test]
    fn later_rounds_do_not_hide_what_the_first_flood_cost() {
        let after = || [good(700), good(700), good(700)];
        let first = [good(1000), good(1000), good(700)];
        let line = line(&[first, after(), after()]);
        assert_eq!(
            (line.goodput_ratio, line.worst_goodput_ratio, line.control_ratio, line.met),
            (0.7, 0.7, 1.0, false)
        );
        assert!(!line.missed().unwrap().contains("too busy"), "{:?}", line.missed());
    }

    #[test]
    fn the_worst_round_stands_beside_the_median() {
        let round = |flood| [good(1000), good(1000), good(flood)];
        let line = line(&[round(600), round(1000), round(990)]);
        assert_eq!((line.goodput_ratio, line.worst_goodput_ratio), (0.99, 0.6));
    }

    #[test]
    fn more_late_handshakes_than_without_a_flood_are_named() {
        let late = |late| Measured { late, ..good(1000) };
        let line = |[quiet, control, flood]: [u64; 3]| line(&[[late(quiet), late(control), late(flood)]]);
        assert!(line([0, 0, 1]).met && line([5, 0, 5]).met && line([0, 5, 6]).met);
        let missed = line([1, 2, 5]).missed().unwrap();
        assert!(missed.contains("5 of them late (1 when quiet, 2 in the control)"), "{missed}");
    }

    #[test]
    fn a_loss_between_phases_counts_for_the_earlier_one() -> Result<()> {
        let stage = Stage::new()?;
        let [tally, rest] = [stage.next()?, stage.next()?];
        for (tally, lost) in [(&tally, 1), (&rest, 2)] {
            let mut tally = hold(tally);
            (tally.lost, tally.wrong, tally.bytes) = (lost, lost, 500);
        }
        let now = Instant::now();
        let reading = Reading { at: now, sessions: 0, drops: BTreeMap::new(), answered: 7, gateway: 0, pressure: None };
        let after = Reading { at: now + Duration::from_secs(4), answered: 9, ..reading.clone() };
        let length = Duration::from_secs(2);
        let played = Played { tally, around: vec![rest], length, sent: 0, before: reading, after };
        let Measured { seconds, bytes, lost, wrong, answered, .. } = Measured::new(&played);
        assert_eq!((bytes, lost, wrong, answered), (500, 3, 3, 2));
        assert!((seconds - 2.0).abs() < f64::EPSILON);
        Ok(())
    }

    #[test]
    fn a_machine_that_is_too_busy_is_named() {
        let line = Line::new(Kind::Udp, true, 1024, 0, &[[good(1000), good(900), good(900)]]);
        assert!(line.missed().unwrap().contains("too busy"));
    }
}
