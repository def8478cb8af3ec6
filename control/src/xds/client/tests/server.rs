//! A policy server without a mind of its own.

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

/// A server in a thread of its own, so that it can go away as a killed process does.
pub(super) struct Server {
    pub(super) port: u16,
    talks: mpsc::Receiver<Talk>,
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

/// A stream with a gateway.
pub(super) struct Talk {
    requests: Streaming<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    nonces: usize,
}

impl Server {
    pub(super) fn start() -> Self {
        Self::at(StdListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), None)
    }

    /// One where another one was.
    pub(super) fn start_at(port: u16) -> Self {
        Self::at(StdListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap(), None)
    }

    pub(super) fn start_tls(config: ServerConfig) -> Self {
        Self::at(StdListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), Some(config))
    }

    /// One that knows nothing of policy.
    pub(super) fn start_empty() -> Self {
        let listener = StdListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (talks, (stop, stopped)) = (mpsc::channel(1).1, oneshot::channel());
        let thread = on_a_thread(async move {
            let router = Tonic::builder().add_routes(Routes::default());
            tokio::select! {
                served = router.serve_with_incoming(incoming(listener)) => served.unwrap(),
                _ = stopped => {}
            }
        });
        Self { port, talks, stop, thread }
    }

    fn at(listener: StdListener, tls: Option<ServerConfig>) -> Self {
        let port = listener.local_addr().unwrap().port();
        let (sender, talks) = mpsc::channel(1);
        let (stop, stopped) = oneshot::channel();
        // What runs in the runtime ends with it, connections too.
        let thread = on_a_thread(async move {
            tokio::select! {
                () = serve(listener, tls, sender) => {}
                _ = stopped => {}
            }
        });
        Self { port, talks, stop, thread }
    }

    /// The next stream that a gateway opens.
    pub(super) async fn talk(&mut self) -> Talk {
        timeout(LONG, self.talks.recv()).await.expect("a stream in time").expect("the server lives")
    }

    pub(super) fn is_left_alone(&mut self) -> bool {
        self.talks.try_recv().is_err()
    }

    pub(super) fn kill(self) {
        drop(self.stop);
        self.thread.join().unwrap();
    }
}

/// Runs something in a runtime of its own.
pub(super) fn on_a_thread(what: impl Future<Output = ()> + Send + 'static) -> thread::JoinHandle<()> {
    thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(what);
    })
}

fn incoming(listener: StdListener) -> TcpListenerStream {
    listener.set_nonblocking(true).unwrap();
    TcpListenerStream::new(TcpListener::from_std(listener).unwrap())
}

async fn serve(listener: StdListener, tls: Option<ServerConfig>, talks: mpsc::Sender<Talk>) {
    let router = Tonic::builder().add_service(AggregatedDiscoveryServiceServer::new(Script { talks }));
    let Some(config) = tls else {
        return router.serve_with_incoming(incoming(listener)).await.unwrap();
    };
    let listener = incoming(listener).into_inner();
    let (sender, incoming) = mpsc::channel(1);
    tokio::spawn(async move {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            // Who isn't let in is told so by the handshake.
            if let Ok(stream) = acceptor.accept(stream).await {
                let _ = sender.send(Ok::<_, std::io::Error>(stream)).await;
            }
        }
    });
    router.serve_with_incoming(ReceiverStream::new(incoming)).await.unwrap();
}

struct Script {
    talks: mpsc::Sender<Talk>,
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
        let (responses, stream) = mpsc::channel(16);
        let talk = Talk { requests: request.into_inner(), responses, nonces: 0 };
        self.talks.send(talk).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// A port below those that the kernel gives to clients: one of them could take it while a server is away, even the
/// client that calls for that server.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Other processes run the same tests.
    let first = 30_000 + u16::try_from(std::process::id() % 100).unwrap() * 20;
    (0..20)
        .map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed) % 20)
        .find(|port| StdListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("a free port")
}

/// An ACK, or a NACK with its reason.
#[derive(Debug, PartialEq)]
pub(super) struct Said {
    pub(super) kind: Kind,
    pub(super) nonce: String,
    pub(super) error: Option<String>,
}

impl Talk {
    async fn request(&mut self) -> DeltaDiscoveryRequest {
        timeout(LONG, self.requests.message()).await.expect("a request in time").unwrap().expect("the stream goes on")
    }

    /// The requests with which a stream begins.
    pub(super) async fn subscriptions(&mut self) -> Vec<DeltaDiscoveryRequest> {
        let mut requests = Vec::new();
        for _ in Kind::ALL {
            requests.push(self.request().await);
        }
        requests
    }

    /// Sends a response, and returns its nonce.
    pub(super) async fn say(&mut self, mut response: DeltaDiscoveryResponse) -> String {
        self.nonces += 1;
        response.nonce = format!("n{}", self.nonces);
        let nonce = response.nonce.clone();
        self.responses.send(Ok(response)).await.expect("the stream goes on");
        nonce
    }

    /// Says what is different from before; settings come last.
    pub(super) async fn tell(&mut self, told: &Told, before: &Told) {
        for response in responses(&told.differences(before)) {
            self.say(response).await;
        }
    }

    pub(super) async fn fail(&mut self, status: Status) {
        let _ = self.responses.send(Err(status)).await;
    }

    /// What the gateway says to a response.
    pub(super) async fn answer(&mut self) -> Said {
        let request = self.request().await;
        let error = request.error_detail.map(|error| error.message);
        Said { kind: Kind::of_url(&request.type_url).expect("a kind"), nonce: request.response_nonce, error }
    }

    /// The nonce of what is acknowledged.
    pub(super) async fn accepted(&mut self) -> String {
        let Said { nonce, error, .. } = self.answer().await;
        assert_eq!(error, None);
        nonce
    }

    /// Why a response is refused.
    pub(super) async fn refused(&mut self, nonce: &str) -> String {
        let said = self.answer().await;
        assert_eq!(said.nonce, nonce);
        said.error.expect("a refusal")
    }

    pub(super) async fn hears_nothing_for(&mut self, long: Duration) -> bool {
        timeout(long, self.requests.message()).await.is_err()
    }

    /// Waits for the gateway to go.
    pub(super) async fn ends(&mut self) {
        let over = timeout(LONG, self.requests.message()).await.expect("an end in time");
        assert!(!matches!(over, Ok(Some(_))), "{over:?}");
    }
}
