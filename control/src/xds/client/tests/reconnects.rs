//! Reconnects.

use std::collections::HashMap;

use tonic::Status;

use super::server::free_port;
use super::*;

/// The `initial_resource_versions` of a gateway with this policy.
fn versions(policy: &ServerPolicy, kind: Kind) -> HashMap<String, String> {
    let of_kind = policy.resources.iter().filter(|(key, _)| key.kind == kind);
    of_kind.map(|(key, stored)| (key.name.to_string(), stored.version.clone())).collect()
}

#[tokio::test]
async fn a_gateway_reconnects_with_its_resource_versions() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let (dir, mut server) = (tempfile::tempdir().unwrap(), Server::start_at(free_port()));
    let (mut gateway, _) = Gateway::start(plain_server(server.port, dir.path()));
    let mut stream = server.accept_stream().await;
    stream.subscriptions().await;
    stream.send_diff(&two, &ServerPolicy::default()).await;
    gateway.apply_next().await;
    stream.expect_ack().await;
    // An incomplete update is discarded with its stream.
    stream.send(response(Kind::Endpoint, &three.diff(&two)[..1])).await;
    let port = server.port;
    server.kill();
    let status = gateway.wait_for_status(|status| !status.connected).await;
    assert!(status.error.is_some() && status.confirmed_at.is_some());
    gateway.wait_for_status(|status| status.error.as_ref().is_some_and(|error| error.contains("refused"))).await;
    assert!(gateway.receives_nothing_for(SILENCE).await);

    let mut server = Server::start_at(port);
    let mut stream = server.accept_stream().await;
    for (request, kind) in stream.subscriptions().await.into_iter().zip(Kind::OF_GATEWAYS) {
        assert_eq!(request.initial_resource_versions, versions(&two, kind));
        assert_eq!(request.node.unwrap().id, "g1");
    }
    assert_eq!(gateway.wait_for_status(|status| status.connected).await.error, None);
    stream.send_diff(&three, &two).await;
    assert_eq!(gateway.apply_next().await.change.endpoints.len(), 1);
    assert_eq!(stream.expect_ack().await, "n1");
}

#[tokio::test]
async fn a_closed_stream_is_reopened() {
    let policy = ServerPolicy::of(&sample_placement(1));
    let mut pair = Pair::synced(&policy).await;
    drop(pair.stream);
    pair.gateway.wait_for_status(|it| it.error.as_deref() == Some("the server closed the stream")).await;
    let mut stream = pair.server.accept_stream().await;
    assert_eq!(stream.subscriptions().await[2].initial_resource_versions, versions(&policy, Kind::Vip));
    stream.fail(Status::permission_denied("unknown gateway g1")).await;
    let expected = "unknown gateway g1";
    pair.gateway.wait_for_status(|it| it.error.as_deref() == Some(expected)).await;
    pair.server.accept_stream().await.subscriptions().await;
}

#[tokio::test]
async fn reconnects_back_off_exponentially() {
    let (dir, mut server) = (tempfile::tempdir().unwrap(), Server::start());
    let (_gateway, _) = Gateway::start(plain_server(server.port, dir.path()));
    let mut delays = Vec::new();
    drop(server.accept_stream().await);
    for _ in 0..4 {
        let started = Instant::now();
        assert!(server.has_no_stream());
        drop(server.accept_stream().await);
        delays.push(started.elapsed());
    }
    // 50 to 100 ms, doubled each time.
    for (delay, min) in delays.iter().zip([50, 100, 200, 400]) {
        assert!(*delay >= Duration::from_millis(min - 10), "{delays:?}");
    }
    assert!(delays.iter().sum::<Duration>() < Duration::from_secs(8), "{delays:?}");
}
