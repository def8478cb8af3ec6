//! Node agents at the discovery service.

use envoy_types::pb::google::protobuf::{Struct, Value, value};
use tonic::Streaming;

use super::*;
use crate::xds::resource::{INCARNATION, NODE_ROLE, ROLE};

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
