//! Services in the test policy, and their clients.

use std::net::SocketAddr;

use vipgate_dataplane::policy::spec::{BackendSpec, BackendState, Scope, ServicePortSpec, ServiceSpec};

use crate::{Gateway, INSIDE, OUTSIDE, PolicySet, Setup, at, ends, ip, policy};

/// The VIPs of the Service `api`, one in each address family.
pub const VIPS: [&str; 2] = ["192.0.2.10", "2001:db8::10"];
/// A client in each address family.
pub const CLIENTS: [&str; 2] = ["198.51.100.10:40000", "[2001:db8:51::10]:40000"];
/// Protocol, Service port and backend port of `api`.
pub const PORTS: [(u8, u16, u16); 3] = [(6, 80, 8080), (17, 53, 5353), (132, 3868, 3868)];

/// A ready backend of `api`.
pub fn backend(address: &str) -> BackendSpec {
    BackendSpec {
        address: ip(address),
        name: "tenant/pod".into(),
        ports: PORTS.iter().map(|(.., port)| *port).collect(),
        weight: 1,
        state: BackendState::Ready,
        external: true,
        internal: true,
    }
}

/// A terminating backend of `api`.
pub fn terminating(address: &str) -> BackendSpec {
    BackendSpec { state: BackendState::Terminating, external: false, internal: false, ..backend(address) }
}

/// The Service `api` at its VIPs, with these backends.
pub fn service(backends: &[BackendSpec]) -> ServiceSpec {
    let mut backends = backends.to_vec();
    backends.sort_by(|one, other| (one.address, &one.ports).cmp(&(other.address, &other.ports)));
    ServiceSpec {
        name: "Service tenant/api".into(),
        vips: VIPS.map(ip).into(),
        ports: PORTS.iter().map(|&(protocol, port, _)| ServicePortSpec { name: "".into(), protocol, port }).collect(),
        backends,
        source_ranges: vec![],
        affinity: None,
        table_size: 251,
        external: Scope::Cluster,
        internal: Scope::Cluster,
        health: None,
    }
}

/// The Service `api` with a second TCP port, 81, in front of the same target port.
pub fn with_second_port(backends: &[BackendSpec]) -> ServiceSpec {
    let mut api = service(backends);
    api.ports.push(ServicePortSpec { name: "alternative".into(), protocol: 6, port: 81 });
    api.backends.iter_mut().for_each(|backend| backend.ports.push(8080));
    api
}

/// A Service at one VIP, with these TCP ports in front of one target port of these backends.
pub fn tcp_service(name: &str, vip: &str, ports: &[u16], target: u16, backends: &[BackendSpec]) -> ServiceSpec {
    let port = |&port: &u16| ServicePortSpec { name: port.to_string().into(), protocol: 6, port };
    let backend = |it: &BackendSpec| BackendSpec { ports: vec![target; ports.len()], ..it.clone() };
    let api = service(&backends.iter().map(backend).collect::<Vec<_>>());
    ServiceSpec { name: name.into(), vips: vec![ip(vip)], ports: ports.iter().map(port).collect(), ..api }
}

/// The two pods of tenant a, in each address family.
pub fn both_pods() -> Vec<BackendSpec> {
    ["10.244.1.5", "10.244.1.6", "fd00:244:1::5", "fd00:244:1::6"].map(backend).into()
}

/// The test policy with these Services.
pub fn with_services(services: &[ServiceSpec]) -> PolicySet {
    PolicySet { services: services.into(), ..policy() }
}

impl Gateway {
    /// A gateway with one Service.
    pub fn with_service(setup: &Setup, service: &ServiceSpec) -> Self {
        let mut gateway = Self::new(setup);
        gateway.set_service(service);
        gateway
    }

    /// Replaces all Services by this one.
    pub fn set_service(&mut self, service: &ServiceSpec) {
        self.set_policy(&with_services(std::slice::from_ref(service)));
    }

    /// A client's packet at worker 0 that must reach a pod with the client's own address; returns the backend.
    pub fn client_sends(&mut self, packet: &[u8]) -> SocketAddr {
        let received = self.remote_sends(packet);
        let (source, backend) = ends(&received);
        assert_eq!(source, ends(packet).0, "the client's address and port are unchanged");
        backend
    }

    /// A pod's packet at a worker that must be forwarded outside; returns its source and destination as sent.
    pub fn backend_sends(&mut self, worker: usize, packet: &[u8]) -> (SocketAddr, SocketAddr) {
        ends(&self.forwards(worker, INSIDE, packet, OUTSIDE))
    }
}

/// The client of [`CLIENTS`] over IPv4 with another port.
pub fn client(port: u16) -> SocketAddr {
    (at(CLIENTS[0]).ip(), port).into()
}

/// A port of `api` at its IPv4 VIP.
pub fn vip(port: u16) -> SocketAddr {
    (ip(VIPS[0]), port).into()
}
