//! Several gateways between routers that spread packets over them: all together they are one, whatever happens to one of them.
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
