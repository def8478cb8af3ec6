//! What stands in etcd is told, all and in order.

use super::*;

#[test]
fn a_prefix_is_a_range_of_keys() {
    let range = |prefix| format!("{:?}", Keys::below(prefix));
    assert_eq!(range("/a/"), format!("Keys {{ first: {:?}, end: {:?} }}", b"/a/", b"/a0"));
    assert_eq!(range("ä"), format!("Keys {{ first: {:?}, end: {:?} }}", [0xc3, 0xa4], [0xc3, 0xa5]));
    assert_eq!(range(""), "Keys { first: [0], end: [0] }");
}

#[tokio::test]
async fn all_is_told_first_then_what_changes() {
    let server = Server::running().await;
    server.put("/vipgate/Service/a/one", "1").await;
    server.put("/vipgate/Service/a/two", "2").await;
    server.put("/vipgate0", "after the prefix").await;
    server.put("/vipgat", "before it").await;
    let mut listener = Listener::to([server.endpoint()]);
    let all = good(&[("/vipgate/Service/a/one", "1"), ("/vipgate/Service/a/two", "2")]);
    assert_eq!(listener.next().await, Event::Update(Update { whole: true, changed: all, ..Update::default() }));
    server.put("/vipgate0", "still after it").await;
    server.put("/vipgate/Service/a/one", "3").await;
    let changed = good(&[("/vipgate/Service/a/one", "3")]);
    assert_eq!(listener.change().await, Update { changed, ..Update::default() });
    server.delete("/vipgate/Service/a/two").await;
    assert_eq!(listener.change().await, Update { gone: vec!["/vipgate/Service/a/two".into()], ..Update::default() });
    server.put("/vipgate/Service/a/two", "").await;
    assert_eq!(listener.change().await.changed, good(&[("/vipgate/Service/a/two", "")]));
    assert!(listener.is_quiet().await);
}

#[tokio::test]
async fn a_transaction_is_one_update() {
    let server = Server::running().await;
    let key = |number| format!("/vipgate/Service/a/{number:03}");
    server.fill((0..50).map(|number| (key(number), "old".into()))).await;
    let mut listener = Listener::to([server.endpoint()]);
    assert_eq!(listener.whole().await.changed.len(), 50);
    let puts = (50..150).map(|number| TxnOp::put(key(number), vec![b'x'; 10_000], None));
    let deletes = [TxnOp::delete(key(0), None), TxnOp::delete(key(1), None)];
    server.transaction(puts.chain(deletes).collect::<Vec<_>>()).await;
    let update = listener.change().await;
    assert_eq!((update.changed.len(), update.gone), (100, vec![key(0).into(), key(1).into()]));
}

#[tokio::test]
async fn of_several_events_of_a_key_the_last_counts() {
    let server = Server::running().await;
    for key in ["a", "b", "c"] {
        server.put(key, "1").await;
        server.put(key, "2").await;
    }
    server.delete("b").await;
    server.delete("c").await;
    server.put("c", "3").await;
    // Who asks for the past is told it in one response.
    let past = WatchOptions::new().with_all_keys().with_start_revision(1);
    let mut watch = server.client().await.watch("", Some(past)).await.unwrap();
    let events = loop {
        let response = timeout(LONG, watch.message()).await.unwrap().unwrap().unwrap();
        if !response.events().is_empty() {
            break response.events().to_vec();
        }
    };
    assert_eq!(events.len(), 9);
    let expected =
        Update { whole: false, changed: good(&[("a", "2"), ("c", "3")]), gone: vec!["b".into()], hidden: vec![] };
    assert_eq!(text::update(&events), expected);
}

