//! Which bytes of a datagram have been seen, so that no two fragments give different ones (RFC 5722, RFC 1858 section
//! 4).
//!
//! Pieces aren't kept, only the spans that they make up together, and where the first ends and the last begins. So a
//! piece of which every byte was seen counts as a repetition, which networks make and receivers bear; but at both ends
//! of a datagram, where headers stand and its length is settled, only an exact repetition does.

use bytemuck::{AnyBitPattern, Pod, Zeroable};

use super::piece::{Piece, Refusal};

/// Separate spans of one datagram. The most that 64 KB in any order make is about half its pieces; networks that mix
/// up packets make few.
const MOST_SPANS: usize = 16;
/// Repetitions of one datagram that are passed on.
const MOST_REPETITIONS: u8 = 64;

/// Bytes from `start` to before `end`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct Span {
    start: u16,
    end: u16,
}

/// What has been seen of a datagram. Nothing, when all is zero.
#[derive(Clone, Copy, Debug, Default, AnyBitPattern)]
#[repr(C)]
pub(super) struct Seen {
    /// Ascending, and a gap between any two.
    spans: [Span; MOST_SPANS],
    /// End of the first piece; 0 before it was seen.
    first_end: u16,
    /// Start of the last piece, once seen.
    last_start: u16,
    /// End of the last piece, the datagram's length; 0 before it was seen.
    total: u16,
    /// The highest end of the other pieces.
    others_end: u16,
    count: u8,
    repetitions: u8,
}

impl Seen {
    /// Notes a piece.
    ///
    /// # Errors
    /// [`Refusal::Overlap`], [`Refusal::Scattered`], [`Refusal::Repeated`]; nothing has changed then.
    #[inline]
    pub(super) fn note(&mut self, piece: Piece) -> Result<(), Refusal> {
        if self.contradicts_an_end(piece) {
            return Err(Refusal::Overlap);
        }
        self.cover(piece)?;
        if piece.is_first() {
            self.first_end = piece.end();
        }
        if piece.more {
            self.others_end = self.others_end.max(piece.end());
        } else {
            (self.last_start, self.total) = (piece.offset, piece.end());
        }
        Ok(())
    }

    /// Whether every byte has been seen.
    #[inline]
    pub(super) fn is_complete(&self) -> bool {
        self.total != 0 && self.count == 1 && self.spans[0].start == 0 && self.spans[0].end == self.total
    }

    fn contradicts_an_end(&self, piece: Piece) -> bool {
        let first = if piece.is_first() {
            self.first_end != 0 && piece.end() != self.first_end
        } else {
            piece.offset < self.first_end
        };
        let last = match (piece.more, self.total) {
            (true, 0) => false,
            (true, _) => piece.end() > self.last_start,
            (false, 0) => piece.end() <= self.others_end,
            (false, total) => (piece.offset, piece.end()) != (self.last_start, total),
        };
        first || last
    }

    fn cover(&mut self, piece: Piece) -> Result<(), Refusal> {
        let (start, end) = (piece.offset, piece.end());
        let count = usize::from(self.count).min(MOST_SPANS);
        // The first span that doesn't end before the piece: no other can touch it from below.
        let at = self.spans[..count].iter().position(|span| span.end >= start).unwrap_or(count);
        let next = self.spans[..count].get(at + 1).copied();
        let Some(span) = self.spans[..count].get_mut(at).filter(|span| span.start <= end) else {
            return self.insert(at, Span { start, end });
        };
        if span.start <= start && end <= span.end {
            if self.repetitions == MOST_REPETITIONS {
                return Err(Refusal::Repeated);
            }
            self.repetitions += 1;
        } else if span.start == end {
            span.start = start;
        } else if span.end != start {
            return Err(Refusal::Overlap);
        } else {
            match next {
                Some(next) if next.start < end => return Err(Refusal::Overlap),
                Some(next) if next.start == end => {
                    span.end = next.end;
                    self.remove(at + 1);
                }
                _ => span.end = end,
            }
        }
        Ok(())
    }

