//! AF_XDP devices for the engine: sockets over a shared UMEM, NIC capabilities, and the XDP program that steers packets
//! to the sockets.
//!
//! One of the two crates with unsafe code; each block states the invariant that makes it sound. The API is safe.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod attach;
pub mod device;
pub mod doorbell;
mod frames;
pub mod guard;
mod multi_buffer;
pub mod multicast;
pub mod nic;
pub mod open;
pub mod packet;
mod program;
pub mod seccomp;
pub mod stats;
pub mod steering;
mod umem;
