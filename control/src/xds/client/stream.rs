//! A delta xDS stream: subscriptions, assembly of updates, ACKs and NACKs.

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
use tonic::{Code, Streaming};

use super::connect::{RootCause, open_channel, with_causes};
use super::{Client, ClientEvent, ClientStopped, Confirmation, Effect, Rejection, StreamEnd, Target};
use crate::xds::client::coalesce::{CoalescedUpdates, Coalescer};
use crate::xds::resource::{INCARNATION, Key, Kind, SETTINGS};
use crate::xds::store::{PolicyUpdate, StageError};

/// Maximum size of a response, bytes (documented in `policy.proto`). policyd sends about 64 KiB per response; another
/// server may send everything in one.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// Timeout for the server to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Without Settings, an update is complete after this idle time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for Settings from a server that has sent some before; then the update is applied without them. Also the
/// maximum duration of an update from a server that sends none.
const SETTINGS_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the first response of each kind, before any policy is in force: an incomplete first policy would let
/// traffic through that it should block. Not longer than it takes to detect a dead connection.
const FIRST_POLICY_TIMEOUT: Duration = Duration::from_secs(10);
/// After a rejected response, the rest of its update is rejected too: until its Settings, or this idle time.
const REJECTED_IDLE_TIMEOUT: Duration = Duration::from_millis(300);
/// Interval of confirming that the cached policy is current.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(5);

/// Updates without an acknowledgment after which a policy server sends no more.
const MAX_UNACKNOWLEDGED: usize = 4;

/// Kinds that every server responds to. The others are optional: overlay nodes, the cluster, Settings.
const KINDS: [Kind; 5] = [Kind::EgressPolicy, Kind::Vip, Kind::Endpoint, Kind::Service, Kind::Gateway];

/// A response that is neither acknowledged nor rejected yet.
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

/// Connects and runs the stream until it ends; returns the reason.
pub(super) async fn run(client: &mut Client, target: &Target) -> StreamEnd {
    let (channel, root_cause) = match open_channel(&client.server, target).await {
        Ok(connection) => connection,
        Err(error) => return StreamEnd::Disconnected(error.to_string()),
    };
    let (requests, outgoing) = mpsc::unbounded_channel();
    for kind in Kind::OF_GATEWAYS {
        // Can't fail: this function owns the receiver.
        let _ = requests.send(subscription(client, kind));
    }
    let mut service = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES);
    let opened =
        timeout(OPEN_TIMEOUT, service.delta_aggregated_resources(UnboundedReceiverStream::new(outgoing))).await;
    let responses = match opened {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return stream_end(&status, &root_cause),
        Err(_) => {
            let reason = format!("connected, but no response within {} s", OPEN_TIMEOUT.as_secs());
            return StreamEnd::Disconnected(reason);
        }
    };
    client.change_status(|status| {
        status.connected = true;
        status.since = SystemTime::now();
        status.error = None;
    });
    client.targets.prefer(target);
    tracing::info!(event = "policy_server_connected", server = %target, "policy server connected");
    let mut stream = Stream {
        client,
        requests,
        pending: Vec::new(),
        accepted: Vec::new(),
        rejected: None,
        in_sync: false,
        missing_kinds: KINDS.into(),
        coalescer: Coalescer::default(),
    };
    match stream.run(responses, &root_cause).await {
        Ok(end) => end,
        Err(stopped) => StreamEnd::Disconnected(stopped.to_string()),
    }
}

fn subscription(client: &Client, kind: Kind) -> DeltaDiscoveryRequest {
    let incarnation = Value { kind: Some(ValueKind::StringValue(format!("{:016x}", client.incarnation))) };
    let node = Node {
        id: client.gateway.name.to_string(),
        locality: Some(Locality { zone: client.gateway.zone.to_string(), ..Locality::default() }),
        metadata: Some(Struct { fields: [(INCARNATION.to_owned(), incarnation)].into() }),
        user_agent_name: "vipgate".to_owned(),
        user_agent_version_type: Some(UserAgentVersionType::UserAgentVersion(env!("CARGO_PKG_VERSION").to_owned())),
        ..Node::default()
    };
    // What isn't in force is sent again, and acknowledged then.
    let held = client.held.names(kind);
    let versions: HashMap<String, String> =
        client.store.versions(kind).filter(|(name, _)| !held.contains(name.as_str())).collect();
    DeltaDiscoveryRequest {
        node: Some(node),
        type_url: kind.type_url().to_owned(),
        initial_resource_versions: versions,
        ..DeltaDiscoveryRequest::default()
    }
}

