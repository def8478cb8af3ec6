//! The second act's network: pods, two gateways between two routers, and the policy server that they follow.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use crate::demo::program::{Program, ask};
use crate::demo::topology::SERVER;
use crate::failure::Failure;
use crate::lab::{Error, Host, Lab, peers};

/// Tenant C's VIPs, at which either gateway is reached.
pub(in crate::demo) const VIPS: [&str; 2] = ["192.0.2.10", "2001:db8:2::10"];
/// The pods, tenant C's.
pub(super) const PODS: [(&str, [&str; 2]); 2] =
    [("pod-c1", ["10.1.0.31", "fd00:1::31"]), ("pod-c2", ["10.1.0.32", "fd00:1::32"])];
/// Networks whose addresses must not be seen outside.
pub(super) const POD_NETWORKS: [&str; 2] = ["10.1.0.0/24", "fd00:1::/64"];
/// The switch between gateways and outside router, an interface of the latter.
pub(super) const PUBLIC: &str = "public";
/// The port on which pods serve.
const SERVED: u16 = 8080;
/// Where gateways find the policy server.
const POLICYD: &str = "10.3.0.254:18000";
/// Where gateways reach each other, TCP and UDP.
const PEER: u16 = 4790;

const POLICY: [(&str, &str); 2] = [
    ("gateways.yaml", include_str!("../../../../conf/demo/group/gateways.yaml")),
    ("tenant-c.yaml", include_str!("../../../../conf/demo/group/tenant-c.yaml")),
];

/// The network, and the processes in it.
#[derive(Debug)]
pub(in crate::demo) struct Group {
    pub(in crate::demo) pods: Vec<Host>,
    pub(in crate::demo) server: Host,
    pub(in crate::demo) gateways: [Gateway; 2],
    pub(super) folder: TempDir,
    pub(super) outside: Host,
    inside: Host,
    policy: Host,
    policyd: Option<Program>,
}

/// One of the gateways, running or not.
#[derive(Debug)]
pub(in crate::demo) struct Gateway {
    pub(super) name: &'static str,
    pub(super) program: Option<Program>,
    /// Its admin socket.
    pub(in crate::demo) socket: PathBuf,
    host: Host,
}

impl Group {
    /// Hosts, cables, addresses, routes, servers.
    pub(in crate::demo) fn build(lab: &Lab) -> Result<Self, Failure> {
        let folder = TempDir::with_prefix("vipgate-demo-").map_err(Failure::runtime)?;
        Self::network(lab, folder).map_err(Failure::runtime)
    }

    fn network(lab: &Lab, folder: TempDir) -> Result<Self, Error> {
        let (inside, outside) = (router(lab, "inside")?, router(lab, "outside")?);
        let (between, policy) = (lab.host("peers", false)?, lab.host("policy", false)?);
        for (host, switch) in [(&inside, "pods"), (&outside, PUBLIC), (&between, "peers"), (&policy, "mgmt")] {
            host.ip(&["link", "add", switch, "type", "bridge"])?;
            host.ip(&["link", "set", switch, "up"])?;
        }
        inside.addresses("pods", &["10.1.0.1/24", "fd00:1::1/64"])?;
        outside.addresses(PUBLIC, &["203.0.113.254/24", "2001:db8:113::fe/64"])?;
        policy.addresses("mgmt", &["10.3.0.254/24"])?;

        let gateway = |number: usize, name: &'static str| {
            let host = router(lab, name)?;
            let port = format!("to-{name}");
            lab.link((&inside, &port), (&host, "gw-in"), 1)?;
            inside.addresses(&port, &[&format!("10.4.{number}.254/24"), &format!("fd00:4:{number}::fe/64")])?;
            plug(lab, (&host, "gw-out"), (&outside, name), PUBLIC)?;
            plug(lab, (&host, "gw-peer"), (&between, name), "peers")?;
            plug(lab, (&host, "gw-mgmt"), (&policy, name), "mgmt")?;
            host.addresses("gw-in", &[&format!("10.4.{number}.1/24"), &format!("fd00:4:{number}::1/64")])?;
            host.addresses("gw-out", &[&format!("203.0.113.{number}/24"), &format!("2001:db8:113::{number}/64")])?;
            host.addresses("gw-peer", &[&format!("10.2.0.{number}/24")])?;
            host.addresses("gw-mgmt", &[&format!("10.3.0.{number}/24")])?;
            host.route(POD_NETWORKS[0], &format!("10.4.{number}.254"))?;
            host.route(POD_NETWORKS[1], &format!("fd00:4:{number}::fe"))?;
            host.route("default", "203.0.113.254")?;
            host.route("default", "2001:db8:113::fe")?;
            let socket = folder.path().join(format!("{name}.sock"));
            Ok::<_, Error>(Gateway { name, program: None, socket, host })
        };
        let gateways = [gateway(1, "gw-1")?, gateway(2, "gw-2")?];

