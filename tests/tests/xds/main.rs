//! xDS interoperability with independent peers: a client at the policy server, and a server at the gateway.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod client;
mod rejected;
mod server;
