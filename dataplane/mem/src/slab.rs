//! Slab: a large array of fixed size.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::AnyBitPattern;

use crate::mapping::{Mapping, MemoryError, Pages};

/// A zeroed array of plain values in its own mapping.
#[derive(Debug)]
pub struct Slab<T> {
    mapping: Mapping,
    len: usize,
    values: PhantomData<T>,
}

// SAFETY: a slab owns its values like a Box<[T]>.
unsafe impl<T: Send> Send for Slab<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Slab<T> {}

impl<T: AnyBitPattern> Slab<T> {
    /// Allocates an array of `len` zeroed values.
    ///
    /// # Errors
    /// When the kernel has no memory for it.
    pub fn new(len: usize) -> Result<Self, MemoryError> {
        const { assert!(align_of::<T>() <= 4096, "a mapping is aligned to a page") };
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| MemoryError { bytes: usize::MAX, source: std::io::ErrorKind::OutOfMemory.into() })?;
        Ok(Self { mapping: Mapping::anonymous(bytes)?, len, values: PhantomData })
    }

    /// An array over an existing mapping, with its contents.
    pub(crate) fn from_mapping(mapping: Mapping, len: usize) -> Self {
        const { assert!(align_of::<T>() <= 4096, "a mapping is aligned to a page") };
        assert!(
            len.checked_mul(size_of::<T>()).is_some_and(|bytes| bytes <= mapping.bytes()),
            "the mapping is too short"
        );
        Self { mapping, len, values: PhantomData }
    }

    /// Page type of the memory.
    pub fn pages(&self) -> Pages {
        self.mapping.pages()
    }
}

impl<T> Deref for Slab<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping has `len` values of T (checked in `new` and `from_mapping`), page-aligned, initialized by
        // the kernel, by a former process or by writes through `deref_mut`; any bytes are a valid T (`AnyBitPattern`).
        // The borrow of self keeps it mapped, and the pages of a file stay: the mapping holds the file's lock.
        unsafe { std::slice::from_raw_parts(self.mapping.base().as_ptr().cast(), self.len) }
    }
}

impl<T> DerefMut for Slab<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the exclusive borrow of self makes this the only reference, since no other mapping has
        // the range (see `RegionSlabs`).
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base().as_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_slab_is_zeroed() {
        let mut slab = Slab::<u64>::new(1_000_000).unwrap();
        assert_eq!(slab.len(), 1_000_000);
        assert!(slab.iter().all(|&n| n == 0));
        slab[999_999] = 7;
        assert_eq!(slab[999_999], 7);
        assert_ne!(slab.pages(), Pages::Small);
        assert!(Slab::<u8>::new(0).unwrap().is_empty());
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(Slab::<u64>::new(usize::MAX / 4).is_err());
        assert!(Slab::<u64>::new(1 << 58).is_err());
    }
}
