//! Who is let in under which name, with the client of gateways at the other end; and what others make the server hold, and for how long.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
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
use vipgate_dataplane::snapshot::spec::EndpointSpec;

use super::*;
use crate::config::{PolicyServer, Tls};
use crate::listener::{Limits, Reason, Room};
use crate::policy::{Deal, Viewer};
use crate::policyd::listen::{self, Certificates};
use crate::policyd::members;
use crate::policyd::meter::Meter;
use crate::xds::client::{Client, Event, ServerStatus, connect_watched};
use crate::xds::fixtures::deal;
use crate::xds::fixtures::pki::{Authority, Identity};
use crate::xds::proto::Beat;
use crate::xds::proto::membership_client::MembershipClient;
use crate::xds::resource::Kind;

/// Far more than anything takes on a slow machine.
const LONG: Duration = Duration::from_secs(20);
/// The names of this host.
const HERE: [&str; 2] = ["127.0.0.1", "localhost"];

const LIMITS: Limits = Limits { connections: 64, per_address: 48 };

/// A server that has a policy of nothing.
struct Server {
    url: String,
    shared: Discovery,
    room: Arc<Room>,
    published: watch::Sender<Option<Arc<Publication>>>,
}

impl Server {
    /// With an authority, clients must present a certificate.
    fn start(ca: Option<&Authority>) -> Self {
        Self::holding(ca, Budget::default())
    }

    fn holding(ca: Option<&Authority>, budget: Budget) -> Self {
        let listener = listen::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let at = listener.local_addr().unwrap();
        let (publish, published) = watch::channel(Publication::default().next(Arc::default()).map(Arc::new));
        let (registry, figures, refusals) = (Arc::default(), Arc::<Figures>::default(), Arc::<Refusals>::default());
        let all = members::start(Duration::from_millis(300), members::Memory, published.clone(), figures.clone());
        let (room, budget) = (Room::new("grpc", LIMITS), Arc::new(budget));
        let shared = Discovery {
            published,
            registry,
            figures: figures.clone(),
            refusals: refusals.clone(),
            budget: budget.clone(),
        };
        let router = Tonic::builder()
            .layer(Meter(budget))
            .add_service(AggregatedDiscoveryServiceServer::new(shared.clone()))
            .add_service(members::server(all, figures.clone(), refusals.clone()));
        let scheme = match ca {
            None => {
                tokio::spawn(router.serve_with_incoming(ReceiverStream::new(listen::plain(listener, room.clone()))));
                "http"
            }
            Some(ca) => {
                let own = ca.issue(&HERE);
                let files = Tls { ca: Some(ca.ca()), cert: own.cert, key: own.key };
                let incoming = listen::secure(
                    listener,
                    room.clone(),
                    Arc::new(Certificates::read(files).unwrap()),
                    (figures, refusals),
                );
                tokio::spawn(router.serve_with_incoming(ReceiverStream::new(incoming)));
                "https"
            }
        };
        Self { url: format!("{scheme}://{at}"), shared, room, published: publish }
    }

    /// How to reach it, with a certificate if there is an authority.
    fn seen_by(&self, tls: Option<(&Authority, &Identity)>, folder: &TempDir) -> PolicyServer {
        PolicyServer {
            url: self.url.clone(),
            ca: tls.map(|(ca, _)| ca.ca()),
            cert: tls.map(|(_, own)| own.cert.clone()),
            key: tls.map(|(_, own)| own.key.clone()),
            cache: folder.path().join("policy.cache"),
        }
    }

    /// Publishes the next policy; its number.
    fn publish(&self, deal: Deal) -> u64 {
        let last = self.shared.published.borrow().clone().unwrap_or_default();
        let next = last.next(Arc::new(deal)).expect("something differs");
        let number = next.number;
        self.published.send_replace(Some(Arc::new(next)));
        number
    }

