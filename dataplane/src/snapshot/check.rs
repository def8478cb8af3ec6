//! Whether a description can be built at all. What passes here builds: nothing behind it fails, so that a change either takes
//! effect whole or not at all.

mod services;

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use thiserror::Error;

use super::build::{MOST_BACKENDS, MOST_ENDPOINTS, MOST_NODES, MOST_RANGES, MOST_VIPS};
use super::change::PolicyChange;
use super::endpoints::Endpoint;
use super::policy::{EgressId, Policy, Vip, VipId};
use super::spec::{NodeSpec, PolicySet};
use super::uses::Uses;
use crate::address::V6;
use crate::wire::ethernet;

/// A description that no snapshot can be built from.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BuildError {
    /// Too many VIPs.
    #[error("{count} VIPs, sessions of former ones included, but a gateway serves at most {MOST_VIPS}")]
    TooManyVips {
        /// How many there would be.
        count: usize,
    },
    /// Too many endpoints.
    #[error("{count} endpoints of one address family, but a gateway serves at most {MOST_ENDPOINTS}")]
    TooManyEndpoints {
        /// How many there would be.
        count: usize,
    },
    /// An endpoint names a policy that isn't there.
    #[error("endpoint {address} names {policy}, which is no policy")]
    UnknownPolicy {
        /// The endpoint.
        address: IpAddr,
        /// What it names.
        policy: Arc<str>,
    },
    /// An endpoint names a VIP that isn't there, or one of the other family.
    #[error("endpoint {address} names {vip}, which is no VIP of its address family")]
    UnknownVip {
        /// The endpoint.
        address: IpAddr,
        /// What it names.
        vip: IpAddr,
    },
    /// An address is there twice.
    #[error("{address} is listed twice")]
    Twice {
        /// The address.
        address: IpAddr,
    },
    /// A policy is there twice.
    #[error("{name} is listed twice")]
    PolicyTwice {
        /// Its name.
        name: Arc<str>,
    },
    /// An address is an endpoint and a VIP.
    #[error("{address} is both an endpoint and a VIP")]
    EndpointIsVip {
        /// The address.
        address: IpAddr,
    },
    /// An address is a backend and a VIP.
    #[error("{address}, a backend of {service}, is a VIP")]
    BackendIsVip {
        /// The address.
        address: IpAddr,
        /// A Service that it is behind, or that the VIP is one of.
        service: Arc<str>,
    },
    /// Two Services have one frontend.
    #[error("port {port} of {vip} (protocol {protocol}) is that of {service} and of {other}")]
    FrontendTwice {
        /// The VIP.
        vip: IpAddr,
        /// The port.
        port: u16,
        /// IP protocol number.
        protocol: u8,
        /// One of them.
        service: Arc<str>,
        /// The other one.
        other: Arc<str>,
    },
    /// Too much that backends listen on.
    #[error("{count} ports of backends of one address family, but a gateway serves at most {MOST_BACKENDS}")]
    TooManyBackends {
        /// How many there would be.
        count: usize,
    },
    /// Too many prefixes of the cluster's own addresses.
    #[error("{count} prefixes of the cluster's own addresses, but a gateway knows at most {MOST_RANGES}")]
    TooManyRanges {
        /// How many there would be.
        count: usize,
    },
    /// A Service is not as it must be.
    #[error("{service}: {reason}")]
    Service {
        /// Its name.
        service: Arc<str>,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A node of the overlay network is not as it must be.
    #[error("node {node}: {reason}")]
    Node {
        /// Its name.
        node: Arc<str>,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A policy goes that endpoints name.
    #[error("{name} is taken away while endpoints name it")]
    PolicyInUse {
        /// Its name.
        name: Arc<str>,
    },
    /// A VIP goes that endpoints name.
    #[error("VIP {vip} is taken away while endpoints name it")]
    VipInUse {
        /// Its address.
        vip: IpAddr,
    },
}

/// A whole policy names nothing twice.
pub(super) fn whole(set: &PolicySet) -> Result<(), BuildError> {
    addresses_once(set.vips.iter().map(|vip| vip.address))?;
    addresses_once(set.endpoints.iter().map(|endpoint| endpoint.address))?;
    names_once(set.services.iter().map(|service| &service.name))?;
    names_once(set.policies.iter().map(|policy| &policy.name))
}

/// Nodes can be told apart, and reached.
fn nodes(nodes: &[NodeSpec]) -> Result<(), BuildError> {
    let (mut names, mut addresses) = (HashSet::default(), HashSet::default());
    for NodeSpec { name, address, vni, mac, .. } in nodes {
        let reason = if !names.insert(name) {
            "its name is listed twice"
        } else if !addresses.insert(address.ip()) {
            "another node has its address"
        } else if *vni >= 1 << 24 {
            "a VNI has 24 bits"
        } else if ethernet::is_group(*mac) {
            "its link address is that of a group"
        } else if names.len() > MOST_NODES {
            "there are too many"
        } else {
            continue;
        };
        return Err(BuildError::Node { node: name.clone(), reason });
    }
    Ok(())
}

/// A change fits the policy that it is for.
pub(super) fn change(policy: &Policy, uses: &Uses, change: &PolicyChange) -> Result<(), BuildError> {
    let gone = &change.gone;
    addresses_once(change.vips.iter().map(|vip| vip.address).chain(gone.vips.iter().copied()))?;
    addresses_once(change.endpoints.iter().map(|it| it.address).chain(gone.endpoints.iter().copied()))?;
    names_once(change.policies.iter().map(|policy| &policy.name).chain(&gone.policies))?;
    names_once(change.services.iter().map(|service| &service.name).chain(&gone.services))?;
    nodes(change.nodes.as_deref().unwrap_or_default())?;
    let count = change.cluster.as_ref().map_or(0, |cluster| cluster.pods.len() + cluster.others.len());
    if count > MOST_RANGES {
        return Err(BuildError::TooManyRanges { count });
    }
    let after = After::new(policy, uses, change);
    for vip in &change.vips {
        if after.is_endpoint(vip.address) {
            return Err(BuildError::EndpointIsVip { address: vip.address });
        }
    }
    for endpoint in &change.endpoints {
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
    services::check(policy, uses, change, |address| after.is_vip(address))?;
    after.check_gone(change)?;
    for v4 in [true, false] {
        let known = if v4 { policy.v4.endpoints.len() } else { policy.v6.endpoints.len() };
        let new = change.endpoints.iter().map(|endpoint| endpoint.address);
        let new = new.filter(|it| it.is_ipv4() == v4 && policy.endpoint_at(*it).is_none()).count();
        let gone = gone.endpoints.iter().filter(|it| it.is_ipv4() == v4 && policy.endpoint_at(**it).is_some()).count();
        if known + new - gone > MOST_ENDPOINTS {
            return Err(BuildError::TooManyEndpoints { count: known + new - gone });
        }
    }
    // Retired VIPs may have become free meanwhile. Those go before others come, and are closed here, so that none of them is
    // taken again once it is counted; for everybody but the count they are what they were.
    let is_free = |vip: &Vip| vip.retired && vip.pool.close();
    let kept = policy.vips().filter(|vip| !is_free(vip)).count();
    let new = change.vips.iter().filter(|vip| policy.vip_at(vip.address).is_none_or(is_free)).count();
    if kept + new > MOST_VIPS {
        return Err(BuildError::TooManyVips { count: kept + new });
    }
    Ok(())
}

/// The policy as it will be.
struct After<'a> {
    policy: &'a Policy,
    uses: &'a Uses,
    policies: HashSet<&'a str>,
    vips: HashSet<IpAddr>,
    endpoints: HashSet<IpAddr>,
    policies_gone: HashSet<&'a str>,
    vips_gone: HashSet<IpAddr>,
    endpoints_gone: HashSet<IpAddr>,
}

impl<'a> After<'a> {
    fn new(policy: &'a Policy, uses: &'a Uses, change: &'a PolicyChange) -> Self {
        Self {
            policy,
            uses,
            policies: change.policies.iter().map(|policy| &*policy.name).collect(),
            vips: change.vips.iter().map(|vip| vip.address).collect(),
            endpoints: change.endpoints.iter().map(|endpoint| endpoint.address).collect(),
            policies_gone: change.gone.policies.iter().map(|name| &**name).collect(),
            vips_gone: change.gone.vips.iter().copied().collect(),
            endpoints_gone: change.gone.endpoints.iter().copied().collect(),
        }
    }

    fn is_policy(&self, name: &str) -> bool {
        self.policies.contains(name) || self.uses.egress.contains_key(name) && !self.policies_gone.contains(name)
    }

    fn is_vip(&self, address: IpAddr) -> bool {
        let was = || self.policy.vip_at(address).is_some_and(|vip| !vip.retired);
        self.vips.contains(&address) || !self.vips_gone.contains(&address) && was()
    }

    fn is_endpoint(&self, address: IpAddr) -> bool {
        let was = || self.policy.endpoint_at(address).is_some();
        self.endpoints.contains(&address) || !self.endpoints_gone.contains(&address) && was()
    }

    /// What goes is named by no endpoint that stays.
    fn check_gone(&self, change: &PolicyChange) -> Result<(), BuildError> {
        let (mut of_egress, mut of_vip) = (HashMap::<EgressId, u32>::new(), HashMap::<VipId, u32>::new());
        if !change.gone.policies.is_empty() || !change.gone.vips.is_empty() {
            let changed = change.endpoints.iter().map(|endpoint| endpoint.address);
            for address in changed.chain(change.gone.endpoints.iter().copied()) {
                let Some(Endpoint { policy, vips, .. }) = self.policy.endpoint_at(address) else { continue };
                *of_egress.entry(*policy).or_default() += 1;
                vips.iter().for_each(|vip| *of_vip.entry(*vip).or_default() += 1);
            }
        }
        for name in &change.gone.policies {
            let id = self.uses.egress.get(name);
            if id.is_some_and(|id| self.uses.of_egress(*id) > of_egress.get(id).copied().unwrap_or(0)) {
                return Err(BuildError::PolicyInUse { name: name.clone() });
            }
        }
        for &vip in &change.gone.vips {
            let id = self.policy.vip_at(vip).map(|vip| vip.id);
            if id.is_some_and(|id| self.uses.of_vip(id) > of_vip.get(&id).copied().unwrap_or(0)) {
                return Err(BuildError::VipInUse { vip });
            }
        }
        Ok(())
    }
}

fn addresses_once(addresses: impl Iterator<Item = IpAddr>) -> Result<(), BuildError> {
    let mut seen = HashSet::default();
    for address in addresses {
        if !seen.insert(address) {
            return Err(BuildError::Twice { address });
        }
    }
    Ok(())
}

fn names_once<'a>(names: impl Iterator<Item = &'a Arc<str>>) -> Result<(), BuildError> {
    let mut seen = HashSet::default();
    for name in names {
        if !seen.insert(name) {
            return Err(BuildError::PolicyTwice { name: name.clone() });
        }
    }
    Ok(())
}

impl Policy {
    /// The VIP with this address of either family, also a retired one.
    pub fn vip_at(&self, address: IpAddr) -> Option<&Vip> {
        match address {
            IpAddr::V4(v4) => self.vip(v4.to_bits()),
            IpAddr::V6(v6) => self.vip(V6::from_bits(v6.to_bits())),
        }
    }

    /// The endpoint with this address of either family.
    pub fn endpoint_at(&self, address: IpAddr) -> Option<&Endpoint> {
        match address {
            IpAddr::V4(v4) => self.v4.endpoints.get(v4.to_bits()).map(|(_, endpoint)| endpoint),
            IpAddr::V6(v6) => self.v6.endpoints.get(V6::from_bits(v6.to_bits())).map(|(_, endpoint)| endpoint),
        }
    }
}
