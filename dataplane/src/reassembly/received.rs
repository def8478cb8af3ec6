//! Received byte ranges of a datagram: detects overlapping fragments (RFC 5722, RFC 1858 section 4).
//!
//! Fragments aren't stored, only the merged ranges, the end of the first fragment and the start of the last one. A
//! fragment within received bytes therefore counts as a duplicate, which networks produce and receivers accept; but for
//! the first fragment, with the headers, and the last one, which fixes the length, only an exact duplicate does.

use bytemuck::{AnyBitPattern, Pod, Zeroable};

use super::fragment::{Fragment, FragmentError};

/// Limit of separate ranges of one datagram. In the worst order, 64 KB make half as many as there are fragments;
/// networks that reorder packets make few.
const MAX_RANGES: usize = 16;
/// Limit of duplicates of one datagram that are forwarded.
const MAX_DUPLICATES: u8 = 64;

/// Bytes from `start`, `end` excluded.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct ByteRange {
    start: u16,
    end: u16,
}

/// The received bytes of a datagram; none if all is zero.
#[derive(Clone, Copy, Debug, Default, AnyBitPattern)]
#[repr(C)]
pub(super) struct ReceivedRanges {
    /// Ascending, with a gap between any two.
    ranges: [ByteRange; MAX_RANGES],
    /// End of the first fragment; 0 until it is received.
    first_end: u16,
    /// Start of the last fragment, once received.
    last_start: u16,
    /// End of the last fragment, which is the datagram's length; 0 until it is received.
    total: u16,
    /// The highest end of the other fragments.
    others_end: u16,
    count: u8,
    duplicates: u8,
}

impl ReceivedRanges {
    /// Adds a fragment.
    ///
    /// # Errors
    /// [`FragmentError::Overlap`], [`FragmentError::TooManyRanges`], [`FragmentError::TooManyDuplicates`]; nothing has
    /// changed then.
    #[inline]
    pub(super) fn add(&mut self, fragment: Fragment) -> Result<(), FragmentError> {
        if self.contradicts_first_or_last(fragment) {
            return Err(FragmentError::Overlap);
        }
        self.cover(fragment)?;
        if fragment.is_first() {
            self.first_end = fragment.end();
        }
        if fragment.more {
            self.others_end = self.others_end.max(fragment.end());
        } else {
            (self.last_start, self.total) = (fragment.offset, fragment.end());
        }
        Ok(())
    }

    /// Whether every byte has been received.
    #[inline]
    pub(super) fn is_complete(&self) -> bool {
        self.total != 0 && self.count == 1 && self.ranges[0].start == 0 && self.ranges[0].end == self.total
    }

    fn contradicts_first_or_last(&self, fragment: Fragment) -> bool {
        let first = if fragment.is_first() {
            self.first_end != 0 && fragment.end() != self.first_end
        } else {
            fragment.offset < self.first_end
        };
        let last = match (fragment.more, self.total) {
            (true, 0) => false,
            (true, _) => fragment.end() > self.last_start,
            (false, 0) => fragment.end() <= self.others_end,
            (false, total) => (fragment.offset, fragment.end()) != (self.last_start, total),
        };
        first || last
    }

    fn cover(&mut self, fragment: Fragment) -> Result<(), FragmentError> {
        let (start, end) = (fragment.offset, fragment.end());
        let count = usize::from(self.count).min(MAX_RANGES);
        // The first range that doesn't end before the fragment: no lower one can touch it.
        let at = self.ranges[..count].iter().position(|range| range.end >= start).unwrap_or(count);
        let next = self.ranges[..count].get(at + 1).copied();
        let Some(range) = self.ranges[..count].get_mut(at).filter(|range| range.start <= end) else {
            return self.insert(at, ByteRange { start, end });
        };
        if range.start <= start && end <= range.end {
            if self.duplicates == MAX_DUPLICATES {
                return Err(FragmentError::TooManyDuplicates);
            }
            self.duplicates += 1;
        } else if range.start == end {
            range.start = start;
        } else if range.end != start {
            return Err(FragmentError::Overlap);
        } else {
            match next {
                Some(next) if next.start < end => return Err(FragmentError::Overlap),
                Some(next) if next.start == end => {
                    range.end = next.end;
                    self.remove(at + 1);
                }
                _ => range.end = end,
            }
        }
        Ok(())
    }

