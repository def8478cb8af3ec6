//! Token bucket: limits a rate, after a burst.

use std::time::{Duration, Instant};

/// A rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Interval of tokens.
    pub interval: Duration,
    /// Tokens of a full bucket.
    pub burst: u32,
}

/// A bucket, full at first.
#[derive(Debug)]
pub struct TokenBucket {
    rate: Rate,
    full_at: Option<Instant>,
}

impl TokenBucket {
    /// A full bucket.
    pub fn new(rate: Rate) -> Self {
        Self { rate, full_at: None }
    }

    /// Takes a token; returns the time to wait for it.
    pub fn take(&mut self, now: Instant) -> Duration {
        let Rate { interval, burst } = self.rate;
        let full_at = self.full_at.map_or(now, |full_at| full_at.max(now)) + interval;
        self.full_at = Some(full_at);
        full_at.saturating_duration_since(now + interval * burst)
    }

    /// Takes a token if there is one.
    pub fn try_take(&mut self, now: Instant) -> bool {
        let before = self.full_at;
        let has_token = self.take(now).is_zero();
        if !has_token {
            self.full_at = before;
        }
        has_token
    }

    /// Empties the bucket until `at`.
    pub fn hold(&mut self, at: Instant) {
        self.full_at = self.full_at.max(Some(at + self.rate.interval * self.rate.burst));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_each_interval_and_none_while_it_is_held() {
        let mut bucket = TokenBucket::new(Rate { interval: Duration::from_millis(100), burst: 5 });
        let now = Instant::now();
        for wait in [0, 0, 0, 0, 0, 100, 200] {
            assert_eq!(bucket.take(now), Duration::from_millis(wait));
        }
        let later = now + Duration::from_secs(2);
        assert_eq!(bucket.take(later), Duration::ZERO);
        bucket.hold(later + Duration::from_secs(3));
        bucket.hold(later);
        assert_eq!(bucket.take(later), Duration::from_millis(3100));
        assert_eq!(bucket.take(later + Duration::from_secs(10)), Duration::ZERO);
    }

    #[test]
    fn a_token_that_is_not_waited_for_is_not_taken() {
        let mut bucket = TokenBucket::new(Rate { interval: Duration::from_millis(100), burst: 2 });
        let now = Instant::now();
        let taken =
            [0, 0, 0, 99, 100, 100, 5000, 5000, 5000].map(|after| bucket.try_take(now + Duration::from_millis(after)));
        assert_eq!(taken, [true, true, false, false, true, false, true, true, false]);
    }
}
