//! Overlay nodes: VXLAN tunnel endpoints from `OverlayNode` manifests, and, if nodes run the agent, from `Node`
//! manifests; checked against each other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use foldhash::HashMap;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use vipgate_dataplane::policy::spec::NodeSpec;

use super::inventory::{Inventory, ObjectRef};
use super::options::{NODE_AGENT_MAC, NodeAgents};
use super::pods::Pods;
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{Cidr, OverlayNode, unusable_address};

/// Type of the addresses that a node has inside of its cluster.
const INTERNAL_IP: &str = "InternalIP";

/// The overlay nodes, sorted by name. A tunnel address or pod prefix of two nodes is an error in the manifest of the
/// second; an `OverlayNode` precedes a `Node`.
pub(super) fn compile(
    inventory: &Inventory<'_>,
    pods: &Pods<'_>,
    agents: Option<NodeAgents>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Vec<NodeSpec> {
    let mut nodes = Nodes::default();
    for node in &inventory.overlay_nodes {
        nodes.add(node, of_overlay_node(node.body), diagnostics);
    }
    if let Some(agents) = agents {
        let explicit: BTreeSet<&str> = inventory.overlay_nodes.iter().map(|node| node.id.name.as_str()).collect();
        let others = || inventory.nodes.iter().filter(|node| !explicit.contains(node.id.name.as_str()));
        for node in others() {
            match of_node(node.body, agents) {
                Some(candidate) => nodes.add(node, candidate, diagnostics),
                None => {
                    let reason = "has no address of type InternalIP: its agent's tunnels have no endpoint";
                    diagnostics.push(node.warning(Code::NodeWithoutAddress, "status.addresses", reason));
                }
            }
        }
        nodes.add_hosts(others(), inventory, pods);
    }
    nodes.specs.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    nodes.specs
}

/// A tunnel endpoint with its fields.
struct Candidate {
    address: SocketAddr,
    address_field: String,
    vni: u32,
    mac: [u8; 6],
    prefixes: Vec<IpNet>,
    /// Their list.
    prefixes_field: &'static str,
}

fn of_overlay_node(node: &OverlayNode) -> Candidate {
    let spec = &node.spec;
    Candidate {
        address: spec.tunnel_endpoint(),
        address_field: "spec.address".to_owned(),
        vni: spec.vni,
        mac: spec.mac.0,
        prefixes: spec.pod_cidrs.iter().map(|cidr| cidr.0).collect(),
        prefixes_field: "spec.podCIDRs",
    }
}

fn of_node(node: &Node, agents: NodeAgents) -> Option<Candidate> {
    let (at, address) = internal_address(node)?;
    let (prefixes_field, prefixes) = pod_cidrs(node);
    Some(Candidate {
        address: SocketAddr::new(address, agents.port),
        address_field: format!("status.addresses[{at}].address"),
        vni: agents.vni,
        mac: NODE_AGENT_MAC,
        prefixes,
        prefixes_field,
    })
}

/// The first internal address of a node that gateways can reach, with its index.
fn internal_address(node: &Node) -> Option<(usize, IpAddr)> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten()).enumerate();
    let mut internal = addresses.filter(|(_, address)| address.type_ == INTERNAL_IP);
    internal.find_map(|(at, address)| {
        let address: IpAddr = address.address.parse().ok()?;
        unusable_address(address).is_none().then_some((at, address))
    })
}

/// The prefixes of a node's pods, with their field; those that are invalid are errors of the cluster's prefixes.
fn pod_cidrs(node: &Node) -> (&'static str, Vec<IpNet>) {
    let Some(spec) = &node.spec else { return ("spec.podCIDRs", Vec::new()) };
    let prefix = |text: &String| text.parse::<Cidr>().ok().map(|cidr| cidr.0).filter(|net| net.prefix_len() > 0);
    let mut all: Vec<IpNet> = spec.pod_cidrs.iter().flatten().filter_map(prefix).collect();
    if all.is_empty() {
        return ("spec.podCIDR", spec.pod_cidr.iter().filter_map(prefix).collect());
    }
    all.sort_unstable();
    all.dedup();
    ("spec.podCIDRs", all)
}

/// Overlay nodes, and the objects that have their addresses and prefixes.
#[derive(Default)]
struct Nodes<'a> {
    specs: Vec<NodeSpec>,
    addresses: BTreeMap<IpAddr, &'a Arc<str>>,
    prefixes: BTreeMap<IpNet, &'a Arc<str>>,
}

impl<'a> Nodes<'a> {
    fn add<T>(&mut self, node: &ObjectRef<'a, T>, candidate: Candidate, diagnostics: &mut Vec<Diagnostic>) {
        let Candidate { address, address_field, vni, mac, prefixes, prefixes_field } = candidate;
        if let Some(other) = self.addresses.get(&address.ip()) {
            let reason = format!("{} is already used by {other}", address.ip());
            diagnostics.push(node.error(Code::NodeConflict, &address_field, reason));
            return;
        }
        self.addresses.insert(address.ip(), node.name);
        for (i, prefix) in prefixes.iter().enumerate() {
            if let Some(other) = self.prefixes.insert(*prefix, node.name) {
                let reason = format!("{prefix} is already used by {other}");
                diagnostics.push(node.error(Code::NodeConflict, &format!("{prefixes_field}[{i}]"), reason));
            }
        }
        self.specs.push(NodeSpec { name: node.id.name.as_str().into(), address, vni, mac, prefixes });
    }

    /// Adds the addresses of pods that are outside of the prefixes of their nodes: networks with an address management
    /// of their own give nodes no prefixes, or others.
    fn add_hosts(
        &mut self,
        nodes: impl Iterator<Item = &'a ObjectRef<'a, Node>>,
        inventory: &Inventory<'_>,
        pods: &Pods<'_>,
    ) {
        let names: BTreeSet<&str> = nodes.map(|node| node.id.name.as_str()).collect();
        let indices = self.specs.iter().enumerate().filter(|(_, spec)| names.contains(&*spec.name));
        let indices: HashMap<Arc<str>, usize> = indices.map(|(at, spec)| (spec.name.clone(), at)).collect();
        let mut is_changed = vec![false; self.specs.len()];
        for (node, address, _) in pods.placed(&inventory.pods) {
            let Some(at) = indices.get(node) else { continue };
            let (prefixes, host) = (&mut self.specs[*at].prefixes, IpNet::from(address));
            // What a manifest lists is its node's.
            if !self.prefixes.contains_key(&host) && !prefixes.iter().any(|net| net.contains(&address)) {
                prefixes.push(host);
                is_changed[*at] = true;
            }
        }
        for (spec, _) in self.specs.iter_mut().zip(is_changed).filter(|(_, is_changed)| *is_changed) {
            spec.prefixes.sort_unstable();
        }
    }
}
