//! The ledger of a test: what its gateways have dropped and refused. A test declares all of it, or fails.
//!
//! The harness reads a gateway's metrics before it stops the process, and at the end of the world. A process that dies by itself or is
//! suspended can't be asked. Declarations add up: each stands beside the action that causes what it names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use vipgate::lab::Host;
use vipgate_dataplane::counters::DropReason;

use crate::METRICS;
use crate::policyd::{get, values};

/// What counts as an error beside drops: its name here, its metric, and a label.
const ERRORS: [(&str, &str, &str); 9] = [
    ("answers_limited", "vipgate_answers_limited_total", ""),
    ("nat_log_lost", "vipgate_nat_log_records_total", "result=\"lost\""),
    ("no_socket", "vipgate_steered_packets_total", "outcome=\"no_socket\""),
    ("peer_refused", "vipgate_peer_refused_total", ""),
    ("policy_rejected", "vipgate_policy_updates_total", "result=\"rejected\""),
    ("ring_dropped", "vipgate_ring_losses_total", "cause=\"dropped\""),
    ("ring_invalid_descriptor", "vipgate_ring_losses_total", "cause=\"invalid_descriptor\""),
    ("session_copies_refused", "vipgate_session_copies_refused_total", ""),
    ("vip_conflicts", "vipgate_vip_conflicts_total", ""),
];

/// What a worker that waits for its core loses where clients share it: packets that its rings can't hold. The kernel counts each twice.
pub const RING_LOSSES: [&str; 2] = ["rx_no_buffer", "ring_dropped"];

/// What gateways have counted, and what the test has declared, both by reason.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    declared: BTreeMap<&'static str, RangeInclusive<u64>>,
    /// By reason, then by gateway.
    counted: BTreeMap<&'static str, BTreeMap<String, u64>>,
}

