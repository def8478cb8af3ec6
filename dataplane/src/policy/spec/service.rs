//! Specs of Services with VIPs, for one gateway: which backends it may select is already decided.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashSet, HashSetExt};
use ipnet::IpNet;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSpec {
    /// Key: `Service namespace/name`.
    pub name: Arc<str>,
    /// Its VIPs, ascending, including those of other gateways: its backends' replies may arrive here.
    pub vips: Vec<IpAddr>,
    /// Its ports; each one is a frontend at every VIP.
    pub ports: Vec<ServicePortSpec>,
    /// Its backends, sorted by address and ports. Several may have one address, as host-network pods of a node do:
    /// then their ports for a Service port differ, see [`repeated_target`].
    pub backends: Vec<BackendSpec>,
    /// Source ranges of external clients; empty: all.
    pub source_ranges: Vec<IpNet>,
    /// Client affinity timeout after the last new session, seconds; `None`: no affinity.
    pub affinity: Option<u32>,
    /// Size of its Maglev table, a prime: a larger one distributes sessions more evenly, and moves fewer of them when
    /// backends change.
    pub table_size: u32,
    /// Which backends external clients reach.
    pub external: Scope,
    /// Which backends pods reach.
    pub internal: Scope,
    /// Its health check at the VIPs (`healthCheckNodePort`).
    pub health: Option<HealthSpec>,
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePortSpec {
    /// Its name; empty for the only, unnamed port of a Service.
    pub name: Arc<str>,
    /// IP protocol number: TCP, UDP or SCTP.
    pub protocol: u8,
    /// Port number at the VIPs.
    pub port: u16,
}

/// Which backends a kind of clients reaches (traffic policy).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All of them.
    #[default]
    Cluster,
    /// Those on the gateway's own node.
    Local,
}

/// A backend of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSpec {
    pub address: IpAddr,
    /// `namespace/pod`; empty if unknown.
    pub name: Arc<str>,
    /// Its port for each of the Service's ports, in the same order; 0 if it doesn't have that one.
    pub ports: Vec<u16>,
    /// Its weight for new sessions, relative to the others; 0: none.
    pub weight: u16,
    /// Its state, for display.
    pub state: BackendState,
    /// Whether new sessions of external clients may select it here. Existing sessions stay while it is listed.
    pub external: bool,
    /// Whether new sessions of pods may select it here.
    pub internal: bool,
}

impl BackendSpec {
    /// Whether a new session of an external client, or of a pod, may select it here.
    pub fn is_eligible(&self, is_external: bool) -> bool {
        self.weight > 0 && if is_external { self.external } else { self.internal }
    }
}

/// The first Service port for which a backend has a target port, by its number, and that target port. Together with the
/// address, it identifies the backend in its Service.
pub fn first_target(ports: &[u16]) -> (u16, u16) {
    ports.iter().zip(0..).find(|(port, _)| **port != 0).map_or((0, 0), |(port, number)| (number, *port))
}

/// The first backend that has the address and the target port of another one, for the same Service port: its index, and
/// that of the Service port. `backends`: addresses and ports, sorted by address.
pub fn repeated_target<'a>(backends: impl IntoIterator<Item = (IpAddr, &'a [u16])>) -> Option<(usize, usize)> {
    let mut targets = HashSet::new();
    let mut previous: Option<(IpAddr, &[u16])> = None;
    for (i, (address, ports)) in backends.into_iter().enumerate() {
        let used = |ports: &'a [u16]| ports.iter().copied().enumerate().filter(|(_, port)| *port != 0);
        // Nearly all addresses occur once.
        match previous.filter(|(other, _)| *other == address) {
            None => targets.clear(),
            Some((_, others)) => {
                targets.extend(used(others));
                if let Some((number, _)) = used(ports).find(|target| targets.contains(target)) {
                    return Some((i, number));
                }
            }
        }
        previous = Some((address, ports));
    }
    None
}

/// State of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendState {
    /// It takes new sessions.
    #[default]
    Ready,
    /// It is terminating, but still serving: it takes new sessions only if no backend is ready.
    Terminating,
    /// It takes no new sessions.
    NotReady,
}

/// A Service's health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthSpec {
    /// Its TCP port.
    pub port: u16,
    /// Ready backends on the gateway's own node.
    pub local_endpoints: u32,
}
