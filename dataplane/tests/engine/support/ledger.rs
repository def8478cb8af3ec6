//! What a gateway has counted: a test states all of it, or fails at its end. What it doesn't name must not have changed.

use vipgate_dataplane::counters::{Counter, Counters, Direction, DropReason, EndReason};

use super::Gateway;
use super::cluster::Cluster;

/// What counters showed when they were stated last.
#[derive(Debug, Default)]
pub struct Ledger {
    stated: Vec<u64>,
    varies: bool,
}

impl Gateway {
    /// Since this was stated last, the gateway has counted exactly this: `egress 2, drop no_session 1`.
    #[track_caller]
    pub fn assert_delta(&mut self, expected: &str) {
        assert_eq!(self.take_delta(), expected, "counted");
    }

    /// What it counts is random: whoever lets random things happen says by a tally what was reached.
    pub fn counts_vary(&mut self) {
        self.ledger.varies = true;
    }

    /// What was counted since it was stated last, in the words of metrics. Levels, bytes and what came in aren't part of it.
    pub fn take_delta(&mut self) -> String {
        let counted = self.counted();
        let before = std::mem::take(&mut self.ledger.stated).into_iter().chain(std::iter::repeat(0));
        let more = counted.iter().zip(before).filter(|((_, now), before)| now != before);
        let delta: Vec<_> = more.map(|((name, now), before)| format!("{name} {}", now - before)).collect();
        self.ledger.stated = counted.into_iter().map(|(_, now)| now).collect();
        delta.join(", ")
    }

    /// Fails the test if something was counted that it hasn't stated.
    pub(super) fn check_all_is_stated(&mut self) {
        if !std::thread::panicking() && !self.ledger.varies {
            let left = self.take_delta();
            assert!(left.is_empty(), "counted, and not stated by assert_delta: {left}");
        }
    }

    fn counted(&self) -> Vec<(String, u64)> {
        let sum =
            |of: &dyn Fn(&Counters) -> &Counter| self.workers.iter().map(|it| of(it.counters()).get()).sum::<u64>();
        let mut counted = Vec::new();
        for it in Direction::ALL {
            counted.push((it.name().to_owned(), sum(&|all| &all.packets[it as usize])));
        }
        for it in DropReason::ALL {
            counted.push((format!("drop {}", it.name()), sum(&|all| &all.drops[it as usize])));
        }
        for it in EndReason::ALL {
            counted.push((format!("ended {}", it.name()), sum(&|all| &all.sessions_ended[it as usize])));
        }
        let rest: [(&str, Read); 9] = [
            ("created", |all| &all.sessions_created),
            ("taken over", |all| &all.sessions_taken_over),
            ("copies refused", |all| &all.copies_refused),
            ("answered", |all| &all.answered),
            ("answers limited", |all| &all.answers_limited),
            ("heard", |all| &all.heard),
            ("vip conflicts", |all| &all.vip_conflicts),
            ("handed over", |all| &all.handoffs),
            ("out of window", |all| &all.out_of_window),
        ];
        counted.extend(rest.map(|(name, of)| (name.to_owned(), sum(&of))));
        counted
    }
}

/// Reads one counter of a worker.
type Read = fn(&Counters) -> &Counter;

impl Cluster {
    /// The same of each of its gateways.
    #[track_caller]
    pub fn assert_delta(&mut self, expected: &[&str]) {
        let counted: Vec<_> = self.gateways.iter_mut().map(Gateway::take_delta).collect();
        assert_eq!(counted, expected, "counted");
    }

    /// The same of each of its gateways.
    pub fn counts_vary(&mut self) {
        self.gateways.iter_mut().for_each(Gateway::counts_vary);
    }
}