    /// Waits until something holds.
    async fn wait(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let wait = async {
            while !holds(self) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let held = || self.shared.budget.held();
        timeout(LONG, wait).await.unwrap_or_else(|_| panic!("{what}: not in time, {} bytes are held", held()));
    }

    /// How many streams a gateway has, and its address.
    fn knows(&self, name: &str) -> Option<(u32, Option<SocketAddr>)> {
        self.shared.registry.list().get(name).map(|it| (it.streams, it.address))
    }
}

/// A gateway's client that puts everything in force.
struct Gateway {
    status: Arc<ArcSwap<ServerStatus>>,
    task: JoinHandle<()>,
    _folder: TempDir,
}

impl Gateway {
    fn start(name: &str, server: &Server, tls: Option<(&Authority, &Identity)>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (sender, mut events) = mpsc::channel(4);
        let (client, _) = Client::open(Viewer::named(name), server.seen_by(tls, &folder), sender);
        let status = client.status();
        let task = tokio::spawn(async move {
            let takes = async {
                while let Some(event) = events.recv().await {
                    if let Event::Offer(_, answer) = event {
                        answer.send(Ok(())).unwrap();
                    }
                }
            };
            tokio::join!(client.run(), takes);
        });
        Self { status, task, _folder: folder }
    }

    async fn is(&self, what: impl Fn(&ServerStatus) -> bool) -> String {
        let wait = async {
            while !what(&self.status.load()) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, wait).await.unwrap_or_else(|_| panic!("not in time: {:?}", self.status.load()));
        self.status.load().error.clone().unwrap_or_default()
    }

    /// Why the server won't have it.
    async fn refused(&self) -> String {
        self.is(|it| !it.connected && it.error.as_deref().is_some_and(|error| error != "not connected yet")).await
    }

