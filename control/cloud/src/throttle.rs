//! Rate of requests: a token bucket per operation, and exponential backoff with jitter.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// Rate of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate {
    /// Interval of tokens.
    pub(crate) interval: Duration,
    /// Tokens of a full bucket.
    pub(crate) burst: u32,
}

/// Buckets by operation. Times are since any beginning.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    full_at: Mutex<HashMap<&'static str, Duration>>,
}

impl Throttle {
    /// Takes a token of an operation; returns the time to wait for it.
    pub(crate) fn take(&self, operation: &'static str, rate: Rate, now: Duration) -> Duration {
        let mut buckets = self.full_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let full_at = buckets.entry(operation).or_default();
        *full_at = (*full_at).max(now) + rate.interval;
        full_at.saturating_sub(now + rate.interval * rate.burst)
    }

    /// Empties the bucket of an operation until `at`: the provider has asked for it.
    pub(crate) fn hold(&self, operation: &'static str, rate: Rate, at: Duration) {
        let mut buckets = self.full_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let full_at = buckets.entry(operation).or_default();
        *full_at = (*full_at).max(at + rate.interval * rate.burst);
    }
}

const MIN_DELAY: Duration = Duration::from_millis(200);
const MAX_DELAY: Duration = Duration::from_secs(20);

/// Delay before the attempt after `failures` ones: doubles from 200 ms to 20 s, of which half to all by `random`.
pub(crate) fn backoff(failures: u32, random: u32) -> Duration {
    let full = MIN_DELAY.saturating_mul(1 << failures.min(10)).min(MAX_DELAY);
    full / 2 + (full / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { interval: Duration::from_millis(100), burst: 5 };

    #[test]
    fn a_burst_passes_and_then_one_each_interval() {
        let (throttle, now) = (Throttle::default(), Duration::from_secs(9));
        for _ in 0..5 {
            assert_eq!(throttle.take("read", RATE, now), Duration::ZERO);
        }
        assert_eq!(throttle.take("read", RATE, now), Duration::from_millis(100));
        assert_eq!(throttle.take("read", RATE, now), Duration::from_millis(200));
        assert_eq!(throttle.take("write", RATE, now), Duration::ZERO, "another operation has a bucket of its own");
        assert_eq!(throttle.take("read", RATE, now + Duration::from_secs(2)), Duration::ZERO);
    }

    #[test]
    fn a_held_operation_waits_until_the_provider_wants_it() {
        let (throttle, now) = (Throttle::default(), Duration::from_secs(9));
        throttle.hold("read", RATE, now + Duration::from_secs(3));
        assert_eq!(throttle.take("read", RATE, now), Duration::from_millis(3100));
        assert_eq!(throttle.take("read", RATE, now + Duration::from_secs(10)), Duration::ZERO);
    }

    #[test]
    fn delays_double_up_to_the_maximum_and_jitter_subtracts_at_most_half() {
        for (failures, full) in [(0, 200), (1, 400), (2, 800), (6, 12_800), (7, 20_000), (40, 20_000)] {
            let full = Duration::from_millis(full);
            assert_eq!(backoff(failures, 0), full / 2);
            assert_eq!(backoff(failures, u32::MAX), full);
        }
    }
}
