//! A scripted policy server: each test sends the responses and receives the requests of its streams.

use std::net::{Ipv4Addr, TcpListener as StdListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;

use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::service::Routes;
use tonic::transport::Server as Tonic;
use tonic::{Request, Response, Status, Streaming};

use super::*;

/// A server in its own thread, so that it can be stopped like a killed process.
pub(super) struct Server {
    pub(super) port: u16,
    streams: mpsc::Receiver<ServerStream>,
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

/// The server's side of a stream.
pub(super) struct ServerStream {
    requests: Streaming<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    nonces: usize,
}

impl Server {
    pub(super) fn start() -> Self {
        Self::at(StdListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), None)
    }

    /// Starts at a fixed port, e.g. that of a former server.
    pub(super) fn start_at(port: u16) -> Self {
        Self::at(StdListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap(), None)
    }

    pub(super) fn start_tls(config: ServerConfig) -> Self {
        Self::at(StdListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), Some(config))
    }

    /// A gRPC server without the discovery service.
    pub(super) fn start_empty() -> Self {
        let listener = StdListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (streams, (stop, stopped)) = (mpsc::channel(1).1, oneshot::channel());
        let thread = run_in_thread(async move {
            let router = Tonic::builder().add_routes(Routes::default());
            tokio::select! {
                outcome = router.serve_with_incoming(incoming(listener)) => outcome.unwrap(),
                _ = stopped => {}
            }
        });
        Self { port, streams, stop, thread }
    }

    fn at(listener: StdListener, tls: Option<ServerConfig>) -> Self {
        let port = listener.local_addr().unwrap().port();
        let (sender, streams) = mpsc::channel(1);
        let (stop, stopped) = oneshot::channel();
        // All tasks and connections end with the thread's runtime.
        let thread = run_in_thread(async move {
            tokio::select! {
                () = run_server(listener, tls, sender) => {}
                _ = stopped => {}
            }
        });
        Self { port, streams, stop, thread }
    }

    /// Waits for the next stream of a gateway.
    pub(super) async fn accept_stream(&mut self) -> ServerStream {
        timeout(TEST_TIMEOUT, self.streams.recv()).await.expect("a stream in time").expect("the server runs")
    }

    pub(super) fn has_no_stream(&mut self) -> bool {
        self.streams.try_recv().is_err()
    }

    pub(super) fn kill(self) {
        drop(self.stop);
        self.thread.join().unwrap();
    }
}

/// Runs a future in a thread with its own runtime.
fn run_in_thread(future: impl Future<Output = ()> + Send + 'static) -> thread::JoinHandle<()> {
    thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future);
    })
}

fn incoming(listener: StdListener) -> TcpListenerStream {
    listener.set_nonblocking(true).unwrap();
    TcpListenerStream::new(TcpListener::from_std(listener).unwrap())
}

async fn run_server(listener: StdListener, tls: Option<ServerConfig>, streams: mpsc::Sender<ServerStream>) {
    let router = Tonic::builder().add_service(AggregatedDiscoveryServiceServer::new(Script { streams }));
    let Some(config) = tls else {
        return router.serve_with_incoming(incoming(listener)).await.unwrap();
    };
    let listener = incoming(listener).into_inner();
    let (sender, incoming) = mpsc::channel(1);
    tokio::spawn(async move {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            // A failed handshake has sent its alert to the client.
            if let Ok(stream) = acceptor.accept(stream).await {
                let _ = sender.send(Ok::<_, std::io::Error>(stream)).await;
            }
        }
    });
    router.serve_with_incoming(ReceiverStream::new(incoming)).await.unwrap();
}

struct Script {
    streams: mpsc::Sender<ServerStream>,
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Script {
    type StreamAggregatedResourcesStream = ReceiverStream<Result<DiscoveryResponse, Status>>;
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn stream_aggregated_resources(
        &self,
        _: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        Err(Status::unimplemented("only the delta variant"))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let (responses, outgoing) = mpsc::channel(16);
        let stream = ServerStream { requests: request.into_inner(), responses, nonces: 0 };
        self.streams.send(stream).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}

/// A free port below the ephemeral range: a client, even the one under test, could bind an ephemeral port while the
/// server is down.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // By process id: tests run in several processes.
    let first = 30_000 + u16::try_from(std::process::id() % 100).unwrap() * 20;
    (0..20)
        .map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed) % 20)
        .find(|port| StdListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("a free port")
}

/// An ACK, or a NACK with its error.
#[derive(Debug, PartialEq)]
pub(super) struct Reply {
    pub(super) kind: Kind,
    pub(super) nonce: String,
    pub(super) error: Option<String>,
}

impl ServerStream {
    async fn request(&mut self) -> DeltaDiscoveryRequest {
        timeout(TEST_TIMEOUT, self.requests.message())
            .await
            .expect("a request in time")
            .unwrap()
            .expect("the stream is open")
    }

    /// The first requests of a stream: one for each kind.
    pub(super) async fn subscriptions(&mut self) -> Vec<DeltaDiscoveryRequest> {
        let mut requests = Vec::new();
        for _ in Kind::OF_GATEWAYS {
            requests.push(self.request().await);
        }
        requests
    }

    /// Numbers the next responses from here on.
    pub(super) fn set_last_nonce(&mut self, number: usize) {
        self.nonces = number;
    }

    /// Sends a response, and returns its nonce.
    pub(super) async fn send(&mut self, mut response: DeltaDiscoveryResponse) -> String {
        self.nonces += 1;
        response.nonce = format!("n{}", self.nonces);
        let nonce = response.nonce.clone();
        self.responses.send(Ok(response)).await.expect("the stream is open");
        nonce
    }

    /// Sends the changes since `before`; Settings are last.
    pub(super) async fn send_diff(&mut self, policy: &ServerPolicy, before: &ServerPolicy) {
        for response in responses(&policy.diff(before)) {
            self.send(response).await;
        }
    }

    pub(super) async fn fail(&mut self, status: Status) {
        let _ = self.responses.send(Err(status)).await;
    }

    /// The next ACK or NACK of the gateway.
    pub(super) async fn next_reply(&mut self) -> Reply {
        let request = self.request().await;
        let error = request.error_detail.map(|error| error.message);
        Reply { kind: Kind::from_type_url(&request.type_url).expect("a kind"), nonce: request.response_nonce, error }
    }

    /// Expects an ACK; returns its nonce.
    pub(super) async fn expect_ack(&mut self) -> String {
        let Reply { nonce, error, .. } = self.next_reply().await;
        assert_eq!(error, None);
        nonce
    }

    /// Expects a NACK with this nonce; returns its error.
    pub(super) async fn expect_nack(&mut self, nonce: &str) -> String {
        let reply = self.next_reply().await;
        assert_eq!(reply.nonce, nonce);
        reply.error.expect("a NACK")
    }

    pub(super) async fn receives_nothing_for(&mut self, duration: Duration) -> bool {
        timeout(duration, self.requests.message()).await.is_err()
    }

    /// Waits until the gateway closes the stream.
    pub(super) async fn wait_closed(&mut self) {
        let end = timeout(TEST_TIMEOUT, self.requests.message()).await.expect("an end in time");
        assert!(!matches!(end, Ok(Some(_))), "{end:?}");
    }
}
