//! Failures of etcd lose no update.

use super::*;

#[tokio::test]
async fn a_compacted_deletion_is_detected() {
    let mut server = EtcdServer::running().await;
    for key in ["kept", "deleted"] {
        server.put(&format!("/vipgate/Service/a/{key}"), "1").await;
    }
    let mut listener = TestClient::connect([server.endpoint()]);
    assert_eq!(listener.full_update().await.changed.len(), 2);
    server.put("/vipgate/Service/a/kept", "0").await;
    server.put("/vipgate/Service/a/kept", "1").await;
    // etcd sends one or two updates.
    while listener.change().await.changed.last().is_none_or(|(_, text)| *text != Ok("1".into())) {}
    server.kill();
    let reason = listener.unreachable().await;
    assert!(reason.contains(&server.endpoint()), "{reason}");
    // On another port, so that the task doesn't see the changes.
    let port = server.set_client_port(None);
    server.start().await;
    server.delete("/vipgate/Service/a/deleted").await;
    server.put("/vipgate/Service/a/added", "2").await;
    server.compact().await;
    server.kill();
    server.set_client_port(Some(port));
    server.start().await;
    listener.full_update().await;
    assert!(listener.has(&[("/vipgate/Service/a/added", "2"), ("/vipgate/Service/a/kept", "1")]));
    server.delete("/vipgate/Service/a/kept").await;
    listener.change().await;
    assert!(listener.has(&[("/vipgate/Service/a/added", "2")]));
}

#[tokio::test]
async fn a_watch_of_a_compacted_history_fails() {
    let server = EtcdServer::running().await;
    let mut member = Member::connect(&server.endpoint(), &KeyRange::with_prefix("/vipgate/")).await.unwrap();
    assert_eq!(member.list().await.unwrap(), []);
    for value in ["1", "2", "3"] {
        server.put("/vipgate/Service/a/one", value).await;
    }
    server.compact().await;
    let error = match member.watch().await {
        Ok(mut watch) => timeout(TEST_TIMEOUT, watch.next()).await.unwrap().unwrap_err(),
        Err(error) => error,
    };
    assert!(matches!(error, EtcdError::Compacted(1)), "{error}");
}

#[tokio::test]
async fn a_server_that_starts_later_is_used() {
    let mut server = EtcdServer::new();
    let mut listener = TestClient::connect([server.endpoint()]);
    let reason = listener.unreachable().await;
    assert!(reason.contains(&server.endpoint()) && reason.contains("refused"), "{reason}");
    assert!(reason.contains("source.etcd.endpoints"), "{reason}");
    // Retries with the same error send no further event.
    assert!(listener.is_quiet().await);
    server.start().await;
    assert_eq!(listener.full_update().await, SourceUpdate { full: true, ..SourceUpdate::default() });
}

#[tokio::test]
async fn an_unresponsive_server_is_unreachable_until_it_resumes() {
    let server = EtcdServer::running().await;
    server.put("/vipgate/Service/a/one", "1").await;
    let mut listener = TestClient::connect([server.endpoint()]);
    listener.full_update().await;
    // After the first change the watch is open.
    server.put("/vipgate/Service/a/two", "1").await;
    listener.change().await;
    server.delete("/vipgate/Service/a/two").await;
    listener.change().await;
    server.suspend();
    let reason = timeout(Duration::from_secs(13), listener.unreachable()).await.expect("detected in time");
    assert!(reason.contains("no response"), "{reason}");
    server.resume();
    server.put("/vipgate/Service/a/one", "2").await;
    listener.full_update().await;
    // If the listing preceded the put, the put is a change.
    if !listener.has(&[("/vipgate/Service/a/one", "2")]) {
        listener.change().await;
    }
    assert!(listener.has(&[("/vipgate/Service/a/one", "2")]));
}

#[tokio::test]
async fn a_briefly_unresponsive_server_stays_reachable() {
    let server = EtcdServer::running().await;
    let mut listener = TestClient::connect([server.endpoint()]);
    listener.full_update().await;
    server.put("/vipgate/Service/a/one", "0").await;
    listener.change().await;
    server.suspend();
    sleep(Duration::from_secs(1)).await;
    server.resume();
    server.put("/vipgate/Service/a/one", "1").await;
    assert_eq!(listener.change().await.changed, ok_texts(&[("/vipgate/Service/a/one", "1")]));
}

