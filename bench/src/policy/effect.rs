//! Policy latency benchmark: time from a change at the policy server to its effect. A gateway in network namespaces
//! subscribes to a simulated policy server in this process; its ACKs tell when changes are in force.
//!
//! The gateway's worker has its own core; its other threads share a core with the server.

mod policy_server;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::Duration;
use std::{fmt, thread};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::oneshot;

use super::churn::Churn;
use super::noise::Noise;
use super::{PolicySize, print_result};
use crate::machine::{clean_up_on_signals, pin_to_core, run_on};
use crate::path::round2;
use crate::policy::effect::policy_server::{RunResult, Workload};
use crate::wire::HostOptions;
use crate::wire::config::SutConfig;
use crate::wire::testbed::Testbed;
use crate::wire::vipgate::{PolicySource, Vipgate};

/// Session capacity of the gateway; no session is opened.
const SESSIONS: u32 = 65_536;

/// Options of `vipgate-bench policy effect`.
#[derive(Debug, Args)]
pub(super) struct Options {
    #[command(flatten)]
    size: PolicySize,
    /// Changes per second, each of one endpoint
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Duration of the changes in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    #[command(flatten)]
    machine: HostOptions,
    /// Print one JSON object on one line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    vips: u32,
    endpoints: u32,
    rate: u32,
    seconds: u32,
    /// From the opening of the stream to the ACK of the whole policy, and the size of that policy.
    full_sync_ms: f64,
    full_sync_mb: f64,
    changes: u64,
    /// From the scheduled time of a change to the ACK of the update that contains it.
    p50_ms: f64,
    p99_ms: f64,
    p999_ms: f64,
    max_ms: f64,
    changes_per_second: f64,
    /// Updates that contained the changes.
    updates: u64,
    updates_per_second: f64,
    rejected: u64,
    /// CPU usage of the gateway process during the changes, in cores.
    gateway_cpu: f64,
    #[serde(flatten)]
    noise: Noise,
}

/// Runs the benchmark and prints the report.
pub(super) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let gateway = options.machine.gateway_binary()?;
    let config = SutConfig::on_core(gateway, cores[1]);
    clean_up_on_signals()?;
    let (report, rejection) = measure(options, &config, cores[0])?;
    print_result(&report, options.json)?;
    report.noise.warn();
    ensure!(report.rejected == 0, "the gateway rejected changes: {}", rejection.unwrap_or_default());
    Ok(())
}

/// Returns the report, and the reason of a rejection by the gateway.
fn measure(options: &Options, config: &SutConfig, core: usize) -> Result<(Report, Option<String>)> {
    let testbed = Testbed::build()?;
    let directory = vipgate_lab::directory().context("cannot create a directory for the configuration")?;
    let listener = run_on(&testbed.gateway, core, || Ok(TcpListener::bind("127.0.0.1:0")?))?;
    let policy = PolicySource::Server(format!("http://{}", listener.local_addr()?));
    let gateway = Vipgate::configure(config, SESSIONS, None, &policy, directory.path())?;
    let workload = Workload {
        churn: Churn::new(options.size),
        rate: options.rate,
        duration: Duration::from_secs(options.seconds.into()),
    };
    let (ready_sender, ready) = oneshot::channel();
    let (process, result) = thread::scope(|scope| {
        let server = scope.spawn(|| {
            pin_to_core(None, core)?;
            policy_server::run(listener, workload, ready)
        });
        // If the gateway doesn't start, dropping the channel stops the server.
        let process = gateway.start(&testbed.gateway);
        if let Ok(process) = &process {
            // If the server has stopped, its own error is reported below.
            let _ = ready_sender.send(process.id());
        } else {
            drop(ready_sender);
        }
        let result = server.join().map_err(|_| anyhow!("the policy server has panicked"))?;
        Ok::<_, anyhow::Error>((process?, result?))
    })?;
    if result.rejection.is_none() {
        verify(&gateway, &result)?;
    }
    drop(process);
    Ok(report(options, result))
}

fn report(options: &Options, result: RunResult) -> (Report, Option<String>) {
    let ms = |latency: u64| round2(latency as f64 / 1e3);
    let latencies: &Histogram<u64> = &result.latencies;
    let seconds = result.duration.as_secs_f64();
    let report = Report {
        benchmark: "policy_effect",
        vips: options.size.vips,
        endpoints: options.size.endpoints,
        rate: options.rate,
        seconds: options.seconds,
        full_sync_ms: round2(result.full_sync.as_secs_f64() * 1e3),
        full_sync_mb: round2(result.full_sync_bytes as f64 / 1e6),
        changes: latencies.len(),
        p50_ms: ms(latencies.value_at_quantile(0.5)),
        p99_ms: ms(latencies.value_at_quantile(0.99)),
        p999_ms: ms(latencies.value_at_quantile(0.999)),
        max_ms: ms(latencies.max()),
        changes_per_second: round2(latencies.len() as f64 / seconds),
        updates: result.updates,
        updates_per_second: round2(result.updates as f64 / seconds),
        rejected: result.rejected,
        gateway_cpu: round2(result.gateway_ticks as f64 / 100.0 / seconds),
        noise: result.noise,
    };
    (report, result.rejection)
}

/// Verifies that the gateway's policy is the one after the last update.
fn verify(gateway: &Vipgate, result: &RunResult) -> Result<()> {
    let status = gateway.query("status")?;
    let policy = &status["policy"];
    let churn = &result.churn;
    let expected = [
        ("vips", churn.vip_count() as u64),
        ("endpoints", churn.endpoint_count() as u64),
        ("updates_applied", result.updates + 1),
        ("updates_rejected", 0),
    ];
    for (name, expected) in expected {
        ensure!(
            policy[name].as_u64() == Some(expected),
            "`vipgate status` has policy.{name} {}, expected {expected}",
            policy[name]
        );
    }
    ensure!(
        policy["version"] == result.version.as_str(),
        "policy {} is in force, expected {}",
        policy["version"],
        result.version
    );
    let output = gateway.query("endpoints")?;
    let listed = output["endpoints"].as_array().context("`vipgate endpoints` has no list `endpoints`")?;
    let actual: BTreeMap<&str, (&str, &Value)> =
        listed.iter().filter_map(|it| Some((it["address"].as_str()?, (it["policy"].as_str()?, &it["vips"])))).collect();
    ensure!(actual.len() == churn.endpoint_count(), "`vipgate endpoints` lists {} endpoints", actual.len());
    for endpoint in churn.endpoints() {
        let address = endpoint.address.to_string();
        let vips: Vec<String> = endpoint.vips.iter().map(ToString::to_string).collect();
        let expected = (&*endpoint.policy, &Value::from(vips));
        let actual = actual.get(&*address);
        ensure!(actual == Some(&expected), "endpoint {address} has {actual:?}, expected {expected:?}");
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} VIPs, {} endpoints, {} changes per second for {} s",
            self.vips, self.endpoints, self.rate, self.seconds
        )?;
        writeln!(f, "  full sync    {} ms, {} MB", self.full_sync_ms, self.full_sync_mb)?;
        writeln!(
            f,
            "  latency      {} ms (p50), {} ms (p99), {} ms (p99.9), {} ms (max)",
            self.p50_ms, self.p99_ms, self.p999_ms, self.max_ms
        )?;
        writeln!(
            f,
            "  changes      {} in {} updates: {} and {} per second, {} rejected",
            self.changes, self.updates, self.changes_per_second, self.updates_per_second, self.rejected
        )?;
        writeln!(f, "  gateway      {} cores", self.gateway_cpu)?;
        write!(f, "  {}", self.noise)
    }
}
