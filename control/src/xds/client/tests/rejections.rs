//! Rejected updates and their NACKs.

use vipgate_policy::compiler::Placement;

use super::*;
use crate::xds::fixtures::{large_service, responses};
use crate::xds::resource::{Key, settings};
use crate::xds::store::StoredResource;

/// A response with an invalid endpoint: its address is multicast.
fn invalid_endpoint() -> DeltaDiscoveryResponse {
    let stored = StoredResource { version: "1".to_owned(), body: b"\x0a\x09224.0.0.1".to_vec().into() };
    response(Kind::Endpoint, &[(key(Kind::Endpoint, "224.0.0.1"), Some(stored))])
}

const REASON: &str = "resource Endpoint 224.0.0.1: address: 224.0.0.1 is a multicast address";
const PART: &str = "part of a rejected update: resource Endpoint 224.0.0.1: address: 224.0.0.1 is a multicast address";

#[tokio::test]
async fn a_rejection_of_the_gateway_is_sent_as_a_nack_with_its_reason() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut pair = Pair::synced(&two).await;
    pair.stream.send_diff(&three, &two).await;
    let (_, reply) = pair.gateway.next_update().await;
    let resource = Some(key(Kind::Vip, "203.0.113.1"));
    reply.send(Err(Rejection { resource, reason: "is this gateway's own address".to_owned() })).unwrap();
    for nonce in ["n9", "n10"] {
        assert_eq!(pair.stream.expect_nack(nonce).await, "resource Vip 203.0.113.1: is this gateway's own address");
    }
    // No event, since the gateway rejected it itself; and nothing has changed.
    assert!(pair.gateway.receives_nothing_for(SILENCE).await);
    pair.stream.send_diff(&three, &two).await;
    let (update, reply) = pair.gateway.next_update().await;
    assert_eq!(update.change.endpoints.len(), 1);
    reply.send(Err(Rejection { resource: None, reason: "no".to_owned() })).unwrap();
    assert_eq!(pair.stream.expect_nack("n11").await, "no");
}

#[tokio::test]
async fn an_invalid_resource_rejects_the_whole_update() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut pair = Pair::synced(&two).await;
    let changes = three.diff(&two);
    pair.stream.send(response(Kind::Gateway, &[])).await;
    pair.stream.send(invalid_endpoint()).await;
    pair.stream.send(response(Kind::Endpoint, &changes[..1])).await;
    pair.stream.send(three.settings_response()).await;
    assert_eq!(pair.gateway.next_rejection().await, REASON);
    assert_eq!(pair.stream.expect_nack("n9").await, PART);
    assert_eq!(pair.stream.expect_nack("n10").await, REASON);
    assert_eq!(pair.stream.expect_nack("n11").await, PART);
    assert_eq!(pair.stream.expect_nack("n12").await, PART);
    // Settings end the rejected update.
    pair.stream.send_diff(&three, &two).await;
    assert_eq!(pair.gateway.apply_next().await.change.endpoints.len(), 1);
    assert_eq!((pair.stream.expect_ack().await, pair.stream.expect_ack().await), ("n13".to_owned(), "n14".to_owned()));
}

#[tokio::test]
async fn a_rejected_update_ends_after_an_idle_time() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut pair = Pair::synced(&two).await;
    pair.stream.send(invalid_endpoint()).await;
    assert_eq!(pair.gateway.next_rejection().await, REASON);
    assert_eq!(pair.stream.expect_nack("n9").await, REASON);
    sleep(Duration::from_millis(600)).await;
    pair.stream.send_diff(&three, &two).await;
    assert_eq!(pair.gateway.apply_next().await.change.endpoints.len(), 1);
}

#[tokio::test]
async fn a_rejected_update_ends_with_its_invalid_settings() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut pair = Pair::synced(&two).await;
    let invalid = StoredResource { version: "1".to_owned(), body: b"\xff".to_vec().into() };
    pair.stream.send(response(Kind::Endpoint, &three.diff(&two)[..1])).await;
    pair.stream.send(response(Kind::Settings, &[(key(Kind::Settings, "settings"), Some(invalid))])).await;
    let reason = pair.gateway.next_rejection().await;
    assert!(reason.starts_with("resource Settings settings: is not a valid Settings: "), "{reason}");
    assert_eq!(pair.stream.expect_nack("n9").await, format!("part of a rejected update: {reason}"));
    assert_eq!(pair.stream.expect_nack("n10").await, reason);
    pair.stream.send_diff(&three, &two).await;
    assert_eq!(pair.gateway.apply_next().await.change.endpoints.len(), 1);
}

