//! The arrays of one address family within a batch.

use super::{BATCH_SIZE, Batch, ParsedHeader};
use crate::flow::address::{Address, V6};
use crate::flow::direction::Direction;
use crate::flow::ids::{HomeGroup, Slot};
use crate::flow::key::Key;
use crate::flow::tuple::Tuple;
use crate::flow::verdict::Verdict;
use crate::io::Received;
use crate::wire::tcp::Segment;

/// An address family with arrays in a batch.
pub trait BatchFamily: Address {
    /// Its index in `Batch::families`.
    const INDEX: usize;
    /// Tuples of its packets.
    fn tuples(batch: &Batch) -> &[Tuple<Self>; BATCH_SIZE];
    /// Tuples of its packets, mutable.
    fn tuples_mut(batch: &mut Batch) -> &mut [Tuple<Self>; BATCH_SIZE];
    /// The arrays that the fast path reads and writes.
    fn fast_path_arrays(batch: &mut Batch) -> FastPathArrays<'_, Self>;
    /// Keys of its packets.
    fn keys(batch: &Batch) -> &[Key<Self>; BATCH_SIZE];
    /// Keys of its packets, mutable.
    fn keys_mut(batch: &mut Batch) -> &mut [Key<Self>; BATCH_SIZE];
}

impl BatchFamily for u32 {
    const INDEX: usize = 0;

    #[inline]
    fn tuples(batch: &Batch) -> &[Tuple<Self>; BATCH_SIZE] {
        &batch.tuples_v4
    }

    #[inline]
    fn tuples_mut(batch: &mut Batch) -> &mut [Tuple<Self>; BATCH_SIZE] {
        &mut batch.tuples_v4
    }

    #[inline]
    fn fast_path_arrays(batch: &mut Batch) -> FastPathArrays<'_, Self> {
        let Batch { frames, headers, segments, keys_v4: keys, hashes, homes, slots, directions, verdicts, .. } = batch;
        FastPathArrays { frames, headers, segments, keys, hashes, homes, slots, directions, verdicts }
    }

    #[inline]
    fn keys(batch: &Batch) -> &[Key<Self>; BATCH_SIZE] {
        &batch.keys_v4
    }

    #[inline]
    fn keys_mut(batch: &mut Batch) -> &mut [Key<Self>; BATCH_SIZE] {
        &mut batch.keys_v4
    }
}

impl BatchFamily for V6 {
    const INDEX: usize = 1;

    #[inline]
    fn tuples(batch: &Batch) -> &[Tuple<Self>; BATCH_SIZE] {
        &batch.tuples_v6
    }

    #[inline]
    fn tuples_mut(batch: &mut Batch) -> &mut [Tuple<Self>; BATCH_SIZE] {
        &mut batch.tuples_v6
    }

    #[inline]
    fn fast_path_arrays(batch: &mut Batch) -> FastPathArrays<'_, Self> {
        let Batch { frames, headers, segments, keys_v6: keys, hashes, homes, slots, directions, verdicts, .. } = batch;
        FastPathArrays { frames, headers, segments, keys, hashes, homes, slots, directions, verdicts }
    }

    #[inline]
    fn keys(batch: &Batch) -> &[Key<Self>; BATCH_SIZE] {
        &batch.keys_v6
    }

    #[inline]
    fn keys_mut(batch: &mut Batch) -> &mut [Key<Self>; BATCH_SIZE] {
        &mut batch.keys_v6
    }
}

/// The arrays that the fast path reads and writes.
#[derive(Debug)]
pub struct FastPathArrays<'a, A> {
    /// The packets.
    pub frames: &'a mut [Received],
    /// See [`Batch::headers`].
    pub headers: &'a mut [ParsedHeader; BATCH_SIZE],
    /// See [`Batch::segments`].
    pub segments: &'a mut [Segment; BATCH_SIZE],
    /// See [`Batch::keys_v4`].
    pub keys: &'a mut [Key<A>; BATCH_SIZE],
    /// See [`Batch::hashes`].
    pub hashes: &'a mut [u64; BATCH_SIZE],
    /// See [`Batch::homes`].
    pub homes: &'a mut [HomeGroup; BATCH_SIZE],
    /// See [`Batch::slots`].
    pub slots: &'a mut [Slot; BATCH_SIZE],
    /// See [`Batch::directions`].
    pub directions: &'a mut [Direction; BATCH_SIZE],
    /// See [`Batch::verdicts`].
    pub verdicts: &'a mut [Verdict; BATCH_SIZE],
}
