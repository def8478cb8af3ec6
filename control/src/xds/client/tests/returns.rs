//! Servers that go and come again.

use std::collections::HashMap;

use tonic::Status;

use super::server::free_port;
use super::*;

/// What a gateway that holds this says of a kind when it comes again.
fn versions(told: &Told, kind: Kind) -> HashMap<String, String> {
    let of_kind = told.held.iter().filter(|(key, _)| key.kind == kind);
    of_kind.map(|(key, held)| (key.name.to_string(), held.version.clone())).collect()
}

#[tokio::test]
async fn a_gateway_comes_again_with_what_it_has() {
    let (two, three) = (Told::of(&deal(2)), Told::of(&deal(3)));
    let (folder, mut server) = (tempfile::tempdir().unwrap(), Server::start_at(free_port()));
    let (mut gateway, _) = Gateway::start(plain(server.port, folder.path()));
    let mut talk = server.talk().await;
    talk.subscriptions().await;
    talk.tell(&two, &Told::default()).await;
    gateway.takes().await;
    talk.accepted().await;
    // Half of an update is lost with its stream.
    talk.say(response(Kind::Endpoint, &three.differences(&two)[..1])).await;
    let port = server.port;
    server.kill();
    let status = gateway.is(|status| !status.connected).await;
    assert!(status.error.is_some() && status.known_at.is_some());
    gateway.is(|status| status.error.as_ref().is_some_and(|error| error.contains("refused"))).await;
    assert!(gateway.hears_nothing_for(SILENCE).await);

    let mut server = Server::start_at(port);
    let mut talk = server.talk().await;
    for (request, kind) in talk.subscriptions().await.into_iter().zip(Kind::ALL) {
        assert_eq!(request.initial_resource_versions, versions(&two, kind));
        assert_eq!(request.node.unwrap().id, "g1");
    }
    assert_eq!(gateway.is(|status| status.connected).await.error, None);
    talk.tell(&three, &two).await;
    assert_eq!(gateway.takes().await.change.endpoints.len(), 1);
    assert_eq!(talk.accepted().await, "n1");
}

#[tokio::test]
async fn a_stream_that_ends_is_begun_anew() {
    let told = Told::of(&deal(1));
    let mut pair = Pair::with(&told).await;
    drop(pair.talk);
    pair.gateway.is(|it| it.error.as_deref() == Some("the server has ended the stream")).await;
    let mut talk = pair.server.talk().await;
    assert_eq!(talk.subscriptions().await[1].initial_resource_versions, versions(&told, Kind::Vip));
    talk.fail(Status::permission_denied("g1 is none of mine")).await;
    let expected = "g1 is none of mine";
    pair.gateway.is(|it| it.error.as_deref() == Some(expected)).await;
    pair.server.talk().await.subscriptions().await;
}

/// A server that fails at once isn't asked again at once.
#[tokio::test]
async fn a_gateway_waits_longer_each_time() {
    let (folder, mut server) = (tempfile::tempdir().unwrap(), Server::start());
    let (_gateway, _) = Gateway::start(plain(server.port, folder.path()));
    let mut pauses = Vec::new();
    drop(server.talk().await);
    for _ in 0..4 {
        let begun = Instant::now();
        assert!(server.is_left_alone());
        drop(server.talk().await);
        pauses.push(begun.elapsed());
    }
    // 50 to 100 ms, and each time twice as long.
    for (pause, shortest) in pauses.iter().zip([50, 100, 200, 400]) {
        assert!(*pause >= Duration::from_millis(shortest - 10), "{pauses:?}");
    }
    assert!(pauses.iter().sum::<Duration>() < Duration::from_secs(8), "{pauses:?}");
}
