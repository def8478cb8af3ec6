//! Time as the engine sees it: an argument, in milliseconds since some start, never a clock.

/// A moment: milliseconds on a monotonic clock, modulo 2^32.
///
/// Differences are right as long as they are shorter than 24 days; every timeout is bounded far below that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tick(pub u32);

/// The longest timeout that can be set: 7 days.
pub const LONGEST_TIMEOUT_MS: u32 = 7 * 24 * 3600 * 1000;

impl Tick {
    /// The moment `ms` milliseconds later.
    #[inline]
    #[must_use]
    pub fn plus(self, ms: u32) -> Self {
        Self(self.0.wrapping_add(ms))
    }

    /// Milliseconds from `earlier` until now; 0 if `earlier` lies ahead.
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

    /// The later of two moments.
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
    fn the_wrap_is_not_an_edge() {
        let before = Tick(u32::MAX - 5);
        let after = before.plus(10);
        assert!(after.reached(before));
        assert!(!before.reached(after));
        assert_eq!(after.since(before), 10);
        assert_eq!(before.since(after), 0);
        assert_eq!(before.later(after), after);
    }
}
