//! The AWS provider against a fake of AWS.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod binding;
mod credentials;
mod faults;
mod flow;
mod rules;
mod world;
