//! Subscriptions, whole updates, and when they are acknowledged.

use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;

use super::*;
use crate::xds::cache::Cache;

#[tokio::test]
async fn a_gateway_subscribes_to_everything_as_itself() {
    let (folder, mut server) = (tempfile::tempdir().unwrap(), Server::start());
    let (gateway, _) = Gateway::start(plain(server.port, folder.path()));
    let mut talk = server.talk().await;
    let requests = talk.subscriptions().await;
    for (request, kind) in requests.into_iter().zip(Kind::ALL) {
        assert_eq!(request.type_url, kind.type_url());
        let node = request.node.unwrap();
        assert_eq!((&*node.id, &*node.locality.unwrap().zone), ("g1", "z1"));
        assert_eq!(node.user_agent_name, "vipgate");
        let version = UserAgentVersionType::UserAgentVersion(env!("CARGO_PKG_VERSION").to_owned());
        assert_eq!(node.user_agent_version_type, Some(version));
        // All of it, from the beginning.
        assert!(request.resource_names_subscribe.is_empty() && request.resource_names_unsubscribe.is_empty());
        assert!(request.initial_resource_versions.is_empty() && request.response_nonce.is_empty());
    }
    let status = gateway.is(|status| status.connected).await;
    assert_eq!((status.error, status.known_at, status.cache_error), (None, None, None));
    assert!(talk.hears_nothing_for(SILENCE).await);
}

#[tokio::test]
async fn an_update_is_offered_whole_and_acknowledged_in_force() {
    let (told, mut pair) = (Told::of(&deal(2)), Pair::new().await);
    pair.talk.tell(&told.clone().unsettled(), &Told::default()).await;
    assert!(pair.gateway.hears_nothing_for(SILENCE).await);
    assert!(pair.talk.hears_nothing_for(SILENCE).await);
    pair.talk.say(told.settle()).await;
    let (offer, answer) = pair.gateway.offer().await;
    let expected = deal(2).part_of(Some(&viewer()), &told.version);
    assert_eq!(offer.change.version, expected.version);
    assert_eq!(offer.change.policies, expected.policies);
    assert_eq!(offer.change.vips, expected.vips);
    assert_eq!(offer.change.endpoints, expected.endpoints);
    assert_eq!(offer.change.services, expected.services);
    assert_eq!(offer.peers, deal(2).peers);
    // Not before the gateway has said so.
    assert!(pair.talk.hears_nothing_for(SILENCE).await);
    assert_eq!(pair.gateway.status.load().known_at, None);
    answer.send(Ok(())).unwrap();
    for (number, kind) in Kind::ALL.into_iter().enumerate() {
        let said = pair.talk.answer().await;
        assert_eq!((said.kind, said.nonce, said.error), (kind, format!("n{}", number + 1), None));
    }
    // What is acknowledged is in the journal, and known to be right.
    let copy = pair.folder.path().join("copy");
    std::fs::copy(pair.folder.path().join("policy.cache"), &copy).unwrap();
    let Found::Policy(held, _) = Cache::open(&copy).unwrap().1 else { panic!("no policy") };
    assert_eq!(held, told.held);
    assert!(pair.gateway.status.load().known_at.is_some());
}

#[tokio::test]
async fn what_changes_is_offered_and_nothing_else() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut pair = Pair::with(&two).await;
    pair.talk.tell(&three, &two).await;
    let offer = pair.gateway.takes().await;
    let change = &offer.change;
    assert_eq!((change.policies.len(), change.vips.len(), change.endpoints.len()), (0, 0, 1));
    assert_eq!(change.version, three.version);
    assert_eq!((pair.talk.accepted().await, pair.talk.accepted().await), ("n9".to_owned(), "n10".to_owned()));
    pair.talk.tell(&two, &three).await;
    let offer = pair.gateway.takes().await;
    assert_eq!(offer.change.gone.endpoints, [ip("10.0.0.3")]);
}

#[tokio::test]
async fn without_settings_an_update_is_whole_when_nothing_more_comes() {
    let (told, mut pair) = (Told::of(&deal(2)).unsettled(), Pair::new().await);
    let responses = responses(&told.differences(&Told::default()));
    let mut begun = Instant::now();
    for (i, response) in responses.into_iter().enumerate() {
        if i == 2 {
            // A pause shorter than a second isn't the end.
            assert!(pair.gateway.hears_nothing_for(Duration::from_millis(600)).await);
            begun = Instant::now();
        }
        pair.talk.say(response).await;
    }
    let offer = pair.gateway.takes().await;
    assert!((900..4000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    let change = offer.change;
    assert_eq!((change.policies.len(), change.vips.len(), change.endpoints.len(), offer.peers.len()), (1, 1, 2, 1));
    for nonce in ["n1", "n2", "n3", "n4", "n5", "n6"] {
        assert_eq!(pair.talk.accepted().await, nonce);
    }
}

#[tokio::test]
async fn a_server_without_settings_that_never_pauses_is_heard_all_the_same() {
    let mut pair = Pair::new().await;
    let told: Vec<Told> = (1..=20).map(|endpoints| Told::of(&deal(endpoints)).unsettled()).collect();
    pair.talk.tell(&told[0], &Told::default()).await;
    pair.gateway.takes().await;
    let begun = Instant::now();
    for pair_of in told.windows(2) {
        pair.talk.tell(&pair_of[1], &pair_of[0]).await;
        if !pair.gateway.hears_nothing_for(Duration::from_millis(400)).await {
            break;
        }
    }
    assert!((4500..7000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
}

/// A server that has sent settings once will send them again: no part of an update takes effect without them.
#[tokio::test]
async fn with_settings_a_pause_is_not_the_end() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let mut pair = Pair::with(&two).await;
    let news = three.differences(&two);
    pair.talk.say(response(Kind::Endpoint, &news[..1])).await;
    assert!(pair.gateway.hears_nothing_for(Duration::from_millis(1500)).await);
    pair.talk.say(three.settle()).await;
    assert_eq!(pair.gateway.takes().await.change.version, three.version);
    assert_eq!(pair.talk.accepted().await, "n9");
}

/// Servers say so when they have nothing new.
#[tokio::test]
async fn a_response_with_nothing_is_acknowledged() {
    let told = Told::of(&deal(1));
    let mut pair = Pair::with(&told).await;
    let nonce = pair.talk.say(response(Kind::Endpoint, &[])).await;
    assert!(pair.gateway.takes().await.change.is_empty());
    assert_eq!(pair.talk.accepted().await, nonce);
}

#[tokio::test]
async fn a_gateway_that_stops_ends_the_stream() {
    let mut pair = Pair::with(&Told::of(&deal(1))).await;
    pair.gateway.stop().await;
    pair.talk.ends().await;
    // Also while there is no stream.
    pair.server.kill();
    let (gateway, _) = Gateway::start(plain(1, pair.folder.path()));
    gateway.is(|status| status.error.as_ref().is_some_and(|error| error.contains("refused"))).await;
    gateway.stop().await;
}
