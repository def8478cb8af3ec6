//! The discovery service over gRPC: a task for each stream, which tells its gateway what is published and notes what the
//! gateway says to that.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream as Responses;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response as Reply, Status, Streaming};

use super::codec::Response;
use super::figures::Figures;
use super::publication::Publication;
use super::registry::Registry;
use super::stream::{Heard, Stream};

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
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Discovery {
    type DeltaAggregatedResourcesStream = Pin<Box<dyn Responses<Item = Result<Response, Status>> + Send>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Reply<Self::DeltaAggregatedResourcesStream>, Status> {
        let address = super::listen::peer_address(&request);
        let (sender, receiver) = mpsc::channel(QUEUE);
        let task =
            Task { shared: self.clone(), stream: Stream::default(), gateway: None, sender, address, patience: None };
        tokio::spawn(task.run(request.into_inner()));
        Ok(Reply::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

struct Task {
    shared: Discovery,
    stream: Stream,
    /// The gateway's name, once it has said it.
    gateway: Option<String>,
    sender: mpsc::Sender<Result<Response, Status>>,
    address: Option<SocketAddr>,
    /// Until when a client that owes answers isn't told more, though there is more to tell.
    patience: Option<Instant>,
}

/// The stream is over.
struct Over;

impl Task {
    async fn run(mut self, mut requests: Streaming<DeltaDiscoveryRequest>) {
        let mut published = self.shared.published.clone();
        // Nobody is told that there is nothing just because the source hasn't been read yet.
        let ready = tokio::select! {
            ready = published.wait_for(Option::is_some) => ready.is_ok(),
            () = self.sender.closed() => false,
        };
        if ready {
            self.follow(&mut requests, &mut published).await;
        }
        if let Some(name) = &self.gateway {
            self.shared.registry.goes(name);
            tracing::info!(event = "gateway_lost", gateway = name, address = ?self.address, "gateway gone");
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
                    Ok(None) | Err(_) => Err(Over),
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
        mut request: DeltaDiscoveryRequest,
        published: &mut watch::Receiver<Option<Arc<Publication>>>,
    ) -> Result<(), Over> {
        if self.gateway.is_none() {
            let name = request.node.take().map(|node| node.id).unwrap_or_default();
            if name.is_empty() || name.len() > LONGEST_NAME || name.contains(|c: char| c.is_control() || c == ' ') {
                let why = "node.id of the first request must be the gateway's name: 1 to 253 bytes without blanks";
                return self.end(Status::invalid_argument(why)).await;
            }
            if self.shared.registry.comes(&name, self.address) > MOST_STREAMS {
                self.shared.registry.goes(&name);
                let why = format!("gateway {name} has {MOST_STREAMS} streams already: is its name used twice?");
                return self.end(Status::resource_exhausted(why)).await;
            }
            tracing::info!(event = "gateway_connected", gateway = name, address = ?self.address, "gateway connected");
            self.gateway = Some(name);
        }
        let Some(current) = published.borrow().clone() else { return Ok(()) };
        let answer = self.stream.request(request, &current);
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
        match self.stream.publish(&new) {
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
