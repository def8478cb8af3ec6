use super::*;

#[test]
fn a_status_is_applied_to_its_object_alone_and_to_the_version_that_it_follows_from() {
    let of = |kind: Kind, manifest: &str, version, status| {
        let object = ObjectReference::of_manifest(kind, manifest, &"u".into());
        let write = Write::status(Purpose::Addresses, object, version, status);
        (write.title(), write.document)
    };
    let pool = of(Kind::AddressPool, "AddressPool/public", None, Some(json!({"used": 1})));
    let expected = json!({
        "apiVersion": "vipgate.io/v1alpha1", "kind": "AddressPool",
        "metadata": {"name": "public", "uid": "u"}, "status": {"used": 1},
    });
    assert_eq!(pool, ("AddressPool public".to_owned(), expected));
    let service = of(Kind::Service, "Service/t/web", Some("7"), None);
    let metadata = json!({"name": "web", "namespace": "t", "uid": "u", "resourceVersion": "7"});
    let expected = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata});
    assert_eq!(service, ("Service t/web".to_owned(), expected));
}

#[test]
fn one_namespace_delays_no_other_and_what_is_urgent_is_first() {
    let writes = [(false, "a", 0), (true, "a", 1), (true, "a", 2), (true, "a", 3), (true, "b", 4), (false, "c", 5)];
    let ordered = in_turns(writes.to_vec(), |(is_urgent, namespace, _)| (*is_urgent, (*namespace).to_owned()));
    assert_eq!(ordered.iter().map(|(.., number)| *number).collect::<Vec<_>>(), [1, 4, 2, 3, 0, 5]);
}

/// A writer that leads, by a kubeconfig that isn't there: whatever gets as far as a connection fails for that.
fn writer() -> (KubeWriter, watch::Sender<Leadership>, Tasks) {
    let source = serde_json::from_str("{\"kubeconfig\": \"/nonexistent\"}").unwrap();
    let (leadership, tasks) = (watch::Sender::new(Some(Instant::now() + 60 * TIMEOUT)), Tasks::default());
    let writer = KubeWriter::new(source, leadership.subscribe(), tasks.clone(), Arc::default());
    (writer, leadership, tasks)
}

#[tokio::test]
async fn nothing_is_sent_without_a_lease_that_outlasts_the_write_nor_while_the_server_stops() {
    let (writer, leadership, tasks) = writer();
    let write = Write::event(json!({"metadata": {"name": "e", "namespace": "t"}}));
    assert!(matches!(writer.apply(&write).await.err(), Some(WriteError::Unknown(_))));
    for until in [None, Some(Instant::now() + TIMEOUT * 9 / 10)] {
        leadership.send_replace(until);
        assert_eq!(writer.leads(), until.is_some());
        assert_eq!(writer.apply(&write).await.err(), Some(WriteError::NotLeader));
    }
    leadership.send_replace(Some(Instant::now() + 60 * TIMEOUT));
    tasks.stop(TIMEOUT).await;
    assert_eq!(writer.apply(&write).await.err(), Some(WriteError::NotLeader));
}

#[tokio::test]
async fn of_a_plan_the_first_writes_are_tried_and_those_that_have_failed_not_again_at_once() {
    let (writer, _leadership, _tasks) = writer();
    let plan = || {
        let write = |n: usize| {
            let object = ObjectReference::of_manifest(Kind::EgressPolicy, &format!("EgressPolicy/t/{n}"), &"u".into());
            (n, Write::status(Purpose::Status, object, None, None))
        };
        (0..MAX_WRITES + 2).map(write).collect::<Vec<_>>()
    };
    let applied = writer.apply_all(plan()).await;
    let tried = |applied: &Applied<usize>| applied.outcomes.iter().map(|(n, _)| *n).collect::<Vec<_>>();
    assert_eq!((tried(&applied), applied.retry_after), ((0..MAX_WRITES).collect(), Some(Duration::ZERO)));
    let refused = WriteError::Refused("why".to_owned());
    for (_, write) in plan().iter().take(MAX_WRITES) {
        for _ in 0..9 {
            writer.failures().note(write, Some(&refused), Instant::now());
        }
    }
    let applied = writer.apply_all(plan()).await;
    assert_eq!(tried(&applied), [MAX_WRITES, MAX_WRITES + 1]);
    assert!(applied.retry_after.is_some_and(|wait| wait < TIMEOUT), "{:?}", applied.retry_after);
    assert_eq!(writer.apply_all(Vec::<((), Write)>::new()).await.retry_after, None);
}
