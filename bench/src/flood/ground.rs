//! The network of a flood, and the gateway in it:
//!
//! ```text
//!   [pods] eth0 ------- gw-in [gateway] gw-out ------- eth0 [world]
//!   tenant A 10.1.4.1-16, who are there                 203.0.113.254, router to everybody
//!   tenant B 10.1.8.1-8, silent or backends             198.51.100.1-16, tenant A's far sides
//! ```
//! Tenant B's pods are silent: nobody has their addresses. Where the attack needs backends, the pods' kernel answers SYNs for them.
//! Everything has its IPv6 twin. The VIPs are tenant A's 203.0.113.10 and tenant B's .20; what is for .77 the gateway's kernel drops.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use tempfile::TempDir;
use vipgate_dataplane::wire::ethernet::Mac;
use vipgate_tests::flood::{Ip, Kind, Target};

use crate::netns::{self, Namespace};
use crate::process::Process;
use crate::wire::subject::Setting;
use crate::wire::vipgate::{Policy, Vipgate};

/// Pods of tenant A, and of tenant B; far sides.
pub(super) const PODS_A: u32 = 16;
pub(super) const PODS_B: u32 = 8;
/// The Services' ports: of TCP, and of UDP.
pub(super) const SERVICE: [u16; 2] = [80, 53];
/// Where servers listen: pods, and far sides.
pub(super) const POD_PORT: u16 = 8080;
pub(super) const FAR_PORT: u16 = 7000;
/// Link addresses.
const PODS_MAC: Mac = [2, 0, 0, 0, 1, 1];
const INSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x10];
const OUTSIDE_MAC: Mac = [2, 0, 0, 0, 0, 0x20];
const WORLD_MAC: Mac = [2, 0, 0, 0, 2, 1];

/// Which addresses of both families play which part, IPv4 first.
pub(super) const VIP_A: [&str; 2] = ["203.0.113.10", "2001:db8:113::10"];
pub(super) const VIP_B: [&str; 2] = ["203.0.113.20", "2001:db8:113::20"];
const NOBODY: [&str; 2] = ["203.0.113.77", "2001:db8:113::77"];
const NOWHERE: [&str; 2] = ["192.0.2.77", "2001:db8:2::77"];
const STRANGE_POD: [&str; 2] = ["10.1.9.9", "fd00:1::9:9"];

/// A pod of tenant A, by its number.
pub(super) fn pod_a(family: usize, number: u32) -> String {
    [format!("10.1.4.{}", number + 1), format!("fd00:1::4:{:x}", number + 1)][family].clone()
}

/// A pod of tenant B.
pub(super) fn pod_b(family: usize, number: u32) -> String {
    [format!("10.1.8.{}", number + 1), format!("fd00:1::8:{:x}", number + 1)][family].clone()
}

/// A far side of tenant A.
pub(super) fn far(family: usize, number: u32) -> String {
    [format!("198.51.100.{}", number + 1), format!("2001:db8:51::{:x}", number + 1)][family].clone()
}

/// The namespaces and the gateway; dropping them removes everything.
#[derive(Debug)]
pub(super) struct Ground {
    /// Ends before the namespaces do.
    process: Process,
    pub(super) vipgate: Vipgate,
    pub(super) pods: Namespace,
    pub(super) world: Namespace,
    has_backends: bool,
    _gateway: Namespace,
    _folder: TempDir,
}

