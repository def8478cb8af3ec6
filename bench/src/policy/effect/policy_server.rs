//! Simulated policy server: sends one gateway the whole policy, then changes at a constant rate. An update is in force
//! when the gateway ACKs the settings resource that ends it.
//!
//! Changes follow a fixed schedule, independent of the gateway's progress: queueing delay is part of the latency.

mod ads_service;

use std::collections::{BTreeSet, VecDeque};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use hdrhistogram::Histogram;
use prost::Message;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use vipgate::xds::proto;
use vipgate::xds::publication::{EncodedResponse, Publication, PublishedResource, encode_responses};
use vipgate::xds::resource::{Content, Key, Kind, settings};
use vipgate_dataplane::policy::spec::EndpointSpec;
use vipgate_policy::fingerprint::Fingerprint;

use crate::policy::churn::{Churn, endpoint_address};
use crate::policy::effect::policy_server::ads_service::GatewayStream;
use crate::policy::noise::{Noise, NoiseMonitor};
use crate::usage;

/// Maximum number of unacknowledged updates.
const MAX_IN_FLIGHT: usize = 1000;
/// Timeout of the full sync, and of outstanding ACKs after the last change.
const TIMEOUT: Duration = Duration::from_mins(1);

#[derive(Debug)]
pub(super) struct Workload {
    pub(super) churn: Churn,
    /// Changes per second.
    pub(super) rate: u32,
    pub(super) duration: Duration,
}

/// Result of a run.
#[derive(Debug)]
pub(super) struct RunResult {
    pub(super) full_sync: Duration,
    pub(super) full_sync_bytes: usize,
    /// Latency of each change, in microseconds.
    pub(super) latencies: Histogram<u64>,
    pub(super) updates: u64,
    /// From the first change to the last ACK.
    pub(super) duration: Duration,
    /// Number of changes in rejected updates, and the reason. A rejection ends the run.
    pub(super) rejected: u64,
    pub(super) rejection: Option<String>,
    /// The policy after the last change, and its version.
    pub(super) churn: Churn,
    pub(super) version: String,
    /// CPU time of the gateway during the changes, in ticks of 10 ms.
    pub(super) gateway_ticks: u64,
    pub(super) noise: Noise,
}

/// Serves one gateway. Starts the changes when `ready` receives the gateway's process ID.
pub(super) fn run(listener: TcpListener, workload: Workload, ready: oneshot::Receiver<u32>) -> Result<RunResult> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Encoded before the gateway connects, as by a policy server.
        let policy = EncodedPolicy::new(&workload.churn)?;
        let mut streams = ads_service::serve(listener)?;
        let full_sync = async {
            let synced = timeout(TIMEOUT, async {
                let mut stream = streams.recv().await.context("the server has stopped")?;
                let duration = send_full_policy(&mut stream, &policy).await?;
                Ok::<_, anyhow::Error>((stream, duration))
            });
            synced.await.context("the full sync timed out")?
        };
        let ready = async { ready.await.context("the gateway did not start") };
        let ((mut stream, full_sync), pid) = tokio::try_join!(full_sync, ready)?;
        ChangeStream::new(workload, &policy).run(&mut stream, pid, full_sync).await
    })
}

/// A whole policy, encoded.
struct EncodedPolicy {
    responses: Vec<(Kind, DeltaDiscoveryResponse)>,
    bytes: usize,
    counts: [usize; Kind::COUNTED],
    sum: u64,
    version: String,
}

impl EncodedPolicy {
    fn new(churn: &Churn) -> Result<Self> {
        let publication = Publication::default().next(Arc::new(churn.placement())).context("the policy is empty")?;
        let count = |kind| publication.count(kind);
        let all = || Kind::OF_GATEWAYS.into_iter().flat_map(|kind| publication.of_kind(kind));
        let chunks: Vec<EncodedResponse> =
            Kind::OF_GATEWAYS.into_iter().flat_map(|kind| publication.full(kind).to_vec()).collect();
        Ok(Self {
            bytes: chunks.iter().map(|chunk| chunk.bytes.len()).sum(),
            responses: chunks.iter().map(decode).collect::<Result<_>>()?,
            counts: [
                count(Kind::EgressPolicy),
                count(Kind::ShardMap),
                count(Kind::Vip),
                count(Kind::Endpoint),
                count(Kind::BackendSlice),
                count(Kind::Service),
                count(Kind::Gateway),
                count(Kind::OverlayNode),
                count(Kind::Cluster),
            ],
            sum: all().fold(0, |sum, it| sum.wrapping_add(it.content.version)),
            version: publication.version,
        })
    }
}

/// Decodes a chunk into the message type of the generated server.
fn decode(chunk: &EncodedResponse) -> Result<(Kind, DeltaDiscoveryResponse)> {
    Ok((chunk.kind, DeltaDiscoveryResponse::decode(chunk.bytes.clone())?))
}

