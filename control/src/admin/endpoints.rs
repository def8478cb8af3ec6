//! `Endpoints` request: endpoints of the policy in force.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::endpoints as compiled;

use super::membership;
use crate::state::GatewayState;

/// Endpoints of the policy in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointsReply {
    pub endpoints: Vec<Endpoint>,
}

/// A pod that an egress policy covers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    pub address: String,
    pub name: String,
    pub policy: String,
    pub vips: Vec<String>,
    /// Open sessions.
    pub sessions: u64,
    /// Sessions refused since the gateway started: quota, ports or table capacity.
    pub refused: u64,
    /// Its home gateway; empty: the gateway that receives its packets.
    pub home: String,
    /// The gateway that has its home's shard of its VIP now; empty: none.
    pub owner: String,
}

/// Every endpoint, by address.
pub(super) fn all(state: &GatewayState) -> EndpointsReply {
    let policy = state.compiled.load();
    let mut endpoints: Vec<_> = policy.endpoints().collect();
    endpoints.sort_by_key(|(address, _)| *address);
    let endpoints = endpoints.into_iter().map(|(address, it)| endpoint(address, it, &policy, state));
    EndpointsReply { endpoints: endpoints.collect() }
}

pub(super) fn endpoint(
    address: IpAddr,
    endpoint: &compiled::Endpoint,
    policy: &Policy,
    state: &GatewayState,
) -> Endpoint {
    Endpoint {
        sessions: endpoint.usage.sessions().into(),
        refused: endpoint.usage.rejected(),
        address: address.to_string(),
        name: endpoint.name.to_string(),
        policy: policy.egress_of(endpoint).spec.name.to_string(),
        vips: policy.vips_of(endpoint).map(|vip| vip.address.to_string()).collect(),
        home: policy.home_of(endpoint).map(|home| policy.members().name(home).to_string()).unwrap_or_default(),
        owner: membership::owner_name(policy, policy.owner_of(endpoint), state),
    }
}
