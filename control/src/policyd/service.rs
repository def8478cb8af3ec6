//! Discovery service (delta xDS over gRPC): one task per stream sends publications to its client, a gateway or a node
//! agent, and records ACKs and NACKs. Memory is charged to the client, and a stalled stream ends.

mod admission;
mod outgoing;
mod variants;
mod view;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_stream::Stream as Responses;
use tonic::{Code, Request, Response as Reply, Status, Streaming};

use self::admission::{Admitted, Role};
use self::outgoing::{DiscardHandle, ResponseQueue};
use self::variants::Variants;
use super::budget::{Budget, Charge, Purpose};
use super::codec::{Response, cost};
use super::identity::{ClientIdentity, RejectionLog};
use super::registry::Registry;
use super::stream::{Acknowledgment, DeltaStream, ViewStream};
use crate::membership::MembershipView;
use crate::policyd::stats::Stats;
use crate::xds::publication::Publication;

#[expect(
    unreachable_pub,
    clippy::pedantic,
    clippy::default_constructed_unit_structs,
    unused_qualifications,
    reason = "generated"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/envoy.service.discovery.v3.AggregatedDiscoveryService.rs"));
}

use generated::aggregated_discovery_service_server::AggregatedDiscoveryService;
pub use generated::aggregated_discovery_service_server::AggregatedDiscoveryServiceServer;

/// Capacity of a stream's queue of responses; while it is full, publications are coalesced.
const QUEUE: usize = 16;
/// How long an update waits for the ACKs of a client with too many unacknowledged publications.
const ACK_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the response headers wait for the first request.
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(1);
/// Timeout of the first request of an open stream.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Responses that a client must take per stall timeout: about a megabyte, so that a client that hardly reads doesn't
/// hold an old publication for hours.
const MIN_RESPONSES_PER_TIMEOUT: usize = 16;
/// Reasons for a stall.
const CLIENT_STALLED: &str = "the client doesn't take responses";
const NO_MEMORY: &str = "there is no memory for a response (`limits.bytes`, `limits.bytes_per_address`)";
/// Retry intervals when memory is short: for a response, and for an update, which is more expensive to build.
const RESPONSE_RETRY_INTERVAL: Duration = Duration::from_millis(20);
const UPDATE_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// How long an update for a node waits for gateways to acknowledge theirs, and how often that is looked up: longer than a
/// gateway takes for a pod more, and short for a pod that waits.
const GATEWAYS_TIMEOUT: Duration = Duration::from_millis(250);
const GATEWAYS_INTERVAL: Duration = Duration::from_millis(5);