/// Sends all subscribed resources; returns the time from the opening of the stream until the policy is in force.
async fn send_full_policy(stream: &mut GatewayStream, policy: &EncodedPolicy) -> Result<Duration> {
    let mut last_nonce = None;
    loop {
        let request = stream.next_request().await?;
        if let Some(error) = request.error_detail {
            bail!("the gateway rejected the initial policy: {}", error.message);
        }
        if !request.response_nonce.is_empty() {
            if last_nonce.as_ref() == Some(&request.response_nonce) {
                return Ok(stream.opened.elapsed());
            }
            continue;
        }
        ensure!(request.initial_resource_versions.is_empty(), "the gateway subscribed with initial resource versions");
        let kind = Kind::from_type_url(&request.type_url)
            .with_context(|| format!("the gateway subscribed to unknown type {}", request.type_url))?;
        for (_, response) in policy.responses.iter().filter(|(of, _)| *of == kind) {
            let nonce = stream.send(response.clone()).await?;
            if kind == Kind::Settings {
                last_nonce = Some(nonce);
            }
        }
    }
}

/// An unacknowledged update.
#[derive(Debug)]
struct Update {
    /// Nonce of its settings resource.
    nonce: String,
    /// Its changes, by number.
    changes: std::ops::Range<u64>,
}

/// Sends changes on schedule.
struct ChangeStream {
    churn: Churn,
    rate: u32,
    total: u64,
    start: Instant,
    /// Number of changes sent.
    sent: u64,
    in_flight: VecDeque<Update>,
    counts: [usize; Kind::COUNTED],
    sum: u64,
    version: String,
    full_sync_bytes: usize,
    latencies: Histogram<u64>,
    updates: u64,
    rejected: u64,
    rejection: Option<String>,
}

impl ChangeStream {
    fn new(Workload { churn, rate, duration }: Workload, initial: &EncodedPolicy) -> Self {
        Self {
            churn,
            rate,
            total: duration.as_secs() * u64::from(rate),
            start: Instant::now(),
            sent: 0,
            in_flight: VecDeque::new(),
            counts: initial.counts,
            sum: initial.sum,
            version: initial.version.clone(),
            full_sync_bytes: initial.bytes,
            latencies: Histogram::new(3).expect("three significant digits are valid"),
            updates: 0,
            rejected: 0,
            rejection: None,
        }
    }

    /// Scheduled time of a change.
    fn due(&self, change: u64) -> Instant {
        self.start + Duration::from_secs(1).mul_f64(change as f64 / f64::from(self.rate))
    }

    async fn run(mut self, stream: &mut GatewayStream, gateway_pid: u32, full_sync: Duration) -> Result<RunResult> {
        let (noise, ticks) = (NoiseMonitor::start(&[gateway_pid])?, usage::process_ticks(gateway_pid)?);
        self.start = Instant::now();
        let deadline = self.due(self.total) + TIMEOUT;
        while self.rejection.is_none() && (self.sent < self.total || !self.in_flight.is_empty()) {
            let may_send = self.sent < self.total && self.in_flight.len() < MAX_IN_FLIGHT;
            tokio::select! {
                biased;
                request = stream.next_request() => self.handle_request(request?)?,
                () = sleep_until(self.due(self.sent)), if may_send => self.send_due_changes(stream).await?,
                () = sleep_until(deadline) => bail!("{} updates were not acknowledged", self.in_flight.len()),
            }
        }
        let took = self.start.elapsed();
        Ok(RunResult {
            full_sync,
            full_sync_bytes: self.full_sync_bytes,
            latencies: self.latencies,
            updates: self.updates,
            duration: took,
            rejected: self.rejected,
            rejection: self.rejection,
            churn: self.churn,
            version: self.version,
            gateway_ticks: usage::process_ticks(gateway_pid)? - ticks,
            noise: noise.finish()?,
        })
    }

    /// Sends an update with all due changes.
    async fn send_due_changes(&mut self, stream: &mut GatewayStream) -> Result<()> {
        let due = self.start.elapsed().as_micros() as u64 * u64::from(self.rate) / 1_000_000 + 1;
        let changes = self.sent..due.clamp(self.sent + 1, self.total);
        let changed: BTreeSet<u32> = changes.clone().map(|_| self.churn.change_next()).collect();
        let (mut updated, mut removed) = (Vec::new(), Vec::new());
        for number in changed {
            match self.churn.endpoint(number) {
                Some(endpoint) => updated.push(published(&endpoint, self.updates)),
                None => removed.push(endpoint_address(number).to_string()),
            }
        }
        self.counts[Kind::Endpoint as usize] = self.churn.endpoint_count();
        // Any unused value.
        self.sum = self.sum.wrapping_add(1);
        let (key, content, version) = settings(self.counts, self.sum);
        let settings_resource = [PublishedResource { key, content, changed_in: self.updates }];
        let mut update = encode_responses(&version, Kind::Endpoint, updated.iter(), removed);
        update.extend(encode_responses(&version, Kind::Settings, settings_resource.iter(), Vec::new()));
        let mut nonce = String::new();
        for chunk in &update {
            nonce = stream.send(decode(chunk)?.1).await?;
        }
        self.sent = changes.end;
        self.version = version;
        self.updates += 1;
        self.in_flight.push_back(Update { nonce, changes });
        Ok(())
    }

