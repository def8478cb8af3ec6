//! Memory of the packet path: large arrays on huge pages, owned packet buffers, prefetch.
//!
//! One of the two crates with unsafe code; each block states the invariant that makes it sound.
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
pub use frame::{FRAME_SIZE, Frame, HEADROOM};
pub use mapping::{MemoryError, Pages};
pub use prefetch::prefetch_read;
pub use region::{Region, RegionLock, RegionSlabs};
pub use slab::Slab;
pub use storage::{Storage, StorageError};
pub use tags::{TAGS_PER_LINE, equal_tags};
