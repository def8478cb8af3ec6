//! One stream with a policy server, from the subscriptions to its end.

use std::collections::{BTreeSet, HashMap};
use std::error::Error;
use std::time::{Duration, SystemTime};

use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use envoy_types::pb::envoy::config::core::v3::{Locality, Node};
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use envoy_types::pb::google::rpc::Status;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Code;

use super::connect::{Breakage, connect_watched, with_causes};
use super::crowd::{Crowd, Gathered};
use super::{Client, End, Event, Rejection};
use crate::xds::book::{Offer, Refusal};
use crate::xds::cache::Cache;
use crate::xds::resource::{INCARNATION, Kind};

/// The longest response, bytes, as `policy.proto` says. Ours sends pieces of some 64 KiB; another server may send all at once.
const LONGEST: usize = 64 << 20;
/// The longest wait for a server to take up the stream.
const PATIENCE: Duration = Duration::from_secs(5);
/// From a server that doesn't say when an update is whole, it is when nothing more comes for so long.
const QUIET: Duration = Duration::from_secs(1);
/// A server that has said so before is given so long to say it again; one that never does must not be ignored for ever.
const STALLED: Duration = Duration::from_secs(5);
/// A first policy of which nothing is known of some kind yet would open what is closed: nobody waits for the rest of it longer
/// than it takes to notice that the network is gone.
const BEGUN: Duration = Duration::from_secs(10);
/// After a refusal, what belongs to the same update is refused with it: until its settings, or so long a pause.
const AFTERMATH: Duration = Duration::from_millis(300);
/// How often the cache learns that it is still right.
const CONFIRM: Duration = Duration::from_secs(5);

/// Kinds that every server answers. Settings are vipgate's own, and a server that knows no overlay has no nodes to tell of.
const KINDS: [Kind; 5] = [Kind::EgressPolicy, Kind::Vip, Kind::Endpoint, Kind::Service, Kind::Gateway];

/// A response that waits for its answer.
#[derive(Debug)]
struct Pending {
    type_url: String,
    nonce: String,
}

impl Pending {
    fn of(response: &DeltaDiscoveryResponse) -> Self {
        Self { type_url: response.type_url.clone(), nonce: response.nonce.clone() }
    }
}

/// Follows the server until the stream ends; says why it did.
pub(super) async fn follow(client: &mut Client) -> End {
    let (channel, breakage) = match connect_watched(&client.server).await {
        Ok(connected) => connected,
        Err(error) => return error.into(),
    };
    let (requests, outgoing) = mpsc::unbounded_channel();
    for kind in Kind::ALL {
        // The receiver is in our hands: this can't fail.
        let _ = requests.send(subscription(client, kind));
    }
    let mut service = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(LONGEST);
    let opened = timeout(PATIENCE, service.delta_aggregated_resources(UnboundedReceiverStream::new(outgoing))).await;
    let mut responses = match opened {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return ended(&status, &breakage),
        Err(_) => return format!("connected, but no answer within {} s", PATIENCE.as_secs()).into(),
    };
    client.change_status(|status| {
        status.connected = true;
        status.since = SystemTime::now();
        status.error = None;
    });
    tracing::info!(event = "policy_server_connected", server = client.server.url, "policy server connected");
    let mut stream = Stream {
        client,
        requests,
        pending: Vec::new(),
        spoiled: None,
        in_step: false,
        silent: KINDS.into(),
        crowd: Crowd::default(),
    };
    let mut confirm = tokio::time::interval(CONFIRM);
    loop {
        let wake = stream.wake();
        let response = tokio::select! {
            response = responses.message() => response,
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                let done = if stream.crowd.is_empty() { stream.pause_is_over().await } else { stream.catch_up().await };
                if let Err(why) = done {
                    return why.into();
                }
                continue;
            }
            _ = confirm.tick() => {
                stream.confirm();
                continue;
            }
            () = stream.client.events.closed() => return "stopped".to_owned().into(),
        };
        let outcome = match response {
            Ok(Some(response)) => stream.take(response).await,
            Ok(None) => Err("the server has ended the stream".to_owned()),
            Err(status) => {
                let end = ended(&status, &breakage);
                if let End::TooLarge(why) = &end {
                    // What was sent is no policy: as refused as one that says something wrong.
                    stream.report(why).await;
                }
                return end;
            }
        };
        if let Err(why) = outcome {
            return why.into();
        }
    }
}

fn subscription(client: &Client, kind: Kind) -> DeltaDiscoveryRequest {
    let incarnation = Value { kind: Some(ValueKind::StringValue(format!("{:016x}", client.incarnation))) };
    let node = Node {
        id: client.viewer.name.to_string(),
        locality: Some(Locality { zone: client.viewer.zone.to_string(), ..Locality::default() }),
        metadata: Some(Struct { fields: [(INCARNATION.to_owned(), incarnation)].into() }),
        user_agent_name: "vipgate".to_owned(),
        user_agent_version_type: Some(UserAgentVersionType::UserAgentVersion(env!("CARGO_PKG_VERSION").to_owned())),
        ..Node::default()
    };
    let known: HashMap<String, String> = client.book.versions(kind).collect();
    DeltaDiscoveryRequest {
        node: Some(node),
        type_url: kind.type_url().to_owned(),
        initial_resource_versions: known,
        ..DeltaDiscoveryRequest::default()
    }
}

