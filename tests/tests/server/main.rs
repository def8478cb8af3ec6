//! Policy from a policy server, under traffic: faults of the server, the network, its source and its certificates.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod access_control;
mod addresses;
mod certificates;
mod disconnect;
mod etcd;
mod manifests;
mod no_policy;
mod set_aside;
