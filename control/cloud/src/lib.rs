//! Static public addresses of cloud providers.
//!
//! ```text
//!   pools, VIPs, gateways, membership view -> Desired ---+
//!                                                        +--> plan (pure) -> actions -> provider: AWS, Azure, GCP
//!   provider: addresses by tags, NICs -> Observation ----+
//! ```
//! In a cloud a VIP is a private address on a gateway's NIC with a public address in front of it; packets have the private one,
//! and the provider translates. A provider does what it is asked to and decides nothing; the planner decides, and does no I/O.

#![forbid(unsafe_code)]

mod api;
pub mod aws;
pub mod azure;
mod candidates;
mod credential;
pub mod demand;
pub mod error;
pub mod execute;
pub mod gcp;
mod http;
mod name;
mod oauth;
pub mod plan;
pub mod provider;
pub mod reconciler;
mod rest;

pub use self::api::{CallMeter, CallSample};
pub use self::error::{CloudError, ConfigError, ErrorKind};
pub use self::execute::Provider;
pub use self::provider::{
    AddressId, Allocation, Associate, Attachment, Binding, Capacity, Claim, GatewayNic, Nic, NicId, Observation,
    PublicAddress, Scope, Tags,
};
