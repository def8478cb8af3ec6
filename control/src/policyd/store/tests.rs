//! Broken manifests: named, kept apart, their last good version in force, and nobody else is touched.

use super::*;

/// A Service `a/{name}` with a VIP, an endpoint and the annotation: two documents.
fn tenant(name: &str, vip: &str, pod: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\n\
         metadata: {{name: {name}, namespace: a, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec: {{type: LoadBalancer, ports: [{{port: 80}}]}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: {vip}}}]}}}}\n\
         ---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}-1, namespace: a, labels: {{kubernetes.io/service-name: {name}}}}}\n\
         addressType: IPv4\nendpoints: [{{addresses: [{pod}]}}]\n"
    )
}

fn put(name: &str, text: &str) -> Update {
    Update { changed: vec![(name.into(), Ok(text.to_owned()))], ..Update::default() }
}

/// `pod -> VIPs` of every endpoint.
fn bindings(outcome: &Outcome) -> Vec<String> {
    let each = outcome.deal.endpoints.iter().map(|it| {
        let vips: Vec<_> = it.vips.iter().map(ToString::to_string).collect();
        format!("{} -> {}", it.address, vips.join(" "))
    });
    each.collect()
}

fn errors(outcome: &Outcome) -> Vec<String> {
    outcome.complaints.iter().filter(|it| it.is_error()).map(ToString::to_string).collect()
}

/// Two tenants that are fine, compiled once.
fn two() -> Store {
    let mut store = Store::default();
    let changed =
        [("x.yaml", tenant("x", "203.0.113.1", "10.0.0.1")), ("y.yaml", tenant("y", "203.0.113.2", "10.0.0.2"))];
    let changed = changed.into_iter().map(|(name, text)| (name.into(), Ok(text))).collect();
    store.update(Update { whole: true, changed, gone: vec![] });
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    assert!(outcome.faulty.is_empty() && outcome.objects == 4);
    store
}

