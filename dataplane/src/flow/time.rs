//! Time in the engine: always an argument, in milliseconds since an arbitrary start; the engine has no clock of its own.

/// A point in time: milliseconds on a clock that never goes back, modulo 2^32.
///
/// Differences are correct up to 24 days; every timeout is bounded far below that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tick(pub u32);

/// What tells the time: a clock, or a point in time where that stands still.
pub trait Clock: Copy {
    /// The time now.
    fn now(self) -> Tick;
}

impl<F: Fn() -> Tick + Copy> Clock for F {
    #[inline]
    fn now(self) -> Tick {
        self()
    }
}

impl Clock for Tick {
    #[inline]
    fn now(self) -> Tick {
        self
    }
}

/// The longest configurable timeout: 7 days.
pub const MAX_TIMEOUT_MS: u32 = 7 * 24 * 3600 * 1000;

impl Tick {
    /// The tick `ms` milliseconds later.
    #[inline]
    #[must_use]
    pub fn plus(self, ms: u32) -> Self {
        Self(self.0.wrapping_add(ms))
    }

    /// Milliseconds since `earlier`; 0 if that is in the future.
    #[inline]
    pub fn since(self, earlier: Self) -> u32 {
        let difference = self.0.wrapping_sub(earlier.0);
        if difference < 1 << 31 { difference } else { 0 }
    }

    /// Whether `deadline` is now or in the past.
    #[inline]
    pub fn reached(self, deadline: Self) -> bool {
        self.0.wrapping_sub(deadline.0) < 1 << 31
    }

    /// The later of two ticks.
    #[inline]
    #[must_use]
    pub fn later(self, other: Self) -> Self {
        if self.reached(other) { self } else { other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_hold_across_the_wraparound() {
        let before = Tick(u32::MAX - 5);
        let after = before.plus(10);
        assert!(after.reached(before));
        assert!(!before.reached(after));
        assert_eq!(after.since(before), 10);
        assert_eq!(before.since(after), 0);
        assert_eq!(before.later(after), after);
    }
}
