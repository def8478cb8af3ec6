//! Full updates and changes are complete and in order.

use super::*;

#[test]
fn a_prefix_is_a_key_range() {
    let range = |prefix| format!("{:?}", KeyRange::with_prefix(prefix));
    assert_eq!(range("/a/"), format!("KeyRange {{ first: {:?}, end: {:?} }}", b"/a/", b"/a0"));
    assert_eq!(range("ä"), format!("KeyRange {{ first: {:?}, end: {:?} }}", [0xc3, 0xa4], [0xc3, 0xa5]));
    assert_eq!(range(""), "KeyRange { first: [0], end: [0] }");
}

#[tokio::test]
async fn a_full_update_is_sent_first_and_then_the_changes() {
    let server = EtcdServer::running().await;
    server.put("/vipgate/Service/a/one", "1").await;
    server.put("/vipgate/Service/a/two", "2").await;
    server.put("/vipgate0", "after the prefix").await;
    server.put("/vipgat", "before it").await;
    let mut listener = TestClient::connect([server.endpoint()]);
    let all = ok_texts(&[("/vipgate/Service/a/one", "1"), ("/vipgate/Service/a/two", "2")]);
    assert_eq!(
        listener.next().await,
        SourceEvent::Update(SourceUpdate { full: true, changed: all, ..SourceUpdate::default() })
    );
    server.put("/vipgate0", "still after it").await;
    server.put("/vipgate/Service/a/one", "3").await;
    let changed = ok_texts(&[("/vipgate/Service/a/one", "3")]);
    assert_eq!(listener.change().await, SourceUpdate { changed, ..SourceUpdate::default() });
    server.delete("/vipgate/Service/a/two").await;
    assert_eq!(
        listener.change().await,
        SourceUpdate { removed: vec!["/vipgate/Service/a/two".into()], ..SourceUpdate::default() }
    );
    server.put("/vipgate/Service/a/two", "").await;
    assert_eq!(listener.change().await.changed, ok_texts(&[("/vipgate/Service/a/two", "")]));
    assert!(listener.is_quiet().await);
}

#[tokio::test]
async fn a_transaction_is_one_update() {
    let server = EtcdServer::running().await;
    let key = |number| format!("/vipgate/Service/a/{number:03}");
    server.put_all((0..50).map(|number| (key(number), "old".into()))).await;
    let mut listener = TestClient::connect([server.endpoint()]);
    assert_eq!(listener.full_update().await.changed.len(), 50);
    let puts = (50..150).map(|number| TxnOp::put(key(number), vec![b'x'; 10_000], None));
    let deletes = [TxnOp::delete(key(0), None), TxnOp::delete(key(1), None)];
    server.transaction(puts.chain(deletes).collect::<Vec<_>>()).await;
    let update = listener.change().await;
    assert_eq!((update.changed.len(), update.removed), (100, vec![key(0).into(), key(1).into()]));
}

#[tokio::test]
async fn the_last_event_of_a_key_wins() {
    let server = EtcdServer::running().await;
    for key in ["a", "b", "c"] {
        server.put(key, "1").await;
        server.put(key, "2").await;
    }
    server.delete("b").await;
    server.delete("c").await;
    server.put("c", "3").await;
    // A watch of past revisions returns them in one response.
    let past = WatchOptions::new().with_all_keys().with_start_revision(1);
    let mut watch = server.client().await.watch("", Some(past)).await.unwrap();
    let events = loop {
        let response = timeout(TEST_TIMEOUT, watch.message()).await.unwrap().unwrap().unwrap();
        if !response.events().is_empty() {
            break response.events().to_vec();
        }
    };
    assert_eq!(events.len(), 9);
    let expected = SourceUpdate {
        full: false,
        changed: ok_texts(&[("a", "2"), ("c", "3")]),
        removed: vec!["b".into()],
        ..SourceUpdate::default()
    };
    assert_eq!(decode::decode_events(&events), expected);
}

