//! Backend slices: a Service is the same, however its backends are divided and whatever changes.

use vipgate_coverage::property;

use super::*;
use crate::xds::fixtures::{large_service, sample_placement};
use crate::xds::resource::slices::slice_key;
use crate::xds::resource::{Content, encode};

/// The placement with this Service, or without Services.
fn placement(service: Option<PlacedService>) -> Placement {
    Placement { services: service.into_iter().collect(), ..sample_placement(2) }
}

#[test]
fn updates_of_a_large_service_equal_a_whole_one() {
    let step = (
        prop::sample::select(vec![0, 1, 255, 257, 300, 321, 700]),
        prop::collection::vec(any::<u16>(), 0..3),
        any::<bool>(),
    );
    let steps = prop::collection::vec(step, 1..8);
    let classes = ["no Service", "whole", "slices", "one slice", "more slices", "fewer slices"];
    property(ProptestConfig::with_cases(48), &steps, &classes, |steps, coverage| {
        let (mut store, mut server) = (ResourceStore::default(), ServerPolicy::default());
        let mut sum = Accumulated::default();
        let (mut count, mut slices) = (0, 0);
        for (new_count, changed, resizes) in steps {
            count = if resizes { new_count } else { count };
            let mut service = (count > 0).then(|| large_service(count));
            for n in changed {
                if let Some(service) = &mut service {
                    let at = n as usize % service.backends.len();
                    service.backends[at].weight = 1 + n % 7;
                }
            }
            let after = placement(service);
            let next = ServerPolicy::of(&after);
            let changes = next.diff(&server);
            let of_slices = changes.iter().filter(|(key, _)| key.kind == Kind::BackendSlice).count();
            let has_service = changes.iter().any(|(key, _)| key.kind == Kind::Service);
            for response in responses(&changes) {
                store.stage(response).unwrap();
            }
            if store.has_staged() {
                prop_assert!(store.is_complete());
                prop_assert_eq!(store.check_consistency(), Ok(()));
                let change = store.update_for(&GatewayLocality::named("g1")).change;
                let whole = whole_policy(&after, &GatewayLocality::named("g1"), &next.version);
                prop_assert_eq!(sum.apply(&change).2, whole.services);
                store.commit();
            }
            let now = next.resources.keys().filter(|key| key.kind == Kind::BackendSlice).count();
            coverage.count(if count == 0 {
                "no Service"
            } else if now == 0 {
                "whole"
            } else {
                "slices"
            });
            coverage.add("one slice", u64::from(of_slices == 1 && !has_service));
            coverage.add("more slices", u64::from(slices > 0 && now > slices));
            coverage.add("fewer slices", u64::from(now > 0 && now < slices));
            (server, slices) = (next, now);
        }
        Ok(())
    });
}

#[test]
fn missing_and_surplus_slices_are_errors_with_the_name_of_the_resource() {
    let policy = ServerPolicy::of(&placement(Some(large_service(300))));
    let stored = |(key, content): (Key, Content)| (key, StoredResource { version: "1".to_owned(), body: content.body });
    let error_with = |change: &dyn Fn(&mut BTreeMap<Key, StoredResource>)| {
        let mut resources = policy.resources.clone();
        change(&mut resources);
        let mut store = ResourceStore::default();
        store.stage_cached(resources).unwrap();
        store.check_consistency().map_err(|error| error.to_string())
    };
    assert_eq!(error_with(&|_| {}), Ok(()));
    let missing = error_with(&|all| drop(all.remove(&slice_key("Service a/s", 2))));
    assert_eq!(missing.unwrap_err(), "resource Service a/s: has 5 backend slices, but number 2 is missing");
    let without_service = error_with(&|all| all.retain(|key, _| key.kind != Kind::Service));
    assert_eq!(without_service.unwrap_err(), "resource BackendSlice Service a/s#0: there is no such Service");
    let small = stored(encode::service(&large_service(3)));
    let too_many = error_with(&|all| all.extend([small.clone()]));
    assert_eq!(too_many.unwrap_err(), "resource BackendSlice Service a/s#0: its Service has 0 backend slices");
}
