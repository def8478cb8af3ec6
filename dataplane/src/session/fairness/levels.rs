//! Levels of histograms: how many sessions each holder may have that wants as much. Finding one takes a walk over the holders above it, so
//! it is kept for as long as it can be believed: a batch or a command long, and while those that end are of holders above it.

use std::cell::Cell;

use super::histograms::{Histogram, Histograms};

/// Histograms whose levels are kept: a batch seldom asks for more.
const KEPT: usize = 64;

/// What each holder may have, in sessions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Levels {
    /// With the sessions that there are.
    pub(super) now: u32,
    /// With one more of somebody who has as much, or nearly.
    with_one_more: u32,
}

impl Levels {
    /// Those of a histogram's holders, who have `held` sessions together and share `limit`.
    pub(super) fn of(histograms: &Histograms, histogram: Histogram, held: u64, limit: u64) -> Self {
        let level = |held: u64| histograms.level(histogram, held.saturating_sub(limit));
        Self { now: level(held), with_one_more: level(held + 1) }
    }

    /// Whether a holder of `count` sessions may have one more, or have it in the place of one that ends first: its own, or one of a holder
    /// of `other` sessions, which makes no room if that has too many anyway.
    pub(super) fn is_within(self, count: u32, replaces_own: bool, other: Option<u32>) -> bool {
        match other {
            _ if replaces_own => count <= self.now,
            Some(other) if other <= count + 1 => count < self.now,
            _ => count < self.with_one_more,
        }
    }
}

/// A level that was found.
#[derive(Clone, Copy, Debug)]
struct Found {
    histogram: Histogram,
    /// The age that it is of; 0 is none.
    age: u64,
    levels: Levels,
}

/// Levels of one worker's histograms.
#[derive(Debug)]
pub(super) struct Cache {
    found: Box<[Cell<Found>]>,
    /// Levels of former ages aren't believed.
    age: u64,
}

impl Default for Cache {
    fn default() -> Self {
        let none = Found { histogram: Histograms::VIPS, age: 0, levels: Levels { now: 0, with_one_more: 0 } };
        Self { found: vec![Cell::new(none); KEPT].into(), age: 1 }
    }
}

impl Cache {
    #[inline]
    fn place(&self, histogram: Histogram) -> &Cell<Found> {
        &self.found[histogram.number() % KEPT]
    }

    #[inline]
    fn kept(&self, histogram: Histogram) -> Option<Levels> {
        let found = self.place(histogram).get();
        (found.histogram == histogram && found.age == self.age).then_some(found.levels)
    }

    /// The levels of a histogram.
    #[inline]
    pub(super) fn get(&self, histogram: Histogram, find: impl FnOnce() -> Levels) -> Levels {
        self.kept(histogram).unwrap_or_else(|| {
            let levels = find();
            self.place(histogram).set(Found { histogram, age: self.age, levels });
            levels
        })
    }

    /// All of them have to be found anew.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.age += 1;
    }

    /// A holder's session has ended, and so many are left to it. As long as those are above the level, what is cut off is one less, and one
    /// less has to be: the level stays.
    #[inline]
    pub(super) fn note_end(&mut self, histogram: Histogram, left: u32) {
        if self.kept(histogram).is_some_and(|levels| left <= levels.now) {
            self.forget();
        }
    }
}
