//! Simulated gateways: each subscribes to all resources and ACKs every response without decoding the resources, so that
//! one machine can run a thousand of them beside the server.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use prost::Message;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Request;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;
use vipgate::xds::resource::Kind;

const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
/// The same HTTP/2 parameters as in gateways: keep-alive interval, window, maximum response size.
const KEEP_ALIVE: Duration = Duration::from_secs(4);
const WINDOW: u32 = 8 << 20;
const MAX_RESPONSE: usize = 4 << 20;
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Maximum number of lost streams until the benchmark fails.
const MAX_LOST_STREAMS: u64 = 10_000;

/// The decoded fields of a `DeltaDiscoveryResponse`; all others are skipped.
#[derive(Clone, PartialEq, Message)]
struct ResponseHeader {
    #[prost(string, tag = "1")]
    system_version_info: String,
    #[prost(string, tag = "4")]
    type_url: String,
    #[prost(string, tag = "5")]
    nonce: String,
}

/// An event of a gateway.
#[derive(Debug)]
enum SubscriberEvent {
    /// It has received all responses of a policy version.
    Received { gateway: usize, version: String, at: Instant },
    /// Its stream was closed, with this error.
    StreamLost(String),
}

/// All simulated gateways.
#[derive(Debug)]
pub(super) struct Gateways {
    events: UnboundedReceiver<SubscriberEvent>,
    start: Instant,
    /// Last received version of each gateway, and time of reception.
    received: Vec<(String, Instant)>,
    /// The version of the last convergence.
    converged: String,
    lost_streams: u64,
    last_error: Option<String>,
}

/// All gateways have received the same version.
#[derive(Debug)]
pub(super) struct Convergence {
    /// Time of each gateway from the change to the reception, in ascending order.
    pub(super) times: Vec<Duration>,
}

impl Gateways {
    /// Starts `count` gateways at once.
    pub(super) fn connect(count: u32, url: &str) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let start = Instant::now();
        for gateway in 0..count as usize {
            tokio::spawn(run_gateway(gateway, url.to_owned(), sender.clone()));
        }
        let received = vec![(String::new(), start); count as usize];
        Self { events, start, received, converged: String::new(), lost_streams: 0, last_error: None }
    }

    /// Sets the time of the next change to now.
    pub(super) fn restart_clock(&mut self) {
        self.start = Instant::now();
    }

    /// Waits until all gateways have received the same version, different from that of the last convergence.
    pub(super) async fn wait_converged(&mut self, timeout: Duration) -> Result<Convergence> {
        let mut gateways_by_version = HashMap::<String, usize>::new();
        for (version, _) in &self.received {
            *gateways_by_version.entry(version.clone()).or_default() += 1;
        }
        let deadline = tokio::time::Instant::now() + timeout;
        loop {
            let event = match tokio::time::timeout_at(deadline, self.events.recv()).await {
                Ok(event) => event.context("all gateways have stopped")?,
                Err(_) => bail!("timeout after {} s; {}", timeout.as_secs(), self.stream_errors()),
            };
            let (gateway, version, at) = match event {
                SubscriberEvent::Received { gateway, version, at } => (gateway, version, at),
                SubscriberEvent::StreamLost(error) => {
                    self.lost_streams += 1;
                    self.last_error = Some(error);
                    ensure!(self.lost_streams <= MAX_LOST_STREAMS, "{}", self.stream_errors());
                    continue;
                }
            };
            if let Some(count) = gateways_by_version.get_mut(&self.received[gateway].0) {
                *count -= 1;
            }
            let count = gateways_by_version.entry(version.clone()).or_default();
            *count += 1;
            let is_converged = *count == self.received.len() && version != self.converged;
            if self.received[gateway].0 != version {
                self.received[gateway] = (version, at);
            }
            if is_converged {
                break;
            }
        }
        self.converged.clone_from(&self.received[0].0);
        let mut times: Vec<Duration> = self.received.iter().map(|(_, at)| at.duration_since(self.start)).collect();
        times.sort_unstable();
        Ok(Convergence { times })
    }

    /// The version of the last convergence.
    pub(super) fn version(&self) -> &str {
        &self.converged
    }

    /// Number of reconnected streams.
    pub(super) fn lost_streams(&self) -> u64 {
        self.lost_streams
    }

    /// Error of the last lost stream.
    pub(super) fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    fn stream_errors(&self) -> String {
        let error = self.last_error().map(|error| format!(", last error: {error}")).unwrap_or_default();
        format!("{} streams were lost{error}", self.lost_streams)
    }
}

