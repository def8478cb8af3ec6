//! Histograms of session counts: a list of bins in order, one for each count that occurs. One histogram is of all VIPs,
//! and each VIP has one of its members. A bin is found from its neighbor, since a count changes by one at a time; so
//! opening and ending sessions needs no search, and the excess above a level is summed up from the largest bin down.

use vipgate_mem::{MemoryError, Slab};

/// A holder's bin. 0: none.
pub(super) type BinId = u32;

/// A histogram, by its head: the bin before its first and after its last one, with count zero and the number of all
/// holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(super) struct Histogram(BinId);

/// Holders with the same count.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Bin {
    /// Sessions of each holder.
    count: u32,
    holders: u32,
    /// Bin of the next larger count; of a free bin: the next free one.
    next: BinId,
    /// Bin of the next smaller count.
    previous: BinId,
}

/// The histograms of one worker.
#[derive(Debug)]
pub(super) struct Histograms {
    bins: Slab<Bin>,
    /// Head of the free list.
    free: BinId,
    /// The first bin that was never used.
    first_unused: BinId,
}

impl Histogram {
    /// Number of its head.
    #[inline]
    pub(super) fn number(self) -> usize {
        self.0 as usize
    }
}

impl Histograms {
    /// The histogram of all VIPs.
    pub(super) const VIPS: Histogram = Histogram(0);

    /// Histograms for so many VIPs and members.
    pub(super) fn new(vips: u32, members: u32) -> Result<Self, MemoryError> {
        // Each VIP is in one histogram and has one.
        let bins = 1 + 2 * vips + members;
        Ok(Self { bins: Slab::new(bins as usize)?, free: 0, first_unused: 1 })
    }

    /// Holders in a histogram.
    pub(super) fn holders(&self, histogram: Histogram) -> u32 {
        self.bins[histogram.0 as usize].holders
    }

    /// Sessions of each holder in a bin.
    #[inline]
    pub(super) fn count(&self, bin: BinId) -> u32 {
        self.bins[bin as usize].count
    }

    fn allocate(&mut self) -> BinId {
        if self.free == 0 {
            self.first_unused += 1;
            return self.first_unused - 1;
        }
        let id = self.free;
        self.free = self.bins[id as usize].next;
        id
    }

    fn release(&mut self, id: BinId) {
        self.bins[id as usize] = Bin { next: self.free, ..Bin::default() };
        self.free = id;
    }

    /// Creates an empty histogram.
    pub(super) fn create(&mut self) -> Histogram {
        let id = self.allocate();
        self.bins[id as usize] = Bin { count: 0, holders: 0, next: id, previous: id };
        Histogram(id)
    }

    /// Frees an empty histogram.
    pub(super) fn remove(&mut self, histogram: Histogram) {
        debug_assert_eq!(self.holders(histogram), 0);
        self.release(histogram.0);
    }

    /// Adds a holder with one session; returns its bin.
    pub(super) fn insert(&mut self, histogram: Histogram) -> BinId {
        let smallest = self.bins[histogram.0 as usize].next;
        self.bins[histogram.0 as usize].holders += 1;
        self.join_or_insert(smallest, 1, histogram.0)
    }

    /// Increments a holder's count; returns its new bin.
    #[inline]
    pub(super) fn increment(&mut self, id: BinId) -> BinId {
        let Bin { count, holders, next, .. } = self.bins[id as usize];
        if holders == 1 && self.bins[next as usize].count != count + 1 {
            self.bins[id as usize].count = count + 1;
            return id;
        }
        let new = self.join_or_insert(next, count + 1, id);
        self.leave(id);
        new
    }

    /// Decrements a holder's count, which stays above zero; returns its new bin.
    #[inline]
    pub(super) fn decrement(&mut self, id: BinId) -> BinId {
        let Bin { count, holders, previous, .. } = self.bins[id as usize];
        if holders == 1 && self.bins[previous as usize].count != count - 1 {
            self.bins[id as usize].count = count - 1;
            return id;
        }
        let new = self.join_or_insert(previous, count - 1, previous);
        self.leave(id);
        new
    }

    /// Removes a holder whose last session has ended.
    pub(super) fn remove_holder(&mut self, histogram: Histogram, id: BinId) {
        self.bins[histogram.0 as usize].holders -= 1;
        self.leave(id);
    }

    /// Adds a holder to the bin `neighbor` if that has this count, else to a new bin after `previous`.
    #[inline]
    fn join_or_insert(&mut self, neighbor: BinId, count: u32, previous: BinId) -> BinId {
        let bin = &mut self.bins[neighbor as usize];
        if bin.count == count {
            bin.holders += 1;
            return neighbor;
        }
        let id = self.allocate();
        let next = self.bins[previous as usize].next;
        self.bins[id as usize] = Bin { count, holders: 1, next, previous };
        self.bins[previous as usize].next = id;
        self.bins[next as usize].previous = id;
        id
    }

