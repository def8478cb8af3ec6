//! The immutable value that the stages read: policy and routes of one generation.
//!
//! Control builds it from the plain descriptions in [`spec`] and publishes it whole; a worker reads one snapshot a batch.

pub mod spec;
