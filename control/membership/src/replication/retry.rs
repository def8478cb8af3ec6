//! When to request a full sync after records were rejected.

use std::time::{Duration, Instant};

use vipgate_common::Backoff;

/// Delay of the full sync that is requested after records were rejected for lack of capacity, or a round couldn't remove
/// what it hadn't listed. Doubles each time, up to a minute: the table may stay full.
pub const RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

/// Schedules full syncs after rejected records.
#[derive(Clone, Debug)]
pub(super) struct RetrySchedule {
    pub(super) due: Option<Instant>,
    backoff: Backoff,
    /// During a round: whether records were rejected since its start. The full sync is requested after its end, since a
    /// request would abort it.
    in_round: Option<bool>,
}

impl RetrySchedule {
    pub(super) fn new(min_delay: Duration) -> Self {
        Self { due: None, backoff: Backoff::new((min_delay, MAX_RETRY_DELAY)), in_round: None }
    }

    pub(super) fn rejected(&mut self, now: Instant) {
        match &mut self.in_round {
            Some(in_round) => *in_round = true,
            None => _ = self.due.get_or_insert(now + self.backoff.peek()),
        }
    }

    pub(super) fn requested(&mut self) {
        self.due = None;
        self.backoff.next_delay();
    }

    pub(super) fn round_begins(&mut self) {
        (self.due, self.in_round) = (None, Some(false));
    }

    pub(super) fn round_ends(&mut self, now: Instant) {
        if self.in_round.take() == Some(true) {
            self.rejected(now);
        } else {
            self.backoff.halve();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_rejections_back_off_exponentially() {
        let (mut retry, mut now) = (RetrySchedule::new(RETRY_DELAY), Instant::now());
        for delay in [1, 2, 4, 8, 16, 32, 60, 60] {
            retry.round_begins();
            retry.rejected(now);
            assert_eq!(retry.due, None, "a request would abort the round");
            retry.round_ends(now);
            retry.rejected(now + RETRY_DELAY / 2);
            now += Duration::from_secs(delay);
            assert_eq!(retry.due, Some(now), "one request for all rejections");
            retry.requested();
        }
        // Rounds without rejections.
        for delay in [30, 15] {
            retry.round_begins();
            retry.round_ends(now);
            assert_eq!((retry.due, retry.backoff.peek()), (None, Duration::from_secs(delay)));
        }
    }
}
