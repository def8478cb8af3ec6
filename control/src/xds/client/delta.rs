//! Delta xDS client, generic over what it keeps: connects to a policy server, runs a stream, and reconnects. What it keeps
//! subscribes, and answers each response with an ACK or a NACK.

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use envoy_types::pb::google::rpc::Status;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Streaming};
use vipgate_common::{Backoff, jittered};

use super::ServerStatus;
use super::attempts::Attempts;
use super::connect::{RootCause, open_channel, with_causes};
use super::identity::{Identity, authorized};
use super::target::Target;
use crate::config::PolicyServer;

/// Delay after a response that is too large: the next one will be as large, and as expensive for both sides.
const TOO_LARGE_DELAY: (Duration, Duration) = (Duration::from_secs(10), Duration::from_mins(2));
/// A connection that lasted longer resets the delays.
const DELAY_RESET: Duration = Duration::from_secs(30);
/// Maximum size of a response, bytes (documented in `policy.proto`). policyd sends about 64 KiB per response; another
/// server may send everything in one.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// Timeout for the server to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// What a client keeps of a server's resources.
pub(crate) trait Subscriber: Send {
    /// The first requests of a stream: one for each kind.
    fn subscriptions(&self) -> Vec<DeltaDiscoveryRequest>;

    /// Handles the responses of a stream, and replies to each; returns why it has ended.
    fn follow(&mut self, stream: &mut OpenStream) -> impl Future<Output = StreamEnd> + Send;
}

/// Why a stream has ended.
#[derive(Debug)]
pub(crate) enum StreamEnd {
    /// The server rejected this client: an operator must fix that.
    Denied(String),
    /// A response exceeded the size limit.
    TooLarge(String),
    /// Any other error.
    Disconnected(String),
}

impl StreamEnd {
    fn reason(&self) -> &str {
        match self {
            Self::Denied(reason) | Self::TooLarge(reason) | Self::Disconnected(reason) => reason,
        }
    }

    /// Classifies the error of a failed stream.
    fn of(status: &tonic::Status, root_cause: &RootCause) -> Self {
        let reason = describe_status(status);
        match status.code() {
            Code::PermissionDenied | Code::AlreadyExists => Self::Denied(reason),
            Code::OutOfRange => Self::TooLarge(reason),
            _ => Self::Disconnected(root_cause.explain(reason)),
        }
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

/// A response that is neither acknowledged nor rejected yet.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(super) type_url: String,
    nonce: String,
}

impl Pending {
    pub(crate) fn of(response: &DeltaDiscoveryResponse) -> Self {
        Self { type_url: response.type_url.clone(), nonce: response.nonce.clone() }
    }
}

/// An open stream.
pub(crate) struct OpenStream {
    requests: mpsc::UnboundedSender<DeltaDiscoveryRequest>,
    responses: Streaming<DeltaDiscoveryResponse>,
    root_cause: RootCause,
}

impl OpenStream {
    /// The next response; the error is the stream's end. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<DeltaDiscoveryResponse, StreamEnd> {
        match self.responses.message().await {
            Ok(Some(response)) => Ok(response),
            Ok(None) => Err(StreamEnd::Disconnected("the server closed the stream".to_owned())),
            Err(status) => Err(StreamEnd::of(&status, &self.root_cause)),
        }
    }

    /// Sends an ACK, or a NACK with the reason.
    pub(crate) fn reply(&self, pending: Pending, reason: Option<String>) {
        let error_detail =
            reason.map(|message| Status { code: Code::InvalidArgument.into(), message, details: Vec::new() });
        let request = DeltaDiscoveryRequest {
            type_url: pending.type_url,
            response_nonce: pending.nonce,
            error_detail,
            ..DeltaDiscoveryRequest::default()
        };
        // Fails if the stream has ended meanwhile.
        let _ = self.requests.send(request);
    }
}

/// Client of a policy server, or of one of several.
#[derive(Debug)]
pub(crate) struct DeltaClient<S> {
    identity: Identity,
    pub(super) server: PolicyServer,
    attempts: Attempts,
    status: Arc<ArcSwap<ServerStatus>>,
    pub(super) subscriber: S,
}