impl Ledger {
    /// Each of these happens at least once: drop reasons, or names of `ERRORS`.
    #[track_caller]
    pub fn expect<const N: usize>(&self, reasons: [&'static str; N]) {
        for reason in reasons {
            self.declare(reason, 1..=u64::MAX);
        }
    }

    /// Each of these happens exactly so often.
    #[track_caller]
    pub fn expect_exactly<const N: usize>(&self, counts: [(&'static str, u64); N]) {
        for (reason, count) in counts {
            self.declare(reason, count..=count);
        }
    }

    /// Each of these happens or doesn't: only for what depends on timing.
    #[track_caller]
    pub fn allow<const N: usize>(&self, reasons: [&'static str; N]) {
        for reason in reasons {
            self.declare(reason, 0..=u64::MAX);
        }
    }

    /// Anything may happen: for scenarios that follow from chance, which report what was counted instead.
    pub fn allow_all(&self) {
        for name in names() {
            self.declare(name, 0..=u64::MAX);
        }
    }

    /// What gateways have counted so far, all together.
    pub fn counted(&self) -> BTreeMap<&'static str, u64> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.counted.iter().map(|(reason, counts)| (*reason, counts.values().sum())).collect()
    }

    #[track_caller]
    fn declare(&self, reason: &'static str, count: RangeInclusive<u64>) {
        assert!(names().any(|name| name == reason), "{reason} is no drop reason and no error");
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let declared = entries.declared.entry(reason).or_insert(0..=0);
        let [least, most] = [[declared.start(), count.start()], [declared.end(), count.end()]]
            .map(|[one, other]| one.saturating_add(*other));
        *declared = least..=most;
    }

    /// Enters what the gateway that runs on a host has counted, and fails if that is more than declared. `last` shows its last drops.
    #[track_caller]
    pub fn enter(&self, gateway: &str, host: &Host, last: impl FnOnce() -> String) {
        let (_, metrics) = get(host, METRICS, "/metrics").unwrap_or_else(|error| panic!("{gateway}: {error}"));
        self.add(gateway, &metrics, last);
    }

    #[track_caller]
    fn add(&self, gateway: &str, metrics: &str, last: impl FnOnce() -> String) {
        let mut excess = String::new();
        {
            let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            for (reason, count) in counts(metrics).filter(|(_, count)| *count > 0) {
                *entries.counted.entry(reason).or_default().entry(gateway.to_owned()).or_default() += count;
                let most = entries.declared.get(reason).map_or(0, |declared| *declared.end());
                if entries.sum(reason) > most {
                    let declared = if most == 0 { "none".into() } else { format!("at most {most}") };
                    let _ = writeln!(excess, "{reason}: {}; declared: {declared}", entries.text(reason));
                }
            }
        }
        assert!(excess.is_empty(), "{gateway} counted what the test doesn't declare.\n{excess}{}", last());
    }

    /// Fails if something that was declared hasn't happened as often.
    pub fn check(&self) {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing = String::new();
        for reason in entries.counted.keys() {
            println!("{reason}: {}", entries.text(reason));
        }
        for (reason, declared) in &entries.declared {
            if entries.sum(reason) < *declared.start() {
                let _ =
                    writeln!(missing, "{reason}: {}; declared: at least {}", entries.text(reason), declared.start());
            }
        }
        drop(entries);
        assert!(missing.is_empty(), "the test declares what no gateway counted.\n{missing}");
    }
}

impl Entries {
    fn sum(&self, reason: &str) -> u64 {
        self.counted.get(reason).map_or(0, |counts| counts.values().sum())
    }

    fn text(&self, reason: &str) -> String {
        let counts = self.counted.get(reason).into_iter().flatten();
        let counts: Vec<String> = counts.map(|(gateway, count)| format!("{count} at {gateway}")).collect();
        if counts.is_empty() { "0".into() } else { counts.join(", ") }
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    DropReason::ALL.into_iter().map(DropReason::name).chain(ERRORS.map(|(name, ..)| name))
}

/// What a gateway's metrics say of each reason.
fn counts(metrics: &str) -> impl Iterator<Item = (&'static str, u64)> + use<> {
    let sum = |name, labels: &str| values(metrics, name, labels).map(|it| it.parse::<u64>().unwrap()).sum();
    let drops = DropReason::ALL.map(|it| (it.name(), sum("vipgate_drops_total", &format!("reason=\"{}\"", it.name()))));
    drops.into_iter().chain(ERRORS.map(|(name, metric, labels)| (name, sum(metric, labels))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ledger of two gateways that have each dropped so many packets for want of a session.
    fn dropped(declare: fn(&Ledger), counts: [u64; 2]) {
        let ledger = Ledger::default();
        declare(&ledger);
        for (gateway, count) in ["gw-1", "gw-2"].into_iter().zip(counts) {
            let metrics = format!(
                "vipgate_drops_total{{reason=\"no_service\"}} 0\nvipgate_drops_total{{reason=\"no_session\"}} {count}\n\
                 vipgate_policy_updates_total{{result=\"applied\"}} 7\n"
            );
            ledger.add(gateway, &metrics, String::new);
        }
        ledger.check();
    }

    #[test]
    fn what_is_declared_may_happen() {
        dropped(|_| {}, [0, 0]);
        dropped(|ledger| ledger.expect(["no_session"]), [0, 3]);
        dropped(|ledger| ledger.allow(["no_session"]), [0, 0]);
        let twice = |ledger: &Ledger| {
            ledger.expect_exactly([("no_session", 2)]);
            ledger.expect_exactly([("no_session", 1)]);
        };
        dropped(twice, [1, 2]);
    }

    #[test]
    #[should_panic(expected = "gw-2 counted what the test doesn't declare.\nno_session: 1 at gw-2; declared: none")]
    fn what_is_not_declared_fails() {
        dropped(|ledger| ledger.allow(["no_service"]), [0, 1]);
    }

    #[test]
    #[should_panic(expected = "no_session: 2 at gw-1, 2 at gw-2; declared: at most 3")]
    fn more_than_declared_fails() {
        dropped(|ledger| ledger.expect_exactly([("no_session", 3)]), [2, 2]);
    }

    #[test]
    #[should_panic(expected = "no_session: 0; declared: at least 1")]
    fn what_is_declared_in_vain_fails() {
        dropped(|ledger| ledger.expect(["no_session"]), [0, 0]);
    }
}
