//! Restarts with a policy cache.

use std::time::UNIX_EPOCH;

use super::*;
use crate::xds::store::StoredResource;

#[tokio::test]
async fn the_cached_policy_is_in_force_after_a_restart() {
    let policy = ServerPolicy::of(&sample_placement(2));
    let pair = Pair::synced(&policy).await;
    pair.gateway.stop().await;
    pair.server.kill();
    let cache = pair.dir.path().join("policy.cache");
    let confirmed_at = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    std::fs::File::options().write(true).open(&cache).unwrap().set_modified(confirmed_at).unwrap();

    // Before the connection to the server.
    let mut server = Server::start();
    let (mut gateway, cached) = Gateway::start(plain_server(server.port, pair.dir.path()));
    let (update, expected) =
        (cached.unwrap(), sample_placement(2).policy_for(Some(&gateway_locality()), &policy.version));
    let change = update.change;
    assert_eq!((change.version, change.policies), (expected.version, expected.policies));
    assert_eq!((change.vips, change.endpoints), (expected.vips, expected.endpoints));
    assert_eq!(change.services, expected.services);
    assert_eq!(update.peers, sample_placement(2).peers);
    assert_eq!(gateway.status.load().confirmed_at, Some(confirmed_at));
    assert_eq!(gateway.status.load().cache_error, None);
    assert_eq!(gateway.status.load().error.as_deref(), Some("not connected yet"));

    // Deltas from there on.
    let mut stream = server.accept_stream().await;
    assert_eq!(stream.subscriptions().await[Kind::Endpoint as usize].initial_resource_versions.len(), 2);
    stream.send_diff(&ServerPolicy::of(&sample_placement(3)), &policy).await;
    let change = gateway.apply_next().await.change;
    assert_eq!((change.vips.len(), change.endpoints.len()), (0, 1));
}

#[tokio::test]
async fn a_damaged_cache_is_reported_and_ignored() {
    let policy = ServerPolicy::of(&sample_placement(2));
    let pair = Pair::synced(&policy).await;
    pair.gateway.stop().await;
    let cache = pair.dir.path().join("policy.cache");
    let mut bytes = std::fs::read(&cache).unwrap();
    bytes[50] ^= 1;
    std::fs::write(&cache, bytes).unwrap();

    let mut server = Server::start();
    let (mut gateway, cached) = Gateway::start(plain_server(server.port, pair.dir.path()));
    assert!(cached.is_none());
    let status = gateway.status.load_full();
    let expected = format!("{} was ignored: record 1 is corrupt: wrong fingerprint", cache.display());
    assert_eq!((status.cache_error.as_deref(), status.confirmed_at), (Some(&*expected), None));

    // The next update rewrites it.
    let mut stream = server.accept_stream().await;
    assert!(stream.subscriptions().await.iter().all(|request| request.initial_resource_versions.is_empty()));
    stream.send_diff(&policy, &ServerPolicy::default()).await;
    gateway.apply_next().await;
    stream.expect_ack().await;
    assert_eq!(gateway.status.load().cache_error, None);
    gateway.stop().await;
    let (_, cached) = Gateway::start(plain_server(server.port, pair.dir.path()));
    assert_eq!(cached.unwrap().change.version, policy.version);
}

#[tokio::test]
async fn a_cache_with_an_invalid_resource_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("policy.cache");
    let invalid = StoredResource { version: "1".to_owned(), body: b"\xff".to_vec().into() };
    let resources = [(key(Kind::Vip, "203.0.113.1"), invalid)].into();
    Cache::open(&cache).unwrap().0.append(vec![], &resources).unwrap();
    let (gateway, cached) = Gateway::start(plain_server(1, dir.path()));
    assert!(cached.is_none());
    let status = gateway.status.load_full();
    let error = status.cache_error.clone().unwrap();
    assert!(error.contains(" was ignored: resource Vip 203.0.113.1: is not a valid Vip: "), "{error}");
    assert_eq!(status.confirmed_at, None);
}

/// The discarded content doesn't reappear.
#[tokio::test]
async fn a_discarded_cache_is_rewritten() {
    let (old, new) = (ServerPolicy::of(&sample_placement(9)), ServerPolicy::of(&sample_placement(2)));
    let pair = Pair::synced(&old).await;
    pair.gateway.stop().await;
    let mut server = Server::start();
    let (sender, events) = mpsc::channel(4);
    let config = plain_server(server.port, pair.dir.path());
    let (mut client, cached) = Client::open(gateway_locality(), config.clone(), sender);
    assert_eq!(cached.unwrap().change.endpoints.len(), 9);
    client.discard_cached("an address is this gateway's own");
    let status = client.status();
    let error = status.load().cache_error.clone().unwrap();
    assert!(error.ends_with("policy.cache was ignored: an address is this gateway's own"), "{error}");
    let mut gateway = Gateway { events, status, task: tokio::spawn(client.run()) };
    let mut stream = server.accept_stream().await;
    assert!(stream.subscriptions().await.iter().all(|request| request.initial_resource_versions.is_empty()));
    stream.send_diff(&new, &ServerPolicy::default()).await;
    gateway.apply_next().await;
    stream.expect_ack().await;
    gateway.stop().await;
    let (_, cached) = Gateway::start(config);
    assert_eq!(cached.unwrap().change.endpoints.len(), 2);
}

/// Updates are applied without the cache, too.
#[tokio::test]
async fn a_write_error_of_the_cache_is_reported() {
    let (one, two) = (ServerPolicy::of(&sample_placement(1)), ServerPolicy::of(&sample_placement(2)));
    let mut pair = Pair::new().await;
    let (dir, cache) = (pair.dir.path(), pair.dir.path().join("policy.cache"));
    std::fs::remove_dir_all(dir).unwrap();
    pair.stream.send_diff(&one, &ServerPolicy::default()).await;
    pair.gateway.apply_next().await;
    for _ in SENT_KINDS {
        pair.stream.expect_ack().await;
    }
    let error = pair.gateway.status.load().cache_error.clone().unwrap();
    assert_eq!(error, format!("{}: No such file or directory (os error 2)", cache.display()));
    assert!(pair.gateway.status.load().confirmed_at.is_some());
    // Once the directory exists again, the next update writes all resources.
    std::fs::create_dir(dir).unwrap();
    pair.stream.send_diff(&two, &one).await;
    pair.gateway.apply_next().await;
    pair.stream.expect_ack().await;
    assert_eq!(pair.gateway.status.load().cache_error, None);
    pair.gateway.stop().await;
    let CacheContents::Policy(resources, _) = Cache::open(&cache).unwrap().1 else { panic!("no policy") };
    assert_eq!(resources, two.resources);
}

#[tokio::test]
async fn a_locked_cache_is_reported_and_not_used() {
    let pair = Pair::synced(&ServerPolicy::of(&sample_placement(1))).await;
    let (sender, _events) = mpsc::channel(4);
    let config = plain_server(pair.server.port, pair.dir.path());
    let opened = tokio::task::spawn_blocking(|| Client::open(GatewayLocality::named("g2"), config, sender));
    let (client, cached) = opened.await.unwrap();
    assert!(cached.is_none());
    let error = client.status().load().cache_error.clone().unwrap();
    assert!(error.contains("in use by another process"), "{error}");
}
