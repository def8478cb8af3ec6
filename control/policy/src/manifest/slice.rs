//! Endpoint slices: the endpoints of a Service, including those that aren't ready. A starting or terminating pod sends
//! traffic, too, which must never leave untranslated; and it keeps its established inbound sessions.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::discovery::v1::{EndpointConditions, EndpointHints, EndpointPort, EndpointSlice as Document};
use vipgate_dataplane::policy::spec::BackendState;

use super::{DEFAULT_NAMESPACE, Family, Protocol, port, unusable_address};
use crate::diagnostic::{Code, Report, Severity};

/// Label with the name of the Service.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// The fields of an `EndpointSlice` that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Its Service, in the same namespace, if it has the label.
    pub service: Option<String>,
    /// Ports of its endpoints; `None`: all ports.
    pub ports: Option<Vec<SlicePort>>,
    /// Its endpoints, one per address.
    pub endpoints: Vec<SliceEndpoint>,
}

/// A port of the endpoints of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// Name of the Service port; empty if that has none.
    pub name: Arc<str>,
    pub protocol: Protocol,
    /// Its number; `None`: the Service's target port.
    pub port: Option<u16>,
}

/// An endpoint address of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    pub address: IpAddr,
    /// `namespace/pod`; empty without a pod reference.
    pub pod: Arc<str>,
    /// The pod's UID, if set.
    pub uid: Option<Arc<str>>,
    /// Its node, if set.
    pub node: Option<Arc<str>>,
    /// Its zone, if set.
    pub zone: Option<Arc<str>>,
    /// Readiness.
    pub state: BackendState,
    /// Topology hints, if any.
    pub hints: Option<Arc<Hints>>,
    /// Index of the endpoint in the slice, and of the address in the endpoint.
    pub index: (usize, usize),
}

/// Topology hints of an endpoint; at least one list is not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Nodes that should use it, ascending.
    pub nodes: Vec<Arc<str>>,
    /// Zones that should use it, ascending.
    pub zones: Vec<Arc<str>>,
}

impl SliceEndpoint {
    /// Field of the address.
    pub fn field(&self) -> String {
        field(self.index)
    }
}

fn field((endpoint, address): (usize, usize)) -> String {
    format!("endpoints[{endpoint}].addresses[{address}]")
}

/// Reads a slice; invalid addresses are reported and left out.
pub(super) fn read(document: Document, report: &mut Report<'_>) -> EndpointSlice {
    let service = document.metadata.labels.and_then(|mut labels| labels.remove(SERVICE_NAME_LABEL));
    if service.is_none() {
        let reason = format!("has no label {SERVICE_NAME_LABEL}: its endpoints are ignored");
        report(Severity::Warning, Code::SliceWithoutService, "metadata.labels", reason);
    }
    let ports = document.ports.map(|ports| read_ports(ports, report));
    let mut slice = EndpointSlice { service, ports, endpoints: Vec::with_capacity(document.endpoints.len()) };
    let family = match document.address_type.as_str() {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => {
            let reason = "endpoints with host names are not supported and are ignored";
            report(Severity::Warning, Code::HostNameEndpoints, "addressType", reason.to_owned());
            return slice;
        }
        other => {
            let reason = format!("`{other}` is unknown, expected IPv4, IPv6 or FQDN");
            report(Severity::Error, Code::UnknownValue, "addressType", reason);
            return slice;
        }
    };
    let namespace = document.metadata.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    for (i, endpoint) in document.endpoints.into_iter().enumerate() {
        let mut names = Names { endpoint: i, report };
        let (pod, uid) = endpoint.target_ref.map(|target| names.pod(target, namespace)).unwrap_or_default();
        let node = endpoint.node_name.and_then(|name| names.read("nodeName", name));
        let zone = endpoint.zone.and_then(|name| names.read("zone", name));
        let hints = endpoint.hints.and_then(|hints| names.hints(hints));
        let state = state(&endpoint.conditions.unwrap_or_default());
        for (j, text) in endpoint.addresses.iter().enumerate() {
            match parse_address(text, family) {
                Ok(address) => slice.endpoints.push(SliceEndpoint {
                    address,
                    pod: pod.clone(),
                    uid: uid.clone(),
                    node: node.clone(),
                    zone: zone.clone(),
                    state,
                    hints: hints.clone(),
                    index: (i, j),
                }),
                Err((code, reason)) => report(Severity::Error, code, &field((i, j)), reason),
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

/// Kubernetes' defaults: `ready` is true if unset, `serving` is `ready` if unset.
fn state(conditions: &EndpointConditions) -> BackendState {
    let ready = conditions.ready.unwrap_or(true);
    let serving = conditions.serving.unwrap_or(ready);
    match (ready, serving && conditions.terminating.unwrap_or_default()) {
        (true, _) => BackendState::Ready,
        (false, true) => BackendState::Terminating,
        (false, false) => BackendState::NotReady,
    }
}

/// Reads and validates the names in an endpoint: gateways display them.
struct Names<'a, 'b> {
    /// Index of the endpoint in the slice.
    endpoint: usize,
    report: &'a mut Report<'b>,
}

impl Names<'_, '_> {
    fn read(&mut self, field: &str, name: String) -> Option<Arc<str>> {
        if port::is_valid_name(&name) {
            return (!name.is_empty()).then(|| name.into());
        }
        let field = format!("endpoints[{}].{field}", self.endpoint);
        (self.report)(Severity::Error, Code::InvalidName, &field, port::INVALID_NAME.to_owned());
        None
    }

    /// `namespace/name` and UID of the pod that an endpoint refers to, if it does.
    fn pod(&mut self, target: ObjectReference, default_namespace: &str) -> (Arc<str>, Option<Arc<str>>) {
        if target.kind.as_deref() != Some("Pod") {
            return Default::default();
        }
        let Some(name) = target.name.and_then(|name| self.read("targetRef.name", name)) else {
            return Default::default();
        };
        let namespace = target.namespace.and_then(|name| self.read("targetRef.namespace", name));
        let uid = target.uid.and_then(|uid| self.read("targetRef.uid", uid));
        (format!("{}/{name}", namespace.as_deref().unwrap_or(default_namespace)).into(), uid)
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

/// An address of a slice, or why it is left out.
fn parse_address(text: &str, family: Family) -> Result<IpAddr, (Code, String)> {
    let address: IpAddr = text.parse().map_err(|_| (Code::MalformedValue, format!("`{text}` is not an IP address")))?;
    if Family::of(address) != family {
        return Err((Code::FamilyMismatch, format!("{address} is not {family}, the slice's addressType")));
    }
    unusable_address(address).map_or(Ok(address), |what| Err((Code::NotAPodAddress, format!("{address} is {what}"))))
}
