//! Hold-down: a gateway that can serve again waits before it says so, and the longer the more often it was in vain, so that a link that
//! flaps doesn't move shares to and fro. Time is an argument.

use std::time::{Duration, Instant};

/// Whether a gateway counts as able.
#[derive(Clone, Copy, Debug)]
pub(super) struct HoldDown {
    shortest: Duration,
    longest: Duration,
    /// How long it is held down after its faults have gone; none: nobody has relied on it yet.
    current: Option<Duration>,
    /// Faults are there now.
    is_faulty: bool,
    /// Until when it is held down.
    until: Option<Instant>,
    /// Since when it is able without interruption.
    able_since: Option<Instant>,
}

impl HoldDown {
    /// One that is able unless faults say otherwise. A hold-down lasts for `shortest`, and twice as long each time that the gateway came
    /// back in vain, up to `longest`; so long without a fault makes it short again.
    pub(super) fn new(shortest: Duration, longest: Duration) -> Self {
        let longest = longest.max(shortest);
        Self { shortest, longest, current: None, is_faulty: false, until: None, able_since: None }
    }

    /// Takes in whether anything is wrong now; says whether the gateway counts as able.
    pub(super) fn set(&mut self, is_well: bool, now: Instant) -> bool {
        if !is_well {
            // Faults that come and go while it is held down anyway only begin that anew.
            if let Some(since) = self.able_since.take() {
                let was_quiet = now.saturating_duration_since(since) >= self.longest;
                self.current = Some(match self.current {
                    Some(current) if !was_quiet => (current * 2).min(self.longest),
                    _ => self.shortest,
                });
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

    /// Until when it is held down.
    pub(super) fn until(&self) -> Option<Instant> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHORTEST: Duration = Duration::from_secs(5);
    const LONGEST: Duration = Duration::from_mins(1);

    #[test]
    fn each_flap_doubles_the_time_and_a_quiet_hour_makes_it_short_again() {
        let mut now = Instant::now();
        let mut it = HoldDown::new(SHORTEST, LONGEST);
        assert!(it.set(true, now), "it begins able");
        for seconds in [5, 10, 20, 40, 60, 60] {
            assert!(!it.set(false, now));
            assert_eq!(it.until(), None, "no time runs while the fault is there");
            now += Duration::from_secs(1);
            assert!(!it.set(true, now));
            assert_eq!(it.until(), Some(now + Duration::from_secs(seconds)));
            now += Duration::from_millis(seconds * 1000 - 1);
            assert!(!it.set(true, now));
            now += Duration::from_millis(1);
            assert!(it.set(true, now) && it.until().is_none());
        }
        now += LONGEST;
        assert!(!it.set(false, now) && !it.set(true, now));
        assert_eq!(it.until(), Some(now + SHORTEST));
    }

    #[test]
    fn a_burst_of_flaps_is_one() {
        let mut now = Instant::now();
        let mut it = HoldDown::new(SHORTEST, LONGEST);
        it.set(true, now);
        for _ in 0..20 {
            assert!(!it.set(false, now) && !it.set(true, now));
            assert_eq!(it.until(), Some(now + SHORTEST));
            now += SHORTEST / 2;
        }
    }

    #[test]
    fn who_was_never_able_is_not_held_down() {
        let now = Instant::now();
        let mut it = HoldDown::new(SHORTEST, LONGEST);
        assert!(!it.set(false, now) && it.set(true, now));
        let mut none = HoldDown::new(Duration::ZERO, Duration::ZERO);
        assert!(none.set(true, now) && !none.set(false, now) && none.set(true, now));
    }

    proptest! {
        /// However a link flaps: who counts as able has been well for the shortest time, and in an hour it changes no more often
        /// than the hold-down lets it.
        #[test]
        fn a_link_that_flaps_moves_shares_a_bounded_number_of_times(
            steps in proptest::collection::vec((any::<bool>(), 1u64..20_000), 1..400),
        ) {
            let mut now = Instant::now();
            let mut it = HoldDown::new(SHORTEST, LONGEST);
            it.set(true, now);
            let (mut able, mut well_since, mut returns, begun) = (true, now, 0u32, now);
            let mut had_fault = false;
            for (is_well, ms) in steps {
                if is_well && had_fault {
                    well_since = now;
                }
                had_fault = !is_well;
                let is_able = it.set(is_well, now);
                prop_assert!(is_well || !is_able);
                if is_able && !able {
                    returns += 1;
                    prop_assert!(now >= well_since + SHORTEST);
                }
                able = is_able;
                now += Duration::from_millis(ms);
            }
            let passed = now.duration_since(begun);
            // 5 + 10 + 20 + 40 seconds, and then one a minute; or one each minute without a fault and 5 seconds.
            let most = 5 + passed.as_secs() / 60 * 2;
            prop_assert!(u64::from(returns) <= most, "{returns} in {passed:?}");
        }
    }
}
