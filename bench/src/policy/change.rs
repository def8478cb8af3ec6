//! Change benchmark: one of many manifest files changes; each stage of the policy server is timed, from the rename of the
//! file to the responses on the streams of all gateways. In one process and without sockets, so that nothing else counts;
//! `vipgate-bench policy server` measures a whole server.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use hdrhistogram::Histogram;
use serde::Serialize;
use tempfile::TempDir;
use tokio::sync::mpsc::{self, Receiver};
use tokio::time::timeout;
use vipgate::policyd::stream::DeltaStream;
use vipgate::source::store::ManifestStore;
use vipgate::source::{SourceEvent, SourceUpdate, files};
use vipgate::xds::publication::Publication;
use vipgate::xds::resource::Kind;

use super::manifests::Manifests;
use super::noise::{Noise, NoiseMonitor};
use super::{PolicySize, print_result};
use crate::path::round2;

/// Timeout of a change's notification, and of the first read.
const TIMEOUT: Duration = Duration::from_mins(2);
/// Pause before a change: the watcher's scan after the previous one is complete.
const PAUSE: Duration = Duration::from_millis(250);
/// Wait before the first change: until then the watcher can't rely on the times of the new files.
const FIRST_WAIT: Duration = Duration::from_secs(10);

/// Options of `vipgate-bench policy change`.
#[derive(Debug, Args)]
pub(super) struct Options {
    #[command(flatten)]
    size: PolicySize,
    /// VipGateway manifests
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=255))]
    gateways: u32,
    /// Streams that receive each change
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    streams: u32,
    /// Changes, one after the other; each rewrites the file of one Service
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    changes: u32,
    /// Print one JSON object on one line
    #[arg(long)]
    json: bool,
}

/// The stages of a change, in order.
const STAGES: [(&str, &str); 5] = [
    ("notice", "file noticed and read"),
    ("parse", "manifests parsed"),
    ("compile", "policy compiled"),
    ("publish", "resources compared and encoded"),
    ("streams", "responses of all streams"),
];

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    files: u32,
    endpoints: u32,
    gateways: u32,
    streams: u32,
    changes: u32,
    /// Parse and compile time of all manifests at the start.
    start_ms: f64,
    stages: Vec<Stage>,
    /// From the rename of a file to the last stream's response.
    total: Stage,
    /// Bytes per stream and change.
    bytes_per_change: u64,
    #[serde(flatten)]
    noise: Noise,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Stage {
    #[serde(rename = "stage")]
    name: &'static str,
    p50_ms: f64,
    p99_ms: f64,
}

/// Runs the benchmark and prints the report.
pub(super) fn run(options: &Options) -> Result<()> {
    let directory = TempDir::new().context("cannot create a directory for manifests")?;
    let mut manifests = Manifests::write(directory.path(), options.size, options.gateways)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(measure(options, &mut manifests))?;
    runtime.shutdown_background();
    print_result(&report, options.json)?;
    report.noise.warn();
    Ok(())
}

async fn measure(options: &Options, manifests: &mut Manifests) -> Result<Report> {
    let mut server = Server::start(manifests.directory());
    let first = server.next_update().await?;
    let start = Instant::now();
    server.store.update(first);
    ensure!(server.compile_and_publish()?.is_some(), "the manifests have no policy");
    let start_ms = round2(start.elapsed().as_secs_f64() * 1e3);
    let mut streams = Streams::subscribe(options.streams, &server.published)?;
    tokio::time::sleep(FIRST_WAIT).await;
    let noise = NoiseMonitor::start(&[])?;
    let new_histogram = || Histogram::<u64>::new(3).expect("three significant digits are valid");
    let mut times: [Histogram<u64>; STAGES.len()] = std::array::from_fn(|_| new_histogram());
    let (mut total, mut bytes) = (new_histogram(), 0);
    for change in 0..options.changes {
        tokio::time::sleep(PAUSE).await;
        let start = Instant::now();
        manifests.change_one(change)?;
        let update = server.next_update().await?;
        let mut ends = vec![Instant::now()];
        ensure!(update.changed.len() == 1 && update.removed.is_empty(), "the update has other files, too");
        server.store.update(update);
        ends.push(Instant::now());
        let between = server.compile_and_publish()?.with_context(|| format!("change {change} has no effect"))?;
        ends.extend([between, Instant::now()]);
        bytes += streams.send(&server.published)?;
        ends.push(Instant::now());
        let mut previous = start;
        for (times, end) in times.iter_mut().zip(&ends) {
            times.record((*end - previous).as_micros() as u64)?;
            previous = *end;
        }
        total.record((previous - start).as_micros() as u64)?;
    }
    let noise = noise.finish()?;
    ensure!(server.published.version == manifests.expected_version()?, "the last policy isn't that of the manifests");
    let ms = |times: &Histogram<u64>, quantile| round2(times.value_at_quantile(quantile) as f64 / 1e3);
    let stage = |name, times| Stage { name, p50_ms: ms(times, 0.5), p99_ms: ms(times, 0.99) };
    Ok(Report {
        benchmark: "policy_change",
        files: options.size.vips,
        endpoints: options.size.endpoints,
        gateways: options.gateways,
        streams: options.streams,
        changes: options.changes,
        start_ms,
        stages: STAGES.iter().zip(&times).map(|((name, _), times)| stage(*name, times)).collect(),
        total: stage("total", &total),
        bytes_per_change: bytes / u64::from(options.changes) / u64::from(options.streams),
        noise,
    })
}

