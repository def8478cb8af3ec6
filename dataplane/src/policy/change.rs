//! Policy changes: the difference between two policies, by key. Every update of a running policy is applied as a
//! change.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::spec::{ClusterSpec, EgressSpec, EndpointSpec, NodeSpec, ServiceSpec, ShardMapSpec, VipSpec};

/// A policy change. What it doesn't name stays; every key is named at most once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyChange {
    /// Version of the policy after the change.
    pub version: String,
    /// New or changed egress policies.
    pub policies: Vec<EgressSpec>,
    /// New or changed shard maps.
    pub shard_maps: Vec<ShardMapSpec>,
    /// New or changed VIPs.
    pub vips: Vec<VipSpec>,
    /// New or changed endpoints.
    pub endpoints: Vec<EndpointSpec>,
    /// New or changed Services.
    pub services: Vec<ServiceSpec>,
    /// All overlay nodes, if any of them has changed.
    pub nodes: Option<Vec<NodeSpec>>,
    /// Cluster addresses, if they have changed.
    pub cluster: Option<ClusterSpec>,
    /// Removed objects.
    pub removed: Removed,
}

/// Keys of removed objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Names of egress policies.
    pub policies: Vec<Arc<str>>,
    /// Names of shard maps.
    pub shard_maps: Vec<Arc<str>>,
    pub vips: Vec<IpAddr>,
    pub endpoints: Vec<IpAddr>,
    /// Names of Services.
    pub services: Vec<Arc<str>>,
}

impl PolicyChange {
    /// This change and the next one as a single change.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        let removed = Removed {
            policies: names(self.removed.policies, next.removed.policies, &next.policies, |it| it.name.clone()),
            shard_maps: names(self.removed.shard_maps, next.removed.shard_maps, &next.shard_maps, |it| it.name.clone()),
            vips: names(self.removed.vips, next.removed.vips, &next.vips, |it| it.address),
            endpoints: names(self.removed.endpoints, next.removed.endpoints, &next.endpoints, |it| it.address),
            services: names(self.removed.services, next.removed.services, &next.services, |it| it.name.clone()),
        };
        Self {
            version: next.version,
            policies: overlay(self.policies, next.policies, &removed.policies, |it| it.name.clone()),
            shard_maps: overlay(self.shard_maps, next.shard_maps, &removed.shard_maps, |it| it.name.clone()),
            vips: overlay(self.vips, next.vips, &removed.vips, |it| it.address),
            endpoints: overlay(self.endpoints, next.endpoints, &removed.endpoints, |it| it.address),
            services: overlay(self.services, next.services, &removed.services, |it| it.name.clone()),
            nodes: next.nodes.or(self.nodes),
            cluster: next.cluster.or(self.cluster),
            removed,
        }
    }

    /// Whether nothing changes, except the version.
    pub fn is_empty(&self) -> bool {
        let Self { version: _, policies, shard_maps, vips, endpoints, services, nodes, cluster, removed } = self;
        let is_empty = policies.is_empty() && shard_maps.is_empty() && vips.is_empty() && endpoints.is_empty();
        let is_empty = is_empty && services.is_empty() && nodes.is_none() && cluster.is_none();
        is_empty && *removed == Removed::default()
    }
}

/// Keys that two changes in a row remove.
fn names<T, K: std::hash::Hash + Eq>(first: Vec<K>, next: Vec<K>, added: &[T], key: impl Fn(&T) -> K) -> Vec<K> {
    let added: HashSet<K> = added.iter().map(key).collect();
    let known: HashSet<&K> = next.iter().collect();
    let first: Vec<K> = first.into_iter().filter(|key| !added.contains(key) && !known.contains(key)).collect();
    first.into_iter().chain(next).collect()
}

/// Items that two changes in a row add.
fn overlay<T, K: std::hash::Hash + Eq>(first: Vec<T>, next: Vec<T>, removed: &[K], key: impl Fn(&T) -> K) -> Vec<T> {
    let replaced: HashSet<K> = next.iter().map(&key).collect();
    let gone: HashSet<&K> = removed.iter().collect();
    let kept = first.into_iter().filter(|item| !replaced.contains(&key(item)) && !gone.contains(&key(item)));
    kept.chain(next).collect()
}