/// Why a stream has failed.
fn ended(status: &tonic::Status, breakage: &Breakage) -> End {
    let why = explain(status);
    match status.code() {
        Code::PermissionDenied | Code::AlreadyExists => End::Refused(why),
        Code::OutOfRange => End::TooLarge(why),
        _ => End::Lost(breakage.explain(why)),
    }
}

/// What a failed stream says, with its cause.
pub(crate) fn explain(status: &tonic::Status) -> String {
    match status.code() {
        Code::Cancelled | Code::Unknown | Code::Unavailable | Code::Internal if !status.message().is_empty() => {
            with_causes(status.message().to_owned(), status.source())
        }
        Code::OutOfRange => format!(
            "a response is too large: a gateway takes {} MiB, so the server must send it in parts ({})",
            LONGEST >> 20,
            status.message()
        ),
        Code::PermissionDenied | Code::AlreadyExists => status.message().to_owned(),
        Code::Unimplemented => "the server knows no delta discovery service: is it a policy server?".to_owned(),
        code => format!("{}: {}", code.description(), status.message()),
    }
}

struct Stream<'a> {
    client: &'a mut Client,
    requests: mpsc::UnboundedSender<DeltaDiscoveryRequest>,
    /// Responses of the update that is coming.
    pending: Vec<(Pending, Instant)>,
    /// Why the update that is coming is refused, and since when nothing of it has come.
    spoiled: Option<(String, Instant)>,
    /// Whether what is in force is what the server last said.
    in_step: bool,
    /// Kinds of which nothing has come yet.
    silent: BTreeSet<Kind>,
    /// What has come so soon after the last update that it waits.
    crowd: Crowd,
}

