//! Node agents: pods on nodes reach the outside by their VIP only, whatever fails.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod closed;
mod failover;
mod forged;
mod marks;
mod scenario;
mod services;
mod steering;
