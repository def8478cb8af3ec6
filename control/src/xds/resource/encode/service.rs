//! Encodes a Service and its backend slices.

use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::policy::spec::{BackendState, Scope, ServicePortSpec};
use vipgate_policy::compiler::{PlacedBackend, PlacedService};

use super::super::super::proto;
use super::super::slices::{BackendSlice, ServiceResource, backend_slices, divide, slice_count, slice_key};
use super::super::{Content, Key, Kind};
use super::resource;

/// Encodes a Service: with its backends, or the number of their slices.
pub fn service(service: &PlacedService) -> (Key, Content) {
    let slices = slice_count(service.backends.len());
    encode(service, if slices > 0 { &[] } else { &service.backends }, slices)
}

/// Encodes a decoded Service.
pub fn service_resource(resource: &ServiceResource) -> (Key, Content) {
    encode(&resource.service, &resource.service.backends, resource.slices)
}

/// Encodes the slices of a Service, in the order of their numbers.
pub fn slices(service: &PlacedService) -> Vec<(Key, Content)> {
    backend_slices(service).iter().map(backend_slice).collect()
}

/// Encodes a slice.
pub fn backend_slice(slice: &BackendSlice) -> (Key, Content) {
    let message = proto::BackendSlice {
        service: slice.service.to_string(),
        backends: slice.backends.iter().map(backend).collect(),
        more_backends: slice.more_backends.iter().map(backend).collect(),
    };
    resource(Kind::BackendSlice, slice_key(&slice.service, slice.number).name, &message)
}

fn encode(service: &PlacedService, backends: &[PlacedBackend], slices: u32) -> (Key, Content) {
    let (first, further) = divide(backends);
    let message = proto::Service {
        name: service.name.to_string(),
        vips: service.vips.iter().map(IpAddr::to_string).collect(),
        ports: service.ports.iter().map(port).collect(),
        backends: first.into_iter().map(backend).collect(),
        source_ranges: service.source_ranges.iter().map(ToString::to_string).collect(),
        affinity_seconds: service.affinity.unwrap_or(0),
        table_size: service.table_size,
        external_traffic_policy: traffic_policy(service.external).into(),
        internal_traffic_policy: traffic_policy(service.internal).into(),
        health_check_port: service.health_port.unwrap_or(0).into(),
        backend_slices: slices,
        more_backends: further.into_iter().map(backend).collect(),
    };
    resource(Kind::Service, service.name.clone(), &message)
}

fn port(port: &ServicePortSpec) -> proto::ServicePort {
    proto::ServicePort { name: port.name.to_string(), protocol: port.protocol.into(), port: port.port.into() }
}

fn backend(backend: &PlacedBackend) -> proto::Backend {
    let text = |text: &Option<Arc<str>>| text.as_deref().unwrap_or_default().to_owned();
    let texts = |texts: &[Arc<str>]| texts.iter().map(ToString::to_string).collect();
    let hints = backend.hints.as_deref();
    proto::Backend {
        address: backend.address.to_string(),
        name: backend.name.to_string(),
        ports: backend.ports.iter().map(|port| u32::from(*port)).collect(),
        weight: backend.weight.into(),
        state: match backend.state {
            BackendState::Ready => proto::BackendState::Ready,
            BackendState::Terminating => proto::BackendState::Terminating,
            BackendState::NotReady => proto::BackendState::NotReady,
        }
        .into(),
        node: text(&backend.node),
        zone: text(&backend.zone),
        hint_nodes: hints.map(|hints| texts(&hints.nodes)).unwrap_or_default(),
        hint_zones: hints.map(|hints| texts(&hints.zones)).unwrap_or_default(),
    }
}

fn traffic_policy(scope: Scope) -> proto::TrafficPolicy {
    match scope {
        Scope::Cluster => proto::TrafficPolicy::Cluster,
        Scope::Local => proto::TrafficPolicy::Local,
    }
}
