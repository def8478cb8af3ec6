//! Topology of the first scenario: pods, gateway, router, server.

use std::path::PathBuf;
use std::{fs, thread};

use tempfile::TempDir;
use vipgate_lab::networks::{SingleGateway, add_pod};
use vipgate_lab::{self as lab, Host, Lab, reflector};

use super::report::Report;
use crate::command_error::CommandError;
use crate::demo::daemon::{Daemon, query};

/// A pod of the first scenario.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) host: Host,
    pub(super) tenant: &'static str,
    pub(super) addresses: [&'static str; 2],
    /// The VIPs expected as its source addresses.
    pub(super) vips: [&'static str; 2],
}

/// Listening port of the pods, and the ports of tenant A's Service.
const POD_PORT: u16 = 8080;
pub(super) const HTTP: u16 = 80;
pub(super) const DNS: u16 = 53;
/// Networks whose addresses must not be seen outside.
pub(super) const POD_NETWORKS: [&str; 2] = ["10.1.0.0/24", "fd00:1::/64"];

/// Manifests of both tenants.
pub(super) const POLICY: [(&str, &str); 2] = [
    ("tenant-a.yaml", include_str!("../../../conf/demo/policy/tenant-a.yaml")),
    ("tenant-b.yaml", include_str!("../../../conf/demo/policy/tenant-b.yaml")),
];

/// Hosts of the first scenario.
#[derive(Debug)]
pub(super) struct Topology {
    pub(super) pods: Vec<Pod>,
    pub(super) gateway: Host,
    pub(super) router: Host,
    pub(super) server: Host,
    pub(super) directory: TempDir,
    pub(super) workers: usize,
    process: Option<Daemon>,
}

impl Topology {
    /// Creates hosts, links, addresses, routes, servers.
    pub(super) fn build(lab: &Lab) -> Result<Self, CommandError> {
        let folder = lab::directory().map_err(CommandError::runtime)?;
        let workers = thread::available_parallelism().map_or(1, usize::from).min(2);
        Self::network(lab, folder, workers).map_err(CommandError::runtime)
    }

    fn network(lab: &Lab, folder: TempDir, workers: usize) -> Result<Self, lab::Error> {
        let network = SingleGateway::build(lab, workers as u32)?;
        let specs = [
            ("pod-a1", "A", ["10.1.0.11", "fd00:1::11"], ["203.0.113.10", "2001:db8:113::10"]),
            ("pod-a2", "A", ["10.1.0.12", "fd00:1::12"], ["203.0.113.10", "2001:db8:113::10"]),
            ("pod-b1", "B", ["10.1.0.21", "fd00:1::21"], ["203.0.113.20", "2001:db8:113::20"]),
        ];
        let mut pods = Vec::new();
        for (name, tenant, addresses, vips) in specs {
            let host = add_pod(lab, &network.switch, name, addresses)?;
            reflector::start_at(&host, &addresses, POD_PORT);
            pods.push(Pod { host, tenant, addresses, vips });
        }
        let SingleGateway { gateway, router, server, .. } = network;
        Ok(Self { pods, gateway, router, server, directory: folder, workers, process: None })
    }

    /// The admin socket of the gateway.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.path().join("gateway.sock")
    }

    /// Writes the manifests to files; returns `policy` of a gateway that reads them.
    pub(super) fn policy_files(&self) -> Result<String, CommandError> {
        let policy = self.directory.path().join("policy");
        fs::create_dir_all(&policy).map_err(CommandError::runtime)?;
        for (name, text) in POLICY {
            fs::write(policy.join(name), text).map_err(CommandError::runtime)?;
        }
        Ok(format!("{{files: [{}]}}", policy.display()))
    }

    /// Starts this binary as a gateway with this `policy`, and waits until it is ready.
    pub(super) fn start_gateway(&mut self, policy: &str) -> Result<(), CommandError> {
        let cores: Vec<String> = (0..self.workers).map(|core| core.to_string()).collect();
        let config = format!(
            "name: gw-demo\n\
             interfaces:\n  - {{name: gw-in, role: inside}}\n  - {{name: gw-out, role: outside}}\n\
             workers: {{cores: [{}]}}\n\
             policy: {policy}\n\
             sessions: {{capacity: 65536, state: null}}\n\
             admin: {{socket: {}}}\n\
             log: {{format: json}}\n",
            cores.join(", "),
            self.socket().display(),
        );
        self.process.insert(Daemon::start(&self.gateway, "gateway", &config, self.directory.path())?).wait_ready()
    }

    /// Runs a query command; returns its JSON.
    pub(super) fn query(&self, command: &[&str]) -> Result<serde_json::Value, CommandError> {
        query(&self.socket(), command)
    }

    /// Stops the gateway with SIGTERM, if it is running.
    pub(super) fn stop_gateway(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let Some(process) = self.process.take() else { return Ok(()) };
        report.check("SIGTERM stops the gateway cleanly", process.stop()?, "");
        Ok(())
    }
}
