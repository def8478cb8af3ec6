//! What changes in a policy, key by key: the only way in which a policy that is in force becomes another one.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::spec::{ClusterSpec, EgressSpec, EndpointSpec, NodeSpec, PolicySet, ServiceSpec, VipSpec};

/// What changes in a policy. What isn't named stays as it is; nothing is named twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyChange {
    /// What people call the policy after the change.
    pub version: String,
    /// Policies that are new or different.
    pub policies: Vec<EgressSpec>,
    /// VIPs that are new or different.
    pub vips: Vec<VipSpec>,
    /// Endpoints that are new or different.
    pub endpoints: Vec<EndpointSpec>,
    /// Services that are new or different.
    pub services: Vec<ServiceSpec>,
    /// All nodes of the overlay network, where any of them has changed.
    pub nodes: Option<Vec<NodeSpec>>,
    /// The cluster's own addresses, where they have changed.
    pub cluster: Option<ClusterSpec>,
    /// What is no more.
    pub gone: Gone,
}

/// What a change takes away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gone {
    /// Names of policies.
    pub policies: Vec<Arc<str>>,
    /// VIPs.
    pub vips: Vec<IpAddr>,
    /// Endpoints.
    pub endpoints: Vec<IpAddr>,
    /// Names of Services.
    pub services: Vec<Arc<str>>,
}

impl PolicyChange {
    /// What makes `new` of `old`.
    pub fn between(old: &PolicySet, new: &PolicySet) -> Self {
        let (policies, policies_gone) = differ(&old.policies, &new.policies, |policy| policy.name.clone());
        let (vips, vips_gone) = differ(&old.vips, &new.vips, |vip| vip.address);
        let (endpoints, endpoints_gone) = differ(&old.endpoints, &new.endpoints, |endpoint| endpoint.address);
        let (services, services_gone) = differ(&old.services, &new.services, |service| service.name.clone());
        let gone =
            Gone { policies: policies_gone, vips: vips_gone, endpoints: endpoints_gone, services: services_gone };
        let nodes = (old.nodes != new.nodes).then(|| new.nodes.clone());
        let cluster = (old.cluster != new.cluster).then(|| new.cluster.clone());
        Self { version: new.version.clone(), policies, vips, endpoints, services, nodes, cluster, gone }
    }

    /// Whether it changes nothing but, perhaps, the version.
    pub fn is_empty(&self) -> bool {
        let Self { version: _, policies, vips, endpoints, services, nodes, cluster, gone } = self;
        let nothing_comes = policies.is_empty() && vips.is_empty() && endpoints.is_empty() && services.is_empty();
        let nothing_comes = nothing_comes && nodes.is_none() && cluster.is_none();
        nothing_comes && *gone == Gone::default()
    }
}

/// What is new or different, and the keys of what is gone.
fn differ<T: Clone + PartialEq, K: std::hash::Hash + Ord>(
    old: &[T],
    new: &[T],
    key: impl Fn(&T) -> K,
) -> (Vec<T>, Vec<K>) {
    let mut left: HashMap<K, &T> = old.iter().map(|item| (key(item), item)).collect();
    let changed = new.iter().filter(|item| left.remove(&key(item)) != Some(*item)).cloned().collect();
    let mut gone: Vec<K> = left.into_keys().collect();
    gone.sort();
    (changed, gone)
}