impl<S: Subscriber> DeltaClient<S> {
    /// A client that doesn't run yet; it keeps the status up to date.
    pub(crate) fn new(
        identity: Identity,
        server: PolicyServer,
        delays: (Duration, Duration),
        status: Arc<ArcSwap<ServerStatus>>,
        subscriber: S,
    ) -> Self {
        let attempts = Attempts::new(&server, delays);
        Self { identity, server, attempts, status, subscriber }
    }

    /// Connects, runs a stream and reconnects, until it is dropped.
    pub(crate) async fn run(mut self) {
        let mut too_large = Backoff::new(TOO_LARGE_DELAY);
        loop {
            let started = Instant::now();
            let target = self.attempts.next().await;
            let end = self.run_stream(&target).await;
            self.log(&end, &target);
            let is_too_large = matches!(end, StreamEnd::TooLarge(_));
            if !is_too_large && started.elapsed() > DELAY_RESET {
                self.attempts.reset_delay();
                too_large.reset();
            }
            let delay = if is_too_large && !self.attempts.has_more() {
                jittered(too_large.next_delay(), getrandom::u32())
            } else {
                self.attempts.next_delay()
            };
            self.set_disconnected(end.reason());
            sleep(delay).await;
        }
    }

    /// Connects and runs a stream; returns why it has ended.
    async fn run_stream(&mut self, target: &Target) -> StreamEnd {
        let (channel, root_cause) = match open_channel(&self.server, target).await {
            Ok(connection) => connection,
            Err(error) => return StreamEnd::Disconnected(error.to_string()),
        };
        let (requests, outgoing) = mpsc::unbounded_channel();
        for request in self.subscriber.subscriptions() {
            // Can't fail: this function owns the receiver.
            let _ = requests.send(DeltaDiscoveryRequest { node: Some(self.identity.node()), ..request });
        }
        let outgoing = match authorized(&self.server, UnboundedReceiverStream::new(outgoing)) {
            Ok(outgoing) => outgoing,
            Err(reason) => return StreamEnd::Disconnected(reason),
        };
        let mut service = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES);
        let responses = match timeout(OPEN_TIMEOUT, service.delta_aggregated_resources(outgoing)).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return StreamEnd::of(&status, &root_cause),
            Err(_) => {
                let reason = format!("connected, but no response within {} s", OPEN_TIMEOUT.as_secs());
                return StreamEnd::Disconnected(reason);
            }
        };
        ServerStatus::change(&self.status, |status| {
            status.connected = true;
            status.since = SystemTime::now();
            status.error = None;
        });
        self.attempts.reached(target);
        tracing::info!(event = "policy_server_connected", server = %target, "policy server connected");
        self.subscriber.follow(&mut OpenStream { requests, responses, root_cause }).await
    }

    /// Logs why a stream has ended, or wasn't opened.
    fn log(&mut self, end: &StreamEnd, server: &Target) {
        let (server, reason) = (server.to_string(), end.reason());
        if !self.attempts.is_new(reason) {
            return;
        }
        match end {
            StreamEnd::Denied(_) => tracing::error!(
                event = "policy_server_refuses",
                server,
                reason,
                "the policy server rejected this client: {reason}"
            ),
            StreamEnd::TooLarge(_) => tracing::error!(
                event = "policy_response_too_large",
                server,
                reason,
                "the policy can't be received: {reason}"
            ),
            StreamEnd::Disconnected(_) if self.status.load().connected => {
                tracing::warn!(event = "policy_server_lost", server, reason, "policy server connection lost");
            }
            StreamEnd::Disconnected(_) => {
                tracing::warn!(event = "policy_server_unreachable", server, reason, "policy server unreachable");
            }
        }
    }

    fn set_disconnected(&self, reason: &str) {
        ServerStatus::change(&self.status, |status| {
            if status.connected {
                status.since = SystemTime::now();
            }
            status.connected = false;
            status.error = Some(reason.to_owned());
        });
    }
}
