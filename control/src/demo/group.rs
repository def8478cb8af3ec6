//! Two gateways between two routers, their policy server, and a server outside: what the scenarios with several gateways
//! have in common.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;
use vipgate_lab::networks::{self, GroupNetwork};
use vipgate_lab::{self as lab, Host, Lab};

use super::daemon::{Daemon, query};
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
    pub(super) network: GroupNetwork,
    pub(super) gateways: [Gateway; 2],
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
        let network = GroupNetwork::build(lab)?;
        let gateway = |number: usize, name: &'static str| {
            let host = network.add_gateway(lab, number, config.inside_networks)?;
            let socket = directory.path().join(format!("{name}.sock"));
            Ok::<_, lab::Error>(Gateway { name, daemon: None, socket, host })
        };
        let gateways = [gateway(1, "gw-1")?, gateway(2, "gw-2")?];
        Ok(Self { network, gateways, directory, config, policyd: None })
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
             state: {}\n\
             metrics: {{listen: \"127.0.0.1:9470\"}}\n\
             log: {{format: json}}\n\
             {}",
            manifests.display(),
            self.directory.path().join("policyd-state").display(),
            self.config.policyd,
        );
        let policyd = Daemon::start(&self.network.management, "policyd", &config, self.directory.path())?;
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
        networks::route_inside_via(&self.network.inside, gateways).map_err(CommandError::runtime)
    }

    /// The same for VIPs on the outside router.
    pub(super) fn route_outside_via(&self, vips: [&str; 2], gateways: &[usize]) -> Result<(), CommandError> {
        networks::route_outside_via(&self.network.outside, vips, gateways).map_err(CommandError::runtime)
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
