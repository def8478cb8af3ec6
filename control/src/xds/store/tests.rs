//! Resource store tests: the resulting policy equals the server's, independent of the order of responses.

mod cluster;
mod completeness;
pub(crate) mod generators;
mod model;
mod rejected;
mod services;
mod slices;
mod without_settings;

use std::collections::BTreeSet;
use std::fmt;

use envoy_types::pb::envoy::service::discovery::v3::ResourceName;
use proptest::prelude::*;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, BackendSpec, BlockSet, ClusterSpec, EgressSpec, EndpointSpec, Limits, NetworkSpec,
    OnExhaustion, Scope, ServiceSpec, ShardSpec, VipSpec,
};
use vipgate_policy::compiler::{GatewayLocality, PlacedService, Placement, Table};

use self::generators::SeededRng;
use super::*;
use crate::xds::fixtures::{ServerPolicy, ip, key, resource, response, responses, service, whole_policy};

/// The content of a policy in canonical order, for comparisons.
#[derive(Debug, PartialEq)]
pub(crate) struct PolicyView {
    version: String,
    policies: Vec<EgressSpec>,
    /// With the guaranteed ports of each.
    vips: Vec<(VipSpec, u32)>,
    endpoints: Vec<EndpointSpec>,
    cluster: ClusterSpec,
}

pub(crate) fn policy_view(policy: &Policy) -> PolicyView {
    let mut policies: Vec<_> = policy.egress().map(|egress| egress.spec.clone()).collect();
    policies.sort_by_key(|policy| policy.name.clone());
    let vip = |vip: &Vip| {
        let (address, name, reserved_ports) = (vip.address, vip.name.clone(), vip.ports.reserved.to_vec());
        (
            VipSpec {
                address,
                name,
                announce: vip.announce,
                reserved_ports,
                shards: vec![],
                shard_map: None,
                private: vec![],
            },
            vip.ports.guaranteed,
        )
    };
    let mut vips: Vec<_> = policy.live_vips().map(vip).collect();
    vips.sort_by_key(|(vip, _)| vip.address);
    let endpoints = policy.endpoints().map(|(address, endpoint)| {
        let vips = policy.vips_of(endpoint).map(|vip| vip.address).collect();
        let policy = policy.egress_of(endpoint).spec.name.clone();
        EndpointSpec { address, name: endpoint.name.clone(), policy, vips, gateway: None, slot: None, remarks: vec![] }
    });
    let mut endpoints: Vec<_> = endpoints.collect();
    endpoints.sort_by_key(|endpoint| endpoint.address);
    PolicyView { version: policy.version().to_owned(), policies, vips, endpoints, cluster: policy.cluster().clone() }
}

pub(crate) fn builder() -> Builder {
    Builder::new(NetworkSpec::default())
}

/// The view of a policy that is built from scratch.
fn build_policy_view(whole: &PolicyChange) -> PolicyView {
    policy_view(&builder().with_change(whole).unwrap().policy)
}

/// Accumulates policy changes by key: a reference model without an engine.
#[derive(Debug, Default)]
struct Accumulated {
    vips: BTreeMap<IpAddr, VipSpec>,
    endpoints: BTreeMap<IpAddr, EndpointSpec>,
    services: BTreeMap<Arc<str>, ServiceSpec>,
}

impl Accumulated {
    /// Applies a change; returns all VIPs, endpoints and Services after it.
    fn apply(&mut self, change: &PolicyChange) -> (Vec<VipSpec>, Vec<EndpointSpec>, Vec<ServiceSpec>) {
        let gone = &change.removed;
        let vips = apply(&mut self.vips, &change.vips, &gone.vips, |vip| vip.address);
        let endpoints = apply(&mut self.endpoints, &change.endpoints, &gone.endpoints, |endpoint| endpoint.address);
        (vips, endpoints, apply(&mut self.services, &change.services, &gone.services, |service| service.name.clone()))
    }
}

fn apply<K, T>(all: &mut BTreeMap<K, T>, changed: &[T], removed: &[K], key: impl Fn(&T) -> K) -> Vec<T>
where
    K: Ord + fmt::Debug,
    T: Clone + PartialEq + fmt::Debug,
{
    let changed_keys: BTreeSet<K> = changed.iter().map(&key).collect();
    assert_eq!(changed_keys.len(), changed.len(), "a key is changed twice");
    for key in removed {
        assert!(all.remove(key).is_some() && !changed_keys.contains(key), "{key:?} is removed");
    }
    for item in changed {
        let before = all.insert(key(item), item.clone());
        assert_ne!(before.as_ref(), Some(item), "an unchanged item is in the change");
    }
    all.values().cloned().collect()
}

/// A store with all resources of the server.
fn store_with(server: &ServerPolicy) -> ResourceStore {
    let mut store = ResourceStore::default();
    store.stage_cached(server.resources.clone()).unwrap();
    assert!(store.is_complete());
    store.commit();
    store
}
