//! Faulty and missing manifests: reported, without effect on others; what can't be read any more stays as it was last read.

mod addresses;

use std::net::IpAddr;

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

/// An update of one entry.
fn put(name: &str, text: &str) -> SourceUpdate {
    SourceUpdate { changed: vec![(name.into(), Ok(text.into()))], ..SourceUpdate::default() }
}

/// `pod -> VIPs` of every endpoint.
fn bindings(outcome: &CompileOutcome) -> Vec<String> {
    let each = outcome.placement.as_ref().unwrap().endpoints.iter().map(|it| {
        let vips: Vec<_> = it.vips.iter().map(ToString::to_string).collect();
        format!("{} -> {}", it.address, vips.join(" "))
    });
    each.collect()
}

fn errors(outcome: &CompileOutcome) -> Vec<String> {
    outcome.diagnostics.iter().filter(|it| it.is_error()).map(ToString::to_string).collect()
}

/// A compiled store with two valid tenants.
fn two_tenants() -> ManifestStore {
    let mut store = ManifestStore::default();
    let changed =
        [("x.yaml", tenant("x", "203.0.113.1", "10.0.0.1")), ("y.yaml", tenant("y", "203.0.113.2", "10.0.0.2"))];
    let changed = changed.into_iter().map(|(name, text)| (name.into(), Ok(text.into()))).collect();
    store.update(SourceUpdate { full: true, changed, ..SourceUpdate::default() });
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    assert!(outcome.faulty.is_empty() && outcome.objects == 4);
    store
}

