//! Large responses: other servers may send all resources in one.

use envoy_types::pb::envoy::service::discovery::v3::Resource;
use envoy_types::pb::google::protobuf::Any;
use vipgate_policy::compiler::Placement;

use super::*;

/// A policy whose endpoints fill one response of at least `bytes` bytes.
fn of_size(bytes: usize) -> ServerPolicy {
    let base = sample_placement(1);
    let one = responses(&ServerPolicy::of(&base).diff(&ServerPolicy::default()));
    let one = one.iter().find(|it| Kind::from_type_url(&it.type_url) == Some(Kind::Endpoint)).unwrap();
    let count = bytes / prost::Message::encoded_len(one) * 2;
    let endpoint = |n: usize| {
        let address = std::net::Ipv4Addr::from_bits(0x0a00_0001 + n as u32).into();
        vipgate_dataplane::policy::spec::EndpointSpec { address, ..base.endpoints[0].clone() }
    };
    ServerPolicy::of(&Placement { endpoints: (0..count).map(endpoint).collect(), ..base.clone() })
}

#[tokio::test]
async fn a_response_of_five_mebibytes_is_accepted() {
    let policy = of_size(5 << 20);
    let max = responses(&policy.diff(&ServerPolicy::default())).iter().map(prost::Message::encoded_len).max();
    assert!(max > Some(5 << 20), "{max:?}");
    let mut pair = Pair::synced(&policy).await;
    assert!(pair.gateway.status.load().connected && pair.server.has_no_stream());
}

#[tokio::test]
async fn a_response_above_the_limit_is_reported_and_delays_the_reconnect() {
    let mut pair = Pair::synced(&ServerPolicy::of(&sample_placement(1))).await;
    let body = Any { type_url: Kind::Endpoint.type_url().to_owned(), value: vec![0; 65 << 20] };
    let resource = Resource { name: "10.0.0.1".to_owned(), resource: Some(body), ..Resource::default() };
    let response = DeltaDiscoveryResponse {
        type_url: Kind::Endpoint.type_url().to_owned(),
        resources: vec![resource],
        ..DeltaDiscoveryResponse::default()
    };
    pair.stream.send(response).await;
    // Counts as a rejected update.
    let reason = pair.gateway.next_rejection().await;
    let expected = "a response exceeds the limit of 64 MiB: the server must split it into several responses (";
    assert!(reason.starts_with(expected), "{reason}");
    let status = pair.gateway.wait_for_status(|status| !status.connected).await;
    assert_eq!(status.error.as_ref(), Some(&reason));
    sleep(Duration::from_secs(3)).await;
    assert!(pair.server.has_no_stream(), "reconnects later");
    let requests = pair.server.accept_stream().await.subscriptions().await;
    assert_eq!(requests[Kind::Endpoint as usize].initial_resource_versions.len(), 1, "with its versions");
}
