//! Two gateways between two routers, their policy server, and a server outside: what the scenarios with several gateways
//! have in common.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;
use vipgate_lab::{self as lab, Host, Lab, reflector};

use super::daemon::{Daemon, query};
use super::topology::SERVER;
use crate::command_error::CommandError;

/// The bridge between gateways and outside router, an interface of the router.
pub(super) const PUBLIC: &str = "public";
/// Address of the policy server.
pub(super) const POLICYD: &str = "10.3.0.254:18000";
/// Listening port of the pods.
pub(super) const POD_PORT: u16 = 8080;
/// Port for links and tunnels between gateways, TCP and UDP.
const PEER_PORT: u16 = 4790;
/// UDP port of the tunnels to nodes.
const NODE_TUNNEL_PORT: u16 = 8473;

/// The manifests of both gateways.
pub(super) const GATEWAYS: (&str, &str) = ("gateways.yaml", include_str!("../../../conf/demo/group/gateways.yaml"));

/// How the group of a scenario is configured.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupConfig {
    /// Manifests, by file name.
    pub(super) policy: &'static [(&'static str, &'static str)],
    /// More fields of the policy server's configuration.
    pub(super) policyd: &'static str,
    /// The networks behind the inside router, IPv4 and IPv6.
    pub(super) inside_networks: [&'static str; 2],
    /// Whether gateways end tunnels of nodes.
    pub(super) has_nodes: bool,
}

/// Hosts and processes of a group.
#[derive(Debug)]
pub(super) struct GatewayGroup {
    pub(super) server: Host,
    pub(super) gateways: [Gateway; 2],
    pub(super) inside: Host,
    pub(super) outside: Host,
    /// The host of the policy server, with the bridge `mgmt`.
    pub(super) policy: Host,
    pub(super) directory: TempDir,
    config: GroupConfig,
    policyd: Option<Daemon>,
}

/// A gateway, running or not.
#[derive(Debug)]
pub(super) struct Gateway {
    pub(super) name: &'static str,
    pub(super) daemon: Option<Daemon>,
    /// Its admin socket.
    pub(super) socket: PathBuf,
    host: Host,
}

impl GatewayGroup {
    /// Creates hosts, links, addresses, and the server; no pods, and no routes to the gateways.
    pub(super) fn build(lab: &Lab, config: GroupConfig, directory: TempDir) -> Result<Self, lab::Error> {
        let (inside, outside) = (router(lab, "inside")?, router(lab, "outside")?);
        let (between, policy) = (lab.host("peers", false)?, lab.host("policy", false)?);
        for (host, switch) in [(&inside, "pods"), (&outside, PUBLIC), (&between, "peers"), (&policy, "mgmt")] {
            host.ip(&["link", "add", switch, "type", "bridge"])?;
            host.ip(&["link", "set", switch, "up"])?;
        }
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
            host.route(config.inside_networks[0], &format!("10.4.{number}.254"))?;
            host.route(config.inside_networks[1], &format!("fd00:4:{number}::fe"))?;
            host.route("default", "203.0.113.254")?;
            host.route("default", "2001:db8:113::fe")?;
            let socket = directory.path().join(format!("{name}.sock"));
            Ok::<_, lab::Error>(Gateway { name, daemon: None, socket, host })
        };
        let gateways = [gateway(1, "gw-1")?, gateway(2, "gw-2")?];

