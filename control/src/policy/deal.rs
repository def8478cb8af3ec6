//! A compiled policy for all gateways together: what there is, and who of them has which part of it.

mod service;
mod viewer;

pub use self::service::{DealtBackend, DealtService};
pub use self::viewer::Viewer;

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::snapshot::spec::{EgressSpec, EndpointSpec, NodeSpec, PolicySet, VipSpec};

/// The policy of all gateways. Sorted by key; the same objects give the same deal, wherever it is compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deal {
    /// The egress policies, by name.
    pub policies: Vec<EgressSpec>,
    /// The VIPs that somebody holds, by address, with who holds which part of each.
    pub vips: Vec<VipSpec>,
    /// Every covered pod address, each once, with the gateway that translates it.
    pub endpoints: Vec<EndpointSpec>,
    /// The Services that are reached at VIPs, by name.
    pub services: Vec<DealtService>,
    /// The nodes of the overlay network, by name.
    pub nodes: Vec<NodeSpec>,
    /// The gateways, by name. None: each gateway is alone and owns everything.
    pub peers: Vec<Peer>,
}

/// A gateway as others need to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: Arc<str>,
    /// The Kubernetes node that it is on.
    pub node: Arc<str>,
    /// Its zone; empty if it has none.
    pub zone: Arc<str>,
    /// Where other gateways reach it.
    pub address: Option<IpAddr>,
}

impl Deal {
    /// How many policies, VIPs, endpoints, Services, gateways and nodes of the overlay network there are.
    pub fn counts(&self) -> [usize; 6] {
        let Self { policies, vips, endpoints, services, nodes, peers } = self;
        [policies.len(), vips.len(), endpoints.len(), services.len(), peers.len(), nodes.len()]
    }

    /// The gateway of this name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        let at = self.peers.binary_search_by(|peer| (*peer.name).cmp(name)).ok()?;
        self.peers.get(at)
    }

    /// The policy as one gateway has it: all of it, since each must know whose a packet is. What differs is whom it may choose
    /// behind a Service. Without a gateway, as seen from nowhere in particular.
    pub fn part_of(&self, viewer: Option<&Viewer>, version: &str) -> PolicySet {
        let placed = viewer.map(|viewer| viewer.placed(self.peer(&viewer.name))).unwrap_or_default();
        PolicySet {
            version: version.to_owned(),
            policies: self.policies.clone(),
            vips: self.vips.clone(),
            endpoints: self.endpoints.clone(),
            services: self.services.iter().map(|service| service.seen_by(&placed)).collect(),
            nodes: self.nodes.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
