//! What is logged of events that may repeat at any rate.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Maximum number of errors that are remembered.
const MAX_ERRORS: usize = 32;

/// Errors since the last success, so that each is logged once: each of several servers may have another one.
#[derive(Debug, Default)]
pub struct LoggedErrors(BTreeSet<String>);

impl LoggedErrors {
    /// Whether an error is to be logged: it wasn't yet.
    pub fn is_new(&mut self, error: &str) -> bool {
        if self.0.len() >= MAX_ERRORS && !self.0.contains(error) {
            self.clear();
        }
        self.0.insert(error.to_owned())
    }

    /// Forgets all: a success. Returns whether there was an error, so that the recovery is to be logged.
    pub fn clear(&mut self) -> bool {
        !std::mem::take(&mut self.0).is_empty()
    }
}

/// Minimum interval between two reactions, such as log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MinInterval {
    last: Option<Instant>,
    omitted: u64,
}

impl MinInterval {
    /// If a reaction is due: how often there was none since the last one.
    pub fn due(&mut self, interval: Duration, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < interval) {
            self.omitted += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_logged_once_until_a_success_and_then_the_recovery() {
        let mut logged = LoggedErrors::default();
        assert!(!logged.clear(), "no recovery without an error");
        for _ in 0..2 {
            assert!(logged.is_new("refused") && logged.is_new("no response"));
            assert!(!logged.is_new("refused") && !logged.is_new("no response"));
            assert!(logged.clear() && !logged.clear(), "one recovery");
        }
    }

    #[test]
    fn the_number_of_remembered_errors_is_bounded() {
        let mut logged = LoggedErrors::default();
        for n in 0..10 * MAX_ERRORS {
            assert!(logged.is_new(&n.to_string()) && !logged.is_new(&n.to_string()));
            assert!(logged.0.len() <= MAX_ERRORS);
        }
    }

    #[test]
    fn reactions_are_an_interval_apart_and_omitted_ones_are_counted() {
        let (mut log, start, interval) = (MinInterval::default(), Instant::now(), Duration::from_secs(10));
        for (second, expected) in [(0, Some(0)), (1, None), (9, None), (10, Some(2)), (5, None), (20, Some(1))] {
            assert_eq!(log.due(interval, start + Duration::from_secs(second)), expected, "{second}");
        }
    }
}
