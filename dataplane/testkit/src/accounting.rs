//! Counter accounting: a test asserts every change of a gateway's counters, or fails when the gateway is dropped.

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::observe::counters::{Counter, Counters};
use vipgate_dataplane::session::end_reason::EndReason;

use crate::Gateway;
use crate::cluster::Cluster;

/// Counter values at the last assertion.
#[derive(Debug, Default)]
pub struct CounterAccounting {
    asserted: Vec<u64>,
    is_skipped: bool,
}

impl Gateway {
    /// Asserts the exact counter changes since the last call: `egress 2, drop no_session 1`.
    #[track_caller]
    pub fn assert_delta(&mut self, expected: &str) {
        assert_eq!(self.take_delta(), expected, "counter changes");
    }

    /// Turns the check off where counts are random; such a test asserts its coverage instead.
    pub fn skip_counter_check(&mut self) {
        self.accounting.is_skipped = true;
    }

    /// Counter changes since the last call, in the words of metrics. Gauges, bytes and receive counters are not
    /// included.
    pub fn take_delta(&mut self) -> String {
        let counters = self.counters();
        let before = std::mem::take(&mut self.accounting.asserted).into_iter().chain(std::iter::repeat(0));
        let changed = counters.iter().zip(before).filter(|((_, now), before)| now != before);
        let delta: Vec<_> = changed.map(|((name, now), before)| format!("{name} {}", now - before)).collect();
        self.accounting.asserted = counters.into_iter().map(|(_, now)| now).collect();
        delta.join(", ")
    }

    /// Fails the test if a counter change was not asserted.
    pub(super) fn check_unasserted(&mut self) {
        if !std::thread::panicking() && !self.accounting.is_skipped {
            let unasserted = self.take_delta();
            assert!(unasserted.is_empty(), "counter changes without assert_delta: {unasserted}");
        }
    }

    fn counters(&self) -> Vec<(String, u64)> {
        let sum =
            |read: &dyn Fn(&Counters) -> &Counter| self.workers.iter().map(|it| read(it.counters()).get()).sum::<u64>();
        let mut counters = Vec::new();
        for it in Direction::ALL {
            counters.push((it.name().to_owned(), sum(&|all| &all.packets[it as usize])));
        }
        for it in DropReason::ALL {
            counters.push((format!("drop {}", it.name()), sum(&|all| &all.drops[it as usize])));
        }
        for it in EndReason::ALL {
            counters.push((format!("ended {}", it.name()), sum(&|all| &all.sessions_ended[it as usize])));
        }
        let others: [(&str, ReadCounter); 9] = [
            ("created", |all| &all.sessions_created),
            ("failed over", |all| &all.sessions_failed_over),
            ("standby rejected", |all| &all.standby_rejected),
            ("replies sent", |all| &all.replies_sent),
            ("replies suppressed", |all| &all.replies_suppressed),
            ("consumed", |all| &all.consumed),
            ("vip conflicts", |all| &all.vip_conflicts),
            ("handed off", |all| &all.handoffs),
            ("out of window", |all| &all.out_of_window),
        ];
        counters.extend(others.map(|(name, read)| (name.to_owned(), sum(&read))));
        counters
    }
}

/// Reads one counter of a worker.
type ReadCounter = fn(&Counters) -> &Counter;

impl Cluster {
    /// [`Gateway::assert_delta`] for each of its gateways.
    #[track_caller]
    pub fn assert_delta(&mut self, expected: &[&str]) {
        let changes: Vec<_> = self.gateways.iter_mut().map(Gateway::take_delta).collect();
        assert_eq!(changes, expected, "counter changes");
    }

    /// [`Gateway::skip_counter_check`] for each of its gateways.
    pub fn skip_counter_check(&mut self) {
        self.gateways.iter_mut().for_each(Gateway::skip_counter_check);
    }
}
