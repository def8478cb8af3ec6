//! The atomics of our own lock-free code. Under the feature `loom` they are those of loom, which tries every order in which threads
//! can run (`make loom`).

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};
