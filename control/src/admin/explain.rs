//! `Explain` request: how the policy in force handles an address, and why.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::endpoints::Endpoint;
use vipgate_dataplane::policy::spec::{AddressSelection, OnExhaustion};

use super::ports::{self, BlockUsage, VipPorts};
use super::protocol::RequestError;
use super::{endpoints, services, vips};
use crate::admin::membership;
use crate::admin::workers::Workers;
use crate::state::GatewayState;

/// The policy for an address, and the reasons for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainReply {
    pub address: String,
    /// Its roles; it may have several, and none if it isn't in the policy in force.
    pub endpoint: Option<EndpointExplained>,
    pub vip: Option<VipExplained>,
    /// Services that it is a backend of.
    pub backend_of: Vec<BackendExplained>,
    /// Whether it is an address of the gateway's host.
    pub local: bool,
    /// The version of the policy in force.
    pub version: String,
}

/// An endpoint and its policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointExplained {
    pub endpoint: endpoints::Endpoint,
    /// Explanations of its policy and its VIPs, a sentence each.
    pub remarks: Vec<String>,
    pub destinations: Vec<String>,
    pub excluded: Vec<String>,
    /// PerEndpoint or PerConnection; Reject or Drop.
    pub address_selection: String,
    pub on_exhaustion: String,
    /// Absent: unlimited.
    pub sessions_limit: Option<u32>,
    pub new_sessions_per_second: Option<u32>,
    /// Absent: none.
    pub guaranteed_ports: Option<u32>,
}

/// A VIP and what uses it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VipExplained {
    pub vip: vips::Vip,
    pub ports: VipPorts,
    /// Its owner, which replies to ARP and NDP requests: this gateway, another one, or none.
    pub owner: String,
    /// The policies whose endpoints use it for SNAT, with their numbers of endpoints.
    pub users: Vec<VipUser>,
    /// Services with this frontend address.
    pub services: Vec<String>,
}

/// A policy whose endpoints use a VIP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VipUser {
    pub policy: String,
    pub endpoints: u64,
}

/// A backend of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendExplained {
    pub service: String,
    /// ready, terminating or not_ready.
    pub state: String,
    pub external: bool,
    pub internal: bool,
    pub ports: Vec<u32>,
}

/// Explains one address.
pub(super) async fn explain(
    address: IpAddr,
    state: &GatewayState,
    workers: &Workers,
) -> Result<ExplainReply, RequestError> {
    let policy = state.compiled.load_full();
    let of_private = || policy.static_nat().addresses().find(|(private, _)| *private == address);
    let vip = policy.vip_at(address).or_else(|| policy.vip_at(of_private()?.1));
    let vip = match vip {
        None => None,
        Some(vip) => {
            let used = ports::block_usage(state, workers, Some(vip.ports.id)).await?;
            Some(explain_vip(vip, &policy, &used, state))
        }
    };
    Ok(ExplainReply {
        address: address.to_string(),
        endpoint: policy.endpoint_at(address).map(|endpoint| explain_endpoint(address, endpoint, &policy, state)),
        vip,
        backend_of: backend_of(address, &policy),
        local: state.network.load().locals.binary_search(&address).is_ok(),
        version: policy.version().to_owned(),
    })
}

fn explain_endpoint(address: IpAddr, endpoint: &Endpoint, policy: &Policy, state: &GatewayState) -> EndpointExplained {
    let spec = &policy.egress_of(endpoint).spec;
    let texts = |nets: &[ipnet::IpNet]| nets.iter().map(ToString::to_string).collect();
    EndpointExplained {
        endpoint: endpoints::endpoint(address, endpoint, policy, state),
        remarks: endpoint.remarks.iter().map(ToString::to_string).collect(),
        destinations: texts(&spec.destinations),
        excluded: texts(&spec.excluded),
        address_selection: match spec.address_selection {
            AddressSelection::PerEndpoint => "PerEndpoint",
            AddressSelection::PerConnection => "PerConnection",
        }
        .to_owned(),
        on_exhaustion: match spec.on_exhaustion {
            OnExhaustion::Reject => "Reject",
            OnExhaustion::Drop => "Drop",
        }
        .to_owned(),
        sessions_limit: spec.limits.sessions,
        new_sessions_per_second: spec.limits.new_sessions_per_second,
        guaranteed_ports: spec.limits.guaranteed_ports,
    }
}

fn explain_vip(vip: &Vip, policy: &Policy, used: &BlockUsage, state: &GatewayState) -> VipExplained {
    let mut users: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, endpoint) in policy.endpoints() {
        if policy.vips_of(endpoint).any(|own| own.ports.id == vip.ports.id) {
            *users.entry(&*policy.egress_of(endpoint).spec.name).or_default() += 1;
        }
    }
    let services = policy.services().filter(|service| service.spec.vips.contains(&vip.address));
    VipExplained {
        owner: membership::owner_name(policy, vip.shards.owner(), state),
        ports: ports::vip_ports(vip, used, policy, state),
        vip: vips::vip(vip, users.values().sum(), used, policy, state),
        users: users.into_iter().map(|(policy, endpoints)| VipUser { policy: policy.to_owned(), endpoints }).collect(),
        services: services.map(services::summary).collect(),
    }
}

fn backend_of(address: IpAddr, policy: &Policy) -> Vec<BackendExplained> {
    let backends = policy.services().flat_map(|service| service.spec.backends.iter().map(move |it| (service, it)));
    let matching = backends.filter(|(_, backend)| backend.address == address);
    matching
        .map(|(service, backend)| BackendExplained {
            service: service.spec.name.to_string(),
            state: services::backend_state(backend.state).to_owned(),
            external: backend.is_eligible(true),
            internal: backend.is_eligible(false),
            ports: backend.ports.iter().map(|&port| port.into()).collect(),
        })
        .collect()
}
