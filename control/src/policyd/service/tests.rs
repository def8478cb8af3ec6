//! Discovery service against the client of gateways: authorization of names, and the memory and time limits of streams.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use http_body::Frame;
use prost::Message as _;
use prost::bytes::Bytes;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::IntoStreamingRequest;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::transport::{Endpoint, Server as Tonic};
use tower::ServiceExt as _;
use vipgate_common::Tasks;
use vipgate_dataplane::policy::spec::EndpointSpec;
use vipgate_policy::compiler::{GatewayLocality, Placement};

mod nodes;
mod set_aside;

use super::*;
use crate::config::{KubernetesSource, PodTokens, PolicyServer, Tls};
use crate::listener::{ConnectionLimiter, Limits, RejectReason};
use crate::membership::Secret;
use crate::policyd::identity::PodRole;
use crate::policyd::listen::{self, Certificates};
use crate::policyd::membership;
use crate::policyd::meter::MeterLayer;
use crate::policyd::pod_token::{PodTokenLayer, TokenVerifier};
use crate::policyd::registry::{NameInUse, Process};
use crate::xds::client::{Client, ClientEvent, Effect, ServerStatus, Target, authorized, open_channel};
use crate::xds::fixtures::pki::{Authority, Identity};
use crate::xds::fixtures::{policy_server, sample_placement};
use crate::xds::proto::Heartbeat;
use crate::xds::proto::membership_client::MembershipClient;
use crate::xds::resource::Kind;
use crate::xds::tls::ClientCertificates;

/// Timeout of everything, with a wide margin for slow machines.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The names of this host.
const LOCAL_NAMES: [&str; 2] = ["127.0.0.1", "localhost"];

const LIMITS: Limits = Limits { connections: 64, per_address: 48 };

/// A server with an empty policy.
struct Server {
    url: String,
    service: DiscoveryService,
    room: Arc<ConnectionLimiter>,
    published: watch::Sender<Option<Arc<Publication>>>,
}

impl Server {
    /// With a CA, clients must present a certificate.
    fn start(ca: Option<&Authority>) -> Self {
        Self::with_budget(ca, Budget::default())
    }

    fn with_budget(ca: Option<&Authority>, budget: Budget) -> Self {
        Self::with(ca, budget, None)
    }

    /// Whose clients may have a token in place of a certificate.
    fn with_tokens(ca: &Authority, verifier: TokenVerifier) -> Self {
        Self::with(Some(ca), Budget::default(), Some(Arc::new(verifier)))
    }

    fn with(ca: Option<&Authority>, budget: Budget, verifier: Option<Arc<TokenVerifier>>) -> Self {
        let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let (publish, published) = watch::channel(Publication::default().next(Arc::default()).map(Arc::new));
        let (registry, stats, rejections) = (Arc::default(), Arc::<Stats>::default(), Arc::<RejectionLog>::default());
        let membership = membership::start(
            Duration::from_millis(300),
            &membership::FakeStore::default(),
            published.clone(),
            stats.clone(),
        );
        let (room, budget) = (ConnectionLimiter::new("grpc", LIMITS), Arc::new(budget));
        let service = DiscoveryService {
            published,
            view: membership.view.clone(),
            registry,
            nodes: Arc::default(),
            stats: stats.clone(),
            rejections: rejections.clone(),
            budget: budget.clone(),
        };
        let client_certificates =
            if verifier.is_some() { ClientCertificates::Optional } else { ClientCertificates::Required };
        let router = Tonic::builder()
            .layer(MeterLayer(budget))
            .layer(PodTokenLayer { verifier, stats: stats.clone(), rejections: rejections.clone() })
            .add_service(AggregatedDiscoveryServiceServer::new(service.clone()))
            .add_service(membership::server(membership, stats.clone(), rejections.clone()));
        let scheme = match ca {
            None => {
                let incoming = listen::accept_plain(listener, room.clone(), &Tasks::default());
                tokio::spawn(router.serve_with_incoming(ReceiverStream::new(incoming)));
                "http"
            }
            Some(ca) => {
                let own = ca.issue(&LOCAL_NAMES);
                let files = Tls { ca: Some(ca.ca()), cert: own.cert, key: own.key };
                let incoming = listen::accept_tls(
                    listener,
                    room.clone(),
                    Arc::new(Certificates::read(files, client_certificates).unwrap()),
                    stats,
                    rejections,
                    &Tasks::default(),
                );
                tokio::spawn(router.serve_with_incoming(ReceiverStream::new(incoming)));
                "https"
            }
        };
        Self { url: format!("{scheme}://{address}"), service, room, published: publish }
    }

