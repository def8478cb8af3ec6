//! Memory of the packet path: large arrays on huge pages, packet buffers as owned tokens, prefetch.
//!
//! One of the two crates with unsafe code; each block says which invariant makes it sound. What it offers is safe.
#![deny(unsafe_op_in_unsafe_fn)]

mod arena;
mod frame;
mod mapping;
mod prefetch;
mod region;
mod slab;
mod storage;
mod tags;

pub use arena::Arena;
pub use frame::{FRAME, Frame, HEADROOM};
pub use mapping::{MemoryError, Pages};
pub use prefetch::prefetch_read;
pub use region::{Region, RegionError};
pub use slab::Slab;
pub use storage::{Storage, StorageError};
pub use tags::{TAGS, equal_tags};
