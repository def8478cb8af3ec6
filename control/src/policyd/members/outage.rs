//! When to log that something fails: at once, when the reason is another one, and when it works again; of what comes and goes, less
//! and less often.

use std::time::{Duration, Instant};

/// From one line about a failure to the next one, at first and at most. So long without a failure begins anew.
const INTERVAL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// What was logged of it.
#[derive(Debug)]
pub(super) struct Outage {
    /// The reason that was logged last, while it works again or has failed since.
    reason: Option<String>,
    /// Nothing more is logged before.
    quiet_until: Option<Instant>,
    interval: Duration,
    works_since: Option<Instant>,
}

impl Default for Outage {
    fn default() -> Self {
        Self { reason: None, quiet_until: None, interval: INTERVAL.0, works_since: None }
    }
}

impl Outage {
    /// It fails; says whether to log that.
    pub(super) fn fails(&mut self, now: Instant, reason: &str) -> bool {
        let worked = self.works_since.take().map(|since| now.saturating_duration_since(since));
        if worked.is_some_and(|long| long >= INTERVAL.1) {
            (self.quiet_until, self.interval) = (None, INTERVAL.0);
        }
        if self.reason.as_deref() == Some(reason) || self.quiet_until.is_some_and(|until| now < until) {
            return false;
        }
        self.reason = Some(reason.to_owned());
        self.quiet_until = Some(now + self.interval);
        self.interval = (self.interval * 2).min(INTERVAL.1);
        true
    }

    /// It works; says whether to log that: whoever has read of the failure should read of its end.
    pub(super) fn ends(&mut self, now: Instant) -> bool {
        self.works_since.get_or_insert(now);
        self.reason.take().is_some()
    }

    /// Whether the last that was logged is a failure.
    #[cfg(test)]
    pub(super) fn is_on(&self) -> bool {
        self.reason.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_failure_and_its_end_are_logged_once() {
        let (mut outage, now) = (Outage::default(), Instant::now());
        assert!(!outage.ends(now));
        assert!(outage.fails(now, "refused"));
        assert!((1..1000).all(|n| !outage.fails(now + 100 * n * MS, "refused")));
        assert!(outage.ends(now + 100_000 * MS));
        assert!(!outage.ends(now + 100_001 * MS));
    }

    #[test]
    fn another_reason_is_logged_when_it_stays() {
        let (mut outage, now) = (Outage::default(), Instant::now());
        assert!(outage.fails(now, "refused"));
        assert!(!outage.fails(now + 100 * MS, "no leader"));
        assert!(outage.fails(now + 1100 * MS, "no leader"));
    }

    #[test]
    fn what_comes_and_goes_is_logged_less_and_less_often() {
        let (mut outage, now) = (Outage::default(), Instant::now());
        let lines = (0..600).filter(|n| {
            let now = now + 100 * *n * MS;
            if n % 2 == 0 {
                outage.fails(now, if n % 4 == 0 { "refused" } else { "no leader" })
            } else {
                outage.ends(now)
            }
        });
        // One of the failure and one of its end at 0, 1, 3, 7, 15 and 31 s of a minute.
        assert_eq!(lines.count(), 12);
        // After a quiet minute it is worth a line at once.
        assert!(outage.fails(now + Duration::from_mins(3), "refused"));
    }
}
