//! The kernel's view of the network, followed by netlink: interfaces, routes, neighbours and local addresses. The
//! gateway routes as the node does, so it keeps no routes of its own.
//!
//! [`Network`] listens and says what there is; [`Resolver`] makes the kernel look for next hops and keep them known.
//! [`Advertiser`] gives a BGP daemon routes to announce.
//! All work on the network namespace of the thread that opens them, in tasks of its tokio runtime.

mod advertise;
mod error;
mod links;
mod message;
mod model;
mod neighbours;
mod network;
mod nexthops;
mod parse;
mod prober;
mod resolver;
mod routes;
mod socket;
mod watcher;

pub use advertise::{Advertiser, Place, WITHDRAW, wait_and_withdraw, withdraw_all};
pub use error::NetworkError;
pub use links::LinkStatus;
pub use message::LinkState;
pub use network::{Network, Wanted};
pub use prober::{NextHopState, NextHopStatus, ProbePlan, Prober};
pub use resolver::{Resolver, ResolverLimits};
pub use watcher::{LinkReport, NeighbourFailed};
