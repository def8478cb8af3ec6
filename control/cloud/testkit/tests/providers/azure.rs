//! The provider of Azure against its fake.

mod allocate;
mod attach;
pub(crate) mod bench;
mod claim;
mod credentials;
mod fault;
mod instance;
mod observe;
mod prepare;
