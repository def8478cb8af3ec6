//! Node agents at the discovery service.

use envoy_types::pb::google::protobuf::{Struct, Value, value};
use tonic::Streaming;

use super::*;
use crate::xds::fixtures::{peer, placement_with_pod};
use crate::xds::proto;
use crate::xds::resource::{INCARNATION, NODE_ROLE, ROLE, VIEW};

/// The first request of the agent of a node, for resources of a kind by name.
fn of_agent(node: &str, incarnation: u64, kind: Kind, names: &[&str]) -> DeltaDiscoveryRequest {
    let text = |text: String| Value { kind: Some(value::Kind::StringValue(text)) };
    let fields = [(ROLE, NODE_ROLE.to_owned()), (INCARNATION, format!("{incarnation:016x}"))];
    let fields = fields.into_iter().map(|(key, value)| (key.to_owned(), text(value))).collect();
    DeltaDiscoveryRequest {
        node: Some(Node { id: node.to_owned(), metadata: Some(Struct { fields }), ..Node::default() }),
        type_url: kind.type_url().to_owned(),
        resource_names_subscribe: names.iter().map(ToString::to_string).collect(),
        ..DeltaDiscoveryRequest::default()
    }
}

type Requests = mpsc::Sender<DeltaDiscoveryRequest>;

async fn open(
    server: &Server,
    request: DeltaDiscoveryRequest,
) -> Result<(Requests, Streaming<DeltaDiscoveryResponse>), Status> {
    let mut client = AggregatedDiscoveryServiceClient::connect(server.url.clone()).await.unwrap();
    let (sender, requests) = mpsc::channel(1);
    sender.send(request).await.unwrap();
    Ok((sender, client.delta_aggregated_resources(ReceiverStream::new(requests)).await?.into_inner()))
}

