//! The engine of vipgate. See `ARCHITECTURE.md` for the rooms and the way of a packet.
#![forbid(unsafe_code)]

pub mod command;
pub mod counters;
pub mod io;
pub mod snapshot;
