//! When what the steering program's maps couldn't take is retried: soon at first, then every two seconds.

use std::time::{Duration, Instant};

use crate::source::backoff::delay_after;

/// First and longest delay; it doubles with each failure in a row.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// The next retry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Retry {
    failures: u32,
    at: Option<Instant>,
}

impl Retry {
    /// When it is due; `None`: nothing has failed.
    pub(super) fn at(&self) -> Option<Instant> {
        self.at
    }

    /// An attempt has failed.
    pub(super) fn failed(&mut self, now: Instant) {
        self.at = Some(now + delay_after(self.failures, BACKOFF));
        self.failures = self.failures.saturating_add(1);
    }

    /// Nothing is left to do.
    pub(super) fn succeeded(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_delayed_by_100_ms_to_2_s_until_one_succeeds() {
        let now = Instant::now();
        let mut retry = Retry::default();
        assert_eq!(retry.at(), None);
        for _ in 0..2 {
            for delay in [100, 200, 400, 800, 1600, 2000, 2000, 2000] {
                retry.failed(now);
                assert_eq!(retry.at(), Some(now + Duration::from_millis(delay)));
            }
            retry.succeeded();
            assert_eq!(retry.at(), None);
        }
    }
}
