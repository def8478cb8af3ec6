//! A compiled policy for all gateways together: what there is, and who of them has which part of it.

mod service;
mod viewer;

pub use self::service::{DealtBackend, DealtService};
pub use self::viewer::Viewer;

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use vipgate_dataplane::snapshot::spec::{ClusterSpec, EgressSpec, EndpointSpec, NodeSpec, PolicySet, VipSpec};

use super::cluster::Cluster;
use crate::manifest::Uncovered;

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
    /// The cluster's own addresses, where anything is said of them.
    pub cluster: Option<Cluster>,
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
    /// Pods' addresses behind it, beside those that all are told.
    pub pods: Arc<[IpNet]>,
    /// What becomes of uncovered pods there, where its manifest says so.
    pub uncovered: Option<Uncovered>,
}

impl Deal {
    /// How many policies, VIPs, endpoints, Services, gateways and nodes of the overlay network there are, and whether anything is said of
    /// the cluster.
    pub fn counts(&self) -> [usize; 7] {
        let Self { policies, vips, endpoints, services, nodes, peers, cluster } = self;
        let cluster = cluster.as_slice().len();
        [policies.len(), vips.len(), endpoints.len(), services.len(), peers.len(), nodes.len(), cluster]
    }

    /// The gateway of this name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        let at = self.peers.binary_search_by(|peer| (*peer.name).cmp(name)).ok()?;
        self.peers.get(at)
    }

    fn cluster_of(&self, viewer: &Viewer) -> ClusterSpec {
        self.cluster.clone().unwrap_or_default().seen_by(viewer, self.peer(&viewer.name))
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
            cluster: viewer.map(|viewer| self.cluster_of(viewer)).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests;
