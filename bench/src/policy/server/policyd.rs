//! The policy server process: `vipgate policyd`.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

use super::TIMEOUT;
use crate::process::Process;

/// File descriptors needed beside those of connections.
const OTHER_DESCRIPTORS: u64 = 256;

/// A running policy server.
#[derive(Debug)]
pub(super) struct Policyd {
    process: Process,
    url: String,
    log: PathBuf,
}

/// Buffer limit of the server, in bytes, large enough for all gateways, which share one address here.
const MAX_BYTES: u64 = 8 << 30;

impl Policyd {
    /// Starts a policy server on free ports of the loopback interface, and waits until it logs `ready`.
    pub(super) fn start(program: &Path, manifests: &Path, directory: &Path) -> Result<Self> {
        let [listen, metrics] = free_ports()?;
        let (config, log) = (directory.join("policyd.yaml"), directory.join("policyd.log"));
        let text = format!(
            "listen: \"{listen}\"\nsource: {{files: [{}]}}\nmetrics: {{listen: \"{metrics}\"}}\nlog: {{format: json}}\n\
             limits: {{connections: 65536, connections_per_address: 65536, \
             bytes: {MAX_BYTES}, bytes_per_address: {MAX_BYTES}}}\n",
            manifests.display()
        );
        fs::write(&config, text)?;
        let [program, config] = [program, &config].map(|path| path.display().to_string());
        let process = Process::start(&[&program, "policyd", "--config", &config], &log)?;
        let mut policyd = Self { process, url: format!("http://{listen}"), log };
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline && policyd.process.is_alive() {
            if policyd.log_events("ready")?.next().is_some() {
                return Ok(policyd);
            }
            thread::sleep(Duration::from_millis(10));
        }
        let log = fs::read_to_string(&policyd.log).unwrap_or_default();
        bail!("the policy server did not become ready; its log:\n{}", log.trim())
    }

    /// Process ID.
    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// URL for gateways.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Compile time of changes from the server's log: the median.
    pub(super) fn compile_ms(&self) -> Result<f64> {
        let mut times: Vec<u64> = self.log_events("policy")?.skip(1).filter_map(|line| line["ms"].as_u64()).collect();
        times.sort_unstable();
        times.get(times.len() / 2).map(|&ms| ms as f64).context("the policy server's log has no changes")
    }

    /// Log lines with this event.
    fn log_events(&self, event: &'static str) -> Result<impl Iterator<Item = Value> + use<>> {
        let log = fs::read_to_string(&self.log)?;
        let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(lines.into_iter().filter(move |line| line["event"] == event))
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
