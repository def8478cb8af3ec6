//! A whole policy server with many gateways: manifests in files, a stream for each gateway over a connection of its own. All of
//! it shares this machine, so what the gateways cost is part of what is measured.

mod gateways;
mod manifests;
mod policyd;

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use tempfile::TempDir;

use self::gateways::Gateways;
use self::manifests::Manifests;
use self::policyd::Policyd;
use super::noise::{Noise, Watch};
use super::show;
use crate::netns;
use crate::path::round2;
use crate::usage;
use crate::wire::program;

/// How long the server may take to read its manifests, all gateways to be in sync, and a change to be everywhere.
const PATIENCE: Duration = Duration::from_mins(5);
/// Between a change that is everywhere and the next one: the server looks at its files once more after each.
const PAUSE: Duration = Duration::from_millis(250);

/// What `vipgate-bench policy server` takes.
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
    /// Changes, one after the other; each rewrites the file of one Service
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    changes: u32,
    /// The server's program; default: `vipgate` beside this one
    #[arg(long)]
    program: Option<std::path::PathBuf>,
    /// One JSON object on a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Line {
    benchmark: &'static str,
    gateways: u32,
    services: u32,
    endpoints: u32,
    changes: u32,
    /// From the start of the server to its first policy.
    ready_ms: f64,
    /// From the first connection until every gateway has the whole policy.
    sync_ms: f64,
    /// Memory of the server before gateways come, when all have come, behind the last change, and the most that it ever was.
    rss_before_mb: f64,
    rss_after_mb: f64,
    rss_end_mb: f64,
    rss_peak_mb: f64,
    /// What the server says of compiling a change.
    compile_p50_ms: f64,
    /// From the writing of a file until the first, the middle, 99 % and the last of the gateways are told.
    first: Percentiles,
    middle: Percentiles,
    most: Percentiles,
    last: Percentiles,
    /// Processor time of the server and of the gateways that are played, until all are in sync, and for each change.
    sync_cpu_s: f64,
    sync_gateways_cpu_s: f64,
    change_cpu_ms: f64,
    change_gateways_cpu_ms: f64,
    /// Streams that ended, and were opened again; why the last of them did.
    streams_lost: u64,
    lost_because: Option<String>,
    #[serde(flatten)]
    noise: Noise,
}

/// Of all changes.
#[derive(Clone, Copy, Debug, Serialize)]
struct Percentiles {
    p50_ms: f64,
    p99_ms: f64,
}

/// Measures once.
pub(super) fn run(options: &Options) -> Result<()> {
    let program = program(options.program.as_deref(), "--program")?;
    netns::prepare_folders()?;
    policyd::allow_files(u64::from(options.gateways))?;
    let folder = TempDir::with_prefix(netns::name("")).context("cannot make a folder for manifests")?;
    let mut manifests = Manifests::write(folder.path(), options.services, options.endpoints)?;
    let begun = Instant::now();
    let policyd = Policyd::start(&program, manifests.folder(), folder.path())?;
    let ready = begun.elapsed();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let line = runtime.block_on(measure(options, ready, &policyd, &mut manifests))?;
    // Streams that are cut when the server goes are nobody's business any more.
    runtime.shutdown_background();
    show(&line, options.json)?;
    line.noise.warn();
    Ok(())
}

/// Processor time in ticks: of the server, and of this process.
fn ticks(policyd: &Policyd) -> Result<[u64; 2]> {
    Ok([usage::process(policyd.id())?, usage::process(std::process::id())?])
}