/// The discovery service; shared by all streams.
#[derive(Clone, Debug)]
pub struct DiscoveryService {
    /// The current publication; `None` until the source has been read.
    pub published: watch::Receiver<Option<Arc<Publication>>>,
    /// The current membership view.
    pub view: watch::Receiver<Arc<MembershipView>>,
    /// Connected gateways.
    pub registry: Arc<Registry>,
    /// Nodes with connected agents.
    pub nodes: Arc<Registry>,
    /// Counters.
    pub stats: Arc<Stats>,
    /// Rate-limited log of rejections.
    pub rejections: Arc<RejectionLog>,
    /// Memory budget of clients.
    pub budget: Arc<Budget>,
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for DiscoveryService {
    type DeltaAggregatedResourcesStream = Pin<Box<dyn Responses<Item = Result<Response, Status>> + Send>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Reply<Self::DeltaAggregatedResourcesStream>, Status> {
        let identity = ClientIdentity::from_request(&request);
        let mut requests = request.into_inner();
        // A rejected client should get an error instead of response headers, not after them. But a client may also wait
        // for the headers before its first request.
        let first = timeout(FIRST_REQUEST_WAIT, requests.message()).await.unwrap_or(Ok(None))?;
        let client = first.as_ref().map(|request| self.admit(request, &identity)).transpose()?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (outgoing, discard) = ResponseQueue::new(receiver);
        let charge = self.budget.charge(identity.address, Purpose::Requests);
        let task = StreamTask {
            service: self.clone(),
            stream: DeltaStream::new(client.as_ref().map(Admitted::audience).unwrap_or_default()),
            client,
            sender,
            discard,
            identity,
            update_deadline: None,
            gateways_deadline: None,
            no_memory_since: None,
            variants: Variants::default(),
            view: ViewStream::new(self.view.clone()),
            charge,
        };
        // It ends with its connection, which is the server's.
        tokio::spawn(task.run(first, requests));
        Ok(Reply::new(Box::pin(outgoing)))
    }
}

/// Receiver of publications.
type Published = watch::Receiver<Option<Arc<Publication>>>;

/// Why a stream ends; `None`: the client has closed it.
type End = Option<Status>;

/// Task of one stream.
struct StreamTask {
    service: DiscoveryService,
    stream: DeltaStream,
    /// From the first request.
    client: Option<Admitted>,
    sender: mpsc::Sender<Result<Response, Status>>,
    /// Drops queued responses that the client doesn't read.
    discard: DiscardHandle,
    identity: ClientIdentity,
    /// When a deferred update is sent or retried: ACKs are outstanding, or memory was short.
    update_deadline: Option<Instant>,
    /// Until when an update for a node waits for gateways.
    gateways_deadline: Option<Instant>,
    /// Since when there has been no memory for an update.
    no_memory_since: Option<Instant>,
    /// Its publications without what the client refuses.
    variants: Variants,
    /// What an agent of a node gets beside publications.
    view: ViewStream,
    /// Memory of the stream's state.
    charge: Charge,
}

impl StreamTask {
    async fn run(mut self, first: Option<DeltaDiscoveryRequest>, mut requests: Streaming<DeltaDiscoveryRequest>) {
        let status = self.run_stream(first, &mut requests).await.err().flatten();
        if let Some(client) = &self.client {
            self.service.disconnect(client);
            let (name, address) = (&client.name, self.identity.address.map(tracing::field::display));
            match client.role {
                Role::Gateway => {
                    tracing::info!(event = "gateway_lost", gateway = name, address, "gateway disconnected");
                }
                Role::Node => tracing::info!(event = "node_lost", node = name, address, "node agent disconnected"),
            }
        }
        // Only queued responses stay charged.
        drop(requests);
        self.stream = DeltaStream::default();
        self.charge.force(0);
        self.end(status).await;
    }

    /// Ends the stream, with a status unless the client has closed it. Responses that the client doesn't read are
    /// dropped.
    async fn end(&self, status: Option<Status>) {
        if let Some(status) = status {
            if let (Some(client), Code::ResourceExhausted | Code::DeadlineExceeded) = (&self.client, status.code()) {
                self.service.log_rejection(client, &self.identity, &status);
            }
            if let Err(TrySendError::Full(Err(status))) = self.sender.try_send(Err(status)) {
                return self.discard.discard(status);
            }
        }
        if timeout(self.service.budget.stall_timeout(), self.sender.reserve_many(QUEUE)).await.is_err() {
            self.discard.discard(self.stalled(CLIENT_STALLED));
        }
    }

    async fn run_stream(
        &mut self,
        first: Option<DeltaDiscoveryRequest>,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
    ) -> Result<(), End> {
        let first = self.first_request(first, requests).await?;
        let mut published = self.service.published.clone();
        let requests_before = self.until_ready(first, requests, &mut published).await?;
        self.first_target(&published).await?;
        for request in requests_before {
            self.receive(request, &published)?;
        }
        self.send_pending(&published).await?;
        self.process_events(requests, &mut published).await
    }

    /// Waits for the first request, which has the client's name.
    async fn first_request(
        &mut self,
        first: Option<DeltaDiscoveryRequest>,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
    ) -> Result<DeltaDiscoveryRequest, End> {
        let request = if let Some(request) = first {
            request
        } else if let Ok(request) = timeout(FIRST_REQUEST_TIMEOUT, requests.message()).await {
            request.map_err(Some)?.ok_or(None)?
        } else {
            let reason = format!("no request within {} s", FIRST_REQUEST_TIMEOUT.as_secs());
            return Err(Some(Status::deadline_exceeded(reason)));
        };
        if self.client.is_none() {
            let client = self.service.admit(&request, &self.identity).map_err(Some)?;
            self.stream = DeltaStream::new(client.audience());
            self.client = Some(client);
        }
        Ok(request)
    }

