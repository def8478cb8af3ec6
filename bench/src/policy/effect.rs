//! From a change at a policy server to its effect: a whole gateway in network namespaces follows a server that is played here,
//! and says by its acknowledgements when changes are in force.
//!
//! Gateway and server share a core, as far as the gateway isn't a worker: the other core is the worker's.

mod script;

use std::collections::BTreeMap;
use std::fmt;
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::oneshot;

use self::script::{Outcome, Plan};
use super::churn::Churn;
use super::noise::Noise;
use super::{Size, show};
use crate::netns;
use crate::path::round2;
use crate::process::Process;
use crate::wire::Machine;
use crate::wire::ground::Ground;
use crate::wire::subject::{Placement, Setting};
use crate::wire::vipgate::{Policy, Vipgate};

/// Sessions that the gateway has room for; there are none.
const SESSIONS: u32 = 65_536;

/// What `vipgate-bench policy effect` takes.
#[derive(Debug, Args)]
pub(super) struct Options {
    #[command(flatten)]
    size: Size,
    /// Changes a second, each of one endpoint
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Seconds in which changes come
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    #[command(flatten)]
    machine: Machine,
    /// One JSON object on a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Line {
    benchmark: &'static str,
    vips: u32,
    endpoints: u32,
    rate: u32,
    seconds: u32,
    /// From the opening of the stream to the acknowledgement of the whole policy, and how large that is.
    full_sync_ms: f64,
    full_sync_mb: f64,
    changes: u64,
    /// From the moment at which a change is due to the acknowledgement of the update that it came with.
    p50_ms: f64,
    p99_ms: f64,
    p999_ms: f64,
    max_ms: f64,
    changes_per_second: f64,
    /// Updates that the changes came in.
    updates: u64,
    updates_per_second: f64,
    rejected: u64,
    /// Cores that the gateway's process kept busy while changes came.
    gateway_cpu: f64,
    #[serde(flatten)]
    noise: Noise,
}

/// Measures once.
pub(super) fn run(options: &Options) -> Result<()> {
    let cores = options.machine.cores()?;
    let gateway = options.machine.program()?;
    let setting = Setting { gateway, core: cores[1], placement: Placement::Source };
    netns::prepare()?;
    let (line, why) = measure(options, &setting, cores[0])?;
    show(&line, options.json)?;
    line.noise.warn();
    ensure!(line.rejected == 0, "the gateway has rejected changes: {}", why.unwrap_or_default());
    Ok(())
}

/// What was measured, and why the gateway has rejected changes, if it did.
fn measure(options: &Options, setting: &Setting, core: usize) -> Result<(Line, Option<String>)> {
    let ground = Ground::build()?;
    let folder = TempDir::with_prefix(netns::name("")).context("cannot make a folder for configuration")?;
    let listener = ground.gateway.run(core, || Ok(TcpListener::bind("127.0.0.1:0")?))?;
    let policy = Policy::Server(format!("http://{}", listener.local_addr()?));
    let gateway = Vipgate::configure(setting, SESSIONS, None, &policy, folder.path())?;
    let plan = Plan {
        churn: Churn::new(options.size),
        rate: options.rate,
        duration: Duration::from_secs(options.seconds.into()),
    };
    let (started, is_ready) = oneshot::channel();
    let (process, outcome) = thread::scope(|scope| {
        let serving = scope.spawn(|| {
            netns::pin(None, core)?;
            script::run(listener, plan, is_ready)
        });
        // What fails here ends the server: nobody tells it that the gateway is ready.
        let process = gateway.start(&ground.gateway).map(Process::from);
        if let Ok(process) = &process {
            // A server that has given up says why.
            let _ = started.send(process.id());
        } else {
            drop(started);
        }
        let outcome = serving.join().map_err(|_| anyhow!("the policy server has panicked"))?;
        Ok::<_, anyhow::Error>((process?, outcome?))
    })?;
    if outcome.rejection.is_none() {
        verify(&gateway, &outcome)?;
    }
    drop(process);
    Ok(line(options, outcome))
}

