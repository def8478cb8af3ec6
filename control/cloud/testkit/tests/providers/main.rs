//! The providers of AWS, Azure and Google Cloud against fakes of these: one by one, and by contracts with the providers'
//! own clients. One program, since each would link the same libraries.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod aws;
mod azure;
mod calls;
mod contract;
mod gcp;
mod smoke;
#[path = "../../../examples/cloud-smoke/flow.rs"]
mod smoke_flow;
