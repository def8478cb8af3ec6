//! The kernel's network: monitors its interfaces, routes, neighbors and local addresses by netlink. The gateway uses
//! the node's routing table and has none of its own.
//!
//! [`Network`] monitors and publishes the current state. [`Resolver`] makes the kernel resolve next hops and keep them
//! resolved. [`Prober`] probes next hops by ARP and neighbor discovery. [`Advertiser`] installs routes that a BGP
//! daemon redistributes.
//! All work in the network namespace of the thread that opens them, as tasks of its tokio runtime.

mod advertise;
mod error;
mod links;
mod model;
mod neighbors;
mod network;
mod nexthop_objects;
mod prober;
mod resolver;
mod routes;
mod watcher;

pub use advertise::{Advertiser, RouteTable, WITHDRAW, wait_and_withdraw, withdraw_all};
pub use error::NetworkError;
pub use links::LinkStatus;
pub use network::{InterfaceConfig, Network};
pub use prober::{NextHopState, NextHopStatus, ProbeConfig, Prober};
pub use resolver::{Resolver, ResolverLimits};
pub use vipgate_netlink::LinkState;
pub use watcher::{LinkReport, NeighborFailed};
