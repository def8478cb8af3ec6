//! Services that are reached at VIPs, as one gateway sees them: who of their backends may be chosen here is decided already.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

/// One Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSpec {
    /// `Service namespace/name`. Its key.
    pub name: Arc<str>,
    /// The VIPs that it is reached at, ascending. Also those that other gateways hold: its backends' answers may come by here.
    pub vips: Vec<IpAddr>,
    /// Its ports: with each VIP, a frontend.
    pub ports: Vec<ServicePortSpec>,
    /// Whoever is behind it, by address, each once.
    pub backends: Vec<BackendSpec>,
    /// The clients outside that may reach it; empty: all.
    pub source_ranges: Vec<IpNet>,
    /// Seconds for which a client stays with its backend after its last new session; `None`: each session is placed by itself.
    pub affinity: Option<u32>,
    /// Places in its table of backends (Maglev), a prime: more of them spread new sessions more evenly, and move fewer when
    /// backends come and go.
    pub table_size: u32,
    /// Which backends serve clients outside the cluster.
    pub external: Scope,
    /// Which ones serve pods.
    pub internal: Scope,
    /// What health checks are told at its VIPs.
    pub health: Option<HealthSpec>,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePortSpec {
    /// Its name; empty where the Service has but one port without a name.
    pub name: Arc<str>,
    /// IP protocol number: TCP, UDP or SCTP.
    pub protocol: u8,
    /// Its number at the VIPs.
    pub port: u16,
}

/// Which backends serve a kind of clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All that are there.
    #[default]
    Cluster,
    /// Those on the gateway's own node.
    Local,
}

/// An address behind a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSpec {
    /// The address.
    pub address: IpAddr,
    /// `namespace/pod`, where that is known; else empty.
    pub name: Arc<str>,
    /// The port that it listens on for each of the Service's ports, in their order; 0 where it serves that one not.
    pub ports: Vec<u16>,
    /// Its part of new sessions, beside those of others; 0: none.
    pub weight: u16,
    /// Whether it may be chosen, for people.
    pub state: BackendState,
    /// Whether a new session from outside may choose it here. Those that it has stay in any case, for as long as it is listed.
    pub external: bool,
    /// The same for a pod's new session.
    pub internal: bool,
}

impl BackendSpec {
    /// Whether a new session may choose it here: one from outside, or a pod's.
    pub fn takes(&self, is_external: bool) -> bool {
        self.weight > 0 && if is_external { self.external } else { self.internal }
    }
}

/// How a backend is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendState {
    /// It takes new sessions.
    #[default]
    Ready,
    /// It ends, but still serves: it takes new sessions only while no other does.
    Terminating,
    /// It takes none.
    NotReady,
}

/// What health checks are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthSpec {
    /// The port that is asked.
    pub port: u16,
    /// Ready backends on the gateway's own node.
    pub local_endpoints: u32,
}
