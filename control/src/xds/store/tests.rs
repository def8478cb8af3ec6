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
use std::net::IpAddr;

use envoy_types::pb::envoy::service::discovery::v3::ResourceName;
use proptest::prelude::*;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::Entries;
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, BackendSpec, BlockSet, ClusterSpec, EgressSpec, EndpointSpec, Keyed, Limits,
    NetworkSpec, NodeSpec, OnExhaustion, Scope, ServiceSpec, ShardSpec, VipSpec,
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
    nodes: Vec<NodeSpec>,
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
    let (version, nodes, cluster) =
        (policy.version().to_owned(), policy.nodes().list().to_vec(), policy.cluster().clone());
    PolicyView { version, policies, vips, endpoints, nodes, cluster }
}

pub(crate) fn builder() -> Builder {
    Builder::new(NetworkSpec::default())
}

/// The view of a policy that is built from scratch.
fn build_policy_view(whole: &PolicyChange) -> PolicyView {
    policy_view(&builder().with_change(whole).unwrap().policy)
}

/// Accumulates policy changes: a reference model without an engine.
#[derive(Debug, Default)]
struct Accumulated {
    vips: BTreeMap<IpAddr, Arc<VipSpec>>,
    endpoints: BTreeMap<IpAddr, Arc<EndpointSpec>>,
    services: BTreeMap<Arc<str>, Arc<ServiceSpec>>,
    nodes: BTreeMap<Arc<str>, Arc<NodeSpec>>,
}

/// All VIPs, endpoints, Services and nodes.
type Whole = (Entries<VipSpec>, Entries<EndpointSpec>, Entries<ServiceSpec>, Entries<NodeSpec>);

impl Accumulated {
    /// Applies a change; returns everything after it.
    fn apply(&mut self, change: &PolicyChange) -> Whole {
        (
            apply(&mut self.vips, &change.vips),
            apply(&mut self.endpoints, &change.endpoints),
            apply(&mut self.services, &change.services),
            apply(&mut self.nodes, &change.nodes),
        )
    }
}

fn apply<T>(all: &mut BTreeMap<T::Key, Arc<T>>, changes: &Entries<T>) -> Entries<T>
where
    T: Keyed<Key: fmt::Debug> + PartialEq + fmt::Debug,
{
    for key in changes.removed() {
        assert!(all.contains_key(key), "{key:?} is removed");
    }
    for item in changes.changed() {
        assert_ne!(all.get(item.key()), Some(item), "an unchanged item is in the change");
    }
    changes.apply_to(all);
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
