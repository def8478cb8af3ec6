//! Services that are reached at VIPs, and whom of their backends one gateway may choose: as kube-proxy does on its node.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use vipgate_dataplane::snapshot::spec::{BackendSpec, BackendState, HealthSpec, Scope, ServicePortSpec, ServiceSpec};

use super::Viewer;
use crate::manifest::{Family, Hints};

/// One Service for all gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DealtService {
    /// `Service namespace/name`. Its key.
    pub name: Arc<str>,
    /// The VIPs that it is reached at and somebody holds, ascending.
    pub vips: Vec<IpAddr>,
    /// Its ports, each number of a protocol once.
    pub ports: Vec<ServicePortSpec>,
    /// Whoever is behind it, by address, each once.
    pub backends: Vec<DealtBackend>,
    /// The clients outside that may reach it, ascending, without bits beyond their prefixes; empty: all.
    pub source_ranges: Vec<IpNet>,
    /// Seconds for which a client stays with its backend; none: each session is placed by itself.
    pub affinity: Option<u32>,
    /// Places in its table of backends, see [`vipgate_dataplane::snapshot::maglev::is_size`].
    pub table_size: u32,
    /// Which backends serve clients outside the cluster.
    pub external: Scope,
    /// Which ones serve pods.
    pub internal: Scope,
    /// The port at which health checks are answered, if they are.
    pub health_port: Option<u16>,
}

/// An address behind a Service, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DealtBackend {
    /// The address.
    pub address: IpAddr,
    /// `namespace/pod`, where that is known; else empty.
    pub name: Arc<str>,
    /// The port that it listens on for each of the Service's ports, in their order; 0 where it serves that one not.
    pub ports: Arc<[u16]>,
    /// Its part of new sessions, beside those of others; 0: none.
    pub weight: u16,
    /// How it is.
    pub state: BackendState,
    /// The node that it is on, if that is known.
    pub node: Option<Arc<str>>,
    /// The zone that it is in, if that is known.
    pub zone: Option<Arc<str>>,
    /// Whom it is meant for, if anybody in particular.
    pub hints: Option<Arc<Hints>>,
}

impl DealtService {
    /// Backends that one Service can have.
    pub const MOST_BACKENDS: usize = 65_535;
    /// Ports that one Service can have.
    pub const MOST_PORTS: usize = 4096;
    /// Source ranges that one Service can have.
    pub const MOST_RANGES: usize = 65_535;
    /// Bytes that the names of all its backends, and of where they are, can have: gateways take 4 MiB in one piece.
    pub const MOST_BYTES: usize = 3 << 20;

    /// What its backends come to on the way to gateways, bytes, about.
    pub fn bytes(backends: &[DealtBackend]) -> usize {
        let text = |text: &Option<Arc<str>>| text.as_ref().map_or(0, |text| text.len());
        let names = |names: &[Arc<str>]| names.iter().map(|name| name.len() + 3).sum::<usize>();
        let hints = |it: &DealtBackend| it.hints.as_ref().map_or(0, |it| names(&it.nodes) + names(&it.zones));
        let own = |it: &DealtBackend| 64 + 3 * it.ports.len() + it.name.len() + text(&it.node) + text(&it.zone);
        backends.iter().map(|it| own(it) + hints(it)).sum()
    }

