//! Topology of the second scenario: pods, two gateways between two routers, and their policy server.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use crate::command_error::CommandError;
use crate::demo::daemon::{Daemon, query};
use crate::demo::topology::SERVER;
use crate::lab;
use crate::lab::{Host, Lab, reflector};

/// Tenant C's VIPs, which both gateways announce.
pub(in crate::demo) const VIPS: [&str; 2] = ["192.0.2.10", "2001:db8:2::10"];
/// Tenant C's pods.
pub(super) const PODS: [(&str, [&str; 2]); 2] =
    [("pod-c1", ["10.1.0.31", "fd00:1::31"]), ("pod-c2", ["10.1.0.32", "fd00:1::32"])];
/// Networks whose addresses must not be seen outside.
pub(super) const POD_NETWORKS: [&str; 2] = ["10.1.0.0/24", "fd00:1::/64"];
/// The bridge between gateways and outside router, an interface of the router.
pub(super) const PUBLIC: &str = "public";
/// Listening port of the pods.
const POD_PORT: u16 = 8080;
/// Address of the policy server.
const POLICYD: &str = "10.3.0.254:18000";
/// Port for links and tunnels between gateways, TCP and UDP.
const PEER_PORT: u16 = 4790;

const POLICY: [(&str, &str); 3] = [
    ("gateways.yaml", include_str!("../../../../conf/demo/group/gateways.yaml")),
    ("pool.yaml", include_str!("../../../../conf/demo/group/pool.yaml")),
    ("tenant-c.yaml", include_str!("../../../../conf/demo/group/tenant-c.yaml")),
];

/// Hosts and processes of the second scenario.
#[derive(Debug)]
pub(in crate::demo) struct FailoverTopology {
    pub(in crate::demo) pods: Vec<Host>,
    pub(in crate::demo) server: Host,
    pub(in crate::demo) gateways: [Gateway; 2],
    pub(super) directory: TempDir,
    pub(super) outside: Host,
    inside: Host,
    policy: Host,
    policyd: Option<Daemon>,
}

/// A gateway, running or not.
#[derive(Debug)]
pub(in crate::demo) struct Gateway {
    pub(super) name: &'static str,
    pub(super) daemon: Option<Daemon>,
    /// Its admin socket.
    pub(in crate::demo) socket: PathBuf,
    host: Host,
}

impl FailoverTopology {
    /// Creates hosts, links, addresses, routes, servers.
    pub(in crate::demo) fn build(lab: &Lab) -> Result<Self, CommandError> {
        let folder = TempDir::with_prefix("vipgate-demo-").map_err(CommandError::runtime)?;
        Self::network(lab, folder).map_err(CommandError::runtime)
    }

    fn network(lab: &Lab, folder: TempDir) -> Result<Self, lab::Error> {
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
            attach(lab, (&host, "gw-out"), (&outside, name), PUBLIC)?;
            attach(lab, (&host, "gw-peer"), (&between, name), "peers")?;
            attach(lab, (&host, "gw-mgmt"), (&policy, name), "mgmt")?;
            host.addresses("gw-in", &[&format!("10.4.{number}.1/24"), &format!("fd00:4:{number}::1/64")])?;
            host.addresses("gw-out", &[&format!("203.0.113.{number}/24"), &format!("2001:db8:113::{number}/64")])?;
            host.addresses("gw-peer", &[&format!("10.2.0.{number}/24")])?;
            host.addresses("gw-mgmt", &[&format!("10.3.0.{number}/24")])?;
            host.route(POD_NETWORKS[0], &format!("10.4.{number}.254"))?;
            host.route(POD_NETWORKS[1], &format!("fd00:4:{number}::fe"))?;
            host.route("default", "203.0.113.254")?;
            host.route("default", "2001:db8:113::fe")?;
            let socket = folder.path().join(format!("{name}.sock"));
            Ok::<_, lab::Error>(Gateway { name, daemon: None, socket, host })
        };
        let gateways = [gateway(1, "gw-1")?, gateway(2, "gw-2")?];

        let pod = |(name, [four, six]): (&str, [&str; 2])| {
            let host = lab.host(name, false)?;
            attach(lab, (&host, "eth0"), (&inside, name), "pods")?;
            host.addresses("eth0", &[&format!("{four}/24"), &format!("{six}/64")])?;
            host.route("default", "10.1.0.1")?;
            host.route("default", "fd00:1::1")?;
            reflector::start_at(&host, &[four, six], POD_PORT);
            Ok::<_, lab::Error>(host)
        };
        let pods = PODS.into_iter().map(pod).collect::<Result<_, _>>()?;

