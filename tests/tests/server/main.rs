//! Policy from a policy server, under traffic: faults of the server, the network, its source and its certificates.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod certificates;
mod closed;
mod etcd;
mod hostile;
mod lost;
mod manifests;
