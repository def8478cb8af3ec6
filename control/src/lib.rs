//! The control plane of vipgate: gateway control thread, policy server, command line, demo topology.
#![forbid(unsafe_code)]

pub mod admin;
mod blocking_threads;
pub(crate) mod certificates;
pub mod check;
pub mod cli;
pub(crate) mod clock;
pub mod command_error;
pub mod config;
pub mod demo;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod gateway;
pub mod heartbeat;
pub mod kernel;
pub mod listener;
pub mod logging;
pub mod metric;
pub mod metrics;
pub mod natlog;
pub mod node;
pub(crate) mod output;
pub mod peer;
pub mod policyd;
pub mod privileges;
pub mod replaced_file;
pub mod schema;
pub mod source;
pub mod stalls;
pub mod state;
pub mod systemd;
pub mod text_file;
pub mod xds;

pub use vipgate_membership as membership;