    /// The Service as a gateway sees it. `viewer` is placed already: see [`Viewer::placed`].
    pub fn seen_by(&self, viewer: &Viewer) -> ServiceSpec {
        let choice = Family::ALL.map(|family| Choice::among(self.candidates(family), viewer));
        let may = |backend: &DealtBackend, scope: Scope| {
            let choice = &choice[usize::from(backend.address.is_ipv6())];
            backend.may_be_chosen() && choice.takes(backend, scope, viewer)
        };
        let backend = |it: &DealtBackend| BackendSpec {
            address: it.address,
            name: it.name.clone(),
            ports: it.ports.to_vec(),
            weight: it.weight,
            state: it.state,
            external: may(it, self.external),
            internal: may(it, self.internal),
        };
        let health = |port| HealthSpec { port, local_endpoints: self.count_local(viewer) };
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

    fn candidates(&self, family: Family) -> impl Iterator<Item = &DealtBackend> + Clone {
        let of_family = move |it: &&DealtBackend| Family::of(it.address) == family && it.may_be_chosen();
        self.backends.iter().filter(of_family)
    }

    /// Pods on the viewer's node that take new sessions, each once, however many addresses it has.
    fn count_local(&self, viewer: &Viewer) -> u32 {
        let is_counted = |it: &&DealtBackend| it.may_be_chosen() && it.state == BackendState::Ready && it.is_on(viewer);
        let (named, unnamed): (Vec<_>, Vec<_>) =
            self.backends.iter().filter(is_counted).partition(|backend| !backend.name.is_empty());
        let mut names: Vec<&str> = named.iter().map(|backend| &*backend.name).collect();
        names.sort_unstable();
        names.dedup();
        u32::try_from(names.len() + unnamed.len()).unwrap_or(u32::MAX)
    }
}

impl DealtBackend {
    /// Whether new sessions can go there at all.
    pub fn may_be_chosen(&self) -> bool {
        self.weight > 0 && self.ports.iter().any(|port| *port > 0)
    }

    fn is_on(&self, viewer: &Viewer) -> bool {
        self.node.as_ref().is_some_and(|node| *node == viewer.node)
    }

    fn is_meant_for_node(&self, node: &str) -> bool {
        self.hints.as_ref().is_some_and(|hints| hints.nodes.iter().any(|name| **name == *node))
    }

    fn is_meant_for_zone(&self, zone: &str) -> bool {
        self.hints.as_ref().is_some_and(|hints| hints.zones.iter().any(|name| **name == *zone))
    }
}

/// Which backends of one address family a gateway chooses from.
struct Choice {
    cluster: Wanted,
    local: Wanted,
}

/// What is asked of a backend.
#[derive(Clone, Copy)]
enum Wanted {
    /// That it is ready.
    Ready,
    /// That it is ready and meant for the gateway's node.
    ForNode,
    /// That it is ready and meant for the gateway's zone.
    ForZone,
    /// That it ends, but still serves: no other does.
    Terminating,
}

impl Choice {
    /// As `CategorizeEndpoints` of kube-proxy has it. Hints count only if all have them, so that nobody is left out while they
    /// are being given.
    fn among<'a>(candidates: impl Iterator<Item = &'a DealtBackend> + Clone, viewer: &Viewer) -> Self {
        let ready = candidates.filter(|backend| backend.state == BackendState::Ready);
        let all = |has: fn(&Hints) -> bool| ready.clone().all(|it| it.hints.as_deref().is_some_and(has));
        let cluster = if ready.clone().next().is_none() {
            Wanted::Terminating
        } else if all(|hints| !hints.nodes.is_empty()) && ready.clone().any(|it| it.is_meant_for_node(&viewer.node)) {
            Wanted::ForNode
        } else if !viewer.zone.is_empty()
            && all(|hints| !hints.zones.is_empty())
            && ready.clone().any(|it| it.is_meant_for_zone(&viewer.zone))
        {
            Wanted::ForZone
        } else {
            Wanted::Ready
        };
        let has_local = ready.clone().any(|backend| backend.is_on(viewer));
        Self { cluster, local: if has_local { Wanted::Ready } else { Wanted::Terminating } }
    }

    fn takes(&self, backend: &DealtBackend, scope: Scope, viewer: &Viewer) -> bool {
        let (wanted, is_near) = match scope {
            Scope::Cluster => (self.cluster, true),
            Scope::Local => (self.local, backend.is_on(viewer)),
        };
        let is_ready = backend.state == BackendState::Ready;
        let fits = match wanted {
            Wanted::Ready => is_ready,
            Wanted::ForNode => is_ready && backend.is_meant_for_node(&viewer.node),
            Wanted::ForZone => is_ready && backend.is_meant_for_zone(&viewer.zone),
            Wanted::Terminating => backend.state == BackendState::Terminating,
        };
        is_near && fits
    }
}
