//! Locality of a gateway: selects the backends that are local to it.

use std::sync::Arc;

use vipgate_dataplane::policy::spec::VipSpec;

use super::Peer;
use crate::compiler::Cluster;

/// A gateway's name, node and zone, and the cluster settings of its own configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayLocality {
    pub name: Arc<str>,
    /// Its Kubernetes node; backends on it are local.
    pub node: Arc<str>,
    /// Its zone; empty if unknown.
    pub zone: Arc<str>,
    /// Cluster settings of its configuration.
    pub cluster: Cluster,
}

impl GatewayLocality {
    /// A gateway on the node of the same name, without a zone.
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), node: name.into(), zone: "".into(), cluster: Cluster::default() }
    }

    /// A VIP as this gateway has it: with its own private address alone.
    pub fn vip(&self, vip: &VipSpec) -> VipSpec {
        let private = vip.private.iter().filter(|private| private.gateway == self.name).cloned().collect();
        VipSpec { private, ..vip.clone() }
    }

    /// With the zone of its manifest (`peer`), if its configuration has none.
    pub fn resolve_zone(&self, peer: Option<&Peer>) -> Self {
        let mut locality = self.clone();
        if let Some(peer) = peer.filter(|_| locality.zone.is_empty()) {
            locality.zone = peer.zone.clone();
        }
        locality
    }
}
