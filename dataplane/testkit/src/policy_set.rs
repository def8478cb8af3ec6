//! Whole policies, and what changes from one to another. The unit tests of the engine's policy include this file: for
//! them, the testkit has the types of another build of the engine.

use std::collections::HashMap;
use std::hash::Hash;

use vipgate_dataplane::policy::Snapshot;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::{Entries, PolicyChange};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::{
    ClusterSpec, EgressSpec, EndpointSpec, Keyed, NodeSpec, ServiceSpec, ShardMapSpec, VipSpec,
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
        Self {
            version: new.version.clone(),
            policies: differences(&old.policies, &new.policies),
            shard_maps: differences(&old.shard_maps, &new.shard_maps),
            vips: differences(&old.vips, &new.vips),
            endpoints: differences(&old.endpoints, &new.endpoints),
            services: differences(&old.services, &new.services),
            nodes: differences(&old.nodes, &new.nodes),
            cluster: (old.cluster != new.cluster).then(|| new.cluster.clone()),
        }
    }
}

fn differences<T: Keyed<Key: Hash> + Clone + PartialEq>(old: &[T], new: &[T]) -> Entries<T> {
    let mut left: HashMap<&T::Key, &T> = old.iter().map(|item| (item.key(), item)).collect();
    let changed: Entries<T> = new.iter().filter(|item| left.remove(item.key()) != Some(*item)).cloned().collect();
    changed.without(left.into_keys().cloned())
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
    let egress = policy.egress().map(|it| it.spec.name.clone());
    let services = policy.services().map(|it| it.spec.name.clone());
    PolicyChange {
        version: set.version.clone(),
        policies: replaced(egress, &set.policies),
        shard_maps: replaced(policy.shard_map_names().cloned(), &set.shard_maps),
        vips: replaced(policy.live_vips().map(|vip| vip.address), &set.vips),
        endpoints: replaced(policy.endpoints().map(|(address, _)| address), &set.endpoints),
        services: replaced(services, &set.services),
        nodes: differences(policy.nodes().list(), &set.nodes),
        cluster: (*policy.cluster() != set.cluster).then(|| set.cluster.clone()),
    }
}

/// All of `objects`, without others of `known`.
fn replaced<T: Keyed + Clone>(known: impl Iterator<Item = T::Key>, objects: &[T]) -> Entries<T> {
    let mut entries = Entries::default().without(known);
    entries.extend(objects.iter().cloned().collect());
    entries
}
