//! The policy protocol spoken with peers that share no code with ours: a client at the policy server, a server at the gateway.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod client;
mod refused;
mod server;
