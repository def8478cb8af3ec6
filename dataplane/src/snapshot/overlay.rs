//! The overlay network: nodes that send their pods' packets in VXLAN, and want what goes to pods so. Who a tunnel packet is from, and
//! into whose tunnel a pod's packet belongs.

use std::net::IpAddr;

use foldhash::HashMap;

use super::build::prefix;
use super::prefixes::Prefixes;
use super::spec::NodeSpec;
use crate::address::Address;

/// A node's number: its place in the list of one policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(pub u32);

/// The nodes of a policy.
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

    /// All of them, by number.
    pub fn list(&self) -> &[NodeSpec] {
        &self.list
    }

    /// The node that sends from this address.
    pub fn sender(&self, address: IpAddr) -> Option<(NodeId, &NodeSpec)> {
        let id = *self.by_address.get(&address)?;
        Some((id, self.list.get(id.0 as usize)?))
    }

    /// Whose pods are where, in one family.
    pub(super) fn pods<A: Address>(&self) -> Prefixes<A, NodeId> {
        let of = |(node, id): (&NodeSpec, u32)| {
            let prefixes = node.prefixes.iter().filter_map(move |net| prefix(net, NodeId(id)));
            prefixes.collect::<Vec<_>>()
        };
        Prefixes::new(self.list.iter().zip(0..).flat_map(of))
    }
}
