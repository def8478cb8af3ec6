//! Who stands in for whom.

use super::*;

fn backups(gateways: &Gateways<'_>, group: &str, home: GatewayId, among: &[GatewayId]) -> Vec<Arc<str>> {
    let room: Vec<usize> = gateways.all.iter().map(|known| known.room).collect();
    gateways.backups(group, home, among, &room).into_iter().map(|id| gateways.name(id).clone()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn as_many_others_as_may_stand_in_each_once(
        count in 1..=NAMES.len(), group in "[a-z]{1,8}", (home, among) in (0..NAMES.len(), some_of(NAMES.len())),
    ) {
        let gateways = gateways(&vec![UNLIMITED; NAMES.len()]);
        let among: Vec<_> = among.into_iter().filter(|id| *id < count).collect();
        let got = backups(&gateways, &group, home, &among);
        let may: BTreeSet<_> = among.iter().filter(|id| **id != home).map(|id| gateways.name(*id).clone()).collect();
        prop_assert!(got.iter().all(|name| may.contains(name)));
        prop_assert_eq!(got.iter().collect::<BTreeSet<_>>().len(), may.len().min(MOST_BACKUPS));
        prop_assert_eq!(got.len(), may.len().min(MOST_BACKUPS));
    }

    /// Who goes is left out and whoever came behind it moves up; who comes is put in somewhere.
    #[test]
    fn a_gateway_more_or_less_changes_no_order_of_the_others(
        group in "[a-z]{1,8}", home in 0..NAMES.len(), gone in 0..NAMES.len(),
    ) {
        let all = gateways(&[UNLIMITED; NAMES.len()]);
        let rest: Vec<_> = all_of(&all).into_iter().filter(|id| *id != gone).collect();
        let (with, without) = (backups(&all, &group, home, &all_of(&all)), backups(&all, &group, home, &rest));
        let others: Vec<_> = with.iter().filter(|name| ***name != *NAMES[gone]).collect();
        prop_assert_eq!(others.clone(), without.iter().take(others.len()).collect::<Vec<_>>());
    }

    #[test]
    fn who_has_no_room_stands_in_after_all_who_have(rooms in prop::collection::vec(0..2_usize, NAMES.len()), home in 0..NAMES.len()) {
        let gateways = gateways(&rooms);
        let got = backups(&gateways, "g", home, &all_of(&gateways));
        let full = |name: &Arc<str>| rooms[NAMES.iter().position(|it| **it == **name).unwrap()] == 0;
        prop_assert!(got.is_sorted_by_key(full));
        let with_room = all_of(&gateways).into_iter().filter(|id| *id != home && rooms[*id] > 0).count();
        prop_assert_eq!(got.iter().filter(|name| !full(name)).count(), with_room.min(MOST_BACKUPS));
    }
}

/// What a dead gateway had falls to all others alike, and what the two of a pair had that die together does too.
#[test]
fn what_one_gateway_had_is_spread_over_all_others() {
    let gateways = gateways(&[UNLIMITED; NAMES.len()]);
    let mut counts: BTreeMap<Vec<Arc<str>>, usize> = BTreeMap::new();
    for group in 0..10_000 {
        let mut order = backups(&gateways, &format!("Service a/s{group}"), 2, &all_of(&gateways));
        order.truncate(2);
        *counts.entry(order).or_default() += 1;
    }
    // 500 each; the deviation is 22.
    assert_eq!(counts.len(), 5 * 4);
    assert!(counts.values().all(|count| (400..600).contains(count)), "{counts:?}");
}