#[tokio::test]
async fn a_node_is_registered_apart_from_gateways_and_excludes_other_processes_of_its_name() {
    let server = Server::start(None);
    let gateway = Gateway::start("n1", &server, None);
    gateway.wait_for(|it| it.connected).await;
    let (requests, mut stream) = open(&server, of_agent("n1", 1, Kind::NodePolicy, &["n1"])).await.unwrap();
    let response = timeout(TIMEOUT, stream.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(
        (response.type_url.as_str(), &*response.removed_resources),
        (Kind::NodePolicy.type_url(), &["n1".to_owned()][..])
    );
    let registries = [&server.service.registry, &server.service.nodes];
    assert_eq!(registries.map(|registry| registry.connected()), [1, 1]);
    let refused = open(&server, of_agent("n1", 2, Kind::NodePolicy, &["n1"])).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    drop((requests, stream));
    let gone = async {
        while server.service.nodes.connected() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, gone).await.expect("the node is gone");
    assert!(open(&server, of_agent("n1", 2, Kind::NodePolicy, &["n1"])).await.is_ok());
    assert!(gateway.status.load().connected);
}

/// A client that has shown no certificate, with this token.
async fn open_with_token(
    server: &Server,
    ca: &Authority,
    token: Option<&str>,
    request: DeltaDiscoveryRequest,
) -> Result<Streaming<DeltaDiscoveryResponse>, Status> {
    let folder = tempfile::tempdir().unwrap();
    let config = PolicyServer { ca: Some(ca.ca()), ..server.client_config(None, &folder) };
    open_with(&config, token, request).await
}

/// A client with this configuration, and this token.
async fn open_with(
    config: &PolicyServer,
    token: Option<&str>,
    request: DeltaDiscoveryRequest,
) -> Result<Streaming<DeltaDiscoveryResponse>, Status> {
    let (channel, _) = open_channel(config, &Target::first(config)).await.unwrap();
    let (sender, requests) = mpsc::channel(1);
    sender.send(request).await.unwrap();
    let mut request = Request::new(ReceiverStream::new(requests));
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    let mut client = AggregatedDiscoveryServiceClient::new(channel);
    let response = client.delta_aggregated_resources(request).await;
    // The stream has to stay open.
    std::mem::forget(sender);
    response.map(Reply::into_inner)
}

#[tokio::test]
async fn with_a_token_in_place_of_a_certificate_a_client_is_the_agent_of_its_node_and_nothing_else() {
    let ca = Authority::new("ca");
    let server = Server::with_tokens(&ca, verifier());
    let agent = |node: &str| of_agent(node, 1, Kind::NodePolicy, &[node]);
    let gateway = of_gateway("n1");
    let ca = &ca;
    let refused = async |token: Option<&'static str>, request| {
        let status = open_with_token(&server, ca, token, request).await.map(drop).unwrap_err();
        (status.code(), status.message().to_owned())
    };
    let (code, reason) = refused(None, agent("n1")).await;
    assert!(code == Code::PermissionDenied && reason.contains("no certificate, and no token"), "{reason}");
    let (code, reason) = refused(Some("of.node.1"), agent("n2")).await;
    assert!(code == Code::PermissionDenied && reason.contains("the agent of node n1, not of n2"), "{reason}");
    let (code, reason) = refused(Some("of.node.1"), gateway.clone()).await;
    assert!(code == Code::PermissionDenied && reason.contains("the agent of node n1, not of a gateway"), "{reason}");
    let (code, reason) = refused(None, gateway).await;
    assert!(code == Code::PermissionDenied && reason.contains("no certificate"), "{reason}");
    assert_eq!(refused(Some("nonsense"), agent("n1")).await.0, Code::Unauthenticated);
    // Nobody verifies it: there is no API server here.
    assert_eq!(refused(Some("of.node.2"), agent("n2")).await.0, Code::Unavailable);
    let (code, reason) = refused(Some("of.gateway.1"), agent("n1")).await;
    assert!(code == Code::PermissionDenied && reason.contains("gateway n1, not of an agent"), "{reason}");
    assert!(open_with_token(&server, ca, Some("of.node.1"), agent("n1")).await.is_ok());
    // Certificates are accepted as ever, and a token adds nothing to one.
    let own = ca.issue(&["gw-a"]);
    let member = Gateway::start("gw-a", &server, Some((ca, &own)));
    member.wait_for(|it| it.connected).await;
    assert_eq!(server.service.stats.certificate_mismatches.get(), 7);
}

/// Accepts a token of the agent and one of the gateway on node n1.
fn verifier() -> TokenVerifier {
    let account = |role, name: &str| {
        let (namespace, audience) = ("v".to_owned(), "vipgate".to_owned());
        (role, PodTokens { namespace, service_account: name.to_owned(), audience })
    };
    let accounts = vec![account(PodRole::Gateway, "gateway"), account(PodRole::Agent, "node")];
    let verifier = TokenVerifier::new(accounts, KubernetesSource::default());
    verifier.accept("of.node.1", PodRole::Agent, "n1");
    verifier.accept("of.gateway.1", PodRole::Gateway, "n1");
    verifier
}

