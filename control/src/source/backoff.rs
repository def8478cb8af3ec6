//! Exponential backoff, and with jitter for reconnecting to a source.

use std::time::Duration;

const MIN_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);

/// Time after which a peer that is back is connected, also if the last attempt before has timed out: the longest delay of
/// a client and its connect timeout are together below that.
pub(crate) const RECOVERY: Duration = Duration::from_secs(10);

/// The delay after this many failures in a row: from the first to the longest one, it doubles with each.
pub(crate) fn delay_after(failures: u32, (first, longest): (Duration, Duration)) -> Duration {
    (first * 2_u32.saturating_pow(failures)).min(longest)
}

/// Delays from 100 ms to 5 s.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { next: MIN_DELAY }
    }

    pub(crate) fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(MAX_DELAY);
        // Without randomness: the full delay.
        jittered(delay, getrandom::u32().unwrap_or(u32::MAX))
    }
}

/// Half of the delay to all of it, so that policy servers of one source don't reconnect at the same time.
fn jittered(delay: Duration, random: u32) -> Duration {
    delay / 2 + (delay / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum() {
        let mut backoff = Backoff::new();
        for full in [100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            let full = Duration::from_millis(full);
            let delay = backoff.next_delay();
            assert!(full / 2 <= delay && delay <= full, "{delay:?} of {full:?}");
        }
    }

    #[test]
    fn jitter_subtracts_at_most_half() {
        let delay = Duration::from_secs(4);
        assert_eq!(jittered(delay, 0), delay / 2);
        assert_eq!(jittered(delay, u32::MAX), delay);
    }
}