/// Classifies the error of a failed stream.
fn stream_end(status: &tonic::Status, root_cause: &RootCause) -> StreamEnd {
    let reason = describe_status(status);
    match status.code() {
        Code::PermissionDenied | Code::AlreadyExists => StreamEnd::Denied(reason),
        Code::OutOfRange => StreamEnd::TooLarge(reason),
        _ => StreamEnd::Disconnected(root_cause.explain(reason)),
    }
}

/// The error message of a gRPC status, with its sources.
pub(crate) fn describe_status(status: &tonic::Status) -> String {
    match status.code() {
        Code::Cancelled | Code::Unknown | Code::Unavailable | Code::Internal if !status.message().is_empty() => {
            with_causes(status.message().to_owned(), status.source())
        }
        Code::OutOfRange => format!(
            "a response exceeds the limit of {} MiB: the server must split it into several responses ({})",
            MAX_RESPONSE_BYTES >> 20,
            status.message()
        ),
        Code::PermissionDenied | Code::AlreadyExists => status.message().to_owned(),
        Code::Unimplemented => "the server doesn't implement delta discovery: is it a policy server?".to_owned(),
        code => format!("{}: {}", code.description(), status.message()),
    }
}

struct Stream<'a> {
    client: &'a mut Client,
    requests: mpsc::UnboundedSender<DeltaDiscoveryRequest>,
    /// Responses of the current update, with the times of their arrival.
    pending: Vec<(Pending, Instant)>,
    /// Responses of accepted updates that aren't in force yet.
    accepted: Vec<Pending>,
    /// Why the current update is rejected, and when its last response arrived.
    rejected: Option<(String, Instant)>,
    /// Whether the policy in force is the server's latest.
    in_sync: bool,
    /// Kinds without any response yet.
    missing_kinds: BTreeSet<Kind>,
    /// Responses deferred after the last update.
    coalescer: Coalescer,
}

