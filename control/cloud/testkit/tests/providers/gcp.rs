//! The provider of Google Cloud against its fake.

mod allocate;
mod attach;
pub(crate) mod bench;
mod claim;
mod contract;
mod credentials;
mod fault;
mod observe;
