//! Policy server benchmark: `vipgate policyd` with many simulated gateways, each with its own connection and stream,
//! and manifests in files. All of it runs on this machine, so results include the cost of the simulated gateways.

mod policyd;
mod subscribers;

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;

use self::policyd::Policyd;
use super::manifests::Manifests;
use super::noise::{Noise, NoiseMonitor};
use super::{PolicySize, print_result};
use crate::machine::clean_up_on_signals;
use crate::path::round2;
use crate::policy::server::subscribers::Gateways;
use crate::usage;
use crate::wire::binary_path;

/// Timeout of the server's startup, of the initial sync, and of the distribution of a change.
const TIMEOUT: Duration = Duration::from_mins(5);
/// Pause between a completed change and the next one: the server reads its files once more after each change.
const PAUSE: Duration = Duration::from_millis(250);

/// Options of `vipgate-bench policy server`.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Gateways, each with its own connection and stream
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    gateways: u32,
    /// Services, each in its own file, with a VIP and an egress policy
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=16_000))]
    services: u32,
    /// Endpoints of all Services together
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=200_000))]
    endpoints: u32,
    /// VipGateway manifests; without any, each gateway owns everything
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    gateway_manifests: u32,
    /// Changes, one after the other; each rewrites the file of one Service
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    changes: u32,
    /// The server binary; default: `vipgate` in the directory of this program
    #[arg(long)]
    program: Option<std::path::PathBuf>,
    /// Print one JSON object on one line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    gateways: u32,
    services: u32,
    endpoints: u32,
    changes: u32,
    /// From the start of the server to its first policy.
    ready_ms: f64,
    /// From the first connection until every gateway has received the whole policy.
    sync_ms: f64,
    /// Resident memory of the server: before gateways connect, after the sync, after the last change, and peak.
    rss_before_mb: f64,
    rss_after_mb: f64,
    rss_end_mb: f64,
    rss_peak_mb: f64,
    /// Compile time of a change, from the server's log.
    compile_p50_ms: f64,
    /// From the writing of a file until the first, 50 %, 99 % and all of the gateways have received the change.
    first: Percentiles,
    #[serde(rename = "middle")]
    half: Percentiles,
    most: Percentiles,
    last: Percentiles,
    /// CPU time of the server and of the simulated gateways, for the sync and per change.
    sync_cpu_s: f64,
    sync_gateways_cpu_s: f64,
    change_cpu_ms: f64,
    change_gateways_cpu_ms: f64,
    /// Reconnected streams, and the error of the last one.
    streams_lost: u64,
    #[serde(rename = "lost_because")]
    last_stream_error: Option<String>,
    #[serde(flatten)]
    noise: Noise,
}

/// Percentiles over all changes.
#[derive(Clone, Copy, Debug, Serialize)]
struct Percentiles {
    p50_ms: f64,
    p99_ms: f64,
}

/// Runs the benchmark and prints the report.
pub(super) fn run(options: &Options) -> Result<()> {
    let binary = binary_path(options.program.as_deref(), "--program")?;
    clean_up_on_signals()?;
    policyd::raise_file_limit(u64::from(options.gateways))?;
    let directory = vipgate_lab::directory().context("cannot create a directory for manifests")?;
    let size = PolicySize { vips: options.services, endpoints: options.endpoints };
    let mut manifests = Manifests::write(directory.path(), size, options.gateway_manifests)?;
    let start = Instant::now();
    let policyd = Policyd::start(&binary, manifests.directory(), directory.path())?;
    let ready = start.elapsed();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(measure(options, ready, &policyd, &mut manifests))?;
    // Stops the gateways before the server, so that they don't report lost streams.
    runtime.shutdown_background();
    print_result(&report, options.json)?;
    report.noise.warn();
    Ok(())
}

/// CPU time in ticks: of the server, and of this process.
fn ticks(policyd: &Policyd) -> Result<[u64; 2]> {
    Ok([usage::process_ticks(policyd.pid())?, usage::process_ticks(std::process::id())?])
}

