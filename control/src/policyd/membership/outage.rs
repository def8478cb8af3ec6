//! Log rate limiting for an outage: its start, a change of its reason and its end are logged; recurring outages with
//! exponentially growing intervals.

use std::time::{Duration, Instant};

use vipgate_common::Backoff;

/// Interval between log lines about failures. After the longest one without a failure it is reset.
const INTERVAL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// Log state of an outage.
#[derive(Debug)]
pub(super) struct Outage {
    /// The reason that was logged last, until the recovery is logged.
    reason: Option<String>,
    /// No failure is logged before this time.
    quiet_until: Option<Instant>,
    interval: Backoff,
    healthy_since: Option<Instant>,
}

impl Default for Outage {
    fn default() -> Self {
        Self { reason: None, quiet_until: None, interval: Backoff::new(INTERVAL), healthy_since: None }
    }
}

impl Outage {
    /// Records a failure; whether to log it.
    pub(super) fn record_failure(&mut self, now: Instant, reason: &str) -> bool {
        let healthy = self.healthy_since.take().map(|since| now.saturating_duration_since(since));
        if healthy.is_some_and(|duration| duration >= INTERVAL.1) {
            self.quiet_until = None;
            self.interval.reset();
        }
        if self.reason.as_deref() == Some(reason) || self.quiet_until.is_some_and(|until| now < until) {
            return false;
        }
        self.reason = Some(reason.to_owned());
        self.quiet_until = Some(now + self.interval.next_delay());
        true
    }

    /// Records a success; whether to log a recovery: only if the failure was logged.
    pub(super) fn record_recovery(&mut self, now: Instant) -> bool {
        self.healthy_since.get_or_insert(now);
        self.reason.take().is_some()
    }

    /// Whether the last log line was about a failure.
    #[cfg(test)]
    pub(super) fn is_active(&self) -> bool {
        self.reason.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_failure_and_its_recovery_are_logged_once() {
        let (mut outage, now) = (Outage::default(), Instant::now());
        assert!(!outage.record_recovery(now));
        assert!(outage.record_failure(now, "refused"));
        assert!((1..1000).all(|n| !outage.record_failure(now + 100 * n * MS, "refused")));
        assert!(outage.record_recovery(now + 100_000 * MS));
        assert!(!outage.record_recovery(now + 100_001 * MS));
    }

    #[test]
    fn another_reason_is_logged_after_the_interval() {
        let (mut outage, now) = (Outage::default(), Instant::now());
        assert!(outage.record_failure(now, "refused"));
        assert!(!outage.record_failure(now + 100 * MS, "no leader"));
        assert!(outage.record_failure(now + 1100 * MS, "no leader"));
    }

    #[test]
    fn recurring_outages_are_logged_with_growing_intervals() {
        let (mut outage, now) = (Outage::default(), Instant::now());
        let lines = (0..600).filter(|n| {
            let now = now + 100 * *n * MS;
            if n % 2 == 0 {
                outage.record_failure(now, if n % 4 == 0 { "refused" } else { "no leader" })
            } else {
                outage.record_recovery(now)
            }
        });
        // A failure and its recovery at 0, 1, 3, 7, 15 and 31 s of a minute.
        assert_eq!(lines.count(), 12);
        // After a minute without failures the next one is logged at once.
        assert!(outage.record_failure(now + Duration::from_mins(3), "refused"));
    }
}
