//! The policy server that is played: tells one gateway everything, then, at a steady rate, what changes. What it has said
//! counts as in force when the gateway acknowledges the settings that end an update.
//!
//! Changes are due when they are due, whatever the gateway does meanwhile: those that come too fast wait, and their waiting is
//! part of what is measured.

mod door;

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
use vipgate::policy::Fingerprint;
use vipgate::policyd::publication::{Chunk, Publication, Published, chunks};
use vipgate::xds::proto;
use vipgate::xds::resource::{Content, Key, Kind, settings};
use vipgate_dataplane::snapshot::spec::EndpointSpec;

use self::door::Stream;
use crate::policy::churn::{Churn, endpoint_address};
use crate::policy::noise::{Noise, Watch};
use crate::usage;

/// Updates that may be on their way; then, changes wait.
const IN_FLIGHT: usize = 1000;
/// How long the gateway may take to come, for the whole policy, and, behind the last change, for all others.
const PATIENCE: Duration = Duration::from_mins(1);

/// What to do.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) churn: Churn,
    /// Changes a second, and for how long.
    pub(super) rate: u32,
    pub(super) duration: Duration,
}

/// What came of it.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) full_sync: Duration,
    pub(super) full_sync_bytes: usize,
    /// Of each change, in microseconds.
    pub(super) latencies: Histogram<u64>,
    pub(super) updates: u64,
    /// From the first change to the last acknowledgement.
    pub(super) took: Duration,
    /// Changes that the gateway has rejected, and why; then no more were made.
    pub(super) rejected: u64,
    pub(super) rejection: Option<String>,
    /// What gateways are to have in force in the end.
    pub(super) churn: Churn,
    pub(super) version: String,
    /// Processor time of the gateway while changes came.
    pub(super) gateway_ticks: u64,
    pub(super) noise: Noise,
}

/// Serves the gateway that comes. Begins to change when told that it is ready, with the number of its process.
pub(super) fn run(listener: TcpListener, plan: Plan, is_ready: oneshot::Receiver<u32>) -> Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Encoded before anybody comes, as a policy server has it.
        let whole = Whole::of(&plan.churn)?;
        let mut streams = door::open(listener)?;
        let full_sync = async {
            let synced = timeout(PATIENCE, async {
                let mut stream = streams.recv().await.context("nobody comes any more")?;
                let took = tell_all(&mut stream, &whole).await?;
                Ok::<_, anyhow::Error>((stream, took))
            });
            synced.await.context("the gateway has no whole policy yet")?
        };
        let ready = async { is_ready.await.context("the gateway did not start") };
        let ((mut stream, full_sync), process) = tokio::try_join!(full_sync, ready)?;
        Changing::new(plan, &whole).run(&mut stream, process, full_sync).await
    })
}

/// A whole policy.
struct Whole {
    responses: Vec<(Kind, DeltaDiscoveryResponse)>,
    bytes: usize,
    counts: [usize; Kind::COUNTED],
    sum: u64,
    version: String,
}

impl Whole {
    fn of(churn: &Churn) -> Result<Self> {
        let publication = Publication::default().next(Arc::new(churn.deal())).context("a policy is never nothing")?;
        let of = |kind| publication.of(kind).len();
        let all = || Kind::ALL.into_iter().flat_map(|kind| publication.of(kind));
        let chunks: Vec<Chunk> = Kind::ALL.into_iter().flat_map(|kind| publication.whole(kind).to_vec()).collect();
        Ok(Self {
            bytes: chunks.iter().map(|chunk| chunk.bytes.len()).sum(),
            responses: chunks.iter().map(decoded).collect::<Result<_>>()?,
            counts: [
                of(Kind::EgressPolicy),
                of(Kind::Vip),
                of(Kind::Endpoint),
                of(Kind::Service),
                of(Kind::Gateway),
                of(Kind::OverlayNode),
                of(Kind::Cluster),
            ],
            sum: all().fold(0, |sum, it| sum.wrapping_add(it.content.version)),
            version: publication.version,
        })
    }
}

/// A response as the generated server takes it.
fn decoded(chunk: &Chunk) -> Result<(Kind, DeltaDiscoveryResponse)> {
    Ok((chunk.kind, DeltaDiscoveryResponse::decode(chunk.bytes.clone())?))
}

