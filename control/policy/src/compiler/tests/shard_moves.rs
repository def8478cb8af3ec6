//! Shard moves when gateways are drained or fail.

use std::collections::BTreeSet;

use proptest::prelude::*;
use vipgate_coverage::property;

use super::*;
use crate::compiler::tests::rebalancing::{GATEWAYS, documents_with_gateways};

fn names(names: &[&str]) -> BTreeSet<Arc<str>> {
    names.iter().map(|name| Arc::from(*name)).collect()
}

fn moves_between(placement: &Placement, before: &BTreeSet<Arc<str>>, after: &BTreeSet<Arc<str>>) -> Vec<ShardMove> {
    let (vips, endpoints) = (placement.vips.to_vec(), placement.endpoints.to_vec());
    let placed = Placed { vips: &vips, shard_maps: &placement.shard_maps, endpoints: &endpoints };
    shard_moves(placed, before, after)
}

/// Also in the other direction: a gateway that becomes active takes over only shards that it precedes the owner of.
#[test]
fn only_shards_of_a_failed_gateway_move() {
    let inputs =
        (documents_with_gateways(), prop::sample::subsequence(GATEWAYS.to_vec(), 1..=4), any::<prop::sample::Index>());
    let classes = ["a listed shard moves", "a slot moves", "endpoints move", "endpoints stay", "nobody is left"];
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    property(config, &inputs, &classes, |(documents, active, at), coverage| {
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
            let vip = placement.vips.iter().find(|vip| vip.address == it.vip).unwrap();
            let of_map = if vip.shard_map.is_some() { "a slot moves" } else { "a listed shard moves" };
            coverage.add(of_map, u64::from(it.changes_owner()));
            coverage.add(if it.changes_owner() { "endpoints move" } else { "endpoints stay" }, it.endpoints as u64);
            coverage.add("nobody is left", u64::from(it.changes_owner() && it.after.is_none()));
        }
        let reverse = moves_between(&placement, &after, &before);
        let mut reversed: Vec<_> = reverse.into_iter().map(|it| (it.vip, it.home, it.after, it.before)).collect();
        reversed.sort();
        let forward = all.iter().map(|it| (it.vip, it.home.clone(), it.before.clone(), it.after.clone()));
        prop_assert_eq!(reversed, forward.collect::<Vec<_>>());
        // Each home of each VIP is listed, and each endpoint with a home is counted once.
        for vip in &placement.vips {
            let homes: BTreeSet<_> = block_orders(&placement, vip).into_iter().map(|order| order[0].clone()).collect();
            let listed = all.iter().filter(|it| it.vip == vip.address).map(|it| it.home.clone()).collect();
            prop_assert!(homes.is_subset(&listed), "{}: {:?} {:?}", vip.address, homes, listed);
        }
        let with_home = placement.endpoints.iter().filter(|it| placement.gateway_of(it).is_some()).count();
        prop_assert_eq!(all.iter().map(|it| it.endpoints).sum::<usize>(), with_home);
        Ok(())
    });
}

/// With different owners for one home: the slots of a gateway have different backups.
#[test]
fn slots_of_a_failed_gateway_move_to_different_gateways() {
    let v4: Vec<String> = (1..=100).map(|n| format!("10.0.0.{n}")).collect();
    let mut documents: Vec<String> = GATEWAYS.iter().map(|name| gateway(name, "")).collect();
    documents.extend([
        pool("bgp", "{ranges: [198.51.100.0/24], announce: BGP}"),
        service("s", EGRESS, 80, &["198.51.100.1", "203.0.113.1"]),
        slice("s", &v4.iter().map(String::as_str).collect::<Vec<_>>()),
    ]);
    let placement = compiled(&documents).placement;
    let (before, after) = (names(&GATEWAYS), names(&GATEWAYS[1..]));
    let all = moves_between(&placement, &before, &after);
    let moved: Vec<_> = all.iter().filter(|it| it.changes_owner() && it.vip == ip("198.51.100.1")).collect();
    let to: Vec<&str> = moved.iter().map(|it| it.after.as_deref().unwrap()).collect();
    assert_eq!(to, GATEWAYS[1..], "sorted");
    assert!(moved.iter().all(|it| &*it.home == GATEWAYS[0] && it.endpoints > 0), "{moved:?}");
    let at_failed = placement.endpoints.iter().filter(|it| &**placement.gateway_of(it).unwrap() == GATEWAYS[0]);
    assert_eq!(moved.iter().map(|it| it.endpoints).sum::<usize>(), at_failed.count());
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
    assert_eq!(shard_groups(&placement.vips, &placement.shard_maps), BTreeSet::<Vec<Arc<str>>>::from(expected));
}
