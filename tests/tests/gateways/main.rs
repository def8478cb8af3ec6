//! Several gateways between ECMP routers: together they act as one, whichever of them fails.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod absent;
mod allocation;
mod claimed;
mod connections;
mod drained;
mod errors;
mod inbound;
mod killed;
mod large;
mod links;
mod loops;
mod lossy;
mod partition;
mod rehash;
mod scene;
mod shards;
mod started;
mod strangers;
mod world;
