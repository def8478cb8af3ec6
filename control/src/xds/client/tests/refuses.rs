//! What can't be in force, and what the server hears of it.

use super::*;
use crate::xds::book::Held;

/// An endpoint that can't be: it is a multicast address.
fn wrong() -> DeltaDiscoveryResponse {
    let held = Held { version: "1".to_owned(), body: b"\x0a\x09224.0.0.1".to_vec().into() };
    response(Kind::Endpoint, &[(key(Kind::Endpoint, "224.0.0.1"), Some(held))])
}

const WHY: &str = "resource Endpoint 224.0.0.1: address: 224.0.0.1 is a multicast address";
const PART: &str =
    "part of an update that was refused: resource Endpoint 224.0.0.1: address: 224.0.0.1 is a multicast address";

#[tokio::test]
async fn what_the_gateway_rejects_is_refused_with_its_reason() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut pair = Pair::with(&two).await;
    pair.talk.tell(&three, &two).await;
    let (_, answer) = pair.gateway.offer().await;
    let resource = Some("Vip 203.0.113.1".to_owned());
    answer.send(Err(Rejection { resource, reason: "is this gateway's own address".to_owned() })).unwrap();
    for nonce in ["n9", "n10"] {
        assert_eq!(pair.talk.refused(nonce).await, "resource Vip 203.0.113.1: is this gateway's own address");
    }
    // The gateway has said so itself, and nothing has changed.
    assert!(pair.gateway.hears_nothing_for(SILENCE).await);
    pair.talk.tell(&three, &two).await;
    let (offer, answer) = pair.gateway.offer().await;
    assert_eq!(offer.change.endpoints.len(), 1);
    answer.send(Err(Rejection { resource: None, reason: "no".to_owned() })).unwrap();
    assert_eq!(pair.talk.refused("n11").await, "no");
}

#[tokio::test]
async fn all_of_a_spoiled_update_is_refused() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut pair = Pair::with(&two).await;
    let news = three.differences(&two);
    pair.talk.say(response(Kind::Gateway, &[])).await;
    pair.talk.say(wrong()).await;
    pair.talk.say(response(Kind::Endpoint, &news[..1])).await;
    pair.talk.say(three.settle()).await;
    assert_eq!(pair.gateway.refused().await, WHY);
    assert_eq!(pair.talk.refused("n9").await, PART);
    assert_eq!(pair.talk.refused("n10").await, WHY);
    assert_eq!(pair.talk.refused("n11").await, PART);
    assert_eq!(pair.talk.refused("n12").await, PART);
    // With the settings it is over: the next update is a new one.
    pair.talk.tell(&three, &two).await;
    assert_eq!(pair.gateway.takes().await.change.endpoints.len(), 1);
    assert_eq!((pair.talk.accepted().await, pair.talk.accepted().await), ("n13".to_owned(), "n14".to_owned()));
}

#[tokio::test]
async fn a_spoiled_update_ends_with_a_pause() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut pair = Pair::with(&two).await;
    pair.talk.say(wrong()).await;
    assert_eq!(pair.gateway.refused().await, WHY);
    assert_eq!(pair.talk.refused("n9").await, WHY);
    sleep(Duration::from_millis(600)).await;
    pair.talk.tell(&three, &two).await;
    assert_eq!(pair.gateway.takes().await.change.endpoints.len(), 1);
}

#[tokio::test]
async fn an_update_spoiled_by_its_settings_is_over() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut pair = Pair::with(&two).await;
    let held = Held { version: "1".to_owned(), body: b"\xff".to_vec().into() };
    pair.talk.say(response(Kind::Endpoint, &three.differences(&two)[..1])).await;
    pair.talk.say(response(Kind::Settings, &[(key(Kind::Settings, "settings"), Some(held))])).await;
    let why = pair.gateway.refused().await;
    assert!(why.starts_with("resource Settings settings: is no Settings: "), "{why}");
    assert_eq!(pair.talk.refused("n9").await, format!("part of an update that was refused: {why}"));
    assert_eq!(pair.talk.refused("n10").await, why);
    pair.talk.tell(&three, &two).await;
    assert_eq!(pair.gateway.takes().await.change.endpoints.len(), 1);
}

/// The rest of a first update contradicts its settings: no part of it takes effect.
#[tokio::test]
async fn a_first_update_that_is_spoiled_leaves_nothing() {
    let (told, mut pair) = (Told::of(&deal(2)), Pair::new().await);
    pair.talk.say(wrong()).await;
    assert_eq!(pair.gateway.refused().await, WHY);
    assert_eq!(pair.talk.refused("n1").await, WHY);
    let mut rest = told.clone();
    rest.held.remove(&key(Kind::Endpoint, "10.0.0.2"));
    pair.talk.tell(&rest, &Told::default()).await;
    let why = pair.gateway.refused().await;
    assert_eq!(why, "resource Settings settings: counts 2 of Endpoint, but there are 1");
    for nonce in ["n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"] {
        assert_eq!(pair.talk.refused(nonce).await, why);
    }
    // Said again without the fault, it is taken.
    pair.talk.tell(&told, &Told::default()).await;
    assert_eq!(pair.gateway.takes().await.change.endpoints.len(), 2);
}

#[tokio::test]
async fn settings_that_count_otherwise_are_refused() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut pair = Pair::with(&two).await;
    pair.talk.say(three.settle()).await;
    let why = pair.gateway.refused().await;
    assert_eq!(why, "resource Settings settings: counts 3 of Endpoint, but there are 2");
    assert_eq!(pair.talk.refused("n9").await, why);
}

/// Without settings each response stands alone.
#[tokio::test]
async fn a_server_without_settings_is_refused_response_by_response() {
    let told = Told::of(&deal(2)).unsettled();
    let mut pair = Pair::new().await;
    pair.talk.say(wrong()).await;
    pair.talk.tell(&told, &Told::default()).await;
    assert_eq!(pair.gateway.refused().await, WHY);
    assert_eq!(pair.talk.refused("n1").await, WHY);
    assert_eq!(pair.gateway.takes().await.change.endpoints.len(), 2);
    for nonce in ["n2", "n3", "n4", "n5", "n6"] {
        assert_eq!(pair.talk.accepted().await, nonce);
    }
}

#[tokio::test]
async fn a_type_that_nobody_asked_for_is_refused() {
    let mut pair = Pair::new().await;
    let cluster = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
    pair.talk.say(DeltaDiscoveryResponse { type_url: cluster.to_owned(), ..Default::default() }).await;
    let why = pair.gateway.refused().await;
    assert_eq!(why, format!("type_url `{cluster}` is unknown to this gateway"));
    assert!(!pair.talk.hears_nothing_for(LONG).await);
}
