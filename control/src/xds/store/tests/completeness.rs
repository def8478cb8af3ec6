//! Completeness of an update: it has Settings, and their counts match the resources.

use super::*;
use crate::xds::fixtures::sample_placement;
use crate::xds::resource::{encode_all, settings};

/// A response with Settings of these counts.
fn settings_with(counts: [usize; Kind::COUNTED]) -> DeltaDiscoveryResponse {
    let (key, content, _) = settings(counts, 1);
    response(Kind::Settings, &[(key, Some(StoredResource { version: "1".to_owned(), body: content.body }))])
}

fn staged(placement: &Placement) -> ResourceStore {
    let mut store = ResourceStore::default();
    let all = encode_all(placement).into_iter();
    let all: Vec<_> =
        all.map(|(key, it)| (key, Some(StoredResource { version: "1".to_owned(), body: it.body }))).collect();
    for response in responses(&all) {
        store.stage(response).unwrap();
    }
    store
}

#[test]
fn an_update_without_settings_is_incomplete() {
    assert!(!ResourceStore::default().is_complete());
    let mut store = staged(&sample_placement(2));
    assert!(!store.is_complete() && store.has_staged());
    assert_eq!(store.count_mismatch(), None);
    store.commit();
    assert!(!store.is_complete() && !store.has_staged());
}

#[test]
fn settings_of_the_last_update_do_not_complete_the_next() {
    let (two, three) = (ServerPolicy::of(&sample_placement(2)), ServerPolicy::of(&sample_placement(3)));
    let mut store = store_with(&two);
    assert!(!store.is_complete());
    let changes = three.diff(&two);
    store.stage(response(Kind::Endpoint, &changes[..1])).unwrap();
    assert!(!store.is_complete());
    store.stage(three.settings_response()).unwrap();
    assert!(store.is_complete());
}

#[test]
fn wrong_counts_are_incomplete() {
    let cases = [
        ([1, 1, 1, 2, 0, 1, 1, 1, 1], None),
        ([0, 1, 1, 2, 0, 1, 1, 1, 1], Some("expects 0 EgressPolicy resources, got 1")),
        ([1, 2, 1, 2, 0, 1, 1, 1, 1], Some("expects 2 ShardMap resources, got 1")),
        ([1, 1, 2, 2, 0, 1, 1, 1, 1], Some("expects 2 Vip resources, got 1")),
        ([1, 1, 1, 1, 0, 1, 1, 1, 1], Some("expects 1 Endpoint resources, got 2")),
        ([1, 1, 1, 3, 0, 1, 1, 1, 1], Some("expects 3 Endpoint resources, got 2")),
        ([1, 1, 1, 2, 1, 1, 1, 1, 1], Some("expects 1 BackendSlice resources, got 0")),
        ([1, 1, 1, 2, 0, 2, 1, 1, 1], Some("expects 2 Service resources, got 1")),
        ([1, 1, 1, 2, 0, 1, 0, 1, 1], Some("expects 0 Gateway resources, got 1")),
        ([1, 1, 1, 2, 0, 1, 1, 0, 1], Some("expects 0 OverlayNode resources, got 1")),
        ([1, 1, 1, 2, 0, 1, 1, 1, 0], Some("expects 0 Cluster resources, got 1")),
    ];
    for (counts, mismatch) in cases {
        let mut store = staged(&sample_placement(2));
        store.stage(settings_with(counts)).unwrap();
        assert_eq!(store.is_complete(), mismatch.is_none(), "{counts:?}");
        assert_eq!(store.count_mismatch().as_deref(), mismatch);
    }
}

#[test]
fn counts_are_those_after_the_update() {
    let mut store = store_with(&ServerPolicy::of(&sample_placement(3)));
    let endpoint = |i: u8| key(Kind::Endpoint, &format!("10.0.0.{i}"));
    let same = |i: u8| (endpoint(i), store.resources().get(&endpoint(i)).cloned());
    // 1 is removed, 9 is removed but unknown, 2 is sent again, 3 is removed and added again.
    let first = response(Kind::Endpoint, &[(endpoint(1), None), (endpoint(9), None), same(2), (endpoint(3), None)]);
    let second = response(Kind::Endpoint, &[same(3)]);
    store.stage(first).unwrap();
    store.stage(second).unwrap();
    store.stage(settings_with([1, 1, 1, 3, 0, 1, 1, 1, 1])).unwrap();
    assert!(!store.is_complete());
    store.stage(settings_with([1, 1, 1, 2, 0, 1, 1, 1, 1])).unwrap();
    assert!(store.is_complete());
    store.commit();
    store.stage(settings_with([1, 1, 1, 2, 0, 1, 1, 1, 1])).unwrap();
    assert!(store.is_complete());
}

#[test]
fn removed_settings_do_not_complete_an_update() {
    let mut store = store_with(&ServerPolicy::of(&sample_placement(2)));
    assert!(store.expects_settings());
    store.stage(response(Kind::Settings, &[(key(Kind::Settings, "settings"), None)])).unwrap();
    assert!(!store.is_complete() && !store.expects_settings());
    store.discard();
    assert!(store.expects_settings());
}