        let server = lab.host("server", false)?;
        lab.link((&outside, "to-server"), (&server, "eth0"), 1)?;
        outside.addresses("to-server", &["198.51.100.254/24", "2001:db8:51::fe/64"])?;
        server.addresses("eth0", &[&format!("{}/24", SERVER[0]), &format!("{}/64", SERVER[1])])?;
        server.route("default", "198.51.100.254")?;
        server.route("default", "2001:db8:51::fe")?;
        reflector::start(&server, &SERVER);
        Ok(Self { pods, server, gateways, directory: folder, outside, inside, policy, policyd: None })
    }

    /// Starts the policy server and both gateways, and adds routes to them.
    pub(super) fn start(&mut self) -> Result<(), CommandError> {
        let manifests = self.directory.path().join("policy");
        fs::create_dir_all(&manifests).map_err(CommandError::runtime)?;
        for (name, text) in POLICY {
            fs::write(manifests.join(name), text).map_err(CommandError::runtime)?;
        }
        let config = format!(
            "listen: \"{POLICYD}\"\n\
             source: {{files: [{}]}}\n\
             metrics: {{listen: \"127.0.0.1:9470\"}}\n\
             log: {{format: json}}\n",
            manifests.display()
        );
        let policyd = Daemon::start(&self.policy, "policyd", &config, self.directory.path())?;
        self.policyd.insert(policyd).wait_ready()?;
        for index in [0, 1] {
            self.start_gateway(index)?;
        }
        for gateway in self.gateways.iter_mut().filter_map(|gateway| gateway.daemon.as_mut()) {
            gateway.wait_ready()?;
        }
        self.route_via(&[0, 1])
    }

    /// Starts this binary as one of the gateways.
    pub(super) fn start_gateway(&mut self, index: usize) -> Result<(), CommandError> {
        let gateway = &mut self.gateways[index];
        let folder = self.directory.path();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // No stored sessions: after a kill, only the replicated ones are left.
        let config = format!(
            "name: {name}\n\
             interfaces:\n  - {{name: gw-in, role: inside}}\n  - {{name: gw-out, role: outside}}\n  \
             - {{name: gw-peer, role: inside}}\n\
             workers: {{cores: [{core}]}}\n\
             policy: {{server: {{url: \"http://{POLICYD}\", cache: {folder}/{name}.cache}}}}\n\
             sessions: {{capacity: 65536, state: null}}\n\
             peer: {{address: 10.2.0.{number}, port: {PEER_PORT}}}\n\
             admin: {{socket: {socket}}}\n\
             log: {{format: json}}\n",
            name = gateway.name,
            core = index % cores,
            number = index + 1,
            folder = folder.display(),
            socket = gateway.socket.display(),
        );
        gateway.daemon = Some(Daemon::start(&gateway.host, "gateway", &config, folder)?);
        Ok(())
    }

    /// Sets ECMP routes to these gateways on both routers, in place of BGP.
    pub(super) fn route_via(&self, gateways: &[usize]) -> Result<(), CommandError> {
        let routes = |router: &Host, prefixes: [&str; 2], next_hops: [fn(usize) -> String; 2]| {
            for ((family, prefix), next_hop) in ["-4", "-6"].into_iter().zip(prefixes).zip(next_hops) {
                let next_hops: Vec<String> = gateways.iter().map(|index| next_hop(index + 1)).collect();
                let next_hops = next_hops.iter().flat_map(|next_hop| ["nexthop", "via", next_hop]);
                router.ip(&[family, "route", "replace", prefix].into_iter().chain(next_hops).collect::<Vec<_>>())?;
            }
            Ok::<_, lab::Error>(())
        };
        routes(&self.inside, ["0.0.0.0/0", "::/0"], [|n| format!("10.4.{n}.1"), |n| format!("fd00:4:{n}::1")])
            .and_then(|()| {
                routes(&self.outside, VIPS, [|n| format!("203.0.113.{n}"), |n| format!("2001:db8:113::{n}")])
            })
            .map_err(CommandError::runtime)
    }

    /// Stops all processes with SIGTERM; false unless all exit with code 0 in time.
    pub(super) fn stop(&mut self) -> Result<bool, CommandError> {
        let mut clean = true;
        for program in self.gateways.iter_mut().filter_map(|gateway| gateway.daemon.take()) {
            clean &= program.stop()?;
        }
        if let Some(policyd) = self.policyd.take() {
            clean &= policyd.stop()?;
        }
        Ok(clean)
    }
}

impl Gateway {
    /// Runs a query command; returns its JSON.
    pub(super) fn query(&self, command: &[&str]) -> Result<Value, CommandError> {
        query(&self.socket, command)
    }

    /// Whether both gateways are active, linked, and in sync.
    pub(super) fn is_in_sync(&self) -> bool {
        let Ok(reply) = self.query(&["peers"]) else { return false };
        let group = &reply["group"];
        let is_in_sync =
            |peer: &Value| ["up", "in_sync_to", "in_sync_from"].iter().all(|field| peer["link"][field] == true);
        let mut others = reply["peers"].as_array().into_iter().flatten().filter(|peer| peer["own"] != true);
        group["serving"] == true && group["members_serving"] == 2 && others.all(is_in_sync)
    }

    /// Owner of the shard of the pod with this address, in this gateway's view.
    pub(super) fn owner(&self, pod: &str) -> Result<String, CommandError> {
        let reply = self.query(&["endpoints"])?;
        let mut endpoints = reply["endpoints"].as_array().into_iter().flatten();
        let owner = endpoints.find(|endpoint| endpoint["address"] == pod).map(|endpoint| &endpoint["owner"]);
        Ok(owner.and_then(Value::as_str).unwrap_or_default().to_owned())
    }

    /// Whether it has an active session with this VIP address and port; standby sessions don't count.
    pub(super) fn has_session(&self, vip: &str) -> Result<bool, CommandError> {
        let reply = self.query(&["sessions"])?;
        Ok(reply["sessions"].as_array().into_iter().flatten().any(|session| session["vip"] == vip))
    }
}

/// Connects a host to a bridge.
fn attach(lab: &Lab, end: (&Host, &str), (host, port): (&Host, &str), switch: &str) -> Result<(), lab::Error> {
    lab.link((host, port), end, 1)?;
    host.ip(&["link", "set", port, "master", switch])
}

/// A router with ECMP by 5-tuple and without reverse path filtering: routing via the gateways may be asymmetric.
fn router(lab: &Lab, name: &str) -> Result<Host, lab::Error> {
    let host = lab.host(name, true)?;
    for family in ["ipv4", "ipv6"] {
        host.sysctl(&format!("net.{family}.fib_multipath_hash_policy"), 1)?;
    }
    // Before interfaces are created: they inherit the default.
    for scope in ["all", "default"] {
        host.sysctl(&format!("net.ipv4.conf.{scope}.rp_filter"), 0)?;
    }
    Ok(host)
}
