//! Testbed of the flood benchmark: namespaces, links, and the gateway.
//!
//! ```text
//!   [pods] eth0 ------- gw-in [gateway] gw-out ------- eth0 [external]
//!   tenant A 10.1.4.1-16, active                        203.0.113.254, default router
//!   tenant B 10.1.8.1-8, unassigned or backends         198.51.100.1-16, tenant A's remote hosts
//! ```
//! Tenant B's pod addresses are assigned only if the flood needs backends; their kernel then answers SYNs. All
//! addresses have IPv6 counterparts. The VIPs are 203.0.113.10 for tenant A and .20 for tenant B; the gateway's kernel
//! drops packets to .77 (blackhole route).

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use tempfile::TempDir;
use vipgate_dataplane::wire::ethernet::Mac;
use vipgate_tests::flood::{FloodKind, FloodTarget, Ip};

use crate::netns::{self, Namespace};
use crate::process::Process;
use crate::veth::{VethConfig, add_veth_pair, format_mac};
use crate::wire::system_under_test::SutConfig;
use crate::wire::vipgate::{PolicySource, Vipgate};

/// Number of tenant A's pods and remote hosts, and of tenant B's pods.
pub(super) const PODS_A: u32 = 16;
pub(super) const PODS_B: u32 = 8;
/// TCP and UDP port of the Services.
pub(super) const SERVICE_PORTS: [u16; 2] = [80, 53];
/// Listening ports of pods and of remote hosts.
pub(super) const POD_PORT: u16 = 8080;
pub(super) const REMOTE_PORT: u16 = 7000;
/// MAC addresses.
const PODS_MAC: Mac = [2, 0, 0, 0, 1, 1];
const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
const EXTERNAL_MAC: Mac = [2, 0, 0, 0, 2, 1];

/// Addresses by family, IPv4 first.
pub(super) const VIP_A: [&str; 2] = ["203.0.113.10", "2001:db8:113::10"];
pub(super) const VIP_B: [&str; 2] = ["203.0.113.20", "2001:db8:113::20"];
/// Destination of control packets from outside: no VIP, blackholed by the gateway's kernel.
const UNCAPTURED: [&str; 2] = ["203.0.113.77", "2001:db8:113::77"];
/// Destination and source of control packets from inside.
const BLACKHOLED: [&str; 2] = ["192.0.2.77", "2001:db8:2::77"];
const UNCOVERED_POD: [&str; 2] = ["10.1.9.9", "fd00:1::9:9"];

/// Address of a pod of tenant A.
pub(super) fn tenant_a_pod(family: usize, number: u32) -> String {
    [format!("10.1.4.{}", number + 1), format!("fd00:1::4:{:x}", number + 1)][family].clone()
}

/// Address of a pod of tenant B.
pub(super) fn tenant_b_pod(family: usize, number: u32) -> String {
    [format!("10.1.8.{}", number + 1), format!("fd00:1::8:{:x}", number + 1)][family].clone()
}

/// Address of a remote host of tenant A.
pub(super) fn tenant_a_remote(family: usize, number: u32) -> String {
    [format!("198.51.100.{}", number + 1), format!("2001:db8:51::{:x}", number + 1)][family].clone()
}

/// The namespaces and the gateway; removed on drop.
#[derive(Debug)]
pub(super) struct Testbed {
    /// Dropped before the namespaces.
    gateway_pid: Process,
    pub(super) vipgate: Vipgate,
    pub(super) pods: Namespace,
    pub(super) external: Namespace,
    has_backends: bool,
    _gateway: Namespace,
    _directory: TempDir,
}

