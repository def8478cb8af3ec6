//! What a client may get of a publication: gateways the policy of gateways, an agent the policy of its own node.

use std::sync::Arc;

use crate::xds::resource::Kind;

/// What a client may get.
#[derive(Clone, Debug, Default)]
pub enum Audience {
    /// Gateways: the policy of gateways.
    #[default]
    Gateways,
    /// The agent of the node with this name: the node's policy, and the cluster's prefixes.
    Node(Arc<str>),
}

impl Audience {
    /// Whether it may get a resource.
    pub(super) fn may_get(&self, kind: Kind, name: &str) -> bool {
        match self {
            Self::Node(node) if kind == Kind::NodePolicy => *name == **node,
            _ => self.may_get_all(kind),
        }
    }

    /// Whether it may get all resources of a kind.
    pub(super) fn may_get_all(&self, kind: Kind) -> bool {
        match self {
            Self::Gateways => Kind::OF_GATEWAYS.contains(&kind),
            Self::Node(_) => kind == Kind::Cluster,
        }
    }
}
