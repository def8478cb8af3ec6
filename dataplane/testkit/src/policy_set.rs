//! Whole policies, and what changes from one to another. The unit tests of the engine's policy include this file: for
//! them, the testkit has the types of another build of the engine.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::net::IpAddr;

use vipgate_dataplane::policy::Snapshot;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::{PolicyChange, Removed};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::{
    ClusterSpec, EgressSpec, EndpointSpec, NodeSpec, ServiceSpec, ShardMapSpec, VipSpec,
};
use vipgate_dataplane::policy::validation::BuildError;

/// A whole policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicySet {
    /// Version for display.
    pub version: String,
    /// All egress policies.
    pub policies: Vec<EgressSpec>,
    /// The shard maps that VIPs and endpoints refer to.
    pub shard_maps: Vec<ShardMapSpec>,
    /// All VIPs of all gateways.
    pub vips: Vec<VipSpec>,
    /// All endpoints, each once.
    pub endpoints: Vec<EndpointSpec>,
    /// All Services with VIPs.
    pub services: Vec<ServiceSpec>,
    /// The overlay nodes.
    pub nodes: Vec<NodeSpec>,
    /// The cluster's addresses.
    pub cluster: ClusterSpec,
}

/// Changes from one whole policy to another.
pub trait Between {
    /// The change from `old` to `new`.
    fn between(old: &PolicySet, new: &PolicySet) -> Self;
}

impl Between for PolicyChange {
    fn between(old: &PolicySet, new: &PolicySet) -> Self {
        let (policies, policies_removed) = diff(&old.policies, &new.policies, |policy| policy.name.clone());
        let (shard_maps, maps_removed) = diff(&old.shard_maps, &new.shard_maps, |map| map.name.clone());
        let (vips, vips_removed) = diff(&old.vips, &new.vips, |vip| vip.address);
        let (endpoints, endpoints_removed) = diff(&old.endpoints, &new.endpoints, |endpoint| endpoint.address);
        let (services, services_removed) = diff(&old.services, &new.services, |service| service.name.clone());
        let removed = Removed {
            policies: policies_removed,
            shard_maps: maps_removed,
            vips: vips_removed,
            endpoints: endpoints_removed,
            services: services_removed,
        };
        let nodes = (old.nodes != new.nodes).then(|| new.nodes.clone());
        let cluster = (old.cluster != new.cluster).then(|| new.cluster.clone());
        let version = new.version.clone();
        Self { version, policies, shard_maps, vips, endpoints, services, nodes, cluster, removed }
    }
}

/// New and changed items, and the keys of removed ones.
fn diff<T: Clone + PartialEq, K: Hash + Ord>(old: &[T], new: &[T], key: impl Fn(&T) -> K) -> (Vec<T>, Vec<K>) {
    let mut left: HashMap<K, &T> = old.iter().map(|item| (key(item), item)).collect();
    let changed = new.iter().filter(|item| left.remove(&key(item)) != Some(*item)).cloned().collect();
    let mut removed: Vec<K> = left.into_keys().collect();
    removed.sort();
    (changed, removed)
}

/// Snapshots of whole policies.
pub trait WithPolicy {
    /// The snapshot with another policy, given as a whole; the generation advances.
    ///
    /// # Errors
    /// If the policy is inconsistent; nothing has changed then.
    fn with_policy(&mut self, set: &PolicySet) -> Result<Snapshot, BuildError>;
}

impl WithPolicy for Builder {
    fn with_policy(&mut self, set: &PolicySet) -> Result<Snapshot, BuildError> {
        let change = replacing(&self.snapshot().policy, set);
        self.with_change(&change)
    }
}

/// The change from a compiled policy to `set`.
fn replacing(policy: &Policy, set: &PolicySet) -> PolicyChange {
    let policies: HashSet<&str> = set.policies.iter().map(|policy| &*policy.name).collect();
    let shard_maps: HashSet<&str> = set.shard_maps.iter().map(|map| &*map.name).collect();
    let vips: HashSet<IpAddr> = set.vips.iter().map(|vip| vip.address).collect();
    let endpoints: HashSet<IpAddr> = set.endpoints.iter().map(|endpoint| endpoint.address).collect();
    let services: HashSet<&str> = set.services.iter().map(|service| &*service.name).collect();
    let removed = Removed {
        policies: policy.egress().map(|it| &it.spec.name).filter(|it| !policies.contains(&***it)).cloned().collect(),
        shard_maps: policy.shard_map_names().filter(|name| !shard_maps.contains(&***name)).cloned().collect(),
        vips: policy.live_vips().map(|vip| vip.address).filter(|vip| !vips.contains(vip)).collect(),
        endpoints: policy.endpoints().map(|(address, _)| address).filter(|it| !endpoints.contains(it)).collect(),
        services: policy.services().map(|it| &it.spec.name).filter(|it| !services.contains(&***it)).cloned().collect(),
    };
    PolicyChange {
        version: set.version.clone(),
        policies: set.policies.clone(),
        shard_maps: set.shard_maps.clone(),
        vips: set.vips.clone(),
        endpoints: set.endpoints.clone(),
        services: set.services.clone(),
        nodes: (policy.nodes().list() != set.nodes).then(|| set.nodes.clone()),
        cluster: (*policy.cluster() != set.cluster).then(|| set.cluster.clone()),
        removed,
    }
}