#[tokio::test]
async fn thousands_of_keys_and_large_values_are_listed() {
    let server = EtcdServer::running().await;
    let mut listener = TestClient::connect([server.endpoint()]);
    assert_eq!(listener.full_update().await, SourceUpdate { full: true, ..SourceUpdate::default() });
    drop(listener);
    // The first page is larger than gRPC's default message limit.
    let value = |number| "v".repeat(if number < 500 { 10_000 } else { number });
    server.put_all((0..5_000).map(|number| (format!("/vipgate/Service/a/{number:04}"), value(number)))).await;
    let mut listener = TestClient::connect([server.endpoint()]);
    let update = listener.full_update().await;
    assert_eq!(update.changed.len(), 5_000);
    for (number, (name, text)) in update.changed.iter().enumerate() {
        assert_eq!(**name, *format!("/vipgate/Service/a/{number:04}"));
        assert_eq!(*text, Ok(value(number).into()));
    }
    server.put("/vipgate/Service/b/next", "text").await;
    assert_eq!(listener.change().await.changed.len(), 1);
}

#[tokio::test]
async fn a_transaction_is_never_split_between_updates() {
    let server = EtcdServer::running().await;
    let (left, right) = ("/vipgate/Service/a/left", "/vipgate/Service/z/right");
    // The two keys are more than a page apart.
    server.put_all((0..1200).map(|number| (format!("/vipgate/Service/m/{number}"), String::new()))).await;
    let write = async |value: String| {
        server.transaction([TxnOp::put(left, value.clone(), None), TxnOp::put(right, value, None)]).await;
    };
    write("first".into()).await;
    let writer = async {
        for number in 0..300 {
            write(number.to_string()).await;
        }
        write("last".into()).await;
    };
    let reader = async {
        for _ in 0..5 {
            let mut listener = TestClient::connect([server.endpoint()]);
            for _ in 0..10 {
                listener.next().await;
                assert_eq!(listener.texts[left], listener.texts[right]);
                if listener.texts[left] == Ok("last".into()) {
                    break;
                }
            }
        }
        let mut listener = TestClient::connect([server.endpoint()]);
        while listener.texts.get(left) != Some(&Ok("last".into())) {
            listener.next().await;
            assert_eq!(listener.texts[left], listener.texts[right]);
        }
    };
    tokio::join!(writer, reader);
}

#[tokio::test]
async fn keys_and_values_that_are_not_utf8_have_a_reason() {
    let server = EtcdServer::running().await;
    server.put("/vipgate/Service/a/value", b"kind: \xff".to_vec()).await;
    let mut listener = TestClient::connect([server.endpoint()]);
    let update = listener.full_update().await;
    let reason = update.changed[0].1.as_ref().unwrap_err();
    assert!(reason.contains("value isn't UTF-8 (byte 6)"), "{reason}");
    server.put("/vipgate/Service/a/value", "kind: Service").await;
    assert_eq!(listener.change().await.changed, ok_texts(&[("/vipgate/Service/a/value", "kind: Service")]));
    server.client().await.put(b"/vipgate/\xfe".to_vec(), "text", None).await.unwrap();
    let update = listener.change().await;
    assert_eq!(*update.changed[0].0, *"/vipgate/\u{fffd}");
    let reason = update.changed[0].1.as_ref().unwrap_err();
    assert!(reason.contains("key isn't UTF-8 (byte 9)"), "{reason}");
    server.client().await.delete(b"/vipgate/\xfe".to_vec(), None).await.unwrap();
    assert_eq!(listener.change().await.removed, ["/vipgate/\u{fffd}".into()]);
}

#[tokio::test]
async fn a_manifest_that_does_not_match_its_key_has_a_reason() {
    let server = EtcdServer::running().await;
    let manifest = "apiVersion: v1\nkind: Service\nmetadata: {name: two, namespace: a}\n";
    server.put("/vipgate/Service/a/one", manifest).await;
    let mut listener = TestClient::connect([server.endpoint()]);
    let update = listener.full_update().await;
    let reason = update.changed[0].1.as_ref().unwrap_err();
    assert!(reason.contains("the key names Service a/one, but the manifest is Service a/two"), "{reason}");
    server.put("/vipgate/Service/a/two", manifest).await;
    assert_eq!(listener.change().await.changed, ok_texts(&[("/vipgate/Service/a/two", manifest)]));
}

#[tokio::test]
async fn the_task_ends_when_the_receiver_is_dropped() {
    let server = EtcdServer::running().await;
    let mut watching = TestClient::connect([server.endpoint()]);
    watching.full_update().await;
    let mut waiting = TestClient::connect([format!("http://127.0.0.1:{}", free_port())]);
    waiting.unreachable().await;
    for listener in [watching, waiting] {
        drop(listener.events);
        timeout(Duration::from_secs(5), listener.task).await.expect("it ends").unwrap();
    }
}
