//! Where a gateway's stream comes in: the service as its generated code has it, and the stream's two ends.

use std::net::TcpListener;
use std::pin::Pin;

use anyhow::{Context, Result};
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::Stream as Responses;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// Responses that wait for the network.
const QUEUE: usize = 16;

/// A gateway's stream.
#[derive(Debug)]
pub(super) struct Stream {
    /// When it was opened.
    pub(super) opened: Instant,
    requests: Streaming<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    nonces: u64,
}

impl Stream {
    /// Sends a response; its nonce.
    pub(super) async fn tell(&mut self, mut response: DeltaDiscoveryResponse) -> Result<String> {
        self.nonces += 1;
        let nonce = self.nonces.to_string();
        response.nonce.clone_from(&nonce);
        self.responses.send(Ok(response)).await.ok().context("the gateway has gone away")?;
        Ok(nonce)
    }

    /// The next request. May be dropped and called again.
    pub(super) async fn heard(&mut self) -> Result<DeltaDiscoveryRequest> {
        self.requests.message().await?.context("the gateway has ended its stream")
    }
}

/// Takes up streams, in a task of the runtime that this is called in.
pub(super) fn open(listener: TcpListener) -> Result<mpsc::Receiver<Stream>> {
    listener.set_nonblocking(true)?;
    let incoming = TcpIncoming::from(tokio::net::TcpListener::from_std(listener)?).with_nodelay(Some(true));
    let (sender, streams) = mpsc::channel(1);
    let service = AggregatedDiscoveryServiceServer::new(Door(sender));
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    Ok(streams)
}

#[derive(Debug)]
struct Door(mpsc::Sender<Stream>);

#[tonic::async_trait]
impl AggregatedDiscoveryService for Door {
    type StreamAggregatedResourcesStream = Pin<Box<dyn Responses<Item = Result<DiscoveryResponse, Status>> + Send>>;
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn stream_aggregated_resources(
        &self,
        _: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        Err(Status::unimplemented("gateways ask for deltas"))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let opened = Instant::now();
        let (responses, told) = mpsc::channel(QUEUE);
        let stream = Stream { opened, requests: request.into_inner(), responses, nonces: 0 };
        self.0.send(stream).await.map_err(|_| Status::unavailable("one gateway has come already"))?;
        Ok(Response::new(ReceiverStream::new(told)))
    }
}
