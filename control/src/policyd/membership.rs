//! Membership authority: gateways send heartbeats and get membership views and leases.
//!
//! ```text
//!   service (one stream per gateway) -> coordinator -> state (decides) -> store (shared by all servers)
//! ```

mod coordinator;
mod outage;
mod service;
mod store;

pub use self::coordinator::{MembershipHandle, open, start};
pub use self::service::server;
pub use self::store::{EtcdStore, MemoryStore};
