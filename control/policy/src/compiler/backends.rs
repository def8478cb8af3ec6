//! Backends of a Service, from its endpoint slices.
//!
//! An endpoint is an address, a port and a node. Slices may have it several times, and one that is gone may still be listed
//! when another pod has its address: of those with the same address and port the serving one counts, in whatever order the
//! slices are.

use std::cmp::Reverse;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::claim::Inputs;
use super::inventory::ObjectRef;
use crate::compiler::placement::{PlacedBackend, preference};
use crate::diagnostic::Diagnostic;
use crate::manifest::{EndpointSlice, Hints, Service, ServicePort, SliceEndpoint};

/// Builds the backends of Services.
pub(super) struct BackendBuilder<'a> {
    sources: &'a Inputs<'a>,
    /// Interned names of nodes and zones that don't come from slices.
    names: HashMap<&'a str, Arc<str>>,
}

impl<'a> BackendBuilder<'a> {
    pub(super) fn new(sources: &'a Inputs<'a>) -> Self {
        Self { sources, names: HashMap::new() }
    }

    /// The backends of a Service, sorted by address and ports.
    pub(super) fn backends_of(
        &mut self,
        service: ObjectRef<'a, Service>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Vec<PlacedBackend> {
        let endpoints = self.sources.endpoints_of(service.namespaced_name(), diagnostics);
        let mut found = Vec::with_capacity(endpoints.len());
        let mut slice_ports: Option<(*const EndpointSlice, Arc<[u16]>)> = None;
        for (slice, endpoint) in endpoints {
            let ports = match &slice_ports {
                Some((of, ports)) if std::ptr::eq(*of, slice.body) => ports.clone(),
                _ => ports(&service.body.ports, slice.body),
            };
            slice_ports = Some((slice.body, ports.clone()));
            found.push(self.backend(endpoint, ports));
        }
        found.sort_by_key(|backend| backend.address);
        if found.is_sorted_by(|a, b| a.address < b.address) {
            return found;
        }
        let mut merged = Vec::with_capacity(found.len());
        for same_address in found.chunk_by_mut(|a, b| a.address == b.address) {
            match same_address {
                [only] => merged.push(only.clone()),
                several => merge(several, &mut merged),
            }
        }
        merged
    }

    fn backend(&mut self, endpoint: &'a SliceEndpoint, ports: Arc<[u16]>) -> PlacedBackend {
        let SliceEndpoint { address, pod, node, zone, state, hints, uid: _, index: _ } = endpoint;
        let pods = self.sources.pods;
        let name = if pod.is_empty() { pods.name_of(*address).unwrap_or(pod) } else { pod };
        let locality = self.sources.locality_of(endpoint);
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

/// Merges the entries of one address: those of one pod on one node become one backend, and of several with the same target
/// port only the one that serves has it.
fn merge(entries: &mut [PlacedBackend], merged: &mut Vec<PlacedBackend>) {
    // Which one serves doesn't depend on the names or the order of slices.
    entries.sort_by(|a, b| {
        let key = |it: &PlacedBackend| Reverse(preference(it.state));
        let names = |it: &PlacedBackend| (it.name.is_empty(), it.name.clone(), it.node.is_none(), it.node.clone());
        key(a).cmp(&key(b)).then_with(|| names(a).cmp(&names(b))).then_with(|| a.ports.cmp(&b.ports))
    });
    let before = merged.len();
    for entry in entries {
        // The target ports that nobody who serves better has.
        let is_taken = |(at, port): (usize, &u16)| {
            *port > 0 && merged[before..].iter().any(|it| it.ports[at] == *port && !is_same_endpoint(it, entry))
        };
        let taken: Vec<bool> = entry.ports.iter().enumerate().map(is_taken).collect();
        let ports = entry.ports.iter().zip(&taken).map(|(port, taken)| if *taken { 0 } else { *port });
        let ports: Arc<[u16]> = if taken.contains(&true) { ports.collect() } else { entry.ports.clone() };
        // Without a port left it is nobody's backend; the only entry of an address stays, to be shown.
        let has_port = |ports: &[u16]| ports.iter().any(|port| *port > 0);
        if !has_port(&ports) && (has_port(&entry.ports) || merged.len() > before) {
            continue;
        }
        match merged[before..].iter_mut().find(|it| is_same_endpoint(it, entry) && are_compatible(&it.ports, &ports)) {
            Some(same) => add(same, entry, &ports),
            None => merged.push(PlacedBackend { ports, ..entry.clone() }),
        }
    }
    merged[before..].sort_by(|a, b| a.ports.cmp(&b.ports));
}

/// Whether two entries are of one pod, as far as they say.
fn is_same_endpoint(one: &PlacedBackend, other: &PlacedBackend) -> bool {
    let is_same_name = one.name == other.name || one.name.is_empty() || other.name.is_empty();
    let is_same_node = one.node.as_ref().zip(other.node.as_ref()).is_none_or(|(one, other)| one == other);
    is_same_name && is_same_node
}

/// Whether two lists of target ports can be those of one backend.
fn are_compatible(one: &[u16], other: &[u16]) -> bool {
    one.iter().zip(other).all(|(one, other)| *one == 0 || *other == 0 || one == other)
}

/// Adds to an endpoint what another slice says of it.
fn add(first: &mut PlacedBackend, other: &PlacedBackend, ports: &Arc<[u16]>) {
    if first.ports != *ports {
        let both = first.ports.iter().zip(&**ports);
        first.ports = both.map(|(first, other)| if *first > 0 { *first } else { *other }).collect();
    }
    if first.name.is_empty() {
        first.name = other.name.clone();
        first.weight = other.weight;
    }
    first.node = first.node.take().or_else(|| other.node.clone());
    first.zone = first.zone.take().or_else(|| other.zone.clone());
    first.hints = match (first.hints.take(), &other.hints) {
        (Some(one), Some(other)) if one != *other => Some(Arc::new(union(&one, other))),
        (one, other) => one.or_else(|| other.clone()),
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
