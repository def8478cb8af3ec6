//! Asking for memory before it is needed.

/// Starts to fetch the cache line in which `values[index]` begins. Only a hint: an index outside of the slice is harmless.
#[inline]
pub fn prefetch_read<T>(values: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing and never faults, whatever the address (Intel SDM, PREFETCHh); the pointer is
        // computed with wrapping arithmetic, which is defined for any index, and is never dereferenced.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_add(index).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, index);
}
