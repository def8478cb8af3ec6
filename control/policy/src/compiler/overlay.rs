//! Overlay nodes: VXLAN tunnel endpoints from `OverlayNode` manifests, checked against each other.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use vipgate_dataplane::policy::spec::NodeSpec;

use super::inventory::{Inventory, ObjectRef};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::OverlayNode;

/// The overlay nodes, sorted by name. A tunnel address or pod prefix of two nodes is an error in the manifest of the
/// second.
pub(super) fn compile(inventory: &Inventory<'_>, diagnostics: &mut Vec<Diagnostic>) -> Vec<NodeSpec> {
    let mut addresses: BTreeMap<IpAddr, &ObjectRef<'_, OverlayNode>> = BTreeMap::new();
    let mut prefixes: BTreeMap<IpNet, &ObjectRef<'_, OverlayNode>> = BTreeMap::new();
    let mut nodes = Vec::with_capacity(inventory.overlay_nodes.len());
    for node in &inventory.overlay_nodes {
        let spec = &node.body.spec;
        if let Some(other) = addresses.get(&spec.address) {
            let reason = format!("{} is already used by {}", spec.address, other.name);
            diagnostics.push(node.error(Code::NodeConflict, "spec.address", reason));
            continue;
        }
        addresses.insert(spec.address, node);
        for (i, cidr) in spec.pod_cidrs.iter().enumerate() {
            if let Some(other) = prefixes.insert(cidr.0, node) {
                let reason = format!("{} is already used by {}", cidr.0, other.name);
                diagnostics.push(node.error(Code::NodeConflict, &format!("spec.podCIDRs[{i}]"), reason));
            }
        }
        nodes.push(NodeSpec {
            name: node.id.name.as_str().into(),
            address: spec.tunnel_endpoint(),
            vni: spec.vni,
            mac: spec.mac.0,
            prefixes: spec.pod_cidrs.iter().map(|cidr| cidr.0).collect(),
        });
    }
    // The inventory is sorted by name.
    nodes
}
