//! The discovery service over gRPC: a task for each stream, which tells its gateway what is published and notes what the
//! gateway says to that. What a client makes it hold is charged, and a stream that makes no progress ends.

mod outgoing;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_stream::Stream as Responses;
use tonic::{Code, Request, Response as Reply, Status, Streaming};

use self::outgoing::{Discard, Outgoing};
use super::budget::{Budget, Charge, Purpose};
use super::codec::{Response, cost};
use super::figures::Figures;
use super::identity::{Peer, Refusals};
use super::publication::Publication;
use super::registry::{InUse, Process, Registry};
use super::stream::{Heard, Stream};
use crate::xds::resource::INCARNATION;

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

/// Responses of one stream that wait for the network; behind that, publications wait, and are told together.
const QUEUE: usize = 16;
/// The longest wait for the answers of a client that is to be told more.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a stream is unanswered while its first request hasn't come.
const FIRST_REQUEST: Duration = Duration::from_secs(1);
/// How long a stream may be open while it hasn't come.
const NO_REQUEST: Duration = Duration::from_secs(10);
/// The longest name of a gateway, bytes.
const LONGEST_NAME: usize = 253;
/// Streams of one gateway: the one before may not have noticed yet that it is over.
const MOST_STREAMS: u32 = 16;
/// Responses that a client must take within the time for streams that make no progress: about a megabyte, so that a client that reads
/// next to nothing doesn't hold an old publication for hours.
const LEAST_TAKEN: usize = 16;
/// Why a stream makes no progress.
const NOT_TAKEN: &str = "the client doesn't take responses";
const NO_MEMORY: &str = "there is no memory for a response (`limits.bytes`, `limits.bytes_per_address`)";
/// How soon to look again whether there is memory: for a response, and for an update, which takes longer to put together.
const RESPONSE_PAUSE: Duration = Duration::from_millis(20);
const UPDATE_PAUSE: Duration = Duration::from_millis(100);

/// What all streams share.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// What gateways are told; nothing before the source has been read.
    pub published: watch::Receiver<Option<Arc<Publication>>>,
    /// The gateways.
    pub registry: Arc<Registry>,
    /// What is counted.
    pub figures: Arc<Figures>,
    /// What is logged of refusals.
    pub refusals: Arc<Refusals>,
    /// What clients make the server hold.
    pub budget: Arc<Budget>,
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Discovery {
    type DeltaAggregatedResourcesStream = Pin<Box<dyn Responses<Item = Result<Response, Status>> + Send>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Reply<Self::DeltaAggregatedResourcesStream>, Status> {
        let peer = Peer::of(&request);
        let mut requests = request.into_inner();
        // A client that is refused should learn it instead of an answer, not after one. It may also wait for the answer first.
        let first = timeout(FIRST_REQUEST, requests.message()).await.unwrap_or(Ok(None))?;
        let gateway = first.as_ref().map(|request| self.admit(request, &peer)).transpose()?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (outgoing, discard) = Outgoing::new(receiver);
        let charge = self.budget.charge(peer.address, Purpose::Requests);
        let task = Task {
            shared: self.clone(),
            stream: Stream::default(),
            gateway,
            sender,
            discard,
            peer,
            patience: None,
            no_memory_since: None,
            charge,
        };
        tokio::spawn(task.run(first, requests));
        Ok(Reply::new(Box::pin(outgoing)))
    }
}

impl Discovery {
    /// Takes in a gateway by the first request of its stream: its name.
    fn admit(&self, request: &DeltaDiscoveryRequest, peer: &Peer) -> Result<String, Status> {
        let node = request.node.as_ref();
        let name = node.map(|node| node.id.clone()).unwrap_or_default();
        if name.is_empty() || name.len() > LONGEST_NAME || name.contains(|c: char| c.is_control() || c == ' ') {
            let why = "node.id of the first request must be the gateway's name: 1 to 253 bytes without blanks";
            return Err(Status::invalid_argument(why));
        }
        if let Err(status) = peer.may_be(&name) {
            self.figures.misnamed.add();
            self.refusals.log(peer, &name, &status);
            return Err(status);
        }
        let process = match node.and_then(incarnation) {
            Some(incarnation) => Process::Incarnation(incarnation),
            None => peer.address.map_or(Process::Unknown, |address| Process::At(address.ip())),
        };
        match self.registry.comes(&name, process, peer.address) {
            Ok(..=MOST_STREAMS) => {}
            Ok(_) => {
                self.registry.goes(&name, self.has(&name));
                let why = format!("gateway {name} has {MOST_STREAMS} streams already: is its name used twice?");
                return Err(Status::resource_exhausted(why));
            }
            Err(InUse { address }) => {
                let at = address.map(|address| format!(" at {address}")).unwrap_or_default();
                let status = Status::already_exists(format!(
                    "another process{at} is gateway {name}, and it lives: stop one of them, or give each a name of its own"
                ));
                self.figures.twice.add();
                self.refusals.log(peer, &name, &status);
                return Err(status);
            }
        }
        tracing::info!(event = "gateway_connected", gateway = name, address = ?peer.address, "gateway connected");
        Ok(name)
    }