    #[inline]
    fn leave(&mut self, id: BinId) {
        let bin = &mut self.bins[id as usize];
        bin.holders -= 1;
        if bin.holders == 0 {
            let Bin { next, previous, .. } = *bin;
            self.bins[previous as usize].next = next;
            self.bins[next as usize].previous = previous;
            self.release(id);
        }
    }

    /// Bins by descending count.
    fn descending(&self, Histogram(head): Histogram) -> impl Iterator<Item = &Bin> {
        let bin = move |id: BinId| Some(&self.bins[id as usize]).filter(|_| id != head);
        std::iter::successors(bin(self.bins[head as usize].previous), move |it| bin(it.previous))
    }

    /// The largest level above which holders have at least `excess` sessions together: zero if they have fewer than
    /// that, `u32::MAX` if `excess` is zero.
    pub(super) fn level(&self, histogram: Histogram, excess: u64) -> u32 {
        let (mut missing, mut above, mut from) = (excess, 0_u64, u32::MAX);
        for bin in self.descending(histogram) {
            let of_step = above * u64::from(from - bin.count);
            if of_step >= missing {
                break;
            }
            missing -= of_step;
            (above, from) = (above + u64::from(bin.holders), bin.count);
        }
        if above == 0 {
            return if missing == 0 { u32::MAX } else { 0 };
        }
        from.saturating_sub(u32::try_from(missing.div_ceil(above)).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two histograms, and the counts of their holders.
    struct Model {
        histograms: Histograms,
        of: [Histogram; 2],
        counts: [[u32; 8]; 2],
        bins: [[BinId; 8]; 2],
    }

    impl Model {
        fn step(&mut self, which: usize, holder: usize, opens: bool) {
            let (count, bin) = (&mut self.counts[which][holder], &mut self.bins[which][holder]);
            match (opens, *count) {
                (true, 0) => *bin = self.histograms.insert(self.of[which]),
                (true, _) => *bin = self.histograms.increment(*bin),
                (false, 0) => return,
                (false, 1) => self.histograms.remove_holder(self.of[which], *bin),
                (false, _) => *bin = self.histograms.decrement(*bin),
            }
            *count = if opens { *count + 1 } else { *count - 1 };
        }

        fn check(&self) -> Result<(), TestCaseError> {
            for (which, counts) in self.counts.iter().enumerate() {
                let of = self.of[which];
                prop_assert_eq!(self.histograms.holders(of), counts.iter().filter(|it| **it > 0).count() as u32);
                for (count, bin) in counts.iter().zip(&self.bins[which]).filter(|(count, _)| **count > 0) {
                    prop_assert_eq!(self.histograms.count(*bin), *count);
                }
                let bins: Vec<_> = self.histograms.descending(of).map(|bin| bin.count).collect();
                let mut expected: Vec<_> = counts.iter().copied().filter(|it| *it > 0).collect();
                expected.sort_unstable_by(|one, other| other.cmp(one));
                expected.dedup();
                prop_assert_eq!(bins, expected);
                let excess = |level: u32| counts.iter().map(|it| u64::from(it.saturating_sub(level))).sum::<u64>();
                for wanted in 1..=excess(0) {
                    let level = self.histograms.level(of, wanted);
                    prop_assert!(excess(level) >= wanted && excess(level + 1) < wanted, "{} for {}", level, wanted);
                }
                prop_assert_eq!(self.histograms.level(of, excess(0) + 1), 0);
                prop_assert_eq!(self.histograms.level(of, 0), u32::MAX, "no excess, no limit");
            }
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn bins_are_the_counts_that_occur_and_levels_cut_off_the_excess(
            steps in prop::collection::vec((0..2_usize, 0..8_usize, prop::bool::weighted(0.65)), 1..160),
        ) {
            let mut histograms = Histograms::new(2, 14).unwrap();
            let of = [Histograms::VIPS, histograms.create()];
            let mut model = Model { histograms, of, counts: [[0; 8]; 2], bins: [[0; 8]; 2] };
            for (which, holder, opens) in steps {
                model.step(which, holder, opens);
                model.check()?;
            }
            // All bins are freed: as many holders as before fit again.
            for (which, holder) in (0..2).flat_map(|which| (0..8).map(move |holder| (which, holder))) {
                (0..model.counts[which][holder]).for_each(|_| model.step(which, holder, false));
            }
            model.check()?;
            for (which, holder) in (0..2).flat_map(|which| (0..8).map(move |holder| (which, holder))) {
                (0..=holder).for_each(|_| model.step(which, holder, true));
            }
            model.check()?;
            prop_assert!(model.histograms.first_unused as usize <= model.histograms.bins.len());
        }
    }
}
