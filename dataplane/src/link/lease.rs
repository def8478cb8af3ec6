//! Until when this gateway may open sessions from its ports: whoever could be given them meanwhile waits for longer. The control
//! thread extends it; workers look at it once a turn.
//!
//! Ticks wrap after 49 days, so a lease that ended long ago would look like one that has yet to end. Two bounds keep them apart: none is
//! given for longer than [`LONGEST_MS`], so what seems to end later has ended; and the control thread marks those that have ended
//! ([`Lease::expire`]) long before ticks come around.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use crate::sync::AtomicU64;
use crate::time::Tick;

/// No lease is given for longer: a minute.
pub const LONGEST_MS: u32 = 60_000;
/// A lease that ended so long ago is marked.
const MARKED_AFTER_MS: u32 = 3_600_000;

/// No lease is needed: nobody else could have the ports. What ticks say is below.
const FREE: u64 = 1 << 32;
/// It has ended long ago.
const ENDED: u64 = FREE + 1;

/// A lease, shared by the control thread and the workers.
#[derive(Debug)]
pub struct Lease(AtomicU64);

/// How a lease stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It holds, or none is needed.
    Held,
    /// It has ended this many milliseconds ago, or longer ago than that where ticks don't reach.
    Lapsed(u32),
}

impl Hold {
    /// It ended half of the time ago that ticks can tell, or longer.
    const LONG_LAPSED: Self = Self::Lapsed(1 << 31);

    /// How a lease stands that was given until `until`, at most [`LONGEST_MS`] before that.
    pub fn of(until: Tick, now: Tick) -> Self {
        match until.since(now) {
            0 if now.reached(until) => Self::Lapsed(now.since(until)),
            1..=LONGEST_MS => Self::Held,
            _ => Self::LONG_LAPSED,
        }
    }
}

impl Lease {
    /// For a gateway that needs none.
    pub fn free() -> Self {
        Self(AtomicU64::new(FREE))
    }

    /// It holds until `until`, which is [`LONGEST_MS`] from now at most.
    pub fn extend(&self, until: Tick) {
        self.0.store(until.0.into(), Release);
    }

    /// Marks it where it ended long ago, for good. To be called at least once in 24 days.
    pub fn expire(&self, now: Tick) {
        let found = self.0.load(Acquire);
        if found < FREE && matches!(Hold::of(Tick(found as u32), now), Hold::Lapsed(MARKED_AFTER_MS..)) {
            // A concurrent extension wins.
            let _ = self.0.compare_exchange(found, ENDED, AcqRel, Acquire);
        }
    }

    /// None is needed from now on.
    pub fn release(&self) {
        self.0.store(FREE, Release);
    }

    /// How it stands.
    pub fn hold(&self, now: Tick) -> Hold {
        match self.0.load(Acquire) {
            FREE => Hold::Held,
            ENDED => Hold::LONG_LAPSED,
            until => Hold::of(Tick(until as u32), now),
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn it_ends_by_itself() {
        let lease = Lease::free();
        assert_eq!(lease.hold(Tick(77)), Hold::Held);
        lease.extend(Tick(100));
        assert_eq!(
            (lease.hold(Tick(99)), lease.hold(Tick(100)), lease.hold(Tick(130))),
            (Hold::Held, Hold::Lapsed(0), Hold::Lapsed(30))
        );
        lease.release();
        assert_eq!(lease.hold(Tick(130)), Hold::Held);
    }

    /// Every hour of a hundred days, from just before until just after ticks wrap, with a lease that ended in the first second.
    #[test]
    fn what_has_ended_stays_so_however_long_ago_that_was() {
        for end in [Tick(0), Tick(1_000), Tick(u32::MAX)] {
            let lease = Lease::free();
            lease.extend(end);
            for hour in 0..2400u32 {
                let now = end.plus(hour.wrapping_mul(3_600_000));
                lease.expire(now);
                assert_ne!(lease.hold(now), Hold::Held, "{hour} hours after {end:?}");
            }
            lease.extend(end.plus(500));
            lease.expire(end);
            assert_eq!(lease.hold(end), Hold::Held, "it was given anew");
            lease.release();
            lease.expire(end);
            assert_eq!(lease.hold(end), Hold::Held, "none is needed");
        }
    }

    /// All of the time that ticks tell apart, in steps of some seconds.
    #[test]
    fn of_whatever_age_a_lease_is_it_holds_for_a_minute_before_its_end_and_no_longer() {
        for end in [Tick(0), Tick(1 << 31), Tick(u32::MAX)] {
            for age in (0..=u32::MAX).step_by(9_973).chain([u32::MAX - LONGEST_MS, u32::MAX - LONGEST_MS + 1, u32::MAX])
            {
                let is_held = Hold::of(end, end.plus(age)) == Hold::Held;
                assert_eq!(is_held, age > u32::MAX - LONGEST_MS, "{age} ms after {end:?}");
            }
        }
    }

    /// Where nobody marks it, only a minute of each wrap is taken for held.
    #[test]
    fn what_ends_later_than_any_lease_has_ended() {
        let lease = Lease::free();
        lease.extend(Tick(100));
        for (ms, hold) in [(1 << 31, Hold::LONG_LAPSED), (u32::MAX - LONGEST_MS, Hold::LONG_LAPSED)] {
            assert_eq!(lease.hold(Tick(100).plus(ms)), hold, "{ms} ms later");
        }
        assert_eq!(lease.hold(Tick(100).plus(u32::MAX - LONGEST_MS + 1)), Hold::Held, "as a lease of a minute");
    }
}
