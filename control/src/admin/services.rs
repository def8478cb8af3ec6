//! Services as the admin socket tells of them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::service::Service;
use vipgate_dataplane::snapshot::spec::{BackendState, Scope};

use super::filter::protocol_name;
use super::proto;

/// Every Service of the policy in force, by name. `errors` are those of health checks on the node, by port.
pub(super) fn all(policy: &Policy, errors: &BTreeMap<u16, String>) -> Vec<proto::Service> {
    let mut services: Vec<&Service> = policy.services().collect();
    services.sort_by(|one, other| one.spec.name.cmp(&other.spec.name));
    services.into_iter().map(|service| tell(service, errors)).collect()
}

fn tell(service: &Service, errors: &BTreeMap<u16, String>) -> proto::Service {
    let spec = &service.spec;
    let used = used(service);
    let backends: Vec<_> = spec
        .backends
        .iter()
        .map(|backend| {
            let used = used.get(&backend.address).copied().unwrap_or_default();
            proto::Backend {
                address: backend.address.to_string(),
                name: backend.name.to_string(),
                state: state(backend.state).to_owned(),
                weight: backend.weight.into(),
                external: backend.takes(true),
                internal: backend.takes(false),
                ports: backend.ports.iter().map(|port| u32::from(*port)).collect(),
                sessions: used.sessions,
                opened: used.opened,
                opened_per_second: used.rate,
            }
        })
        .collect();
    proto::Service {
        name: spec.name.to_string(),
        vips: spec.vips.iter().map(IpAddr::to_string).collect(),
        ports: spec
            .ports
            .iter()
            .map(|port| proto::ServicePort {
                name: port.name.to_string(),
                protocol: protocol_name(port.protocol),
                port: port.port.into(),
            })
            .collect(),
        external_policy: scope(spec.external).to_owned(),
        internal_policy: scope(spec.internal).to_owned(),
        affinity_seconds: spec.affinity.unwrap_or(0),
        source_ranges: spec.source_ranges.iter().map(ToString::to_string).collect(),
        health: spec.health.map(|health| proto::HealthCheck {
            port: health.port.into(),
            local_endpoints: health.local_endpoints,
            error: errors.get(&health.port).cloned().unwrap_or_default(),
        }),
        sessions: backends.iter().map(|backend| backend.sessions).sum(),
        opened: backends.iter().map(|backend| backend.opened).sum(),
        opened_per_second: backends.iter().map(|backend| backend.opened_per_second).sum(),
        backends,
    }
}

/// A backend's state.
pub(super) fn state(state: BackendState) -> &'static str {
    match state {
        BackendState::Ready => "ready",
        BackendState::Terminating => "terminating",
        BackendState::NotReady => "not_ready",
    }
}

/// A Service on one line: its name, and where it listens.
pub(super) fn line(service: &Service) -> String {
    let ports = service.spec.ports.iter().map(|port| format!("{}/{}", protocol_name(port.protocol), port.port));
    format!("{} ({})", service.spec.name, ports.collect::<Vec<_>>().join(", "))
}

fn scope(scope: Scope) -> &'static str {
    match scope {
        Scope::Cluster => "Cluster",
        Scope::Local => "Local",
    }
}

/// What a backend uses on all ports together.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    sessions: u64,
    opened: u64,
    rate: u64,
}

fn used(service: &Service) -> BTreeMap<IpAddr, Used> {
    let mut all: BTreeMap<IpAddr, Used> = BTreeMap::new();
    for (address, usage) in service.uses() {
        let used = all.entry(address).or_default();
        used.sessions += u64::from(usage.sessions());
        used.opened += usage.opened();
        used.rate += u64::from(usage.rate());
    }
    all
}