/// Tells a gateway all that it subscribes to; the time until it has that in force, from the opening of its stream.
async fn tell_all(stream: &mut Stream, whole: &Whole) -> Result<Duration> {
    let mut last = None;
    loop {
        let request = stream.heard().await?;
        if let Some(error) = request.error_detail {
            bail!("the gateway has rejected the whole policy: {}", error.message);
        }
        if !request.response_nonce.is_empty() {
            if last.as_ref() == Some(&request.response_nonce) {
                return Ok(stream.opened.elapsed());
            }
            continue;
        }
        ensure!(request.initial_resource_versions.is_empty(), "the gateway comes with a policy that nobody gave it");
        let kind =
            Kind::of_url(&request.type_url).with_context(|| format!("the gateway wants {}", request.type_url))?;
        for (_, response) in whole.responses.iter().filter(|(of, _)| *of == kind) {
            let nonce = stream.tell(response.clone()).await?;
            if kind == Kind::Settings {
                last = Some(nonce);
            }
        }
    }
}

/// An update that is on its way.
#[derive(Debug)]
struct Update {
    /// Of its settings.
    nonce: String,
    /// Its changes, by number.
    changes: std::ops::Range<u64>,
}

/// Changes, as they are due.
struct Changing {
    churn: Churn,
    rate: u32,
    total: u64,
    begun: Instant,
    /// Changes that were told.
    told: u64,
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

impl Changing {
    fn new(Plan { churn, rate, duration }: Plan, whole: &Whole) -> Self {
        Self {
            churn,
            rate,
            total: duration.as_secs() * u64::from(rate),
            begun: Instant::now(),
            told: 0,
            in_flight: VecDeque::new(),
            counts: whole.counts,
            sum: whole.sum,
            version: whole.version.clone(),
            full_sync_bytes: whole.bytes,
            latencies: Histogram::new(3).expect("three digits are possible"),
            updates: 0,
            rejected: 0,
            rejection: None,
        }
    }

    /// When a change is due.
    fn due(&self, change: u64) -> Instant {
        self.begun + Duration::from_secs(1).mul_f64(change as f64 / f64::from(self.rate))
    }

    async fn run(mut self, stream: &mut Stream, process: u32, full_sync: Duration) -> Result<Outcome> {
        let (watch, ticks) = (Watch::begin(&[process])?, usage::process(process)?);
        self.begun = Instant::now();
        let end = self.due(self.total) + PATIENCE;
        while self.rejection.is_none() && (self.told < self.total || !self.in_flight.is_empty()) {
            let may_tell = self.told < self.total && self.in_flight.len() < IN_FLIGHT;
            tokio::select! {
                biased;
                request = stream.heard() => self.hear(request?)?,
                () = sleep_until(self.due(self.told)), if may_tell => self.tell(stream).await?,
                () = sleep_until(end) => bail!("{} updates were never acknowledged", self.in_flight.len()),
            }
        }
        let took = self.begun.elapsed();
        Ok(Outcome {
            full_sync,
            full_sync_bytes: self.full_sync_bytes,
            latencies: self.latencies,
            updates: self.updates,
            took,
            rejected: self.rejected,
            rejection: self.rejection,
            churn: self.churn,
            version: self.version,
            gateway_ticks: usage::process(process)? - ticks,
            noise: watch.end()?,
        })
    }

    /// Tells what is due.
    async fn tell(&mut self, stream: &mut Stream) -> Result<()> {
        let due = self.begun.elapsed().as_micros() as u64 * u64::from(self.rate) / 1_000_000 + 1;
        let changes = self.told..due.clamp(self.told + 1, self.total);
        let changed: BTreeSet<u32> = changes.clone().map(|_| self.churn.change()).collect();
        let (mut there, mut gone) = (Vec::new(), Vec::new());
        for number in changed {
            match self.churn.endpoint(number) {
                Some(endpoint) => there.push(published(&endpoint, self.updates)),
                None => gone.push(endpoint_address(number).to_string()),
            }
        }
        self.counts[Kind::Endpoint as usize] = self.churn.endpoint_count();
        // Any number that was not there before.
        self.sum = self.sum.wrapping_add(1);
        let (key, content, version) = settings(self.counts, self.sum);
        let end = [Published { key, content, since: self.updates }];
        let mut told = chunks(&version, Kind::Endpoint, there.iter(), gone);
        told.extend(chunks(&version, Kind::Settings, end.iter(), Vec::new()));
        let mut nonce = String::new();
        for chunk in &told {
            nonce = stream.tell(decoded(chunk)?.1).await?;
        }
        self.told = changes.end;
        self.version = version;
        self.updates += 1;
        self.in_flight.push_back(Update { nonce, changes });
        Ok(())
    }

