//! The discovery service over gRPC: a task for each stream, which tells its gateway what is published and notes what the
//! gateway says to that.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::Stream as Responses;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response as Reply, Status, Streaming};

use super::budget::{Budget, Charge};
use super::codec::Response;
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
        let charge = self.budget.charge(peer.address);
        let task =
            Task { shared: self.clone(), stream: Stream::default(), gateway, sender, peer, patience: None, charge };
        tokio::spawn(task.run(first, requests));
        Ok(Reply::new(Box::pin(ReceiverStream::new(receiver))))
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
                self.registry.goes(&name);
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
}

/// The process that a node says it is.
fn incarnation(node: &Node) -> Option<u64> {
    match node.metadata.as_ref()?.fields.get(INCARNATION)?.kind.as_ref()? {
        ValueKind::StringValue(text) => u64::from_str_radix(text, 16).ok(),
        _ => None,
    }
}

struct Task {
    shared: Discovery,
    stream: Stream,
    /// The gateway's name, once it has said it.
    gateway: Option<String>,
    sender: mpsc::Sender<Result<Response, Status>>,
    peer: Peer,
    /// Until when a client that owes answers isn't told more, though there is more to tell.
    patience: Option<Instant>,
    /// What the stream holds.
    charge: Charge,
}

/// The stream is over.
struct Over;

impl Task {
    async fn run(mut self, first: Option<DeltaDiscoveryRequest>, mut requests: Streaming<DeltaDiscoveryRequest>) {
        if let Ok(first) = self.introduce(first, &mut requests).await {
            self.serve(first, requests).await;
        }
        if let Some(name) = &self.gateway {
            self.shared.registry.goes(name);
            tracing::info!(event = "gateway_lost", gateway = name, address = ?self.peer.address, "gateway gone");
        }
    }

    /// The first request, and with it the gateway's name.
    async fn introduce(
        &mut self,
        first: Option<DeltaDiscoveryRequest>,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
    ) -> Result<DeltaDiscoveryRequest, Over> {
        let request = match first {
            Some(request) => request,
            None => match timeout(NO_REQUEST, requests.message()).await {
                Ok(Ok(Some(request))) => request,
                Ok(Ok(None)) => return Err(Over),
                Ok(Err(status)) => return self.end(status).await.and(Err(Over)),
                Err(_) => {
                    let why = format!("no request within {} s", NO_REQUEST.as_secs());
                    return self.end(Status::deadline_exceeded(why)).await.and(Err(Over));
                }
            },
        };
        if self.gateway.is_none() {
            match self.shared.admit(&request, &self.peer) {
                Ok(name) => self.gateway = Some(name),
                Err(status) => return self.end(status).await.and(Err(Over)),
            }
        }
        Ok(request)
    }

    async fn serve(&mut self, first: DeltaDiscoveryRequest, mut requests: Streaming<DeltaDiscoveryRequest>) {
        let mut published = self.shared.published.clone();
        // Nobody is told that there is nothing just because the source hasn't been read yet.
        let ready = tokio::select! {
            ready = published.wait_for(Option::is_some) => ready.is_ok(),
            () = self.sender.closed() => false,
        };
        if ready && self.request(first, &mut published).await.is_ok() {
            self.follow(&mut requests, &mut published).await;
        }
    }

    async fn follow(
        &mut self,
        requests: &mut Streaming<DeltaDiscoveryRequest>,
        published: &mut watch::Receiver<Option<Arc<Publication>>>,
    ) {
        loop {
            let step = tokio::select! {
                request = requests.message() => match request {
                    Ok(Some(request)) => self.request(request, published).await,
                    Ok(None) => Err(Over),
                    // Too long, or more than the server holds: the client should learn why.
                    Err(status) => self.end(status).await,
                },
                () = sleep_until(self.patience.unwrap_or_else(Instant::now)), if self.patience.is_some() => {
                    // It doesn't answer at all: that is no reason to tell it nothing more.
                    self.tell_news(published).await
                }
                changed = published.changed() => match changed {
                    Ok(()) => self.publish(published).await,
                    Err(_) => self.end(Status::unavailable("the policy server stops")).await,
                },
                () = self.sender.closed() => Err(Over),
            };
            if step.is_err() {
                return;
            }
        }
    }

    async fn request(
        &mut self,
        request: DeltaDiscoveryRequest,
        published: &mut watch::Receiver<Option<Arc<Publication>>>,
    ) -> Result<(), Over> {
        let Some(current) = published.borrow().clone() else { return Ok(()) };
        let answer = self.stream.request(request, &current).and_then(|answer| {
            self.charge.set(self.stream.held())?;
            Ok(answer)
        });
        match answer {
            Err(status) => self.end(status).await,
            Ok((responses, heard)) => {
                self.note(heard);
                self.tell(responses).await?;
                if self.patience.is_some() && !self.stream.is_busy() {
                    return self.tell_news(published).await;
                }
                Ok(())
            }
        }
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

    async fn publish(&mut self, published: &mut watch::Receiver<Option<Arc<Publication>>>) -> Result<(), Over> {
        if self.stream.is_busy() {
            self.patience.get_or_insert_with(|| Instant::now() + PATIENCE);
            return Ok(());
        }
        self.tell_news(published).await
    }

    async fn tell_news(&mut self, published: &mut watch::Receiver<Option<Arc<Publication>>>) -> Result<(), Over> {
        self.patience = None;
        let new = published.borrow_and_update().clone();
        let Some(new) = new else { return Ok(()) };
        let responses = self.stream.publish(&new).and_then(|responses| {
            self.charge.set(self.stream.held())?;
            Ok(responses)
        });
        match responses {
            Ok(responses) => self.tell(responses).await,
            Err(status) => self.end(status).await,
        }
    }

    async fn tell(&self, responses: Vec<Response>) -> Result<(), Over> {
        for response in responses {
            self.shared.figures.responses.add();
            self.sender.send(Ok(response)).await.map_err(|_| Over)?;
        }
        Ok(())
    }

    async fn end(&self, status: Status) -> Result<(), Over> {
        // Whoever has gone away needs no reason.
        let _ = self.sender.send(Err(status)).await;
        Err(Over)
    }
}

#[cfg(test)]
mod tests;