        let pod = |(name, [four, six]): (&str, [&str; 2])| {
            let host = lab.host(name, false)?;
            plug(lab, (&host, "eth0"), (&inside, name), "pods")?;
            host.addresses("eth0", &[&format!("{four}/24"), &format!("{six}/64")])?;
            host.route("default", "10.1.0.1")?;
            host.route("default", "fd00:1::1")?;
            peers::start_at(&host, &[four, six], SERVED);
            Ok::<_, Error>(host)
        };
        let pods = PODS.into_iter().map(pod).collect::<Result<_, _>>()?;

        let server = lab.host("server", false)?;
        lab.link((&outside, "to-server"), (&server, "eth0"), 1)?;
        outside.addresses("to-server", &["198.51.100.254/24", "2001:db8:51::fe/64"])?;
        server.addresses("eth0", &[&format!("{}/24", SERVER[0]), &format!("{}/64", SERVER[1])])?;
        server.route("default", "198.51.100.254")?;
        server.route("default", "2001:db8:51::fe")?;
        peers::start(&server, &SERVER);
        Ok(Self { pods, server, gateways, folder, outside, inside, policy, policyd: None })
    }

    /// Starts the policy server and both gateways, and lets the routers use them.
    pub(super) fn start(&mut self) -> Result<(), Failure> {
        let manifests = self.folder.path().join("policy");
        fs::create_dir_all(&manifests).map_err(Failure::runtime)?;
        for (name, text) in POLICY {
            fs::write(manifests.join(name), text).map_err(Failure::runtime)?;
        }
        let config = format!(
            "listen: \"{POLICYD}\"\n\
             source: {{files: [{}]}}\n\
             metrics: {{listen: \"127.0.0.1:9470\"}}\n\
             log: {{format: json}}\n",
            manifests.display()
        );
        let policyd = Program::start(&self.policy, "policyd", &config, self.folder.path())?;
        self.policyd.insert(policyd).wait_ready()?;
        for index in [0, 1] {
            self.launch(index)?;
        }
        for gateway in self.gateways.iter_mut().filter_map(|gateway| gateway.program.as_mut()) {
            gateway.wait_ready()?;
        }
        self.spread(&[0, 1])
    }

    /// Starts this very program as one of the gateways.
    pub(super) fn launch(&mut self, index: usize) -> Result<(), Failure> {
        let gateway = &mut self.gateways[index];
        let folder = self.folder.path();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Nothing of it outlives the process: what the other one has copies of is all that is left.
        let config = format!(
            "name: {name}\n\
             interfaces:\n  - {{name: gw-in, role: inside}}\n  - {{name: gw-out, role: outside}}\n  \
             - {{name: gw-peer, role: inside}}\n\
             workers: {{cores: [{core}]}}\n\
             policy: {{server: {{url: \"http://{POLICYD}\", cache: {folder}/{name}.cache}}}}\n\
             sessions: {{capacity: 65536, state: null}}\n\
             peer: {{address: 10.2.0.{number}, port: {PEER}}}\n\
             admin: {{socket: {socket}}}\n\
             log: {{format: json}}\n",
            name = gateway.name,
            core = index % cores,
            number = index + 1,
            folder = folder.display(),
            socket = gateway.socket.display(),
        );
        gateway.program = Some(Program::start(&gateway.host, "gateway", &config, folder)?);
        Ok(())
    }

    /// Lets the routers spread packets over these gateways, as they would by routes that BGP tells them.
    pub(super) fn spread(&self, gateways: &[usize]) -> Result<(), Failure> {
        let routes = |router: &Host, to: [&str; 2], hops: [fn(usize) -> String; 2]| {
            for ((family, to), hop) in ["-4", "-6"].into_iter().zip(to).zip(hops) {
                let hops: Vec<String> = gateways.iter().map(|index| hop(index + 1)).collect();
                let hops = hops.iter().flat_map(|hop| ["nexthop", "via", hop]);
                router.ip(&[family, "route", "replace", to].into_iter().chain(hops).collect::<Vec<_>>())?;
            }
            Ok::<_, Error>(())
        };
        routes(&self.inside, ["0.0.0.0/0", "::/0"], [|n| format!("10.4.{n}.1"), |n| format!("fd00:4:{n}::1")])
            .and_then(|()| {
                routes(&self.outside, VIPS, [|n| format!("203.0.113.{n}"), |n| format!("2001:db8:113::{n}")])
            })
            .map_err(Failure::runtime)
    }

    /// Stops everything as an init system would; whether all of it ended as it should.
    pub(super) fn stop(&mut self) -> Result<bool, Failure> {
        let mut clean = true;
        for program in self.gateways.iter_mut().filter_map(|gateway| gateway.program.take()) {
            clean &= program.stop()?;
        }
        if let Some(policyd) = self.policyd.take() {
            clean &= policyd.stop()?;
        }
        Ok(clean)
    }
}

