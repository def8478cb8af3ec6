//! Contracts with providers: their own clients run the same flow as ours against a fake. They accept what it says, and their
//! requests are ours.
//!
//! `make cloud-clients` installs the clients; `VIPGATE_GOLDEN=write` writes down what they send.

mod aws;
mod azure;
pub(crate) mod vendor_client;
