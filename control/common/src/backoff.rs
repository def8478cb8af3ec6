//! Exponential backoff, and jitter, so that many clients don't try again at the same time.

use std::time::Duration;

/// Time after which a peer that is back is connected, also if the last attempt before has timed out: the longest delay
/// of a client and its connect timeout are together below that.
pub const RECOVERY: Duration = Duration::from_secs(10);

/// The delay after this many failures in a row: from the first to the longest one, it doubles with each.
pub fn delay_after(failures: u32, (first, longest): (Duration, Duration)) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(failures)).min(longest)
}

/// Half of the delay to all of it. Without randomness: all of it.
pub fn jittered<E>(delay: Duration, random: Result<u32, E>) -> Duration {
    let share = f64::from(random.unwrap_or(u32::MAX)) / f64::from(u32::MAX);
    delay / 2 + (delay / 2).mul_f64(share)
}

/// Delays that double from the first to the longest one, by default from 100 ms to 5 s.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    bounds: (Duration, Duration),
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new((Duration::from_millis(100), Duration::from_secs(5)))
    }
}

impl Backoff {
    /// The first delay and the longest one.
    pub fn new(bounds: (Duration, Duration)) -> Self {
        Self { bounds, next: delay_after(0, bounds) }
    }

    /// The delay before the next attempt; the one after it is twice as long.
    pub fn next_delay(&mut self) -> Duration {
        let doubled = self.next.saturating_mul(2).min(self.bounds.1);
        std::mem::replace(&mut self.next, doubled)
    }

    /// What [`Self::next_delay`] would return.
    pub fn peek(&self) -> Duration {
        self.next
    }

    /// Halves the next delay, down to the first one.
    pub fn halve(&mut self) {
        self.next = (self.next / 2).max(self.bounds.0);
    }

    /// Begins with the first delay again.
    pub fn reset(&mut self) {
        *self = Self::new(self.bounds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn delays_double_from_the_first_to_the_longest_until_a_reset() {
        let mut backoff = Backoff::default();
        for _ in 0..2 {
            for (failures, delay) in (0..).zip([100, 200, 400, 800, 1600, 3200, 5000, 5000]) {
                assert_eq!(delay_after(failures, backoff.bounds), MS * delay);
                assert_eq!((backoff.peek(), backoff.next_delay()), (MS * delay, MS * delay));
            }
            backoff.reset();
        }
        assert_eq!(delay_after(u32::MAX, (MS, MS * 7)), MS * 7);
        assert_eq!(Backoff::new((MS, Duration::ZERO)).next_delay(), Duration::ZERO, "the longest one limits the first");
    }

    #[test]
    fn halved_delays_stay_within_the_bounds() {
        let mut backoff = Backoff::new((MS, MS * 6));
        assert_eq!([0; 4].map(|_| backoff.next_delay()), [MS, MS * 2, MS * 4, MS * 6]);
        for delay in [MS * 3, MS * 3 / 2, MS, MS] {
            backoff.halve();
            assert_eq!(backoff.peek(), delay);
        }
    }

    #[test]
    fn jitter_subtracts_at_most_half() {
        for (random, delay) in [(Ok(0), MS * 2), (Ok(u32::MAX), MS * 4), (Err("no randomness"), MS * 4)] {
            assert_eq!(jittered(MS * 4, random), delay, "{random:?}");
        }
    }
}