    /// A client's configuration for this server, with a certificate if there is a CA.
    fn client_config(&self, tls: Option<(&Authority, &Identity)>, folder: &TempDir) -> PolicyServer {
        PolicyServer {
            ca: tls.map(|(ca, _)| ca.ca()),
            cert: tls.map(|(_, own)| own.cert.clone()),
            key: tls.map(|(_, own)| own.key.clone()),
            cache: folder.path().join("policy.cache"),
            ..policy_server(&[&self.url])
        }
    }

    /// Publishes the next policy; returns its number.
    fn publish(&self, placement: Placement) -> u64 {
        let last = self.service.published.borrow().clone().unwrap_or_default();
        let next = last.next(Arc::new(placement)).expect("something differs");
        let number = next.number;
        self.published.send_replace(Some(Arc::new(next)));
        number
    }

    /// Waits for a condition.
    async fn wait(&self, what: &str, is_met: impl Fn(&Self) -> bool) {
        let wait = async {
            while !is_met(self) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let held = || self.service.budget.held_bytes();
        timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("timeout: {what}; {} bytes are in use", held()));
    }

    /// A gateway's number of streams and its address, from the registry.
    fn registered(&self, name: &str) -> Option<(u32, Option<SocketAddr>)> {
        self.service.registry.list().get(name).map(|it| (it.streams, it.address))
    }
}

/// A gateway's client that accepts every update.
struct Gateway {
    status: Arc<ArcSwap<ServerStatus>>,
    task: JoinHandle<()>,
    _folder: TempDir,
}

impl Gateway {
    fn start(name: &str, server: &Server, tls: Option<(&Authority, &Identity)>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (sender, mut events) = mpsc::channel(4);
        let (client, _) = Client::open(GatewayLocality::named(name), server.client_config(tls, &folder), sender);
        let status = client.status();
        let task = tokio::spawn(async move {
            let accept_all = async {
                while let Some(event) = events.recv().await {
                    if let ClientEvent::Update(_, reply) = event {
                        reply.send(Ok(Effect::InForce)).unwrap();
                    }
                }
            };
            tokio::join!(client.run(), accept_all);
        });
        Self { status, task, _folder: folder }
    }

    /// Waits for a status; returns its error.
    async fn wait_for(&self, is_met: impl Fn(&ServerStatus) -> bool) -> String {
        let wait = async {
            while !is_met(&self.status.load()) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("timeout: {:?}", self.status.load()));
        self.status.load().error.clone().unwrap_or_default()
    }

    /// Waits until the server rejects it; returns the error.
    async fn rejection(&self) -> String {
        self.wait_for(|it| !it.connected && it.error.as_deref().is_some_and(|error| error != "not connected yet")).await
    }