impl Stream<'_> {
    /// Handles responses and timeouts until the server or a broken connection ends the stream.
    async fn run(
        &mut self,
        mut responses: Streaming<DeltaDiscoveryResponse>,
        root_cause: &RootCause,
    ) -> Result<StreamEnd, ClientStopped> {
        let mut confirm = tokio::time::interval(CONFIRM_INTERVAL);
        loop {
            if self.is_server_waiting() {
                return Ok(StreamEnd::Disconnected(
                    "the policy waits for the kernel; the latest is fetched".to_owned(),
                ));
            }
            let deadline = self.next_deadline();
            tokio::select! {
                response = responses.message() => match response {
                    Ok(Some(response)) => self.receive(response).await?,
                    Ok(None) => return Ok(StreamEnd::Disconnected("the server closed the stream".to_owned())),
                    Err(status) => {
                        let end = stream_end(&status, root_cause);
                        if let StreamEnd::TooLarge(reason) = &end {
                            // Counts as a rejected update.
                            self.report(reason).await;
                        }
                        return Ok(end);
                    }
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    if self.coalescer.is_empty() {
                        self.on_timeout().await?;
                    } else {
                        self.flush_coalesced().await?;
                    }
                }
                is_in_force = self.client.held.in_force() => {
                    if is_in_force {
                        self.acknowledge();
                    }
                }
                _ = confirm.tick() => self.confirm(),
            }
        }
    }

    /// The next timeout, if one is running.
    fn next_deadline(&self) -> Option<Instant> {
        let store = &self.client.store;
        let idle_timeout = if store.resources().is_empty() && !self.missing_kinds.is_empty() {
            FIRST_POLICY_TIMEOUT
        } else if store.expects_settings() && store.has_staged() {
            SETTINGS_TIMEOUT
        } else {
            IDLE_TIMEOUT
        };
        let idle = self.pending.last().map(|(_, at)| *at + idle_timeout);
        // A server that never pauses must not defer its update forever.
        let total = self.pending.first().filter(|_| idle_timeout == IDLE_TIMEOUT).map(|(_, at)| *at + SETTINGS_TIMEOUT);
        let rejected = self.rejected.as_ref().map(|(_, at)| *at + REJECTED_IDLE_TIMEOUT);
        [idle, total, rejected, self.coalescer.deadline()].into_iter().flatten().min()
    }

    async fn on_timeout(&mut self) -> Result<(), ClientStopped> {
        if self.rejected.take().is_some() {
            return Ok(());
        }
        if let Some(reason) = self.client.store.count_mismatch() {
            let rejection = Rejection { resource: Some(Key { kind: Kind::Settings, name: SETTINGS.into() }), reason };
            self.reject(&rejection);
            self.report(&rejection.to_string()).await;
            return Ok(());
        }
        tracing::warn!(event = "policy_update_open", "no Settings complete the update: it is applied as received");
        self.apply_staged().await
    }

    /// Handles a response: stages it, or defers it to be coalesced.
    async fn receive(&mut self, response: DeltaDiscoveryResponse) -> Result<(), ClientStopped> {
        // Without Settings the boundaries of updates are unknown: no coalescing.
        let is_between_updates =
            self.pending.is_empty() && self.rejected.is_none() && self.client.store.expects_settings();
        if is_between_updates && self.coalescer.should_defer() {
            self.in_sync = false;
            self.coalescer.push(response);
            return Ok(());
        }
        self.stage(response).await
    }

    /// Applies the deferred updates: as one, or each by itself if the coalesced update is invalid.
    async fn flush_coalesced(&mut self) -> Result<(), ClientStopped> {
        let coalesced = self.coalescer.take_complete();
        if coalesced.update_count < 2 || !self.apply_coalesced(&coalesced).await? {
            for response in coalesced.responses {
                self.stage(response).await?;
            }
        }
        Ok(())
    }

    /// Applies several updates as one. False: they are rejected, nothing has changed, and no NACK was sent.
    async fn apply_coalesced(&mut self, coalesced: &CoalescedUpdates) -> Result<bool, ClientStopped> {
        for response in &coalesced.responses {
            if self.client.store.stage(response.clone()).is_err() {
                self.client.store.discard();
                return Ok(false);
            }
        }
        let is_complete = self.client.store.is_complete();
        let Some(Ok(effect)) =
            (if is_complete { Some(self.request_apply(coalesced.update_count).await?) } else { None })
        else {
            self.client.store.discard();
            return Ok(false);
        };
        let pending = coalesced.responses.iter().map(|response| (Pending::of(response), Instant::now()));
        self.pending.extend(pending);
        self.accept(effect);
        Ok(true)
    }

    /// Stages a response; applies the update if that completes it.
    async fn stage(&mut self, response: DeltaDiscoveryResponse) -> Result<(), ClientStopped> {
        let pending = Pending::of(&response);
        let kind = Kind::from_type_url(&pending.type_url);
        let is_settings = kind == Some(Kind::Settings);
        kind.map(|kind| self.missing_kinds.remove(&kind));
        self.in_sync = false;
        if let Some((reason, at)) = &mut self.rejected {
            *at = Instant::now();
            let reason = format!("part of a rejected update: {reason}");
            send_reply(&self.requests, pending, Some(reason));
            if is_settings {
                self.rejected = None;
            }
            return Ok(());
        }
        let staged = self.client.store.stage(response);
        self.pending.push((pending, Instant::now()));
        if let Err(error) = staged {
            self.reject_invalid(&error, is_settings).await;
            return Ok(());
        }
        if self.client.store.is_complete() { self.apply_staged().await } else { Ok(()) }
    }

    /// Has the gateway apply the staged update, and sends ACKs or NACKs.
    async fn apply_staged(&mut self) -> Result<(), ClientStopped> {
        match self.request_apply(1).await? {
            Ok(effect) => self.accept(effect),
            Err(rejection) => {
                // No event: it has been reported already.
                self.reject(&rejection);
            }
        }
        Ok(())
    }

    /// Sends the staged update, made of `updates` updates, to the gateway and waits for the outcome.
    async fn request_apply(&mut self, updates: u64) -> Result<Result<Effect, Rejection>, ClientStopped> {
        if let Err(error) = self.client.store.check_consistency() {
            if updates == 1 {
                self.report(&error.to_string()).await;
            }
            return Ok(Err(Rejection { resource: None, reason: error.to_string() }));
        }
        let update = PolicyUpdate { update_count: updates, ..self.client.store.update_for(&self.client.gateway) };
        let (sender, receiver) = oneshot::channel();
        self.client.events.send(ClientEvent::Update(Box::new(update), sender)).await.map_err(|_| ClientStopped)?;
        let outcome = receiver.await.map_err(|_| ClientStopped)?;
        self.coalescer.start_interval();
        Ok(outcome)
    }

    /// Commits the accepted update; acknowledges it if it is in force.
    fn accept(&mut self, effect: Effect) {
        let changed = self.client.store.commit();
        self.client.held.push(changed, effect);
        self.accepted.extend(self.pending.drain(..).map(|(pending, _)| pending));
        if !self.client.held.is_holding() {
            self.acknowledge();
        }
    }

    /// Whether the server may wait for acknowledgments before it sends more: then a new stream gets the latest policy.
    fn is_server_waiting(&self) -> bool {
        let settings = Kind::Settings.type_url();
        self.accepted.iter().filter(|pending| pending.type_url == settings).count() >= MAX_UNACKNOWLEDGED
    }

    /// All accepted updates are in force: sends the ACKs, and has the cache written.
    fn acknowledge(&mut self) {
        let at = SystemTime::now();
        self.client.change_status(|status| status.confirmed_at = Some(at));
        self.in_sync = self.pending.is_empty() && self.coalescer.is_empty();
        for pending in self.accepted.drain(..) {
            send_reply(&self.requests, pending, None);
        }
        // After the ACKs: the cache is never newer than what is acknowledged.
        let changed = self.client.held.take();
        // Fails if the writer has ended.
        let _ = self.client.confirmations.send(Confirmation { changed, at });
    }

    /// The update was rejected: NACK for all its responses.
    fn reject(&mut self, rejection: &Rejection) {
        self.client.store.discard();
        for (pending, _) in self.pending.drain(..) {
            send_reply(&self.requests, pending, Some(rejection.to_string()));
        }
    }

    /// The last pending response is invalid: NACK for it and for the rest of its update.
    async fn reject_invalid(&mut self, error: &StageError, is_last: bool) {
        let reason = error.to_string();
        self.client.store.discard();
        let invalid = self.pending.pop();
        for (pending, _) in self.pending.drain(..) {
            send_reply(&self.requests, pending, Some(format!("part of a rejected update: {reason}")));
        }
        if let Some((pending, _)) = invalid {
            send_reply(&self.requests, pending, Some(reason.clone()));
        }
        // With Settings, more responses of the same update follow; without, each response is an update of its own.
        if !is_last && self.client.store.expects_settings() {
            self.rejected = Some((reason.clone(), Instant::now()));
        }
        self.report(&reason).await;
    }

    async fn report(&self, reason: &str) {
        // Fails if the receiver is gone; then the stream ends anyway.
        let _ = self.client.events.send(ClientEvent::Rejected(reason.to_owned())).await;
    }

    /// The stream is alive and in sync: confirms the policy in force.
    fn confirm(&self) {
        if !self.in_sync || !self.pending.is_empty() {
            return;
        }
        let at = SystemTime::now();
        self.client.change_status(|status| status.confirmed_at = Some(at));
        // Fails if the writer has ended.
        let _ = self.client.confirmations.send(Confirmation { changed: Vec::new(), at });
    }
}

/// Sends an ACK, or a NACK with the reason.
fn send_reply(requests: &mpsc::UnboundedSender<DeltaDiscoveryRequest>, pending: Pending, reason: Option<String>) {
    let error_detail =
        reason.map(|message| Status { code: Code::InvalidArgument.into(), message, details: Vec::new() });
    let request = DeltaDiscoveryRequest {
        type_url: pending.type_url,
        response_nonce: pending.nonce,
        error_detail,
        ..DeltaDiscoveryRequest::default()
    };
    // Fails if the stream has ended meanwhile.
    let _ = requests.send(request);
}