/// Runs one gateway until the receiver of its events is dropped.
async fn run_gateway(gateway: usize, url: String, events: UnboundedSender<SubscriberEvent>) {
    loop {
        let error = match subscribe(gateway, &url, &events).await {
            Ok(()) => "the server closed the stream".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        if events.send(SubscriberEvent::StreamLost(error)).is_err() {
            return;
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
    }
}

async fn subscribe(gateway: usize, url: &str, events: &UnboundedSender<SubscriberEvent>) -> Result<()> {
    let endpoint = Endpoint::from_shared(url.to_owned())?
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW);
    let mut service = tonic::client::Grpc::new(endpoint.connect().await?).max_decoding_message_size(MAX_RESPONSE);
    let (requests, outgoing) = mpsc::unbounded_channel();
    for kind in Kind::OF_GATEWAYS {
        let node = Some(Node { id: format!("gw-{gateway}"), ..Node::default() });
        let type_url = kind.type_url().to_owned();
        requests.send(DeltaDiscoveryRequest { node, type_url, ..DeltaDiscoveryRequest::default() })?;
    }
    service.ready().await?;
    let outgoing = Request::new(UnboundedReceiverStream::new(outgoing));
    let codec = ProstCodec::<DeltaDiscoveryRequest, ResponseHeader>::default();
    let response = service.streaming(outgoing, PathAndQuery::from_static(METHOD), codec).await?;
    let mut responses = response.into_inner();
    while let Some(ResponseHeader { system_version_info, type_url, nonce }) = responses.message().await? {
        let is_last = type_url == Kind::Settings.type_url();
        let at = Instant::now();
        requests.send(DeltaDiscoveryRequest { type_url, response_nonce: nonce, ..DeltaDiscoveryRequest::default() })?;
        if is_last {
            events.send(SubscriberEvent::Received { gateway, version: system_version_info, at })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::watch;
    use tonic::transport::Server;
    use tonic::transport::server::TcpIncoming;
    use vipgate::policyd::service::{AggregatedDiscoveryServiceServer, DiscoveryService};
    use vipgate::xds::publication::Publication;

    use super::*;
    use crate::policy::PolicySize;
    use crate::policy::churn::Churn;

    #[tokio::test]
    async fn all_gateways_receive_each_publication() {
        let mut churn = Churn::new(PolicySize { vips: 5, endpoints: 40 });
        let first = Publication::default().next(Arc::new(churn.placement())).unwrap();
        churn.change_next();
        let second = first.next(Arc::new(churn.placement())).unwrap();
        let versions = [first.version.clone(), second.version.clone()];

        let (publish, published) = watch::channel(Some(Arc::new(first)));
        let discovery = DiscoveryService {
            published,
            view: watch::channel(Arc::default()).1,
            registry: Arc::default(),
            nodes: Arc::default(),
            stats: Arc::default(),
            rejections: Arc::default(),
            budget: Arc::default(),
        };
        let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let url = format!("http://{}", incoming.local_addr().unwrap());
        let service = AggregatedDiscoveryServiceServer::new(discovery);
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));

        let mut gateways = Gateways::connect(3, &url);
        let timeout = Duration::from_secs(20);
        assert_eq!(gateways.wait_converged(timeout).await.unwrap().times.len(), 3);
        assert_eq!(gateways.version(), versions[0]);
        gateways.restart_clock();
        publish.send(Some(Arc::new(second))).unwrap();
        assert_eq!(gateways.wait_converged(timeout).await.unwrap().times.len(), 3);
        assert_eq!((gateways.version(), gateways.lost_streams()), (&*versions[1], 0));
    }
}