/// The first request of a gateway.
fn of_gateway(name: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(Node { id: name.to_owned(), ..Node::default() }),
        type_url: Kind::Vip.type_url().to_owned(),
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test]
async fn with_a_token_a_client_is_the_gateway_of_its_node_if_the_policy_has_it() {
    let ca = Authority::new("ca");
    let server = Server::with_tokens(&ca, verifier());
    let open = async |name: &'static str| open_with_token(&server, &ca, Some("of.gateway.1"), of_gateway(name)).await;
    let refused = async |name: &'static str| {
        let status = open(name).await.map(drop).unwrap_err();
        (status.code(), status.message().to_owned())
    };
    let (code, reason) = refused("n1").await;
    assert!(code == Code::PermissionDenied && reason.contains("n1 is no gateway of the policy"), "{reason}");
    let (code, reason) = refused("n2").await;
    assert!(code == Code::PermissionDenied && reason.contains("gateway n1, not of n2"), "{reason}");
    assert_eq!(server.service.stats.certificate_mismatches.get(), 2);
    let published = server.published.send_replace(None);
    // No rejection: by which policy, isn't known yet.
    assert_eq!(refused("n1").await.0, Code::Unavailable);
    assert_eq!(server.service.stats.certificate_mismatches.get(), 2);
    server.published.send_replace(published);
    server.publish(Placement { peers: vec![peer("n1")], ..Placement::default() });
    assert!(open("n1").await.is_ok());
    // Its heartbeats, too.
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "of.gateway.1\n").unwrap();
    let config = PolicyServer { ca: Some(ca.ca()), token: Some(token), ..server.client_config(None, &folder) };
    for (name, is_accepted) in [("n1", true), ("n2", false)] {
        let (channel, _) = open_channel(&config, &Target::first(&config)).await.unwrap();
        let heartbeats =
            authorized(&config, tokio_stream::iter([heartbeat(name)]).chain(tokio_stream::pending())).unwrap();
        let joined = match MembershipClient::new(channel).join(heartbeats).await {
            Ok(stream) => timeout(TIMEOUT, stream.into_inner().message()).await.unwrap().map(drop),
            Err(status) => Err(status),
        };
        assert_eq!(joined.is_ok(), is_accepted, "{name}: {joined:?}");
    }
}

#[tokio::test]
async fn with_a_certificate_a_client_is_the_agent_of_a_node_in_it_and_of_no_other() {
    let (ca, folder) = (Authority::new("ca"), tempfile::tempdir().unwrap());
    let server = Server::start(Some(&ca));
    let own = ca.issue(&["node-1"]);
    let config = server.client_config(Some((&ca, &own)), &folder);
    let open = async |node: &str| open_with(&config, None, of_agent(node, 1, Kind::View, &[VIEW])).await.map(drop);
    let error = open("node-2").await.expect_err("it isn't node-2");
    assert_eq!(error.code(), Code::PermissionDenied);
    assert!(error.message().contains("is valid for node-1, not for node node-2: give its agent"), "{error}");
    assert_eq!(server.service.stats.certificate_mismatches.get(), 1);
    for name in ["", "node 1", "node-1\n", &*"n".repeat(254)] {
        assert_eq!(open(name).await.expect_err("no name").code(), Code::InvalidArgument);
    }
    open("node-1").await.unwrap();
    assert_eq!(server.service.stats.certificate_mismatches.get(), 1);
}

async fn next(stream: &mut Streaming<DeltaDiscoveryResponse>) -> DeltaDiscoveryResponse {
    timeout(TIMEOUT, stream.message()).await.expect("a response").unwrap().expect("the stream is open")
}

