//! Topology of the first scenario: pods, gateway, router, server.

use std::path::PathBuf;
use std::{fs, thread};

use tempfile::TempDir;
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

/// The server's addresses.
pub(super) const SERVER: [&str; 2] = ["198.51.100.10", "2001:db8:51::10"];
/// Addresses of the same server that tenant B's policy excludes.
pub(super) const EXCLUDED: [&str; 2] = ["10.9.0.200", "fd00:9::200"];
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
        let folder = TempDir::with_prefix("vipgate-demo-").map_err(CommandError::runtime)?;
        let workers = thread::available_parallelism().map_or(1, usize::from).min(2);
        Self::network(lab, folder, workers).map_err(CommandError::runtime)
    }

    fn network(lab: &Lab, folder: TempDir, workers: usize) -> Result<Self, lab::Error> {
        let queues = if workers > 1 { 2 } else { 1 };
        let switch = lab.host("switch", false)?;
        let gateway = lab.host("gateway", true)?;
        let router = lab.host("router", true)?;
        let server = lab.host("server", false)?;
        switch.ip(&["link", "add", "pods", "type", "bridge"])?;
        switch.ip(&["link", "set", "pods", "up"])?;
        lab.link((&switch, "to-gateway"), (&gateway, "gw-in"), queues)?;
        switch.ip(&["link", "set", "to-gateway", "master", "pods"])?;
        gateway.addresses("gw-in", &["10.1.0.1/24", "fd00:1::1/64"])?;

        let specs = [
            ("pod-a1", "A", ["10.1.0.11", "fd00:1::11"], ["203.0.113.10", "2001:db8:113::10"]),
            ("pod-a2", "A", ["10.1.0.12", "fd00:1::12"], ["203.0.113.10", "2001:db8:113::10"]),
            ("pod-b1", "B", ["10.1.0.21", "fd00:1::21"], ["203.0.113.20", "2001:db8:113::20"]),
        ];
        let mut pods = Vec::new();
        for (name, tenant, addresses, vips) in specs {
            let host = lab.host(name, false)?;
            lab.link((&switch, name), (&host, "eth0"), 1)?;
            switch.ip(&["link", "set", name, "master", "pods"])?;
            host.addresses("eth0", &[&format!("{}/24", addresses[0]), &format!("{}/64", addresses[1])])?;
            host.route("default", "10.1.0.1")?;
            host.route("default", "fd00:1::1")?;
            reflector::start_at(&host, &addresses, POD_PORT);
            pods.push(Pod { host, tenant, addresses, vips });
        }

        lab.link((&gateway, "gw-out"), (&router, "to-gateway"), queues)?;
        gateway.addresses("gw-out", &["203.0.113.1/24", "2001:db8:113::1/64"])?;
        router.addresses("to-gateway", &["203.0.113.254/24", "2001:db8:113::fe/64"])?;
        gateway.route("default", "203.0.113.254")?;
        gateway.route("default", "2001:db8:113::fe")?;
        // Return routes for untranslated packets.
        router.route(POD_NETWORKS[0], "203.0.113.1")?;
        router.route(POD_NETWORKS[1], "2001:db8:113::1")?;

        lab.link((&router, "to-server"), (&server, "eth0"), 1)?;
        router
            .addresses("to-server", &["198.51.100.254/24", "2001:db8:51::fe/64", "10.9.0.254/24", "fd00:9::fe/64"])?;
        server.addresses(
            "eth0",
            &["198.51.100.10/24", "2001:db8:51::10/64", &format!("{}/24", EXCLUDED[0]), &format!("{}/64", EXCLUDED[1])],
        )?;
        server.route("default", "198.51.100.254")?;
        server.route("default", "2001:db8:51::fe")?;
        reflector::start(&server, &[SERVER, EXCLUDED].concat());
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
