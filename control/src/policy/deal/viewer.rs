//! Whose part of a deal is asked for.

use std::sync::Arc;

use super::Peer;
use crate::config::Config;
use crate::policy::Cluster;

/// A gateway as it looks at a deal: by its name it finds what is its own, by its place what is near.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Viewer {
    /// Its name.
    pub name: Arc<str>,
    /// The Kubernetes node whose backends are local to it.
    pub node: Arc<str>,
    /// Its zone; empty if nothing says it.
    pub zone: Arc<str>,
    /// What its own configuration says of the cluster.
    pub cluster: Cluster,
}

impl Viewer {
    /// A gateway of this name, on the node of the same name, that knows no zone of its own.
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), node: name.into(), zone: "".into(), cluster: Cluster::default() }
    }

    /// The gateway that this is the configuration of.
    pub fn of(config: &Config) -> Self {
        Self {
            name: config.name.as_str().into(),
            node: config.node().into(),
            zone: config.zone.as_deref().unwrap_or_default().into(),
            cluster: Cluster::of(&config.pod_cidrs, &config.service_cidrs, config.uncovered),
        }
    }

    /// With the zone that others know it to be in, where it doesn't say one itself: `peer` is the one of its own name.
    pub fn placed(&self, peer: Option<&Peer>) -> Self {
        let mut placed = self.clone();
        if let Some(peer) = peer.filter(|_| placed.zone.is_empty()) {
            placed.zone = peer.zone.clone();
        }
        placed
    }
}
