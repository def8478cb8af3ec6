//! The immutable value that the stages read: policy and network of one moment.
//!
//! Control builds it from the plain descriptions in [`spec`] and publishes it whole; a worker reads one snapshot a batch.

pub mod build;
pub mod change;
pub mod check;
mod cluster;
pub mod endpoints;
pub mod freshness;
mod hops;
mod listeners;
pub mod maglev;
pub mod members;
pub mod network;
pub mod overlay;
pub mod policy;
pub mod prefixes;
pub mod publish;
pub mod quota;
mod rebuild;
pub mod reverse_path;
pub mod senders;
pub mod service;
pub mod shares;
pub mod spec;
#[cfg(test)]
mod tests;
pub mod tunnels;
mod uses;

use std::sync::Arc;

use freshness::Freshness;
use network::Network;
use overlay::NodeId;
use policy::{Family, Policy};
use tunnels::Tunnels;

/// Policy and network of one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Moves on with every change that a session must be checked against.
    pub generation: u32,
    /// Whom the changes since an earlier generation concern.
    pub freshness: Arc<Freshness>,
    /// Who is covered, and how.
    pub policy: Arc<Policy>,
    /// Where packets go.
    pub network: Arc<Network>,
    /// The ways to other gateways.
    pub tunnels: Arc<Tunnels>,
}

impl Snapshot {
    /// The node of the overlay network into whose tunnel what goes to an address belongs, where this gateway is part of that.
    #[inline]
    pub fn node_of<A: Family>(&self, address: A) -> Option<NodeId> {
        self.policy.node_of(address).filter(|_| self.tunnels.is_overlay_open())
    }
}
