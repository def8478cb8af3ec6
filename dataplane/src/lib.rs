//! The packet engine of vipgate: sessions, ports, policy and the packet pipeline. Sans I/O: it opens no socket, reads
//! no clock and draws no random numbers, so the same code runs under AF_XDP, in the benchmark, in tests and over pcap
//! files.
//!
//! Start at [`worker`], the only packet loop, then `pipeline`, the order of the stages.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod flow;
pub mod io;
pub mod observe;
pub mod policy;
pub mod ports;
pub mod reassembly;
pub mod replication;
pub mod session;
pub mod stage;
pub mod wire;
pub mod worker;

// What the testkit has of whole policies, for unit tests: its own types are those of another build of this crate.
#[cfg(test)]
extern crate self as vipgate_dataplane;
#[cfg(test)]
#[path = "../testkit/src/policy_set.rs"]
#[allow(unreachable_pub, reason = "the testkit exports it")]
mod policy_set;