#[test]
fn a_text_that_is_no_yaml_keeps_what_it_said_and_others_go_on() {
    let mut store = two();
    store.update(put("x.yaml", "kind: [unclosed"));
    store.update(put("y.yaml", &tenant("y", "203.0.113.2", "10.0.0.9")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.9 -> 203.0.113.2"]);
    assert!(errors(&outcome)[0].starts_with("x.yaml:1"), "{:?}", errors(&outcome));
    let names: Vec<String> = outcome.faulty.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["EndpointSlice a/x-1", "Service a/x"]);
    assert!(outcome.faulty.values().all(|faulty| faulty.has_last_good));
    store.update(put("x.yaml", &tenant("x", "203.0.113.3", "10.0.0.1")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.3", "10.0.0.9 -> 203.0.113.2"]);
    assert!(outcome.faulty.is_empty() && errors(&outcome).is_empty());
}

#[test]
fn of_a_text_only_the_broken_document_stays_as_it_was() {
    let mut store = two();
    let text = tenant("x", "203.0.113.7", "10.0.0.1").replace("addressType: IPv4", "addressTyp: IPv4");
    store.update(put("x.yaml", &text));
    let outcome = store.compile();
    assert_eq!(
        bindings(&outcome),
        ["10.0.0.1 -> 203.0.113.7", "10.0.0.2 -> 203.0.113.2"],
        "the Service is new, the slice old"
    );
    assert_eq!(outcome.faulty.len(), 1);
    assert!(errors(&outcome)[0].contains("x.yaml:") && errors(&outcome)[0].contains("addressType"));
}

#[test]
fn what_contradicts_others_is_replaced_by_what_did_not() {
    let mut store = two();
    // A VIP that can't be one: the other tenant's pod.
    store.update(put("x.yaml", &tenant("x", "10.0.0.2", "10.0.0.1")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    let (id, faulty) = outcome.faulty.iter().next().unwrap();
    assert_eq!((id.to_string().as_str(), faulty.has_last_good), ("Service a/x", true));
    assert!(faulty.reasons[0].starts_with("x.yaml:5: status.loadBalancer.ingress[0].ip:"), "{:?}", faulty.reasons);
    // It stays so as long as it is written so, whatever else happens.
    store.update(put("z.yaml", &tenant("z", "203.0.113.5", "10.0.0.5")));
    assert_eq!(bindings(&store.compile()).len(), 3);
    let outcome = store.compile();
    assert_eq!(bindings(&outcome)[0], "10.0.0.1 -> 203.0.113.1");
    assert_eq!(outcome.faulty.len(), 1);
    // When the contradiction goes, what is written counts.
    store.update(Update { gone: vec!["y.yaml".into()], ..Update::default() });
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 10.0.0.2", "10.0.0.5 -> 203.0.113.5"]);
    assert!(outcome.faulty.is_empty());
}

#[test]
fn what_was_never_good_is_left_out_with_what_depends_on_it() {
    let mut store = two();
    store.update(put("z.yaml", &tenant("z", "127.0.0.1", "10.0.0.3")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    let (id, faulty) = outcome.faulty.iter().next().unwrap();
    assert_eq!((id.to_string().as_str(), faulty.has_last_good), ("Service a/z", false));
}

#[test]
fn a_text_that_is_gone_takes_its_objects_along_and_one_that_cannot_be_read_does_not() {
    let mut store = two();
    store.update(Update {
        changed: vec![("x.yaml".into(), Err("can't be read: no such luck".into()))],
        ..Update::default()
    });
    let outcome = store.compile();
    assert_eq!(bindings(&outcome).len(), 2);
    assert_eq!(errors(&outcome), ["x.yaml: can't be read: no such luck"]);
    store.update(Update { gone: vec!["x.yaml".into()], ..Update::default() });
    assert_eq!(bindings(&store.compile()), ["10.0.0.2 -> 203.0.113.2"]);
}

#[test]
fn an_object_that_is_written_twice_counts_once() {
    let mut store = two();
    store.update(put("z.yaml", &tenant("x", "203.0.113.9", "10.0.0.1")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome)[0], "10.0.0.1 -> 203.0.113.1", "the first text by name has it");
    assert!(errors(&outcome).iter().all(|error| error.contains("is in x.yaml:")), "{:?}", errors(&outcome));
}

#[test]
fn a_source_that_is_suddenly_empty_is_not_believed() {
    let mut store = two();
    store.update(Update { whole: true, ..Update::default() });
    let outcome = store.compile();
    assert_eq!(bindings(&outcome).len(), 2);
    assert_eq!(errors(&outcome), ["source: is empty, but had 2 entries before: they stay in force"]);
    store.update(Update { gone: vec!["x.yaml".into(), "y.yaml".into()], ..Update::default() });
    let outcome = store.compile();
    assert!(bindings(&outcome).is_empty() && outcome.complaints.is_empty(), "taken away one by one, it is meant");
}

/// What each Service is reached at, `name: VIPs, health check`.
fn frontends(outcome: &Outcome) -> Vec<String> {
    let each = outcome.deal.services.iter().map(|it| format!("{}: {:?} {:?}", it.name, it.vips, it.health_port));
    each.collect()
}

/// Two Services want one port: the younger one, which comes first by name, is set aside, and the older one goes on.
#[test]
fn a_service_that_claims_what_an_older_one_has_stays_alone() {
    let local = |name: &str, year: u32, vip: &str, port: u16| {
        tenant(name, vip, &format!("10.0.0.{}", year % 100))
            .replace(
                "namespace: a, annotations",
                &format!("namespace: a, creationTimestamp: \"{year}-01-01T00:00:00Z\", annotations"),
            )
            .replace(
                "LoadBalancer",
                &format!("LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: {port}"),
            )
    };
    for (vip, port, field) in [
        ("203.0.113.1", 30_001, "spec.ports[0].port: TCP port 80 of 203.0.113.1"),
        ("203.0.113.2", 30_000, "spec.healthCheckNodePort: port 30000"),
    ] {
        let mut store = Store::default();
        store.update(put("old.yaml", &local("z", 2020, "203.0.113.1", 30_000)));
        let old = "Service a/z: [203.0.113.1] Some(30000)";
        assert_eq!(frontends(&store.compile()), [old]);
        store.update(put("new.yaml", &local("b", 2021, vip, port)));
        let outcome = store.compile();
        assert_eq!(frontends(&outcome), [old]);
        let (id, faulty) = outcome.faulty.iter().next().unwrap();
        assert_eq!((id.to_string().as_str(), outcome.faulty.len()), ("Service a/b", 1));
        assert!(faulty.reasons[0].contains(field), "{:?}", faulty.reasons);
        // When it claims something else, it is served; when it claims that again, as it was.
        store.update(put("new.yaml", &local("b", 2021, "203.0.113.2", 30_001)));
        let both = ["Service a/b: [203.0.113.2] Some(30001)", old];
        let outcome = store.compile();
        assert_eq!((frontends(&outcome), outcome.faulty.len()), (both.map(str::to_owned).to_vec(), 0));
        store.update(put("new.yaml", &local("b", 2021, vip, port)));
        let outcome = store.compile();
        assert_eq!((frontends(&outcome), outcome.faulty.len()), (both.map(str::to_owned).to_vec(), 1));
    }
}
