//! Policy validation. A change that passes can be applied completely: nothing after it fails, so a change takes effect
//! either entirely or not at all.

mod placement;
pub(super) mod prefixes;
mod services;

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use thiserror::Error;

pub(super) use self::placement::named_gateways;
use super::change::PolicyChange;
use super::endpoints::Endpoint;
use super::members::MAX_GATEWAYS;
use super::spec::NodeSpec;
use crate::flow::address::{V6, of_family};
use crate::flow::ids::{EgressId, MAX_VIPS, VipId};
use crate::policy::compiled::{Policy, Vip};
use crate::policy::limits::{MAX_BACKEND_PORTS, MAX_CLUSTER_PREFIXES, MAX_EGRESS_PREFIXES, MAX_ENDPOINTS, MAX_NODES};
use crate::policy::references::References;
use crate::wire::ethernet;

/// Why a policy or a change is rejected.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BuildError {
    #[error("{count} VIPs, retired ones included; the maximum is {max}", max = MAX_VIPS)]
    TooManyVips {
        /// Their number.
        count: usize,
    },
    #[error("{count} endpoints of one address family; the maximum is {max}", max = MAX_ENDPOINTS)]
    TooManyEndpoints {
        /// Their number.
        count: usize,
    },
    /// An endpoint refers to an unknown policy.
    #[error("endpoint {address}: unknown policy {policy}")]
    UnknownPolicy {
        /// The endpoint.
        address: IpAddr,
        /// The policy's name.
        policy: Arc<str>,
    },
    /// An endpoint refers to an unknown VIP, or to one of the other address family.
    #[error("endpoint {address}: {vip} is not a VIP of its address family")]
    UnknownVip {
        /// The endpoint.
        address: IpAddr,
        vip: IpAddr,
    },
    /// An address is both an endpoint and a VIP.
    #[error("{address} is both an endpoint and a VIP")]
    EndpointIsVip { address: IpAddr },
    /// An address is both a backend and a VIP.
    #[error("backend {address} of {service} is also a VIP")]
    BackendIsVip {
        address: IpAddr,
        /// A Service with this backend.
        service: Arc<str>,
    },
    /// Two Services have the same frontend.
    #[error("port {port} of VIP {vip} (protocol {protocol}) is used by both {service} and {other}")]
    DuplicateFrontend {
        vip: IpAddr,
        port: u16,
        /// IP protocol number.
        protocol: u8,
        /// One of the Services.
        service: Arc<str>,
        /// The other one.
        other: Arc<str>,
    },
    /// Too many backend ports.
    #[error("{count} backend ports of one address family; the maximum is {max}", max = MAX_BACKEND_PORTS)]
    TooManyBackendPorts {
        /// Their number.
        count: usize,
    },
    /// Too many destination and excluded prefixes.
    #[error(
        "{policy}: with its prefixes, all policies have {count} of one address family; the maximum is {max}",
        max = MAX_EGRESS_PREFIXES
    )]
    TooManyPrefixes {
        /// The policy of the change that exceeds the limit.
        policy: Arc<str>,
        /// Their number.
        count: usize,
    },
    /// Too many prefixes of cluster addresses.
    #[error("{count} prefixes of cluster addresses; the maximum is {max}", max = MAX_CLUSTER_PREFIXES)]
    TooManyClusterPrefixes {
        /// Their number.
        count: usize,
    },
    #[error("{service}: {reason}")]
    InvalidService {
        /// Its name.
        service: Arc<str>,
        reason: &'static str,
    },
    /// An invalid overlay node.
    #[error("node {node}: {reason}")]
    InvalidNode {
        /// Its name.
        node: Arc<str>,
        reason: &'static str,
    },
    /// A removed policy is still in use.
    #[error("policy {name} can't be removed: endpoints refer to it")]
    PolicyInUse { name: Arc<str> },
    /// A VIP or an endpoint refers to a shard map that isn't known.
    #[error("{of}: unknown shard map {map}")]
    UnknownShardMap {
        /// The VIP or endpoint.
        of: IpAddr,
        /// The map's name.
        map: Arc<str>,
    },
    /// An invalid shard map.
    #[error("shard map {map}: {reason}")]
    InvalidShardMap {
        /// Its name.
        map: Arc<str>,
        reason: &'static str,
    },
    /// A removed shard map is still in use.
    #[error("shard map {map} can't be removed: {by} refers to it")]
    ShardMapInUse {
        /// Its name.
        map: Arc<str>,
        /// A VIP or endpoint that refers to it.
        by: IpAddr,
    },
    #[error("{count} gateways; the maximum is {max}", max = MAX_GATEWAYS)]
    TooManyGateways {
        /// Their number.
        count: usize,
    },
    /// A removed VIP is still in use.
    #[error("VIP {vip} can't be removed: endpoints refer to it")]
    VipInUse {
        /// Its address.
        vip: IpAddr,
    },
}

/// Validates overlay nodes: unique addresses, valid VNI and MAC address.
fn check_nodes(nodes: &[&NodeSpec]) -> Result<(), BuildError> {
    let mut addresses = HashSet::default();
    for NodeSpec { name, address, vni, mac, .. } in nodes {
        let reason = if !addresses.insert(address.ip()) {
            "duplicate address"
        } else if *vni >= 1 << 24 {
            "the VNI exceeds 24 bits"
        } else if ethernet::is_group(*mac) {
            "the MAC address is a group address"
        } else if addresses.len() > MAX_NODES {
            "too many nodes"
        } else {
            continue;
        };
        return Err(BuildError::InvalidNode { node: name.clone(), reason });
    }
    Ok(())
}

