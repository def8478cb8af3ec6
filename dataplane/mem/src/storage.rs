//! Storage of slabs: process memory or a persistent region.

use bytemuck::AnyBitPattern;
use thiserror::Error;

use crate::mapping::MemoryError;
use crate::region::{RegionError, RegionSlabs};
use crate::slab::Slab;

/// Storage of slabs.
#[derive(Debug)]
pub enum Storage<'a> {
    /// Memory of the process.
    Process,
    /// A file that outlives the process.
    Region(&'a mut RegionSlabs),
}

/// Failed allocation of a slab.
#[derive(Debug, Error)]
pub enum StorageError {
    /// In memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// In a region.
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl Storage<'_> {
    /// Allocates the next slab of `len` values.
    ///
    /// # Errors
    /// When there is no memory, or no space in the region.
    pub fn slab<T: AnyBitPattern>(&mut self, len: usize) -> Result<Slab<T>, StorageError> {
        Ok(match self {
            Self::Process => Slab::new(len)?,
            Self::Region(slabs) => slabs.slab(len)?,
        })
    }
}
