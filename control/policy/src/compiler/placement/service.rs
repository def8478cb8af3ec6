//! Inbound Services of all gateways, and the eligible backends per gateway: kube-proxy's rules for traffic policies,
//! topology hints and terminating endpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use vipgate_dataplane::policy::spec::{BackendSpec, BackendState, HealthSpec, Scope, ServicePortSpec, ServiceSpec};

use super::GatewayLocality;
use crate::manifest::{Family, Hints};

/// One Service for all gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedService {
    /// `Service namespace/name`. Its key.
    pub name: Arc<str>,
    /// Its assigned VIPs, ascending.
    pub vips: Vec<IpAddr>,
    /// Its ports; protocol and number are unique.
    pub ports: Vec<ServicePortSpec>,
    /// Its backends, by address and ports, ascending. Several may have one address, as host-network pods of a node do:
    /// then their ports for a Service port differ.
    pub backends: Vec<PlacedBackend>,
    /// External client prefixes that may reach it, ascending, without host bits; empty: all.
    pub source_ranges: Vec<IpNet>,
    /// Client IP affinity, seconds; none: each session selects a backend by itself.
    pub affinity: Option<u32>,
    /// Slots of its Maglev table, see [`vipgate_dataplane::policy::maglev::is_valid_size`].
    pub table_size: u32,
    /// External traffic policy.
    pub external: Scope,
    /// Internal traffic policy.
    pub internal: Scope,
    /// The port of its health check, if it has one.
    pub health_port: Option<u16>,
}

/// A backend of a Service and its locality.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedBackend {
    pub address: IpAddr,
    /// `namespace/pod`; empty if unknown.
    pub name: Arc<str>,
    /// Its target port for each of the Service's ports, in their order; 0: none.
    pub ports: Arc<[u16]>,
    /// Its relative weight for new sessions; 0: none.
    pub weight: u16,
    /// Readiness.
    pub state: BackendState,
    /// Its node, if known.
    pub node: Option<Arc<str>>,
    /// Its zone, if known.
    pub zone: Option<Arc<str>>,
    /// Topology hints, if any.
    pub hints: Option<Arc<Hints>>,
}

impl PlacedService {
    /// Maximum of [`Self::encoded_size`]: gateways accept gRPC messages of up to 4 MiB.
    pub const MAX_ENCODED_SIZE: usize = 3 << 20;

    /// Approximate encoded size of backends, with the names of pods, nodes and zones, bytes.
    pub fn encoded_size(backends: &[PlacedBackend]) -> usize {
        let text = |text: &Option<Arc<str>>| text.as_ref().map_or(0, |text| text.len());
        let names = |names: &[Arc<str>]| names.iter().map(|name| name.len() + 3).sum::<usize>();
        let hints = |it: &PlacedBackend| it.hints.as_ref().map_or(0, |it| names(&it.nodes) + names(&it.zones));
        let own = |it: &PlacedBackend| 64 + 3 * it.ports.len() + it.name.len() + text(&it.node) + text(&it.zone);
        backends.iter().map(|it| own(it) + hints(it)).sum()
    }

    /// The Service for one gateway, whose zone is resolved: see [`GatewayLocality::resolve_zone`].
    pub fn for_gateway(&self, gateway: &GatewayLocality) -> ServiceSpec {
        let criteria = Family::ALL.map(|family| Criteria::new(self.candidates(family), gateway));
        let is_eligible = |backend: &PlacedBackend, scope: Scope| {
            let criteria = &criteria[usize::from(backend.address.is_ipv6())];
            backend.accepts_sessions() && criteria.matches(backend, scope, gateway)
        };
        let backend = |it: &PlacedBackend| BackendSpec {
            address: it.address,
            name: it.name.clone(),
            ports: it.ports.to_vec(),
            weight: it.weight,
            state: it.state,
            external: is_eligible(it, self.external),
            internal: is_eligible(it, self.internal),
        };
        let health = |port| HealthSpec { port, local_endpoints: self.count_local(gateway) };
        ServiceSpec {
            name: self.name.clone(),
            vips: self.vips.clone(),
            ports: self.ports.clone(),
            backends: self.backends.iter().map(backend).collect(),
            source_ranges: self.source_ranges.clone(),
            affinity: self.affinity,
            table_size: self.table_size,
            external: self.external,
            internal: self.internal,
            health: self.health_port.map(health),
        }
    }

    fn candidates(&self, family: Family) -> impl Iterator<Item = &PlacedBackend> + Clone {
        candidates(&self.backends, family)
    }

    /// Number of addresses on the gateway's node that accept new sessions, of the family that has more. As in
    /// kube-proxy's `getLocalReadyEndpointIPs`, backends of one address count once, whatever their ports.
    fn count_local(&self, gateway: &GatewayLocality) -> u32 {
        let is_counted = |it: &&PlacedBackend| it.state == BackendState::Ready && it.is_on(gateway);
        let addresses = |family| {
            let counted = self.candidates(family).filter(is_counted);
            counted.map(|it| it.address).collect::<BTreeSet<_>>().len()
        };
        let count = Family::ALL.map(addresses).into_iter().max().unwrap_or(0);
        u32::try_from(count).unwrap_or(u32::MAX)
    }
}

