use kube::core::Status;

use super::*;

#[test]
fn a_status_is_applied_to_its_object_alone_and_to_the_version_that_it_follows_from() {
    let of = |kind: Kind, manifest: &str, version, status| {
        Write::status("m", &ObjectReference::of_manifest(kind, manifest, &"u".into()), version, status).document
    };
    let pool = of(Kind::AddressPool, "AddressPool/public", None, Some(json!({"used": 1})));
    let expected = json!({
        "apiVersion": "vipgate.io/v1alpha1", "kind": "AddressPool",
        "metadata": {"name": "public", "uid": "u"}, "status": {"used": 1},
    });
    assert_eq!(pool, expected);
    let service = of(Kind::Service, "Service/t/web", Some("7"), None);
    let metadata = json!({"name": "web", "namespace": "t", "uid": "u", "resourceVersion": "7"});
    assert_eq!(service, json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata}));
}

#[test]
fn errors_say_whether_another_plan_or_a_person_must_resolve_them() {
    let of = |code| {
        let status = Status { code, message: "why".to_owned(), ..Status::default() };
        WriteError::of(&RequestError::Failed(Box::new(kube::Error::Api(status.boxed()))))
    };
    for code in [404, 409] {
        assert_eq!(of(code), WriteError::Conflict);
    }
    assert!(matches!(of(401), WriteError::Denied(_)));
    assert!(matches!(of(403), WriteError::Denied(reason) if reason.contains("why")));
    assert!(matches!(of(422), WriteError::Refused(_)));
    for code in [429, 500, 504] {
        assert!(matches!(of(code), WriteError::Unknown(_)), "{code}");
    }
    assert!(matches!(WriteError::of(&RequestError::NoResponse(TIMEOUT)), WriteError::Unknown(_)));
}

#[test]
fn one_namespace_delays_no_other_and_what_is_urgent_is_first() {
    let writes = [(false, "a", 0), (true, "a", 1), (true, "a", 2), (true, "a", 3), (true, "b", 4), (false, "c", 5)];
    let ordered = in_turns(writes.to_vec(), |(is_urgent, namespace, _)| (*is_urgent, (*namespace).to_owned()));
    assert_eq!(ordered.iter().map(|(.., number)| *number).collect::<Vec<_>>(), [1, 4, 2, 3, 0, 5]);
}

#[tokio::test]
async fn nothing_is_sent_without_a_lease_that_outlasts_the_write_nor_while_the_server_stops() {
    // A kubeconfig that isn't there: whatever gets as far as a connection fails for that.
    let source: KubernetesSource = serde_json::from_str("{\"kubeconfig\": \"/nonexistent\"}").unwrap();
    let (leadership, stop) = (watch::Sender::new(None), watch::Sender::new(false));
    let writer = KubeWriter::new(source, leadership.subscribe(), stop.subscribe());
    let write = Write::event("m", json!({"metadata": {"name": "e", "namespace": "t"}}));
    assert_eq!(writer.apply(&write).await.err(), Some(WriteError::NotLeader));
    leadership.send_replace(Some(Instant::now() + TIMEOUT * 9 / 10));
    assert!(writer.leads());
    assert_eq!(writer.apply(&write).await.err(), Some(WriteError::NotLeader));
    leadership.send_replace(Some(Instant::now() + 60 * TIMEOUT));
    assert!(matches!(writer.apply(&write).await.err(), Some(WriteError::Unknown(_))));
    stop.send_replace(true);
    assert_eq!(writer.apply(&write).await.err(), Some(WriteError::NotLeader));
}