    /// Handles an ACK or NACK.
    fn handle_request(&mut self, request: DeltaDiscoveryRequest) -> Result<()> {
        let now = Instant::now();
        if let Some(error) = request.error_detail {
            self.rejection = Some(error.message);
            self.rejected = self.in_flight.iter().map(|update| update.changes.end - update.changes.start).sum();
            return Ok(());
        }
        // Other nonces are those of earlier responses of an update.
        if self.in_flight.front().is_some_and(|update| update.nonce == request.response_nonce)
            && let Some(update) = self.in_flight.pop_front()
        {
            for change in update.changes {
                let latency = now.saturating_duration_since(self.due(change));
                self.latencies.record(latency.as_micros() as u64)?;
            }
        }
        Ok(())
    }
}

/// An endpoint as published by a policy server.
fn published(endpoint: &EndpointSpec, since: u64) -> PublishedResource {
    let address = endpoint.address.to_string();
    let message = proto::Endpoint {
        address: address.clone(),
        name: endpoint.name.to_string(),
        policy: endpoint.policy.to_string(),
        vips: endpoint.vips.iter().map(ToString::to_string).collect(),
        gateway: String::new(),
        remarks: Vec::new(),
        ..proto::Endpoint::default()
    };
    let body = message.encode_to_vec();
    let content = Content { version: Fingerprint::of(&body), body: body.into() };
    PublishedResource { key: Key { kind: Kind::Endpoint, name: address.into() }, content, changed_in: since }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::path::Path;
    use std::thread;

    use tokio::sync::mpsc;
    use vipgate::config::PolicyServer;
    use vipgate::xds::client::{Client, ClientEvent, Effect, Rejection};
    use vipgate_dataplane::policy::build::Builder;
    use vipgate_dataplane::policy::spec::NetworkSpec;
    use vipgate_policy::compiler::GatewayLocality;

    use super::*;
    use crate::policy::PolicySize;

    /// Simulates the policy subscription of a gateway. Rejects all updates after the first `max_updates`.
    async fn subscribe(
        url: String,
        cache: &Path,
        max_updates: usize,
        ready: oneshot::Sender<u32>,
        mut server_done: oneshot::Receiver<()>,
    ) -> Builder {
        let (sender, mut events) = mpsc::channel(4);
        let cache = cache.to_owned();
        let server = PolicyServer { url, other_urls: Vec::new(), ca: None, cert: None, key: None, token: None, cache };
        let (client, cached) = Client::open(GatewayLocality::named("gw-bench"), server, sender);
        assert!(cached.is_none());
        let client = tokio::spawn(client.run());
        let mut builder = Builder::new(NetworkSpec::default());
        let (mut applied, mut ready) = (0, Some(ready));
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                _ = &mut server_done => break,
            };
            let Some(ClientEvent::Update(update, reply)) = event else { panic!("{event:?}") };
            let result = if applied == max_updates {
                Err(Rejection { resource: None, reason: "limit reached".to_owned() })
            } else {
                builder.with_change(&update.change).unwrap();
                Ok(Effect::InForce)
            };
            applied += usize::from(result.is_ok());
            reply.send(result).unwrap();
            if let Some(ready) = ready.take() {
                ready.send(std::process::id()).unwrap();
            }
        }
        client.abort();
        builder
    }

    fn run_with_gateway(max_updates: usize) -> (RunResult, Builder) {
        let directory = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let churn = Churn::new(PolicySize { vips: 20, endpoints: 300 });
        let workload = Workload { churn, rate: 300, duration: Duration::from_secs(1) };
        let (ready_sender, ready) = oneshot::channel();
        let (done_sender, server_done) = oneshot::channel();
        let server = thread::spawn(|| {
            let result = run(listener, workload, ready);
            let _ = done_sender.send(());
            result.unwrap()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let cache = directory.path().join("cache");
        let builder = runtime.block_on(subscribe(url, &cache, max_updates, ready_sender, server_done));
        (server.join().unwrap(), builder)
    }

    #[test]
    fn all_changes_are_applied_and_their_latency_is_recorded() {
        let (result, builder) = run_with_gateway(usize::MAX);
        assert_eq!((result.latencies.len(), result.rejection), (300, None));
        assert!(result.full_sync_bytes > 300 * 50 && result.updates <= 300);
        let policy = builder.snapshot().policy;
        let mut applied: Vec<_> = policy.endpoints().map(|(address, _)| address).collect();
        applied.sort();
        assert!(result.churn.endpoints().map(|endpoint| endpoint.address).eq(applied));
        assert_eq!(policy.version(), result.version);
    }

    #[test]
    fn a_rejection_ends_the_run() {
        let (result, _) = run_with_gateway(3);
        assert_eq!(result.rejection.as_deref(), Some("limit reached"));
        assert!(result.rejected > 0 && result.latencies.len() < 300);
    }
}
