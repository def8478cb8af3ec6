//! Gateways as a policy server sees them: each subscribes to everything and acknowledges what it is told. What that means they
//! don't look at, so that one machine can play a thousand of them beside the server.

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
use vipgate::xds::client::chain;
use vipgate::xds::resource::Kind;

const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
/// As gateways have it: how often a silent connection is asked whether it lives, what may be on its way, the longest response.
const KEEP_ALIVE: Duration = Duration::from_secs(4);
const WINDOW: u32 = 8 << 20;
const LONGEST: usize = 4 << 20;
/// Before a gateway whose stream has ended comes again.
const PAUSE: Duration = Duration::from_millis(100);
/// Streams that may end before something is wrong with all of them.
const MOST_LOST: u64 = 10_000;

/// What a gateway looks at in a response: all else is skipped.
#[derive(Clone, PartialEq, Message)]
struct Glance {
    #[prost(string, tag = "1")]
    system_version_info: String,
    #[prost(string, tag = "4")]
    type_url: String,
    #[prost(string, tag = "5")]
    nonce: String,
}

/// What happens at a gateway.
#[derive(Debug)]
enum Event {
    /// It was told everything of a policy.
    Told { gateway: usize, version: String, at: Instant },
    /// Its stream has ended.
    Lost(String),
}

/// All gateways.
#[derive(Debug)]
pub(super) struct Gateways {
    events: UnboundedReceiver<Event>,
    begun: Instant,
    /// What each was told last, and when.
    told: Vec<(String, Instant)>,
    /// What they were told when they were last in step.
    before: String,
    lost: u64,
    why: Option<String>,
}

/// All gateways were told the same.
#[derive(Debug)]
pub(super) struct Told {
    /// When each was, from the moment of the change, in ascending order.
    pub(super) times: Vec<Duration>,
}

impl Gateways {
    /// Starts as many; all come at once.
    pub(super) fn connect(count: u32, url: &str) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let begun = Instant::now();
        for gateway in 0..count as usize {
            tokio::spawn(live(gateway, url.to_owned(), sender.clone()));
        }
        let told = vec![(String::new(), begun); count as usize];
        Self { events, begun, told, before: String::new(), lost: 0, why: None }
    }

    /// A change is made now: what gateways were told before doesn't count.
    pub(super) fn forget(&mut self) {
        self.begun = Instant::now();
    }

    /// Waits until all were told the same, and another policy than before.
    pub(super) async fn in_step(&mut self, patience: Duration) -> Result<Told> {
        let mut having = HashMap::<String, usize>::new();
        for (version, _) in &self.told {
            *having.entry(version.clone()).or_default() += 1;
        }
        let until = tokio::time::Instant::now() + patience;
        loop {
            let event = match tokio::time::timeout_at(until, self.events.recv()).await {
                Ok(event) => event.context("all gateways have gone")?,
                Err(_) => bail!("not within {} s; {}", patience.as_secs(), self.losses()),
            };
            let (gateway, version, at) = match event {
                Event::Told { gateway, version, at } => (gateway, version, at),
                Event::Lost(why) => {
                    self.lost += 1;
                    self.why = Some(why);
                    ensure!(self.lost <= MOST_LOST, "{}", self.losses());
                    continue;
                }
            };
            if let Some(count) = having.get_mut(&self.told[gateway].0) {
                *count -= 1;
            }
            let same = having.entry(version.clone()).or_default();
            *same += 1;
            let all = *same == self.told.len() && version != self.before;
            if self.told[gateway].0 != version {
                self.told[gateway] = (version, at);
            }
            if all {
                break;
            }
        }
        self.before.clone_from(&self.told[0].0);
        let mut times: Vec<Duration> = self.told.iter().map(|(_, at)| at.duration_since(self.begun)).collect();
        times.sort_unstable();
        Ok(Told { times })
    }

    /// The policy that all were told when they were last in step.
    pub(super) fn version(&self) -> &str {
        &self.before
    }

    /// Streams that have ended, and were opened again.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// Why the last of them did.
    pub(super) fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    fn losses(&self) -> String {
        let why = self.why().map(|why| format!(", the last one because {why}")).unwrap_or_default();
        format!("{} streams were lost{why}", self.lost)
    }
}

/// One gateway, for as long as anybody wants to hear of it.
async fn live(gateway: usize, url: String, events: UnboundedSender<Event>) {
    loop {
        let why = match follow(gateway, &url, &events).await {
            Ok(()) => "the server has ended the stream".to_owned(),
            Err(error) => chain(error.as_ref()),
        };
        if events.send(Event::Lost(why)).is_err() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn follow(gateway: usize, url: &str, events: &UnboundedSender<Event>) -> Result<()> {
    let endpoint = Endpoint::from_shared(url.to_owned())?
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW);
    let mut service = tonic::client::Grpc::new(endpoint.connect().await?).max_decoding_message_size(LONGEST);
    let (requests, outgoing) = mpsc::unbounded_channel();
    for kind in Kind::ALL {
        let node = Some(Node { id: format!("gw-{gateway}"), ..Node::default() });
        let type_url = kind.type_url().to_owned();
        requests.send(DeltaDiscoveryRequest { node, type_url, ..DeltaDiscoveryRequest::default() })?;
    }
    service.ready().await?;
    let outgoing = Request::new(UnboundedReceiverStream::new(outgoing));
    let codec = ProstCodec::<DeltaDiscoveryRequest, Glance>::default();
    let answer = service.streaming(outgoing, PathAndQuery::from_static(METHOD), codec).await?;
    let mut responses = answer.into_inner();
    while let Some(Glance { system_version_info, type_url, nonce }) = responses.message().await? {
        let is_last = type_url == Kind::Settings.type_url();
        let at = Instant::now();
        requests.send(DeltaDiscoveryRequest { type_url, response_nonce: nonce, ..DeltaDiscoveryRequest::default() })?;
        if is_last {
            events.send(Event::Told { gateway, version: system_version_info, at })?;
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
    use vipgate::policyd::publication::Publication;
    use vipgate::policyd::service::{AggregatedDiscoveryServiceServer, Discovery};

    use super::*;
    use crate::policy::Size;
    use crate::policy::churn::Churn;

    #[tokio::test]
    async fn all_gateways_are_told_of_each_publication() {
        let mut churn = Churn::new(Size { vips: 5, endpoints: 40 });
        let first = Publication::default().next(Arc::new(churn.deal())).unwrap();
        churn.change();
        let second = first.next(Arc::new(churn.deal())).unwrap();
        let versions = [first.version.clone(), second.version.clone()];

        let (publish, published) = watch::channel(Some(Arc::new(first)));
        let discovery = Discovery {
            published,
            registry: Arc::default(),
            figures: Arc::default(),
            refusals: Arc::default(),
            budget: Arc::default(),
        };
        let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let url = format!("http://{}", incoming.local_addr().unwrap());
        let service = AggregatedDiscoveryServiceServer::new(discovery);
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));

        let mut gateways = Gateways::connect(3, &url);
        let patience = Duration::from_secs(20);
        assert_eq!(gateways.in_step(patience).await.unwrap().times.len(), 3);
        assert_eq!(gateways.version(), versions[0]);
        gateways.forget();
        publish.send(Some(Arc::new(second))).unwrap();
        assert_eq!(gateways.in_step(patience).await.unwrap().times.len(), 3);
        assert_eq!((gateways.version(), gateways.lost()), (&*versions[1], 0));
    }
}