#[tokio::test]
async fn thousands_of_keys_and_large_ones_are_read() {
    let server = Server::running().await;
    let mut listener = Listener::to([server.endpoint()]);
    assert_eq!(listener.whole().await, Update { whole: true, ..Update::default() });
    drop(listener);
    // The first page is larger than what a client of gRPC takes by default.
    let value = |number| "v".repeat(if number < 500 { 10_000 } else { number });
    server.fill((0..5_000).map(|number| (format!("/vipgate/Service/a/{number:04}"), value(number)))).await;
    let mut listener = Listener::to([server.endpoint()]);
    let update = listener.whole().await;
    assert_eq!(update.changed.len(), 5_000);
    for (number, (name, text)) in update.changed.iter().enumerate() {
        assert_eq!(**name, *format!("/vipgate/Service/a/{number:04}"));
        assert_eq!(text.as_deref(), Ok(value(number).as_str()));
    }
    server.put("/vipgate/Service/b/next", "text").await;
    assert_eq!(listener.change().await.changed.len(), 1);
}

#[tokio::test]
async fn what_is_written_together_is_never_told_apart() {
    let server = Server::running().await;
    let (left, right) = ("/vipgate/Service/a/left", "/vipgate/Service/z/right");
    // Between the two there is more than a page.
    server.fill((0..1200).map(|number| (format!("/vipgate/Service/m/{number}"), String::new()))).await;
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
            let mut listener = Listener::to([server.endpoint()]);
            for _ in 0..10 {
                listener.next().await;
                assert_eq!(listener.texts[left], listener.texts[right]);
                if listener.texts[left] == Ok("last".into()) {
                    break;
                }
            }
        }
        let mut listener = Listener::to([server.endpoint()]);
        while listener.texts.get(left) != Some(&Ok("last".into())) {
            listener.next().await;
            assert_eq!(listener.texts[left], listener.texts[right]);
        }
    };
    tokio::join!(writer, reader);
}

#[tokio::test]
async fn what_is_no_utf8_has_a_reason() {
    let server = Server::running().await;
    server.put("/vipgate/Service/a/value", b"kind: \xff".to_vec()).await;
    let mut listener = Listener::to([server.endpoint()]);
    let update = listener.whole().await;
    let reason = update.changed[0].1.as_ref().unwrap_err();
    assert!(reason.contains("value isn't UTF-8 (byte 6)"), "{reason}");
    server.put("/vipgate/Service/a/value", "kind: Service").await;
    assert_eq!(listener.change().await.changed, good(&[("/vipgate/Service/a/value", "kind: Service")]));
    server.client().await.put(b"/vipgate/\xfe".to_vec(), "text", None).await.unwrap();
    let update = listener.change().await;
    assert_eq!(*update.changed[0].0, *"/vipgate/\u{fffd}");
    let reason = update.changed[0].1.as_ref().unwrap_err();
    assert!(reason.contains("key isn't UTF-8 (byte 9)"), "{reason}");
    server.client().await.delete(b"/vipgate/\xfe".to_vec(), None).await.unwrap();
    assert_eq!(listener.change().await.gone, ["/vipgate/\u{fffd}".into()]);
}

#[tokio::test]
async fn a_manifest_under_the_key_of_another_object_has_a_reason() {
    let server = Server::running().await;
    let manifest = "apiVersion: v1\nkind: Service\nmetadata: {name: two, namespace: a}\n";
    server.put("/vipgate/Service/a/one", manifest).await;
    let mut listener = Listener::to([server.endpoint()]);
    let update = listener.whole().await;
    let reason = update.changed[0].1.as_ref().unwrap_err();
    assert!(reason.contains("the key is of Service a/one, but the manifest is Service a/two"), "{reason}");
    server.put("/vipgate/Service/a/two", manifest).await;
    assert_eq!(listener.change().await.changed, good(&[("/vipgate/Service/a/two", manifest)]));
}

#[tokio::test]
async fn it_ends_when_nobody_listens() {
    let server = Server::running().await;
    let mut watching = Listener::to([server.endpoint()]);
    watching.whole().await;
    let mut waiting = Listener::to([format!("http://127.0.0.1:{}", free_port())]);
    waiting.lost().await;
    for listener in [watching, waiting] {
        drop(listener.events);
        timeout(Duration::from_secs(5), listener.follower).await.expect("it ends").unwrap();
    }
}