impl Testbed {
    /// Builds the testbed and starts a gateway with this session capacity. `has_backends`: assign tenant B's pod
    /// addresses.
    pub(super) fn build(config: &SutConfig, capacity: u32, has_backends: bool) -> Result<Self> {
        let [pods, gateway, world] =
            [Namespace::create("pods")?, Namespace::create("gateway")?, Namespace::create("external")?];
        for host in [&pods, &gateway, &world] {
            let v6 = "net.ipv6.conf.default";
            host.exec(&["sysctl", "-q", "-w", &format!("{v6}.disable_ipv6=0"), &format!("{v6}.accept_dad=0")])?;
        }
        add_veth_pair((&pods, "eth0", PODS_MAC), (&gateway, "gw-in", INSIDE_MAC), VethConfig::default())?;
        add_veth_pair((&gateway, "gw-out", OUTSIDE_MAC), (&world, "eth0", EXTERNAL_MAC), VethConfig::default())?;
        gateway.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"])?;
        // The default range would be exhausted by connections in TIME_WAIT.
        for host in [&pods, &world] {
            host.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=10000 65535"])?;
        }
        if has_backends {
            // SYN cookies, independent of this machine's default: backends keep no state beyond `tenant::BACKLOG`.
            pods.exec(&["sysctl", "-q", "-w", "net.ipv4.tcp_syncookies=1"])?;
        }
        let directory =
            TempDir::with_prefix(netns::run_name("")).context("cannot create a directory for the configuration")?;
        ip_batch(&pods, &directory, &pods_network(has_backends))?;
        ip_batch(&gateway, &directory, &gateway_network())?;
        ip_batch(&world, &directory, &external_network())?;
        let vipgate = Vipgate::configure(config, capacity, None, &PolicySource::File, directory.path())?;
        fs::write(directory.path().join("policy.yaml"), manifests())?;
        let process = Process::from(vipgate.start(&gateway)?);
        Ok(Self {
            gateway_pid: process,
            vipgate,
            pods,
            external: world,
            has_backends,
            _gateway: gateway,
            _directory: directory,
        })
    }

    /// Process ID of the gateway.
    pub(super) fn gateway_pid(&self) -> u32 {
        self.gateway_pid.pid()
    }

    /// The namespace that a flood is sent from.
    pub(super) fn attacker(&self, kind: FloodKind) -> &Namespace {
        if kind.is_inside() { &self.pods } else { &self.external }
    }

    /// SYN cookies sent by tenant B's backends, which is nearly all of their SYN-ACKs; 0 without backends.
    pub(super) fn backend_syn_acks(&self) -> Result<u64> {
        if !self.has_backends {
            return Ok(0);
        }
        let netstat = self.pods.exec(&["cat", "/proc/net/netstat"])?;
        tcp_counter(&netstat, "SyncookiesSent").context("/proc/net/netstat has no SyncookiesSent")
    }
}

