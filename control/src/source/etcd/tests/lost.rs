//! What goes wrong with etcd loses nothing.

use super::*;

#[tokio::test]
async fn a_deletion_that_was_compacted_meanwhile_is_told() {
    let mut server = Server::running().await;
    for key in ["stays", "goes"] {
        server.put(&format!("/vipgate/Service/a/{key}"), "1").await;
    }
    let mut listener = Listener::to([server.endpoint()]);
    assert_eq!(listener.whole().await.changed.len(), 2);
    server.put("/vipgate/Service/a/stays", "0").await;
    server.put("/vipgate/Service/a/stays", "1").await;
    // Two changes, or both in one, as etcd likes.
    while listener.change().await.changed.last().is_none_or(|(_, text)| *text != Ok("1".to_owned())) {}
    server.kill();
    let reason = listener.lost().await;
    assert!(reason.contains(&server.endpoint()), "{reason}");
    // Where the follower doesn't look.
    let place = server.move_to(None);
    server.start().await;
    server.delete("/vipgate/Service/a/goes").await;
    server.put("/vipgate/Service/a/comes", "2").await;
    server.compact().await;
    server.kill();
    server.move_to(Some(place));
    server.start().await;
    listener.whole().await;
    assert!(listener.knows(&[("/vipgate/Service/a/comes", "2"), ("/vipgate/Service/a/stays", "1")]));
    server.delete("/vipgate/Service/a/stays").await;
    listener.change().await;
    assert!(listener.knows(&[("/vipgate/Service/a/comes", "2")]));
}

#[tokio::test]
async fn a_watch_of_a_compacted_history_fails() {
    let server = Server::running().await;
    let mut member = Member::connect(&server.endpoint(), &Keys::below("/vipgate/")).await.unwrap();
    assert_eq!(member.read().await.unwrap(), []);
    for value in ["1", "2", "3"] {
        server.put("/vipgate/Service/a/one", value).await;
    }
    server.compact().await;
    let failure = match member.watch().await {
        Ok(mut watch) => timeout(LONG, watch.next()).await.unwrap().unwrap_err(),
        Err(failure) => failure,
    };
    assert!(matches!(failure, Failure::Compacted(1)), "{failure}");
}

#[tokio::test]
async fn a_server_that_comes_late_is_found() {
    let mut server = Server::new();
    let mut listener = Listener::to([server.endpoint()]);
    let reason = listener.lost().await;
    assert!(reason.contains(&server.endpoint()) && reason.contains("refused"), "{reason}");
    assert!(reason.contains("source.etcd.endpoints"), "{reason}");
    // Trying again tells nothing new.
    assert!(listener.is_quiet().await);
    server.start().await;
    assert_eq!(listener.whole().await, Update { whole: true, ..Update::default() });
}

#[tokio::test]
async fn a_server_that_says_nothing_is_lost_until_it_goes_on() {
    let server = Server::running().await;
    server.put("/vipgate/Service/a/one", "1").await;
    let mut listener = Listener::to([server.endpoint()]);
    listener.whole().await;
    // From the first change on it is the watch that is followed.
    server.put("/vipgate/Service/a/two", "1").await;
    listener.change().await;
    server.delete("/vipgate/Service/a/two").await;
    listener.change().await;
    server.stop();
    let reason = timeout(Duration::from_secs(13), listener.lost()).await.expect("noticed in time");
    assert!(reason.contains("no answer"), "{reason}");
    server.go_on();
    server.put("/vipgate/Service/a/one", "2").await;
    listener.whole().await;
    // If it was read before the put, the put is told.
    if !listener.knows(&[("/vipgate/Service/a/one", "2")]) {
        listener.change().await;
    }
    assert!(listener.knows(&[("/vipgate/Service/a/one", "2")]));
}

#[tokio::test]
async fn a_server_that_is_silent_for_a_moment_is_not_lost() {
    let server = Server::running().await;
    let mut listener = Listener::to([server.endpoint()]);
    listener.whole().await;
    server.put("/vipgate/Service/a/one", "0").await;
    listener.change().await;
    server.stop();
    sleep(Duration::from_secs(1)).await;
    server.go_on();
    server.put("/vipgate/Service/a/one", "1").await;
    assert_eq!(listener.change().await.changed, good(&[("/vipgate/Service/a/one", "1")]));
}

