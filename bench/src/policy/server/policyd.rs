//! The policy server process: `vipgate policyd`.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use vipgate_lab::{Process, READY, spawn};

use super::TIMEOUT;

/// File descriptors needed beside those of connections.
const OTHER_DESCRIPTORS: u64 = 256;

/// A running policy server.
#[derive(Debug)]
pub(super) struct Policyd {
    process: Process,
    url: String,
}

/// Buffer limit of the server, in bytes, large enough for all gateways, which share one address here.
const MAX_BYTES: u64 = 8 << 30;

impl Policyd {
    /// Starts a policy server on free ports of the loopback interface, and waits until it logs `ready`.
    pub(super) fn start(program: &Path, manifests: &Path, directory: &Path) -> Result<Self> {
        let [listen, metrics] = free_ports()?;
        let (config, log) = (directory.join("policyd.yaml"), directory.join("policyd.log"));
        let text = format!(
            "listen: \"{listen}\"\nsource: {{files: [{}]}}\nstate: {}/state\nmetrics: {{listen: \"{metrics}\"}}\nlog: {{format: json}}\n\
             limits: {{connections: 65536, connections_per_address: 65536, \
             bytes: {MAX_BYTES}, bytes_per_address: {MAX_BYTES}}}\n",
            manifests.display(),
            directory.display()
        );
        fs::write(&config, text)?;
        let [program, config] = [program, &config].map(|path| path.display().to_string());
        // The kernel kills it when the calling thread ends (PR_SET_PDEATHSIG).
        let command = ["setpriv", "--pdeathsig", "KILL", "--", &program, "policyd", "--config", &config];
        let mut process = spawn(&command, &log)?;
        process.wait_for_log(READY, TIMEOUT)?;
        Ok(Self { process, url: format!("http://{listen}") })
    }

    /// Process ID.
    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// URL for gateways.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Compile time of changes from the server's log: the median.
    pub(super) fn compile_ms(&self) -> Result<f64> {
        let mut times: Vec<u64> = self.log_events("policy").skip(1).filter_map(|line| line["ms"].as_u64()).collect();
        times.sort_unstable();
        times.get(times.len() / 2).map(|&ms| ms as f64).context("the policy server's log has no changes")
    }

    /// Log lines with this event.
    fn log_events(&self, event: &'static str) -> impl Iterator<Item = Value> + use<> {
        let lines: Vec<Value> = self.process.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        lines.into_iter().filter(move |line| line["event"] == event)
    }
}

/// Two free ports of the loopback interface.
fn free_ports() -> Result<[SocketAddr; 2]> {
    // Both are bound at the same time, so they differ.
    let listeners = [TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?];
    Ok([listeners[0].local_addr()?, listeners[1].local_addr()?])
}

/// Raises `RLIMIT_NOFILE` of this process and its children for this number of connections.
pub(super) fn raise_file_limit(connections: u64) -> Result<()> {
    let required = connections + OTHER_DESCRIPTORS;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // `None` is unlimited.
    if current.is_none_or(|current| current >= required) {
        return Ok(());
    }
    // Raising the hard limit requires root.
    let maximum = maximum.map(|maximum| maximum.max(required));
    let result = setrlimit(Resource::Nofile, Rlimit { current: Some(required), maximum });
    ensure!(result.is_ok(), "{connections} gateways need {required} open files: `ulimit -n {required}`");
    Ok(())
}