async fn measure(options: &Options, ready: Duration, policyd: &Policyd, manifests: &mut Manifests) -> Result<Report> {
    let before = usage::resident_memory(policyd.pid())?;
    let noise = NoiseMonitor::start(&[policyd.pid()])?;
    let start_ticks = ticks(policyd)?;
    let mut gateways = Gateways::connect(options.gateways, policyd.url());
    let synced = gateways.wait_converged(TIMEOUT).await.context("the initial sync is incomplete")?;
    let (after, synced_ticks) = (usage::resident_memory(policyd.pid())?, ticks(policyd)?);

    let mut times: [Histogram<u64>; 4] =
        [(); 4].map(|()| Histogram::new(3).expect("three significant digits are valid"));
    for change in 0..options.changes {
        tokio::time::sleep(PAUSE).await;
        gateways.restart_clock();
        manifests.change_one(change)?;
        let received = gateways
            .wait_converged(TIMEOUT)
            .await
            .with_context(|| format!("not all gateways have received change {change}"))?;
        for (times, percent) in times.iter_mut().zip([0, 50, 99, 100]) {
            let rank = ((received.times.len() - 1) * percent).div_ceil(100);
            times.record(received.times[rank].as_micros() as u64)?;
        }
    }
    let (end_ticks, noise, end) = (ticks(policyd)?, noise.finish()?, usage::resident_memory(policyd.pid())?);
    let version = gateways.version();
    let expected = manifests.expected_version()?;
    ensure!(version == expected, "the gateways' final policy is {version}, expected {expected}");

    let ms = |times: &Histogram<u64>, quantile| round2(times.value_at_quantile(quantile) as f64 / 1e3);
    let [first, half, most, last] =
        times.map(|times| Percentiles { p50_ms: ms(&times, 0.5), p99_ms: ms(&times, 0.99) });
    let mb = |bytes: u64| round2(bytes as f64 / 1e6);
    let cpu_seconds = |at: usize, from: [u64; 2], to: [u64; 2]| (to[at] - from[at]) as f64 / 100.0;
    let ms_per_change = |at| round2(cpu_seconds(at, synced_ticks, end_ticks) * 1e3 / f64::from(options.changes));
    Ok(Report {
        benchmark: "policy_server",
        gateways: options.gateways,
        services: options.services,
        endpoints: options.endpoints,
        changes: options.changes,
        ready_ms: round2(ready.as_secs_f64() * 1e3),
        sync_ms: round2(synced.times.last().copied().unwrap_or_default().as_secs_f64() * 1e3),
        rss_before_mb: mb(before.current),
        rss_after_mb: mb(after.current),
        rss_end_mb: mb(end.current),
        rss_peak_mb: mb(end.peak),
        compile_p50_ms: policyd.compile_ms()?,
        first,
        half,
        most,
        last,
        sync_cpu_s: cpu_seconds(0, start_ticks, synced_ticks),
        sync_gateways_cpu_s: cpu_seconds(1, start_ticks, synced_ticks),
        change_cpu_ms: ms_per_change(0),
        change_gateways_cpu_ms: ms_per_change(1),
        streams_lost: gateways.lost_streams(),
        last_stream_error: gateways.last_error().map(str::to_owned),
        noise,
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} gateways, {} Services, {} endpoints, {} changes",
            self.gateways, self.services, self.endpoints, self.changes
        )?;
        writeln!(f, "  ready        after {} ms", self.ready_ms)?;
        writeln!(
            f,
            "  sync         {} ms; CPU time {} s of the server, {} s of the gateways",
            self.sync_ms, self.sync_cpu_s, self.sync_gateways_cpu_s
        )?;
        writeln!(
            f,
            "  memory       {} MB before the sync, {} MB after it, {} MB after the changes, {} MB peak",
            self.rss_before_mb, self.rss_after_mb, self.rss_end_mb, self.rss_peak_mb
        )?;
        for (name, times) in [("first", self.first), ("50 %", self.half), ("99 %", self.most), ("last", self.last)] {
            writeln!(f, "  received     by {name:<5} {} ms (p50), {} ms (p99)", times.p50_ms, times.p99_ms)?;
        }
        writeln!(
            f,
            "  per change   {} ms to compile; CPU time {} ms of the server, {} ms of the gateways",
            self.compile_p50_ms, self.change_cpu_ms, self.change_gateways_cpu_ms
        )?;
        let error = self.last_stream_error.as_deref().map(|error| format!(", last error: {error}")).unwrap_or_default();
        writeln!(f, "  streams      {} lost{error}", self.streams_lost)?;
        write!(f, "  {}", self.noise)
    }
}
