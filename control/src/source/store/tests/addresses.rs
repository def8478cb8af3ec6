//! Addresses of pools: policies have them by the record, wherever it is.

use super::*;

/// A pool of two addresses.
const POOL: &str = "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\n\
                    spec: {ranges: [203.0.113.0/31], reuseAfter: 60s}\n";

/// A policy `NAMESPACE/p` that asks for an address of the pool.
fn policy(namespace: &str) -> String {
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: p, namespace: {namespace}}}\n\
         spec: {{selectors: [{{podSelector: {{}}}}], pools: [{{name: p, count: 1}}]}}\n"
    )
}

/// A store with the pool, and policies in these namespaces, each in an entry of its own.
fn started(namespaces: &[&str]) -> ManifestStore {
    let mut store = ManifestStore::default().with_record(RecordMode::Kept);
    let policies =
        namespaces.iter().map(|namespace| (format!("{namespace}.yaml").into(), Ok(policy(namespace).into())));
    let changed = std::iter::once(("pool.yaml".into(), Ok(POOL.into()))).chain(policies).collect();
    store.update(SourceUpdate { full: true, changed, ..SourceUpdate::default() });
    store
}

fn remove(store: &mut ManifestStore, namespace: &str) {
    let removed = vec![format!("{namespace}.yaml").into()];
    store.update(SourceUpdate { removed, ..SourceUpdate::default() });
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// Compiles until what is given is recorded.
fn record(store: &mut ManifestStore) -> CompileOutcome {
    for _ in 0..3 {
        let outcome = store.compile();
        match outcome.next_record.clone() {
            Some(next) => store.set_record(next),
            None => return outcome,
        }
    }
    panic!("what is given is recorded, and there is more: {:?}", store.record);
}

/// The VIP of each policy, by its namespace.
fn vips(outcome: &CompileOutcome) -> BTreeMap<String, IpAddr> {
    let vips = outcome.placement.as_ref().unwrap().vips.iter();
    let namespace = |name: &str| name.trim_start_matches("EgressPolicy ").trim_end_matches("/p").to_owned();
    vips.map(|vip| (namespace(&vip.name), vip.address)).collect()
}

/// A tenant whose entry can't be read keeps others' addresses from nobody, as long as it is known what it had.
#[test]
fn what_others_give_up_is_given_again_though_an_entry_became_unreadable() {
    let unreadable =
        || SourceUpdate { changed: vec![("b.yaml".into(), Ok("kind: [unclosed".into()))], ..SourceUpdate::default() };
    let policy_of_c =
        || SourceUpdate { changed: vec![("c.yaml".into(), Ok(policy("c").into()))], ..SourceUpdate::default() };
    for starts_anew in [false, true] {
        let mut store = started(&["a", "b"]);
        store.set_now(at(0));
        let before = vips(&record(&mut store));
        if starts_anew {
            let recorded = store.record.clone();
            store = ManifestStore::default().with_record(RecordMode::Kept);
            store.set_record(recorded);
            let entries = [("pool.yaml", POOL.to_owned()), ("a.yaml", policy("a"))];
            let changed = entries.into_iter().map(|(name, text)| (name.into(), Ok(text.into()))).collect();
            store.update(SourceUpdate { full: true, changed, ..SourceUpdate::default() });
        }
        store.update(unreadable());
        remove(&mut store, "a");
        store.update(policy_of_c());
        record(&mut store);
        store.set_now(at(61));
        let after = vips(&record(&mut store));
        assert_eq!(after.get("b"), (!starts_anew).then_some(&before["b"]));
        // What an entry had that wasn't readable yet since the start isn't known: maybe it has `a` now.
        assert_eq!(after.get("c"), (!starts_anew).then_some(&before["a"]));
    }
}

#[test]
fn an_address_is_in_force_once_it_is_recorded() {
    let mut store = started(&["a"]);
    let first = store.compile();
    assert!(first.has_pending && vips(&first).is_empty());
    assert!(first.diagnostics.iter().any(|it| it.code == Code::AddressPending), "{:?}", first.diagnostics);
    // What isn't recorded yet is to be recorded, whatever else is compiled.
    assert_eq!(store.compile().next_record, first.next_record);
    store.set_record(first.next_record.unwrap());
    let outcome = store.compile();
    assert_eq!((outcome.has_pending, outcome.next_record.as_ref(), vips(&outcome).len()), (false, None, 1));
}

#[test]
fn a_policy_keeps_its_address_when_others_come_and_go_and_after_a_restart() {
    let mut store = started(&["a"]);
    let of_a = vips(&record(&mut store))["a"];
    store.update(put("b.yaml", &policy("b")));
    let both = vips(&record(&mut store));
    assert_eq!((both["a"], both.len()), (of_a, 2));
    let mut store = {
        let mut restarted = started(&["a", "b"]);
        restarted.set_record(store.record.clone());
        restarted
    };
    let outcome = store.compile();
    assert_eq!((vips(&outcome), outcome.next_record.as_ref()), (both.clone(), None));
    remove(&mut store, "a");
    let left = vips(&record(&mut store));
    assert_eq!((left["b"], left.len()), (both["b"], 1));
}

#[test]
fn a_former_address_is_quarantined_for_others_and_given_back_at_once() {
    let mut store = started(&["a", "b"]);
    let both = vips(&record(&mut store));
    store.set_now(at(100));
    remove(&mut store, "a");
    store.update(put("c.yaml", &policy("c")));
    let outcome = record(&mut store);
    assert_eq!((outcome.waits_until, vips(&outcome)), (Some(at(160)), [("b".to_owned(), both["b"])].into()));
    store.set_now(at(110));
    store.update(put("a.yaml", &policy("a")));
    assert_eq!(vips(&record(&mut store)), both);
    remove(&mut store, "a");
    record(&mut store);
    for (second, expected) in [(169, 1), (170, 2)] {
        store.set_now(at(second));
        assert_eq!(vips(&record(&mut store)).len(), expected, "after {second} s");
    }
    let outcome = store.compile();
    assert_eq!((vips(&outcome)["c"], outcome.waits_until), (both["a"], None));
}

#[test]
fn nothing_is_given_up_while_a_part_of_the_source_is_unknown() {
    let mut store = started(&["a", "b"]);
    record(&mut store);
    let mut restarted = started(&["a"]);
    restarted.set_record(store.record.clone());
    restarted.update(SourceUpdate { unavailable: vec![hidden("elsewhere", false)], ..SourceUpdate::default() });
    assert_eq!(restarted.compile().next_record, None);
    restarted.update(SourceUpdate::default());
    let freed = restarted.compile().next_record.unwrap();
    assert!(freed.to_string().contains("EgressPolicy b/p 1970"), "{freed}");
}

#[test]
fn an_object_that_cannot_be_read_keeps_its_address() {
    let mut store = started(&["a", "b"]);
    let both = vips(&record(&mut store));
    let mut restarted = started(&["a"]);
    restarted.set_record(store.record.clone());
    restarted.update(put("b.yaml", &policy("b").replace("count: 1", "count: one")));
    let outcome = restarted.compile();
    assert_eq!((vips(&outcome).len(), outcome.faulty.len(), outcome.next_record.as_ref()), (1, 1, None));
    restarted.update(put("b.yaml", &policy("b")));
    assert_eq!(vips(&restarted.compile()), both);
}

#[test]
fn a_gateway_that_compiles_files_has_a_record_while_it_is_alone() {
    let gateway = |name: &str| {
        format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: {name}}}\n\
             spec: {{peerAddress: 192.0.2.1}}\n"
        )
    };
    let mut store = started(&["a"]).with_record(RecordMode::KeptBy("gw-a".into()));
    store.update(put("gw-a.yaml", &gateway("gw-a")));
    assert!(store.compile().has_pending);
    // Others compile the same files, and don't know this one's record.
    for other in [gateway("gw-b").replace("peerAddress", "peer"), gateway("gw-b")] {
        store.update(put("gw-b.yaml", &other));
        let outcome = store.compile();
        assert_eq!((outcome.has_pending, outcome.next_record.as_ref(), vips(&outcome).len()), (false, None, 1));
    }
    remove(&mut store, "gw-b");
    assert!(store.compile().has_pending);
    assert_eq!(vips(&record(&mut store)).len(), 1);
}

#[test]
fn the_record_of_pools_is_in_their_status_and_written_by_others() {
    let pool = |lines: &str| format!("{POOL}status: {{addresses: [{lines}]}}\n");
    let mut store = started(&["a", "b"]).with_record(RecordMode::OfPools);
    store.update(put("pool.yaml", &pool("\"203.0.113.1 EgressPolicy a/p\"")));
    let outcome = store.compile();
    assert_eq!((outcome.has_pending, outcome.next_record.as_ref(), vips(&outcome).len()), (true, None, 1));
    assert_eq!(vips(&outcome)["a"].to_string(), "203.0.113.1");
    let both = "\"203.0.113.1 EgressPolicy a/p\", \"203.0.113.0 EgressPolicy b/p\"";
    store.update(put("pool.yaml", &pool(both)));
    let outcome = store.compile();
    assert_eq!((outcome.has_pending, vips(&outcome)["b"].to_string().as_str()), (false, "203.0.113.0"));
}
