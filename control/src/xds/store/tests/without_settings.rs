//! Servers that send no Settings.

use super::*;
use crate::xds::store::tests::generators::any_placement;

proptest! {
    /// The version is a hash of the resources, independent of their order of arrival, and the same after a restart.
    #[test]
    fn a_version_without_settings_depends_only_on_the_resources(
        placements in prop::collection::vec(any_placement(), 1..5),
        seed: u64,
    ) {
        let (mut rng, mut store, mut builder) = (SeededRng(seed), ResourceStore::default(), builder());
        let mut history = vec![ServerPolicy::default()];
        for placement in &placements {
            let (before, server) = (history.last().unwrap(), ServerPolicy::of(placement).without_settings());
            for response in server.shuffled_responses(before, &history, &mut rng) {
                store.stage(response).unwrap();
                prop_assert!(!store.is_complete() && !store.expects_settings());
            }
            let change = store.update_for(&GatewayLocality::named("g1")).change;
            let snapshot = builder.with_change(&change).unwrap();
            let gateway = GatewayLocality::named("g1");
            let expected = build_policy_view(&whole_policy(placement, &gateway, &change.version));
            prop_assert_eq!(policy_view(&snapshot.policy), expected);
            store.commit();
            prop_assert_eq!(store.version(), &change.version);
            prop_assert_eq!(store.resources(), &server.resources);

            let mut restarted = ResourceStore::default();
            restarted.stage_cached(server.resources.clone()).unwrap();
            prop_assert_eq!(&restarted.update_for(&GatewayLocality::named("g1")).change.version, &change.version);
            history.push(server);
        }
    }
}

#[test]
fn other_content_has_another_version() {
    let version = |kind: Kind, name: &str, version: &str| {
        let body = prost::Message::encode_to_vec(&proto::Gateway { name: name.to_owned(), ..Default::default() });
        let stored = StoredResource { version: version.to_owned(), body: body.into() };
        let mut store = ResourceStore::default();
        store.resources.insert(key(kind, name), stored);
        store.update_for(&GatewayLocality::named("g1")).change.version
    };
    let mut versions = BTreeSet::new();
    for (kind, name, resource_version) in [
        (Kind::Gateway, "ab", "c"),
        (Kind::Gateway, "a", "bc"),
        (Kind::Gateway, "ab", "d"),
        (Kind::EgressPolicy, "ab", "c"),
    ] {
        versions.insert(version(kind, name, resource_version));
    }
    assert_eq!(versions.len(), 4);
}
