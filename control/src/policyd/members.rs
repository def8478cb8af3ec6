//! The authority over who serves: gateways beat, and get views and leases.
//!
//! ```text
//!   service (a stream for each gateway) -> registrar -> roster (decides) -> store (keeps, for all servers)
//! ```

mod outage;
mod registrar;
mod roster;
mod service;
mod store;

pub use self::registrar::{Members, open, start};
#[cfg(any(test, fuzzing))]
pub(crate) use self::roster::MOST_TOLD;
pub use self::roster::{Refusal, Roster, Seat};
pub use self::service::server;
pub use self::store::{Etcd, Memory};
