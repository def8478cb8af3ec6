//! Policy that comes from a policy server: what happens when the server, the network between, its source or its certificates
//! fail, while traffic flows.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod certificates;
mod closed;
mod etcd;
mod hostile;
mod lost;
mod manifests;
