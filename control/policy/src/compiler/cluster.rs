//! Cluster networks: pod, Service and node prefixes from manifests and configuration files, merged for one gateway.

use std::collections::BTreeSet;

use ipnet::IpNet;
use vipgate_dataplane::policy::spec::ClusterSpec;

use super::inventory::Inventory;
use crate::compiler::placement::{GatewayLocality, Peer};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{Cidr, UncoveredAction};

/// Prefixes inside the cluster, and the action for pod traffic that no policy covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Pod prefixes (`pod_cidrs`): `uncovered` applies to traffic from them that no policy covers.
    pub pods: BTreeSet<IpNet>,
    /// Service prefixes (`service_cidrs`).
    pub services: BTreeSet<IpNet>,
    /// `spec.podCIDRs` of Node manifests.
    pub nodes: BTreeSet<IpNet>,
    /// Action for pod traffic that no policy covers, if set.
    pub uncovered: Option<UncoveredAction>,
}

impl Cluster {
    /// The settings of a configuration file.
    pub fn from_config(pods: &[Cidr], services: &[Cidr], uncovered: Option<UncoveredAction>) -> Self {
        let set = |cidrs: &[Cidr]| cidrs.iter().map(|cidr| cidr.0).collect();
        Self { pods: set(pods), services: set(services), nodes: BTreeSet::new(), uncovered }
    }

    /// `None` if nothing is set.
    pub fn non_empty(self) -> Option<Self> {
        (self != Self::default()).then_some(self)
    }

    /// Union of the prefixes; `uncovered` of `self` takes precedence.
    #[must_use]
    pub fn merged_with(mut self, other: &Self) -> Self {
        self.pods.extend(&other.pods);
        self.services.extend(&other.services);
        self.nodes.extend(&other.nodes);
        self.uncovered = self.uncovered.or(other.uncovered);
        self
    }

    /// Effective settings of a gateway. Precedence: its configuration, its manifest (`peer`), then these settings.
    pub fn for_gateway(&self, gateway: &GatewayLocality, peer: Option<&Peer>) -> ClusterSpec {
        let mut all = gateway.cluster.clone();
        if let Some(peer) = peer {
            all.pods.extend(peer.pods.iter());
            all.uncovered = all.uncovered.or(peer.uncovered);
        }
        let all = all.merged_with(self);
        let others = all.services.union(&all.nodes).filter(|net| !all.pods.contains(*net)).copied().collect();
        // Without pod prefixes no traffic can be uncovered.
        let drop_uncovered = !all.pods.is_empty() && all.uncovered != Some(UncoveredAction::Pass);
        ClusterSpec { pods: all.pods.into_iter().collect(), others, drop_uncovered }
    }
}

/// Pod prefixes of Node manifests.
pub(super) fn compile(inventory: &Inventory<'_>, diagnostics: &mut Vec<Diagnostic>) -> Option<Cluster> {
    let mut nodes = BTreeSet::new();
    for node in &inventory.nodes {
        let Some(spec) = &node.body.spec else { continue };
        let one = spec.pod_cidr.iter().map(|cidr| ("spec.podCIDR".to_owned(), cidr));
        let all = spec.pod_cidrs.iter().flatten().enumerate().map(|(i, cidr)| (format!("spec.podCIDRs[{i}]"), cidr));
        for (field, text) in one.chain(all).filter(|(_, text)| !text.is_empty()) {
            match text.parse::<Cidr>() {
                Ok(cidr) if cidr.0.prefix_len() > 0 => drop(nodes.insert(cidr.0)),
                Ok(cidr) => {
                    let reason = format!("{} covers every address", cidr.0);
                    diagnostics.push(node.error(Code::PrefixOfEverything, &field, reason));
                }
                Err(error) => diagnostics.push(node.error(Code::MalformedValue, &field, error.to_string())),
            }
        }
    }
    Cluster { nodes, ..Cluster::default() }.non_empty()
}
