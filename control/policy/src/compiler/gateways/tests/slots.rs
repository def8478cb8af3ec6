//! Slots of a shard map: order, distribution over gateways, and distances.

use vipgate_dataplane::policy::spec::{SLOTS, ShardMapSpec};

use super::*;
use crate::compiler::shard_maps::{MapKey, ShardMaps};

/// The map of all gateways for a group and a place.
fn map(gateways: &Gateways<'_>, group: &str, locality: Locality<'_>, requires_zone: bool) -> ShardMapSpec {
    let key =
        MapKey { candidates: &gateways.candidates(None), gateways: &all_of(gateways), group, locality, requires_zone };
    ShardMaps::default().get(&key, gateways).spec.clone()
}

fn orders(map: &ShardMapSpec) -> impl Iterator<Item = &[Arc<str>]> {
    (0..SLOTS as u16).map(|slot| map.order(slot))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn an_added_gateway_is_inserted_into_the_order_of_each_slot(
        count in 2..=NAMES.len(), at in any::<prop::sample::Index>(), group in "[a-z]",
    ) {
        let (capacities, at) = (vec![UNLIMITED; count], at.index(count));
        let (all, fewer) = (gateways(&capacities), without(&capacities, at));
        let (before, after) =
            (map(&fewer, &group, Locality::default(), false), map(&all, &group, Locality::default(), false));
        prop_assert_eq!(&before.name, &after.name);
        for (before, after) in orders(&before).zip(orders(&after)) {
            prop_assert_eq!(after.len(), count.min(1 + MAX_BACKUPS));
            let others: Vec<_> = after.iter().filter(|name| ***name != *NAMES[at]).collect();
            prop_assert_eq!(&others, &before.iter().take(others.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn nearer_gateways_come_first_and_others_only_if_the_zone_is_not_required(
        zones in prop::collection::vec(prop::sample::select(vec![None, Some("z1"), Some("z2")]), NAMES.len()),
        node in prop::option::of(prop::sample::select(NAMES.to_vec())),
    ) {
        let all = NAMES.iter().zip(&zones).map(|(name, zone)| gateway(name, name, *zone, UNLIMITED));
        let gateways = Gateways::from_entries(all.collect());
        let locality = Locality { node, zone: Some("z1") };
        let distance = |name: &Arc<str>| {
            let at = NAMES.iter().position(|it| **it == **name).unwrap();
            gateways.distance(at, locality)
        };
        for requires_zone in [false, true] {
            let near = all_of(&gateways).into_iter().filter(|id| gateways.distance(*id, locality) < 2).count();
            if requires_zone && near == 0 {
                continue;
            }
            let map = map(&gateways, "g", locality, requires_zone);
            for order in orders(&map) {
                prop_assert!(order.is_sorted_by_key(distance), "{:?}", order);
                prop_assert!(!requires_zone || order.iter().all(|name| distance(name) < 2), "{:?}", order);
                let eligible = if requires_zone { near } else { NAMES.len() };
                prop_assert_eq!(order.len(), eligible.min(1 + MAX_BACKUPS));
            }
        }
    }
}

#[test]
fn slots_are_spread_evenly_and_differ_between_the_variants() {
    let gateways = gateways(&[UNLIMITED; 5]);
    let mut variants: BTreeMap<Arc<str>, ShardMapSpec> = BTreeMap::new();
    for group in 0..64 {
        let map = map(&gateways, &format!("Service a/s{group}"), Locality::default(), false);
        variants.insert(map.name.clone(), map);
    }
    assert_eq!(variants.len(), 4);
    for map in variants.values() {
        let mut counts: BTreeMap<&Arc<str>, usize> = BTreeMap::new();
        orders(map).for_each(|order| *counts.entry(&order[0]).or_default() += 1);
        // Mean 205, standard deviation 13.
        assert!(counts.len() == 5 && counts.values().all(|count| (150..260).contains(count)), "{counts:?}");
        assert_eq!((map.slots.len(), map.orders.len()), (SLOTS, 5 * 4 * 3 * 2), "each order occurs");
    }
    let homes: BTreeSet<Vec<&Arc<str>>> = variants.values().map(|map| orders(map).map(|it| &it[0]).collect()).collect();
    assert_eq!(homes.len(), 4);
}
