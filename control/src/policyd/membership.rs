//! Membership authority: gateways send heartbeats and get membership views and leases; node agents get views.
//!
//! ```text
//!   service (one stream per gateway) -> coordinator -> state (decides) -> store (shared by all servers)
//!   watch (one stream per node agent) <- view of the coordinator
//! ```

mod coordinator;
mod outage;
mod service;
mod store;
mod watch;

pub use self::coordinator::{MembershipHandle, open, start};
pub use self::service::server;
pub use self::store::{EtcdStore, MemoryStore};
