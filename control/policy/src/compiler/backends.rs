//! Backends of a Service, from its endpoint slices: each address once, merged over all slices.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use vipgate_dataplane::policy::spec::BackendState;

use super::claim::Inputs;
use super::inventory::ObjectRef;
use crate::compiler::placement::PlacedBackend;
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{EndpointSlice, Hints, Service, ServicePort, SliceEndpoint};

/// Builds the backends of Services.
pub(super) struct BackendBuilder<'a> {
    sources: &'a Inputs<'a>,
    /// VIPs that are (by mistake) endpoint addresses of slices.
    vips: &'a HashSet<IpAddr>,
    /// Interned names of nodes and zones that don't come from slices.
    names: HashMap<&'a str, Arc<str>>,
}

impl<'a> BackendBuilder<'a> {
    pub(super) fn new(sources: &'a Inputs<'a>, vips: &'a HashSet<IpAddr>) -> Self {
        Self { sources, vips, names: HashMap::new() }
    }

    /// The backends of a Service, sorted by address.
    pub(super) fn backends_of(
        &mut self,
        service: ObjectRef<'a, Service>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Vec<PlacedBackend> {
        let slices = self.sources.inventory.slices_of(service.namespaced_name());
        let mut found = Vec::with_capacity(slices.clone().map(|slice| slice.body.endpoints.len()).sum());
        for slice in slices {
            let ports = ports(&service.body.ports, slice.body);
            for endpoint in &slice.body.endpoints {
                if self.vips.contains(&endpoint.address) {
                    let reason = format!("{} is a VIP, not a pod address: ignored", endpoint.address);
                    diagnostics.push(slice.warning(Code::BackendIsVip, &endpoint.field(), reason));
                } else {
                    found.push(self.backend(endpoint, ports.clone()));
                }
            }
        }
        // Slices are sorted by name and the sort is stable, so the merge is deterministic.
        found.sort_by_key(|backend| backend.address);
        found.dedup_by(|duplicate, first| {
            let is_same = duplicate.address == first.address;
            if is_same {
                merge(first, duplicate);
            }
            is_same
        });
        found
    }

    fn backend(&mut self, endpoint: &'a SliceEndpoint, ports: Arc<[u16]>) -> PlacedBackend {
        let SliceEndpoint { address, pod, node, zone, state, hints, index: _ } = endpoint;
        let pods = self.sources.pods;
        let name = if pod.is_empty() { pods.name_of(*address).unwrap_or(pod) } else { pod };
        let locality = self.sources.slices.locality_of(endpoint);
        PlacedBackend {
            address: *address,
            name: name.clone(),
            ports,
            weight: pods.weight_of(name),
            state: *state,
            node: node.clone().or_else(|| locality.node.map(|name| self.intern(name))),
            zone: zone.clone().or_else(|| locality.zone.map(|name| self.intern(name))),
            hints: hints.clone(),
        }
    }

    fn intern(&mut self, name: &'a str) -> Arc<str> {
        self.names.entry(name).or_insert_with(|| name.into()).clone()
    }
}

/// The target port for each of a Service's ports on the endpoints of a slice; 0: none.
fn ports(service_ports: &[ServicePort], slice: &EndpointSlice) -> Arc<[u16]> {
    let port = |service_port: &ServicePort| {
        // A slice without `ports` has all ports: the Service's target port, unless that is a named port.
        let ServicePort { name, protocol, target, .. } = service_port;
        let Some(ports) = &slice.ports else { return target.unwrap_or_default() };
        let found = ports.iter().find(|port| port.name == *name && port.protocol == *protocol);
        found.and_then(|port| port.port.or(*target)).unwrap_or_default()
    };
    service_ports.iter().map(port).collect()
}

/// Merges a backend with its entry from another slice.
fn merge(first: &mut PlacedBackend, duplicate: &mut PlacedBackend) {
    if first.ports != duplicate.ports {
        let both = first.ports.iter().zip(&*duplicate.ports);
        first.ports = both.map(|(first, other)| if *first > 0 { *first } else { *other }).collect();
    }
    let rank = |state| match state {
        BackendState::Ready => 2,
        BackendState::Terminating => 1,
        BackendState::NotReady => 0,
    };
    if rank(duplicate.state) > rank(first.state) {
        first.state = duplicate.state;
    }
    if first.name.is_empty() {
        first.name = duplicate.name.clone();
        first.weight = duplicate.weight;
    }
    first.node = first.node.take().or(duplicate.node.take());
    first.zone = first.zone.take().or(duplicate.zone.take());
    first.hints = match (first.hints.take(), duplicate.hints.take()) {
        (Some(one), Some(other)) if one != other => Some(Arc::new(union(&one, &other))),
        (one, other) => one.or(other),
    };
}

fn union(one: &Hints, other: &Hints) -> Hints {
    let both = |one: &[Arc<str>], other: &[Arc<str>]| {
        let mut names = [one, other].concat();
        names.sort_unstable();
        names.dedup();
        names
    };
    Hints { nodes: both(&one.nodes, &other.nodes), zones: both(&one.zones, &other.zones) }
}
