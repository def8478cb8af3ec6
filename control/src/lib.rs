//! Everything of vipgate that may wait: the control thread, the command line, the demo.

pub mod admin;
pub mod check;
pub mod cli;
pub mod complaint;
pub mod config;
pub mod demo;
pub mod failure;
#[cfg(any(test, fuzzing))]
pub mod fuzzed;
pub mod gateway;
pub mod kernel;
pub mod lab;
pub mod listener;
pub mod logging;
pub mod manifest;
pub mod members;
pub mod metrics;
pub mod natlog;
pub mod peer;
pub mod policy;
pub mod policyd;
pub mod privileges;
pub mod source;
pub mod systemd;
pub mod text_file;
pub mod xds;
pub mod yaml;

#[cfg(test)]
#[path = "../../dataplane/tests/engine/tally.rs"]
mod tally;
