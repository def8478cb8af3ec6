//! Contracts with providers: their own clients run the same flow as ours against a fake. They accept what it says, and their
//! requests are ours.
//!
//! `make cloud-clients` installs the clients; `VIPGATE_GOLDEN=write` writes down what they send.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "contract/aws.rs"]
mod aws;
#[path = "contract/azure.rs"]
mod azure;
#[path = "contract/vendor_client.rs"]
mod vendor_client;
