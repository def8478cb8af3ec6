//! Restarts with a policy cache.

use std::fs::File;
use std::path::PathBuf;
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
    File::options().write(true).open(&cache).unwrap().set_modified(confirmed_at).unwrap();

    // Before the connection to the server.
    let mut server = Server::start();
    let (mut gateway, cached) = Gateway::start(plain_server(server.port, pair.dir.path()));
    let (update, expected) =
        (cached.unwrap(), whole_policy(&sample_placement(2), &gateway_locality(), &policy.version));
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

/// Although it was acknowledged a moment before.
#[tokio::test]
async fn a_clean_stop_writes_the_last_policy() {
    let policies = [1, 2, 3].map(|endpoints| ServerPolicy::of(&sample_placement(endpoints)));
    let mut pair = Pair::synced(&policies[0]).await;
    for change in policies.windows(2) {
        pair.stream.send_diff(&change[1], &change[0]).await;
        pair.gateway.apply_next().await;
        for _ in ["endpoint", "settings"] {
            pair.stream.expect_ack().await;
        }
    }
    let stopping = Instant::now();
    pair.gateway.stop().await;
    assert!(stopping.elapsed() < CACHE_CLOSE_TIMEOUT, "{:?}", stopping.elapsed());
    assert!(is_cached(pair.dir.path(), &policies[2]));
}

/// A pipe: opening it waits for somebody who opens it, too. On drop it isn't waited for any more.
struct Pipe(PathBuf);

impl Pipe {
    fn replace(path: PathBuf) -> Self {
        let pipe = path.with_extension("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        // At once: the last write may not have opened the file yet to say when it was confirmed.
        std::fs::rename(&pipe, &path).unwrap();
        Self(path)
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // For both, it doesn't wait itself.
        drop(File::options().read(true).write(true).open(&self.0));
    }
}

/// Takes up to 10 s: the next confirmation, and the time after which a write is reported.
#[tokio::test]
async fn a_hanging_disk_delays_no_update_and_no_acknowledgment() {
    let [one, two] = [1, 2].map(|endpoints| ServerPolicy::of(&sample_placement(endpoints)));
    let mut pair = Pair::synced(&one).await;
    wait_cached(pair.dir.path(), &one).await;
    let hanging = Pipe::replace(pair.dir.path().join("policy.cache"));
    let status = pair.gateway.wait_for_status(|status| status.cache_error.is_some()).await;
    assert!(status.cache_error.unwrap().ends_with("not written within 5 s: the disk doesn't respond"));
    let sent = Instant::now();
    pair.stream.send_diff(&two, &one).await;
    assert_eq!(pair.gateway.apply_next().await.change.endpoints.len(), 1);
    assert_eq!((pair.stream.expect_ack().await, pair.stream.expect_ack().await), ("n9".to_owned(), "n10".to_owned()));
    assert!(sent.elapsed() < Duration::from_secs(1), "{:?}", sent.elapsed());
    // Once it responds, the newest state is written.
    drop(hanging);
    wait_cached(pair.dir.path(), &two).await;
    pair.gateway.wait_for_status(|status| status.cache_error.is_none()).await;
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
    let expected = format!("{} was ignored: is truncated or corrupt: wrong fingerprint", cache.display());
    assert_eq!((status.cache_error.as_deref(), status.confirmed_at), (Some(&*expected), None));

    // The next update rewrites it.
    let mut stream = server.accept_stream().await;
    assert!(stream.subscriptions().await.iter().all(|request| request.initial_resource_versions.is_empty()));
    stream.send_diff(&policy, &ServerPolicy::default()).await;
    gateway.apply_next().await;
    stream.expect_ack().await;
    gateway.wait_for_status(|status| status.cache_error.is_none()).await;
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
    Cache::open(&cache).unwrap().0.store(Some(&cache::encode(&resources)), UNIX_EPOCH).unwrap();
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
    let obstacle = dir.join("policy.cache.draft");
    std::fs::create_dir(&obstacle).unwrap();
    pair.stream.send_diff(&one, &ServerPolicy::default()).await;
    pair.gateway.apply_next().await;
    for _ in SENT_KINDS {
        pair.stream.expect_ack().await;
    }
    let status = pair.gateway.wait_for_status(|status| status.cache_error.is_some()).await;
    let error = status.cache_error.unwrap();
    assert!(error.starts_with(&format!("{}: Is a directory", cache.display())), "{error}");
    assert!(status.confirmed_at.is_some());
    // Once it can be written, it has the newest state.
    pair.stream.send_diff(&two, &one).await;
    pair.gateway.apply_next().await;
    pair.stream.expect_ack().await;
    std::fs::remove_dir(&obstacle).unwrap();
    pair.gateway.wait_for_status(|status| status.cache_error.is_none()).await;
    assert!(is_cached(dir, &two));
    pair.gateway.stop().await;
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
    let path = pair.dir.path().join("policy.cache");
    let reason = "is in use by another process: each gateway needs its own";
    assert_eq!(error, format!("policy.server.cache: {}: {reason}", path.display()));
}

#[test]
fn a_path_that_no_cache_can_have_is_named_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.cache");
    std::fs::write(&path, "").unwrap();
    let (inside_a_file, directory) = (path.join("policy.cache"), dir.path().join("directory"));
    std::fs::create_dir(&directory).unwrap();
    for invalid in [&*inside_a_file, &directory, Path::new("/proc/nowhere/policy.cache")] {
        let error = open_cache(invalid).2.unwrap();
        assert!(error.starts_with(&format!("policy.server.cache: {}: ", invalid.display())), "{error}");
    }
}

/// One failed call at the start doesn't cost the next one its policy.
#[tokio::test]
async fn a_cache_that_could_not_be_opened_at_the_start_is_written_all_the_same() {
    let policy = ServerPolicy::of(&sample_placement(2));
    let (dir, mut server) = (tempfile::tempdir().unwrap(), Server::start());
    let directory = dir.path().join("state");
    std::fs::write(&directory, "in the way").unwrap();
    let (mut gateway, cached) = Gateway::start(plain_server(server.port, &directory));
    assert!(cached.is_none() && gateway.status.load().cache_error.is_some());
    std::fs::remove_file(&directory).unwrap();
    let mut stream = server.accept_stream().await;
    stream.subscriptions().await;
    stream.send_diff(&policy, &ServerPolicy::default()).await;
    gateway.apply_next().await;
    wait_cached(&directory, &policy).await;
    gateway.wait_for_status(|status| status.cache_error.is_none()).await;
    gateway.stop().await;
    let (_, cached) = Gateway::start(plain_server(server.port, &directory));
    assert_eq!(cached.unwrap().change.version, policy.version);
}