impl Stream<'_> {
    /// When to do something although nothing comes.
    fn wake(&self) -> Option<Instant> {
        let book = &self.client.book;
        let patience = if book.held().is_empty() && !self.silent.is_empty() {
            BEGUN
        } else if book.expects_settings() && book.has_staged() {
            STALLED
        } else {
            QUIET
        };
        let quiet = self.pending.last().map(|(_, at)| *at + patience);
        // Who never stops to say something must not be ignored for ever, either.
        let ceaseless = self.pending.first().filter(|_| patience == QUIET).map(|(_, at)| *at + STALLED);
        let spoiled = self.spoiled.as_ref().map(|(_, at)| *at + AFTERMATH);
        [quiet, ceaseless, spoiled, self.crowd.due()].into_iter().flatten().min()
    }

    async fn pause_is_over(&mut self) -> Result<(), String> {
        if self.spoiled.take().is_some() {
            return Ok(());
        }
        if let Some(reason) = self.client.book.miscount() {
            let rejection = Rejection { resource: Some("Settings settings".to_owned()), reason };
            self.reject(&rejection);
            self.report(&rejection.to_string()).await;
            return Ok(());
        }
        tracing::warn!(
            event = "policy_update_open",
            "the server doesn't say that its update is whole; it is taken as it is"
        );
        self.offer().await
    }

    /// Takes in a response, now or with others.
    async fn take(&mut self, response: DeltaDiscoveryResponse) -> Result<(), String> {
        // Without settings nobody could say where one update ends and the next begins.
        let is_between_updates =
            self.pending.is_empty() && self.spoiled.is_none() && self.client.book.expects_settings();
        if is_between_updates && self.crowd.gathers() {
            self.in_step = false;
            self.crowd.push(response);
            return Ok(());
        }
        self.take_now(response).await
    }

    /// Puts in force what has gathered: at once if that can be, else each update by itself.
    async fn catch_up(&mut self) -> Result<(), String> {
        let gathered = self.crowd.take();
        if gathered.updates < 2 || !self.offer_together(&gathered).await? {
            for response in gathered.responses {
                self.take_now(response).await?;
            }
        }
        Ok(())
    }

    /// Offers several updates as one. When they can't be in force, nothing has changed, and nobody was told.
    async fn offer_together(&mut self, gathered: &Gathered) -> Result<bool, String> {
        for response in &gathered.responses {
            if self.client.book.stage(response.clone()).is_err() {
                self.client.book.discard();
                return Ok(false);
            }
        }
        let is_taken = self.client.book.is_whole() && self.ask(gathered.updates).await?.is_ok();
        if is_taken {
            let pending = gathered.responses.iter().map(|response| (Pending::of(response), Instant::now()));
            self.pending.extend(pending);
            self.accept();
        } else {
            self.client.book.discard();
        }
        Ok(is_taken)
    }

    async fn take_now(&mut self, response: DeltaDiscoveryResponse) -> Result<(), String> {
        let pending = Pending::of(&response);
        let kind = Kind::of_url(&pending.type_url);
        let is_settings = kind == Some(Kind::Settings);
        kind.map(|kind| self.silent.remove(&kind));
        self.in_step = false;
        if let Some((why, at)) = &mut self.spoiled {
            *at = Instant::now();
            let why = format!("part of an update that was refused: {why}");
            answer(&self.requests, pending, Some(why));
            if is_settings {
                self.spoiled = None;
            }
            return Ok(());
        }
        let staged = self.client.book.stage(response);
        self.pending.push((pending, Instant::now()));
        if let Err(refusal) = staged {
            self.refuse(&refusal, is_settings).await;
            return Ok(());
        }
        if self.client.book.is_whole() { self.offer().await } else { Ok(()) }
    }

    /// Offers what has come to the gateway, and tells the server what becomes of it.
    async fn offer(&mut self) -> Result<(), String> {
        match self.ask(1).await? {
            Ok(()) => self.accept(),
            Err(rejection) => {
                // The gateway has said so itself.
                self.reject(&rejection);
            }
        }
        Ok(())
    }

    /// Asks the gateway to put in force what has come, which is so many updates.
    async fn ask(&mut self, updates: u64) -> Result<Result<(), Rejection>, String> {
        let stopped = "stopped";
        let offer = Offer { updates, ..self.client.book.offer(&self.client.viewer) };
        let (sender, receiver) = oneshot::channel();
        self.client.events.send(Event::Offer(Box::new(offer), sender)).await.map_err(|_| stopped)?;
        let outcome = receiver.await.map_err(|_| stopped)?;
        self.crowd.begin();
        Ok(outcome)
    }

    fn accept(&mut self) {
        let client = &mut *self.client;
        let changed = client.book.commit();
        // Before it is acknowledged: what the server knows to be in force is so after a restart as well.
        let known = client.status.load().cache_error.clone();
        let cache_error = match &mut client.cache {
            None => known.clone(),
            Some(cache) => {
                let cached = cache.append(changed, client.book.held());
                cached.err().map(|error| format!("{}: {error}", client.server.cache.display()))
            }
        };
        if let Some(error) = cache_error.as_ref().filter(|error| known.as_ref() != Some(error)) {
            tracing::error!(event = "policy_cache_failed", error, "the policy cache can't be written");
        }
        client.change_status(|status| {
            status.known_at = Some(SystemTime::now());
            status.cache_error = cache_error;
        });
        self.in_step = true;
        for (pending, _) in self.pending.drain(..) {
            answer(&self.requests, pending, None);
        }
    }

    /// The gateway won't have it.
    fn reject(&mut self, rejection: &Rejection) {
        self.client.book.discard();
        for (pending, _) in self.pending.drain(..) {
            answer(&self.requests, pending, Some(rejection.to_string()));
        }
    }

    /// A response can't even be read: the update that it belongs to is refused.
    async fn refuse(&mut self, refusal: &Refusal, is_last: bool) {
        let why = refusal.to_string();
        self.client.book.discard();
        let at_fault = self.pending.pop();
        for (pending, _) in self.pending.drain(..) {
            answer(&self.requests, pending, Some(format!("part of an update that was refused: {why}")));
        }
        if let Some((pending, _)) = at_fault {
            answer(&self.requests, pending, Some(why.clone()));
        }
        // From a server that uses settings, more of the same update comes; from others, each response stands alone.
        if !is_last && self.client.book.expects_settings() {
            self.spoiled = Some((why.clone(), Instant::now()));
        }
        self.report(&why).await;
    }

    async fn report(&self, why: &str) {
        // Nobody listens any more: the stream ends in a moment.
        let _ = self.client.events.send(Event::Refused(why.to_owned())).await;
    }

    /// The connection lives: what is in force is what the server says.
    fn confirm(&self) {
        if !self.in_step || !self.pending.is_empty() {
            return;
        }
        // A cache that can't be written was complained about when it was.
        let _ = self.client.cache.as_ref().map(Cache::confirm);
        self.client.change_status(|status| status.known_at = Some(SystemTime::now()));
    }
}

/// ACK, or NACK with the reason.
fn answer(requests: &mpsc::UnboundedSender<DeltaDiscoveryRequest>, pending: Pending, why: Option<String>) {
    let error_detail = why.map(|message| Status { code: Code::InvalidArgument.into(), message, details: Vec::new() });
    let request = DeltaDiscoveryRequest {
        type_url: pending.type_url,
        response_nonce: pending.nonce,
        error_detail,
        ..DeltaDiscoveryRequest::default()
    };
    // The stream may have ended meanwhile; then there is nobody to tell.
    let _ = requests.send(request);
}