/// Sends heartbeats of a gateway until its stream ends.
async fn send_heartbeats(server: &Server, gateway: &'static str) -> Streaming<proto::MembershipUpdate> {
    let (sender, heartbeats) = mpsc::channel(1);
    tokio::spawn(async move {
        for sequence in 1.. {
            let (overlay_address, overlay_port) = ("192.0.2.2".to_owned(), 8472);
            let heartbeat = Heartbeat { sequence, overlay_address, overlay_port, ..heartbeat(gateway) };
            if sender.send(heartbeat).await.is_err() {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    });
    let mut client = MembershipClient::connect(server.url.clone()).await.unwrap();
    client.join(ReceiverStream::new(heartbeats)).await.unwrap().into_inner()
}

#[tokio::test]
async fn a_node_gets_the_views_of_gateways_and_waits_for_no_policy() {
    let server = Server::start(None);
    server.publish(Placement { peers: vec![peer("gw-a")], ..Placement::default() });
    let (requests, mut node) = open(&server, of_agent("n1", 1, Kind::View, &[VIEW])).await.unwrap();
    let _notices = send_heartbeats(&server, "gw-a").await;
    let mut last = 0;
    loop {
        let response = next(&mut node).await;
        let acknowledgment = DeltaDiscoveryRequest {
            type_url: response.type_url.clone(),
            response_nonce: response.nonce.clone(),
            ..DeltaDiscoveryRequest::default()
        };
        requests.send(acknowledgment).await.unwrap();
        let [resource] = &response.resources[..] else { panic!("{response:?}") };
        let body = &resource.resource.as_ref().unwrap().value;
        let message: proto::View = prost::Message::decode(body.as_slice()).unwrap();
        let view = MembershipView::try_from(message).unwrap();
        assert!(resource.name == VIEW && view.number > last, "{view:?} after {last}");
        last = view.number;
        if view.member("gw-a").is_some_and(|member| member.overlay == Some(([192, 0, 2, 2], 8472).into())) {
            break;
        }
    }
    server.wait("the view is acknowledged", |server| server.service.stats.acks.get() > 0).await;
    // A server that can't read its source has no policy, but views.
    let published = server.published.send_replace(None);
    let (requests, mut node) = open(&server, of_agent("n2", 1, Kind::NodePolicy, &["n2"])).await.unwrap();
    requests.send(of_agent("n2", 1, Kind::View, &[VIEW])).await.unwrap();
    assert_eq!(next(&mut node).await.type_url, Kind::View.type_url());
    server.published.send_replace(published);
    let response = next(&mut node).await;
    assert_eq!(
        (&*response.type_url, &*response.removed_resources),
        (Kind::NodePolicy.type_url(), &["n2".to_owned()][..])
    );
}

#[tokio::test]
async fn a_gateway_gets_no_view_from_the_discovery_service() {
    let server = Server::start(None);
    let request = DeltaDiscoveryRequest {
        node: Some(Node { id: "gw-a".to_owned(), ..Node::default() }),
        type_url: Kind::View.type_url().to_owned(),
        resource_names_subscribe: vec![VIEW.to_owned()],
        ..DeltaDiscoveryRequest::default()
    };
    let (_requests, mut stream) = open(&server, request).await.unwrap();
    let response = next(&mut stream).await;
    assert_eq!((response.resources.len(), &*response.removed_resources), (0, &[VIEW.to_owned()][..]));
}

/// A placement with a pod on node n1, and endpoints for gateways.
fn with_pod(number: u8) -> Placement {
    placement_with_pod("n1", number)
}

#[tokio::test]
async fn a_node_learns_of_a_pod_after_the_gateways_or_when_these_take_too_long() {
    let server = Server::start(None);
    server.publish(with_pod(1));
    let (_requests, mut node) = open(&server, of_agent("n1", 1, Kind::NodePolicy, &["n1"])).await.unwrap();
    timeout(TIMEOUT, node.message()).await.unwrap().unwrap().unwrap();
    // One that acknowledges.
    let gateway = Gateway::start("gw-a", &server, None);
    gateway.wait_for(|it| it.connected).await;
    let mut delays = Vec::new();
    for (number, silent) in [(2, false), (3, true)] {
        // One that subscribes to everything, and acknowledges nothing.
        let request = DeltaDiscoveryRequest {
            node: Some(Node { id: "gw-b".to_owned(), ..Node::default() }),
            type_url: Kind::Endpoint.type_url().to_owned(),
            ..DeltaDiscoveryRequest::default()
        };
        let other = if silent { Some(open(&server, request).await.unwrap()) } else { None };
        if silent {
            server.wait("gw-b", |server| server.registered("gw-b").is_some()).await;
        }
        let published = server.publish(with_pod(number));
        let begun = Instant::now();
        // The acknowledgment of the update before.
        timeout(TIMEOUT, node.message()).await.unwrap().unwrap().unwrap();
        delays.push(begun.elapsed());
        let in_force = server.service.registry.list()["gw-a"].in_force;
        assert!(silent || in_force >= published, "gw-a has {in_force}, not {published}");
        drop(other);
    }
    assert!(delays[0] < GATEWAYS_TIMEOUT, "{delays:?}");
    assert!(delays[1] >= GATEWAYS_TIMEOUT, "{delays:?}");
}