#[tokio::test]
async fn a_server_with_wiped_data_is_listed_again() {
    let mut server = EtcdServer::running().await;
    for value in ["1", "2", "3"] {
        server.put("/vipgate/Service/a/old", value).await;
    }
    let mut listener = TestClient::connect([server.endpoint()]);
    listener.full_update().await;
    server.kill();
    server.wipe();
    server.start().await;
    assert!(listener.full_update().await.changed.is_empty());
    // At a revision that the old history also had.
    server.put("/vipgate/Service/a/new", "1").await;
    assert_eq!(listener.change().await.changed, ok_texts(&[("/vipgate/Service/a/new", "1")]));
    assert!(listener.has(&[("/vipgate/Service/a/new", "1")]));
}

#[tokio::test]
async fn a_replaced_history_is_detected() {
    let mut server = EtcdServer::running().await;
    server.put("/vipgate/Service/a/one", "1").await;
    let mut other = EtcdServer::running().await;
    let mut member = Member::connect(&server.endpoint(), &KeyRange::with_prefix("/vipgate/")).await.unwrap();
    member.list().await.unwrap();
    // The client reconnects by itself, as through a proxy that selects another etcd.
    server.kill();
    other.kill();
    other.set_client_port(Some(server.set_client_port(None)));
    other.start().await;
    let error = timeout(TEST_TIMEOUT, member.until_unhealthy()).await.unwrap();
    assert!(matches!(error, EtcdError::Replaced), "{error}");
    assert!(matches!(member.watch().await, Err(EtcdError::Replaced)));
    assert!(matches!(member.list().await, Err(EtcdError::Replaced)));
}

#[tokio::test]
async fn a_member_without_a_leader_is_unreachable() {
    let mut members = EtcdServer::cluster(2);
    members.iter_mut().for_each(EtcdServer::spawn);
    for member in &members {
        member.wait_ready().await;
    }
    members[0].put("/vipgate/Service/a/one", "1").await;
    let mut listener = TestClient::connect([members[0].endpoint()]);
    listener.full_update().await;
    members[1].kill();
    let reason = listener.unreachable().await;
    assert!(reason.contains("no leader") || reason.contains("no response"), "{reason}");
    members[1].spawn();
    listener.full_update().await;
    assert!(listener.has(&[("/vipgate/Service/a/one", "1")]));
}

#[tokio::test]
async fn another_member_is_used_after_a_failure() {
    let mut members = EtcdServer::cluster(3);
    members.iter_mut().for_each(EtcdServer::spawn);
    for member in &members {
        member.wait_ready().await;
    }
    members[0].put("/vipgate/Service/a/one", "1").await;
    let mut listener = TestClient::connect(members.iter().map(EtcdServer::endpoint).collect::<Vec<_>>());
    listener.full_update().await;
    // The member in use isn't known, so each of them is killed once.
    for dead in 0..3 {
        members[dead].kill();
        let alive = (dead + 1) % 3;
        members[alive].wait_ready().await;
        let value = dead.to_string();
        members[alive].put("/vipgate/Service/a/one", value.clone()).await;
        while !listener.has(&[("/vipgate/Service/a/one", &value)]) {
            listener.next().await;
        }
        members[dead].start().await;
    }
}

#[tokio::test]
async fn invalid_endpoints_are_reported() {
    for (endpoints, message) in [
        (vec![], "no endpoints configured"),
        (vec!["https://127.0.0.1:2379"], "https://127.0.0.1:2379: https endpoints are not supported"),
        (vec!["HTTPS://127.0.0.1:2379", "http://a b"], "http://a b: not a URL of the form"),
    ] {
        let endpoints: Vec<String> = endpoints.into_iter().map(String::from).collect();
        let mut listener = TestClient::connect(endpoints);
        let reason = listener.unreachable().await;
        assert!(reason.contains(message), "{reason}");
    }
}

#[tokio::test]
async fn one_reachable_endpoint_is_enough() {
    let server = EtcdServer::running().await;
    let dead = format!("http://127.0.0.1:{}", free_port());
    let mut listener = TestClient::connect([dead, "https://127.0.0.1:2379".into(), server.endpoint()]);
    let SourceEvent::Update(update) = listener.next().await else { panic!("unreachable") };
    assert!(update.full);
}
