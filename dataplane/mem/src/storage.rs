//! Where slabs come from.

use bytemuck::AnyBitPattern;
use thiserror::Error;

use crate::mapping::MemoryError;
use crate::region::{Region, RegionError};
use crate::slab::Slab;

/// Where slabs come from.
#[derive(Debug)]
pub enum Storage<'a> {
    /// The process's own memory: gone with it.
    Process,
    /// A file that outlives it.
    Region(&'a mut Region),
}

/// A slab can't be had.
#[derive(Debug, Error)]
pub enum StorageError {
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The region says no.
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl Storage<'_> {
    /// The next slab of `len` values.
    ///
    /// # Errors
    /// When there is no memory, or no room in the region.
    pub fn slab<T: AnyBitPattern>(&mut self, len: usize) -> Result<Slab<T>, StorageError> {
        Ok(match self {
            Self::Process => Slab::new(len)?,
            Self::Region(region) => region.slab(len)?,
        })
    }
}
