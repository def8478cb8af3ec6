//! Token bucket: the rate of writes to the API.

use std::time::Duration;

/// A token every 50 ms, at most so many at once.
const INTERVAL: Duration = Duration::from_millis(50);
const MAX_TOKENS: u32 = 20;

/// A bucket, full at first.
#[derive(Debug, Default)]
pub(super) struct TokenBucket {
    /// When it is full again; times are since any beginning.
    full_at: Duration,
}

impl TokenBucket {
    /// Takes a token; returns the time to wait for it.
    pub(super) fn take(&mut self, now: Duration) -> Duration {
        self.full_at = self.full_at.max(now) + INTERVAL;
        self.full_at.saturating_sub(now + MAX_TOKENS * INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_twenty_each_second() {
        let (mut bucket, now) = (TokenBucket::default(), Duration::from_secs(9));
        for _ in 0..20 {
            assert_eq!(bucket.take(now), Duration::ZERO);
        }
        assert_eq!(bucket.take(now), Duration::from_millis(50));
        assert_eq!(bucket.take(now), Duration::from_millis(100));
        assert_eq!(bucket.take(now + Duration::from_secs(2)), Duration::ZERO);
    }
}
