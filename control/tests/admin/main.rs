//! Command line, admin socket and metrics port of a gateway with mock workers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod commands;
mod gateway;
mod group;
mod metrics;
mod placement;
mod socket;
mod startup;
mod version;