impl Ground {
    /// Builds it, and starts a gateway whose table has room for so many sessions. `has_backends`: tenant B's pods have their addresses.
    pub(super) fn build(setting: &Setting, capacity: u32, has_backends: bool) -> Result<Self> {
        let [pods, gateway, world] =
            [Namespace::create("pods")?, Namespace::create("gateway")?, Namespace::create("world")?];
        for host in [&pods, &gateway, &world] {
            let v6 = "net.ipv6.conf.default";
            host.exec(&["sysctl", "-q", "-w", &format!("{v6}.disable_ipv6=0"), &format!("{v6}.accept_dad=0")])?;
        }
        link((&pods, "eth0", PODS_MAC), (&gateway, "gw-in", INSIDE_MAC))?;
        link((&gateway, "gw-out", OUTSIDE_MAC), (&world, "eth0", WORLD_MAC))?;
        gateway.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"])?;
        // So many connections come and go that those that have ended would take all ports.
        for host in [&pods, &world] {
            host.exec(&["sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=10000 65535"])?;
        }
        if has_backends {
            // Backends answer without state beyond their backlog, whatever the default of this machine is: `tenant::BACKLOG`.
            pods.exec(&["sysctl", "-q", "-w", "net.ipv4.tcp_syncookies=1"])?;
        }
        let folder = TempDir::with_prefix(netns::name("")).context("cannot make a folder for configuration")?;
        batch(&pods, &folder, &of_pods(has_backends))?;
        batch(&gateway, &folder, &of_gateway())?;
        batch(&world, &folder, &of_world())?;
        let vipgate = Vipgate::configure(setting, capacity, None, &Policy::Pods, folder.path())?;
        fs::write(folder.path().join("policy.yaml"), manifests())?;
        let process = Process::from(vipgate.start(&gateway)?);
        Ok(Self { process, vipgate, pods, world, has_backends, _gateway: gateway, _folder: folder })
    }

    /// The gateway's process.
    pub(super) fn process(&self) -> u32 {
        self.process.id()
    }

    /// Where a flood of a kind comes from.
    pub(super) fn attacker(&self, kind: Kind) -> &Namespace {
        if kind.is_inside() { &self.pods } else { &self.world }
    }

    /// SYNs that tenant B's backends have answered with SYN cookies, which is all but a few; 0 where its pods are silent.
    pub(super) fn answered(&self) -> Result<u64> {
        if !self.has_backends {
            return Ok(0);
        }
        let counters = self.pods.exec(&["cat", "/proc/net/netstat"])?;
        counter(&counters, "SyncookiesSent").context("this kernel counts no SYN cookies")
    }
}

/// A counter of TCP: /proc/net/netstat has a line of names and, below it, one of values.
fn counter(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with("TcpExt:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let place = names.split(' ').position(|it| it == name)?;
    values.split(' ').nth(place)?.parse().ok()
}

/// Where a flood of a kind goes; or the same as far as the gateway, which doesn't capture it.
pub(super) fn target(kind: Kind, family: usize, is_control: bool) -> Target {
    if kind.is_inside() {
        let pod = if is_control { STRANGE_POD[family].to_owned() } else { pod_b(family, 0) };
        let only = is_control.then(|| Ip::of(NOWHERE[family]));
        return Target { link: [INSIDE_MAC, PODS_MAC], address: Ip::of(&pod), ports: SERVICE, only };
    }
    let address = if is_control { NOBODY } else { VIP_B }[family];
    Target { link: [OUTSIDE_MAC, WORLD_MAC], address: Ip::of(address), ports: SERVICE, only: None }
}

/// Addresses of an interface, and routes: what `ip -batch` reads.
fn of_pods(has_backends: bool) -> String {
    let mut text = String::new();
    let mut add = |pod: fn(usize, u32) -> String, count| {
        for number in 0..count {
            let [four, six] = [0, 1].map(|family| pod(family, number));
            let _ = write!(text, "address add {four}/16 dev eth0\naddress add {six}/64 dev eth0 nodad\n");
        }
    };
    add(pod_a, PODS_A);
    if has_backends {
        add(pod_b, PODS_B);
    }
    text + "route add default via 10.1.0.1 dev eth0 onlink\nroute add default via fd00:1::1 dev eth0 onlink\n"
}

fn of_world() -> String {
    let mut text = String::from(
        "address add 203.0.113.254/24 dev eth0\naddress add 2001:db8:113::fe/64 dev eth0 nodad\n\
         route add 10.1.0.0/16 via 203.0.113.1\nroute add fd00:1::/64 via 2001:db8:113::1\n",
    );
    for number in 0..PODS_A {
        let [four, six] = [0, 1].map(|family| far(family, number));
        let _ = write!(text, "address add {four}/32 dev eth0\naddress add {six}/128 dev eth0 nodad\n");
    }
    text
}

fn of_gateway() -> String {
    let mut text = String::from(
        "address add 10.1.0.1/16 dev gw-in\naddress add fd00:1::1/64 dev gw-in nodad\n\
         address add 203.0.113.1/24 dev gw-out\naddress add 2001:db8:113::1/64 dev gw-out nodad\n\
         route add default via 203.0.113.254\nroute add default via 2001:db8:113::fe\n",
    );
    for family in 0..2 {
        for address in [NOBODY[family], NOWHERE[family]] {
            let _ = writeln!(text, "route add blackhole {address}");
        }
        for number in 0..PODS_B {
            let (pod, mac) = (pod_b(family, number), mac(PODS_MAC));
            let _ = writeln!(text, "neigh add {pod} lladdr {mac} dev gw-in nud permanent");
        }
    }
    text
}

fn batch(host: &Namespace, folder: &TempDir, text: &str) -> Result<()> {
    let path = folder.path().join("ip");
    fs::write(&path, text)?;
    host.exec(&["ip", "-batch", &path.display().to_string()]).map(drop)
}

/// Two tenants, each with a Service of TCP and UDP at a VIP of each family, by which its pods leave, too.
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
            SERVICE[0], SERVICE[1], vips[0], vips[1]
        );
        for (family, name) in ["IPv4", "IPv6"].into_iter().enumerate() {
            let _ = write!(
                text,
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{name: api-{}, namespace: tenant-{tenant}, labels: {{kubernetes.io/service-name: api}}}}\n\
                 addressType: {name}\nports: [{{name: http, port: {POD_PORT}}}, {{name: dns, port: 5353, protocol: UDP}}]\n\
                 endpoints:\n",
                name.to_lowercase()
            );
            for number in 0..pods {
                let pod = if tenant == "a" { pod_a(family, number) } else { pod_b(family, number) };
                let _ = writeln!(text, "  - {{addresses: [\"{pod}\"], conditions: {{ready: true}}}}");
            }
        }
    }
    text
}

