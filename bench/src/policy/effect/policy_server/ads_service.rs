//! ADS (aggregated discovery service) of the simulated policy server: accepts the gateway's stream.

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

/// Capacity of the send queue, in responses.
const QUEUE: usize = 16;

/// A gateway's stream.
#[derive(Debug)]
pub(super) struct GatewayStream {
    /// Time of opening.
    pub(super) opened: Instant,
    requests: Streaming<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    nonces: u64,
}

impl GatewayStream {
    /// Sends a response; returns its nonce.
    pub(super) async fn send(&mut self, mut response: DeltaDiscoveryResponse) -> Result<String> {
        self.nonces += 1;
        let nonce = self.nonces.to_string();
        response.nonce.clone_from(&nonce);
        self.responses.send(Ok(response)).await.ok().context("the gateway has closed its stream")?;
        Ok(nonce)
    }

    /// The next request. Cancel-safe.
    pub(super) async fn next_request(&mut self) -> Result<DeltaDiscoveryRequest> {
        self.requests.message().await?.context("the gateway has closed its stream")
    }
}

/// Starts the gRPC server in a task of the current runtime; returns its streams.
pub(super) fn serve(listener: TcpListener) -> Result<mpsc::Receiver<GatewayStream>> {
    listener.set_nonblocking(true)?;
    let incoming = TcpIncoming::from(tokio::net::TcpListener::from_std(listener)?).with_nodelay(Some(true));
    let (sender, streams) = mpsc::channel(1);
    let service = AggregatedDiscoveryServiceServer::new(AdsService(sender));
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    Ok(streams)
}

#[derive(Debug)]
struct AdsService(mpsc::Sender<GatewayStream>);

#[tonic::async_trait]
impl AggregatedDiscoveryService for AdsService {
    type StreamAggregatedResourcesStream = Pin<Box<dyn Responses<Item = Result<DiscoveryResponse, Status>> + Send>>;
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn stream_aggregated_resources(
        &self,
        _: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        Err(Status::unimplemented("only delta streams are supported"))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let opened = Instant::now();
        let (responses, outgoing) = mpsc::channel(QUEUE);
        let stream = GatewayStream { opened, requests: request.into_inner(), responses, nonces: 0 };
        self.0.send(stream).await.map_err(|_| Status::unavailable("another gateway is connected"))?;
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}
