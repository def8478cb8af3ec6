//! The cluster's own addresses: what manifests and configuration files say of them, and what that comes to for one gateway.

use std::collections::BTreeSet;

use ipnet::IpNet;
use vipgate_dataplane::snapshot::spec::ClusterSpec;

use super::deal::{Peer, Viewer};
use super::inventory::Inventory;
use crate::complaint::Complaint;
use crate::manifest::{Cidr, Uncovered};

/// The cluster's own addresses, and what becomes of pods that no policy covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Pods' (`pod_cidrs`): what comes from there and is covered by no policy follows `uncovered`.
    pub pods: BTreeSet<IpNet>,
    /// Services' (`service_cidrs`).
    pub services: BTreeSet<IpNet>,
    /// What Node manifests say of their pods.
    pub nodes: BTreeSet<IpNet>,
    /// What becomes of a pod's packets that no policy covers, where that is said.
    pub uncovered: Option<Uncovered>,
}

impl Cluster {
    /// What a configuration file says.
    pub fn of(pods: &[Cidr], services: &[Cidr], uncovered: Option<Uncovered>) -> Self {
        let set = |cidrs: &[Cidr]| cidrs.iter().map(|cidr| cidr.0).collect();
        Self { pods: set(pods), services: set(services), nodes: BTreeSet::new(), uncovered }
    }

    /// This, unless it says nothing.
    pub fn said(self) -> Option<Self> {
        (self != Self::default()).then_some(self)
    }

    /// With what another one says, too; who comes first says what becomes of uncovered pods.
    #[must_use]
    pub fn with(mut self, other: &Self) -> Self {
        self.pods.extend(&other.pods);
        self.services.extend(&other.services);
        self.nodes.extend(&other.nodes);
        self.uncovered = self.uncovered.or(other.uncovered);
        self
    }

    /// What a gateway goes by: what its own configuration says, then its manifest (`peer`), then what all are told.
    pub fn seen_by(&self, viewer: &Viewer, peer: Option<&Peer>) -> ClusterSpec {
        let mut all = viewer.cluster.clone();
        if let Some(peer) = peer {
            all.pods.extend(peer.pods.iter());
            all.uncovered = all.uncovered.or(peer.uncovered);
        }
        let all = all.with(self);
        let others = all.services.union(&all.nodes).filter(|net| !all.pods.contains(*net)).copied().collect();
        // Without pods' addresses nobody is uncovered.
        let drop_uncovered = !all.pods.is_empty() && all.uncovered != Some(Uncovered::Pass);
        ClusterSpec { pods: all.pods.into_iter().collect(), others, drop_uncovered }
    }
}

/// What the nodes' manifests say of their pods.
pub(super) fn settle(inventory: &Inventory<'_>, log: &mut Vec<Complaint>) -> Option<Cluster> {
    let mut nodes = BTreeSet::new();
    for node in &inventory.nodes {
        let Some(spec) = &node.body.spec else { continue };
        let one = spec.pod_cidr.iter().map(|cidr| ("spec.podCIDR".to_owned(), cidr));
        let all = spec.pod_cidrs.iter().flatten().enumerate().map(|(i, cidr)| (format!("spec.podCIDRs[{i}]"), cidr));
        for (field, text) in one.chain(all).filter(|(_, text)| !text.is_empty()) {
            match text.parse::<Cidr>() {
                Ok(cidr) if cidr.0.prefix_len() > 0 => drop(nodes.insert(cidr.0)),
                Ok(cidr) => log.push(node.error(&field, format!("{} holds every address", cidr.0))),
                Err(error) => log.push(node.error(&field, error.to_string())),
            }
        }
    }
    Cluster { nodes, ..Cluster::default() }.said()
}
