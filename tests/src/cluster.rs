//! Testbed of several gateways between two ECMP routers, with a policy server that all of them reach.
//!
//! ```text
//!   p1 .11, p2 .12 (tenant A), p3 .21 (B), p4 .31 (no policy), bulk pods (100 addresses of A, 20 of B)
//!         | 10.1.0.0/16
//!      [inside]      ECMP over the gateways, by a hash over addresses and ports
//!       |  |  |      10.4.n.0/24
//!     gw-in                     gw-peer 10.2.0.n -- [peers]       session replication and the tunnel
//!     [gw-1] [gw-2] [gw-3] ..   gw-mgmt 10.3.0.n -- [management]  policy server 10.3.0.254
//!     gw-out
//!       |  |  |      203.0.113.0/24, one segment
//!      [outside]     192.0.2.10 (BGP) via ECMP to any gateway; 203.0.113.20 (L2) to the gateway that announces it
//!       |     |
//!   server   low-MTU server     198.51.100.10, and 198.51.101.10 behind a link with an MTU of 1280
//! ```
//! Every link but the peer and management networks has IPv4 and IPv6.

mod arp_probe;
mod captures;
mod clients;
mod gateway;
mod links;
mod manifests;
mod monitor;
mod node;
mod routes;

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};

pub use captures::Captures;
pub use clients::{Client, ClientConfig, ClientResults, Clients, Download, LineServer, ServerRecord, unix_time};
pub use gateway::Gateway;
pub use manifests::{BULK_PODS_A, BULK_PODS_B, sources_a, sources_b};
pub use node::{Node, NodePod, TUNNEL_PORT};
use tempfile::TempDir;
pub use vipgate_lab::BRIDGE_MAC;
use vipgate_lab::networks::GroupNetwork;
pub use vipgate_lab::networks::SERVER;
use vipgate_lab::{Host, Lab, reflector};

pub use crate::cluster::arp_probe::{ArpProbe, ArpReply, responder_macs};
pub use crate::cluster::links::{ImpairedSwitch, Impairment};
pub use crate::cluster::monitor::{Monitor, check_unique_tuples};
use crate::drop_accounting::{DropAccounting, RING_LOSSES};
use crate::policyd::{Policyd, PolicydConfig};
pub use crate::traffic::script_path;
use crate::wait_for;

/// VIPs of tenant A, announced by BGP and shared by all gateways.
pub const BGP_VIPS: [&str; 2] = ["192.0.2.10", "2001:db8:2::10"];
/// VIPs of tenant B, announced by L2: each is owned by one gateway.
pub const L2_VIPS: [&str; 2] = ["203.0.113.20", "2001:db8:113::20"];
/// Addresses of the server behind the low-MTU link.
pub const LOW_MTU_SERVER: [&str; 2] = ["198.51.101.10", "2001:db8:52::10"];
/// pcap filter that matches packets with a pod's address.
pub const POD_FILTER: &str = "(net 10.1.0.0/16 or net fd00:1::/48)";
/// Port of [`LineServer`]; downloads use the next one.
pub const LINE_PORT: u16 = 7700;
/// Peer port of the gateways, TCP and UDP.
pub const PEER_PORT: u16 = 4790;
/// Port of the Services at VIPs; their backends listen on [`LINE_PORT`].
pub const HTTP_PORT: u16 = 80;

/// Listen address of the policy server.
pub const POLICYD_ADDRESS: &str = "10.3.0.254:18000";
/// Drops and errors that are allowed in every scenario.
const ALWAYS_ALLOWED: [&str; 2] = [
    // Announcements of other gateways on the segment, and ARP requests for their VIPs.
    "not_ours",
    // A starting gateway connects to peers whose membership view may not contain it yet, and retries.
    "peer_refused",
];

/// Several gateways with their network. Everything is removed on drop.
#[derive(Debug)]
pub struct Cluster {
    /// The gateways, running or not.
    pub gateways: Vec<Gateway>,
    /// p1 and p2 of tenant A, p3 of tenant B, p4 without a policy.
    pub pods: [Host; 4],
    /// One host with the addresses of many pods.
    pub bulk_pods: Host,
    /// The router between pods and gateways.
    pub inside: Host,
    /// The router between gateways and servers.
    pub outside: Host,
    /// The server outside.
    pub server: Host,
    /// A server behind a link with an MTU of 1280 bytes.
    pub low_mtu_server: Host,
    /// A host on the peer network that is no gateway.
    pub unauthenticated_peer: Host,
    /// The switch between gateways.
    pub peers: Host,
    /// The host of the policy server.
    pub management: Host,
    /// The policy server, when it runs.
    pub policyd: Option<Policyd>,
    /// Configuration, policy, logs.
    pub folder: TempDir,
    /// Expected and counted drops and errors of the gateways.
    pub accounting: Arc<DropAccounting>,
    lab: Lab,
}