    fn insert(&mut self, at: usize, range: ByteRange) -> Result<(), FragmentError> {
        let count = usize::from(self.count);
        if count >= MAX_RANGES {
            return Err(FragmentError::TooManyRanges);
        }
        self.ranges.copy_within(at..count, at + 1);
        self.ranges[at] = range;
        self.count += 1;
        Ok(())
    }

    fn remove(&mut self, at: usize) {
        self.ranges.copy_within(at + 1..usize::from(self.count), at);
        self.count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fragment(offset: u16, length: u16, more: bool) -> Fragment {
        Fragment { offset, length, more }
    }

    fn after(fragments: &[Fragment]) -> ReceivedRanges {
        let mut seen = ReceivedRanges::default();
        for &fragment in fragments {
            seen.add(fragment).unwrap();
        }
        seen
    }

    /// Fragments of 64, 64, 64 and 50 bytes.
    const WHOLE: [Fragment; 4] = [
        Fragment { offset: 0, length: 64, more: true },
        Fragment { offset: 64, length: 64, more: true },
        Fragment { offset: 128, length: 64, more: true },
        Fragment { offset: 192, length: 50, more: false },
    ];

    #[test]
    fn a_datagram_is_complete_exactly_when_all_fragments_are_received() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let mut seen = ReceivedRanges::default();
            for i in order {
                assert!(!seen.is_complete());
                seen.add(WHOLE[i]).unwrap();
            }
            assert!(seen.is_complete(), "{order:?}");
        }
    }

    #[test]
    fn one_octet_more_or_less_is_an_overlap_in_any_order() {
        let last = WHOLE[3];
        let off_by_one =
            [fragment(193, 49, false), fragment(192, 49, false), fragment(192, 51, false), fragment(191, 51, false)];
        for bad in off_by_one {
            assert_eq!(after(&WHOLE).add(bad), Err(FragmentError::Overlap), "{bad:?} after all");
            assert_eq!(after(&[bad]).add(last), Err(FragmentError::Overlap), "{bad:?} before the last");
        }
        for bad in [fragment(56, 16, true), fragment(120, 16, true), fragment(64, 72, true), fragment(120, 8, false)] {
            assert_eq!(after(&WHOLE[1..2]).add(bad), Err(FragmentError::Overlap), "{bad:?} around the second fragment");
            let all = after(&[WHOLE[0], WHOLE[1]]).add(bad);
            assert_eq!(all, Err(FragmentError::Overlap), "{bad:?} across or after received bytes");
        }
    }

    #[test]
    fn duplicates_are_accepted_64_times() {
        let mut seen = after(&WHOLE);
        for i in 0..64 {
            assert_eq!(seen.add(WHOLE[i % 4]), Ok(()));
        }
        assert_eq!(seen.add(WHOLE[1]), Err(FragmentError::TooManyDuplicates));
    }

    #[test]
    fn fragments_that_a_router_split_further_count_as_duplicates() {
        let mut seen = after(&WHOLE);
        assert_eq!(seen.add(fragment(64, 32, true)), Ok(()));
        assert_eq!(seen.add(fragment(96, 64, true)), Ok(()));
    }

    #[test]
    fn only_an_exact_duplicate_matches_the_first_or_last_fragment() {
        for inside in [fragment(0, 32, true), fragment(32, 32, true), fragment(0, 128, true), fragment(40, 88, true)] {
            assert_eq!(after(&WHOLE).add(inside), Err(FragmentError::Overlap), "{inside:?} in the first fragment");
        }
        for inside in
            [fragment(192, 24, true), fragment(200, 42, false), fragment(128, 114, false), fragment(192, 56, true)]
        {
            assert_eq!(after(&WHOLE).add(inside), Err(FragmentError::Overlap), "{inside:?} in the last fragment");
        }
    }

    #[test]
    fn a_fragment_beyond_the_last_one_is_an_overlap() {
        assert_eq!(after(&WHOLE[3..]).add(fragment(248, 8, true)), Err(FragmentError::Overlap));
        assert_eq!(after(&[fragment(248, 8, true)]).add(WHOLE[3]), Err(FragmentError::Overlap));
        assert_eq!(
            after(&WHOLE[3..]).add(fragment(248, 8, false)),
            Err(FragmentError::Overlap),
            "a second last fragment"
        );
    }

    #[test]
    fn separate_ranges_are_limited_and_can_merge() {
        let mut seen = after(&(0..16).map(|i| fragment(i * 16, 8, true)).collect::<Vec<_>>());
        assert_eq!(seen.add(fragment(16 * 16, 8, true)), Err(FragmentError::TooManyRanges));
        assert_eq!(seen.add(fragment(8, 8, true)), Ok(()), "two ranges merge");
        assert_eq!(seen.add(fragment(16 * 16, 8, true)), Ok(()));
    }

    /// Reference model: all accepted fragments, checked byte by byte.
    #[derive(Default)]
    struct Model {
        fragments: Vec<Fragment>,
        duplicates: u32,
    }

    impl Model {
        fn note(&mut self, new: Fragment) -> Result<(), FragmentError> {
            let contradicts = |old: &Fragment| match (old.is_first(), new.is_first()) {
                _ if !old.more && !new.more => *old != new,
                _ if !old.more => new.end() > old.offset,
                _ if !new.more => old.end() > new.offset,
                (true, true) => *old != new,
                (true, false) => new.offset < old.end(),
                (false, true) => old.offset < new.end(),
                (false, false) => false,
            };
            let seen = |byte: &u16| self.fragments.iter().any(|old| (old.offset..old.end()).contains(byte));
            let covered = (new.offset..new.end()).filter(seen).count();
            if self.fragments.iter().any(contradicts) || (covered != 0 && covered != new.length.into()) {
                return Err(FragmentError::Overlap);
            }
            if covered != 0 {
                if self.duplicates == 64 {
                    return Err(FragmentError::TooManyDuplicates);
                }
                self.duplicates += 1;
            }
            self.fragments.push(new);
            Ok(())
        }

        fn is_complete(&self) -> bool {
            let seen = |byte| self.fragments.iter().any(|old| (old.offset..old.end()).contains(&byte));
            self.fragments.iter().any(|last| !last.more && (0..last.end()).all(seen))
        }
    }

    fn any_fragment() -> impl Strategy<Value = Fragment> {
        (0_u16..16, 1_u16..5, prop::bool::weighted(0.85), 0_u16..8)
            .prop_filter("a whole datagram", |&(offset, _, more, _)| offset != 0 || more)
            .prop_map(|(offset, length, more, less)| Fragment {
                offset: offset * 8,
                length: length * 8 - if more { 0 } else { less },
                more,
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

        #[test]
        fn received_ranges_agree_with_a_byte_model(fragments in prop::collection::vec(any_fragment(), 1..120)) {
            let (mut seen, mut model) = (ReceivedRanges::default(), Model::default());
            for fragment in fragments {
                prop_assert_eq!(seen.add(fragment), model.note(fragment), "{:?}, {:?}", model.fragments, fragment);
                prop_assert_eq!(seen.is_complete(), model.is_complete());
            }
        }

        #[test]
        fn fragments_of_one_datagram_never_overlap(
            cuts in prop::collection::btree_set(1_u16..200, 1..12),
            rest in 1_u16..9,
            order in prop::collection::vec(any::<prop::sample::Index>(), 12..48),
        ) {
            let mut starts: Vec<u16> = cuts.iter().map(|cut| cut * 8).collect();
            starts.insert(0, 0);
            let total = starts[starts.len() - 1] + rest;
            let ends = starts[1..].iter().copied().chain([total]);
            let fragments: Vec<_> =
                starts.iter().zip(ends).map(|(&start, end)| fragment(start, end - start, end != total)).collect();
            let mut seen = ReceivedRanges::default();
            for which in order {
                prop_assert_eq!(seen.add(*which.get(&fragments)), Ok(()));
            }
        }
    }
}