/// A TCP counter from /proc/net/netstat: a line of names, followed by a line of values.
fn tcp_counter(netstat: &str, name: &str) -> Option<u64> {
    let mut lines = netstat.lines().skip_while(|line| !line.starts_with("TcpExt:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let column = names.split(' ').position(|it| it == name)?;
    values.split(' ').nth(column)?.parse().ok()
}

/// Destination of a flood, or of its control: the same packets to an address that the gateway doesn't capture.
pub(super) fn target(kind: FloodKind, family: usize, is_control: bool) -> FloodTarget {
    if kind.is_inside() {
        let pod = if is_control { UNCOVERED_POD[family].to_owned() } else { tenant_b_pod(family, 0) };
        let only = is_control.then(|| Ip::parse(BLACKHOLED[family]));
        return FloodTarget {
            macs: [INSIDE_MAC, PODS_MAC],
            address: Ip::parse(&pod),
            ports: SERVICE_PORTS,
            fixed_destination: only,
        };
    }
    let address = if is_control { UNCAPTURED } else { VIP_B }[family];
    FloodTarget {
        macs: [OUTSIDE_MAC, EXTERNAL_MAC],
        address: Ip::parse(address),
        ports: SERVICE_PORTS,
        fixed_destination: None,
    }
}

/// Addresses and routes of the pods' host, as input of `ip -batch`.
fn pods_network(has_backends: bool) -> String {
    let mut text = String::new();
    let mut add = |pod: fn(usize, u32) -> String, count| {
        for number in 0..count {
            let [v4, v6] = [0, 1].map(|family| pod(family, number));
            let _ = write!(text, "address add {v4}/16 dev eth0\naddress add {v6}/64 dev eth0 nodad\n");
        }
    };
    add(tenant_a_pod, PODS_A);
    if has_backends {
        add(tenant_b_pod, PODS_B);
    }
    text + "route add default via 10.1.0.1 dev eth0 onlink\nroute add default via fd00:1::1 dev eth0 onlink\n"
}

fn external_network() -> String {
    let mut text = String::from(
        "address add 203.0.113.254/24 dev eth0\naddress add 2001:db8:113::fe/64 dev eth0 nodad\n\
         route add 10.1.0.0/16 via 203.0.113.1\nroute add fd00:1::/64 via 2001:db8:113::1\n",
    );
    for number in 0..PODS_A {
        let [v4, v6] = [0, 1].map(|family| tenant_a_remote(family, number));
        let _ = write!(text, "address add {v4}/32 dev eth0\naddress add {v6}/128 dev eth0 nodad\n");
    }
    text
}

fn gateway_network() -> String {
    let mut text = String::from(
        "address add 10.1.0.1/16 dev gw-in\naddress add fd00:1::1/64 dev gw-in nodad\n\
         address add 203.0.113.1/24 dev gw-out\naddress add 2001:db8:113::1/64 dev gw-out nodad\n\
         route add default via 203.0.113.254\nroute add default via 2001:db8:113::fe\n",
    );
    for family in 0..2 {
        for address in [UNCAPTURED[family], BLACKHOLED[family]] {
            let _ = writeln!(text, "route add blackhole {address}");
        }
        for number in 0..PODS_B {
            let (pod, mac) = (tenant_b_pod(family, number), format_mac(PODS_MAC));
            let _ = writeln!(text, "neigh add {pod} lladdr {mac} dev gw-in nud permanent");
        }
    }
    text
}

fn ip_batch(host: &Namespace, directory: &TempDir, text: &str) -> Result<()> {
    let path = directory.path().join("ip");
    fs::write(&path, text)?;
    host.exec(&["ip", "-batch", &path.display().to_string()]).map(drop)
}

/// Two tenants, each with a TCP and UDP Service at an IPv4 and an IPv6 VIP, which are also the egress VIPs of its pods.
fn manifests() -> String {
    let mut text = String::new();
    for (tenant, vips, pods) in [("a", VIP_A, PODS_A), ("b", VIP_B, PODS_B)] {
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: tenant-{tenant}}}\n\
             ---\napiVersion: v1\nkind: Service\n\
             metadata: {{name: api, namespace: tenant-{tenant}, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
             spec:\n  type: LoadBalancer\n  ports:\n\
             \x20   - {{name: http, port: {}, targetPort: {POD_PORT}, protocol: TCP}}\n\
             \x20   - {{name: dns, port: {}, targetPort: 5353, protocol: UDP}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: {}}}, {{ip: \"{}\"}}]}}}}\n",
            SERVICE_PORTS[0], SERVICE_PORTS[1], vips[0], vips[1]
        );
        for (family, name) in ["IPv4", "IPv6"].into_iter().enumerate() {
            let _ = write!(
                text,
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{name: api-{}, namespace: tenant-{tenant}, labels: {{kubernetes.io/service-name: api}}}}\n\
                 addressType: {name}\n\
                 ports: [{{name: http, port: {POD_PORT}}}, {{name: dns, port: 5353, protocol: UDP}}]\n\
                 endpoints:\n",
                name.to_lowercase()
            );
            for number in 0..pods {
                let pod = if tenant == "a" { tenant_a_pod(family, number) } else { tenant_b_pod(family, number) };
                let _ = writeln!(text, "  - {{addresses: [\"{pod}\"], conditions: {{ready: true}}}}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_b_addresses_are_assigned_only_with_backends() {
        for number in 0..PODS_B {
            let add = [0, 1].map(|family| format!("address add {}/", tenant_b_pod(family, number)));
            assert!(
                add.iter().all(|add| pods_network(true).contains(add) && !pods_network(false).contains(add)),
                "{add:?}"
            );
        }
        assert_eq!(pods_network(false).matches("address add ").count(), 2 * PODS_A as usize);
        assert!(pods_network(false).ends_with("via fd00:1::1 dev eth0 onlink\n"));
    }

    #[test]
    fn tcp_counters_are_found_by_name() {
        let text = "TcpExt: SyncookiesSent SyncookiesRecv\nTcpExt: 77 5\nIpExt: InNoRoutes\nIpExt: 3\n";
        assert_eq!((tcp_counter(text, "SyncookiesSent"), tcp_counter(text, "SyncookiesRecv")), (Some(77), Some(5)));
        assert_eq!((tcp_counter(text, "InNoRoutes"), tcp_counter("", "SyncookiesSent")), (None, None));
    }
}
