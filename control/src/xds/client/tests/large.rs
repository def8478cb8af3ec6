//! Responses of other servers, which may send all at once.

use envoy_types::pb::envoy::service::discovery::v3::Resource;
use envoy_types::pb::google::protobuf::Any;

use super::*;
use crate::policy::Deal;

/// A policy whose endpoints fill one response of so many bytes, or a little more.
fn of_size(bytes: usize) -> Told {
    let few = deal(1);
    let one = responses(&Told::of(&few).differences(&Told::default()));
    let one = one.iter().find(|it| Kind::of_url(&it.type_url) == Some(Kind::Endpoint)).unwrap();
    let count = bytes / prost::Message::encoded_len(one) * 2;
    let endpoint = |n: usize| {
        let address = std::net::Ipv4Addr::from_bits(0x0a00_0001 + n as u32).into();
        vipgate_dataplane::snapshot::spec::EndpointSpec { address, ..few.endpoints[0].clone() }
    };
    Told::of(&Deal { endpoints: (0..count).map(endpoint).collect(), ..few.clone() })
}

#[tokio::test]
async fn a_response_of_five_mebibytes_is_taken() {
    let told = of_size(5 << 20);
    let longest = responses(&told.differences(&Told::default())).iter().map(prost::Message::encoded_len).max();
    assert!(longest > Some(5 << 20), "{longest:?}");
    let mut pair = Pair::with(&told).await;
    assert!(pair.gateway.status.load().connected && pair.server.is_left_alone());
}

#[tokio::test]
async fn a_response_that_is_too_large_is_named_and_not_asked_for_again_at_once() {
    let told = Told::of(&deal(1));
    let mut pair = Pair::with(&told).await;
    let body = Any { type_url: Kind::Endpoint.type_url().to_owned(), value: vec![0; 65 << 20] };
    let resource = Resource { name: "10.0.0.1".to_owned(), resource: Some(body), ..Resource::default() };
    let response = DeltaDiscoveryResponse {
        type_url: Kind::Endpoint.type_url().to_owned(),
        resources: vec![resource],
        ..DeltaDiscoveryResponse::default()
    };
    pair.talk.say(response).await;
    // Counted as a refused update.
    let why = pair.gateway.refused().await;
    assert!(
        why.starts_with("a response is too large: a gateway takes 64 MiB, so the server must send it in parts ("),
        "{why}"
    );
    let status = pair.gateway.is(|status| !status.connected).await;
    assert_eq!(status.error.as_ref(), Some(&why));
    sleep(Duration::from_secs(3)).await;
    assert!(pair.server.is_left_alone(), "it comes back later");
    let requests = pair.server.talk().await.subscriptions().await;
    assert_eq!(requests[Kind::Endpoint as usize].initial_resource_versions.len(), 1, "with what it has");
}