impl Gateway {
    /// Asks it something; the answer as JSON.
    pub(super) fn ask(&self, command: &[&str]) -> Result<Value, Failure> {
        ask(&self.socket, command)
    }

    /// Whether it and the other one serve, are linked, and have told each other all their sessions.
    pub(super) fn is_whole(&self) -> bool {
        let Ok(answer) = self.ask(&["peers"]) else { return false };
        let group = &answer["group"];
        let told = |peer: &Value| ["up", "in_sync_to", "in_sync_from"].iter().all(|field| peer["link"][field] == true);
        let mut others = answer["peers"].as_array().into_iter().flatten().filter(|peer| peer["own"] != true);
        group["serving"] == true && group["members_serving"] == 2 && others.all(told)
    }

    /// Who has the share that the pod with this address uses, as this gateway sees it.
    pub(super) fn owner(&self, pod: &str) -> Result<String, Failure> {
        let answer = self.ask(&["endpoints"])?;
        let mut endpoints = answer["endpoints"].as_array().into_iter().flatten();
        let owner = endpoints.find(|endpoint| endpoint["address"] == pod).map(|endpoint| &endpoint["owner"]);
        Ok(owner.and_then(Value::as_str).unwrap_or_default().to_owned())
    }

    /// Whether it has a session with this address and port of a VIP. Copies don't count.
    pub(super) fn has_session(&self, vip: &str) -> Result<bool, Failure> {
        let answer = self.ask(&["sessions"])?;
        Ok(answer["sessions"].as_array().into_iter().flatten().any(|session| session["vip"] == vip))
    }
}

/// A cable from a host to a switch.
fn plug(lab: &Lab, end: (&Host, &str), (host, port): (&Host, &str), switch: &str) -> Result<(), Error> {
    lab.link((host, port), end, 1)?;
    host.ip(&["link", "set", port, "master", switch])
}

/// A host that passes packets on. Among several next hops it chooses by addresses, ports and protocol, and it doesn't mind
/// on which interface a packet comes: what goes out by one gateway may come back by the other.
fn router(lab: &Lab, name: &str) -> Result<Host, Error> {
    let host = lab.host(name, true)?;
    for family in ["ipv4", "ipv6"] {
        host.sysctl(&format!("net.{family}.fib_multipath_hash_policy"), 1)?;
    }
    // Before there are interfaces, which begin with the default.
    for scope in ["all", "default"] {
        host.sysctl(&format!("net.ipv4.conf.{scope}.rp_filter"), 0)?;
    }
    Ok(host)
}
