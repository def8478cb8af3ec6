//! Where the packets of an address family are in a batch.

use super::{Batch, Head, MOST};
use crate::address::V6;
use crate::counters::Direction;
use crate::io::Received;
use crate::session::SessionFamily;
use crate::session::entry::Slot;
use crate::session::key::Key;
use crate::session::tuple::Tuple;
use crate::verdict::Verdict;
use crate::wire::tcp::Segment;

/// An address family that has its place in a batch.
pub trait Lane: SessionFamily {
    /// Its place in `Batch::families`.
    const FAMILY: usize;
    /// Its tuples.
    fn tuples(batch: &Batch) -> &[Tuple<Self>; MOST];
    /// The same, to write them.
    fn tuples_mut(batch: &mut Batch) -> &mut [Tuple<Self>; MOST];
    /// What the short way writes to.
    fn plain_parts(batch: &mut Batch) -> PlainParts<'_, Self>;
    /// Their keys.
    fn keys(batch: &Batch) -> &[Key<Self>; MOST];
    /// The same, to write them.
    fn keys_mut(batch: &mut Batch) -> &mut [Key<Self>; MOST];
}

impl Lane for u32 {
    const FAMILY: usize = 0;

    #[inline]
    fn tuples(batch: &Batch) -> &[Tuple<Self>; MOST] {
        &batch.v4
    }

    #[inline]
    fn tuples_mut(batch: &mut Batch) -> &mut [Tuple<Self>; MOST] {
        &mut batch.v4
    }

    #[inline]
    fn plain_parts(batch: &mut Batch) -> PlainParts<'_, Self> {
        let Batch { frames, heads, segments, keys_v4: keys, slots, directions, verdicts, .. } = batch;
        PlainParts { frames, heads, segments, keys, slots, directions, verdicts }
    }

    #[inline]
    fn keys(batch: &Batch) -> &[Key<Self>; MOST] {
        &batch.keys_v4
    }

    #[inline]
    fn keys_mut(batch: &mut Batch) -> &mut [Key<Self>; MOST] {
        &mut batch.keys_v4
    }
}

impl Lane for V6 {
    const FAMILY: usize = 1;

    #[inline]
    fn tuples(batch: &Batch) -> &[Tuple<Self>; MOST] {
        &batch.v6
    }

    #[inline]
    fn tuples_mut(batch: &mut Batch) -> &mut [Tuple<Self>; MOST] {
        &mut batch.v6
    }

    #[inline]
    fn plain_parts(batch: &mut Batch) -> PlainParts<'_, Self> {
        let Batch { frames, heads, segments, keys_v6: keys, slots, directions, verdicts, .. } = batch;
        PlainParts { frames, heads, segments, keys, slots, directions, verdicts }
    }

    #[inline]
    fn keys(batch: &Batch) -> &[Key<Self>; MOST] {
        &batch.keys_v6
    }

    #[inline]
    fn keys_mut(batch: &mut Batch) -> &mut [Key<Self>; MOST] {
        &mut batch.keys_v6
    }
}

/// What the short way writes to, side by side.
#[derive(Debug)]
pub struct PlainParts<'a, A> {
    /// The packets.
    pub frames: &'a mut [Received],
    /// See [`Batch::heads`].
    pub heads: &'a mut [Head; MOST],
    /// See [`Batch::segments`].
    pub segments: &'a mut [Segment; MOST],
    /// See [`Batch::keys_v4`].
    pub keys: &'a mut [Key<A>; MOST],
    /// See [`Batch::slots`].
    pub slots: &'a mut [Slot; MOST],
    /// See [`Batch::directions`].
    pub directions: &'a mut [Direction; MOST],
    /// See [`Batch::verdicts`].
    pub verdicts: &'a mut [Verdict; MOST],
}
