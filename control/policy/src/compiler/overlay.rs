//! Overlay nodes: VXLAN tunnel endpoints from `OverlayNode` manifests, and from `Node` manifests if nodes run the agent or
//! flannel; checked against each other.

mod flannel;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use foldhash::HashMap;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use vipgate_dataplane::policy::spec::NodeSpec;

use super::inventory::{Inventory, ObjectRef, age_key};
use super::options::NodeAgents;
use super::pods::Pods;
use crate::diagnostic::{Code, Diagnostic, Severity};
use crate::manifest::{Cidr, OverlayNode, unusable_address};

/// Type of the addresses that a node has inside of its cluster.
const INTERNAL_IP: &str = "InternalIP";

/// The overlay nodes, sorted by name. A tunnel address or pod prefix of two nodes is an error in the manifest of the
/// younger one; an `OverlayNode` precedes a `Node`.
pub(super) fn compile(
    inventory: &Inventory<'_>,
    pods: &Pods<'_>,
    agents: Option<NodeAgents>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Vec<NodeSpec> {
    let mut nodes = Nodes::default();
    for node in oldest_first(&inventory.overlay_nodes, |node| node.metadata.creation_timestamp.as_ref()) {
        nodes.add(node, of_overlay_node(node.body), diagnostics);
    }
    let explicit: BTreeSet<&str> = inventory.overlay_nodes.iter().map(|node| node.id.name.as_str()).collect();
    let by_age = oldest_first(&inventory.nodes, |node| node.metadata.creation_timestamp.as_ref());
    let others = || by_age.iter().copied().filter(|node| !explicit.contains(node.id.name.as_str()));
    for node in others() {
        let candidate = match agents {
            Some(agents) => Some(of_agent(&node.id.name, node.body, agents)),
            None => flannel::of_node(node.body),
        };
        match candidate {
            Some(Ok(candidate)) => nodes.add(node, candidate, diagnostics),
            Some(Err(Fault { code, field, reason })) => diagnostics.push(node.warning(code, &field, reason)),
            None => {}
        }
    }
    if agents.is_some() {
        nodes.add_hosts(others(), inventory, pods);
    }
    nodes.specs.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    nodes.specs
}

/// Nodes in the order of age: a new one takes nothing from one that was there.
fn oldest_first<'i, 'a, T>(
    nodes: &'i [ObjectRef<'a, T>],
    created: impl Fn(&'a T) -> Option<&'a Time>,
) -> Vec<&'i ObjectRef<'a, T>> {
    let mut nodes: Vec<_> = nodes.iter().collect();
    nodes.sort_by_key(|node| age_key(created(node.body), node.id));
    nodes
}

/// A tunnel endpoint with its fields.
struct Candidate {
    address: SocketAddr,
    address_field: String,
    vni: u32,
    mac: [u8; 6],
    /// Those of whose tunnels it is one.
    agents: Option<NodeAgents>,
    prefixes: Vec<IpNet>,
    /// Their list.
    prefixes_field: &'static str,
    /// Severity of a conflict. What isn't an error leaves out what another node has.
    conflict: Severity,
}

/// Why a node has no tunnel endpoint.
struct Fault {
    code: Code,
    field: String,
    reason: String,
}

fn of_overlay_node(node: &OverlayNode) -> Candidate {
    let spec = &node.spec;
    Candidate {
        address: spec.tunnel_endpoint(),
        address_field: "spec.address".to_owned(),
        vni: spec.vni,
        mac: spec.mac.0,
        agents: None,
        prefixes: spec.pod_cidrs.iter().map(|cidr| cidr.0).collect(),
        prefixes_field: "spec.podCIDRs",
        conflict: Severity::Error,
    }
}

fn of_agent(name: &str, node: &Node, agents: NodeAgents) -> Result<Candidate, Fault> {
    let (at, address) = internal_address(node, |_| true).ok_or_else(|| Fault {
        code: Code::NodeWithoutAddress,
        field: "status.addresses".to_owned(),
        reason: "has no address of type InternalIP: its agent's tunnels have no endpoint".to_owned(),
    })?;
    let (prefixes_field, prefixes) = pod_cidrs(node);
    Ok(Candidate {
        address: SocketAddr::new(address, agents.port),
        address_field: format!("status.addresses[{at}].address"),
        vni: agents.vni,
        mac: agents.mac(name),
        agents: Some(agents),
        prefixes,
        prefixes_field,
        conflict: Severity::Error,
    })
}

/// The first internal address of a node that gateways can reach, of those that `is_eligible` accepts, with its index.
fn internal_address(node: &Node, is_eligible: impl Fn(IpAddr) -> bool) -> Option<(usize, IpAddr)> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten()).enumerate();
    let mut internal = addresses.filter(|(_, address)| address.type_ == INTERNAL_IP);
    internal.find_map(|(at, address)| {
        let address: IpAddr = address.address.parse().ok()?;
        (unusable_address(address).is_none() && is_eligible(address)).then_some((at, address))
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
        let Candidate { address, address_field, vni, mac, agents, mut prefixes, prefixes_field, conflict } = candidate;
        let mut report = |field: &str, what: &dyn std::fmt::Display, other: &str| {
            let reason = format!("{what} is already used by {other}");
            diagnostics.push(node.origin.diagnostic(conflict, Code::NodeConflict, field, reason));
        };
        if let Some(other) = self.addresses.get(&address.ip()) {
            report(&address_field, &address.ip(), other);
            return;
        }
        self.addresses.insert(address.ip(), node.name);
        let mut at = 0;
        prefixes.retain(|prefix| {
            let other = *self.prefixes.entry(*prefix).or_insert(node.name);
            let is_free = Arc::ptr_eq(other, node.name);
            if !is_free {
                report(&format!("{prefixes_field}[{at}]"), prefix, other);
            }
            at += 1;
            is_free
        });
        let verify_mac = agents.is_some_and(|agents| agents.secret.is_some());
        let (name, sends_covered_only) = (node.id.name.as_str().into(), agents.is_some());
        self.specs.push(NodeSpec { name, address, vni, mac, verify_mac, sends_covered_only, prefixes });
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
