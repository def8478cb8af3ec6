//! Sessions that an endpoint has opened within the last second, for its rate limit.
//!
//! A sliding window: the limit may be used up at once, and never more of it within any second. A token bucket as deep
//! as the limit would permit twice as many, and a shallow one would reject what a client opens together. The second is
//! cut into slices, which leave the window whole; so the window is up to one slice longer than a second.

use std::sync::atomic::Ordering::Relaxed;

use crate::flow::sync::{AtomicU32, AtomicU64};
use crate::flow::time::Tick;

/// Length of the window, milliseconds.
const WINDOW_MS: u32 = 1000;
/// Length of a slice, milliseconds.
const SLICE_MS: u32 = 50;
/// Slices that overlap a window.
const SLICES: usize = (WINDOW_MS / SLICE_MS) as usize + 1;

/// Sessions opened within the last second, counted by all workers.
#[derive(Debug)]
pub(super) struct RateWindow {
    /// Sessions in the window: the sum of all slices.
    opened: AtomicU32,
    /// The slice in which expired ones were last removed.
    current: AtomicU32,
    /// By slice: when it began, in the upper half, and the sessions opened in it.
    slices: [AtomicU64; SLICES],
}

impl Default for RateWindow {
    fn default() -> Self {
        let slices = std::array::from_fn(|_| AtomicU64::new(0));
        Self { opened: AtomicU32::new(0), current: AtomicU32::new(0), slices }
    }
}

impl RateWindow {
    /// Counts a session if fewer than `limit` were opened within the last second; returns whether it did.
    pub(super) fn open(&self, limit: u32, now: Tick) -> bool {
        let start = start_of_slice(now);
        self.remove_expired(start);
        if self.opened.fetch_update(Relaxed, Relaxed, |opened| (opened < limit).then(|| opened + 1)).is_err() {
            return false;
        }
        // Sessions of an earlier slice in the same place are kept: their slice has not been removed yet.
        let count = |word| Some(join(start, split(word).1 + 1));
        let _ = self.slice(start).fetch_update(Relaxed, Relaxed, count);
        true
    }

    /// Whether [`Self::open`] would count a session.
    pub(super) fn would_open(&self, limit: u32, now: Tick) -> bool {
        let start = start_of_slice(now);
        let in_window = self.slices.iter().map(|slice| split(slice.load(Relaxed)));
        in_window.filter(|(begun, _)| !has_expired(*begun, start)).map(|(_, opened)| opened).sum::<u32>() < limit
    }

    /// Undoes [`Self::open`] in the same slice; later, the session stays counted.
    pub(super) fn undo_open(&self, now: Tick) {
        let start = start_of_slice(now);
        let undo = |word| {
            let (begun, opened) = split(word);
            (begun == start && opened > 0).then(|| join(begun, opened - 1))
        };
        if self.slice(start).fetch_update(Relaxed, Relaxed, undo).is_ok() {
            self.opened.fetch_sub(1, Relaxed);
        }
    }

    /// Removes slices that began more than a window ago.
    fn remove_expired(&self, start: u32) {
        if self.current.load(Relaxed) == start {
            return;
        }
        for slice in &self.slices {
            let remove = |word| {
                let (begun, opened) = split(word);
                (opened > 0 && has_expired(begun, start)).then(|| join(begun, 0))
            };
            // Only one of several workers removes a slice, so it is subtracted once.
            if let Ok(removed) = slice.fetch_update(Relaxed, Relaxed, remove) {
                self.opened.fetch_sub(split(removed).1, Relaxed);
            }
        }
        self.current.store(start, Relaxed);
    }

    fn slice(&self, start: u32) -> &AtomicU64 {
        &self.slices[(start / SLICE_MS) as usize % SLICES]
    }
}

/// When the slice of a time begins.
fn start_of_slice(now: Tick) -> u32 {
    now.0 - now.0 % SLICE_MS
}

/// Whether every session of the slice that began at `begun` is older than the window in the slice that begins at
/// `start`. A worker whose clock is behind sees a slice that begins later, which hasn't.
fn has_expired(begun: u32, start: u32) -> bool {
    const MAX_AHEAD_MS: u32 = WINDOW_MS;
    (WINDOW_MS + SLICE_MS..=u32::MAX - MAX_AHEAD_MS).contains(&start.wrapping_sub(begun))
}

fn split(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

fn join(begun: u32, opened: u32) -> u64 {
    u64::from(begun) << 32 | u64::from(opened)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_whole_limit_may_be_used_at_once_and_again_a_second_later() {
        let window = RateWindow::default();
        let opened_at = |now| (0..200).filter(|_| window.open(100, Tick(now))).count();
        assert_eq!(opened_at(990), 100);
        assert_eq!(opened_at(1000), 0, "the next second of the clock");
        assert_eq!(opened_at(1989), 0);
        assert_eq!(opened_at(2050), 100);
        assert_eq!(opened_at(2050 + 30 * 24 * 3_600_000), 100, "after a month");
    }

    proptest! {
        /// Never more than the limit within any second, and a session is rejected only if that many were opened within
        /// a second and a slice; also when the clock wraps around.
        #[test]
        fn a_second_has_at_most_the_limit(
            start in prop_oneof![any::<u32>(), u32::MAX - 3000..=u32::MAX],
            limit in 1_u32..8,
            steps in prop::collection::vec((0_u32..300, 1_usize..6), 1..60),
        ) {
            let window = RateWindow::default();
            let (mut now, mut opened) = (0_u32, VecDeque::new());
            for (pause, attempts) in steps {
                now += pause;
                for _ in 0..attempts {
                    let tick = Tick(start.wrapping_add(now));
                    let predicted = window.would_open(limit, tick);
                    let is_open = window.open(limit, tick);
                    prop_assert_eq!(is_open, predicted);
                    let within = |ms: u32| opened.iter().filter(|at| now - **at < ms).count() as u32;
                    if is_open {
                        prop_assert!(within(WINDOW_MS) < limit);
                        opened.push_back(now);
                    } else {
                        // Where the clock wraps around, a slice is shorter, and its place may be taken twice.
                        prop_assert!(within(2 * WINDOW_MS + SLICE_MS) >= limit);
                        let has_wrapped = tick.0 < 2 * WINDOW_MS + SLICE_MS;
                        prop_assert!(has_wrapped || within(WINDOW_MS + SLICE_MS) >= limit);
                    }
                }
            }
        }
    }
}
