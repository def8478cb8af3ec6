//! `Explain` request: how the policy in force handles an address, and why.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tonic::Status;
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::endpoints::Endpoint;
use vipgate_dataplane::policy::spec::{AddressSelection, OnExhaustion};

use super::ports::{self, BlockUsage};
use super::proto::{BackendExplained, EndpointExplained, ExplainReply, VipExplained, VipUser};
use super::{server, services};
use crate::admin::membership;
use crate::admin::workers::Workers;
use crate::state::GatewayState;

/// Explains one address.
pub(super) async fn explain(text: &str, state: &GatewayState, workers: &Workers) -> Result<ExplainReply, Status> {
    let address: IpAddr =
        text.parse().map_err(|_| Status::invalid_argument(format!("\"{text}\" is not an IP address")))?;
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
        endpoint: Some(server::endpoint(address, endpoint, policy, state)),
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
        ports: Some(ports::vip_ports(vip, used, policy, state)),
        vip: Some(server::vip(vip, users.values().sum(), used, policy, state)),
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
