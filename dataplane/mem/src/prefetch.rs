//! Software prefetch.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches all cache lines of `values[index]`. A hint only: an index out of bounds is harmless.
#[inline]
pub fn prefetch_read<T>(values: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = values.as_ptr().wrapping_add(index).cast::<i8>();
        for line in 0..size_of::<T>().div_ceil(LINE).max(1) {
            // SAFETY: a prefetch reads nothing and never faults, whatever the address (Intel SDM, PREFETCHh); the
            // pointer is computed with wrapping arithmetic, which is defined for any index, and is never dereferenced.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line * LINE)) };
        }
        if !size_of::<T>().is_multiple_of(LINE) && size_of::<T>() > LINE {
            // A value that isn't a multiple of the line size may extend into one more line.
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(size_of::<T>() - 1)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, index);
}
