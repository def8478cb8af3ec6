//! Backups of a VIP that one gateway owns: number, order and distribution.

use super::*;

/// Backups of each VIP, by name.
fn backups(gateways: &Gateways<'_>, requests: &[Request]) -> Vec<Vec<Arc<str>>> {
    let names = |ids: Vec<GatewayId>| ids.into_iter().map(|id| gateways.name(id).clone()).collect();
    assignment(gateways, requests).backups.into_iter().map(names).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn backups_are_distinct_other_candidates_up_to_the_maximum(
        capacities in capacities(NAMES.len(), 4), requests in random_requests(NAMES.len()),
    ) {
        let gateways = gateways(&capacities);
        let Assignment { owners, backups } = assignment(&gateways, &requests);
        for ((it, owners), backups) in requests.iter().zip(owners).zip(backups) {
            if it.shared || owners.is_empty() {
                prop_assert!(backups.is_empty());
                continue;
            }
            let eligible: BTreeSet<_> = it.candidates.iter().copied().filter(|id| *id != owners[0]).collect();
            prop_assert!(backups.iter().all(|id| eligible.contains(id)));
            prop_assert_eq!(backups.iter().collect::<BTreeSet<_>>().len(), backups.len());
            prop_assert_eq!(backups.len(), eligible.len().min(MAX_BACKUPS));
        }
    }

    /// A removed gateway is left out and its successors move up; an added one is inserted.
    #[test]
    fn an_added_or_removed_gateway_does_not_reorder_the_others(number in any::<u8>(), removed in 0..NAMES.len()) {
        let all = gateways(&[UNLIMITED; NAMES.len()]);
        let rest: Vec<_> = all_of(&all).into_iter().filter(|id| *id != removed).collect();
        let order = |candidates| order_of(&all, Request::single(number, candidates));
        let (with, without) = (order(all_of(&all)), order(rest));
        let others: Vec<_> = with.iter().filter(|name| ***name != *NAMES[removed]).collect();
        prop_assert_eq!(others.clone(), without.iter().take(others.len()).collect::<Vec<_>>());
    }

    /// Of all candidates: also of those that were not at capacity at the VIP's own turn.
    #[test]
    fn gateways_at_capacity_are_the_last_backups(
        capacities in prop::collection::vec(1..4_usize, NAMES.len()), count in 1..12_u8,
    ) {
        let gateways = gateways(&capacities);
        let requests: Vec<Request> = (1..=count).map(|number| Request::single(number, all_of(&gateways))).collect();
        let Assignment { owners, backups } = assignment(&gateways, &requests);
        let is_full = |id: &GatewayId| owners.iter().filter(|owners| owners.contains(id)).count() == capacities[*id];
        for (owners, backups) in owners.iter().zip(&backups) {
            let Some(home) = owners.first() else { continue };
            prop_assert!(backups.is_sorted_by_key(is_full));
            let with_capacity = all_of(&gateways).into_iter().filter(|id| id != home && !is_full(id)).count();
            prop_assert_eq!(backups.iter().filter(|id| !is_full(id)).count(), with_capacity.min(MAX_BACKUPS));
        }
    }

    #[test]
    fn if_the_zone_is_required_backups_are_in_the_zone_of_the_home(
        zones in prop::collection::vec(prop::sample::select(vec![None, Some("z1"), Some("z2")]), NAMES.len()),
        number in any::<u8>(),
    ) {
        let all = NAMES.iter().zip(&zones).map(|(name, zone)| gateway(name, name, *zone, UNLIMITED));
        let gateways = Gateways::from_entries(all.collect());
        let request = Request { requires_zone: true, ..Request::single(number, all_of(&gateways)) };
        let Assignment { owners, backups } = assignment(&gateways, &[request]);
        let home = owners[0][0];
        let is_near = |id: &GatewayId| *id != home && zones[home].is_some() && zones[*id] == zones[home];
        prop_assert!(backups[0].iter().all(is_near));
        prop_assert_eq!(backups[0].len(), all_of(&gateways).iter().filter(|id| is_near(id)).count().min(MAX_BACKUPS));
    }
}

/// The first backups of a gateway's VIPs are distributed evenly, and so are the second ones for each first one.
#[test]
fn vips_of_a_failed_gateway_are_spread_over_all_others() {
    let gateways = gateways(&[UNLIMITED; NAMES.len()]);
    let mut counts: BTreeMap<Vec<Arc<str>>, usize> = BTreeMap::new();
    let single = |n: u16| Request {
        vip: IpAddr::V4((0x0a00_0000 + u32::from(n)).into()),
        turn: n.into(),
        group: n.to_string(),
        ..Request::single(0, all_of(&gateways))
    };
    let requests: Vec<Request> = (0..60_000).map(single).collect();
    let owners = assignment(&gateways, &requests).owners;
    for (owners, mut order) in owners.iter().zip(backups(&gateways, &requests)) {
        order.truncate(2);
        if owners[0] == 2 {
            *counts.entry(order).or_default() += 1;
        }
    }
    // Mean 500, standard deviation 22.
    assert_eq!(counts.len(), 5 * 4);
    assert!(counts.values().all(|count| (400..600).contains(count)), "{counts:?}");
}