/// The rest of a rejected first update doesn't match its Settings: no part of it takes effect.
#[tokio::test]
async fn a_rejected_first_update_leaves_no_policy() {
    let (policy, mut pair) = (ServerPolicy::of(&sample_placement(2)), Pair::new().await);
    pair.stream.send(invalid_endpoint()).await;
    assert_eq!(pair.gateway.next_rejection().await, REASON);
    assert_eq!(pair.stream.expect_nack("n1").await, REASON);
    let mut rest = policy.clone();
    rest.resources.remove(&key(Kind::Endpoint, "10.0.0.2"));
    pair.stream.send_diff(&rest, &ServerPolicy::default()).await;
    let reason = pair.gateway.next_rejection().await;
    assert_eq!(reason, "resource Settings settings: expects 2 Endpoint resources, got 1");
    for nonce in ["n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "n10"] {
        assert_eq!(pair.stream.expect_nack(nonce).await, reason);
    }
    // Sent again without the invalid resource, it is accepted.
    pair.stream.send_diff(&policy, &ServerPolicy::default()).await;
    assert_eq!(pair.gateway.apply_next().await.change.endpoints.len(), 2);
}

#[tokio::test]
async fn settings_with_wrong_counts_are_rejected() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut pair = Pair::synced(&two).await;
    pair.stream.send(three.settings_response()).await;
    let reason = pair.gateway.next_rejection().await;
    assert_eq!(reason, "resource Settings settings: expects 3 Endpoint resources, got 2");
    assert_eq!(pair.stream.expect_nack("n9").await, reason);
}

#[tokio::test]
async fn without_settings_responses_are_rejected_one_by_one() {
    let policy = ServerPolicy::of(&sample_placement(2)).without_settings();
    let mut pair = Pair::new().await;
    pair.stream.send(invalid_endpoint()).await;
    pair.stream.send_diff(&policy, &ServerPolicy::default()).await;
    assert_eq!(pair.gateway.next_rejection().await, REASON);
    assert_eq!(pair.stream.expect_nack("n1").await, REASON);
    assert_eq!(pair.gateway.apply_next().await.change.endpoints.len(), 2);
    for nonce in ["n2", "n3", "n4", "n5", "n6"] {
        assert_eq!(pair.stream.expect_ack().await, nonce);
    }
}

#[tokio::test]
async fn an_unknown_type_is_rejected() {
    let mut pair = Pair::new().await;
    let cluster = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
    pair.stream.send(DeltaDiscoveryResponse { type_url: cluster.to_owned(), ..Default::default() }).await;
    let reason = pair.gateway.next_rejection().await;
    assert_eq!(reason, format!("type_url `{cluster}` is unknown to this gateway"));
    assert!(!pair.stream.receives_nothing_for(TEST_TIMEOUT).await);
}

#[test]
fn a_rejection_names_its_resource_once() {
    let rejection = |resource: &Option<Key>, reason: &str| {
        Rejection { resource: resource.clone(), reason: reason.to_owned() }.to_string()
    };
    let policy = Some(key(Kind::EgressPolicy, "EgressPolicy tenant/web"));
    assert_eq!(rejection(&policy, "EgressPolicy tenant/web: bad"), "resource EgressPolicy tenant/web: bad");
    assert_eq!(rejection(&policy, "is listed twice"), "resource EgressPolicy tenant/web: is listed twice");
    assert_eq!(rejection(&None, "no"), "no");
    for (kind, name, expected) in [
        (Kind::EgressPolicy, "EgressPolicy tenant/web", "EgressPolicy tenant/web"),
        (Kind::EgressPolicy, "Service tenant/api", "EgressPolicy Service tenant/api"),
        (Kind::Service, "Service tenant/api", "Service tenant/api"),
        (Kind::Vip, "203.0.113.10", "Vip 203.0.113.10"),
    ] {
        assert_eq!(key(kind, name).to_string(), expected);
        assert!(Key::displayed_as(expected).any(|it| it == key(kind, name)), "{expected}");
    }
}

#[tokio::test]
async fn a_missing_backend_slice_rejects_the_update_with_the_name_of_its_service() {
    let two = ServerPolicy::of(&sample_placement(2));
    let mut pair = Pair::synced(&two).await;
    let services = vec![large_service(300)].into();
    let large = ServerPolicy::of(&Placement { services, ..sample_placement(2) });
    let mut changes = large.diff(&two);
    changes.retain(|(key, _)| &*key.name != "Service a/s#3" && key.kind != Kind::Settings);
    for response in responses(&changes) {
        pair.stream.send(response).await;
    }
    let counts = [1, 1, 1, 2, 4, 1, 1, 1, 1];
    let (settings_key, content, _) = settings(counts, 1);
    let stored = StoredResource { version: "1".to_owned(), body: content.body };
    pair.stream.send(response(Kind::Settings, &[(settings_key, Some(stored))])).await;
    let reason = "resource Service a/s: has 5 backend slices, but number 3 is missing";
    assert_eq!(pair.gateway.next_rejection().await, reason);
    for nonce in ["n9", "n10", "n11"] {
        assert_eq!(pair.stream.expect_nack(nonce).await, reason);
    }
    pair.stream.send_diff(&large, &two).await;
    let update = pair.gateway.apply_next().await;
    let backends: Vec<usize> = update.change.services.changed().map(|service| service.backends.len()).collect();
    assert_eq!(backends, [300]);
}
