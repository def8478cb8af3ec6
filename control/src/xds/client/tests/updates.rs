//! Subscriptions, completeness of updates, and acknowledgements.

use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use vipgate_dataplane::policy::change::Entries;

use super::*;

#[tokio::test]
async fn a_gateway_subscribes_to_all_resources_with_its_identity() {
    let (dir, mut server) = (tempfile::tempdir().unwrap(), Server::start());
    let (gateway, _) = Gateway::start(plain_server(server.port, dir.path()));
    let mut stream = server.accept_stream().await;
    let requests = stream.subscriptions().await;
    for (request, kind) in requests.into_iter().zip(Kind::OF_GATEWAYS) {
        assert_eq!(request.type_url, kind.type_url());
        let node = request.node.unwrap();
        assert_eq!((&*node.id, &*node.locality.unwrap().zone), ("g1", "z1"));
        assert_eq!(node.user_agent_name, "vipgate");
        let version = UserAgentVersionType::UserAgentVersion(env!("CARGO_PKG_VERSION").to_owned());
        assert_eq!(node.user_agent_version_type, Some(version));
        // A wildcard subscription without known versions.
        assert!(request.resource_names_subscribe.is_empty() && request.resource_names_unsubscribe.is_empty());
        assert!(request.initial_resource_versions.is_empty() && request.response_nonce.is_empty());
    }
    let status = gateway.wait_for_status(|status| status.connected).await;
    assert_eq!((status.error, status.confirmed_at, status.cache_error), (None, None, None));
    assert!(stream.receives_nothing_for(SILENCE).await);
}

#[tokio::test]
async fn an_update_is_applied_when_complete_and_acknowledged_when_in_force() {
    let (policy, mut pair) = (ServerPolicy::of(&sample_placement(2)), Pair::new().await);
    pair.stream.send_diff(&policy.clone().without_settings(), &ServerPolicy::default()).await;
    assert!(pair.gateway.receives_nothing_for(SILENCE).await);
    assert!(pair.stream.receives_nothing_for(SILENCE).await);
    pair.stream.send(policy.settings_response()).await;
    let (update, reply) = pair.gateway.next_update().await;
    let expected = whole_policy(&sample_placement(2), &gateway_locality(), &policy.version);
    assert_eq!(update.change.version, expected.version);
    assert_eq!(update.change.policies, expected.policies);
    assert_eq!(update.change.vips, expected.vips);
    assert_eq!(update.change.endpoints, expected.endpoints);
    assert_eq!(update.change.services, expected.services);
    assert_eq!(update.peers, sample_placement(2).peers);
    // No ACK before the gateway's reply.
    assert!(pair.stream.receives_nothing_for(SILENCE).await);
    assert_eq!(pair.gateway.status.load().confirmed_at, None);
    reply.send(Ok(Effect::InForce)).unwrap();
    for (number, kind) in SENT_KINDS.into_iter().enumerate() {
        let ack = pair.stream.next_reply().await;
        assert_eq!((ack.kind, ack.nonce, ack.error), (kind, format!("n{}", number + 1), None));
    }
    // An acknowledged update is in the cache, and confirmed.
    wait_cached(pair.dir.path(), &policy).await;
    assert!(pair.gateway.status.load().confirmed_at.is_some());
}

#[tokio::test]
async fn an_update_contains_only_changes() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut pair = Pair::synced(&two).await;
    pair.stream.send_diff(&three, &two).await;
    let update = pair.gateway.apply_next().await;
    let change = &update.change;
    assert_eq!((change.policies.len(), change.vips.len(), change.endpoints.len()), (0, 0, 1));
    assert_eq!(change.version, three.version);
    assert_eq!((pair.stream.expect_ack().await, pair.stream.expect_ack().await), ("n9".to_owned(), "n10".to_owned()));
    pair.stream.send_diff(&two, &three).await;
    let update = pair.gateway.apply_next().await;
    assert_eq!(update.change.endpoints, Entries::default().without([ip("10.0.0.3")]));
}

#[tokio::test]
async fn without_settings_an_update_is_complete_after_an_idle_time() {
    let (policy, mut pair) = (ServerPolicy::of(&sample_placement(2)).without_settings(), Pair::new().await);
    let responses = responses(&policy.diff(&ServerPolicy::default()));
    let mut started = Instant::now();
    for (i, response) in responses.into_iter().enumerate() {
        if i == 2 {
            // Shorter than the idle timeout of 1 s.
            assert!(pair.gateway.receives_nothing_for(Duration::from_millis(600)).await);
            started = Instant::now();
        }
        pair.stream.send(response).await;
    }
    let update = pair.gateway.apply_next().await;
    assert!((900..4000).contains(&started.elapsed().as_millis()), "{:?}", started.elapsed());
    let change = update.change;
    assert_eq!((change.policies.len(), change.vips.len(), change.endpoints.len(), update.peers.len()), (1, 1, 2, 1));
    for nonce in ["n1", "n2", "n3", "n4", "n5", "n6"] {
        assert_eq!(pair.stream.expect_ack().await, nonce);
    }
}

#[tokio::test]
async fn without_settings_an_endless_update_is_applied_after_a_timeout() {
    let mut pair = Pair::new().await;
    let policies: Vec<ServerPolicy> =
        (1..=20).map(|endpoints| ServerPolicy::of(&sample_placement(endpoints)).without_settings()).collect();
    pair.stream.send_diff(&policies[0], &ServerPolicy::default()).await;
    pair.gateway.apply_next().await;
    let started = Instant::now();
    for window in policies.windows(2) {
        pair.stream.send_diff(&window[1], &window[0]).await;
        if !pair.gateway.receives_nothing_for(Duration::from_millis(400)).await {
            break;
        }
    }
    assert!((4500..7000).contains(&started.elapsed().as_millis()), "{:?}", started.elapsed());
}

/// From a server that has sent Settings before, an update is incomplete without them.
#[tokio::test]
async fn with_settings_an_idle_time_does_not_complete_an_update() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut pair = Pair::synced(&two).await;
    let changes = three.diff(&two);
    pair.stream.send(response(Kind::Endpoint, &changes[..1])).await;
    assert!(pair.gateway.receives_nothing_for(Duration::from_millis(1500)).await);
    pair.stream.send(three.settings_response()).await;
    assert_eq!(pair.gateway.apply_next().await.change.version, three.version);
    assert_eq!(pair.stream.expect_ack().await, "n9");
}

#[tokio::test]
async fn an_empty_response_is_acknowledged() {
    let mut pair = Pair::synced(&ServerPolicy::of(&sample_placement(1))).await;
    let nonce = pair.stream.send(response(Kind::Endpoint, &[])).await;
    assert!(pair.gateway.apply_next().await.change.is_empty());
    assert_eq!(pair.stream.expect_ack().await, nonce);
}

#[tokio::test]
async fn a_stopped_client_closes_its_stream() {
    let mut pair = Pair::synced(&ServerPolicy::of(&sample_placement(1))).await;
    pair.gateway.stop().await;
    pair.stream.wait_closed().await;
    // And stops while it isn't connected.
    pair.server.kill();
    let (gateway, _) = Gateway::start(plain_server(1, pair.dir.path()));
    gateway.wait_for_status(|status| status.error.as_ref().is_some_and(|error| error.contains("refused"))).await;
    gateway.stop().await;
}
