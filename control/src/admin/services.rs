//! `Services` request: Services with their backends and session counters.

use std::collections::BTreeMap;
use std::iter::zip;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::service as compiled;
use vipgate_dataplane::policy::spec::{BackendState, Scope};

use super::filter::protocol_name;

/// Services with VIPs as frontends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServicesReply {
    pub services: Vec<Service>,
}

/// A Service and its backends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    pub name: String,
    pub vips: Vec<String>,
    pub ports: Vec<ServicePort>,
    /// Traffic policy for external clients, and for pods: Cluster or Local.
    pub external_policy: String,
    pub internal_policy: String,
    /// Timeout of client affinity, seconds; 0: no affinity.
    pub affinity_seconds: u32,
    /// Permitted external clients; empty: all.
    pub source_ranges: Vec<String>,
    /// Only if it has a health check.
    pub health: Option<HealthCheck>,
    pub backends: Vec<Backend>,
    /// Open inbound sessions, all opened ones, and the current rate.
    pub sessions: u64,
    pub opened: u64,
    pub opened_per_second: u64,
    /// Bytes of its Maglev tables at this gateway: two a slot, one table for each distinct set of backends.
    pub lookup_table_bytes: u64,
}

/// A port of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServicePort {
    pub name: String,
    /// tcp, udp or sctp.
    pub protocol: String,
    pub port: u32,
}

/// A Service's health check (`healthCheckNodePort`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthCheck {
    pub port: u32,
    /// Ready backends on the gateway's node; with none, the response is 503.
    pub local_endpoints: u32,
    /// Why the check isn't available on the node's own addresses; empty: it is. It always is on the VIPs.
    pub error: String,
}

/// A backend of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backend {
    pub address: String,
    pub name: String,
    /// ready, terminating or not_ready.
    pub state: String,
    pub weight: u32,
    /// Whether this gateway may select it for new sessions of external clients, and of pods.
    pub external: bool,
    pub internal: bool,
    /// Target port for each of the Service's ports; 0: none.
    pub ports: Vec<u32>,
    pub sessions: u64,
    pub opened: u64,
    pub opened_per_second: u64,
}

/// Every Service of the policy in force, by name. `errors`: of the node's health check listeners, by port.
pub(super) fn all(policy: &Policy, errors: &BTreeMap<u16, String>) -> ServicesReply {
    let mut services: Vec<&compiled::Service> = policy.services().collect();
    services.sort_by(|one, other| one.spec.name.cmp(&other.spec.name));
    ServicesReply { services: services.into_iter().map(|service| describe(service, errors)).collect() }
}

fn describe(service: &compiled::Service, errors: &BTreeMap<u16, String>) -> Service {
    let spec = &service.spec;
    let backends: Vec<_> = zip(&spec.backends, usage_by_backend(service))
        .map(|(backend, usage)| Backend {
            address: backend.address.to_string(),
            name: backend.name.to_string(),
            state: backend_state(backend.state).to_owned(),
            weight: backend.weight.into(),
            external: backend.is_eligible(true),
            internal: backend.is_eligible(false),
            ports: backend.ports.iter().map(|port| u32::from(*port)).collect(),
            sessions: usage.sessions,
            opened: usage.opened,
            opened_per_second: usage.rate,
        })
        .collect();
    Service {
        name: spec.name.to_string(),
        vips: spec.vips.iter().map(IpAddr::to_string).collect(),
        ports: spec
            .ports
            .iter()
            .map(|port| ServicePort {
                name: port.name.to_string(),
                protocol: protocol_name(port.protocol),
                port: port.port.into(),
            })
            .collect(),
        external_policy: scope(spec.external).to_owned(),
        internal_policy: scope(spec.internal).to_owned(),
        affinity_seconds: spec.affinity.unwrap_or(0),
        source_ranges: spec.source_ranges.iter().map(ToString::to_string).collect(),
        health: spec.health.map(|health| HealthCheck {
            port: health.port.into(),
            local_endpoints: health.local_endpoints,
            error: errors.get(&health.port).cloned().unwrap_or_default(),
        }),
        sessions: backends.iter().map(|backend| backend.sessions).sum(),
        opened: backends.iter().map(|backend| backend.opened).sum(),
        opened_per_second: backends.iter().map(|backend| backend.opened_per_second).sum(),
        lookup_table_bytes: service.lookup_table_bytes() as u64,
        backends,
    }
}

/// A backend's state.
pub(crate) fn backend_state(state: BackendState) -> &'static str {
    match state {
        BackendState::Ready => "ready",
        BackendState::Terminating => "terminating",
        BackendState::NotReady => "not_ready",
    }
}

/// A Service on one line: its name and its ports.
pub(super) fn summary(service: &compiled::Service) -> String {
    let ports = service.spec.ports.iter().map(|port| format!("{}/{}", protocol_name(port.protocol), port.port));
    format!("{} ({})", service.spec.name, ports.collect::<Vec<_>>().join(", "))
}

fn scope(scope: Scope) -> &'static str {
    match scope {
        Scope::Cluster => "Cluster",
        Scope::Local => "Local",
    }
}

/// Session counters of a backend, summed over its ports.
#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    sessions: u64,
    opened: u64,
    rate: u64,
}

/// In the order of the Service's backends.
fn usage_by_backend(service: &compiled::Service) -> Vec<Usage> {
    let mut sums = vec![Usage::default(); service.spec.backends.len()];
    for (number, usage) in service.backend_usage() {
        let Some(sum) = sums.get_mut(number) else { continue };
        sum.sessions += u64::from(usage.sessions());
        sum.opened += usage.opened();
        sum.rate += u64::from(usage.rate());
    }
    sums
}
