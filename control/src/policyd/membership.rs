//! Membership authority: gateways send heartbeats and get membership views and leases. Node agents get views as a resource of
//! the discovery service.
//!
//! ```text
//!   service (one stream per gateway) -> coordinator -> state (decides) -> record (one of all servers)
//!   discovery service <- view of the coordinator
//! ```

mod coordinator;
mod outage;
mod service;
mod store;

#[cfg(test)]
pub(crate) use self::coordinator::start;
pub use self::coordinator::{MembershipHandle, open};
pub use self::service::server;
#[cfg(test)]
pub(crate) use self::store::fake::FakeStore;
