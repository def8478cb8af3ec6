//! Atomics of our own lock-free code. With the feature `loom` they are loom's, which explores all thread interleavings
//! (`make loom`).

#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
