//! Several gateways between two routers that spread packets over them, and a policy server that all of them reach.
//!
//! ```text
//!   p1 .11, p2 .12 (tenant A), p3 .21 (B), p4 .31 (nobody), crowd (100 addresses of A, 20 of B)
//!         | 10.1.0.0/16
//!      [inside]      sends what leaves to any gateway, by a hash over addresses and ports
//!       |  |  |      10.4.n.0/24
//!     gw-in                     gw-peer 10.2.0.n -- [peers]       what gateways say to each other, and their tunnel
//!     [gw-1] [gw-2] [gw-3] ..   gw-mgmt 10.3.0.n -- [management]  policy server 10.3.0.254
//!     gw-out
//!       |  |  |      203.0.113.0/24, one segment
//!      [outside]     192.0.2.10 (announced by BGP) goes to any gateway, by a hash; 203.0.113.20 (L2) to whoever claims it
//!       |     |
//!   server   far     198.51.100.10, and 198.51.101.10 behind a cable of 1280 bytes
//! ```
//! Everything has its IPv6 twin.

mod cables;
mod captures;
mod clients;
mod gateway;
mod manifests;
mod questions;
mod routes;
mod watch;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vipgate::lab::{Host, Lab, peers};

use crate::ledger::{Ledger, RING_LOSSES};
use crate::policyd::{Plan, Policyd};
use crate::wait_for;

pub use cables::{Impaired, Impairment};
pub use captures::Captures;
pub use clients::{Client, Clients, Download, LineServer, Outcome, Record, Traffic, moment};
pub use gateway::Gateway;
pub use manifests::{CROWD_A, CROWD_B, sources_a, sources_b};
pub use questions::{Answer, Questions, answering};

pub use crate::traffic::script;
pub use watch::{Watch, check_all_different};

/// The VIPs of tenant A, which all gateways share: announced by BGP.
pub const SHARED: [&str; 2] = ["192.0.2.10", "2001:db8:2::10"];
/// The VIPs of tenant B, each of which one gateway has: announced on the segment.
pub const CLAIMED: [&str; 2] = ["203.0.113.20", "2001:db8:113::20"];
/// The server's addresses.
pub const SERVER: [&str; 2] = ["198.51.100.10", "2001:db8:51::10"];
/// The addresses of the host behind a narrow cable.
pub const FAR: [&str; 2] = ["198.51.101.10", "2001:db8:52::10"];
/// What tcpdump calls a pod's packet.
pub const PODS: &str = "(net 10.1.0.0/16 or net fd00:1::/48)";
/// Where [`LineServer`] listens; downloads are one port further.
pub const LINES: u16 = 7700;
/// Where gateways reach each other, TCP and UDP.
pub const PEER: u16 = 4790;
/// Port of the Services at VIPs; pods serve them at [`LINES`].
pub const HTTP: u16 = 80;

/// Where the policy server listens.
pub const POLICYD: &str = "10.3.0.254:18000";
/// What gateways drop and refuse in every scenario.
const ALWAYS: [&str; 2] = [
    // Each receives what the others announce on their segment, and questions for VIPs that another has.
    "not_ours",
    // A gateway that starts calls others whose view may not name it yet, and calls again (`control/src/peer/troubles.rs`).
    "peer_refused",
];
/// The link address of every bridge: no two of them meet.
pub const BRIDGE: &str = "02:00:00:00:00:fe";

/// Gateways and their world. Everything is gone when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    /// The gateways; those that run, and those that don't.
    pub gateways: Vec<Gateway>,
    /// Pods: p1, p2 of tenant A, p3 of tenant B, p4 of nobody.
    pub pods: [Host; 4],
    /// One host with the addresses of many pods.
    pub crowd: Host,
    /// The router between pods and gateways.
    pub inside: Host,
    /// The router between gateways and the world.
    pub outside: Host,
    /// The far side.
    pub server: Host,
    /// A host behind a cable of 1280 bytes.
    pub far: Host,
    /// Somebody on the gateways' own segment who is no gateway.
    pub stranger: Host,
    /// The switch between gateways.
    pub peers: Host,
    /// The host of the policy server.
    pub management: Host,
    /// The policy server, when it runs.
    pub policyd: Option<Policyd>,
    /// Configuration, policy, logs.
    pub folder: TempDir,
    /// What gateways have dropped and refused, and may.
    pub ledger: Arc<Ledger>,
    _lab: Lab,
}

