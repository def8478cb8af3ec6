//! The nodes of the overlay network. Each manifest is right by itself; here they are compared.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use vipgate_dataplane::snapshot::spec::NodeSpec;

use super::inventory::{Inventory, Located};
use crate::complaint::Complaint;
use crate::manifest::OverlayNode;

/// The nodes, by name. Of two that claim one address, or one prefix of pods, neither can be told to be right: the second one's manifest is
/// wrong.
pub(super) fn settle(inventory: &Inventory<'_>, log: &mut Vec<Complaint>) -> Vec<NodeSpec> {
    let mut addresses: BTreeMap<IpAddr, &Located<'_, OverlayNode>> = BTreeMap::new();
    let mut prefixes: BTreeMap<IpNet, &Located<'_, OverlayNode>> = BTreeMap::new();
    let mut nodes = Vec::with_capacity(inventory.overlay.len());
    for node in &inventory.overlay {
        let spec = &node.body.spec;
        if let Some(other) = addresses.get(&spec.address) {
            log.push(node.error("spec.address", format!("{} is that of {} already", spec.address, other.name)));
            continue;
        }
        addresses.insert(spec.address, node);
        for (i, cidr) in spec.pod_cidrs.iter().enumerate() {
            if let Some(other) = prefixes.insert(cidr.0, node) {
                let reason = format!("{} is that of {} already", cidr.0, other.name);
                log.push(node.error(&format!("spec.podCIDRs[{i}]"), reason));
            }
        }
        nodes.push(NodeSpec {
            name: node.id.name.as_str().into(),
            address: spec.end(),
            vni: spec.vni,
            mac: spec.mac.0,
            prefixes: spec.pod_cidrs.iter().map(|cidr| cidr.0).collect(),
        });
    }
    // The inventory is sorted by name already.
    nodes
}
