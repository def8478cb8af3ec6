//! Everything of vipgate that may wait: the control thread, the command line, the demo.

pub mod gateway;
pub mod kernel;
