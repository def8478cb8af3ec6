//! Kubernetes benchmark: a policy server that reads a real API server, and a gateway that follows it. The time from the
//! server's start to the policy in force, from a changed EndpointSlice to its effect, and the server's memory. API server,
//! etcd, policy server and gateway share this machine.

mod objects;

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use vipgate_tests::Testbed;
use vipgate_tests::kubernetes::{ADMIN, ApiServer};
use vipgate_tests::policyd::{Policyd, PolicydConfig};

use self::objects::Objects;
use super::noise::{Noise, NoiseMonitor};
use super::print_result;
use crate::path::round2;
use crate::usage;

/// Timeout of the start and of a change.
const TIMEOUT: Duration = Duration::from_mins(2);
/// Pause between a change in force and the next one.
const PAUSE: Duration = Duration::from_millis(100);
/// How often the gateway's log is read.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Without an update for this long, the first policy is complete.
const STABLE_INTERVAL: Duration = Duration::from_secs(3);

/// Options of `vipgate-bench policy kubernetes`.
#[derive(Debug, Args)]
pub(super) struct Options {
    #[command(flatten)]
    size: Size,
    /// Changes, one after the other: an endpoint is added to a slice, or removed
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    changes: u32,
    /// Print one JSON object on one line
    #[arg(long)]
    json: bool,
}

/// Number of objects.
#[derive(Clone, Copy, Debug, Args, Serialize)]
pub(super) struct Size {
    /// Services, each with an address and an `EndpointSlice`
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=65_000))]
    services: u32,
    /// Endpoints of all Services together
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    endpoints: u32,
    /// Egress policies, each of one of the Services
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=65_000))]
    policies: u32,
    /// Further egress policies, each of a Service that doesn't exist
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=65_000))]
    faulty: u32,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    #[serde(flatten)]
    size: Size,
    changes: u32,
    /// Creation of all objects, which isn't vipgate's work.
    load_s: f64,
    /// From the start of policy server and gateway until the gateway has all endpoints in force.
    start_s: f64,
    /// From sending a changed slice to the API server until the change is in force on the gateway.
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    /// Resident memory of the policy server, and its peak.
    rss_mb: f64,
    rss_peak_mb: f64,
    /// CPU time of the policy server: from its start to the first change, and per change.
    start_cpu_s: f64,
    change_cpu_ms: f64,
    #[serde(flatten)]
    noise: Noise,
}

/// Runs the benchmark and prints the report.
pub(super) fn run(options: &Options) -> Result<()> {
    for variable in ["VIPGATE_KUBE_APISERVER", "VIPGATE_KUBECTL"] {
        ensure!(std::env::var_os(variable).is_some(), "{variable} is not set: run `make bench-kubernetes`");
    }
    ensure!(options.size.policies <= options.size.services, "each policy needs a Service: --policies is too large");
    let mut testbed = Testbed::new("bench");
    // Each Service of type LoadBalancer gets a node port.
    let api = ApiServer::with_flags(&testbed.gateway, &["--service-node-port-range=1024-65535"]);
    let kubeconfig = api.kubeconfig(ADMIN);
    let size = options.size;
    let load_start = Instant::now();
    let path = kubeconfig.clone();
    in_namespace(&testbed, move || async move { Objects::connect(&path, size).await?.create_all().await })?;
    let load = load_start.elapsed();

    let source = format!("source: {{kubernetes: {{kubeconfig: {}}}}}", kubeconfig.display());
    let server = PolicydConfig { name: "policyd", listen: "127.0.0.1:18001", metrics: 9471, extra: &source };
    let start = Instant::now();
    let mut policyd = Policyd::spawn(&testbed.gateway, testbed.folder.path(), server);
    let pid = policyd.process().id();
    let cache = testbed.folder.path().join("policy.cache");
    let policy = format!("policy: {{server: {{url: \"http://127.0.0.1:18001\", cache: {}}}}}", cache.display());
    testbed.spawn_gateway(&policy);
    let in_force = wait_complete(&testbed, &policyd, size)?;
    let start_ticks = usage::process_ticks(pid)?;

    let noise = NoiseMonitor::start(&[pid, testbed.process().id(), api.process().id()])?;
    let times = measure_changes(&testbed, &kubeconfig, options)?;
    let noise = noise.finish()?;
    let change_ticks = usage::process_ticks(pid)? - start_ticks;
    let memory = usage::resident_memory(pid)?;
    let ms = |micros: u64| round2(micros as f64 / 1e3);
    let report = Report {
        benchmark: "policy_kubernetes",
        size,
        changes: options.changes,
        load_s: round2(load.as_secs_f64()),
        start_s: round2((in_force - start).as_secs_f64()),
        p50_ms: ms(times.value_at_quantile(0.5)),
        p99_ms: ms(times.value_at_quantile(0.99)),
        max_ms: ms(times.max()),
        rss_mb: round2(memory.current as f64 / 1e6),
        rss_peak_mb: round2(memory.peak as f64 / 1e6),
        start_cpu_s: round2(start_ticks as f64 / 100.0),
        change_cpu_ms: round2(change_ticks as f64 * 10.0 / f64::from(options.changes)),
        noise,
    };
    print_result(&report, options.json)?;
    report.noise.warn();
    Ok(())
}