    fn insert(&mut self, at: usize, span: Span) -> Result<(), Refusal> {
        let count = usize::from(self.count);
        if count >= MOST_SPANS {
            return Err(Refusal::Scattered);
        }
        self.spans.copy_within(at..count, at + 1);
        self.spans[at] = span;
        self.count += 1;
        Ok(())
    }

    fn remove(&mut self, at: usize) {
        self.spans.copy_within(at + 1..usize::from(self.count), at);
        self.count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(offset: u16, length: u16, more: bool) -> Piece {
        Piece { offset, length, more }
    }

    fn after(pieces: &[Piece]) -> Seen {
        let mut seen = Seen::default();
        for &piece in pieces {
            seen.note(piece).unwrap();
        }
        seen
    }

    /// A datagram of 64, 64, 64 and 50 bytes.
    const WHOLE: [Piece; 4] = [
        Piece { offset: 0, length: 64, more: true },
        Piece { offset: 64, length: 64, more: true },
        Piece { offset: 128, length: 64, more: true },
        Piece { offset: 192, length: 50, more: false },
    ];

    #[test]
    fn a_datagram_is_complete_in_any_order_and_not_before() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let mut seen = Seen::default();
            for i in order {
                assert!(!seen.is_complete());
                seen.note(WHOLE[i]).unwrap();
            }
            assert!(seen.is_complete(), "{order:?}");
        }
    }

    #[test]
    fn one_octet_more_or_less_is_an_overlap_in_any_order() {
        let last = WHOLE[3];
        let off_by_one = [piece(193, 49, false), piece(192, 49, false), piece(192, 51, false), piece(191, 51, false)];
        for bad in off_by_one {
            assert_eq!(after(&WHOLE).note(bad), Err(Refusal::Overlap), "{bad:?} after all");
            assert_eq!(after(&[bad]).note(last), Err(Refusal::Overlap), "{bad:?} before the last");
        }
        for bad in [piece(56, 16, true), piece(120, 16, true), piece(64, 72, true), piece(120, 8, false)] {
            assert_eq!(after(&WHOLE[1..2]).note(bad), Err(Refusal::Overlap), "{bad:?} around the second");
            let all = after(&[WHOLE[0], WHOLE[1]]).note(bad);
            assert_eq!(all, Err(Refusal::Overlap), "{bad:?} across or behind what is there");
        }
    }

    #[test]
    fn a_repetition_is_borne_64_times() {
        let mut seen = after(&WHOLE);
        for i in 0..64 {
            assert_eq!(seen.note(WHOLE[i % 4]), Ok(()));
        }
        assert_eq!(seen.note(WHOLE[1]), Err(Refusal::Repeated));
    }

    #[test]
    fn a_router_that_cuts_again_only_repeats_what_lies_between_the_ends() {
        let mut seen = after(&WHOLE);
        assert_eq!(seen.note(piece(64, 32, true)), Ok(()));
        assert_eq!(seen.note(piece(96, 64, true)), Ok(()));
    }

    #[test]
    fn nothing_but_itself_repeats_the_first_or_the_last_piece() {
        for inside in [piece(0, 32, true), piece(32, 32, true), piece(0, 128, true), piece(40, 88, true)] {
            assert_eq!(after(&WHOLE).note(inside), Err(Refusal::Overlap), "{inside:?} where the headers are");
        }
        for inside in [piece(192, 24, true), piece(200, 42, false), piece(128, 114, false), piece(192, 56, true)] {
            assert_eq!(after(&WHOLE).note(inside), Err(Refusal::Overlap), "{inside:?} where it ends");
        }
    }

    #[test]
    fn nothing_lies_behind_the_end() {
        assert_eq!(after(&WHOLE[3..]).note(piece(248, 8, true)), Err(Refusal::Overlap));
        assert_eq!(after(&[piece(248, 8, true)]).note(WHOLE[3]), Err(Refusal::Overlap));
        assert_eq!(after(&WHOLE[3..]).note(piece(248, 8, false)), Err(Refusal::Overlap), "a second end");
    }

    #[test]
    fn more_separate_parts_than_there_is_room_for_are_refused_and_gaps_can_still_close() {
        let mut seen = after(&(0..16).map(|i| piece(i * 16, 8, true)).collect::<Vec<_>>());
        assert_eq!(seen.note(piece(16 * 16, 8, true)), Err(Refusal::Scattered));
        assert_eq!(seen.note(piece(8, 8, true)), Ok(()), "two parts become one");
        assert_eq!(seen.note(piece(16 * 16, 8, true)), Ok(()));
    }

    /// The same by definition: every accepted piece, and every byte of them.
    #[derive(Default)]
    struct Model {
        pieces: Vec<Piece>,
        repetitions: u32,
    }

    impl Model {
        fn note(&mut self, new: Piece) -> Result<(), Refusal> {
            let contradicts = |old: &Piece| match (old.is_first(), new.is_first()) {
                _ if !old.more && !new.more => *old != new,
                _ if !old.more => new.end() > old.offset,
                _ if !new.more => old.end() > new.offset,
                (true, true) => *old != new,
                (true, false) => new.offset < old.end(),
                (false, true) => old.offset < new.end(),
                (false, false) => false,
            };
            let seen = |byte: &u16| self.pieces.iter().any(|old| (old.offset..old.end()).contains(byte));
            let covered = (new.offset..new.end()).filter(seen).count();
            if self.pieces.iter().any(contradicts) || (covered != 0 && covered != new.length.into()) {
                return Err(Refusal::Overlap);
            }
            if covered != 0 {
                if self.repetitions == 64 {
                    return Err(Refusal::Repeated);
                }
                self.repetitions += 1;
            }
            self.pieces.push(new);
            Ok(())
        }

        fn is_complete(&self) -> bool {
            let seen = |byte| self.pieces.iter().any(|old| (old.offset..old.end()).contains(&byte));
            self.pieces.iter().any(|last| !last.more && (0..last.end()).all(seen))
        }
    }

    fn any_piece() -> impl Strategy<Value = Piece> {
        (0_u16..16, 1_u16..5, prop::bool::weighted(0.85), 0_u16..8)
            .prop_filter("the whole", |&(offset, _, more, _)| offset != 0 || more)
            .prop_map(|(offset, length, more, less)| Piece {
                offset: offset * 8,
                length: length * 8 - if more { 0 } else { less },
                more,
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

        #[test]
        fn it_says_what_every_byte_says(pieces in prop::collection::vec(any_piece(), 1..120)) {
            let (mut seen, mut model) = (Seen::default(), Model::default());
            for piece in pieces {
                prop_assert_eq!(seen.note(piece), model.note(piece), "{:?} after {:?}", piece, model.pieces);
                prop_assert_eq!(seen.is_complete(), model.is_complete());
            }
        }

        #[test]
        fn pieces_of_one_datagram_never_contradict_each_other(
            cuts in prop::collection::btree_set(1_u16..200, 1..12),
            rest in 1_u16..9,
            order in prop::collection::vec(any::<prop::sample::Index>(), 12..48),
        ) {
            let mut starts: Vec<u16> = cuts.iter().map(|cut| cut * 8).collect();
            starts.insert(0, 0);
            let total = starts[starts.len() - 1] + rest;
            let ends = starts[1..].iter().copied().chain([total]);
            let pieces: Vec<_> =
                starts.iter().zip(ends).map(|(&start, end)| piece(start, end - start, end != total)).collect();
            let mut seen = Seen::default();
            for which in order {
                prop_assert_eq!(seen.note(*which.get(&pieces)), Ok(()));
            }
        }
    }
}
