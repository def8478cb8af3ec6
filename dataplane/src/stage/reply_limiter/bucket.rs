//! Token bucket. Its user passes the same rate and burst each time.

use crate::flow::time::Tick;

/// A token bucket; its level is in thousandths of a token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    level: u32,
    filled: Tick,
}

impl Bucket {
    /// A full bucket.
    pub(super) fn full(burst: u32, now: Tick) -> Self {
        Self { level: burst * 1000, filled: now }
    }

    /// Takes a token; false if there is none. `rate` is per second.
    pub(super) fn take(&mut self, rate: u32, burst: u32, now: Tick) -> bool {
        // Not `since`, which is 0 for a bucket that was last used more than 24 days ago.
        let elapsed = now.0.wrapping_sub(self.filled.0);
        if elapsed > 0 {
            let refill = elapsed.saturating_mul(rate);
            self.level = self.level.saturating_add(refill).min(burst * 1000);
            self.filled = now;
        }
        let is_allowed = self.level >= 1000;
        if is_allowed {
            self.level -= 1000;
        }
        is_allowed
    }

    /// Removes a token, if there is one.
    pub(super) fn remove(&mut self) {
        self.level = self.level.saturating_sub(1000);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_refills_also_after_weeks_without_use() {
        let mut bucket = Bucket::full(20, Tick(5));
        let mut take_all = |now: Tick| (0..1000).filter(|_| bucket.take(20, 20, now)).count();
        assert_eq!((take_all(Tick(5)), take_all(Tick(5).plus(500))), (20, 10));
        assert_eq!(take_all(Tick(505).plus(25 * 24 * 3_600_000)), 20);
    }
}