impl Cluster {
    /// The world with so many gateways, none of which runs yet.
    pub fn new(tag: &str, count: usize) -> Self {
        let lab = Lab::new(tag).unwrap();
        let host = |name: &str, forwards| lab.host(name, forwards).unwrap();
        let (inside, outside) = (host("inside", true), host("outside", true));
        // What goes out by one gateway may come back by another.
        for router in [&inside, &outside] {
            either_way(router);
        }
        let (peers, management) = (host("peers", false), host("mgmt", false));
        let (server, far, stranger) = (host("server", false), host("far", false), host("stranger", false));
        for (switch, name) in [(&inside, "pods"), (&outside, "public"), (&peers, "peers"), (&management, "mgmt")] {
            bridge(switch, name);
        }
        inside.addresses("pods", &["10.1.255.254/16", "fd00:1::fe/48"]).unwrap();
        outside.addresses("public", &["203.0.113.254/24", "2001:db8:113::fe/64"]).unwrap();
        management.addresses("mgmt", &["10.3.0.254/24"]).unwrap();

        let pods = [("p1", 11), ("p2", 12), ("p3", 21), ("p4", 31)].map(|(name, number)| {
            let pod = host(name, false);
            plug(&lab, &pod, "eth0", (&inside, name), "pods");
            pod.addresses("eth0", &[&format!("10.1.0.{number}/16"), &format!("fd00:1::{number}/48")]).unwrap();
            pod_routes(&pod);
            pod
        });
        let crowd = host("crowd", false);
        plug(&lab, &crowd, "eth0", (&inside, "crowd"), "pods");
        let folder = TempDir::with_prefix("vipgate-test-").unwrap();
        let add = |address: String| {
            format!("address add {address} dev eth0 {}", ["", "nodad"][usize::from(address.contains(':'))])
        };
        let batch: Vec<String> =
            manifests::crowd().map(|[four, six]| [add(four + "/16"), add(six + "/48")].join("\n")).collect();
        let file = folder.path().join("addresses");
        fs::write(&file, batch.join("\n")).unwrap();
        crowd.ip(&["-batch", &file.display().to_string()]).unwrap();
        pod_routes(&crowd);

        lab.link((&outside, "to-server"), (&server, "eth0"), 1).unwrap();
        outside.addresses("to-server", &["198.51.100.254/24", "2001:db8:51::fe/64"]).unwrap();
        server.addresses("eth0", &[&format!("{}/24", SERVER[0]), &format!("{}/64", SERVER[1])]).unwrap();
        lab.link((&outside, "to-far"), (&far, "eth0"), 1).unwrap();
        outside.addresses("to-far", &["198.51.101.254/24", "2001:db8:52::fe/64"]).unwrap();
        outside.ip(&["link", "set", "to-far", "mtu", "1280"]).unwrap();
        far.addresses("eth0", &[&format!("{}/24", FAR[0]), &format!("{}/64", FAR[1])]).unwrap();
        for (host, net, address) in [(&server, "198.51.100", "51"), (&far, "198.51.101", "52")] {
            host.route("default", &format!("{net}.254")).unwrap();
            host.route("default", &format!("2001:db8:{address}::fe")).unwrap();
        }
        // It sends no more than fits, and would take more.
        far.ip(&["link", "set", "eth0", "mtu", "1280"]).unwrap();
        far.ip(&["-4", "route", "change", "default", "via", "198.51.101.254", "advmss", "1460"]).unwrap();
        far.ip(&["-6", "route", "change", "default", "via", "2001:db8:52::fe", "advmss", "1440"]).unwrap();
        plug(&lab, &stranger, "eth0", (&peers, "stranger"), "peers");
        stranger.addresses("eth0", &["10.2.0.99/24"]).unwrap();

        let ledger = Arc::<Ledger>::default();
        ledger.allow(ALWAYS);
        // All clients share the cores with several gateways' workers. One gateway alone (`World`) must lose nothing, but under load.
        ledger.allow(RING_LOSSES);
        let mut gateways = Vec::new();
        for number in 1..=count {
            let gateway = Gateway::new(&lab, number, folder.path(), ledger.clone());
            either_way(&gateway.host);
            lab.link((&inside, &format!("to-gw{number}")), (&gateway.host, "gw-in"), 1).unwrap();
            inside
                .addresses(
                    &format!("to-gw{number}"),
                    &[&format!("10.4.{number}.254/24"), &format!("fd00:4:{number}::fe/64")],
                )
                .unwrap();
            plug(&lab, &gateway.host, "gw-out", (&outside, &format!("gw{number}")), "public");
            plug(&lab, &gateway.host, "gw-peer", (&peers, &format!("gw{number}")), "peers");
            plug(&lab, &gateway.host, "gw-mgmt", (&management, &format!("gw{number}")), "mgmt");
            gateway.connect();
            gateways.push(gateway);
        }
        peers::start(&server, &SERVER);
        peers::start(&far, &FAR);
        fs::create_dir(folder.path().join("policy")).unwrap();
        let cluster = Self {
            gateways,
            pods,
            crowd,
            inside,
            outside,
            server,
            far,
            stranger,
            peers,
            management,
            policyd: None,
            folder,
            ledger,
            _lab: lab,
        };
        cluster.let_there_be(count);
        cluster.write_policy("tenants.yaml", &manifests::tenants());
        cluster.spread_over(&cluster.all());
        cluster
    }

    /// The same with a policy server and all gateways running, and each of them at work.
    pub fn running(tag: &str, count: usize) -> Self {
        let mut cluster = Self::new(tag, count);
        cluster.start_all("");
        cluster
    }

