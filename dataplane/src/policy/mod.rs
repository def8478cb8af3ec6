//! Policy snapshots: policy, network and tunnels at one moment, immutable.
//!
//! Control builds a snapshot from the plain descriptions in [`spec`] and publishes it whole; workers load the current
//! one once per batch.

pub mod build;
pub mod change;
mod client_owner;
mod cluster;
pub mod compiled;
pub mod endpoints;
pub mod freshness;
pub mod limits;
mod listeners;
pub mod maglev;
pub mod members;
pub mod network;
mod network_builder;
pub mod overlay;
pub mod prefixes;
pub mod publish;
pub mod quota;
mod rate_window;
mod rebuild;
mod references;
pub mod reverse_path;
pub mod service;
pub mod shard;
pub mod shard_map;
pub mod shards;
pub mod spec;
pub mod static_nat;
#[cfg(test)]
mod tests;
pub mod tunnel_sources;
pub mod tunnels;
pub mod validation;

use std::sync::Arc;

use freshness::Freshness;
use network::Network;
use tunnels::Tunnels;

use self::compiled::{Family, Policy};
use crate::flow::ids::NodeId;

/// Policy, network and tunnels at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Advances with every change that may affect existing sessions.
    pub generation: u32,
    /// Which sessions the changes since an earlier generation may affect.
    pub freshness: Arc<Freshness>,
    /// Compiled policy.
    pub policy: Arc<Policy>,
    /// Interfaces, routes and neighbors.
    pub network: Arc<Network>,
    /// Tunnels to gateways and overlay nodes.
    pub tunnels: Arc<Tunnels>,
}

impl Snapshot {
    /// The overlay node whose tunnel leads to an address; `None` also if this gateway isn't part of the overlay
    /// network.
    #[inline]
    pub fn node_of<A: Family>(&self, address: A) -> Option<NodeId> {
        self.policy.node_of(address).filter(|_| self.tunnels.accepts_nodes())
    }
}