#[test]
fn an_entry_with_invalid_yaml_retains_its_objects_without_effect_on_others() {
    let mut store = two_tenants();
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
fn only_the_invalid_document_of_an_entry_is_retained() {
    let mut store = two_tenants();
    let text = tenant("x", "203.0.113.7", "10.0.0.1").replace("addressType: IPv4", "addressTyp: IPv4");
    store.update(put("x.yaml", &text));
    let outcome = store.compile();
    assert_eq!(
        bindings(&outcome),
        ["10.0.0.1 -> 203.0.113.7", "10.0.0.2 -> 203.0.113.2"],
        "the Service is new, the EndpointSlice is the last good one"
    );
    assert_eq!(outcome.faulty.len(), 1);
    assert!(errors(&outcome)[0].contains("x.yaml:") && errors(&outcome)[0].contains("addressType"));
}

#[test]
fn a_conflicting_object_is_not_in_force_whatever_it_was_before() {
    let mut store = two_tenants();
    // The VIP and port of another Service, which precedes it.
    store.update(put("y.yaml", &tenant("y", "203.0.113.1", "10.0.0.2")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> "]);
    let (id, faulty) = outcome.faulty.iter().next().unwrap();
    assert_eq!((id.to_string().as_str(), faulty.has_last_good), ("Service a/y", false));
    assert!(faulty.reasons[0].starts_with("y.yaml:4: spec.ports[0].port:"), "{:?}", faulty.reasons);
    assert_eq!(outcome.states(), [("accepted", 3), ("last_good", 0), ("rejected", 1)]);
    // Its former address is free at once.
    store.update(put("z.yaml", &tenant("z", "203.0.113.2", "10.0.0.5")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> ", "10.0.0.5 -> 203.0.113.2"]);
    assert_eq!(outcome.faulty.len(), 1);
    // Without the conflict, the object is in force.
    store.update(SourceUpdate { removed: vec!["x.yaml".into()], ..SourceUpdate::default() });
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.2 -> 203.0.113.1", "10.0.0.5 -> 203.0.113.2"]);
    assert!(outcome.faulty.is_empty());
}

#[test]
fn what_a_refused_object_covers_stays_covered() {
    let mut store = two_tenants();
    store.update(put("z.yaml", &tenant("z", "127.0.0.1", "10.0.0.3")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2", "10.0.0.3 -> "]);
    let (id, faulty) = outcome.faulty.iter().next().unwrap();
    assert_eq!((id.to_string().as_str(), faulty.has_last_good), ("Service a/z", false));
}

#[test]
fn a_service_of_another_type_gives_its_vip_to_the_next_one() {
    let mut store = two_tenants();
    store.update(put("x.yaml", &tenant("x", "203.0.113.1", "10.0.0.1").replace("LoadBalancer", "ClusterIP")));
    store.update(put("z.yaml", &tenant("z", "203.0.113.1", "10.0.0.3")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> ", "10.0.0.2 -> 203.0.113.2", "10.0.0.3 -> 203.0.113.1"]);
}

#[test]
fn a_removed_entry_loses_its_objects_and_an_unreadable_one_retains_them() {
    let mut store = two_tenants();
    store.update(SourceUpdate {
        changed: vec![("x.yaml".into(), Err("can't be read: no such luck".to_owned()))],
        ..SourceUpdate::default()
    });
    let outcome = store.compile();
    assert_eq!(bindings(&outcome).len(), 2);
    assert_eq!(errors(&outcome), ["x.yaml: can't be read: no such luck [VG0701]"]);
    store.update(SourceUpdate { removed: vec!["x.yaml".into()], ..SourceUpdate::default() });
    assert_eq!(bindings(&store.compile()), ["10.0.0.2 -> 203.0.113.2"]);
}

#[test]
fn a_duplicate_object_is_in_force_once() {
    let mut store = two_tenants();
    store.update(put("z.yaml", &tenant("x", "203.0.113.9", "10.0.0.1")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome)[0], "10.0.0.1 -> 203.0.113.1", "the first entry by name wins");
    assert!(
        errors(&outcome).iter().all(|error| error.contains("is already defined in x.yaml:")),
        "{:?}",
        errors(&outcome)
    );
}

/// Asserts that all objects of `two_tenants` are in force; returns why the source is unhealthy.
fn both_in_force(store: &mut ManifestStore) -> Vec<String> {
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    outcome.unhealthy
}

fn hidden(place: &str, missing: bool) -> UnavailablePath {
    UnavailablePath { path: place.into(), reason: "is missing".into(), is_missing: missing, is_configured: false }
}

#[test]
fn a_source_that_becomes_empty_retains_its_objects_until_that_is_accepted() {
    let gone = |names: &[&str]| names.iter().map(|name| (*name).into()).collect::<Vec<Arc<str>>>();
    let cases = [
        vec![SourceUpdate { full: true, ..SourceUpdate::default() }],
        vec![SourceUpdate { removed: gone(&["x.yaml", "y.yaml"]), ..SourceUpdate::default() }],
        vec![
            put("x.yaml", "apiVersion: v1\nkind: List\nitems: []\n"),
            SourceUpdate { removed: gone(&["y.yaml"]), ..SourceUpdate::default() },
        ],
        vec![put("x.yaml", ""), SourceUpdate { removed: gone(&["y.yaml"]), ..SourceUpdate::default() }],
        vec![SourceUpdate {
            unavailable: vec![hidden("x.yaml", true), hidden("y.yaml", true)],
            ..SourceUpdate::default()
        }],
    ];
    for (number, updates) in cases.into_iter().enumerate() {
        let mut store = two_tenants();
        // As one update: intermediate states would be another case.
        let all = updates.into_iter().reduce(|mut all, update| {
            all.changed.extend(update.changed);
            all.removed.extend(update.removed);
            all
        });
        store.update(all.unwrap());
        let unhealthy = both_in_force(&mut store);
        assert!(
            !unhealthy.is_empty() && unhealthy.iter().any(|it| it.contains("stay in force")),
            "{number}: {unhealthy:?}"
        );
        let accepted = store.accept_empty().unwrap();
        assert_eq!(accepted.entries.iter().map(|(_, objects)| objects).sum::<usize>(), 4, "{number}");
        let outcome = store.compile();
        assert!(bindings(&outcome).is_empty() && outcome.unhealthy.is_empty(), "{number}: {:?}", outcome.unhealthy);
        assert!(store.accept_empty().is_err(), "{number}: nothing is left to accept");
        // Accepted only once: later objects are retained again.
        store.update(put("z.yaml", &tenant("z", "203.0.113.5", "10.0.0.5")));
        store.update(put("z.yaml", ""));
        assert_eq!(bindings(&store.compile()), ["10.0.0.5 -> 203.0.113.5"], "{number}");
    }
}

#[test]
fn an_empty_entry_retains_its_objects_even_beside_others() {
    for blank in ["", "\n", "  \n# nothing\n", "---\n"] {
        let mut store = two_tenants();
        store.update(put("x.yaml", blank));
        let unhealthy = both_in_force(&mut store);
        assert_eq!(unhealthy, ["x.yaml: is empty: the 2 objects that it had stay in force"], "{blank:?}");
        // Its objects are released when another entry has them.
        store.update(put("z.yaml", &tenant("x", "203.0.113.7", "10.0.0.1")));
        let outcome = store.compile();
        assert_eq!(bindings(&outcome)[0], "10.0.0.1 -> 203.0.113.7");
        assert!(outcome.unhealthy.is_empty() && outcome.faulty.is_empty(), "moved to another entry");
    }
}

#[test]
fn a_missing_or_unreadable_directory_retains_its_objects_until_it_is_back() {
    let text = |name: &str, n: u8| {
        (name.into(), Ok(tenant(&format!("t{n}"), &format!("203.0.113.{n}"), &format!("10.0.0.{n}")).into()))
    };
    let first =
        SourceUpdate { full: true, changed: vec![text("a/x.yaml", 1), text("b/y.yaml", 2)], ..SourceUpdate::default() };
    for missing in [false, true] {
        let mut store = ManifestStore::default();
        store.update(first.clone());
        store.update(SourceUpdate { unavailable: vec![hidden("a", missing)], ..SourceUpdate::default() });
        let unhealthy = both_in_force(&mut store);
        assert_eq!(unhealthy, ["a: is missing: the 2 objects that it had stay in force"]);
        assert_eq!(store.accept_empty().is_ok(), missing, "an unreadable path isn't empty");
        store.update(SourceUpdate { changed: vec![text("a/x.yaml", 1)], ..SourceUpdate::default() });
        assert!(both_in_force(&mut store).is_empty());
    }
}

#[test]
fn an_invalid_object_retains_no_other_object_of_its_entry() {
    let mut store = two_tenants();
    let both = tenant("x", "203.0.113.1", "10.0.0.1") + "---\n" + &tenant("z", "203.0.113.3", "10.0.0.3");
    store.update(put("x.yaml", &both));
    assert_eq!(bindings(&store.compile()).len(), 3);
    // One tenant's slice is invalid, the other tenant is removed: only the first has a last good version in force.
    let invalid = tenant("x", "203.0.113.1", "10.0.0.9").replace("addressType: IPv4", "addressType: IPv5");
    store.update(put("x.yaml", &invalid));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.1 -> 203.0.113.1", "10.0.0.2 -> 203.0.113.2"]);
    assert_eq!(outcome.states(), [("accepted", 3), ("last_good", 1), ("rejected", 0)]);
    assert!(outcome.unhealthy.is_empty(), "an invalid object doesn't make the source unhealthy");
}

#[test]
fn an_invalid_object_without_a_good_version_is_rejected_and_counted() {
    let mut store = two_tenants();
    let invalid = tenant("z", "203.0.113.3", "10.0.0.3").replace("addressType: IPv4", "addressTyp: IPv4");
    store.update(put("z.yaml", &invalid));
    let outcome = store.compile();
    assert_eq!(outcome.states(), [("accepted", 5), ("last_good", 0), ("rejected", 1)]);
    let names: Vec<String> = outcome.faulty.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["EndpointSlice a/z-1"]);
}

/// A partly written file, as during `kubectl get -o yaml > cluster.yaml`.
#[test]
fn a_truncated_list_changes_nothing() {
    let item = |text: String| text.lines().map(|line| format!("  {line}\n")).collect::<Vec<_>>().concat();
    let docs = tenant("x", "203.0.113.1", "10.0.0.1");
    let items: Vec<String> = docs.split("---\n").map(|doc| format!("-{}", &item(doc.to_owned())[1..])).collect();
    let items = items.concat();
    let list = format!("apiVersion: v1\nitems:\n{items}kind: List\nmetadata:\n  resourceVersion: \"\"\n");
    let mut store = two_tenants();
    store.update(put("x.yaml", &list));
    assert!(both_in_force(&mut store).is_empty());
    let end = list.find("kind: List").unwrap() + "kind: List".len();
    for cut in 0..end {
        store.update(put("x.yaml", &list[..cut]));
        let unhealthy = both_in_force(&mut store);
        assert!(unhealthy.iter().all(|it| it.starts_with("x.yaml: ")) && !unhealthy.is_empty(), "{cut}: {unhealthy:?}");
    }
}

#[test]
fn an_initially_empty_source_has_no_policy_until_it_is_accepted() {
    let empty = || SourceUpdate { full: true, ..SourceUpdate::default() };
    let mut store = ManifestStore::default();
    store.update(empty());
    let outcome = store.compile();
    assert!(
        outcome.placement.is_none() && outcome.unhealthy == ["source: has no manifests"],
        "{:?}",
        outcome.unhealthy
    );
    assert_eq!(store.accept_empty(), Ok(AcceptedEmpty::default()));
    assert!(store.compile().placement.is_some_and(|deal| *deal == Placement::default()));
    let mut store = ManifestStore::new(true);
    store.update(empty());
    assert!(store.compile().placement.is_some(), "allowed");
    // An unreadable source isn't empty.
    for allow_empty in [false, true] {
        let mut store = ManifestStore::new(allow_empty);
        store.update(SourceUpdate { changed: vec![("x.yaml".into(), Err("can't be read: no".to_owned()))], ..empty() });
        assert!(store.compile().placement.is_none());
        assert!(store.accept_empty().unwrap_err().to_string().contains("x.yaml"));
    }
}

/// Which tenants it has isn't known yet: a policy without them would take them from gateways that have them.
#[test]
fn a_first_policy_waits_for_what_could_not_be_read_and_later_ones_do_not() {
    let (x, y) = (tenant("x", "203.0.113.1", "10.0.0.1"), tenant("y", "203.0.113.2", "10.0.0.2"));
    let failed = || SourceUpdate {
        changed: vec![("y.yaml".into(), Err("can't be read: too many open files".to_owned()))],
        has_failed_reads: true,
        ..SourceUpdate::default()
    };
    let partly_read = |allow_empty| {
        let mut store = ManifestStore::new(allow_empty);
        let mut update = SourceUpdate { full: true, ..failed() };
        update.changed.push(("x.yaml".into(), Ok(x.clone().into())));
        store.update(update);
        let outcome = store.compile();
        assert!(outcome.placement.is_none() && store.awaits_failed_reads());
        assert_eq!(outcome.unhealthy, ["y.yaml: can't be read: too many open files"]);
        store
    };
    for allow_empty in [false, true] {
        let mut store = partly_read(allow_empty);
        assert!(store.accept_empty().unwrap_err().to_string().contains("y.yaml"));
        store.update(put("y.yaml", &y));
        assert!(both_in_force(&mut store).is_empty() && !store.awaits_failed_reads());
        store.update(failed());
        assert_eq!(both_in_force(&mut store).len(), 1, "it stays as it was last read");
        // Not for ever.
        let mut store = partly_read(allow_empty);
        store.accept_failed_reads();
        assert_eq!(bindings(&store.compile()), ["10.0.0.1 -> 203.0.113.1"]);
    }
    // What nobody can read, or isn't YAML, isn't waited for.
    let mut store = ManifestStore::default();
    let changed = vec![("x.yaml".into(), Ok(x.into())), ("y.yaml".into(), Ok("kind: [unclosed".into()))];
    store.update(SourceUpdate { full: true, changed, ..SourceUpdate::default() });
    assert_eq!(bindings(&store.compile()), ["10.0.0.1 -> 203.0.113.1"]);
}

#[test]
fn a_first_policy_that_waits_names_the_directory_that_could_not_be_read() {
    let mut store = ManifestStore::default();
    let changed = vec![("a/x.yaml".into(), Ok(tenant("x", "203.0.113.1", "10.0.0.1").into()))];
    let unavailable = vec![hidden("a/b", false)];
    let update = SourceUpdate { full: true, changed, unavailable, has_failed_reads: true, ..SourceUpdate::default() };
    store.update(update);
    let outcome = store.compile();
    assert!(outcome.placement.is_none() && outcome.unhealthy == ["a/b: is missing"], "{:?}", outcome.unhealthy);
}

#[test]
fn with_allow_empty_empty_entries_are_removals_and_unreadable_ones_are_not() {
    let with_allow_empty = || {
        let mut store = ManifestStore::new(true);
        let text = |name: &str, n: u8| {
            (format!("{name}.yaml").into(), Ok(tenant(name, &format!("203.0.113.{n}"), &format!("10.0.0.{n}")).into()))
        };
        store.update(SourceUpdate { full: true, changed: vec![text("x", 1), text("y", 2)], ..SourceUpdate::default() });
        store
    };
    let mut store = with_allow_empty();
    store.update(put("x.yaml", ""));
    assert_eq!(bindings(&store.compile()), ["10.0.0.2 -> 203.0.113.2"]);
    store.update(SourceUpdate { full: true, ..SourceUpdate::default() });
    assert!(bindings(&store.compile()).is_empty());
    let mut store = with_allow_empty();
    store.update(put("x.yaml", "kind: [unclosed"));
    assert!(!both_in_force(&mut store).is_empty());
}

/// The frontends of each Service, `name: VIPs, health check port`.
fn frontends(outcome: &CompileOutcome) -> Vec<String> {
    let each = outcome
        .placement
        .as_ref()
        .unwrap()
        .services
        .iter()
        .map(|it| format!("{}: {:?} {:?}", it.name, it.vips, it.health_port));
    each.collect()
}

/// Two Services claim one port: the younger one is rejected, though it is first by name.
#[test]
fn a_service_that_claims_the_port_of_an_older_one_is_rejected() {
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
        let mut store = ManifestStore::default();
        store.update(put("old.yaml", &local("z", 2020, "203.0.113.1", 30_000)));
        let old = "Service a/z: [203.0.113.1] Some(30000)";
        assert_eq!(frontends(&store.compile()), [old]);
        store.update(put("new.yaml", &local("b", 2021, vip, port)));
        let outcome = store.compile();
        assert_eq!(frontends(&outcome), [old]);
        let (id, faulty) = outcome.faulty.iter().next().unwrap();
        assert_eq!((id.to_string().as_str(), outcome.faulty.len()), ("Service a/b", 1));
        assert!(faulty.reasons[0].contains(field), "{:?}", faulty.reasons);
        // With another claim it is in force; with the conflicting claim again, it isn't.
        store.update(put("new.yaml", &local("b", 2021, "203.0.113.2", 30_001)));
        let both = ["Service a/b: [203.0.113.2] Some(30001)", old];
        let outcome = store.compile();
        assert_eq!((frontends(&outcome), outcome.faulty.len()), (both.map(str::to_owned).to_vec(), 0));
        store.update(put("new.yaml", &local("b", 2021, vip, port)));
        let outcome = store.compile();
        assert_eq!((frontends(&outcome), outcome.faulty.len()), (vec![old.to_owned()], 1));
    }
}

#[test]
fn services_without_a_class_are_another_controllers_if_requested() {
    let unclassed = tenant("x", "203.0.113.1", "10.0.0.1").replace(", annotations: {vipgate.io/egress: \"true\"}", "");
    for (mode, expected) in [(UnclassedServices::Serve, 2), (UnclassedServices::Ignore, 1)] {
        let mut store = ManifestStore::default().with_unclassed(mode);
        store.update(put("x.yaml", &unclassed));
        store.update(put("y.yaml", &tenant("y", "203.0.113.2", "10.0.0.2")));
        let outcome = store.compile();
        assert_eq!(outcome.placement.unwrap().services.iter().count(), expected, "{mode:?}");
        assert_eq!(outcome.diagnostics, []);
    }
}

#[test]
fn address_management_gets_the_same_snapshot_until_one_of_its_objects_changes() {
    let mut store = ManifestStore::default().with_ipam(true);
    let documents = tenant("x", "203.0.113.1", "10.0.0.1");
    let (service, slice) = documents.split_once("---\n").unwrap();
    let changed = [("service", service), ("slice", slice)].map(|(name, text)| (name.into(), Ok(text.into())));
    store.update(SourceUpdate { full: true, changed: changed.into(), ..SourceUpdate::default() });
    let first = store.compile().ipam.unwrap();
    assert_eq!(first.services().len(), 1);
    store.update(put("slice", &slice.replace("10.0.0.1", "10.0.0.9")));
    let outcome = store.compile();
    assert_eq!(bindings(&outcome), ["10.0.0.9 -> 203.0.113.1"]);
    assert!(Arc::ptr_eq(&first, &outcome.ipam.unwrap()), "it doesn't read slices");

    let pool =
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\nspec: {ranges: [203.0.113.0/24]}";
    for update in [put("service", &service.replace("203.0.113.1", "203.0.113.2")), put("pool", pool)] {
        let before = store.compile().ipam.unwrap();
        store.update(update);
        assert!(!Arc::ptr_eq(&before, &store.compile().ipam.unwrap()));
    }
    assert!(store.compile().ipam.unwrap().policy_addresses.is_empty());
    let policy = "apiVersion: vipgate.io/v1alpha1\nkind: ClusterEgressPolicy\nmetadata: {name: c}\n\
                  spec: {addresses: [203.0.113.7], selectors: [{namespaceSelector: {}, podSelector: {}}]}";
    store.update(put("policy", policy));
    let outcome = store.compile();
    let owner = ObjectId { kind: Kind::ClusterEgressPolicy, namespace: String::new(), name: "c".to_owned() };
    let expected = [("203.0.113.7".parse::<IpAddr>().unwrap(), owner)];
    assert_eq!(outcome.ipam.unwrap().policy_addresses, expected, "{:?}", outcome.diagnostics);
}
