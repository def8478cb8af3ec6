//! The difference between two placements.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vipgate_coverage::property;

use super::worlds::{vip_homes, worlds};
use super::*;

fn diff(before: &Placement, after: &Placement) -> PlacementDiff {
    placement_diff(&Homes::from(before), &Homes::from(after))
}

#[test]
fn nothing_moves_between_equal_placements_and_the_numbers_of_moves_add_up() {
    let classes = ["VIP moves", "ports move", "endpoint moves", "VIP added", "VIP removed", "endpoint removed"];
    let config = ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() };
    property(config, &(worlds(), worlds()), &classes, |(before, after), coverage| {
        let (before, after) = (before.placement(), after.placement());
        let same = diff(&before, &before);
        prop_assert!(!same.moves_anything(), "{:?}", same);
        prop_assert!(
            same.gateways == GatewayChanges::default() && same.vips.added.is_empty() && same.vips.removed.is_empty()
        );
        prop_assert_eq!((same.vips.kept, same.endpoints.kept), (before.vips.len(), before.endpoints.len()));
        let json = serde_json::to_string(&Homes::from(&before)).unwrap();
        prop_assert_eq!(serde_json::from_str::<Homes>(&json).unwrap(), Homes::from(&before), "read as it was sent");

        let got = diff(&before, &after);
        prop_assert_eq!(got.vips.kept + got.vips.removed.len(), before.vips.len());
        prop_assert_eq!(got.vips.kept + got.vips.added.len(), after.vips.len());
        prop_assert_eq!(got.endpoints.kept + got.endpoints.removed, before.endpoints.len());
        prop_assert_eq!(got.endpoints.kept + got.endpoints.added, after.endpoints.len());
        let homes = |of: &Placement| -> BTreeMap<_, _> {
            vip_homes(of).into_iter().map(|((_, vip), homes)| (vip, homes)).collect()
        };
        let (old, new) = (homes(&before), homes(&after));
        let (mut moved_vips, mut moved_blocks) = (0, 0);
        for (vip, old) in &old {
            let Some(new) = new.get(vip) else { continue };
            let differ = old.iter().zip(new).filter(|(old, new)| old != new).count();
            *(if old.len() == 1 { &mut moved_vips } else { &mut moved_blocks }) += differ;
        }
        prop_assert_eq!((got.vips.moved.len(), got.moved_blocks()), (moved_vips, moved_blocks));
        let home = |placement: &Placement, address| {
            let endpoint = placement.endpoints.iter().find(|it| it.address == address)?;
            Some(placement.gateway_of(endpoint).cloned())
        };
        let moved = before
            .endpoints
            .iter()
            .filter(|it| home(&after, it.address).is_some_and(|new| Some(new) != home(&before, it.address)));
        prop_assert_eq!(got.moved_endpoints(), moved.count());
        coverage.add("VIP moves", moved_vips as u64);
        coverage.add("ports move", moved_blocks as u64);
        coverage.add("endpoint moves", got.moved_endpoints() as u64);
        coverage.add("VIP added", got.vips.added.len() as u64);
        coverage.add("VIP removed", got.vips.removed.len() as u64);
        coverage.add("endpoint removed", got.endpoints.removed as u64);
        // In reverse, everything moves back.
        let back = diff(&after, &before);
        let from_to = |diff: &PlacementDiff| -> Vec<(String, String, usize)> {
            diff.endpoints.moved.iter().map(|it| (it.from.clone(), it.to.clone(), it.endpoints)).collect()
        };
        let mut reversed: Vec<_> = from_to(&back).into_iter().map(|(from, to, count)| (to, from, count)).collect();
        reversed.sort();
        prop_assert_eq!(from_to(&got), reversed);
        prop_assert_eq!(got.moved_blocks(), back.moved_blocks());
        Ok(())
    });
}

#[test]
fn each_kind_of_change_is_listed() {
    let documents = |gateways: &[String], announce: &str, vips: &[&str]| {
        let mut documents = gateways.to_vec();
        documents.extend([
            pool("bgp", &format!("{{ranges: [198.51.100.0/24], announce: {announce}}}")),
            service("s", EGRESS, 80, vips),
            slice("s", &["10.0.0.1", "10.0.0.2"]),
        ]);
        compiled(&documents).placement
    };
    let (a, b) = (gateway("gw-a", ""), gateway("gw-b", ""));
    let one = documents(std::slice::from_ref(&a), "L2", &["203.0.113.1", "198.51.100.1"]);
    let moved_b = gateway_with("gw-a", "zone: z9");
    let got = diff(&one, &documents(&[moved_b, b], "BGP", &["203.0.113.2", "198.51.100.1"]));
    let expected = GatewayChanges { added: vec!["gw-b".into()], removed: vec![], changed: vec!["gw-a".into()] };
    assert_eq!(got.gateways, expected);
    let placed = |list: &[PlacedVip]| list.iter().map(|it| it.vip.to_string()).collect::<Vec<_>>();
    assert_eq!(
        (placed(&got.vips.added), placed(&got.vips.removed)),
        (vec!["203.0.113.2".into()], vec!["203.0.113.1".into()])
    );
    // A VIP that was L2 and is distributed now counts by its blocks.
    let [moves] = &got.ports.moved[..] else { panic!("{got:?}") };
    assert_eq!((&*moves.from, &*moves.to, moves.vips), ("gw-a", "gw-b", 1));
    assert!((400..624).contains(&moves.blocks), "{got:?}");
    assert_eq!((got.ports.vips, got.ports.blocks, got.vips.kept), (1, SLOTS, 1));
    // From a placement without gateways, everything gets a home.
    let standalone = documents(&[], "L2", &["203.0.113.1", "198.51.100.1"]);
    let got = diff(&standalone, &one);
    assert!(got.vips.moved.len() == 2 && got.vips.moved.iter().all(|it| it.from.is_empty() && it.to == "gw-a"));
    let all = EndpointMoves { from: String::new(), to: "gw-a".into(), endpoints: 2 };
    assert_eq!(got.endpoints.moved, [all]);
}
