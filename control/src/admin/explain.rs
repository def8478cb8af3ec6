//! `Explain`: what policy makes of an address, and why.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tonic::Status;
use vipgate_dataplane::snapshot::endpoints::Endpoint;
use vipgate_dataplane::snapshot::policy::{Policy, Vip};
use vipgate_dataplane::snapshot::spec::{AddressSelection, OnExhaustion};

use super::ports::{self, Used};
use super::proto::{BackendExplained, EndpointExplained, ExplainReply, VipExplained, VipUser};
use super::sessions::Workers;
use super::{group, server, services};
use crate::gateway::state::GatewayState;

/// Everything about one address.
pub(super) async fn explain(text: &str, state: &GatewayState, workers: &Workers) -> Result<ExplainReply, Status> {
    let address: IpAddr = text.parse().map_err(|_| Status::invalid_argument(format!("\"{text}\" is no IP address")))?;
    let policy = state.compiled.load_full();
    let vip = policy.vip_at(address);
    let vip = match vip {
        None => None,
        Some(vip) => {
            let used = ports::used(state, workers, Some(vip.id)).await?;
            Some(of_vip(vip, &policy, &used, state))
        }
    };
    Ok(ExplainReply {
        address: address.to_string(),
        endpoint: policy.endpoint_at(address).map(|endpoint| of_endpoint(address, endpoint, &policy, state)),
        vip,
        backend_of: backend_of(address, &policy),
        local: state.network.load().locals.binary_search(&address).is_ok(),
        version: policy.version().to_owned(),
    })
}

fn of_endpoint(address: IpAddr, endpoint: &Endpoint, policy: &Policy, state: &GatewayState) -> EndpointExplained {
    let spec = &policy.egress_of(endpoint).spec;
    let all = |nets: &[ipnet::IpNet]| nets.iter().map(ToString::to_string).collect();
    EndpointExplained {
        endpoint: Some(server::endpoint(address, endpoint, policy, state)),
        remarks: endpoint.remarks.iter().map(ToString::to_string).collect(),
        destinations: all(&spec.destinations),
        excluded: all(&spec.excluded),
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
        sessions_limit: spec.limits.sessions.unwrap_or(0),
        new_sessions_per_second: spec.limits.new_sessions_per_second.unwrap_or(0),
        guaranteed_ports: spec.limits.guaranteed_ports.unwrap_or(0),
    }
}

fn of_vip(vip: &Vip, policy: &Policy, used: &Used, state: &GatewayState) -> VipExplained {
    let mut users: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, endpoint) in policy.endpoints() {
        if policy.vips_of(endpoint).any(|own| own.id == vip.id) {
            *users.entry(&*policy.egress_of(endpoint).spec.name).or_default() += 1;
        }
    }
    let services = policy.services().filter(|service| service.spec.vips.contains(&vip.address));
    VipExplained {
        owner: group::owner(policy, vip.shares.owner(), state),
        ports: Some(ports::of(vip, used, policy, state)),
        vip: Some(server::vip(vip, users.values().sum(), policy, state)),
        users: users.into_iter().map(|(policy, endpoints)| VipUser { policy: policy.to_owned(), endpoints }).collect(),
        services: services.map(services::line).collect(),
    }
}

fn backend_of(address: IpAddr, policy: &Policy) -> Vec<BackendExplained> {
    let of_all = policy.services().flat_map(|service| service.spec.backends.iter().map(move |it| (service, it)));
    let his = of_all.filter(|(_, backend)| backend.address == address);
    his.map(|(service, backend)| BackendExplained {
        service: service.spec.name.to_string(),
        state: services::state(backend.state).to_owned(),
        external: backend.takes(true),
        internal: backend.takes(false),
        ports: backend.ports.iter().map(|&port| port.into()).collect(),
    })
    .collect()
}
