//! What would move if gateways stopped.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::moves::{GATEWAYS, dealt_world};
use super::*;

fn names(names: &[&str]) -> BTreeSet<Arc<str>> {
    names.iter().map(|name| Arc::from(*name)).collect()
}

fn who_serves(deal: &Deal, before: &BTreeSet<Arc<str>>, after: &BTreeSet<Arc<str>>) -> Vec<Move> {
    moves(&deal.vips, &deal.endpoints, before, after)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The same the other way: one that comes takes what it comes before others for.
    #[test]
    fn only_what_its_owner_leaves_moves(
        documents in dealt_world(), serving in prop::sample::subsequence(GATEWAYS.to_vec(), 1..=4), at in any::<prop::sample::Index>(),
    ) {
        let deal = compiled(&documents).deal;
        let gone: Arc<str> = (*at.get(&serving)).into();
        let before = names(&serving);
        let after: BTreeSet<_> = before.iter().filter(|name| **name != gone).cloned().collect();
        let all = who_serves(&deal, &before, &after);
        for it in &all {
            prop_assert_eq!(it.is_one(), it.before.as_ref() == Some(&gone), "{:?}", it);
            prop_assert!(it.before.as_ref().is_none_or(|name| before.contains(name)), "{:?}", it);
            prop_assert!(it.after.as_ref().is_none_or(|name| after.contains(name)), "{:?}", it);
            if before.contains(&it.home) {
                prop_assert_eq!(it.before.as_ref(), Some(&it.home));
            }
        }
        let there_and_back = who_serves(&deal, &after, &before).into_iter();
        prop_assert!(there_and_back.zip(&all).all(|(back, there)| (back.before, back.after) == (there.after.clone(), there.before.clone())));
        prop_assert_eq!(all.len(), deal.vips.iter().map(|vip| vip.shares.len()).sum::<usize>());
        let with_home = deal.endpoints.iter().filter(|endpoint| endpoint.gateway.is_some()).count();
        prop_assert_eq!(all.iter().map(|it| it.endpoints).sum::<usize>(), with_home);
    }
}

#[test]
fn a_drained_gateways_shares_go_to_the_first_that_serves() {
    let deal = compiled(&[
        gateway("gw-a", ""),
        gateway("gw-b", ""),
        gateway("gw-c", ""),
        service("s", EGRESS, 80, &["203.0.113.1"]),
        slice("s", &["10.0.0.1", "10.0.0.2"]),
    ])
    .deal;
    let share = &deal.vips[0].shares[0];
    let (home, [first, second]) = (&share.gateway, &share.backups[..]) else { panic!("two stand in: {share:?}") };
    let everybody = names(&["gw-a", "gw-b", "gw-c"]);
    let but =
        |gone: &[&Arc<str>]| -> BTreeSet<_> { everybody.iter().filter(|it| !gone.contains(it)).cloned().collect() };
    let to = |after| {
        let [only] = &who_serves(&deal, &everybody, &after)[..] else { panic!("one share") };
        assert_eq!((&only.before, only.endpoints), (&Some(home.clone()), 2));
        only.after.clone()
    };
    assert_eq!(to(but(&[home])), Some(first.clone()));
    assert_eq!(to(but(&[home, first])), Some(second.clone()));
    assert_eq!(to(but(&[second])), Some(home.clone()));
    assert_eq!(to(BTreeSet::new()), None);
    let alone = compiled(&[service("s", EGRESS, 80, &["203.0.113.1"])]).deal;
    assert_eq!(who_serves(&alone, &everybody, &BTreeSet::new()), []);
}
