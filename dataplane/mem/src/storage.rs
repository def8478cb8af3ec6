//! Storage of slabs: process memory or a persistent region.

use std::io;
use std::path::PathBuf;

use bytemuck::AnyBitPattern;
use thiserror::Error;

use crate::mapping::MemoryError;
use crate::region::RegionSlabs;
use crate::slab::Slab;

/// Storage of slabs.
#[derive(Debug)]
pub enum Storage<'a> {
    /// Memory of the process.
    Process,
    /// A file that outlives the process.
    Region(&'a mut RegionSlabs),
}

/// Failed allocation of a slab, or use of a region.
#[derive(Debug, Error)]
pub enum StorageError {
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The file can't be opened or created.
    #[error("cannot open {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// Somebody else may have put the file there, or may change it.
    #[error("{path} is not used: {reason}")]
    Unsafe {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The file can't be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// Another process has locked it.
    #[error("another process uses {path}")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file system has no space for it.
    #[error("no space for {bytes} bytes in {path}: {source}")]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Requested size of the file.
        bytes: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The file can't be mapped.
    #[error("cannot map {path}: {source}")]
    Map {
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl Storage<'_> {
    /// Allocates the next slab of `len` values.
    ///
    /// # Errors
    /// When there is no memory, or no space in the region.
    pub fn slab<T: AnyBitPattern>(&mut self, len: usize) -> Result<Slab<T>, StorageError> {
        match self {
            Self::Process => Ok(Slab::new(len)?),
            Self::Region(slabs) => slabs.slab(len),
        }
    }
}