    /// Whether the policy has a gateway of this name.
    fn has(&self, name: &str) -> bool {
        self.published.borrow().as_ref().is_some_and(|it| it.deal.peer(name).is_some())
    }
}

/// The process that a node says it is.
fn incarnation(node: &Node) -> Option<u64> {
    match node.metadata.as_ref()?.fields.get(INCARNATION)?.kind.as_ref()? {
        ValueKind::StringValue(text) => u64::from_str_radix(text, 16).ok(),
        _ => None,
    }
}

/// What gateways are told.
type Published = watch::Receiver<Option<Arc<Publication>>>;

/// Why a stream ends, if there is anybody to learn it.
type End = Option<Status>;

struct Task {
    shared: Discovery,
    stream: Stream,
    /// The gateway's name, once it has said it.
    gateway: Option<String>,
    sender: mpsc::Sender<Result<Response, Status>>,
    /// Drops what the client doesn't read.
    discard: Discard,
    peer: Peer,
    /// Until when a client isn't told more, though there is more to tell: it owes answers, or there is no memory for it.
    patience: Option<Instant>,
    /// Since when there is none.
    no_memory_since: Option<Instant>,
    /// What the stream holds.
    charge: Charge,
}

impl Task {
    async fn run(mut self, first: Option<DeltaDiscoveryRequest>, mut requests: Streaming<DeltaDiscoveryRequest>) {
        let status = self.serve(first, &mut requests).await.err().flatten();
        if let Some(name) = &self.gateway {
            self.shared.registry.goes(name, self.shared.has(name));
            tracing::info!(event = "gateway_lost", gateway = name, address = ?self.peer.address, "gateway gone");
        }
        // All that it holds now is what waits for the network.
        drop(requests);
        self.stream = Stream::default();
        self.charge.force(0);
        self.end(status).await;
    }

    /// Ends the stream, with a reason if there is anybody to learn it. A client that doesn't read loses what waits for it.
    async fn end(&self, status: Option<Status>) {
        if let Some(status) = status {
            if let (Some(name), Code::ResourceExhausted | Code::DeadlineExceeded) = (&self.gateway, status.code()) {
                self.shared.refusals.log(&self.peer, name, &status);
            }
            if let Err(TrySendError::Full(Err(status))) = self.sender.try_send(Err(status)) {
                return self.discard.discard(status);
            }
        }
        if timeout(self.shared.budget.stall_timeout(), self.sender.reserve_many(QUEUE)).await.is_err() {
            self.discard.discard(self.stalled(NOT_TAKEN));
        }
    }

    async fn serve(
        &mut self,
        first: Option<DeltaDiscoveryRequest>,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
    ) -> Result<(), End> {
        let first = self.introduce(first, requests).await?;
        let mut published = self.shared.published.clone();
        for request in self.until_ready(first, requests, &mut published).await? {
            self.hear(request, &published)?;
        }
        self.tell(&published).await?;
        self.follow(requests, &mut published).await
    }

    /// The first request, and with it the gateway's name.
    async fn introduce(
        &mut self,
        first: Option<DeltaDiscoveryRequest>,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
    ) -> Result<DeltaDiscoveryRequest, End> {
        let request = if let Some(request) = first {
            request
        } else if let Ok(request) = timeout(NO_REQUEST, requests.message()).await {
            request.map_err(Some)?.ok_or(None)?
        } else {
            let why = format!("no request within {} s", NO_REQUEST.as_secs());
            return Err(Some(Status::deadline_exceeded(why)));
        };
        if self.gateway.is_none() {
            self.gateway = Some(self.shared.admit(&request, &self.peer).map_err(Some)?);
        }
        Ok(request)
    }

    /// Waits until there is a policy: nobody is told that there is nothing just because the source hasn't been read yet. What the client
    /// asks for meanwhile, but for what names it.
    async fn until_ready(
        &mut self,
        first: DeltaDiscoveryRequest,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
        published: &mut Published,
    ) -> Result<Vec<DeltaDiscoveryRequest>, End> {
        let (mut kept, mut bytes) = (Vec::new(), 0);
        let mut request = first;
        loop {
            request.node = None;
            bytes += cost(&request);
            kept.push(request);
            if published.borrow().is_some() {
                return Ok(kept);
            }
            self.charge.set(bytes).map_err(Some)?;
            tokio::select! {
                ready = published.wait_for(Option::is_some) => match ready {
                    Ok(_) => return Ok(kept),
                    Err(_) => return Err(Some(stopping())),
                },
                next = requests.message() => request = next.map_err(Some)?.ok_or(None)?,
                () = self.sender.closed() => return Err(None),
            }
        }
    }

