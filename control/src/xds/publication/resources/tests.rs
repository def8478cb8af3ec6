//! The resources of successive placements equal those of each placement by itself.

mod node_policies;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use vipgate_coverage::property;
use vipgate_policy::compiler::shard_groups;

use super::super::Publication;
use super::*;
use crate::xds::fixtures::large_service;
use crate::xds::resource::{encode_all, version_of};
use crate::xds::store::tests::generators::any_placement;

fn encoded(placement: &Placement) -> BTreeMap<Key, Content> {
    encode_all(placement).into_iter().collect()
}

/// The keys of the resources that differ.
fn differing(before: &Placement, after: &Placement) -> BTreeSet<Key> {
    let (before, after) = (encoded(before), encoded(after));
    before.keys().chain(after.keys()).filter(|key| before.get(key) != after.get(key)).cloned().collect()
}

/// The placement with another Service, which has slices.
fn with_service(placement: &Placement, backends: u32) -> Placement {
    let services = placement.services.iter().cloned().chain([large_service(backends)]).collect();
    Placement { services, ..placement.clone() }
}

/// A placement with the same content, which shares with the previous one what doesn't differ.
fn sharing(old: &Placement, new: &Placement) -> Placement {
    Placement {
        policies: old.policies.replaced(new.policies.to_vec()),
        shard_maps: if old.shard_maps == new.shard_maps { &old.shard_maps } else { &new.shard_maps }.clone(),
        vips: old.vips.replaced(new.vips.to_vec()),
        endpoints: old.endpoints.replaced(new.endpoints.to_vec()),
        services: old.services.replaced(new.services.to_vec()),
        ..new.clone()
    }
}

#[test]
fn a_publication_has_the_resources_of_its_placement_and_lists_those_that_differ() {
    let service = prop::option::of(prop::sample::select(vec![300_u32, 321, 700]));
    let step = (any_placement(), service, prop::bool::weighted(0.8), any::<prop::sample::Index>());
    let steps = prop::collection::vec(step, 1..8);
    let mut classes: Vec<&str> = Kind::ALL[..Kind::COUNTED].iter().map(|kind| kind.name()).collect();
    classes.extend(["nothing differs", "removed", "shard groups stay"]);
    property(ProptestConfig::with_cases(96), &steps, &classes, |steps, coverage| {
        let mut published = vec![Publication::default()];
        for (placement, service, differs, earlier) in steps {
            let last = published.last().unwrap();
            let placement = if differs { placement } else { (*last.placement).clone() };
            let placement = service.map_or(placement.clone(), |backends| with_service(&placement, backends));
            let placement = Arc::new(sharing(&last.placement, &placement));
            let keys = differing(&last.placement, &placement);
            let Some(next) = last.next(placement.clone()) else {
                prop_assert!(keys.is_empty() && last.number > 0);
                coverage.count("nothing differs");
                continue;
            };
            let expected = encoded(&placement);
            for kind in &Kind::ALL[..Kind::COUNTED] {
                let resources = next.of_kind(*kind).map(|it| (it.key.clone(), it.content.clone()));
                let of_kind = expected.iter().filter(|(key, _)| key.kind == *kind);
                prop_assert_eq!(next.count(*kind), of_kind.clone().count());
                let of_kind: BTreeMap<Key, Content> = of_kind.map(|(key, it)| (key.clone(), it.clone())).collect();
                prop_assert_eq!(resources.collect::<BTreeMap<_, _>>(), of_kind);
            }
            for (key, content) in &expected {
                prop_assert_eq!(next.get(key).map(|it| &it.content), Some(content));
            }
            prop_assert_eq!(&next.version, &version_of(&placement));
            let without_settings = |keys: &[Key]| -> BTreeSet<Key> {
                keys.iter().filter(|it| it.kind != Kind::Settings).cloned().collect()
            };
            prop_assert_eq!(without_settings(&next.changed_keys), keys.clone());
            for key in keys {
                coverage.count(key.kind.name());
                coverage.add("removed", u64::from(next.get(&key).is_none()));
            }
            prop_assert_eq!(&*next.shard_groups, &shard_groups(&placement.vips, &placement.shard_maps));
            coverage.add("shard groups stay", u64::from(Arc::ptr_eq(&next.shard_groups, &last.shard_groups)));
            let earlier = earlier.get(&published);
            let since = without_settings(&next.changed_since(earlier));
            prop_assert_eq!(since, differing(&earlier.placement, &placement));
            published.push(next);
        }
        Ok(())
    });
}

#[test]
fn the_slices_of_a_service_are_found_among_those_of_one_with_a_similar_name() {
    let other = PlacedService { name: "Service a/s#1".into(), ..large_service(300) };
    let services = [large_service(700), other].into_iter().collect();
    let published = Publication::default().next(Arc::new(Placement { services, ..Placement::default() })).unwrap();
    for (name, count) in [("Service a/s", 11), ("Service a/s#1", 5), ("Service a/", 0)] {
        let slices = published.slices_of(&Key { kind: Kind::Service, name: name.into() });
        let of: Vec<&str> = slices.filter_map(|it| Some(parse_name(&it.key.name)?.0)).collect();
        assert_eq!(of, vec![name; count]);
    }
}
