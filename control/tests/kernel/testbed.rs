//! Testbed for tests of kernel networking: a gateway host with an inside, an outside and a third interface, its peer
//! hosts, and helpers for assertions.
//!
//! pods (gw-in) 10.0.0.0/24, 2001:db8:a::/64; external (gw-out) 192.0.2.0/24, 2001:db8:b::/64; the gateway is .1, the
//! other hosts are .2. The third interface, mgmt, isn't used by the gateway.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use vipgate::kernel::{InterfaceConfig, Network};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{HopSpec, NetworkSpec, Role, RouteTarget};
use vipgate_lab::{Host, Lab};

/// The inside interface.
pub(crate) const IN: InterfaceId = InterfaceId(0);
/// The outside interface.
pub(crate) const OUT: InterfaceId = InterfaceId(1);

/// Timeout of all waits, long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The hosts of the testbed.
pub(crate) struct Testbed {
    /// The host under test.
    pub(crate) gateway: Host,
    /// Behind `gw-in`.
    pub(crate) pods: Host,
    /// Behind `gw-out`.
    pub(crate) external: Host,
    _lab: Lab,
}

impl Testbed {
    /// Creates the hosts and links.
    pub(crate) fn new(tag: &str) -> Self {
        let lab = Lab::new(tag).unwrap();
        let [gateway, pods, external] = ["gw", "pods", "external"].map(|name| lab.host(name, false).unwrap());
        lab.link((&gateway, "gw-in"), (&pods, "eth0"), 1).unwrap();
        lab.link((&gateway, "gw-out"), (&external, "eth0"), 1).unwrap();
        gateway.addresses("gw-in", &["10.0.0.1/24", "2001:db8:a::1/64"]).unwrap();
        gateway.addresses("gw-out", &["192.0.2.1/24", "2001:db8:b::1/64"]).unwrap();
        pods.addresses("eth0", &["10.0.0.2/24", "2001:db8:a::2/64"]).unwrap();
        external.addresses("eth0", &["192.0.2.2/24", "2001:db8:b::2/64"]).unwrap();
        lab.link((&gateway, "mgmt"), (&pods, "mgmt"), 1).unwrap();
        gateway.addresses("mgmt", &["172.16.0.1/24", "2001:db8:c::1/64"]).unwrap();
        Self { gateway, pods, external, _lab: lab }
    }

    /// Whether the kernel has completed link-up: all interfaces are reported as up and have link-local addresses.
    fn interfaces_are_up(&self) -> bool {
        // The link list is checked last: the kernel sends all notifications of a change before it lists the new state.
        let has = |command, text| self.show(command).matches(text).count() == 3;
        has("-6 -o address show scope link -tentative", "inet6 fe80:") && has("-o link show", "state UP")
    }

    /// Runs a test on the gateway's host.
    pub(crate) fn run<F: Future<Output = ()>>(self, test: impl FnOnce(Arc<Self>) -> F + Send + 'static) {
        let testbed = Arc::new(self);
        let on_host = testbed.clone();
        let thread = testbed.gateway.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                eventually("interfaces up", || on_host.interfaces_are_up()).await;
                test(on_host).await;
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

    /// Output of `ip` on the gateway's host.
    pub(crate) fn show(&self, command: &str) -> String {
        self.gateway.output(&[&["ip"][..], &command.split(' ').collect::<Vec<_>>()].concat()).unwrap()
    }

    /// Runs many `ip` commands as a batch.
    pub(crate) fn batch(&self, commands: &str) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), commands).unwrap();
        self.gateway.ip(&["-batch", file.path().to_str().unwrap()]).unwrap();
    }

    /// Sets a sysctl of a host.
    pub(crate) fn sysctl(host: &Host, name: &str, value: u32) {
        host.output(&["sysctl", "-q", "-w", &format!("{name}={value}")]).unwrap();
    }
}

/// The gateway's interfaces.
pub(crate) fn wanted() -> Vec<InterfaceConfig> {
    let wanted = |id, name: &str, role| InterfaceConfig { id, name: name.into(), role };
    vec![wanted(IN, "gw-in", Role::Inside), wanted(OUT, "gw-out", Role::Outside)]
}

/// Opens the network watcher.
pub(crate) async fn open() -> Network {
    let network = Network::open(wanted()).await.unwrap();
    println!("initial state: {:?}", network.current()); // For the analysis of failures.
    network
}

/// Waits until the network state fulfils a condition.
pub(crate) async fn until(
    network: &mut Network,
    what: &str,
    is_met: impl Fn(&NetworkSpec) -> bool,
) -> Arc<NetworkSpec> {
    let mut now = network.current();
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while !is_met(&now) {
        let changed = tokio::time::timeout_at(deadline, network.changed()).await;
        let Ok(changed) = changed else { panic!("not within {TIMEOUT:?}: {what}\n{now:?}") };
        now = changed.unwrap();
    }
    now
}

/// Waits until a condition outside the network state is met.
pub(crate) async fn eventually(what: &str, is_met: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while !is_met() {
        assert!(tokio::time::Instant::now() < deadline, "not within {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Asserts that the network state doesn't change within 600 ms.
pub(crate) async fn assert_unchanged(network: &mut Network) {
    if let Ok(now) = tokio::time::timeout(Duration::from_millis(600), network.changed()).await {
        panic!("unexpected change: {now:?}");
    }
}

/// The target of a route.
pub(crate) fn route<'a>(network: &'a NetworkSpec, prefix: &str) -> Option<&'a RouteTarget> {
    let prefix = prefix.parse().unwrap();
    let mut routes = network.routes.iter().filter(|route| route.prefix == prefix);
    let target = routes.next().map(|route| &route.target);
    assert!(routes.next().is_none(), "duplicate route for {prefix}");
    target
}

/// A route target with these next hops, in the order of the engine; an empty gateway means on-link.
pub(crate) fn via(hops: &[(InterfaceId, &str)]) -> RouteTarget {
    let hop = |&(interface, gateway): &(InterfaceId, &str)| HopSpec { interface, gateway: gateway.parse().ok() };
    let mut hops: Vec<HopSpec> = hops.iter().map(hop).collect();
    hops.sort_by_key(|hop| (hop.interface, hop.gateway));
    RouteTarget::Via(hops)
}

/// The MAC address of a neighbor.
pub(crate) fn neighbor(network: &NetworkSpec, interface: InterfaceId, address: &str) -> Option<[u8; 6]> {
    let address = ip(address);
    network.neighbors.iter().find(|n| n.interface == interface && n.address == address).map(|n| n.mac)
}

/// Parses an address.
pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The MAC address of a host's interface.
pub(crate) fn mac(host: &Host, interface: &str) -> [u8; 6] {
    let text = host.output(&["cat", &format!("/sys/class/net/{interface}/address")]).unwrap();
    let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}
