//! The objects in force that the policy server needs of cloud providers: pools with a provider, and where gateways are.

use std::collections::BTreeMap;
use std::sync::Arc;

use vipgate_policy::Shortage;
use vipgate_policy::manifest::{AddressPool, Body, Kind, Object, ProviderSpec};

/// Pools with a provider, and the gateways that may have their addresses. Without such a pool there is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudObjects {
    /// The pools, by name.
    pub pools: BTreeMap<String, ProviderPool>,
    /// The gateways, by name.
    pub gateways: Vec<CloudGateway>,
    /// What policies lack of these pools.
    pub shortages: Vec<Shortage>,
}

/// A pool with a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderPool {
    /// Its provider.
    pub spec: ProviderSpec,
    /// Its prefixes, of addresses without tags.
    pub prefixes: Vec<ipnet::IpNet>,
    /// Whether what the provider has for it is known.
    pub is_known: bool,
}

/// A gateway in a cloud.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloudGateway {
    pub name: String,
    /// Its instance; `None`: neither its manifest nor its node says it.
    pub instance: Option<String>,
    /// Its NIC, if its manifest names one.
    pub nic: Option<String>,
}

impl CloudObjects {
    /// Those of the objects in force, which `of_kind` gives.
    pub(super) fn of<'a, I: Iterator<Item = &'a Arc<Object>>>(
        of_kind: impl Fn(Kind) -> I,
        shortages: Vec<Shortage>,
    ) -> Self {
        let pool = |object: &Arc<Object>| match &object.body {
            Body::AddressPool(pool) if pool.has_provider() => Some((object.id.name.clone(), provider_pool(pool))),
            _ => None,
        };
        let pools: BTreeMap<String, ProviderPool> = of_kind(Kind::AddressPool).filter_map(pool).collect();
        if pools.is_empty() {
            return Self::default();
        }
        let instance = |object: &Arc<Object>| match &object.body {
            Body::Node(node) => Some((object.id.name.clone(), node.spec.as_ref()?.provider_id.clone()?)),
            _ => None,
        };
        let instances: BTreeMap<String, String> = of_kind(Kind::Node).filter_map(instance).collect();
        let gateway = |object: &Arc<Object>| {
            let (name, Body::Gateway(gateway)) = (object.id.name.clone(), &object.body) else { return None };
            let spec = &gateway.spec;
            let of_node = || instances.get(spec.node.as_ref().unwrap_or(&name)).cloned();
            let instance = spec.provider_id.clone().or_else(of_node);
            Some(CloudGateway { instance, nic: spec.nic.clone(), name })
        };
        Self { pools, gateways: of_kind(Kind::Gateway).filter_map(gateway).collect(), shortages }
    }
}

fn provider_pool(pool: &AddressPool) -> ProviderPool {
    let prefixes = pool.spec.ranges.iter().flat_map(|range| {
        let size = range.size().min(MAX_ADDRESSES);
        (0..size).map(|at| range.nth(at).into())
    });
    ProviderPool { spec: pool.spec.provider.clone(), prefixes: prefixes.collect(), is_known: pool.cloud.is_some() }
}

/// Addresses of a range that a provider is asked for; manifests have no longer ones.
const MAX_ADDRESSES: u128 = 256;
