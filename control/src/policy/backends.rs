//! Endpoint slices to the backends of a Service: each address once, with all that any slice says of it.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt, HashSet};
use vipgate_dataplane::snapshot::spec::BackendState;

use super::claim::Sources;
use super::deal::DealtBackend;
use super::inventory::Located;
use crate::complaint::Complaint;
use crate::manifest::{EndpointSlice, Hints, Service, ServicePort, SliceEndpoint};

/// Finds backends.
pub(super) struct Finder<'a> {
    sources: &'a Sources<'a>,
    /// VIPs that slices have among their addresses.
    vips: &'a HashSet<IpAddr>,
    /// Nodes and zones that are said elsewhere than in slices.
    names: HashMap<&'a str, Arc<str>>,
}

impl<'a> Finder<'a> {
    pub(super) fn new(sources: &'a Sources<'a>, vips: &'a HashSet<IpAddr>) -> Self {
        Self { sources, vips, names: HashMap::new() }
    }

    /// The backends of a Service, by address.
    pub(super) fn behind(&mut self, service: Located<'a, Service>, log: &mut Vec<Complaint>) -> Vec<DealtBackend> {
        let slices = self.sources.inventory.slices_of(service.key());
        let mut found = Vec::with_capacity(slices.iter().map(|slice| slice.body.endpoints.len()).sum());
        for slice in slices {
            let ports = ports(&service.body.ports, slice.body);
            for endpoint in &slice.body.endpoints {
                if self.vips.contains(&endpoint.address) {
                    let reason = format!("{} is a VIP, not a pod's address: left out", endpoint.address);
                    log.push(slice.warning(&endpoint.field(), reason));
                } else {
                    found.push(self.backend(endpoint, ports.clone()));
                }
            }
        }
        // Slices come by name, so what the first of them says is the same in every run.
        found.sort_by_key(|backend| backend.address);
        found.dedup_by(|again, first| {
            let is_same = again.address == first.address;
            if is_same {
                join(first, again);
            }
            is_same
        });
        found
    }

    fn backend(&mut self, endpoint: &'a SliceEndpoint, ports: Arc<[u16]>) -> DealtBackend {
        let SliceEndpoint { address, pod, node, zone, state, hints, at: _ } = endpoint;
        let pods = self.sources.pods;
        let name = if pod.is_empty() { pods.name_of(*address).unwrap_or(pod) } else { pod };
        let place = self.sources.slices.place_of(endpoint);
        DealtBackend {
            address: *address,
            name: name.clone(),
            ports,
            weight: pods.weight_of(name),
            state: *state,
            node: node.clone().or_else(|| place.node.map(|name| self.shared(name))),
            zone: zone.clone().or_else(|| place.zone.map(|name| self.shared(name))),
            hints: hints.clone(),
        }
    }

    fn shared(&mut self, name: &'a str) -> Arc<str> {
        self.names.entry(name).or_insert_with(|| name.into()).clone()
    }
}

/// The port for each of a Service's ports that the endpoints of a slice listen on; 0 where it serves that one not.
fn ports(wanted: &[ServicePort], slice: &EndpointSlice) -> Arc<[u16]> {
    let port = |wanted: &ServicePort| {
        // Who listens on all ports does so on the Service's target, unless only pods know what that is.
        let Some(ports) = &slice.ports else { return wanted.target.unwrap_or_default() };
        let own = ports.iter().find(|port| port.name == wanted.name && port.protocol == wanted.protocol);
        own.and_then(|own| own.port.or(wanted.target)).unwrap_or_default()
    };
    wanted.iter().map(port).collect()
}

/// Adds what another slice says of a backend.
fn join(first: &mut DealtBackend, again: &mut DealtBackend) {
    if first.ports != again.ports {
        let both = first.ports.iter().zip(&*again.ports);
        first.ports = both.map(|(first, again)| if *first > 0 { *first } else { *again }).collect();
    }
    let rank = |state| match state {
        BackendState::Ready => 2,
        BackendState::Terminating => 1,
        BackendState::NotReady => 0,
    };
    if rank(again.state) > rank(first.state) {
        first.state = again.state;
    }
    if first.name.is_empty() {
        first.name = again.name.clone();
        first.weight = again.weight;
    }
    first.node = first.node.take().or(again.node.take());
    first.zone = first.zone.take().or(again.zone.take());
    first.hints = match (first.hints.take(), again.hints.take()) {
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
