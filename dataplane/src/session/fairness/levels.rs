//! Level cache: the fair share of each histogram's holders. Computing a level walks over the holders above it, so it is
//! cached while it is valid: for a batch or a command, and while the sessions that end are of holders above it.

use std::cell::Cell;

use super::histograms::{Histogram, Histograms};

/// Cached levels: a batch seldom needs more.
const CACHE_SIZE: usize = 64;

/// Fair share of each holder, in sessions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Levels {
    /// With the current sessions.
    pub(super) now: u32,
    /// With one more session of a holder at, or just below, the level.
    pub(super) with_one_more: u32,
}

impl Levels {
    /// Levels of a histogram's holders, which have `held` sessions together and share `limit`.
    pub(super) fn of(histograms: &Histograms, histogram: Histogram, held: u64, limit: u64) -> Self {
        let level = |held: u64| histograms.level(histogram, held.saturating_sub(limit));
        Self { now: level(held), with_one_more: level(held + 1) }
    }

    /// Whether a holder of `count` sessions may have one more, perhaps in place of one that ends first: its own, or one
    /// of a holder with `other` sessions, which frees nothing if that holder is above the level anyway.
    pub(super) fn is_within(self, count: u32, replaces_own: bool, other: Option<u32>) -> bool {
        match other {
            _ if replaces_own => count <= self.now,
            Some(other) if other <= count + 1 => count < self.now,
            _ => count < self.with_one_more,
        }
    }
}

/// A cached level.
#[derive(Clone, Copy, Debug)]
struct CacheEntry {
    histogram: Histogram,
    /// Generation of the level; 0: empty.
    generation: u64,
    levels: Levels,
}

/// Levels of one worker's histograms.
#[derive(Debug)]
pub(super) struct LevelCache {
    entries: Box<[Cell<CacheEntry>]>,
    /// Levels of former generations are invalid.
    generation: u64,
}

impl Default for LevelCache {
    fn default() -> Self {
        let none =
            CacheEntry { histogram: Histograms::VIPS, generation: 0, levels: Levels { now: 0, with_one_more: 0 } };
        Self { entries: vec![Cell::new(none); CACHE_SIZE].into(), generation: 1 }
    }
}

impl LevelCache {
    #[inline]
    fn entry(&self, histogram: Histogram) -> &Cell<CacheEntry> {
        &self.entries[histogram.number() % CACHE_SIZE]
    }

    #[inline]
    fn cached(&self, histogram: Histogram) -> Option<Levels> {
        let entry = self.entry(histogram).get();
        (entry.histogram == histogram && entry.generation == self.generation).then_some(entry.levels)
    }

    /// Levels of a histogram, cached or computed.
    #[inline]
    pub(super) fn get(&self, histogram: Histogram, compute: impl FnOnce() -> Levels) -> Levels {
        self.cached(histogram).unwrap_or_else(|| {
            let levels = compute();
            self.entry(histogram).set(CacheEntry { histogram, generation: self.generation, levels });
            levels
        })
    }

    /// Invalidates all levels.
    #[inline]
    pub(super) fn invalidate(&mut self) {
        self.generation += 1;
    }

    /// A holder's session has ended, and it has `left` sessions. As long as those are above the level, both the excess
    /// above the level and the excess to cut off are one less, so the level stays.
    #[inline]
    pub(super) fn note_end(&mut self, histogram: Histogram, left: u32) {
        if self.cached(histogram).is_some_and(|levels| left <= levels.now) {
            self.invalidate();
        }
    }
}
