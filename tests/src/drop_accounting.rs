//! Accounting of drops and errors: a test declares all that its gateways count, or fails.
//!
//! Counters are read from a gateway's metrics before its process is stopped, and at the end of the test. A process
//! that has exited or is suspended is not read. Declarations add up: each stands beside the action that causes the
//! drops.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_lab::Host;

use crate::METRICS_PORT;
use crate::policyd::{http_get, metric_values};

/// Errors that are accounted besides drops: name, metric and label.
const ERRORS: [(&str, &str, &str); 10] = [
    ("answers_limited", "vipgate_answers_limited_total", ""),
    ("capture_failures", "vipgate_capture_failures_total", ""),
    ("nat_log_lost", "vipgate_nat_log_records_total", "result=\"lost\""),
    ("no_socket", "vipgate_steered_packets_total", "outcome=\"no_socket\""),
    ("peer_refused", "vipgate_peer_refused_total", ""),
    ("policy_rejected", "vipgate_policy_updates_total", "result=\"rejected\""),
    ("ring_dropped", "vipgate_ring_losses_total", "cause=\"dropped\""),
    ("ring_invalid_descriptor", "vipgate_ring_losses_total", "cause=\"invalid_descriptor\""),
    ("standby_sessions_rejected", "vipgate_standby_sessions_rejected_total", ""),
    ("vip_conflicts", "vipgate_vip_conflicts_total", ""),
];

/// Losses of a worker that waits for its core while clients share it: packets that its rings can't hold. The kernel
/// counts each twice.
pub const RING_LOSSES: [&str; 2] = ["rx_no_buffer", "ring_dropped"];

/// Counts of gateways and declarations of a test, by reason.
#[derive(Debug, Default)]
pub struct DropAccounting(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    declared: BTreeMap<&'static str, RangeInclusive<u64>>,
    /// By reason, then by gateway.
    counted: BTreeMap<&'static str, BTreeMap<String, u64>>,
}