/// Waits until all endpoints are in force on the gateway; returns when they were.
fn wait_complete(testbed: &Testbed, policyd: &Policyd, size: Size) -> Result<Instant> {
    let mut log = GatewayLog::default();
    let deadline = Instant::now() + TIMEOUT;
    let mut last: Option<Instant> = None;
    while Instant::now() < deadline {
        if log.next_policy(testbed) {
            last = Some(Instant::now());
        }
        if let Some(at) = last
            && at.elapsed() > STABLE_INTERVAL
        {
            let expected = u64::from(size.policies) * u64::from(size.endpoints) / u64::from(size.services);
            let endpoints = testbed.metric("vipgate_endpoints", "");
            ensure!(
                (endpoints - expected as f64).abs() < 0.5,
                "{endpoints} endpoints are in force, expected {expected}"
            );
            return Ok(at);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    bail!("no complete policy within {} s; the policy server's log:\n{}", TIMEOUT.as_secs(), policyd.log())
}

/// Changes slices one after the other; the microseconds until each change was in force.
fn measure_changes(testbed: &Testbed, kubeconfig: &std::path::Path, options: &Options) -> Result<Histogram<u64>> {
    let (size, changes) = (options.size, options.changes);
    let path = kubeconfig.to_owned();
    let (sender, receiver) = std::sync::mpsc::sync_channel::<Instant>(0);
    let (proceed, wait) = tokio::sync::mpsc::channel::<()>(1);
    let writer = testbed.gateway.run(move || {
        let work = async move {
            let (objects, mut wait) = (Objects::connect(&path, size).await?, wait);
            for change in 0..changes {
                tokio::time::sleep(PAUSE).await;
                let began = Instant::now();
                objects.change(change).await?;
                // They fail only when the other side has given up, and says why.
                if sender.send(began).is_err() || wait.recv().await.is_none() {
                    break;
                }
            }
            Ok::<_, anyhow::Error>(())
        };
        Ok(runtime()?.block_on(work))
    });
    let mut times = Histogram::new(3)?;
    let mut log = GatewayLog::default();
    while log.next_policy(testbed) {}
    while let Ok(began) = receiver.recv() {
        let deadline = began + TIMEOUT;
        while !log.next_policy(testbed) {
            ensure!(Instant::now() < deadline, "a change wasn't in force after {} s", TIMEOUT.as_secs());
            std::thread::sleep(POLL_INTERVAL);
        }
        times.record(began.elapsed().as_micros() as u64)?;
        proceed.blocking_send(()).context("the writer of changes has ended")?;
    }
    writer.join().map_err(|_| anyhow::anyhow!("the writer of changes has panicked"))???;
    ensure!(times.len() == u64::from(changes), "{} of {changes} changes were measured", times.len());
    Ok(times)
}

/// Events of the gateway's log, each read once.
#[derive(Default)]
struct GatewayLog {
    offset: usize,
}

impl GatewayLog {
    /// Whether there is a further event of a policy in force: the first one makes the gateway ready.
    fn next_policy(&mut self, testbed: &Testbed) -> bool {
        let text = testbed.log();
        let rest = text.get(self.offset..).unwrap_or_default();
        for line in rest.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            self.offset += line.len();
            if ["policy", "ready"].iter().any(|event| line.contains(&format!("\"event\":\"{event}\""))) {
                return true;
            }
        }
        false
    }
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Runs asynchronous work in the network namespace of the gateway.
fn in_namespace<F: Future<Output = Result<()>>>(
    testbed: &Testbed,
    work: impl FnOnce() -> F + Send + 'static,
) -> Result<()> {
    let thread = testbed.gateway.run(move || Ok(runtime()?.block_on(work())));
    thread.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))??
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size { services, endpoints, policies, faulty } = self.size;
        writeln!(
            f,
            "{services} Services, {endpoints} endpoints, {policies} policies, {faulty} faulty ones, {} changes",
            self.changes
        )?;
        writeln!(f, "  load         {} s until the API server had all objects", self.load_s)?;
        writeln!(f, "  start        {} s until all was in force; CPU time {} s", self.start_s, self.start_cpu_s)?;
        writeln!(
            f,
            "  change       {} ms (p50), {} ms (p99), {} ms (max); CPU time {} ms",
            self.p50_ms, self.p99_ms, self.max_ms, self.change_cpu_ms
        )?;
        writeln!(f, "  memory       {} MB, {} MB peak", self.rss_mb, self.rss_peak_mb)?;
        write!(f, "  {}", self.noise)
    }
}