async fn measure(options: &Options, ready: Duration, policyd: &Policyd, manifests: &mut Manifests) -> Result<Line> {
    let before = usage::memory(policyd.id())?;
    let watch = Watch::begin(&[policyd.id()])?;
    let begun_ticks = ticks(policyd)?;
    let mut gateways = Gateways::connect(options.gateways, policyd.url());
    let synced = gateways.in_step(PATIENCE).await.context("not all gateways are in sync")?;
    let (after, synced_ticks) = (usage::memory(policyd.id())?, ticks(policyd)?);

    let mut times: [Histogram<u64>; 4] = [(); 4].map(|()| Histogram::new(3).expect("three digits are possible"));
    for change in 0..options.changes {
        tokio::time::sleep(PAUSE).await;
        gateways.forget();
        manifests.change(change)?;
        let told = gateways.in_step(PATIENCE).await.with_context(|| format!("change {change} isn't everywhere"))?;
        for (times, percent) in times.iter_mut().zip([0, 50, 99, 100]) {
            let at = ((told.times.len() - 1) * percent).div_ceil(100);
            times.record(told.times[at].as_micros() as u64)?;
        }
    }
    let (last_ticks, noise, end) = (ticks(policyd)?, watch.end()?, usage::memory(policyd.id())?);
    let version = gateways.version();
    let expected = manifests.version()?;
    ensure!(version == expected, "gateways have policy {version} in the end, but manifests come to {expected}");

    let ms = |times: &Histogram<u64>, quantile| round2(times.value_at_quantile(quantile) as f64 / 1e3);
    let [first, middle, most, last] =
        times.map(|times| Percentiles { p50_ms: ms(&times, 0.5), p99_ms: ms(&times, 0.99) });
    let mb = |bytes: u64| round2(bytes as f64 / 1e6);
    let spent = |at: usize, from: [u64; 2], to: [u64; 2]| (to[at] - from[at]) as f64 / 100.0;
    let each = |at| round2(spent(at, synced_ticks, last_ticks) * 1e3 / f64::from(options.changes));
    Ok(Line {
        benchmark: "policy_server",
        gateways: options.gateways,
        services: options.services,
        endpoints: options.endpoints,
        changes: options.changes,
        ready_ms: round2(ready.as_secs_f64() * 1e3),
        sync_ms: round2(synced.times.last().copied().unwrap_or_default().as_secs_f64() * 1e3),
        rss_before_mb: mb(before.now),
        rss_after_mb: mb(after.now),
        rss_end_mb: mb(end.now),
        rss_peak_mb: mb(end.most),
        compile_p50_ms: policyd.compile_ms()?,
        first,
        middle,
        most,
        last,
        sync_cpu_s: spent(0, begun_ticks, synced_ticks),
        sync_gateways_cpu_s: spent(1, begun_ticks, synced_ticks),
        change_cpu_ms: each(0),
        change_gateways_cpu_ms: each(1),
        streams_lost: gateways.lost(),
        lost_because: gateways.why().map(str::to_owned),
        noise,
    })
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} gateways, {} Services, {} endpoints, {} changes",
            self.gateways, self.services, self.endpoints, self.changes
        )?;
        writeln!(f, "  ready        after {} ms", self.ready_ms)?;
        writeln!(
            f,
            "  all in sync  after {} ms; {} s of processor, {} s of the gateways",
            self.sync_ms, self.sync_cpu_s, self.sync_gateways_cpu_s
        )?;
        writeln!(
            f,
            "  memory       {} MB before, {} MB after, {} MB behind the changes, {} MB at most",
            self.rss_before_mb, self.rss_after_mb, self.rss_end_mb, self.rss_peak_mb
        )?;
        for (name, times) in [("first", self.first), ("50 %", self.middle), ("99 %", self.most), ("last", self.last)] {
            writeln!(f, "  told {name:<7} after {} ms (50 %), {} ms (99 %)", times.p50_ms, times.p99_ms)?;
        }
        writeln!(
            f,
            "  a change     {} ms of compiling, {} ms of processor, {} ms of the gateways",
            self.compile_p50_ms, self.change_cpu_ms, self.change_gateways_cpu_ms
        )?;
        let why = self.lost_because.as_deref().map(|why| format!(", the last one because {why}")).unwrap_or_default();
        writeln!(f, "  streams      {} lost{why}", self.streams_lost)?;
        write!(f, "  {}", self.noise)
    }
}