impl DropAccounting {
    /// Declares that each of these occurs at least once: drop reasons, or names of `ERRORS`.
    #[track_caller]
    pub fn expect<const N: usize>(&self, reasons: [&'static str; N]) {
        for reason in reasons {
            self.declare(reason, 1..=u64::MAX);
        }
    }

    /// Declares that each of these occurs exactly this often.
    #[track_caller]
    pub fn expect_exactly<const N: usize>(&self, counts: [(&'static str, u64); N]) {
        for (reason, count) in counts {
            self.declare(reason, count..=count);
        }
    }

    /// Declares that each of these may occur: only for what depends on timing.
    #[track_caller]
    pub fn allow<const N: usize>(&self, reasons: [&'static str; N]) {
        for reason in reasons {
            self.declare(reason, 0..=u64::MAX);
        }
    }

    /// Allows everything: for random scenarios, which report the counts instead.
    pub fn allow_all(&self) {
        for name in known_names() {
            self.declare(name, 0..=u64::MAX);
        }
    }

    /// Counts so far, over all gateways.
    pub fn totals(&self) -> BTreeMap<&'static str, u64> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.counted.iter().map(|(reason, by_gateway)| (*reason, by_gateway.values().sum())).collect()
    }

    #[track_caller]
    fn declare(&self, reason: &'static str, count: RangeInclusive<u64>) {
        assert!(known_names().any(|name| name == reason), "{reason} is neither a drop reason nor an error");
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let declared = counts.declared.entry(reason).or_insert(0..=0);
        let [min, max] = [[declared.start(), count.start()], [declared.end(), count.end()]]
            .map(|[one, other]| one.saturating_add(*other));
        *declared = min..=max;
    }

    /// Records the counters of the gateway on a host, and fails if they exceed the declarations. `last_drops` is
    /// printed then.
    #[track_caller]
    pub fn record(&self, gateway: &str, host: &Host, last_drops: impl FnOnce() -> String) {
        let (_, metrics) =
            http_get(host, METRICS_PORT, "/metrics").unwrap_or_else(|error| panic!("{gateway}: {error}"));
        self.add(gateway, &metrics, last_drops);
    }

    #[track_caller]
    fn add(&self, gateway: &str, metrics: &str, last_drops: impl FnOnce() -> String) {
        let mut excess = String::new();
        {
            let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            for (reason, count) in parse(metrics).filter(|(_, count)| *count > 0) {
                *counts.counted.entry(reason).or_default().entry(gateway.to_owned()).or_default() += count;
                let max = counts.declared.get(reason).map_or(0, |declared| *declared.end());
                if counts.sum(reason) > max {
                    let declared = if max == 0 { "none".into() } else { format!("at most {max}") };
                    let _ = writeln!(excess, "{reason}: {}; declared: {declared}", counts.text(reason));
                }
            }
        }
        assert!(excess.is_empty(), "{gateway} has undeclared drops or errors.\n{excess}{}", last_drops());
    }

    /// Fails if something occurred less often than declared.
    pub fn check(&self) {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing = String::new();
        for reason in counts.counted.keys() {
            println!("{reason}: {}", counts.text(reason));
        }
        for (reason, declared) in &counts.declared {
            if counts.sum(reason) < *declared.start() {
                let _ = writeln!(missing, "{reason}: {}; declared: at least {}", counts.text(reason), declared.start());
            }
        }
        drop(counts);
        assert!(missing.is_empty(), "declared drops or errors did not occur.\n{missing}");
    }
}

impl Counts {
    fn sum(&self, reason: &str) -> u64 {
        self.counted.get(reason).map_or(0, |by_gateway| by_gateway.values().sum())
    }

    fn text(&self, reason: &str) -> String {
        let by_gateway = self.counted.get(reason).into_iter().flatten();
        let counts: Vec<String> = by_gateway.map(|(gateway, count)| format!("{count} at {gateway}")).collect();
        if counts.is_empty() { "0".into() } else { counts.join(", ") }
    }
}

fn known_names() -> impl Iterator<Item = &'static str> {
    DropReason::ALL.into_iter().map(DropReason::name).chain(ERRORS.map(|(name, ..)| name))
}

/// Counts of all reasons in a scrape.
fn parse(metrics: &str) -> impl Iterator<Item = (&'static str, u64)> + use<> {
    let sum = |name, labels: &str| metric_values(metrics, name, labels).map(|it| it.parse::<u64>().unwrap()).sum();
    let drops = DropReason::ALL.map(|it| (it.name(), sum("vipgate_drops_total", &format!("reason=\"{}\"", it.name()))));
    drops.into_iter().chain(ERRORS.map(|(name, metric, labels)| (name, sum(metric, labels))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks declarations against two gateways with these numbers of `no_session` drops.
    fn check_declarations(declare: fn(&DropAccounting), counts: [u64; 2]) {
        let accounting = DropAccounting::default();
        declare(&accounting);
        for (gateway, count) in ["gw-1", "gw-2"].into_iter().zip(counts) {
            let metrics = format!(
                "vipgate_drops_total{{reason=\"no_service\"}} 0\nvipgate_drops_total{{reason=\"no_session\"}} {count}\n\
                 vipgate_policy_updates_total{{result=\"applied\"}} 7\n"
            );
            accounting.add(gateway, &metrics, String::new);
        }
        accounting.check();
    }

    #[test]
    fn declared_counts_pass() {
        check_declarations(|_| {}, [0, 0]);
        check_declarations(|accounting| accounting.expect(["no_session"]), [0, 3]);
        check_declarations(|accounting| accounting.allow(["no_session"]), [0, 0]);
        let twice = |accounting: &DropAccounting| {
            accounting.expect_exactly([("no_session", 2)]);
            accounting.expect_exactly([("no_session", 1)]);
        };
        check_declarations(twice, [1, 2]);
    }

    #[test]
    #[should_panic(expected = "gw-2 has undeclared drops or errors.\nno_session: 1 at gw-2; declared: none")]
    fn undeclared_counts_fail() {
        check_declarations(|accounting| accounting.allow(["no_service"]), [0, 1]);
    }

    #[test]
    #[should_panic(expected = "no_session: 2 at gw-1, 2 at gw-2; declared: at most 3")]
    fn counts_above_the_declaration_fail() {
        check_declarations(|accounting| accounting.expect_exactly([("no_session", 3)]), [2, 2]);
    }

    #[test]
    #[should_panic(expected = "no_session: 0; declared: at least 1")]
    fn counts_below_the_declaration_fail() {
        check_declarations(|accounting| accounting.expect(["no_session"]), [0, 0]);
    }
}