    /// Starts the policy server and all gateways, with more lines of YAML in their configuration, and waits until all are at work.
    pub fn start_all(&mut self, more: &str) {
        self.start_policyd("");
        for gateway in &mut self.gateways {
            gateway.launch(more);
        }
        for gateway in &mut self.gateways {
            gateway.wait_ready();
        }
        self.wait_whole();
    }

    /// Starts the policy server with more lines of YAML in its configuration, and waits until it is ready.
    pub fn start_policyd(&mut self, more: &str) {
        let plan = Plan { listen: POLICYD, more, ..Plan::default() };
        self.policyd = Some(Policyd::start(&self.management, self.folder.path(), plan));
    }

    /// The numbers of all gateways.
    pub fn all(&self) -> Vec<usize> {
        (0..self.gateways.len()).collect()
    }

    /// The numbers of the gateways but one.
    pub fn but(&self, absent: usize) -> Vec<usize> {
        (0..self.gateways.len()).filter(|number| *number != absent).collect()
    }

    /// Waits until every gateway that runs has all others that run as peers, and serves.
    pub fn wait_whole(&self) {
        let running: Vec<&Gateway> = self.gateways.iter().filter(|gateway| gateway.runs()).collect();
        let begun = Instant::now();
        let whole = || {
            running.len() < 2
                || running.iter().all(|gateway| gateway.peers_up() + 1 == running.len() && gateway.serves())
        };
        let came = wait_for(Duration::from_secs(20), whole);
        let say = |gateway: &Gateway| format!("{}: {} peers\n{}", gateway.name, gateway.peers_up(), gateway.log_tail());
        let said = || running.iter().map(|gateway| say(gateway)).collect::<String>();
        assert!(came, "the gateways don't find each other in {:?}\n{}", begun.elapsed(), said());
    }

    /// Replaces a policy file in one step.
    pub fn write_policy(&self, name: &str, text: &str) {
        let path = self.folder.path().join("policy").join(name);
        let draft = self.folder.path().join("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(draft, path).unwrap();
    }

    /// Policy knows so many gateways, the first ones.
    pub fn let_there_be(&self, count: usize) {
        self.write_policy("gateways.yaml", &manifests::gateways(count));
    }

    /// The sum of a metric's values over all gateways that run.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        self.gateways.iter().filter(|gateway| gateway.runs()).map(|gateway| gateway.metric(name, labels)).sum()
    }

    /// Packets that were dropped for a reason, over all gateways that run.
    pub fn dropped(&self, reason: &str) -> f64 {
        self.metric("vipgate_drops_total", &format!("reason=\"{reason}\""))
    }

    /// All that was dropped, by gateway and reason: for messages.
    pub fn drops(&self) -> String {
        let mut text = String::new();
        for gateway in self.gateways.iter().filter(|gateway| gateway.runs()) {
            let drops = gateway.ask(&["drops"]);
            let some = drops.as_object().into_iter().flatten();
            let some = some.filter(|(_, count)| count.as_u64().is_some_and(|count| count > 0));
            let some: Vec<String> = some.map(|(reason, count)| format!("{count} {reason}")).collect();
            let _ = writeln!(text, "{}: {}", gateway.name, some.join(", "));
        }
        text
    }

    /// Every packet buffer of every gateway is accounted for.
    pub fn check_frames(&self) {
        for gateway in self.gateways.iter().filter(|gateway| gateway.runs()) {
            gateway.check_frames();
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !thread::panicking() {
            for gateway in &mut self.gateways {
                gateway.settle();
            }
            self.ledger.check();
        }
    }
}

/// Lets time pass that the scenario needs.
pub fn pass(milliseconds: u64) {
    thread::sleep(Duration::from_millis(milliseconds));
}

/// How long a scenario that can be long is watched: `VIPGATE_SECONDS`, or so many.
pub fn seconds(default: u64) -> u64 {
    std::env::var("VIPGATE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A host doesn't mind on which interface a packet comes.
fn either_way(host: &Host) {
    for scope in ["all", "default"] {
        host.sysctl(&format!("net.ipv4.conf.{scope}.rp_filter"), 0).unwrap();
    }
}

fn bridge(switch: &Host, name: &str) {
    // Left alone, it takes the lowest address of its ports, and another one when that port is cut off: then nobody would reach it until
    // neighbours are asked for anew.
    switch.ip(&["link", "add", name, "address", BRIDGE, "type", "bridge"]).unwrap();
    switch.ip(&["link", "set", name, "up"]).unwrap();
    // Where the kernel has it, the bridge would look into packets and drop broken ones before a gateway sees them.
    for family in ["iptables", "ip6tables", "arptables"] {
        let _ = switch.sysctl(&format!("net.bridge.bridge-nf-call-{family}"), 0);
    }
}

/// A cable from a host to a switch.
fn plug(lab: &Lab, host: &Host, interface: &str, (switch, port): (&Host, &str), bridge: &str) {
    lab.link((switch, port), (host, interface), 1).unwrap();
    switch.ip(&["link", "set", port, "master", bridge]).unwrap();
}

fn pod_routes(pod: &Host) {
    pod.route("default", "10.1.255.254").unwrap();
    pod.route("default", "fd00:1::fe").unwrap();
}
