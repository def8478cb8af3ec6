//! The engine of vipgate: sessions, ports, policy and the way of a packet. It knows nothing of sockets, reads no clock and
//! draws no random numbers: the same code runs under AF_XDP, in the benchmark, in tests and over pcap files.
//!
//! Start at [`worker`], the only loop, then [`pipeline`], the order of the stages.
#![forbid(unsafe_code)]

pub mod address;
pub mod adopt;
pub mod announcer;
pub mod batch;
pub mod command;
pub mod conflicts;
pub mod copies;
pub mod counters;
pub mod explain;
pub mod fragments;
pub mod handover;
pub mod ids;
pub mod inspect;
pub mod io;
pub mod limiter;
pub mod link;
pub mod pipeline;
pub mod ports;
pub mod session;
pub mod settle;
pub mod snapshot;
pub mod stage;
pub mod sweeper;
mod sync;
pub mod time;
pub mod verdict;
pub mod waiting;
pub mod watch;
pub mod wire;
pub mod worker;

#[cfg(test)]
#[path = "../tests/engine/tally.rs"]
mod tally;
