//! The AWS provider against a fake of AWS.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod binding;
mod credentials;
mod faults;
mod flow;
mod rules;
mod smoke;
#[path = "../../examples/cloud-smoke/flow.rs"]
mod smoke_flow;
mod world;