        let server = lab.host("server", false)?;
        lab.link((&outside, "to-server"), (&server, "eth0"), 1)?;
        outside.addresses("to-server", &["198.51.100.254/24", "2001:db8:51::fe/64"])?;
        server.addresses("eth0", &[&format!("{}/24", SERVER[0]), &format!("{}/64", SERVER[1])])?;
        server.route("default", "198.51.100.254")?;
        server.route("default", "2001:db8:51::fe")?;
        reflector::start(&server, &SERVER);
        Ok(Self { server, gateways, inside, outside, policy, directory, config, policyd: None })
    }

    /// Starts the policy server and both gateways.
    pub(super) fn start(&mut self) -> Result<(), CommandError> {
        let manifests = self.directory.path().join("policy");
        fs::create_dir_all(&manifests).map_err(CommandError::runtime)?;
        for (name, text) in self.config.policy {
            fs::write(manifests.join(name), text).map_err(CommandError::runtime)?;
        }
        let config = format!(
            "listen: \"{POLICYD}\"\n\
             source: {{files: [{}]}}\n\
             metrics: {{listen: \"127.0.0.1:9470\"}}\n\
             log: {{format: json}}\n\
             {}",
            manifests.display(),
            self.config.policyd,
        );
        let policyd = Daemon::start(&self.policy, "policyd", &config, self.directory.path())?;
        self.policyd.insert(policyd).wait_ready()?;
        for index in [0, 1] {
            self.start_gateway(index)?;
        }
        for gateway in self.gateways.iter_mut().filter_map(|gateway| gateway.daemon.as_mut()) {
            gateway.wait_ready()?;
        }
        Ok(())
    }

    /// Starts this binary as one of the gateways.
    pub(super) fn start_gateway(&mut self, index: usize) -> Result<(), CommandError> {
        let gateway = &mut self.gateways[index];
        let folder = self.directory.path();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let number = index + 1;
        let overlay = format!("overlay: {{address: 10.4.{number}.1, port: {NODE_TUNNEL_PORT}}}\n");
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
             log: {{format: json}}\n\
             {overlay}",
            name = gateway.name,
            core = index % cores,
            folder = folder.display(),
            socket = gateway.socket.display(),
            overlay = if self.config.has_nodes { overlay.as_str() } else { "" },
        );
        gateway.daemon = Some(Daemon::start(&gateway.host, "gateway", &config, folder)?);
        Ok(())
    }

    /// Sets ECMP routes to these gateways on the inside router, in place of BGP.
    pub(super) fn route_inside_via(&self, gateways: &[usize]) -> Result<(), CommandError> {
        let next_hops: [fn(usize) -> String; 2] = [|n| format!("10.4.{n}.1"), |n| format!("fd00:4:{n}::1")];
        ecmp_routes(&self.inside, ["0.0.0.0/0", "::/0"], next_hops, gateways)
    }

    /// The same for VIPs on the outside router.
    pub(super) fn route_outside_via(&self, vips: [&str; 2], gateways: &[usize]) -> Result<(), CommandError> {
        let next_hops: [fn(usize) -> String; 2] = [|n| format!("203.0.113.{n}"), |n| format!("2001:db8:113::{n}")];
        ecmp_routes(&self.outside, vips, next_hops, gateways)
    }

    /// Whether both gateways are active, linked, and in sync.
    pub(super) fn is_in_sync(&self) -> bool {
        self.gateways.iter().all(Gateway::is_in_sync)
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

    fn is_in_sync(&self) -> bool {
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

fn ecmp_routes(
    router: &Host,
    prefixes: [&str; 2],
    next_hops: [fn(usize) -> String; 2],
    gateways: &[usize],
) -> Result<(), CommandError> {
    for ((family, prefix), next_hop) in ["-4", "-6"].into_iter().zip(prefixes).zip(next_hops) {
        let next_hops: Vec<String> = gateways.iter().map(|index| next_hop(index + 1)).collect();
        let next_hops = next_hops.iter().flat_map(|next_hop| ["nexthop", "via", next_hop]);
        let command: Vec<&str> = [family, "route", "replace", prefix].into_iter().chain(next_hops).collect();
        router.ip(&command).map_err(CommandError::runtime)?;
    }
    Ok(())
}

/// Connects a host to a bridge.
pub(super) fn attach(
    lab: &Lab,
    end: (&Host, &str),
    (host, port): (&Host, &str),
    switch: &str,
) -> Result<(), lab::Error> {
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