    async fn follow(
        &mut self,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
        published: &mut Published,
    ) -> Result<(), End> {
        loop {
            tokio::select! {
                // Too long or too slow, or more than the server holds: the client should learn why.
                request = requests.message() => {
                    let request = request.map_err(Some)?.ok_or(None)?;
                    self.request(request, published).await?;
                }
                () = sleep_until(self.patience.unwrap_or_else(Instant::now)), if self.patience.is_some() => {
                    // It doesn't answer at all: that is no reason to tell it nothing more.
                    self.tell_news(published).await?;
                }
                changed = published.changed() => {
                    changed.map_err(|_| Some(stopping()))?;
                    self.publish(published).await?;
                }
                () = self.sender.closed() => return Err(None),
            }
        }
    }

    async fn request(&mut self, request: DeltaDiscoveryRequest, published: &mut Published) -> Result<(), End> {
        self.hear(request, published)?;
        self.tell(published).await?;
        if self.patience.is_some() && !self.stream.is_busy() {
            return self.tell_news(published).await;
        }
        Ok(())
    }

    /// Takes in a request.
    fn hear(&mut self, request: DeltaDiscoveryRequest, published: &Published) -> Result<(), End> {
        let Some(current) = published.borrow().clone() else { return Ok(()) };
        let heard = self.stream.request(request, &current).map_err(Some)?;
        self.charge.set(self.stream.held()).map_err(Some)?;
        self.note(heard);
        Ok(())
    }

    fn note(&self, heard: Heard) {
        let Some(name) = &self.gateway else { return };
        match heard {
            Heard::Nothing => {}
            Heard::Accepted => {
                self.shared.figures.accepted.add();
                self.shared.registry.accepted(name, self.stream.in_force());
            }
            Heard::Refused(reason) => {
                self.shared.figures.refused.add();
                tracing::warn!(event = "update_refused", gateway = name, reason, "gateway refuses an update");
                self.shared.registry.refused(name, reason);
            }
        }
    }

    async fn publish(&mut self, published: &mut Published) -> Result<(), End> {
        if self.stream.is_busy() {
            self.patience.get_or_insert_with(|| Instant::now() + PATIENCE);
            return Ok(());
        }
        self.tell_news(published).await
    }

    /// Tells of the current publication. Without memory for it, it is tried again, and answers are taken meanwhile: they set some free.
    async fn tell_news(&mut self, published: &mut Published) -> Result<(), End> {
        self.patience = None;
        let new = published.borrow_and_update().clone();
        let Some(new) = new else { return Ok(()) };
        let Some(update) = self.stream.update(&new).map_err(Some)? else {
            self.no_memory_since = None;
            return Ok(());
        };
        let bytes = self.stream.held() + update.bytes();
        if !self.charge.try_set(bytes) {
            let now = Instant::now();
            let since = *self.no_memory_since.get_or_insert(now);
            if now.duration_since(since) < self.shared.budget.stall_timeout() {
                self.patience = Some(now + UPDATE_PAUSE);
                return Ok(());
            }
            self.charge.set(bytes).map_err(Some)?;
        }
        self.no_memory_since = None;
        self.stream.publish(update);
        drop(new);
        self.tell(published).await
    }

    /// Sends what the client is to be told, each response when there is memory for it and the client has taken those before.
    async fn tell(&mut self, published: &Published) -> Result<(), End> {
        let stall_timeout = self.shared.budget.stall_timeout();
        let (mut sent, mut until) = (0_usize, Instant::now() + stall_timeout);
        while let Some(size) = self.stream.next_size() {
            let mut charge = self.shared.budget.charge(self.peer.address, Purpose::Responses);
            while !self.may_hold(published) || !charge.try_set(size) {
                let now = Instant::now();
                if now >= until {
                    return Err(Some(self.stalled(NO_MEMORY)));
                }
                tokio::select! {
                    () = sleep_until(until.min(now + RESPONSE_PAUSE)) => {}
                    () = self.sender.closed() => return Err(None),
                }
            }
            let Some(response) = self.stream.next_response() else { break };
            charge.force(response.bytes.len());
            let response = Response { charge: Some(charge), ..response };
            match timeout_at(until, self.sender.send(Ok(response))).await {
                Ok(outcome) => outcome.map_err(|_| None)?,
                Err(_) => return Err(Some(self.stalled(NOT_TAKEN))),
            }
            self.shared.figures.responses.add();
            sent += 1;
            if sent.is_multiple_of(LEAST_TAKEN) {
                until = Instant::now() + stall_timeout;
            }
        }
        // Nothing is told any more of a publication that is past.
        self.charge.try_set(self.stream.held());
        Ok(())
    }

    /// Whether there is memory for what the stream holds, with its part of a publication that only such streams still hold.
    fn may_hold(&mut self, published: &Published) -> bool {
        let current = published.borrow().as_ref().map_or(0, |it| it.number);
        self.charge.try_set(self.stream.held() + self.stream.lag(current))
    }

    fn stalled(&self, why: &str) -> Status {
        self.shared.budget.refused.add();
        let seconds = self.shared.budget.stall_timeout().as_secs();
        Status::deadline_exceeded(format!("no progress within {seconds} s: {why}"))
    }
}

fn stopping() -> Status {
    Status::unavailable("the policy server stops")
}

#[cfg(test)]
mod tests;
