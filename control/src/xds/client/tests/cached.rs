//! A gateway that starts again.

use std::time::UNIX_EPOCH;

use super::*;
use crate::xds::book::Held;

#[tokio::test]
async fn a_cache_serves_the_next_start() {
    let told = Told::of(&deal(2));
    let pair = Pair::with(&told).await;
    pair.gateway.stop().await;
    pair.server.kill();
    let cache = pair.folder.path().join("policy.cache");
    let known_at = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    std::fs::File::options().write(true).open(&cache).unwrap().set_modified(known_at).unwrap();

    // Nobody answers, and yet there is policy.
    let mut server = Server::start();
    let (mut gateway, offer) = Gateway::start(plain(server.port, pair.folder.path()));
    let (offer, expected) = (offer.unwrap(), deal(2).part_of(Some(&viewer()), &told.version));
    let change = offer.change;
    assert_eq!((change.version, change.policies), (expected.version, expected.policies));
    assert_eq!((change.vips, change.endpoints), (expected.vips, expected.endpoints));
    assert_eq!(change.services, expected.services);
    assert_eq!(offer.peers, deal(2).peers);
    assert_eq!(gateway.status.load().known_at, Some(known_at));
    assert_eq!(gateway.status.load().cache_error, None);
    assert_eq!(gateway.status.load().error.as_deref(), Some("not connected yet"));

    // It goes on from there.
    let mut talk = server.talk().await;
    assert_eq!(talk.subscriptions().await[Kind::Endpoint as usize].initial_resource_versions.len(), 2);
    talk.tell(&Told::of(&deal(3)), &told).await;
    let change = gateway.takes().await.change;
    assert_eq!((change.vips.len(), change.endpoints.len()), (0, 1));
}

#[tokio::test]
async fn a_damaged_cache_is_said_and_ignored() {
    let told = Told::of(&deal(2));
    let pair = Pair::with(&told).await;
    pair.gateway.stop().await;
    let cache = pair.folder.path().join("policy.cache");
    let mut bytes = std::fs::read(&cache).unwrap();
    bytes[50] ^= 1;
    std::fs::write(&cache, bytes).unwrap();

    let mut server = Server::start();
    let (mut gateway, offer) = Gateway::start(plain(server.port, pair.folder.path()));
    assert!(offer.is_none());
    let status = gateway.status.load_full();
    let expected = format!("{} was ignored: record 1 isn't what was written", cache.display());
    assert_eq!((status.cache_error.as_deref(), status.known_at), (Some(&*expected), None));

    // The next update makes it good again.
    let mut talk = server.talk().await;
    assert!(talk.subscriptions().await.iter().all(|request| request.initial_resource_versions.is_empty()));
    talk.tell(&told, &Told::default()).await;
    gateway.takes().await;
    talk.accepted().await;
    assert_eq!(gateway.status.load().cache_error, None);
    gateway.stop().await;
    let (_, offer) = Gateway::start(plain(server.port, pair.folder.path()));
    assert_eq!(offer.unwrap().change.version, told.version);
}

#[tokio::test]
async fn a_cache_of_resources_that_mean_nothing_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("policy.cache");
    let held = Held { version: "1".to_owned(), body: b"\xff".to_vec().into() };
    let held = [(key(Kind::Vip, "203.0.113.1"), held)].into();
    Cache::open(&cache).unwrap().0.append(vec![], &held).unwrap();
    let (gateway, offer) = Gateway::start(plain(1, folder.path()));
    assert!(offer.is_none());
    let status = gateway.status.load_full();
    let said = status.cache_error.clone().unwrap();
    assert!(said.contains(" was ignored: resource Vip 203.0.113.1: is no Vip: "), "{said}");
    assert_eq!(status.known_at, None);
}

/// Nothing of what was forgotten comes back.
#[tokio::test]
async fn a_cache_that_was_forgotten_is_written_anew() {
    let (old, new) = (Told::of(&deal(9)), Told::of(&deal(2)));
    let pair = Pair::with(&old).await;
    pair.gateway.stop().await;
    let mut server = Server::start();
    let (sender, events) = mpsc::channel(4);
    let config = plain(server.port, pair.folder.path());
    let (mut client, offer) = Client::open(viewer(), config.clone(), sender);
    assert_eq!(offer.unwrap().change.endpoints.len(), 9);
    client.forget("an address is this gateway's own");
    let status = client.status();
    let said = status.load().cache_error.clone().unwrap();
    assert!(said.ends_with("policy.cache was ignored: an address is this gateway's own"), "{said}");
    let mut gateway = Gateway { events, status, task: tokio::spawn(client.run()) };
    let mut talk = server.talk().await;
    assert!(talk.subscriptions().await.iter().all(|request| request.initial_resource_versions.is_empty()));
    talk.tell(&new, &Told::default()).await;
    gateway.takes().await;
    talk.accepted().await;
    gateway.stop().await;
    let (_, offer) = Gateway::start(config);
    assert_eq!(offer.unwrap().change.endpoints.len(), 2);
}

/// Policy goes on without its cache.
#[tokio::test]
async fn a_cache_that_cannot_be_written_is_said() {
    let (one, two) = (Told::of(&deal(1)), Told::of(&deal(2)));
    let mut pair = Pair::new().await;
    let (folder, cache) = (pair.folder.path(), pair.folder.path().join("policy.cache"));
    std::fs::remove_dir_all(folder).unwrap();
    pair.talk.tell(&one, &Told::default()).await;
    pair.gateway.takes().await;
    for _ in Kind::ALL {
        pair.talk.accepted().await;
    }
    let said = pair.gateway.status.load().cache_error.clone().unwrap();
    assert_eq!(said, format!("{}: No such file or directory (os error 2)", cache.display()));
    assert!(pair.gateway.status.load().known_at.is_some());
    // Where there is a place again, the next update writes all of it.
    std::fs::create_dir(folder).unwrap();
    pair.talk.tell(&two, &one).await;
    pair.gateway.takes().await;
    pair.talk.accepted().await;
    assert_eq!(pair.gateway.status.load().cache_error, None);
    pair.gateway.stop().await;
    let Found::Policy(held, _) = Cache::open(&cache).unwrap().1 else { panic!("no policy") };
    assert_eq!(held, two.held);
}

#[tokio::test]
async fn a_cache_that_another_gateway_has_is_said_and_done_without() {
    let pair = Pair::with(&Told::of(&deal(1))).await;
    let (sender, _events) = mpsc::channel(4);
    let config = plain(pair.server.port, pair.folder.path());
    let opened = tokio::task::spawn_blocking(|| Client::open(Viewer::named("g2"), config, sender));
    let (client, offer) = opened.await.unwrap();
    assert!(offer.is_none());
    let error = client.status().load().cache_error.clone().unwrap();
    assert!(error.contains("in use by another process"), "{error}");
}
