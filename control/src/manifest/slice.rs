//! Endpoint slices: the pods behind a Service. Those that aren't ready count too: a pod that starts or ends calls out like
//! any other, and must never leave with its own address; and sessions that it has stay with it.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::discovery::v1::{EndpointConditions, EndpointHints, EndpointPort, EndpointSlice as Document};
use vipgate_dataplane::snapshot::spec::BackendState;

use super::read::Report;
use super::{DEFAULT_NAMESPACE, Family, Protocol, port, unusable_address};
use crate::complaint::Severity;

/// Label that names the Service.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// What counts of an `EndpointSlice`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// The Service that its endpoints are behind, in the same namespace, if it says one.
    pub service: Option<String>,
    /// The ports that its endpoints listen on; none: on all.
    pub ports: Option<Vec<SlicePort>>,
    /// Its endpoints: one for each address.
    pub endpoints: Vec<SliceEndpoint>,
}

/// A port of all endpoints of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The name of the Service's port that it belongs to; empty if that has none.
    pub name: Arc<str>,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its number; none: whatever the Service says.
    pub port: Option<u16>,
}

/// An address behind a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// The address.
    pub address: IpAddr,
    /// `namespace/pod`; empty where no pod is named.
    pub pod: Arc<str>,
    /// The node that it is on, if the slice says so.
    pub node: Option<Arc<str>>,
    /// The zone that it is in, if the slice says so.
    pub zone: Option<Arc<str>>,
    /// Whether it takes sessions.
    pub state: BackendState,
    /// Whom it is meant for, if anybody in particular.
    pub hints: Option<Arc<Hints>>,
    /// Its place in the slice: of the endpoint, and of the address in it.
    pub at: (usize, usize),
}

/// Whom an endpoint is meant for: not both are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Names of nodes, ascending.
    pub nodes: Vec<Arc<str>>,
    /// Zones, ascending.
    pub zones: Vec<Arc<str>>,
}

impl SliceEndpoint {
    /// Field that the address stands in.
    pub fn field(&self) -> String {
        field(self.at)
    }
}

fn field((endpoint, address): (usize, usize)) -> String {
    format!("endpoints[{endpoint}].addresses[{address}]")
}

/// Reads a slice. Addresses that no pod can have are reported, and left out.
pub(super) fn read(document: Document, report: &mut Report<'_>) -> EndpointSlice {
    let service = document.metadata.labels.and_then(|mut labels| labels.remove(SERVICE_NAME_LABEL));
    if service.is_none() {
        let reason = format!("has no label {SERVICE_NAME_LABEL}: its endpoints belong to no Service");
        report(Severity::Warning, "metadata.labels", reason);
    }
    let ports = document.ports.map(|ports| read_ports(ports, report));
    let mut slice = EndpointSlice { service, ports, endpoints: Vec::with_capacity(document.endpoints.len()) };
    let family = match document.address_type.as_str() {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => {
            let reason = "endpoints with names instead of addresses are not covered";
            report(Severity::Warning, "addressType", reason.to_owned());
            return slice;
        }
        other => {
            report(Severity::Error, "addressType", format!("`{other}` is unknown, expected IPv4, IPv6 or FQDN"));
            return slice;
        }
    };
    let namespace = document.metadata.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    for (i, endpoint) in document.endpoints.into_iter().enumerate() {
        let pod: Arc<str> = endpoint.target_ref.and_then(|target| pod(target, namespace)).unwrap_or_default().into();
        let mut names = Names { endpoint: i, report };
        let node = endpoint.node_name.and_then(|name| names.read("nodeName", name));
        let zone = endpoint.zone.and_then(|name| names.read("zone", name));
        let hints = endpoint.hints.and_then(|hints| names.hints(hints));
        let state = state(&endpoint.conditions.unwrap_or_default());
        for (j, text) in endpoint.addresses.iter().enumerate() {
            match check(text, family) {
                Ok(address) => slice.endpoints.push(SliceEndpoint {
                    address,
                    pod: pod.clone(),
                    node: node.clone(),
                    zone: zone.clone(),
                    state,
                    hints: hints.clone(),
                    at: (i, j),
                }),
                Err(reason) => report(Severity::Error, &field((i, j)), reason),
            }
        }
    }
    slice
}

fn read_ports(ports: Vec<EndpointPort>, report: &mut Report<'_>) -> Vec<SlicePort> {
    let read = |(i, it): (usize, EndpointPort)| {
        let protocol = port::protocol("ports", i, it.protocol.as_deref(), report)?;
        let port = match it.port {
            None => None,
            Some(number) => Some(port::number(number, || format!("ports[{i}].port"), report)?),
        };
        let name = port::name(it.name.as_deref(), || format!("ports[{i}].name"), report)?;
        Some(SlicePort { name, protocol, port })
    };
    ports.into_iter().enumerate().filter_map(read).collect()
}

/// As Kubernetes reads conditions: who says nothing is ready, who is ready serves.
fn state(conditions: &EndpointConditions) -> BackendState {
    let ready = conditions.ready.unwrap_or(true);
    let serving = conditions.serving.unwrap_or(ready);
    match (ready, serving && conditions.terminating.unwrap_or_default()) {
        (true, _) => BackendState::Ready,
        (false, true) => BackendState::Terminating,
        (false, false) => BackendState::NotReady,
    }
}

/// Reads names that an endpoint says, which go to gateways and are shown there.
struct Names<'a, 'b> {
    /// Its place in the slice.
    endpoint: usize,
    report: &'a mut Report<'b>,
}

impl Names<'_, '_> {
    fn read(&mut self, field: &str, name: String) -> Option<Arc<str>> {
        if port::is_name(&name) {
            return (!name.is_empty()).then(|| name.into());
        }
        (self.report)(Severity::Error, &format!("endpoints[{}].{field}", self.endpoint), port::NO_NAME.to_owned());
        None
    }

    fn hints(&mut self, hints: EndpointHints) -> Option<Arc<Hints>> {
        let nodes = hints.for_nodes.unwrap_or_default().into_iter().map(|it| it.name);
        let nodes = self.sorted("hints.forNodes", nodes);
        let zones = hints.for_zones.unwrap_or_default().into_iter().map(|it| it.name);
        let zones = self.sorted("hints.forZones", zones);
        (!nodes.is_empty() || !zones.is_empty()).then(|| Arc::new(Hints { nodes, zones }))
    }

    fn sorted(&mut self, field: &str, names: impl Iterator<Item = String>) -> Vec<Arc<str>> {
        let mut names: Vec<Arc<str>> =
            names.enumerate().filter_map(|(i, name)| self.read(&format!("{field}[{i}].name"), name)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

fn check(text: &str, family: Family) -> Result<IpAddr, String> {
    let address: IpAddr = text.parse().map_err(|_| format!("`{text}` is no address"))?;
    if Family::of(address) != family {
        return Err(format!("{address} is not {family}, the slice's addressType"));
    }
    unusable_address(address).map_or(Ok(address), |what| Err(format!("{address} is {what}")))
}

fn pod(target: ObjectReference, namespace: &str) -> Option<String> {
    let name = target.name.filter(|_| target.kind.as_deref() == Some("Pod"))?;
    Some(format!("{}/{name}", target.namespace.as_deref().unwrap_or(namespace)))
}
