//! Shard moves when gateways are drained or fail.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::compiler::tests::rebalancing::{GATEWAYS, documents_with_gateways};

fn names(names: &[&str]) -> BTreeSet<Arc<str>> {
    names.iter().map(|name| Arc::from(*name)).collect()
}

fn moves_between(placement: &Placement, before: &BTreeSet<Arc<str>>, after: &BTreeSet<Arc<str>>) -> Vec<ShardMove> {
    shard_moves(&placement.vips, &placement.endpoints, before, after)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Also in the other direction: a gateway that becomes active takes over only shards that it precedes the owner of.
    #[test]
    fn only_shards_of_a_failed_gateway_move(
        documents in documents_with_gateways(),
        active in prop::sample::subsequence(GATEWAYS.to_vec(), 1..=4),
        at in any::<prop::sample::Index>(),
    ) {
        let placement = compiled(&documents).placement;
        let failed: Arc<str> = (*at.get(&active)).into();
        let before = names(&active);
        let after: BTreeSet<_> = before.iter().filter(|name| **name != failed).cloned().collect();
        let all = moves_between(&placement, &before, &after);
        for it in &all {
            prop_assert_eq!(it.changes_owner(), it.before.as_ref() == Some(&failed), "{:?}", it);
            prop_assert!(it.before.as_ref().is_none_or(|name| before.contains(name)), "{:?}", it);
            prop_assert!(it.after.as_ref().is_none_or(|name| after.contains(name)), "{:?}", it);
            if before.contains(&it.home) {
                prop_assert_eq!(it.before.as_ref(), Some(&it.home));
            }
        }
        let reverse = moves_between(&placement, &after, &before);
        let is_reverse = |(back, forth): (&ShardMove, &ShardMove)| {
            (&back.before, &back.after) == (&forth.after, &forth.before)
        };
        prop_assert!(reverse.iter().zip(&all).all(is_reverse));
        prop_assert_eq!(all.len(), placement.vips.iter().map(|vip| vip.shards.len()).sum::<usize>());
        let with_home = placement.endpoints.iter().filter(|endpoint| endpoint.gateway.is_some()).count();
        prop_assert_eq!(all.iter().map(|it| it.endpoints).sum::<usize>(), with_home);
    }
}

#[test]
fn a_shard_of_a_drained_gateway_moves_to_its_first_active_backup() {
    let placement = compiled(&[
        gateway("gw-a", ""),
        gateway("gw-b", ""),
        gateway("gw-c", ""),
        service("s", EGRESS, 80, &["203.0.113.1"]),
        slice("s", &["10.0.0.1", "10.0.0.2"]),
    ])
    .placement;
    let shard = &placement.vips[0].shards[0];
    let (home, [first, second]) = (&shard.gateway, &shard.backups[..]) else { panic!("two backups: {shard:?}") };
    let all = names(&["gw-a", "gw-b", "gw-c"]);
    let without =
        |drained: &[&Arc<str>]| -> BTreeSet<_> { all.iter().filter(|it| !drained.contains(it)).cloned().collect() };
    let owner_after = |after| {
        let [only] = &moves_between(&placement, &all, &after)[..] else { panic!("one shard") };
        assert_eq!((&only.before, only.endpoints), (&Some(home.clone()), 2));
        only.after.clone()
    };
    assert_eq!(owner_after(without(&[home])), Some(first.clone()));
    assert_eq!(owner_after(without(&[home, first])), Some(second.clone()));
    assert_eq!(owner_after(without(&[second])), Some(home.clone()));
    assert_eq!(owner_after(BTreeSet::new()), None);
    let standalone = compiled(&[service("s", EGRESS, 80, &["203.0.113.1"])]).placement;
    assert_eq!(moves_between(&standalone, &all, &BTreeSet::new()), []);
}

#[test]
fn shards_with_the_same_candidates_form_one_group() {
    let policy = |name: &str, vip: &str, gateways: &str| {
        format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: {name}, namespace: t}}\nspec:\n  \
             selectors: [{{podSelector: {{}}}}]\n  addresses: [{vip}]\n  gateways: {{names: [{gateways}]}}\n"
        )
    };
    let placement = compiled(&[
        gateway("gw-a", ""),
        gateway("gw-b", ""),
        gateway("gw-c", ""),
        policy("pair", "203.0.113.1", "gw-b, gw-a"),
        policy("same", "203.0.113.2", "gw-a, gw-b"),
        policy("one", "203.0.113.3", "gw-c"),
    ])
    .placement;
    let expected = [vec!["gw-a".into(), "gw-b".into()], vec!["gw-c".into()]];
    assert_eq!(shard_groups(&placement.vips), BTreeSet::<Vec<Arc<str>>>::from(expected));
}