fn line(options: &Options, outcome: Outcome) -> (Line, Option<String>) {
    let ms = |latency: u64| round2(latency as f64 / 1e3);
    let latencies: &Histogram<u64> = &outcome.latencies;
    let seconds = outcome.took.as_secs_f64();
    let line = Line {
        benchmark: "policy_effect",
        vips: options.size.vips,
        endpoints: options.size.endpoints,
        rate: options.rate,
        seconds: options.seconds,
        full_sync_ms: round2(outcome.full_sync.as_secs_f64() * 1e3),
        full_sync_mb: round2(outcome.full_sync_bytes as f64 / 1e6),
        changes: latencies.len(),
        p50_ms: ms(latencies.value_at_quantile(0.5)),
        p99_ms: ms(latencies.value_at_quantile(0.99)),
        p999_ms: ms(latencies.value_at_quantile(0.999)),
        max_ms: ms(latencies.max()),
        changes_per_second: round2(latencies.len() as f64 / seconds),
        updates: outcome.updates,
        updates_per_second: round2(outcome.updates as f64 / seconds),
        rejected: outcome.rejected,
        gateway_cpu: round2(outcome.gateway_ticks as f64 / 100.0 / seconds),
        noise: outcome.noise,
    };
    (line, outcome.rejection)
}

/// The gateway has in force what the last update came to.
fn verify(gateway: &Vipgate, outcome: &Outcome) -> Result<()> {
    let status = gateway.ask("status")?;
    let policy = &status["policy"];
    let number = |name: &str| policy[name].as_u64();
    let churn = &outcome.churn;
    let expected = [
        ("vips", churn.vip_count() as u64),
        ("endpoints", churn.endpoint_count() as u64),
        ("updates_applied", outcome.updates + 1),
        ("updates_rejected", 0),
    ];
    for (name, expected) in expected {
        ensure!(number(name) == Some(expected), "`vipgate status` says {name} {}, not {expected}", policy[name]);
    }
    ensure!(
        policy["version"] == outcome.version.as_str(),
        "policy {} is in force, not {}",
        policy["version"],
        outcome.version
    );
    let answer = gateway.ask("endpoints")?;
    let listed = answer["endpoints"].as_array().context("`vipgate endpoints` lists none")?;
    let shown: BTreeMap<&str, (&str, &Value)> =
        listed.iter().filter_map(|it| Some((it["address"].as_str()?, (it["policy"].as_str()?, &it["vips"])))).collect();
    ensure!(shown.len() == churn.endpoint_count(), "`vipgate endpoints` lists {}", shown.len());
    for endpoint in churn.endpoints() {
        let address = endpoint.address.to_string();
        let vips: Vec<String> = endpoint.vips.iter().map(ToString::to_string).collect();
        let expected = (&*endpoint.policy, &Value::from(vips));
        let shown = shown.get(&*address);
        ensure!(shown == Some(&expected), "{address} is {shown:?}, not {expected:?}");
    }
    Ok(())
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} VIPs, {} endpoints, {} changes a second for {} s",
            self.vips, self.endpoints, self.rate, self.seconds
        )?;
        writeln!(f, "  full sync    {} ms, {} MB", self.full_sync_ms, self.full_sync_mb)?;
        writeln!(
            f,
            "  in force     after {} ms (50 %), {} ms (99 %), {} ms (99.9 %), {} ms at worst",
            self.p50_ms, self.p99_ms, self.p999_ms, self.max_ms
        )?;
        writeln!(
            f,
            "  changes      {} in {} updates: {} and {} a second, {} rejected",
            self.changes, self.updates, self.changes_per_second, self.updates_per_second, self.rejected
        )?;
        writeln!(f, "  gateway      {} cores", self.gateway_cpu)?;
        write!(f, "  {}", self.noise)
    }
}