    fn stop(self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn a_gateway_may_only_use_a_name_in_its_certificate() {
    let ca = Authority::new("ca");
    let server = Server::start(Some(&ca));
    let (own, other) = (ca.issue(&["gw-a"]), ca.issue(&["gw-b", "gw-b.example"]));
    let impostor = Gateway::start("gw-a", &server, Some((&ca, &other)));
    let error = impostor.rejection().await;
    assert!(
        error.starts_with("the certificate is valid for gw-b, gw-b.example, not for gateway gw-a: give the gateway"),
        "{error}"
    );
    assert_eq!(server.registered("gw-a"), None, "the impostor isn't registered");
    assert!(server.service.stats.certificate_mismatches.get() > 0);

    let gateway = Gateway::start("gw-a", &server, Some((&ca, &own)));
    gateway.wait_for(|it| it.connected).await;
    let registered = server.registered("gw-a");
    assert!(matches!(registered, Some((1, Some(_)))), "{registered:?}");
    let mismatches = server.service.stats.certificate_mismatches.get();
    let wait = async {
        while server.service.stats.certificate_mismatches.get() <= mismatches {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, wait).await.expect("the impostor retries");
    assert_eq!(server.registered("gw-a"), registered);
    assert!(gateway.status.load().connected);

    // By common name or URI as well.
    for (name, own) in [
        ("gw-c", ca.issue_named(Some("gw-c"), None)),
        ("gw-d", ca.issue_named(None, Some("spiffe://example.org/gateway/gw-d"))),
    ] {
        Gateway::start(name, &server, Some((&ca, &own))).wait_for(|it| it.connected).await;
    }
}

/// A gateway's first heartbeat.
fn heartbeat(gateway: &str) -> Heartbeat {
    let secret = Secret::new([7; 32]);
    Heartbeat {
        gateway: gateway.to_owned(),
        incarnation: secret.incarnation(),
        secret: secret.bytes().to_owned(),
        tunnel_key: vec![1; 32],
        sequence: 1,
        ..Heartbeat::default()
    }
}

#[tokio::test]
async fn a_heartbeat_is_only_accepted_for_a_name_in_the_certificate() {
    let (ca, folder) = (Authority::new("ca"), tempfile::tempdir().unwrap());
    let server = Server::start(Some(&ca));
    let own = ca.issue(&["gw-b"]);
    let config = server.client_config(Some((&ca, &own)), &folder);
    let (channel, _) = open_channel(&config, &Target::first(&config)).await.unwrap();
    let joined = async |gateway: &str| {
        let heartbeats = tokio_stream::iter([heartbeat(gateway)]).into_streaming_request();
        let mut replies = MembershipClient::new(channel.clone()).join(heartbeats).await.unwrap().into_inner();
        timeout(TIMEOUT, replies.message()).await.expect("a reply")
    };
    let error = joined("gw-a").await.expect_err("it isn't gw-a");
    assert_eq!(error.code(), Code::PermissionDenied);
    assert!(error.message().contains("is valid for gw-b, not for gateway gw-a"), "{error}");
    assert!(joined("gw-b").await.is_ok());
}

#[tokio::test]
async fn a_second_process_is_rejected_until_the_first_disconnects() {
    let server = Server::start(None);
    let first = Gateway::start("gw-a", &server, None);
    first.wait_for(|it| it.connected).await;
    let registered = server.registered("gw-a");
    let second = Gateway::start("gw-a", &server, None);
    let error = second.rejection().await;
    let address = registered.unwrap().1.unwrap();
    let expected = format!("the name gw-a is in use by another live process at {address}: stop one of them");
    assert!(error.contains(&expected), "{error}");
    assert_eq!(server.registered("gw-a"), registered);
    assert!(first.status.load().connected && server.service.stats.name_conflicts.get() > 0);
    first.stop();
    second.wait_for(|it| it.connected).await;
    assert_ne!(server.registered("gw-a"), registered);
}

#[test]
fn one_process_may_have_several_streams_and_excludes_others() {
    let registry = Registry::default();
    let [one, two] = [1, 2].map(Process::Incarnation);
    let at = |port| Some(SocketAddr::from(([192, 0, 2, 1], port)));
    let from = |last| Process::Host(IpAddr::from([192, 0, 2, last]));
    assert_eq!(registry.connect("a", one, at(1)), Ok(1));
    assert_eq!(registry.connect("a", one, at(2)), Ok(2), "it reconnected before the broken connection was detected");
    assert_eq!(registry.connect("a", two, at(3)), Err(NameInUse { address: at(2) }));
    assert_eq!(registry.connect("a", from(1), at(3)), Err(NameInUse { address: at(2) }));
    registry.disconnect("a", true);
    assert_eq!(registry.connect("a", two, at(3)), Err(NameInUse { address: at(2) }));
    registry.disconnect("a", true);
    assert_eq!(registry.connect("a", two, at(3)), Ok(1));
    assert_eq!(registry.list()["a"].address, at(3));
    // Clients without an incarnation are distinguished by address.
    assert_eq!(registry.connect("b", from(1), at(1)), Ok(1));
    assert_eq!(registry.connect("b", from(1), at(2)), Ok(2));
    assert_eq!(registry.connect("b", from(2), at(3)), Err(NameInUse { address: at(2) }));
}

/// A request for all gateways, or for these.
fn request(name: &str, names: Vec<String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(Node { id: name.to_owned(), ..Node::default() }),
        type_url: Kind::Gateway.type_url().to_owned(),
        resource_names_subscribe: names,
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test]
async fn memory_of_one_address_is_limited_for_messages_and_for_subscriptions() {
    let server = Server::with_budget(None, Budget::new(1 << 20, 4 << 20));
    let gateway = Gateway::start("gw-a", &server, None);
    gateway.wait_for(|it| it.connected).await;
    let budget = server.service.budget.clone();
    let mut client = AggregatedDiscoveryServiceClient::connect(server.url.clone()).await.unwrap();
    let long = |name: &str| request(name, (0..20_000).map(|n| format!("{n}-{}", "x".repeat(60))).collect());
    let mut error_of = async |requests: Vec<DeltaDiscoveryRequest>| {
        let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
        let stream = async {
            let mut responses = client.delta_aggregated_resources(requests).await?.into_inner();
            while responses.message().await?.is_some() {}
            Ok::<_, Status>(())
        };
        timeout(TIMEOUT, stream).await.expect("the stream ends").unwrap_err()
    };
    // Over the limit of an address in one message.
    assert_eq!(error_of(vec![request("gw-x", vec![]), long("gw-x")]).await.code(), Code::ResourceExhausted);
    // Over the limit by many small messages.
    let part = |n: usize| request("gw-y", (0..1000).map(|name| format!("{n}-{name}-{}", "x".repeat(60))).collect());
    assert_eq!(error_of((0..20).map(part).collect()).await.code(), Code::ResourceExhausted);
    assert!(budget.refused.get() >= 2 && budget.held_bytes() <= 1 << 20);
    let wait = async {
        while budget.held_bytes() > 4096 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, wait).await.expect("memory of ended streams is released");
    assert!(gateway.status.load().connected);
}

/// A policy with this many endpoints, some megabytes of responses.
fn large(endpoints: u32) -> Placement {
    let endpoint = |n: u32| EndpointSpec {
        address: Ipv4Addr::from_bits(0x0a00_0000 + n).into(),
        name: "".into(),
        policy: "Service a/s".into(),
        vips: vec!["203.0.113.1".parse().unwrap()],
        gateway: None,
        slot: None,
        remarks: vec![],
    };
    Placement { endpoints: (0..endpoints).map(endpoint).collect(), ..Placement::default() }
}

/// A stream whose client buffers at most 64 KiB before it reads.
async fn open(server: &Server, requests: Vec<DeltaDiscoveryRequest>) -> Streaming<DeltaDiscoveryResponse> {
    let endpoint = Endpoint::from_shared(server.url.clone()).unwrap();
    let endpoint = endpoint.initial_stream_window_size(65_535_u32).initial_connection_window_size(65_535_u32);
    let mut client = AggregatedDiscoveryServiceClient::new(endpoint.connect().await.unwrap());
    let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
    client.delta_aggregated_resources(requests).await.unwrap().into_inner()
}

/// Reads all responses; returns the stream's final status.
async fn final_status(mut responses: Streaming<DeltaDiscoveryResponse>) -> Status {
    let status = async {
        loop {
            if let Err(status) = responses.message().await.transpose().expect("a status") {
                return status;
            }
        }
    };
    timeout(TIMEOUT, status).await.expect("the stream ends")
}

#[tokio::test]
async fn unread_responses_are_charged_until_the_stalled_stream_ends() {
    let budget = Budget::new(64 << 20, 64 << 20).with_stall_timeout(Duration::from_secs(2));
    let server = Server::with_budget(None, budget);
    server.publish(large(30_000));
    let all = DeltaDiscoveryRequest { type_url: Kind::Endpoint.type_url().to_owned(), ..request("gw-x", Vec::new()) };
    // It acknowledges responses that it hasn't read: nonces are numbers.
    let acknowledge = |n: u32| DeltaDiscoveryRequest { response_nonce: n.to_string(), node: None, ..all.clone() };
    let requests = std::iter::once(all.clone()).chain((1..200).map(acknowledge)).collect();
    let responses = open(&server, requests).await;
    let budget = server.service.budget.clone();
    server.wait("queued responses are charged", |_| budget.held_bytes() > QUEUE * 30_000).await;
    server.wait("the stream ends", |server| server.registered("gw-x").is_some_and(|(streams, _)| streams == 0)).await;
    server.wait("only HTTP/2 buffers stay charged", |_| budget.held_bytes() < 200_000).await;
    let error = final_status(responses).await;
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("no progress within 2 s: the client doesn't take responses"), "{error}");
    server.wait("all memory is released", |_| budget.held_bytes() == 0).await;
    assert_eq!(budget.refused.get(), 1);
}

#[tokio::test]
async fn queued_responses_of_a_stream_that_its_client_closed_are_dropped_unless_it_reads_them() {
    let budget = Budget::new(64 << 20, 64 << 20).with_stall_timeout(Duration::from_secs(2));
    let server = Server::with_budget(None, budget);
    server.publish(large(3_500));
    let all = DeltaDiscoveryRequest { type_url: Kind::Endpoint.type_url().to_owned(), ..request("gw-x", Vec::new()) };
    let endpoint = Endpoint::from_shared(server.url.clone()).unwrap().initial_stream_window_size(65_535_u32);
    let mut client = AggregatedDiscoveryServiceClient::new(endpoint.connect().await.unwrap());
    let budget = server.service.budget.clone();
    for is_read in [true, false] {
        let responses = client.delta_aggregated_resources(tokio_stream::iter([all.clone()])).await.unwrap();
        let mut responses = responses.into_inner();
        server
            .wait("the stream ends", |server| server.registered("gw-x").is_some_and(|(streams, _)| streams == 0))
            .await;
        assert!(budget.held_bytes() > 200_000, "{}", budget.held_bytes());
        if is_read {
            let mut count = 0;
            while responses.message().await.unwrap().is_some() {
                count += 1;
            }
            assert!(count > 5, "{count}");
        } else {
            server.wait("queued responses are dropped", |_| budget.held_bytes() < 200_000).await;
            assert_eq!(final_status(responses).await.code(), Code::DeadlineExceeded);
        }
        server.wait("all memory is released", |_| budget.held_bytes() == 0).await;
    }
}

#[tokio::test]
async fn a_publication_waits_for_memory_while_the_stream_stays_open() {
    let server = Server::with_budget(None, Budget::new(1 << 20, 1 << 20));
    let gateway = Gateway::start("gw-a", &server, None);
    let in_force = |server: &Server| server.service.registry.list().get("gw-a").map(|it| (it.in_force, it.since));
    server.wait("the first publication", |server| in_force(server).is_some_and(|(number, _)| number == 1)).await;
    let since = in_force(&server).unwrap().1;
    let localhost = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
    let mut other = server.service.budget.charge(localhost, Purpose::Requests);
    let mut bytes = 1 << 20;
    while !other.try_set(bytes) {
        bytes -= 32;
    }
    let second = server.publish(sample_placement(10));
    sleep(Duration::from_millis(500)).await;
    assert_eq!(in_force(&server), Some((1, since)));
    assert!(gateway.status.load().connected);
    drop(other);
    server.wait("the second publication", |server| in_force(server) == Some((second, since))).await;
}

#[tokio::test]
async fn requests_before_the_first_publication_are_charged_and_answered_later() {
    let server = Server::with_budget(None, Budget::new(64 << 20, 64 << 20));
    let first = server.published.send_replace(None);
    let budget = server.service.budget.clone();
    // 200 kB on the wire, six megabytes in memory.
    let requests = vec![request("gw-x", vec![String::new(); 100_000]), request("gw-x", vec!["gw-y".to_owned()])];
    let mut responses = open(&server, requests).await;
    server.wait("the requests are charged", |_| budget.held_bytes() > 6_000_000).await;
    server.published.send_replace(first);
    for name in ["", "gw-y"] {
        let response = timeout(TIMEOUT, responses.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(response.removed_resources, [name]);
    }
    server.wait("their memory is released", |_| budget.held_bytes() < 4096).await;
}

/// A body that yields some bytes, then stalls.
struct StalledBody(Option<Bytes>);

impl http_body::Body for StalledBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.take().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
    }
}

#[tokio::test]
async fn memory_of_a_message_that_times_out_is_released() {
    const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
    let server = Server::with_budget(None, Budget::new(1 << 20, 1 << 20));
    let first = request("gw-x", Vec::new()).encode_to_vec();
    let prefix = |length: usize| [&[0_u8][..], &(length as u32).to_be_bytes()[..]].concat();
    // Of the second message, 5 bytes arrive.
    let bytes = [prefix(first.len()), first, prefix(700_000), vec![7; 5]].concat();
    let request = http::Request::post(format!("{}{METHOD}", server.url))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(StalledBody(Some(bytes.into()))))
        .unwrap();
    let channel = Endpoint::from_shared(server.url.clone()).unwrap().connect().await.unwrap();
    let response = channel.oneshot(request).await.unwrap();
    let started = Instant::now();
    let budget = server.service.budget.clone();
    server.wait("the message is charged by its prefix", |_| budget.held_bytes() > 600_000).await;
    server.wait("the message times out", |_| budget.held_bytes() < 10_000).await;
    assert!(started.elapsed() > Duration::from_secs(9), "{:?}", started.elapsed());
    server.wait("the stream ends", |server| server.registered("gw-x").is_some_and(|(streams, _)| streams == 0)).await;
    drop(response);
}

#[tokio::test]
async fn idle_connections_are_closed_for_new_ones_and_connections_with_streams_are_not() {
    let ca = Authority::new("ca");
    for ca in [None, Some(&ca)] {
        let server = Server::start(ca);
        let own = ca.map(|ca| ca.issue(&["gw-a"]));
        let gateway = Gateway::start("gw-a", &server, ca.zip(own.as_ref()));
        gateway.wait_for(|it| it.connected).await;
        let address = server.url.rsplit('/').next().unwrap().to_owned();
        let mut idle = Vec::new();
        for n in 0..300_u16 {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from(([127, 0, 0, 1 + (n % 4) as u8], 0))).unwrap();
            idle.push(socket.connect(address.parse().unwrap()).await.unwrap());
        }
        let own = ca.map(|ca| ca.issue(&["gw-b"]));
        let next = Gateway::start("gw-b", &server, ca.zip(own.as_ref()));
        next.wait_for(|it| it.connected).await;
        assert!(gateway.status.load().connected, "the oldest connection is in use");
        assert!(server.room.len() <= LIMITS.connections && server.room.rejected(RejectReason::Superseded) > 200);
        assert_eq!(server.registered("gw-a").map(|it| it.0), Some(1));
    }
}