/// Those of a family that can get new sessions.
fn candidates(backends: &[PlacedBackend], family: Family) -> impl Iterator<Item = &PlacedBackend> + Clone {
    backends.iter().filter(move |it| Family::of(it.address) == family && it.accepts_sessions())
}

/// How far backends in a state are preferred for new sessions; those that aren't ready get none.
pub(in crate::compiler) fn preference(state: BackendState) -> u8 {
    match state {
        BackendState::Ready => 2,
        BackendState::Terminating => 1,
        BackendState::NotReady => 0,
    }
}

/// The best state of a node's candidates: with traffic policy `Local` those in it get the sessions.
fn local_state<'a>(on_node: impl Iterator<Item = &'a PlacedBackend>) -> Option<BackendState> {
    on_node.map(|backend| backend.state).max_by_key(|state| preference(*state))
}

/// The best state of the candidates of a family on each node.
pub(in crate::compiler) fn local_states(backends: &[PlacedBackend], family: Family) -> BTreeMap<&str, BackendState> {
    let mut nodes: BTreeMap<&str, Vec<&PlacedBackend>> = BTreeMap::new();
    for backend in candidates(backends, family) {
        if let Some(node) = &backend.node {
            nodes.entry(node).or_default().push(backend);
        }
    }
    nodes.into_iter().filter_map(|(node, on_node)| Some((node, local_state(on_node.into_iter())?))).collect()
}

impl PlacedBackend {
    /// Whether it can get new sessions: it has a weight and a port.
    pub fn accepts_sessions(&self) -> bool {
        self.weight > 0 && self.ports.iter().any(|port| *port > 0)
    }

    /// What backends are sorted by.
    pub fn key(&self) -> (IpAddr, &[u16]) {
        (self.address, &self.ports)
    }

    fn is_on(&self, gateway: &GatewayLocality) -> bool {
        self.node.as_ref().is_some_and(|node| *node == gateway.node)
    }

    fn is_hinted_for_node(&self, node: &str) -> bool {
        self.hints.as_ref().is_some_and(|hints| hints.nodes.iter().any(|name| **name == *node))
    }

    fn is_hinted_for_zone(&self, zone: &str) -> bool {
        self.hints.as_ref().is_some_and(|hints| hints.zones.iter().any(|name| **name == *zone))
    }
}

/// Eligibility of the backends of one address family, by traffic policy.
struct Criteria {
    cluster: Criterion,
    local: Criterion,
}

/// Condition for an eligible backend.
#[derive(Clone, Copy)]
enum Criterion {
    Ready,
    /// Ready and hinted for the gateway's node.
    ForNode,
    /// Ready and hinted for the gateway's zone.
    ForZone,
    /// Terminating but serving: used only if no backend is ready.
    Terminating,
}

impl Criteria {
    /// The rules of kube-proxy's `CategorizeEndpoints`. Hints apply only if all ready backends have them, so that no
    /// backend is excluded while the controller is still writing hints.
    fn new<'a>(candidates: impl Iterator<Item = &'a PlacedBackend> + Clone, gateway: &GatewayLocality) -> Self {
        let local = local_state(candidates.clone().filter(|backend| backend.is_on(gateway)));
        let ready = candidates.filter(|backend| backend.state == BackendState::Ready);
        let all = |has: fn(&Hints) -> bool| ready.clone().all(|it| it.hints.as_deref().is_some_and(has));
        let cluster = if ready.clone().next().is_none() {
            Criterion::Terminating
        } else if all(|hints| !hints.nodes.is_empty()) && ready.clone().any(|it| it.is_hinted_for_node(&gateway.node)) {
            Criterion::ForNode
        } else if !gateway.zone.is_empty()
            && all(|hints| !hints.zones.is_empty())
            && ready.clone().any(|it| it.is_hinted_for_zone(&gateway.zone))
        {
            Criterion::ForZone
        } else {
            Criterion::Ready
        };
        let has_ready = local == Some(BackendState::Ready);
        Self { cluster, local: if has_ready { Criterion::Ready } else { Criterion::Terminating } }
    }

    fn matches(&self, backend: &PlacedBackend, scope: Scope, gateway: &GatewayLocality) -> bool {
        let (criterion, is_in_scope) = match scope {
            Scope::Cluster => (self.cluster, true),
            Scope::Local => (self.local, backend.is_on(gateway)),
        };
        let is_ready = backend.state == BackendState::Ready;
        let is_met = match criterion {
            Criterion::Ready => is_ready,
            Criterion::ForNode => is_ready && backend.is_hinted_for_node(&gateway.node),
            Criterion::ForZone => is_ready && backend.is_hinted_for_zone(&gateway.zone),
            Criterion::Terminating => backend.state == BackendState::Terminating,
        };
        is_in_scope && is_met
    }
}
