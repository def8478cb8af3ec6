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
    let each = outcome.deal.as_ref().unwrap().endpoints.iter().map(|it| {
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
    store.update(Update { whole: true, changed, ..Update::default() });
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

/// Whether all of `two` is in force, and what is said to be wrong with the source.
fn holds_both(store: &mut Store) -> Vec<String> {
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    outcome.unhealthy
}

fn hidden(place: &str, missing: bool) -> Hidden {
    Hidden { place: place.into(), reason: "is missing".into(), missing, named: false }
}

#[test]
fn a_source_that_is_suddenly_empty_is_not_believed_whatever_the_way() {
    let gone = |names: &[&str]| names.iter().map(|name| (*name).into()).collect::<Vec<Arc<str>>>();
    let ways = [
        vec![Update { whole: true, ..Update::default() }],
        vec![Update { gone: gone(&["x.yaml", "y.yaml"]), ..Update::default() }],
        vec![
            put("x.yaml", "apiVersion: v1\nkind: List\nitems: []\n"),
            Update { gone: gone(&["y.yaml"]), ..Update::default() },
        ],
        vec![put("x.yaml", ""), Update { gone: gone(&["y.yaml"]), ..Update::default() }],
        vec![Update { hidden: vec![hidden("x.yaml", true), hidden("y.yaml", true)], ..Update::default() }],
    ];
    for (number, way) in ways.into_iter().enumerate() {
        let mut store = two();
        // In one moment: what is seen in between would be another story.
        let all = way.into_iter().reduce(|mut all, update| {
            all.changed.extend(update.changed);
            all.gone.extend(update.gone);
            all
        });
        store.update(all.unwrap());
        let unhealthy = holds_both(&mut store);
        assert!(
            !unhealthy.is_empty() && unhealthy.iter().any(|it| it.contains("stay in force")),
            "{number}: {unhealthy:?}"
        );
        let accepted = store.accept_empty().unwrap();
        assert_eq!(accepted.texts.iter().map(|(_, objects)| objects).sum::<usize>(), 4, "{number}");
        let outcome = store.compile();
        assert!(bindings(&outcome).is_empty() && outcome.unhealthy.is_empty(), "{number}: {:?}", outcome.unhealthy);
        assert!(store.accept_empty().is_err(), "{number}: nothing is left to accept");
        // It is believed once: what comes then and goes again stays.
        store.update(put("z.yaml", &tenant("z", "203.0.113.5", "10.0.0.5")));
        store.update(put("z.yaml", ""));
        assert_eq!(bindings(&store.compile()), ["10.0.0.5 -> 203.0.113.5"], "{number}");
    }
}

#[test]
fn a_text_that_is_empty_stays_as_it_was_also_beside_others() {
    for blank in ["", "\n", "  \n# nothing\n", "---\n"] {
        let mut store = two();
        store.update(put("x.yaml", blank));
        let unhealthy = holds_both(&mut store);
        assert_eq!(unhealthy, ["x.yaml: is empty: the 2 objects that it had stay in force"], "{blank:?}");
        // What it had goes when another text says it, and when its emptiness is accepted.
        store.update(put("z.yaml", &tenant("x", "203.0.113.7", "10.0.0.1")));
        let outcome = store.compile();
        assert_eq!(bindings(&outcome)[0], "10.0.0.1 -> 203.0.113.7");
        assert!(outcome.unhealthy.is_empty() && outcome.faulty.is_empty(), "it has moved");
    }
}

#[test]
fn a_folder_that_is_missing_or_cannot_be_read_keeps_what_it_had_until_it_is_back() {
    let text = |name: &str, n: u8| {
        (name.into(), Ok(tenant(&format!("t{n}"), &format!("203.0.113.{n}"), &format!("10.0.0.{n}"))))
    };
    let first = Update { whole: true, changed: vec![text("a/x.yaml", 1), text("b/y.yaml", 2)], ..Update::default() };
    for missing in [false, true] {
        let mut store = Store::default();
        store.update(first.clone());
        store.update(Update { hidden: vec![hidden("a", missing)], ..Update::default() });
        let unhealthy = holds_both(&mut store);
        assert_eq!(unhealthy, ["a: is missing: the 2 objects that it had stay in force"]);
        assert_eq!(store.accept_empty().is_ok(), missing, "what can't be read isn't empty");
        store.update(Update { changed: vec![text("a/x.yaml", 1)], ..Update::default() });
        assert!(holds_both(&mut store).is_empty());
    }
}

#[test]
fn a_wrong_object_keeps_no_other_object_of_its_text() {
    let mut store = two();
    let both = tenant("x", "203.0.113.1", "10.0.0.1") + "---\n" + &tenant("z", "203.0.113.3", "10.0.0.3");
    store.update(put("x.yaml", &both));
    assert_eq!(bindings(&store.compile()).len(), 3);
    // One tenant's slice is wrong, the other tenant is gone: of the first the last good version stays, of the other nothing.
    let wrong = tenant("x", "203.0.113.1", "10.0.0.9").replace("addressType: IPv4", "addressType: IPv5");
    store.update(put("x.yaml", &wrong));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    assert_eq!(outcome.states(), [("accepted", 3), ("last_good", 1), ("rejected", 0)]);
    assert!(outcome.unhealthy.is_empty(), "a tenant's mistake, not the source's");
}

#[test]
fn a_wrong_object_that_was_never_good_is_named_and_counted() {
    let mut store = two();
    let wrong = tenant("z", "203.0.113.3", "10.0.0.3").replace("addressType: IPv4", "addressTyp: IPv4");
    store.update(put("z.yaml", &wrong));
    let outcome = store.compile();
    assert_eq!(outcome.states(), [("accepted", 5), ("last_good", 0), ("rejected", 1)]);
    let names: Vec<String> = outcome.faulty.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["EndpointSlice a/z-1"]);
}

/// What `kubectl get -o yaml > cluster.yaml` leaves there on its way.
#[test]
fn a_list_that_is_cut_anywhere_changes_nothing() {
    let item = |text: String| text.lines().map(|line| format!("  {line}\n")).collect::<Vec<_>>().concat();
    let docs = tenant("x", "203.0.113.1", "10.0.0.1");
    let items: Vec<String> = docs.split("---\n").map(|doc| format!("-{}", &item(doc.to_owned())[1..])).collect();
    let items = items.concat();
    let list = format!("apiVersion: v1\nitems:\n{items}kind: List\nmetadata:\n  resourceVersion: \"\"\n");
    let mut store = two();
    store.update(put("x.yaml", &list));
    assert!(holds_both(&mut store).is_empty());
    let end = list.find("kind: List").unwrap() + "kind: List".len();
    for cut in 0..end {
        store.update(put("x.yaml", &list[..cut]));
        let unhealthy = holds_both(&mut store);
        assert!(unhealthy.iter().all(|it| it.starts_with("x.yaml: ")) && !unhealthy.is_empty(), "{cut}: {unhealthy:?}");
    }
}

#[test]
fn a_source_that_starts_empty_is_waited_for() {
    let empty = || Update { whole: true, ..Update::default() };
    let mut store = Store::default();
    store.update(empty());
    let outcome = store.compile();
    assert!(outcome.deal.is_none() && outcome.unhealthy == ["source: has no manifests"], "{:?}", outcome.unhealthy);
    assert_eq!(store.accept_empty(), Ok(Accepted::default()));
    assert!(store.compile().deal.is_some_and(|deal| *deal == Deal::default()));
    let mut store = Store::new(true);
    store.update(empty());
    assert!(store.compile().deal.is_some(), "allowed");
    // What can't be read isn't empty.
    for allow_empty in [false, true] {
        let mut store = Store::new(allow_empty);
        store.update(Update { changed: vec![("x.yaml".into(), Err("can't be read: no".into()))], ..empty() });
        assert!(store.compile().deal.is_none());
        assert!(store.accept_empty().unwrap_err().contains("x.yaml"));
    }
}

#[test]
fn emptiness_that_is_allowed_is_believed_but_what_cannot_be_read_is_not_emptiness() {
    let allowing = || {
        let mut store = Store::new(true);
        let text = |name: &str, n: u8| {
            (format!("{name}.yaml").into(), Ok(tenant(name, &format!("203.0.113.{n}"), &format!("10.0.0.{n}"))))
        };
        store.update(Update { whole: true, changed: vec![text("x", 1), text("y", 2)], ..Update::default() });
        store
    };
    let mut store = allowing();
    store.update(put("x.yaml", ""));
    assert_eq!(bindings(&store.compile()), ["10.0.0.2 -> 203.0.113.2"]);
    store.update(Update { whole: true, ..Update::default() });
    assert!(bindings(&store.compile()).is_empty());
    let mut store = allowing();
    store.update(put("x.yaml", "kind: [unclosed"));
    assert!(!holds_both(&mut store).is_empty());
}

/// What each Service is reached at, `name: VIPs, health check`.
fn frontends(outcome: &Outcome) -> Vec<String> {
    let each = outcome
        .deal
        .as_ref()
        .unwrap()
        .services
        .iter()
        .map(|it| format!("{}: {:?} {:?}", it.name, it.vips, it.health_port));
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