impl Cluster {
    /// Builds the network with `count` gateways. None of them runs yet.
    pub fn new(tag: &str, count: usize) -> Self {
        let lab = Lab::new(tag).unwrap();
        let network = GroupNetwork::build(&lab).unwrap();
        let host = |name: &str| lab.host(name, false).unwrap();
        let (low_mtu_server, unauthenticated_peer) = (host("low-mtu"), host("intruder"));
        network.inside.addresses("pods", &["10.1.255.254/16", "fd00:1::fe/48"]).unwrap();
        let pods = [("p1", 11), ("p2", 12), ("p3", 21), ("p4", 31)].map(|(name, number)| {
            let pod = host(name);
            lab.attach((&pod, "eth0"), (&network.inside, name), "pods").unwrap();
            pod.addresses("eth0", &[&format!("10.1.0.{number}/16"), &format!("fd00:1::{number}/48")]).unwrap();
            add_pod_routes(&pod);
            pod
        });
        let folder = vipgate_lab::directory().unwrap();
        let bulk_pods = host("bulk");
        connect_bulk_pods(&lab, &bulk_pods, &network.inside, folder.path());
        connect_low_mtu_server(&lab, &low_mtu_server, &network.outside);
        lab.attach((&unauthenticated_peer, "eth0"), (&network.peers, "intruder"), "peers").unwrap();
        unauthenticated_peer.addresses("eth0", &["10.2.0.99/24"]).unwrap();

        let drop_accounting = Arc::<DropAccounting>::default();
        drop_accounting.allow(ALWAYS_ALLOWED);
        // Clients share the cores with several gateways' workers. A single gateway (`Testbed`) must lose nothing,
        // except under load.
        drop_accounting.allow(RING_LOSSES);
        let gateways = (1..=count)
            .map(|number| {
                let host = network.add_gateway(&lab, number, ["10.1.0.0/16", "fd00:1::/48"]).unwrap();
                Gateway::new(host, number, folder.path(), drop_accounting.clone())
            })
            .collect();
        let GroupNetwork { inside, outside, peers, management, server } = network;
        reflector::start(&low_mtu_server, &LOW_MTU_SERVER);
        fs::create_dir(folder.path().join("policy")).unwrap();
        let cluster = Self {
            gateways,
            pods,
            bulk_pods,
            inside,
            outside,
            server,
            low_mtu_server,
            unauthenticated_peer,
            peers,
            management,
            policyd: None,
            folder,
            accounting: drop_accounting,
            lab,
        };
        cluster.define_gateways(&cluster.indices());
        cluster.write_policy("tenants.yaml", &manifests::tenants());
        cluster.route_via(&cluster.indices());
        cluster
    }

    /// Builds the testbed and starts the policy server and all gateways.
    pub fn running(tag: &str, count: usize) -> Self {
        let mut cluster = Self::new(tag, count);
        cluster.start_all("");
        cluster
    }

    /// Starts the policy server and all gateways, with `extra` YAML in the gateways' configuration, and waits until
    /// they have converged.
    pub fn start_all(&mut self, extra: &str) {
        self.start_policyd("");
        self.start_gateways(extra);
    }

    /// Starts all gateways, with `extra` YAML in their configuration, and waits until they have converged.
    pub fn start_gateways(&mut self, extra: &str) {
        for gateway in &mut self.gateways {
            gateway.spawn(extra);
        }
        for gateway in &mut self.gateways {
            gateway.wait_ready();
        }
        self.wait_converged();
    }

    /// Starts the policy server, with `extra` YAML in its configuration, and waits until it is ready.
    pub fn start_policyd(&mut self, extra: &str) {
        let config = PolicydConfig { listen: POLICYD_ADDRESS, extra, ..PolicydConfig::default() };
        self.policyd = Some(Policyd::start(&self.management, self.folder.path(), config));
    }

    /// The same with a command prefix, such as `env` with variables.
    pub fn start_policyd_with(&mut self, wrapper: &[String], extra: &str) {
        let config = PolicydConfig { listen: POLICYD_ADDRESS, extra, ..PolicydConfig::default() };
        let server = Policyd::start_with_wrapper(wrapper, &self.management, self.folder.path(), config);
        self.policyd = Some(server);
    }

    /// Indices of all gateways.
    pub fn indices(&self) -> Vec<usize> {
        (0..self.gateways.len()).collect()
    }

    /// Indices of all gateways except one.
    pub fn indices_except(&self, excluded: usize) -> Vec<usize> {
        (0..self.gateways.len()).filter(|number| *number != excluded).collect()
    }

