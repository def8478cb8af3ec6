//! The providers of AWS, Azure and Google Cloud against fakes of these: one by one, by contracts with the providers' own
//! clients, and all of the reconciler in random worlds. One program, since each would link the same libraries.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod aws;
mod azure;
mod contract;
mod gcp;
mod reconcile;
#[path = "../../../examples/cloud-smoke/flow.rs"]
mod smoke_flow;