    /// Waits for the first publication: while the source hasn't been read, no gateway may get an empty policy. Returns
    /// the requests for it that were received meanwhile, without their nodes.
    async fn until_ready(
        &mut self,
        first: DeltaDiscoveryRequest,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
        published: &mut Published,
    ) -> Result<Vec<DeltaDiscoveryRequest>, End> {
        let (mut queued, mut bytes) = (Vec::new(), 0);
        let mut received = Some(first);
        loop {
            if let Some(mut request) = received.take().filter(|request| !self.receive_view(request)) {
                request.node = None;
                bytes += cost(&request);
                queued.push(request);
            }
            if published.borrow().is_some() {
                return Ok(queued);
            }
            self.charge.set(bytes).map_err(Some)?;
            self.send_view().await?;
            tokio::select! {
                ready = published.wait_for(Option::is_some) => match ready {
                    Ok(_) => return Ok(queued),
                    Err(_) => return Err(Some(stopping())),
                },
                next = requests.message() => received = Some(next.map_err(Some)?.ok_or(None)?),
                changed = self.view.changed() => changed.map_err(|_| Some(stopping()))?,
                () = self.sender.closed() => return Err(None),
            }
        }
    }

    async fn process_events(
        &mut self,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
        published: &mut Published,
    ) -> Result<(), End> {
        loop {
            let (deadline, variants_deadline) = (self.update_deadline, self.variants.deadline());
            tokio::select! {
                // An error is a request over a limit; the client gets it as the stream's status.
                request = requests.message() => {
                    let request = request.map_err(Some)?.ok_or(None)?;
                    self.handle_request(request, published).await?;
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    // Missing ACKs delay an update, but don't prevent it.
                    self.send_update(published).await?;
                }
                elapsed = self.variants.built() => self.handle_build(elapsed, published).await?,
                () = sleep_until(variants_deadline.unwrap_or_else(Instant::now)), if variants_deadline.is_some() => {
                    self.handle_deadline(published).await?;
                }
                changed = published.changed() => {
                    changed.map_err(|_| Some(stopping()))?;
                    self.handle_publication(published).await?;
                }
                changed = self.view.changed() => {
                    changed.map_err(|_| Some(stopping()))?;
                    self.send_view().await?;
                }
                () = self.sender.closed() => return Err(None),
            }
        }
    }

    async fn handle_request(&mut self, request: DeltaDiscoveryRequest, published: &mut Published) -> Result<(), End> {
        self.receive(request, published)?;
        self.send_pending(published).await?;
        if self.update_deadline.is_some() && !self.stream.is_busy() {
            return self.send_update(published).await;
        }
        Ok(())
    }

    /// Applies a request to the stream's state.
    fn receive(&mut self, request: DeltaDiscoveryRequest, published: &Published) -> Result<(), End> {
        if self.receive_view(&request) {
            return Ok(());
        }
        let Some(current) = published.borrow().clone() else { return Ok(()) };
        let first = self.variants.last().unwrap_or(&current);
        let acknowledgment = self.stream.handle_request(request, first).map_err(Some)?;
        self.charge.set(self.stream.held_bytes()).map_err(Some)?;
        self.record(acknowledgment, Some(&*current));
        Ok(())
    }

    /// Counts and records an ACK or NACK; `current`: of a resource of a publication.
    fn record(&mut self, acknowledgment: Acknowledgment, current: Option<&Publication>) {
        let Some(Admitted { role, name }) = self.client.clone() else { return };
        match acknowledgment {
            Acknowledgment::None => {}
            Acknowledgment::Ack => {
                self.service.stats.acks.increment();
                self.record_in_force();
            }
            Acknowledgment::Nack { reason, refused } => {
                self.service.stats.nacks.increment();
                match role {
                    Role::Gateway => {
                        tracing::warn!(event = "update_refused", gateway = name, reason, "gateway refused an update");
                        if let Some(current) = current {
                            self.handle_nack(&name, &reason, refused, current);
                        }
                    }
                    Role::Node => {
                        tracing::warn!(event = "update_refused", node = name, reason, "node agent refused an update");
                    }
                }
                self.service.registry_of(role).reject(&name, reason);
            }
        }
    }

    /// Records which publication the client has in force.
    fn record_in_force(&mut self) {
        let is_in_sync = self.stream.is_in_sync();
        if is_in_sync {
            self.variants.accepted();
        }
        if let Some(Admitted { role, name }) = &self.client {
            self.service.registry_of(*role).acknowledge(name, self.stream.in_force(), is_in_sync);
        }
    }

    /// Sends a new publication, at once or when the client has acknowledged earlier ones.
    async fn handle_publication(&mut self, published: &mut Published) -> Result<(), End> {
        if self.stream.is_busy() {
            self.update_deadline.get_or_insert_with(|| Instant::now() + ACK_TIMEOUT);
            return Ok(());
        }
        self.send_update(published).await
    }