    /// Waits until every running gateway is active and connected to all other running ones.
    pub fn wait_converged(&self) {
        let running: Vec<&Gateway> = self.gateways.iter().filter(|gateway| gateway.is_running()).collect();
        let started = Instant::now();
        let converged = || {
            running.len() < 2
                || running.iter().all(|gateway| gateway.peers_up() + 1 == running.len() && gateway.is_ready())
        };
        let has_converged = wait_for(Duration::from_secs(20), converged);
        let report =
            |gateway: &Gateway| format!("{}: {} peers\n{}", gateway.name, gateway.peers_up(), gateway.log_tail());
        let reports = || running.iter().map(|gateway| report(gateway)).collect::<String>();
        assert!(has_converged, "the gateways have not converged after {:?}\n{}", started.elapsed(), reports());
    }

    /// Replaces a policy file atomically.
    pub fn write_policy(&self, name: &str, text: &str) {
        let path = self.folder.path().join("policy").join(name);
        let draft = self.folder.path().join("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(draft, path).unwrap();
    }

    /// Writes the manifests of these gateways.
    pub fn define_gateways(&self, gateways: &[usize]) {
        self.write_policy("gateways.yaml", &manifests::gateways(gateways));
    }

    /// The sum of a metric's values over all running gateways.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        self.gateways.iter().filter(|gateway| gateway.is_running()).map(|gateway| gateway.metric(name, labels)).sum()
    }

    /// Packets dropped for a reason, over all running gateways.
    pub fn drop_count(&self, reason: &str) -> f64 {
        self.metric("vipgate_drops_total", &format!("reason=\"{reason}\""))
    }

    /// All drops by gateway and reason, for messages.
    pub fn drop_summary(&self) -> String {
        let mut text = String::new();
        for gateway in self.gateways.iter().filter(|gateway| gateway.is_running()) {
            let drops = gateway.query(&["drops"]);
            let nonzero = drops.as_object().into_iter().flatten();
            let nonzero = nonzero.filter(|(_, count)| count.as_u64().is_some_and(|count| count > 0));
            let nonzero: Vec<String> = nonzero.map(|(reason, count)| format!("{count} {reason}")).collect();
            let _ = writeln!(text, "{}: {}", gateway.name, nonzero.join(", "));
        }
        text
    }

    /// Asserts that every UMEM frame of every gateway is accounted for.
    pub fn check_frames(&self) {
        for gateway in self.gateways.iter().filter(|gateway| gateway.is_running()) {
            gateway.check_frames();
        }
    }

    pub(crate) fn folder_path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !thread::panicking() {
            for gateway in &mut self.gateways {
                gateway.record_counters();
            }
            self.accounting.check();
        }
    }
}

pub fn sleep_ms(milliseconds: u64) {
    thread::sleep(Duration::from_millis(milliseconds));
}

/// Duration of a scenario in seconds: `VIPGATE_SECONDS`, or the default.
pub fn test_seconds(default: u64) -> u64 {
    std::env::var("VIPGATE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn add_pod_routes(pod: &Host) {
    pod.route("default", "10.1.255.254").unwrap();
    pod.route("default", "fd00:1::fe").unwrap();
}

/// Connects the host of the bulk pods, with the addresses of all of them. `folder` takes its batch file.
fn connect_bulk_pods(lab: &Lab, host: &Host, inside: &Host, folder: &Path) {
    lab.attach((host, "eth0"), (inside, "bulk"), "pods").unwrap();
    let add = |address: String| {
        format!("address add {address} dev eth0 {}", ["", "nodad"][usize::from(address.contains(':'))])
    };
    let batch: Vec<String> =
        manifests::bulk_pods().map(|[ipv4, ipv6]| [add(ipv4 + "/16"), add(ipv6 + "/48")].join("\n")).collect();
    let file = folder.join("addresses");
    fs::write(&file, batch.join("\n")).unwrap();
    host.ip(&["-batch", &file.display().to_string()]).unwrap();
    add_pod_routes(host);
}

/// Connects the server whose link has an MTU of 1280, while it advertises a larger MSS.
fn connect_low_mtu_server(lab: &Lab, server: &Host, outside: &Host) {
    lab.link((outside, "to-low-mtu"), (server, "eth0"), 1).unwrap();
    outside.addresses("to-low-mtu", &["198.51.101.254/24", "2001:db8:52::fe/64"]).unwrap();
    outside.ip(&["link", "set", "to-low-mtu", "mtu", "1280"]).unwrap();
    let addresses = [format!("{}/24", LOW_MTU_SERVER[0]), format!("{}/64", LOW_MTU_SERVER[1])];
    server.addresses("eth0", &addresses.each_ref().map(String::as_str)).unwrap();
    server.route("default", "198.51.101.254").unwrap();
    server.route("default", "2001:db8:52::fe").unwrap();
    server.ip(&["link", "set", "eth0", "mtu", "1280"]).unwrap();
    server.ip(&["-4", "route", "change", "default", "via", "198.51.101.254", "advmss", "1460"]).unwrap();
    server.ip(&["-6", "route", "change", "default", "via", "2001:db8:52::fe", "advmss", "1440"]).unwrap();
}