#[tokio::test]
async fn a_server_that_forgot_everything_is_read_again() {
    let mut server = Server::running().await;
    for value in ["1", "2", "3"] {
        server.put("/vipgate/Service/a/old", value).await;
    }
    let mut listener = Listener::to([server.endpoint()]);
    listener.whole().await;
    server.kill();
    server.wipe();
    server.start().await;
    assert!(listener.whole().await.changed.is_empty());
    // At a revision that the old history had, too.
    server.put("/vipgate/Service/a/new", "1").await;
    assert_eq!(listener.change().await.changed, good(&[("/vipgate/Service/a/new", "1")]));
    assert!(listener.knows(&[("/vipgate/Service/a/new", "1")]));
}

#[tokio::test]
async fn a_history_that_is_shorter_than_it_was_is_not_followed() {
    let mut server = Server::running().await;
    server.put("/vipgate/Service/a/one", "1").await;
    let mut other = Server::running().await;
    let mut member = Member::connect(&server.endpoint(), &Keys::below("/vipgate/")).await.unwrap();
    member.read().await.unwrap();
    // The client connects again by itself, as it would through a proxy that found another etcd.
    server.kill();
    other.kill();
    other.move_to(Some(server.move_to(None)));
    other.start().await;
    let failure = timeout(LONG, member.silence()).await.unwrap();
    assert!(matches!(failure, Failure::Replaced), "{failure}");
    assert!(matches!(member.watch().await, Err(Failure::Replaced)));
    assert!(matches!(member.read().await, Err(Failure::Replaced)));
}

#[tokio::test]
async fn a_member_without_a_leader_is_lost_until_there_is_one() {
    let mut members = Server::cluster(2);
    members.iter_mut().for_each(Server::spawn);
    for member in &members {
        member.answers().await;
    }
    members[0].put("/vipgate/Service/a/one", "1").await;
    let mut listener = Listener::to([members[0].endpoint()]);
    listener.whole().await;
    members[1].kill();
    let reason = listener.lost().await;
    assert!(reason.contains("no leader") || reason.contains("no answer"), "{reason}");
    members[1].spawn();
    listener.whole().await;
    assert!(listener.knows(&[("/vipgate/Service/a/one", "1")]));
}

#[tokio::test]
async fn another_member_takes_over() {
    let mut members = Server::cluster(3);
    members.iter_mut().for_each(Server::spawn);
    for member in &members {
        member.answers().await;
    }
    members[0].put("/vipgate/Service/a/one", "1").await;
    let mut listener = Listener::to(members.iter().map(Server::endpoint).collect::<Vec<_>>());
    listener.whole().await;
    // Which one is followed is not known: with each of them gone once, it was.
    for dead in 0..3 {
        members[dead].kill();
        let alive = (dead + 1) % 3;
        members[alive].answers().await;
        let value = dead.to_string();
        members[alive].put("/vipgate/Service/a/one", value.clone()).await;
        while !listener.knows(&[("/vipgate/Service/a/one", &value)]) {
            listener.next().await;
        }
        members[dead].start().await;
    }
}

#[tokio::test]
async fn endpoints_that_no_member_can_have_are_named() {
    for (endpoints, complaint) in [
        (vec![], "name one"),
        (vec!["https://127.0.0.1:2379"], "https://127.0.0.1:2379: https endpoints are not supported"),
        (vec!["HTTPS://127.0.0.1:2379", "http://a b"], "http://a b: is no URL of the form"),
    ] {
        let endpoints: Vec<String> = endpoints.into_iter().map(String::from).collect();
        let mut listener = Listener::to(endpoints);
        let reason = listener.lost().await;
        assert!(reason.contains(complaint), "{reason}");
    }
}

#[tokio::test]
async fn endpoints_that_do_not_answer_are_no_loss_while_one_does() {
    let server = Server::running().await;
    let dead = format!("http://127.0.0.1:{}", free_port());
    let mut listener = Listener::to([dead, "https://127.0.0.1:2379".into(), server.endpoint()]);
    let Event::Update(update) = listener.next().await else { panic!("lost") };
    assert!(update.whole);
}