    /// Sends the update to the current publication. Without memory for it, it is retried; ACKs received meanwhile
    /// release memory.
    async fn send_update(&mut self, published: &mut Published) -> Result<(), End> {
        self.update_deadline = None;
        if self.waits_for_answers() {
            return Ok(());
        }
        let Some(current) = published.borrow_and_update().clone() else { return Ok(()) };
        let Some(new) = self.target(&current) else { return Ok(()) };
        let Some(update) = self.stream.update(&new).map_err(Some)? else {
            self.no_memory_since = None;
            return Ok(());
        };
        if !update.is_empty() && self.waits_for_gateways(new.number) {
            return Ok(());
        }
        let bytes = self.stream.held_bytes() + update.bytes();
        if !self.charge.try_set(bytes) {
            let now = Instant::now();
            let since = *self.no_memory_since.get_or_insert(now);
            if now.duration_since(since) < self.service.budget.stall_timeout() {
                self.update_deadline = Some(now + UPDATE_RETRY_INTERVAL);
                return Ok(());
            }
            self.charge.set(bytes).map_err(Some)?;
        }
        self.no_memory_since = None;
        self.stream.publish(update);
        // One without a response for the client needs no ACK.
        self.record_in_force();
        drop((new, current));
        self.send_pending(published).await
    }

    /// Whether an update for a node is to wait: a pod's packets must not reach a gateway that doesn't know the pod yet.
    /// Gateways that don't acknowledge the publication in time have to drop them.
    fn waits_for_gateways(&mut self, number: u64) -> bool {
        let is_node = self.client.as_ref().is_some_and(|client| client.role == Role::Node);
        let now = Instant::now();
        let waits = is_node
            && self.service.registry.lags_behind(number)
            && now < *self.gateways_deadline.get_or_insert(now + GATEWAYS_TIMEOUT);
        if waits {
            self.update_deadline = Some(now + GATEWAYS_INTERVAL);
        } else {
            self.gateways_deadline = None;
        }
        waits
    }

    /// Sends the view, then pending responses, each when there is memory for it and the client has taken earlier ones.
    async fn send_pending(&mut self, published: &Published) -> Result<(), End> {
        self.send_view().await?;
        let stall_timeout = self.service.budget.stall_timeout();
        let (mut sent, mut deadline) = (0_usize, Instant::now() + stall_timeout);
        while let Some(size) = self.stream.next_size() {
            let mut charge = self.service.budget.charge(self.identity.address, Purpose::Responses);
            while !self.charge_stream(published) || !charge.try_set(size) {
                let now = Instant::now();
                if now >= deadline {
                    return Err(Some(self.stalled(NO_MEMORY)));
                }
                tokio::select! {
                    () = sleep_until(deadline.min(now + RESPONSE_RETRY_INTERVAL)) => {}
                    () = self.sender.closed() => return Err(None),
                }
            }
            let Some(response) = self.stream.next_response() else { break };
            self.send(response, charge, deadline).await?;
            sent += 1;
            if sent.is_multiple_of(MIN_RESPONSES_PER_TIMEOUT) {
                deadline = Instant::now() + stall_timeout;
            }
        }
        // No pending response refers to an old publication any more.
        self.charge.try_set(self.stream.held_bytes());
        Ok(())
    }

    /// Sends a response; its memory stays charged until it is encoded for the client.
    async fn send(&mut self, response: Response, mut charge: Charge, deadline: Instant) -> Result<(), End> {
        charge.force(response.bytes.len());
        let response = Response { charge: Some(charge), ..response };
        match timeout_at(deadline, self.sender.send(Ok(response))).await {
            Ok(outcome) => outcome.map_err(|_| None)?,
            Err(_) => return Err(Some(self.stalled(CLIENT_STALLED))),
        }
        self.service.stats.responses.increment();
        Ok(())
    }

    /// Charges the stream's state and its part of an old publication that only lagging streams still hold; whether
    /// there is memory for it.
    fn charge_stream(&mut self, published: &Published) -> bool {
        let current = published.borrow().as_ref().map_or(0, |it| it.number);
        self.charge.try_set(self.stream.held_bytes() + self.stream.old_publication_bytes(current))
    }

    fn stalled(&self, reason: &str) -> Status {
        self.service.budget.refused.increment();
        let seconds = self.service.budget.stall_timeout().as_secs();
        Status::deadline_exceeded(format!("no progress within {seconds} s: {reason}"))
    }
}

fn stopping() -> Status {
    Status::unavailable("the policy server is stopping")
}

#[cfg(test)]
mod tests;