/// A cable with one queue and without offloads: a frame on it is what a frame on a wire would be.
fn link(one: (&Namespace, &str, Mac), other: (&Namespace, &str, Mac)) -> Result<()> {
    let end = |(host, name, address): (&Namespace, &str, Mac)| {
        let words =
            ["name", name, "netns", host.name(), "address", &mac(address), "numtxqueues", "1", "numrxqueues", "1"];
        words.map(str::to_owned)
    };
    let (one_end, other_end) = (end(one), end(other));
    let words: Vec<&str> = ["ip", "link", "add"]
        .into_iter()
        .chain(one_end.iter().map(String::as_str))
        .chain(["type", "veth", "peer"])
        .chain(other_end.iter().map(String::as_str))
        .collect();
    netns::output(&words)?;
    for (host, interface, _) in [one, other] {
        let off = ["rx", "off", "tx", "off", "sg", "off", "tso", "off", "gso", "off", "gro", "off"];
        host.exec(&[&["ethtool", "-K", interface], &off[..]].concat())?;
        host.exec(&["ip", "link", "set", interface, "up"])?;
    }
    Ok(())
}

fn mac(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_backends_have_addresses() {
        for number in 0..PODS_B {
            let add = [0, 1].map(|family| format!("address add {}/", pod_b(family, number)));
            assert!(add.iter().all(|add| of_pods(true).contains(add) && !of_pods(false).contains(add)), "{add:?}");
        }
        assert_eq!(of_pods(false).matches("address add ").count(), 2 * PODS_A as usize);
        assert!(of_pods(false).ends_with("via fd00:1::1 dev eth0 onlink\n"));
    }

    #[test]
    fn counters_of_tcp_are_found_by_name() {
        let text = "TcpExt: SyncookiesSent SyncookiesRecv\nTcpExt: 77 5\nIpExt: InNoRoutes\nIpExt: 3\n";
        assert_eq!((counter(text, "SyncookiesSent"), counter(text, "SyncookiesRecv")), (Some(77), Some(5)));
        assert_eq!((counter(text, "InNoRoutes"), counter("", "SyncookiesSent")), (None, None));
    }
}