    fn stop(self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn a_gateway_has_the_name_that_its_certificate_has() {
    let ca = Authority::new("ca");
    let server = Server::start(Some(&ca));
    let (own, other) = (ca.issue(&["gw-a"]), ca.issue(&["gw-b", "gw-b.example"]));
    let impostor = Gateway::start("gw-a", &server, Some((&ca, &other)));
    let why = impostor.refused().await;
    assert!(
        why.starts_with("the certificate is of gw-b, gw-b.example, not of gateway gw-a: give the gateway"),
        "{why}"
    );
    assert_eq!(server.knows("gw-a"), None, "nobody sees an impostor's address");
    assert!(server.shared.figures.misnamed.get() > 0);

    let gateway = Gateway::start("gw-a", &server, Some((&ca, &own)));
    gateway.is(|it| it.connected).await;
    let known = server.knows("gw-a");
    assert!(matches!(known, Some((1, Some(_)))), "{known:?}");
    let refused = server.shared.figures.misnamed.get();
    let wait = async {
        while server.shared.figures.misnamed.get() <= refused {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, wait).await.expect("the impostor tries again");
    assert_eq!(server.knows("gw-a"), known);
    assert!(gateway.status.load().connected);

    // By common name or URI as well.
    for (name, own) in [
        ("gw-c", ca.issue_named(Some("gw-c"), None)),
        ("gw-d", ca.issue_named(None, Some("spiffe://example.org/gateway/gw-d"))),
    ] {
        Gateway::start(name, &server, Some((&ca, &own))).is(|it| it.connected).await;
    }
}

#[tokio::test]
async fn a_beat_counts_only_for_the_name_in_the_certificate() {
    let (ca, folder) = (Authority::new("ca"), tempfile::tempdir().unwrap());
    let server = Server::start(Some(&ca));
    let own = ca.issue(&["gw-b"]);
    let (channel, _) = connect_watched(&server.seen_by(Some((&ca, &own)), &folder)).await.unwrap();
    let says = async |gateway: &str| {
        let beat = Beat { gateway: gateway.to_owned(), incarnation: 7, sequence: 1, ..Beat::default() };
        let beats = tokio_stream::iter([beat]).into_streaming_request();
        let mut notices = MembershipClient::new(channel.clone()).join(beats).await.unwrap().into_inner();
        timeout(LONG, notices.message()).await.expect("an answer")
    };
    let refusal = says("gw-a").await.expect_err("it isn't gw-a");
    assert_eq!(refusal.code(), Code::PermissionDenied);
    assert!(refusal.message().contains("is of gw-b, not of gateway gw-a"), "{refusal}");
    assert!(says("gw-b").await.is_ok());
}

#[tokio::test]
async fn a_second_process_waits_until_the_first_is_gone() {
    let server = Server::start(None);
    let first = Gateway::start("gw-a", &server, None);
    first.is(|it| it.connected).await;
    let known = server.knows("gw-a");
    let second = Gateway::start("gw-a", &server, None);
    let why = second.refused().await;
    let at = known.unwrap().1.unwrap();
    assert!(why.contains(&format!("another process at {at} is gateway gw-a, and it lives: stop one of them")), "{why}");
    assert_eq!(server.knows("gw-a"), known);
    assert!(first.status.load().connected && server.shared.figures.twice.get() > 0);
    first.stop();
    second.is(|it| it.connected).await;
    assert_ne!(server.knows("gw-a"), known);
}

#[test]
fn a_process_may_have_several_streams_and_another_one_none() {
    let registry = Registry::default();
    let [one, two] = [1, 2].map(Process::Incarnation);
    let at = |port| Some(SocketAddr::from(([192, 0, 2, 1], port)));
    let from = |last| Process::At(IpAddr::from([192, 0, 2, last]));
    assert_eq!(registry.comes("a", one, at(1)), Ok(1));
    assert_eq!(registry.comes("a", one, at(2)), Ok(2), "its connection was cut, and nobody has noticed");
    assert_eq!(registry.comes("a", two, at(3)), Err(InUse { address: at(2) }));
    assert_eq!(registry.comes("a", from(1), at(3)), Err(InUse { address: at(2) }));
    registry.goes("a", true);
    assert_eq!(registry.comes("a", two, at(3)), Err(InUse { address: at(2) }));
    registry.goes("a", true);
    assert_eq!(registry.comes("a", two, at(3)), Ok(1));
    assert_eq!(registry.list()["a"].address, at(3));
    // Clients that say no incarnation are told apart by their hosts.
    assert_eq!(registry.comes("b", from(1), at(1)), Ok(1));
    assert_eq!(registry.comes("b", from(1), at(2)), Ok(2));
    assert_eq!(registry.comes("b", from(2), at(3)), Err(InUse { address: at(2) }));
}

/// A request for everything of a kind, or for these.
fn request(name: &str, names: Vec<String>) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(Node { id: name.to_owned(), ..Node::default() }),
        type_url: Kind::Gateway.type_url().to_owned(),
        resource_names_subscribe: names,
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test]
async fn what_an_address_makes_the_server_hold_is_bounded_while_it_comes_and_while_it_stays() {
    let server = Server::holding(None, Budget::new(1 << 20, 4 << 20));
    let gateway = Gateway::start("gw-a", &server, None);
    gateway.is(|it| it.connected).await;
    let budget = server.shared.budget.clone();
    let mut client = AggregatedDiscoveryServiceClient::connect(server.url.clone()).await.unwrap();
    let long = |name: &str| request(name, (0..20_000).map(|n| format!("{n}-{}", "x".repeat(60))).collect());
    let mut refused = async |requests: Vec<DeltaDiscoveryRequest>| {
        let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
        let answers = async {
            let mut responses = client.delta_aggregated_resources(requests).await?.into_inner();
            while responses.message().await?.is_some() {}
            Ok::<_, Status>(())
        };
        timeout(LONG, answers).await.expect("an end").unwrap_err()
    };
    // More than an address may have, in one message.
    assert_eq!(refused(vec![request("gw-x", vec![]), long("gw-x")]).await.code(), Code::ResourceExhausted);
    // Little by little: each message is small.
    let part = |n: usize| request("gw-y", (0..1000).map(|name| format!("{n}-{name}-{}", "x".repeat(60))).collect());
    assert_eq!(refused((0..20).map(part).collect()).await.code(), Code::ResourceExhausted);
    assert!(budget.refused.get() >= 2 && budget.held() <= 1 << 20);
    let wait = async {
        while budget.held() > 4096 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, wait).await.expect("what ended is given back");
    assert!(gateway.status.load().connected);
}

/// A policy of so many endpoints, some megabytes of responses.
fn large(endpoints: u32) -> Deal {
    let endpoint = |n: u32| EndpointSpec {
        address: Ipv4Addr::from_bits(0x0a00_0000 + n).into(),
        name: "".into(),
        policy: "Service a/s".into(),
        vips: vec!["203.0.113.1".parse().unwrap()],
        gateway: None,
        remarks: vec![],
    };
    Deal { endpoints: (0..endpoints).map(endpoint).collect(), ..Deal::default() }
}

/// A stream whose client takes no more than 64 KiB of it before it reads.
async fn open(server: &Server, requests: Vec<DeltaDiscoveryRequest>) -> Streaming<DeltaDiscoveryResponse> {
    let endpoint = Endpoint::from_shared(server.url.clone()).unwrap();
    let endpoint = endpoint.initial_stream_window_size(65_535_u32).initial_connection_window_size(65_535_u32);
    let mut client = AggregatedDiscoveryServiceClient::new(endpoint.connect().await.unwrap());
    let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
    client.delta_aggregated_resources(requests).await.unwrap().into_inner()
}

/// Why it ends, once all that comes before is read.
async fn end_of(mut responses: Streaming<DeltaDiscoveryResponse>) -> Status {
    let end = async {
        loop {
            if let Err(status) = responses.message().await.transpose().expect("a reason") {
                return status;
            }
        }
    };
    timeout(LONG, end).await.expect("an end")
}

#[tokio::test]
async fn what_a_client_does_not_read_is_charged_until_the_stream_ends_for_that() {
    let budget = Budget::new(64 << 20, 64 << 20).with_stall_timeout(Duration::from_secs(2));
    let server = Server::holding(None, budget);
    server.publish(large(30_000));
    let all = DeltaDiscoveryRequest { type_url: Kind::Endpoint.type_url().to_owned(), ..request("gw-x", Vec::new()) };
    // It acknowledges what it hasn't read: nonces are numbers.
    let acknowledge = |n: u32| DeltaDiscoveryRequest { response_nonce: n.to_string(), node: None, ..all.clone() };
    let requests = std::iter::once(all.clone()).chain((1..200).map(acknowledge)).collect();
    let responses = open(&server, requests).await;
    let budget = server.shared.budget.clone();
    server.wait("responses that wait are charged", |_| budget.held() > QUEUE * 30_000).await;
    server.wait("the stream ends", |server| server.knows("gw-x").is_some_and(|(streams, _)| streams == 0)).await;
    server.wait("but for what is on its way it holds nothing", |_| budget.held() < 200_000).await;
    let refusal = end_of(responses).await;
    assert_eq!(refusal.code(), Code::DeadlineExceeded);
    assert!(refusal.message().contains("no progress within 2 s: the client doesn't take responses"), "{refusal}");
    server.wait("now it holds nothing at all", |_| budget.held() == 0).await;
    assert_eq!(budget.refused.get(), 1);
}

#[tokio::test]
async fn what_is_left_of_a_stream_that_its_client_has_closed_is_dropped_if_nobody_reads_it() {
    let budget = Budget::new(64 << 20, 64 << 20).with_stall_timeout(Duration::from_secs(2));
    let server = Server::holding(None, budget);
    server.publish(large(3_500));
    let all = DeltaDiscoveryRequest { type_url: Kind::Endpoint.type_url().to_owned(), ..request("gw-x", Vec::new()) };
    let endpoint = Endpoint::from_shared(server.url.clone()).unwrap().initial_stream_window_size(65_535_u32);
    let mut client = AggregatedDiscoveryServiceClient::new(endpoint.connect().await.unwrap());
    let budget = server.shared.budget.clone();
    for reads in [true, false] {
        let responses = client.delta_aggregated_resources(tokio_stream::iter([all.clone()])).await.unwrap();
        let mut responses = responses.into_inner();
        server.wait("the stream ends", |server| server.knows("gw-x").is_some_and(|(streams, _)| streams == 0)).await;
        assert!(budget.held() > 200_000, "{}", budget.held());
        if reads {
            let mut count = 0;
            while responses.message().await.unwrap().is_some() {
                count += 1;
            }
            assert!(count > 5, "{count}");
        } else {
            server.wait("what waits is dropped", |_| budget.held() < 200_000).await;
            assert_eq!(end_of(responses).await.code(), Code::DeadlineExceeded);
        }
        server.wait("nothing is held", |_| budget.held() == 0).await;
    }
}

#[tokio::test]
async fn without_memory_for_it_a_publication_waits_and_the_stream_stays() {
    let server = Server::holding(None, Budget::new(1 << 20, 1 << 20));
    let gateway = Gateway::start("gw-a", &server, None);
    let in_force = |server: &Server| server.shared.registry.list().get("gw-a").map(|it| (it.in_force, it.since));
    server.wait("the first one", |server| in_force(server).is_some_and(|(number, _)| number == 1)).await;
    let since = in_force(&server).unwrap().1;
    let here = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
    let mut other = server.shared.budget.charge(here, Purpose::Requests);
    let mut bytes = 1 << 20;
    while !other.try_set(bytes) {
        bytes -= 32;
    }
    let second = server.publish(deal(10));
    sleep(Duration::from_millis(500)).await;
    assert_eq!(in_force(&server), Some((1, since)));
    assert!(gateway.status.load().connected);
    drop(other);
    server.wait("the second one", |server| in_force(server) == Some((second, since))).await;
}

#[tokio::test]
async fn what_is_asked_before_there_is_a_policy_is_charged_and_answered_later() {
    let server = Server::holding(None, Budget::new(64 << 20, 64 << 20));
    let first = server.published.send_replace(None);
    let budget = server.shared.budget.clone();
    // 200 kB that take six megabytes.
    let requests = vec![request("gw-x", vec![String::new(); 100_000]), request("gw-x", vec!["gw-y".to_owned()])];
    let mut responses = open(&server, requests).await;
    server.wait("it is charged", |_| budget.held() > 6_000_000).await;
    server.published.send_replace(first);
    for name in ["", "gw-y"] {
        let response = timeout(LONG, responses.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(response.removed_resources, [name]);
    }
    server.wait("it is given back", |_| budget.held() < 4096).await;
}

/// Some bytes of a body, and never any more.
struct Beginning(Option<Bytes>);

impl http_body::Body for Beginning {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.take().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
    }
}

#[tokio::test]
async fn a_message_that_does_not_come_gives_back_what_was_reserved_for_it() {
    const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
    let server = Server::holding(None, Budget::new(1 << 20, 1 << 20));
    let first = request("gw-x", Vec::new()).encode_to_vec();
    let prefix = |length: usize| [&[0_u8][..], &(length as u32).to_be_bytes()[..]].concat();
    // Of the second message, 5 bytes come.
    let bytes = [prefix(first.len()), first, prefix(700_000), vec![7; 5]].concat();
    let request = http::Request::post(format!("{}{METHOD}", server.url))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Beginning(Some(bytes.into()))))
        .unwrap();
    let channel = Endpoint::from_shared(server.url.clone()).unwrap().connect().await.unwrap();
    let response = channel.oneshot(request).await.unwrap();
    let begun = Instant::now();
    let budget = server.shared.budget.clone();
    server.wait("its length has come", |_| budget.held() > 600_000).await;
    server.wait("it is given up", |_| budget.held() < 10_000).await;
    assert!(begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
    server.wait("the stream ends", |server| server.knows("gw-x").is_some_and(|(streams, _)| streams == 0)).await;
    drop(response);
}

#[tokio::test]
async fn silent_connections_give_way_and_streams_stay() {
    let ca = Authority::new("ca");
    for ca in [None, Some(&ca)] {
        let server = Server::start(ca);
        let own = ca.map(|ca| ca.issue(&["gw-a"]));
        let gateway = Gateway::start("gw-a", &server, ca.zip(own.as_ref()));
        gateway.is(|it| it.connected).await;
        let at = server.url.rsplit('/').next().unwrap().to_owned();
        let mut silent = Vec::new();
        for n in 0..300_u16 {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from(([127, 0, 0, 1 + (n % 4) as u8], 0))).unwrap();
            silent.push(socket.connect(at.parse().unwrap()).await.unwrap());
        }
        let own = ca.map(|ca| ca.issue(&["gw-b"]));
        let next = Gateway::start("gw-b", &server, ca.zip(own.as_ref()));
        next.is(|it| it.connected).await;
        assert!(gateway.status.load().connected, "it was there first, and it is used");
        assert!(server.room.len() <= LIMITS.connections && server.room.refused(Reason::Superseded) > 200);
        assert_eq!(server.knows("gw-a").map(|it| it.0), Some(1));
    }
}
