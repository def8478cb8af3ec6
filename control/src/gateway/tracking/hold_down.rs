//! Hold-down: a gateway that has recovered stays unable for a time, which doubles with each relapse, so that a flapping
//! interface doesn't move shards back and forth. Time is an argument.

use std::time::{Duration, Instant};

use vipgate_common::Backoff;

/// Hold-down state of a gateway.
#[derive(Clone, Copy, Debug)]
pub(super) struct HoldDown {
    /// Hold-downs after relapses.
    backoff: Backoff,
    max: Duration,
    /// Hold-down after the next recovery; `None`: the gateway has never been able yet.
    current: Option<Duration>,
    /// There are faults now.
    is_faulty: bool,
    /// End of the hold-down.
    until: Option<Instant>,
    /// Able without interruption since then.
    able_since: Option<Instant>,
}

impl HoldDown {
    /// Without faults. A hold-down lasts `min`, and twice as long after each relapse, up to `max`. After `max` without
    /// a fault it is `min` again.
    pub(super) fn new(min: Duration, max: Duration) -> Self {
        let max = max.max(min);
        Self { backoff: Backoff::new((min, max)), max, current: None, is_faulty: false, until: None, able_since: None }
    }

    /// Updates whether the gateway is without faults now. Returns whether it is able: healthy and not held down.
    pub(super) fn update(&mut self, is_healthy: bool, now: Instant) -> bool {
        if !is_healthy {
            // Faults during a hold-down restart it, but don't double it.
            if let Some(since) = self.able_since.take() {
                if now.saturating_duration_since(since) >= self.max {
                    self.backoff.reset();
                }
                self.current = Some(self.backoff.next_delay());
            }
            self.is_faulty = true;
            self.until = None;
            return false;
        }
        if std::mem::take(&mut self.is_faulty) {
            self.until = self.current.map(|current| now + current);
        }
        if self.until.is_some_and(|until| now < until) {
            return false;
        }
        self.until = None;
        self.able_since.get_or_insert(now);
        true
    }

    /// End of the hold-down; `None`: not held down.
    pub(super) fn until(&self) -> Option<Instant> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIN: Duration = Duration::from_secs(5);
    const MAX: Duration = Duration::from_mins(1);

    #[test]
    fn each_flap_doubles_the_hold_down_and_stability_resets_it() {
        let mut now = Instant::now();
        let mut hold_down = HoldDown::new(MIN, MAX);
        assert!(hold_down.update(true, now), "initially able");
        for seconds in [5, 10, 20, 40, 60, 60] {
            assert!(!hold_down.update(false, now));
            assert_eq!(hold_down.until(), None, "the hold-down starts when the fault is resolved");
            now += Duration::from_secs(1);
            assert!(!hold_down.update(true, now));
            assert_eq!(hold_down.until(), Some(now + Duration::from_secs(seconds)));
            now += Duration::from_millis(seconds * 1000 - 1);
            assert!(!hold_down.update(true, now));
            now += Duration::from_millis(1);
            assert!(hold_down.update(true, now) && hold_down.until().is_none());
        }
        now += MAX;
        assert!(!hold_down.update(false, now) && !hold_down.update(true, now));
        assert_eq!(hold_down.until(), Some(now + MIN));
    }

    #[test]
    fn flaps_during_a_hold_down_do_not_double_it() {
        let mut now = Instant::now();
        let mut hold_down = HoldDown::new(MIN, MAX);
        hold_down.update(true, now);
        for _ in 0..20 {
            assert!(!hold_down.update(false, now) && !hold_down.update(true, now));
            assert_eq!(hold_down.until(), Some(now + MIN));
            now += MIN / 2;
        }
    }

    #[test]
    fn a_gateway_that_was_never_able_is_not_held_down() {
        let now = Instant::now();
        let mut hold_down = HoldDown::new(MIN, MAX);
        assert!(!hold_down.update(false, now) && hold_down.update(true, now));
        let mut none = HoldDown::new(Duration::ZERO, Duration::ZERO);
        assert!(none.update(true, now) && !none.update(false, now) && none.update(true, now));
    }

    proptest! {
        /// For any sequence of flaps: an able gateway has been healthy for the minimum time, and the rate of recoveries
        /// is bounded.
        #[test]
        fn a_flapping_interface_causes_a_bounded_number_of_recoveries(
            steps in proptest::collection::vec((any::<bool>(), 1u64..20_000), 1..400),
        ) {
            let mut now = Instant::now();
            let mut hold_down = HoldDown::new(MIN, MAX);
            hold_down.update(true, now);
            let (mut was_able, mut healthy_since, mut recoveries, start) = (true, now, 0u32, now);
            let mut had_fault = false;
            for (is_healthy, ms) in steps {
                if is_healthy && had_fault {
                    healthy_since = now;
                }
                had_fault = !is_healthy;
                let is_able = hold_down.update(is_healthy, now);
                prop_assert!(is_healthy || !is_able);
                if is_able && !was_able {
                    recoveries += 1;
                    prop_assert!(now >= healthy_since + MIN);
                }
                was_able = is_able;
                now += Duration::from_millis(ms);
            }
            let elapsed = now.duration_since(start);
            // After 5 + 10 + 20 + 40 seconds one a minute; or one each time that a minute without a fault and 5 seconds
            // have passed.
            let max = 5 + elapsed.as_secs() / 60 * 2;
            prop_assert!(u64::from(recoveries) <= max, "{recoveries} in {elapsed:?}");
        }
    }
}