    /// Takes in what the gateway says.
    fn hear(&mut self, request: DeltaDiscoveryRequest) -> Result<()> {
        let now = Instant::now();
        if let Some(error) = request.error_detail {
            self.rejection = Some(error.message);
            self.rejected = self.in_flight.iter().map(|update| update.changes.end - update.changes.start).sum();
            return Ok(());
        }
        // Others are responses that an update begins with.
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

/// An endpoint as a policy server tells it.
fn published(endpoint: &EndpointSpec, since: u64) -> Published {
    let address = endpoint.address.to_string();
    let message = proto::Endpoint {
        address: address.clone(),
        name: endpoint.name.to_string(),
        policy: endpoint.policy.to_string(),
        vips: endpoint.vips.iter().map(ToString::to_string).collect(),
        gateway: String::new(),
        remarks: Vec::new(),
    };
    let body = message.encode_to_vec();
    let content = Content { version: Fingerprint::of(&body), body: body.into() };
    Published { key: Key { kind: Kind::Endpoint, name: address.into() }, content, since }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::path::Path;
    use std::thread;

    use tokio::sync::mpsc;
    use vipgate::config::PolicyServer;
    use vipgate::policy::Viewer;
    use vipgate::xds::client::{Client, Event, Rejection};
    use vipgate_dataplane::snapshot::build::Builder;
    use vipgate_dataplane::snapshot::spec::NetworkSpec;

    use super::*;
    use crate::policy::Size;

    /// A gateway as far as policy goes. After `most` offers it rejects whatever comes.
    async fn follow(
        url: String,
        cache: &Path,
        most: usize,
        started: oneshot::Sender<u32>,
        mut is_over: oneshot::Receiver<()>,
    ) -> Builder {
        let (events, mut offers) = mpsc::channel(4);
        let server = PolicyServer { url, ca: None, cert: None, key: None, cache: cache.to_owned() };
        let (client, known) = Client::open(Viewer::named("gw-bench"), server, events);
        assert!(known.is_none());
        let client = tokio::spawn(client.run());
        let mut builder = Builder::new(NetworkSpec::default());
        let (mut taken, mut started) = (0, Some(started));
        loop {
            let event = tokio::select! {
                event = offers.recv() => event,
                _ = &mut is_over => break,
            };
            let Some(Event::Offer(offer, answer)) = event else { panic!("{event:?}") };
            let outcome = if taken == most {
                Err(Rejection { resource: None, reason: "enough".to_owned() })
            } else {
                builder.with_change(&offer.change).unwrap();
                Ok(())
            };
            taken += usize::from(outcome.is_ok());
            answer.send(outcome).unwrap();
            if let Some(started) = started.take() {
                started.send(std::process::id()).unwrap();
            }
        }
        client.abort();
        builder
    }

    fn play(most: usize) -> (Outcome, Builder) {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let churn = Churn::new(Size { vips: 20, endpoints: 300 });
        let plan = Plan { churn, rate: 300, duration: Duration::from_secs(1) };
        let (started, is_ready) = oneshot::channel();
        let (over, is_over) = oneshot::channel();
        let server = thread::spawn(|| {
            let outcome = run(listener, plan, is_ready);
            let _ = over.send(());
            outcome.unwrap()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let builder = runtime.block_on(follow(url, &folder.path().join("cache"), most, started, is_over));
        (server.join().unwrap(), builder)
    }

    #[test]
    fn a_gateway_has_in_force_what_it_was_told_and_each_change_is_counted() {
        let (outcome, builder) = play(usize::MAX);
        assert_eq!((outcome.latencies.len(), outcome.rejection), (300, None));
        assert!(outcome.full_sync_bytes > 300 * 50 && outcome.updates <= 300);
        let policy = builder.snapshot().policy;
        let mut shown: Vec<_> = policy.endpoints().map(|(address, _)| address).collect();
        shown.sort();
        assert!(outcome.churn.endpoints().map(|endpoint| endpoint.address).eq(shown));
        assert_eq!(policy.version(), outcome.version);
    }

    #[test]
    fn a_rejection_is_seen_and_ends_it() {
        let (outcome, _) = play(3);
        assert_eq!(outcome.rejection.as_deref(), Some("enough"));
        assert!(outcome.rejected > 0 && outcome.latencies.len() < 300);
    }
}
