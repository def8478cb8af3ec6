//! Overlay network: nodes that exchange pod packets in VXLAN with this gateway. Finds the sending node of a tunnel
//! packet, and the node whose tunnel leads to a pod.

use std::net::IpAddr;

use foldhash::HashMap;

use super::change::Entries;
use super::prefixes::Prefixes;
use super::spec::NodeSpec;
use crate::flow::address::Address;
use crate::flow::ids::NodeId;
use crate::policy::prefixes::prefix;

/// The overlay nodes of a policy.
#[derive(Debug, Default)]
pub struct Nodes {
    list: Vec<NodeSpec>,
    by_address: HashMap<IpAddr, NodeId>,
}

impl Nodes {
    pub(super) fn new(list: Vec<NodeSpec>) -> Self {
        let numbered = list.iter().zip(0..).map(|(node, id)| (node.address.ip(), NodeId(id)));
        Self { by_address: numbered.collect(), list }
    }

    /// All nodes, by number.
    pub fn list(&self) -> &[NodeSpec] {
        &self.list
    }

    /// The nodes after a change, by name.
    pub(super) fn list_after<'a>(&'a self, changes: &'a Entries<NodeSpec>) -> Vec<&'a NodeSpec> {
        let others = self.list.iter().filter(|node| !changes.contains_key(&node.name));
        let mut nodes: Vec<&NodeSpec> = others.chain(changes.changed().map(|node| &**node)).collect();
        nodes.sort_by(|one, other| one.name.cmp(&other.name));
        nodes
    }

    /// The node with this tunnel address.
    pub fn by_address(&self, address: IpAddr) -> Option<(NodeId, &NodeSpec)> {
        let id = *self.by_address.get(&address)?;
        Some((id, self.list.get(id.0 as usize)?))
    }

    /// Node by pod prefix, for one address family.
    pub(super) fn pod_prefixes<A: Address>(&self) -> Prefixes<A, NodeId> {
        let of = |(node, id): (&NodeSpec, u32)| {
            let prefixes = node.prefixes.iter().filter_map(move |net| prefix(net, NodeId(id)));
            prefixes.collect::<Vec<_>>()
        };
        Prefixes::new(self.list.iter().zip(0..).flat_map(of))
    }
}
