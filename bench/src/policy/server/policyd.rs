//! The policy server's process.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

use super::PATIENCE;
use crate::process::Process;

/// Descriptors beside those of connections.
const OTHERS: u64 = 256;

/// A policy server that has a policy.
#[derive(Debug)]
pub(super) struct Policyd {
    process: Process,
    url: String,
    log: PathBuf,
}

/// Bytes that all gateways may make it hold. They have one address here, and would wait for each other's responses otherwise.
const HELD: u64 = 8 << 30;

impl Policyd {
    /// Starts one on a free port of this machine, and waits for its first policy.
    pub(super) fn start(program: &Path, manifests: &Path, folder: &Path) -> Result<Self> {
        let [listen, metrics] = free_ports()?;
        let (config, log) = (folder.join("policyd.yaml"), folder.join("policyd.log"));
        let text = format!(
            "listen: \"{listen}\"\nsource: {{files: [{}]}}\nmetrics: {{listen: \"{metrics}\"}}\nlog: {{format: json}}\n\
             limits: {{connections: 65536, connections_per_address: 65536, bytes: {HELD}, bytes_per_address: {HELD}}}\n",
            manifests.display()
        );
        fs::write(&config, text)?;
        let [program, config] = [program, &config].map(|path| path.display().to_string());
        let process = Process::start(&[&program, "policyd", "--config", &config], &log)?;
        let mut policyd = Self { process, url: format!("http://{listen}"), log };
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until && policyd.process.is_alive() {
            if policyd.said("ready")?.next().is_some() {
                return Ok(policyd);
            }
            thread::sleep(Duration::from_millis(10));
        }
        let said = fs::read_to_string(&policyd.log).unwrap_or_default();
        bail!("the policy server did not become ready; it said:\n{}", said.trim())
    }

    /// Its process.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Where gateways reach it.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// How long it took to compile a change, by its own account: the median.
    pub(super) fn compile_ms(&self) -> Result<f64> {
        let mut times: Vec<u64> = self.said("policy")?.skip(1).filter_map(|line| line["ms"].as_u64()).collect();
        times.sort_unstable();
        times.get(times.len() / 2).map(|&ms| ms as f64).context("the policy server says nothing of changes")
    }

    /// What it has said of this kind.
    fn said(&self, event: &'static str) -> Result<impl Iterator<Item = Value> + use<>> {
        let log = fs::read_to_string(&self.log)?;
        let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(lines.into_iter().filter(move |line| line["event"] == event))
    }
}

/// Two ports of this machine that nobody listens on now.
fn free_ports() -> Result<[SocketAddr; 2]> {
    // Both open at once, so they differ.
    let both = [TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?];
    Ok([both[0].local_addr()?, both[1].local_addr()?])
}

/// Allows this process and those that it starts as many descriptors as so many connections need.
pub(super) fn allow_files(connections: u64) -> Result<()> {
    let wanted = connections + OTHERS;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // No limit is enough.
    if current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    // Only root may raise what it may raise it to.
    let maximum = maximum.map(|maximum| maximum.max(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    ensure!(raised.is_ok(), "{connections} gateways need {wanted} open files: `ulimit -n {wanted}`");
    Ok(())
}
