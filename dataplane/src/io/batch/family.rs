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

macro_rules! batch_family {
    ($family:ty, $index:literal, $tuples:ident, $keys:ident) => {
        impl BatchFamily for $family {
            const INDEX: usize = $index;

            #[inline]
            fn tuples(batch: &Batch) -> &[Tuple<Self>; BATCH_SIZE] {
                &batch.$tuples
            }

            #[inline]
            fn tuples_mut(batch: &mut Batch) -> &mut [Tuple<Self>; BATCH_SIZE] {
                &mut batch.$tuples
            }

            #[inline]
            fn fast_path_arrays(batch: &mut Batch) -> FastPathArrays<'_, Self> {
                let Batch {
                    frames, headers, segments, $keys: keys, hashes, homes, slots, directions, verdicts, ..
                } = batch;
                FastPathArrays { frames, headers, segments, keys, hashes, homes, slots, directions, verdicts }
            }

            #[inline]
            fn keys(batch: &Batch) -> &[Key<Self>; BATCH_SIZE] {
                &batch.$keys
            }

            #[inline]
            fn keys_mut(batch: &mut Batch) -> &mut [Key<Self>; BATCH_SIZE] {
                &mut batch.$keys
            }
        }
    };
}

batch_family!(u32, 0, tuples_v4, keys_v4);
batch_family!(V6, 1, tuples_v6, keys_v6);

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
