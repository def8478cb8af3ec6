//! The kernel's network as the gateway watches and changes it: interfaces, routes, neighbors, advertised routes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod advertise;
mod network;
mod resolver;
mod routes;
mod testbed;