/// Validates a change against the current policy.
pub(super) fn policy_change(policy: &Policy, references: &References, change: &PolicyChange) -> Result<(), BuildError> {
    placement::check(policy, references, change)?;
    if !change.nodes.is_empty() {
        check_nodes(&policy.nodes().list_after(&change.nodes))?;
    }
    let count = change.cluster.as_ref().map_or(0, |cluster| cluster.pods.len() + cluster.others.len());
    if count > MAX_CLUSTER_PREFIXES {
        return Err(BuildError::TooManyClusterPrefixes { count });
    }
    prefixes::check(references, change, |name| {
        let id = references.egress.get(name)?;
        policy.egress.get(id.0 as usize)?.as_ref().map(|egress| &egress.spec)
    })?;
    let after = NextPolicy { policy, references, change };
    for vip in change.vips.changed() {
        if after.is_endpoint(vip.address) {
            return Err(BuildError::EndpointIsVip { address: vip.address });
        }
    }
    for endpoint in change.endpoints.changed() {
        let address = endpoint.address;
        if !after.is_policy(&endpoint.policy) {
            return Err(BuildError::UnknownPolicy { address, policy: endpoint.policy.clone() });
        }
        if after.is_vip(address) {
            return Err(BuildError::EndpointIsVip { address });
        }
        if let Some(&vip) = endpoint.vips.iter().find(|vip| vip.is_ipv4() != address.is_ipv4() || !after.is_vip(**vip))
        {
            return Err(BuildError::UnknownVip { address, vip });
        }
    }
    services::check(policy, references, change, |address| after.is_vip(address))?;
    after.check_removed()?;
    for v4 in [true, false] {
        let known = if v4 { policy.v4.endpoints.len() } else { policy.v6.endpoints.len() };
        let of_family = change.endpoints.iter().filter(|(address, _)| address.is_ipv4() == v4);
        let is_known = |address: &IpAddr| policy.endpoint_at(*address).is_some();
        let new = of_family.clone().filter(|(address, spec)| spec.is_some() && !is_known(address)).count();
        let removed = of_family.filter(|(address, spec)| spec.is_none() && is_known(address)).count();
        if known + new - removed > MAX_ENDPOINTS {
            return Err(BuildError::TooManyEndpoints { count: known + new - removed });
        }
    }
    // The ports of a retired VIP may have been released meanwhile. Such a VIP is removed before others are added, and
    // its pool is closed here, so that no worker claims a block of it once it is counted; a closed pool changes nothing
    // else.
    let is_free = |vip: &Vip| vip.ports.retired && vip.ports.pool.close();
    let kept = policy.vips().filter(|vip| !is_free(vip)).count();
    let new = change.vips.changed().filter(|vip| policy.vip_at(vip.address).is_none_or(is_free)).count();
    if kept + new > MAX_VIPS {
        return Err(BuildError::TooManyVips { count: kept + new });
    }
    Ok(())
}

/// The policy after a change.
struct NextPolicy<'a> {
    policy: &'a Policy,
    references: &'a References,
    change: &'a PolicyChange,
}

impl NextPolicy<'_> {
    fn is_policy(&self, name: &str) -> bool {
        self.change.policies.is_present(name, || self.references.egress.contains_key(name))
    }

    fn is_vip(&self, address: IpAddr) -> bool {
        let was = || self.policy.vip_at(address).is_some_and(|vip| !vip.ports.retired);
        self.change.vips.is_present(&address, was)
    }

    fn is_endpoint(&self, address: IpAddr) -> bool {
        self.change.endpoints.is_present(&address, || self.policy.endpoint_at(address).is_some())
    }

    /// Validates that no remaining endpoint refers to a removed object.
    fn check_removed(&self) -> Result<(), BuildError> {
        let PolicyChange { policies, vips, endpoints, .. } = self.change;
        let (mut per_egress, mut per_vip) = (HashMap::<EgressId, u32>::new(), HashMap::<VipId, u32>::new());
        if policies.removed().next().is_some() || vips.removed().next().is_some() {
            for &address in endpoints.keys() {
                let Some(Endpoint { policy, vips, .. }) = self.policy.endpoint_at(address) else { continue };
                *per_egress.entry(*policy).or_default() += 1;
                vips.iter().for_each(|vip| *per_vip.entry(*vip).or_default() += 1);
            }
        }
        for name in policies.removed() {
            let id = self.references.egress.get(name);
            if id.is_some_and(|id| self.references.endpoints_of_egress(*id) > per_egress.get(id).copied().unwrap_or(0))
            {
                return Err(BuildError::PolicyInUse { name: name.clone() });
            }
        }
        for &vip in vips.removed() {
            let id = self.policy.vip_at(vip).map(|vip| vip.ports.id);
            if id.is_some_and(|id| self.references.endpoints_of_vip(id) > per_vip.get(&id).copied().unwrap_or(0)) {
                return Err(BuildError::VipInUse { vip });
            }
        }
        Ok(())
    }
}

impl Policy {
    /// The VIP with this address of either family, retired ones included.
    pub fn vip_at(&self, address: IpAddr) -> Option<&Vip> {
        of_family!(address, it => self.vip(it))
    }

    /// The endpoint with this address of either family.
    pub fn endpoint_at(&self, address: IpAddr) -> Option<&Endpoint> {
        match address {
            IpAddr::V4(v4) => self.v4.endpoints.get(v4.to_bits()).map(|(_, endpoint)| endpoint),
            IpAddr::V6(v6) => self.v6.endpoints.get(V6::from_bits(v6.to_bits())).map(|(_, endpoint)| endpoint),
        }
    }
}
