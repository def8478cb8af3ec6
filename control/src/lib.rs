//! Everything of vipgate that may wait: the control thread, the command line, the demo.

pub mod complaint;
pub mod config;
pub mod gateway;
pub mod kernel;
pub mod manifest;
pub mod policy;
pub mod yaml;
