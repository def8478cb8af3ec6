//! A gateway's host with an inside, an outside and a third link, and what the kernel's network is asked for in tests.
//!
//! pods (gw-in) 10.0.0.0/24, 2001:db8:a::/64; world (gw-out) 192.0.2.0/24, 2001:db8:b::/64; the gateway is .1, the
//! others are .2. The third link, mgmt, isn't the gateway's to poll.

#![allow(dead_code, reason = "every test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use vipgate::kernel::{Network, Wanted};
use vipgate::lab::{Host, Lab};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{HopSpec, NetworkSpec, Role, RouteTarget};

/// The inside interface.
pub(crate) const IN: InterfaceId = InterfaceId(0);
/// The outside interface.
pub(crate) const OUT: InterfaceId = InterfaceId(1);

/// How long something may take that should happen at once; the machine may be busy with other tests.
const PATIENCE: Duration = Duration::from_secs(20);

/// The hosts.
pub(crate) struct Site {
    /// The one under test.
    pub(crate) gateway: Host,
    /// Behind `gw-in`.
    pub(crate) pods: Host,
    /// Behind `gw-out`.
    pub(crate) world: Host,
    _lab: Lab,
}

impl Site {
    /// Builds it.
    pub(crate) fn new(tag: &str) -> Self {
        let lab = Lab::new(tag).unwrap();
        let [gateway, pods, world] = ["gw", "pods", "world"].map(|name| lab.host(name, false).unwrap());
        // Its link-local addresses are there at once: nothing changes later by itself.
        gateway.sysctl("net.ipv6.conf.default.accept_dad", 0).unwrap();
        lab.link((&gateway, "gw-in"), (&pods, "eth0"), 1).unwrap();
        lab.link((&gateway, "gw-out"), (&world, "eth0"), 1).unwrap();
        gateway.addresses("gw-in", &["10.0.0.1/24", "2001:db8:a::1/64"]).unwrap();
        gateway.addresses("gw-out", &["192.0.2.1/24", "2001:db8:b::1/64"]).unwrap();
        pods.addresses("eth0", &["10.0.0.2/24", "2001:db8:a::2/64"]).unwrap();
        world.addresses("eth0", &["192.0.2.2/24", "2001:db8:b::2/64"]).unwrap();
        lab.link((&gateway, "mgmt"), (&pods, "mgmt"), 1).unwrap();
        gateway.addresses("mgmt", &["172.16.0.1/24", "2001:db8:c::1/64"]).unwrap();
        Self { gateway, pods, world, _lab: lab }
    }

    /// Whether the kernel has done what it does a moment after a link has come up: tell so, and give it a link-local
    /// address.
    fn is_at_rest(&self) -> bool {
        // The kernel lists the links when it has told everybody: asked last, no part of the change is still to come.
        let has = |command, what| self.show(command).matches(what).count() == 3;
        has("-6 -o address show scope link -tentative", "inet6 fe80:") && has("-o link show", "state UP")
    }

    /// Runs a test on the gateway's host.
    pub(crate) fn run<F: Future<Output = ()>>(self, test: impl FnOnce(Arc<Self>) -> F + Send + 'static) {
        let site = Arc::new(self);
        let inside = site.clone();
        let thread = site.gateway.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                eventually("links at rest", || inside.is_at_rest()).await;
                test(inside).await;
            });
            Ok(())
        });
        match thread.join() {
            Ok(result) => result.unwrap(),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Runs `ip` on the gateway's host.
    pub(crate) fn ip(&self, command: &str) {
        self.gateway.ip(&command.split(' ').collect::<Vec<_>>()).unwrap();
    }

    /// What `ip` says on the gateway's host.
    pub(crate) fn show(&self, command: &str) -> String {
        self.gateway.output(&[&["ip"][..], &command.split(' ').collect::<Vec<_>>()].concat()).unwrap()
    }

    /// Runs many `ip` commands at once.
    pub(crate) fn batch(&self, commands: &str) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), commands).unwrap();
        self.gateway.ip(&["-batch", file.path().to_str().unwrap()]).unwrap();
    }

    /// Sets a parameter of a host.
    pub(crate) fn sysctl(host: &Host, name: &str, value: u32) {
        host.output(&["sysctl", "-q", "-w", &format!("{name}={value}")]).unwrap();
    }
}

/// The gateway's interfaces.
pub(crate) fn wanted() -> Vec<Wanted> {
    let wanted = |id, name: &str, role| Wanted { id, name: name.into(), role };
    vec![wanted(IN, "gw-in", Role::Inside), wanted(OUT, "gw-out", Role::Outside)]
}

/// The network, followed.
pub(crate) async fn open() -> Network {
    let network = Network::open(wanted()).await.unwrap();
    println!("at first: {:?}", network.current()); // What a failure is compared with.
    network
}

/// Waits until the network is as `fits` says.
pub(crate) async fn until(network: &mut Network, what: &str, fits: impl Fn(&NetworkSpec) -> bool) -> Arc<NetworkSpec> {
    let mut now = network.current();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !fits(&now) {
        let changed = tokio::time::timeout_at(deadline, network.changed()).await;
        let Ok(changed) = changed else { panic!("not within {PATIENCE:?}: {what}\n{now:?}") };
        now = changed.unwrap();
    }
    now
}

/// Waits until something that isn't the network's is so.
pub(crate) async fn eventually(what: &str, fits: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !fits() {
        assert!(tokio::time::Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Asserts that the network stays as it is for a moment.
pub(crate) async fn stays(network: &mut Network) {
    if let Ok(now) = tokio::time::timeout(Duration::from_millis(600), network.changed()).await {
        panic!("changed for no reason: {now:?}");
    }
}

/// Where a prefix leads.
pub(crate) fn route<'a>(network: &'a NetworkSpec, prefix: &str) -> Option<&'a RouteTarget> {
    let prefix = prefix.parse().unwrap();
    let mut found = network.routes.iter().filter(|route| route.prefix == prefix);
    let target = found.next().map(|route| &route.target);
    assert!(found.next().is_none(), "{prefix} is there twice");
    target
}

/// To these next hops, in the order that the engine gets; no gateway: on the link.
pub(crate) fn via(hops: &[(InterfaceId, &str)]) -> RouteTarget {
    let hop = |&(interface, gateway): &(InterfaceId, &str)| HopSpec { interface, gateway: gateway.parse().ok() };
    let mut hops: Vec<HopSpec> = hops.iter().map(hop).collect();
    hops.sort_by_key(|hop| (hop.interface, hop.gateway));
    RouteTarget::Via(hops)
}

/// The link address of a neighbour.
pub(crate) fn neighbour(network: &NetworkSpec, interface: InterfaceId, address: &str) -> Option<[u8; 6]> {
    let address = ip(address);
    network.neighbours.iter().find(|n| n.interface == interface && n.address == address).map(|n| n.mac)
}

/// An address.
pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The link address of a host's interface.
pub(crate) fn mac(host: &Host, interface: &str) -> [u8; 6] {
    let text = host.output(&["cat", &format!("/sys/class/net/{interface}/address")]).unwrap();
    let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}
