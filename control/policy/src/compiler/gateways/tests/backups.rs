//! Backups of a shard: number, order and distribution.

use super::*;

fn backups(gateways: &Gateways<'_>, group: &str, home: GatewayId, candidates: &[GatewayId]) -> Vec<Arc<str>> {
    let capacity: Vec<usize> = gateways.all.iter().map(|gateway| gateway.capacity).collect();
    gateways.backups(group, home, candidates, &capacity).into_iter().map(|id| gateways.name(id).clone()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn backups_are_distinct_other_candidates_up_to_the_maximum(
        count in 1..=NAMES.len(), group in "[a-z]{1,8}", (home, candidates) in (0..NAMES.len(), some_of(NAMES.len())),
    ) {
        let gateways = gateways(&vec![UNLIMITED; NAMES.len()]);
        let candidates: Vec<_> = candidates.into_iter().filter(|id| *id < count).collect();
        let got = backups(&gateways, &group, home, &candidates);
        let others = candidates.iter().filter(|id| **id != home);
        let eligible: BTreeSet<_> = others.map(|id| gateways.name(*id).clone()).collect();
        prop_assert!(got.iter().all(|name| eligible.contains(name)));
        prop_assert_eq!(got.iter().collect::<BTreeSet<_>>().len(), eligible.len().min(MAX_BACKUPS));
        prop_assert_eq!(got.len(), eligible.len().min(MAX_BACKUPS));
    }

    /// A removed gateway is left out and its successors move up; an added one is inserted.
    #[test]
    fn an_added_or_removed_gateway_does_not_reorder_the_others(
        group in "[a-z]{1,8}", home in 0..NAMES.len(), removed in 0..NAMES.len(),
    ) {
        let all = gateways(&[UNLIMITED; NAMES.len()]);
        let rest: Vec<_> = all_of(&all).into_iter().filter(|id| *id != removed).collect();
        let (with, without) = (backups(&all, &group, home, &all_of(&all)), backups(&all, &group, home, &rest));
        let others: Vec<_> = with.iter().filter(|name| ***name != *NAMES[removed]).collect();
        prop_assert_eq!(others.clone(), without.iter().take(others.len()).collect::<Vec<_>>());
    }

    #[test]
    fn gateways_at_capacity_are_the_last_backups(
        capacities in prop::collection::vec(0..2_usize, NAMES.len()), home in 0..NAMES.len(),
    ) {
        let gateways = gateways(&capacities);
        let got = backups(&gateways, "g", home, &all_of(&gateways));
        let is_full = |name: &Arc<str>| capacities[NAMES.iter().position(|it| **it == **name).unwrap()] == 0;
        prop_assert!(got.is_sorted_by_key(is_full));
        let with_capacity = all_of(&gateways).into_iter().filter(|id| *id != home && capacities[*id] > 0).count();
        prop_assert_eq!(got.iter().filter(|name| !is_full(name)).count(), with_capacity.min(MAX_BACKUPS));
    }
}

/// The first backups of a gateway's shards are distributed evenly, and so are the second ones for each first one.
#[test]
fn shards_of_a_failed_gateway_are_spread_over_all_others() {
    let gateways = gateways(&[UNLIMITED; NAMES.len()]);
    let mut counts: BTreeMap<Vec<Arc<str>>, usize> = BTreeMap::new();
    for group in 0..10_000 {
        let mut order = backups(&gateways, &format!("Service a/s{group}"), 2, &all_of(&gateways));
        order.truncate(2);
        *counts.entry(order).or_default() += 1;
    }
    // Mean 500, standard deviation 22.
    assert_eq!(counts.len(), 5 * 4);
    assert!(counts.values().all(|count| (400..600).contains(count)), "{counts:?}");
}
