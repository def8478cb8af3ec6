//! Cluster networks: pod, Service and node prefixes from manifests and configuration files, merged for one gateway.

use std::collections::BTreeSet;
use std::net::IpAddr;

use foldhash::HashSet;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use vipgate_dataplane::policy::spec::ClusterSpec;

use super::inventory::{Inventory, ObjectRef};
use crate::compiler::placement::{GatewayLocality, Peer};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{Cidr, UncoveredAction};

/// Prefixes inside the cluster, and the action for pod traffic that no policy covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Pod prefixes (`pod_cidrs`): `uncovered` applies to traffic from them that no policy covers.
    pub pods: BTreeSet<IpNet>,
    /// Service prefixes (`service_cidrs`, and `spec.cidrs` of ServiceCIDR manifests).
    pub services: BTreeSet<IpNet>,
    /// `spec.podCIDRs` of Node manifests.
    pub nodes: BTreeSet<IpNet>,
    /// Addresses of nodes, if these run the agent, which leaves packets to them to the kernel.
    pub node_addresses: BTreeSet<IpAddr>,
    /// Action for pod traffic that no policy covers, if set.
    pub uncovered: Option<UncoveredAction>,
}

impl Cluster {
    /// The settings of a configuration file.
    pub fn from_config(pods: &[Cidr], services: &[Cidr], uncovered: Option<UncoveredAction>) -> Self {
        let set = |cidrs: &[Cidr]| cidrs.iter().map(|cidr| cidr.0).collect();
        Self { pods: set(pods), services: set(services), uncovered, ..Self::default() }
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
        self.node_addresses.extend(&other.node_addresses);
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

/// The prefixes inside the cluster, for look-ups.
#[derive(Debug, Default)]
pub(super) struct ClusterPrefixes {
    nets: HashSet<IpNet>,
    /// The lengths of the prefixes, each once.
    lengths: BTreeSet<u8>,
}

impl ClusterPrefixes {
    /// Those of the cluster, and the pod prefixes behind gateways.
    pub(super) fn new(cluster: &Cluster, inventory: &Inventory<'_>) -> Self {
        let of_gateways = inventory.gateways.values().flat_map(|gateway| &gateway.body.spec.pod_cidrs);
        let of_cluster = cluster.pods.iter().chain(&cluster.services).chain(&cluster.nodes);
        let nets: HashSet<IpNet> = of_cluster.copied().chain(of_gateways.map(|cidr| cidr.0)).collect();
        Self { lengths: nets.iter().map(IpNet::prefix_len).collect(), nets }
    }

    /// Whether one of them has the address.
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        let nets = self.lengths.iter().filter_map(|length| Some(IpNet::new(address, *length).ok()?.trunc()));
        nets.into_iter().any(|net| self.nets.contains(&net))
    }
}

/// The settings of the configuration, with pod prefixes of Node manifests, and Service prefixes of ServiceCIDR manifests; with agents
/// also the nodes' addresses.
pub(super) fn compile(
    inventory: &Inventory<'_>,
    config: &Cluster,
    has_agents: bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> Cluster {
    let (mut nodes, mut services, mut node_addresses) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for node in &inventory.nodes {
        if has_agents {
            node_addresses.extend(addresses(node.body));
        }
        let Some(spec) = &node.body.spec else { continue };
        let one = spec.pod_cidr.iter().map(|cidr| ("spec.podCIDR".to_owned(), cidr));
        let all = indexed("spec.podCIDRs", spec.pod_cidrs.iter().flatten());
        nodes.extend(prefixes(node, one.chain(all).filter(|(_, text)| !text.is_empty()), diagnostics));
    }
    for cidr in &inventory.service_cidrs {
        let all = cidr.body.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
        services.extend(prefixes(cidr, indexed("spec.cidrs", all), diagnostics));
    }
    let of_manifests = Cluster { services, nodes, node_addresses, ..Cluster::default() };
    config.clone().merged_with(&of_manifests)
}

/// The internal and external addresses of a node.
fn addresses(node: &Node) -> impl Iterator<Item = IpAddr> {
    let all = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let of_type = all.filter(|address| matches!(address.type_.as_str(), "InternalIP" | "ExternalIP"));
    of_type.filter_map(|address| address.address.parse().ok())
}

/// The texts of a list with their fields.
fn indexed<'a>(field: &str, texts: impl Iterator<Item = &'a String>) -> impl Iterator<Item = (String, &'a String)> {
    texts.enumerate().map(move |(i, text)| (format!("{field}[{i}]"), text))
}

/// The valid prefixes among the texts of an object.
fn prefixes<'a, T>(
    object: &ObjectRef<'_, T>,
    texts: impl Iterator<Item = (String, &'a String)>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Vec<IpNet> {
    let mut nets = Vec::new();
    for (field, text) in texts {
        match text.parse::<Cidr>() {
            Ok(cidr) if cidr.0.prefix_len() > 0 => nets.push(cidr.0),
            Ok(cidr) => {
                let reason = format!("{} covers every address", cidr.0);
                diagnostics.push(object.error(Code::PrefixOfEverything, &field, reason));
            }
            Err(error) => diagnostics.push(object.error(Code::MalformedValue, &field, error.to_string())),
        }
    }
    nets
}
