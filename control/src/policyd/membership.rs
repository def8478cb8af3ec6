//! Membership authority: gateways send heartbeats and get membership views and leases. Node agents get views as a resource of
//! the discovery service.
//!
//! ```text
//!   service (one stream per gateway) -> coordinator -> state (decides) -> store (shared by all servers)
//!   discovery service <- view of the coordinator
//! ```

mod coordinator;
mod outage;
mod service;
mod store;

pub use self::coordinator::{MembershipHandle, open, start};
pub use self::service::server;
pub use self::store::{EtcdStore, MemoryStore};