/// A policy server up to its publications.
struct Server {
    events: Receiver<SourceEvent>,
    store: ManifestStore,
    published: Arc<Publication>,
}

impl Server {
    /// Watches a directory.
    fn start(manifests: &Path) -> Self {
        let (sender, events) = mpsc::channel(16);
        tokio::spawn(files::watch_paths(vec![manifests.to_owned()], sender));
        Self { events, store: ManifestStore::new(false), published: Arc::default() }
    }

    /// The next update that has a change.
    async fn next_update(&mut self) -> Result<SourceUpdate> {
        loop {
            match timeout(TIMEOUT, self.events.recv()).await.context("no change was noticed")? {
                Some(SourceEvent::Update(update)) if update.changed.is_empty() && update.removed.is_empty() => {}
                Some(SourceEvent::Update(update)) => return Ok(update),
                other => bail!("the source has failed: {other:?}"),
            }
        }
    }

    /// Compiles and publishes; returns when it was compiled, or `None` if nothing has changed.
    fn compile_and_publish(&mut self) -> Result<Option<Instant>> {
        let outcome = self.store.compile();
        let compiled = Instant::now();
        let placement = outcome.placement.context("there is no policy")?;
        let Some(next) = self.published.next(placement) else { return Ok(None) };
        // Encoded once for all streams.
        next.delta();
        self.published = Arc::new(next);
        Ok(Some(compiled))
    }
}

/// The streams of the gateways.
struct Streams(Vec<DeltaStream>);

impl Streams {
    /// Streams that have subscribed to everything, and have acknowledged it.
    fn subscribe(count: u32, published: &Arc<Publication>) -> Result<Self> {
        let mut streams = Self((0..count).map(|_| DeltaStream::default()).collect());
        for stream in &mut streams.0 {
            for kind in Kind::OF_GATEWAYS {
                let request =
                    DeltaDiscoveryRequest { type_url: kind.type_url().to_owned(), ..DeltaDiscoveryRequest::default() };
                stream.handle_request(request, published)?;
            }
            drain(stream, published)?;
        }
        Ok(streams)
    }

    /// Sends a publication to all streams; returns the number of bytes.
    fn send(&mut self, published: &Arc<Publication>) -> Result<u64> {
        let mut bytes = 0;
        for stream in &mut self.0 {
            let update = stream.update(published)?.context("a stream has no update")?;
            stream.publish(update);
            bytes += drain(stream, published)?;
        }
        Ok(bytes)
    }
}

/// Takes and acknowledges all responses of a stream; returns their length.
fn drain(stream: &mut DeltaStream, published: &Arc<Publication>) -> Result<u64> {
    let mut bytes = 0;
    while let Some(response) = stream.next_response() {
        bytes += response.bytes.len() as u64;
        // Any known type: an acknowledgment names the response by its nonce.
        let type_url = Kind::Settings.type_url().to_owned();
        let request =
            DeltaDiscoveryRequest { type_url, response_nonce: response.nonce, ..DeltaDiscoveryRequest::default() };
        stream.handle_request(request, published)?;
    }
    Ok(bytes)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} files, {} endpoints, {} gateways, {} streams, {} changes; started in {} ms",
            self.files, self.endpoints, self.gateways, self.streams, self.changes, self.start_ms
        )?;
        for (stage, (name, what)) in self.stages.iter().zip(STAGES) {
            writeln!(f, "  {name:<8} {} ms (p50), {} ms (p99): {what}", stage.p50_ms, stage.p99_ms)?;
        }
        writeln!(f, "  total    {} ms (p50), {} ms (p99)", self.total.p50_ms, self.total.p99_ms)?;
        writeln!(f, "  {} bytes per stream and change", self.bytes_per_change)?;
        write!(f, "  {}", self.noise)
    }
}
