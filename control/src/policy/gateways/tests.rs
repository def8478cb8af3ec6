//! What rendezvous hashing and the auction of VIPs promise, against definitions that try everything.

mod backups;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const NAMES: [&str; 6] = ["gw-a", "gw-b", "gw-c", "gw-d", "gw-e", "gw-f"];
const UNLIMITED: usize = usize::MAX;

fn known(name: &'static str, node: &'static str, zone: Option<&'static str>, room: usize) -> Known<'static> {
    let (seed, labels) = (Fingerprint::of(name.as_bytes()), BTreeMap::new());
    Known { name: name.into(), seed, labels, node, zone, peer_address: None, pods: [].into(), uncovered: None, room }
}

/// The first of the names, with room for so many VIPs each.
fn gateways(rooms: &[usize]) -> Gateways<'static> {
    Gateways::of(NAMES.iter().zip(rooms).map(|(name, room)| known(name, name, None, *room)).collect())
}

/// All of the names but one.
fn without(rooms: &[usize], gone: usize) -> Gateways<'static> {
    let mut rest = gateways(rooms);
    rest.all.remove(gone);
    rest
}

fn all_of(gateways: &Gateways<'_>) -> Vec<GatewayId> {
    (0..gateways.all.len()).collect()
}

fn vip(number: u8, v6: bool) -> IpAddr {
    if v6 { [0x2001, 0xdb8, 0, 0, 0, 0, 0, number.into()].into() } else { [192, 0, 2, number].into() }
}

/// A VIP that is to be held by one of the candidates, or by all of them.
#[derive(Clone, Debug)]
struct Wanted {
    vip: IpAddr,
    group: String,
    candidates: Vec<GatewayId>,
    shared: bool,
}

impl Wanted {
    /// In a group of its own.
    fn single(number: u8, candidates: Vec<GatewayId>) -> Self {
        let vip = vip(number, false);
        Self { vip, group: vip.to_string(), candidates, shared: false }
    }
}

/// Who holds which VIP, by name.
fn held(gateways: &Gateways<'_>, wanted: &[Wanted]) -> BTreeMap<IpAddr, BTreeSet<String>> {
    let bids = wanted.iter().map(|Wanted { vip, group, candidates, shared }| Bid {
        vip: *vip,
        group,
        candidates: candidates.as_slice().into(),
        shared: *shared,
    });
    let bids: Vec<Bid<'_>> = bids.collect();
    let holders = gateways.hold(&bids).of;
    assert!(holders.iter().all(|holders| holders.is_sorted_by(|a, b| a < b)), "each once, in the order of names");
    let names = |ids: Vec<GatewayId>| ids.into_iter().map(|id| gateways.name(id).to_string()).collect();
    wanted.iter().map(|it| it.vip).zip(holders.into_iter().map(names)).collect()
}

fn score(gateways: &Gateways<'_>, id: GatewayId, vip: IpAddr) -> Score {
    gateways.score(id, address_key(vip))
}

fn all_blocks() -> impl Iterator<Item = BlockId> {
    (0..).take(BLOCKS).map(BlockId)
}

fn some_of(count: usize) -> impl Strategy<Value = Vec<GatewayId>> {
    prop::sample::subsequence((0..count).collect::<Vec<_>>(), 0..=count)
}

/// VIPs in groups, each with candidates of its own.
fn wanted(gateways: usize) -> impl Strategy<Value = Vec<Wanted>> {
    let one = (any::<u8>(), any::<bool>(), "[a-d]", some_of(gateways), prop::bool::weighted(0.2));
    prop::collection::vec(one, 0..24).prop_map(|all| {
        let mut wanted: Vec<_> = all
            .into_iter()
            .map(|(number, v6, group, candidates, shared)| Wanted { vip: vip(number, v6), group, candidates, shared })
            .collect();
        wanted.sort_by_key(|it| it.vip);
        wanted.dedup_by_key(|it| it.vip);
        wanted
    })
}

/// VIPs that know nothing of each other, for `gateways` gateways.
fn singles(gateways: usize, most: usize) -> impl Strategy<Value = Vec<Wanted>> {
    prop::collection::btree_map(any::<u8>(), some_of(gateways), 0..=most)
        .prop_map(|all| all.into_iter().map(|(number, candidates)| Wanted::single(number, candidates)).collect())
}

fn rooms(gateways: usize, most: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![3 => 1..=most, 1 => Just(UNLIMITED)], gateways)
}

/// All assignments of VIPs to a candidate or nobody in which no VIP and gateway would rather have each other: the VIP than its
/// gateway, and the gateway than an empty place or one of its VIPs.
fn stable_assignments(gateways: &Gateways<'_>, wanted: &[Wanted]) -> Vec<Vec<Option<GatewayId>>> {
    let mut all = vec![Vec::new()];
    for it in wanted {
        let choices = || it.candidates.iter().copied().map(Some).chain([None]);
        all = all.iter().flat_map(|done| choices().map(move |next| [&done[..], &[next]].concat())).collect();
    }
    all.retain(|assignment: &Vec<Option<GatewayId>>| {
        let of = |id: GatewayId| assignment.iter().zip(wanted).filter(move |(own, _)| **own == Some(id));
        let is_full = |id: GatewayId| of(id).count() >= gateways.all[id].room;
        let fits = (0..gateways.all.len()).all(|id| of(id).count() <= gateways.all[id].room);
        let would_take = |id: GatewayId, vip: IpAddr| {
            !is_full(id) || of(id).any(|(_, other)| score(gateways, id, other.vip) < score(gateways, id, vip))
        };
        let blocks = |(own, it): (&Option<GatewayId>, &Wanted)| {
            let better =
                |id: &GatewayId| own.is_none_or(|own| score(gateways, own, it.vip) < score(gateways, *id, it.vip));
            it.candidates.iter().any(|id| Some(*id) != *own && better(id) && would_take(*id, it.vip))
        };
        fits && !assignment.iter().zip(wanted).any(blocks)
    });
    all
}

/// VIPs that another gateway holds than before; of `before`, those that are still wanted.
fn moved<'a>(
    before: &'a BTreeMap<IpAddr, BTreeSet<String>>,
    after: &'a BTreeMap<IpAddr, BTreeSet<String>>,
) -> Vec<(&'a BTreeSet<String>, &'a BTreeSet<String>)> {
    let both = before.iter().filter_map(|(vip, holders)| Some((holders, after.get(vip)?)));
    both.filter(|(before, after)| before != after).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_order_of_bids_does_not_matter(
        rooms in rooms(4, 4),
        (wanted, shuffled) in wanted(4).prop_flat_map(|wanted| (Just(wanted.clone()), Just(wanted).prop_shuffle())),
    ) {
        let gateways = gateways(&rooms);
        prop_assert_eq!(held(&gateways, &wanted), held(&gateways, &shuffled));
    }

    /// Also where groups would keep apart: a VIP that nobody holds is worse than two in one place.
    #[test]
    fn nobody_holds_more_than_its_room_and_nothing_is_left_while_there_is_some(rooms in rooms(4, 4), wanted in wanted(4)) {
        let gateways = gateways(&rooms);
        let held = held(&gateways, &wanted);
        let has = |id: GatewayId| held.values().filter(|holders| holders.contains(&**gateways.name(id))).count();
        for id in all_of(&gateways) {
            prop_assert!(has(id) <= rooms[id]);
        }
        for it in &wanted {
            let holders = &held[&it.vip];
            let is_candidate = |name: &String| it.candidates.iter().any(|id| **gateways.name(*id) == **name);
            prop_assert!(holders.iter().all(is_candidate));
            prop_assert!(it.shared || holders.len() <= 1);
            let is_left_out = |id: &&GatewayId| !holders.contains(&**gateways.name(**id));
            if it.shared || holders.is_empty() {
                let full = it.candidates.iter().filter(is_left_out).all(|id| has(*id) == rooms[*id]);
                prop_assert!(full, "{} is held by {:?}", it.vip, holders);
            }
        }
    }

    #[test]
    fn what_is_held_is_the_only_stable_assignment(rooms in rooms(3, 2), wanted in singles(3, 5)) {
        let gateways = gateways(&rooms);
        let held = held(&gateways, &wanted);
        let got: Vec<Option<GatewayId>> = wanted
            .iter()
            .map(|it| (0..rooms.len()).find(|id| held[&it.vip].contains(&**gateways.name(*id))))
            .collect();
        prop_assert_eq!(stable_assignments(&gateways, &wanted), vec![got]);
    }

    /// The VIP that comes takes the place of the lowest score, which takes a place of a lower score, and so on: so no gateway is
    /// asked twice. It is the same the other way, when the VIP goes.
    #[test]
    fn a_vip_more_or_less_moves_at_most_one_off_each_gateway(rooms in rooms(5, 3), wanted in singles(5, 16)) {
        let gateways = gateways(&rooms);
        let Some((_, before)) = wanted.split_last() else { return Ok(()) };
        let (before, after) = (held(&gateways, before), held(&gateways, &wanted));
        let mut off: Vec<_> = moved(&before, &after).into_iter().map(|(from, _)| from).collect();
        let count = off.len();
        off.sort_unstable();
        off.dedup();
        prop_assert!(off.len() == count, "{:?}", moved(&before, &after));
        prop_assert!(off.iter().all(|from| !from.is_empty()), "nobody is better off: {:?}", moved(&before, &after));
    }

    /// Each VIP that the newcomer takes leaves a place, and each place is filled as above. It is the same the other way, when it
    /// leaves.
    #[test]
    fn a_gateway_that_joins_moves_what_it_takes_and_what_fills_those_places(
        rooms in rooms(5, 3), wanted in singles(5, 16), at in 0..5_usize,
    ) {
        let (all, fewer) = (gateways(&rooms), without(&rooms, at));
        let rest: Vec<_> = wanted.iter().map(|it| {
            let others = it.candidates.iter().filter(|id| **id != at);
            Wanted { candidates: others.map(|id| id - usize::from(*id > at)).collect(), ..it.clone() }
        }).collect();
        let (before, after) = (held(&fewer, &rest), held(&all, &wanted));
        let taken = after.values().filter(|holders| holders.contains(NAMES[at])).count();
        let moved = moved(&before, &after);
        prop_assert!(moved.len() <= taken * NAMES.len());
        if rooms.iter().all(|room| *room == UNLIMITED) {
            prop_assert_eq!(moved.len(), taken);
        }
        for (vip, holders) in &before {
            let best = |gateways: &Gateways<'_>, holders: &BTreeSet<String>| {
                let ids = all_of(gateways).into_iter().filter(|id| holders.contains(&**gateways.name(*id)));
                ids.map(|id| score(gateways, id, *vip).0).max()
            };
            prop_assert!(best(&fewer, holders) <= best(&all, &after[vip]), "{} is worse off", vip);
        }
    }

    /// Of endpoints, blocks, and VIPs without limits and groups.
    #[test]
    fn without_limits_a_gateway_takes_and_leaves_what_it_wins_and_nothing_else(
        count in 2..=NAMES.len(), at in any::<prop::sample::Index>(), number in any::<u8>(), key in any::<u64>(),
    ) {
        let (rooms, at) = (vec![UNLIMITED; count], at.index(count));
        let (all, fewer) = (gateways(&rooms), without(&rooms, at));
        let stays = |before: &str, after: &str| after == NAMES[at] || after == before;
        let winner = |gateways: &Gateways<'_>| gateways.winner(&all_of(gateways), key).map(|id| gateways.name(id).to_string());
        prop_assert!(stays(&winner(&fewer).unwrap(), &winner(&all).unwrap()));

        let vip = vip(number, false);
        let owners = |gateways: &Gateways<'_>| -> Vec<Arc<str>> {
            let blocks = gateways.blocks(vip, &all_of(gateways));
            let owner = |block| {
                let owners: Vec<_> = (0..blocks.len()).filter(|at| blocks[*at].contains(block)).collect();
                assert_eq!(owners.len(), 1, "each block has one owner");
                gateways.name(owners[0]).clone()
            };
            all_blocks().map(owner).collect()
        };
        prop_assert!(owners(&fewer).iter().zip(owners(&all)).all(|(before, after)| stays(before, &after)));

        let single = |gateways: &Gateways<'_>| held(gateways, &[Wanted::single(number, all_of(gateways))])[&vip].clone();
        let (before, after) = (single(&fewer), single(&all));
        prop_assert!(stays(before.first().unwrap(), after.first().unwrap()));
        let first = all.winner(&all_of(&all), address_key(vip)).map(|id| all.name(id).to_string());
        prop_assert_eq!(after.first(), first.as_ref());
    }

    /// Each gateway has as many VIPs of a group as any other, or one less; the families don't count together, and what
    /// happens to one group is nothing to another.
    #[test]
    fn a_group_is_spread_evenly_while_there_is_room(
        count in 1..=NAMES.len(), numbers in prop::collection::btree_set((any::<u8>(), any::<bool>()), 1..24),
    ) {
        let gateways = gateways(&vec![UNLIMITED; count]);
        let grouped = |group: &str, (number, v6): (u8, bool)| {
            Wanted { vip: vip(number, v6), group: group.into(), candidates: all_of(&gateways), shared: false }
        };
        let (one, two): (Vec<_>, Vec<_>) = numbers.into_iter().partition(|(number, _)| number % 3 > 0);
        let one: Vec<_> = one.into_iter().map(|it| grouped("one", it)).collect();
        let two: Vec<_> = two.into_iter().map(|it| grouped("two", it)).collect();
        let both = held(&gateways, &[&one[..], &two].concat());
        for group in [&one, &two] {
            prop_assert!(moved(&held(&gateways, group), &both).is_empty());
            for v6 in [false, true] {
                let own: Vec<_> = group.iter().filter(|it| it.vip.is_ipv6() == v6).collect();
                for name in &NAMES[..count] {
                    let has = own.iter().filter(|it| both[&it.vip].contains(*name)).count();
                    prop_assert!((own.len() / count..=own.len().div_ceil(count)).contains(&has), "{} has {}", name, has);
                }
            }
        }
    }
}

#[test]
fn keys_are_spread_evenly() {
    let gateways = gateways(&[UNLIMITED; 5]);
    let mut counts = [0; 5];
    for address in 0..10_000_u32 {
        let key = address_key(IpAddr::V4((0x0a00_0000 + address).into()));
        counts[gateways.winner(&all_of(&gateways), key).unwrap()] += 1;
    }
    // The deviation is 40.
    assert!(counts.iter().all(|count| (1_840..2_160).contains(count)), "{counts:?}");
    let blocks = gateways.blocks(vip(1, true), &all_of(&gateways));
    let counts: Vec<_> = blocks.iter().map(BlockSet::count).collect();
    // The deviation is 13.
    assert!(counts.iter().all(|count| (150..260).contains(count)), "{counts:?}");
    assert_eq!(counts.iter().sum::<u32>() as usize, BLOCKS);
}

#[test]
fn a_group_whose_gateways_are_full_comes_together_elsewhere() {
    let gateways = gateways(&[1, UNLIMITED, UNLIMITED]);
    let group: Vec<_> = (1..=9)
        .map(|number| Wanted { group: "g".into(), ..Wanted::single(number, vec![0, 1, 2]) })
        .chain([Wanted { group: "g".into(), ..Wanted::single(100, vec![0]) }])
        .collect();
    let held = held(&gateways, &group);
    let has = |name: &str| held.values().filter(|holders| holders.contains(name)).count();
    assert_eq!((has("gw-a"), has("gw-b") + has("gw-c")), (1, 8 + usize::from(!held[&vip(100, false)].is_empty())));
    assert!(has("gw-b") >= 3 && has("gw-c") >= 3);
}

#[test]
fn nearest_is_the_node_then_the_zone() {
    let (z1, z2) = (Some("z1"), Some("z2"));
    let all = vec![
        known("a", "n1", z1, UNLIMITED),
        known("b", "n2", z1, UNLIMITED),
        known("c", "n3", z2, UNLIMITED),
        known("d", "n4", None, UNLIMITED),
    ];
    let gateways = Gateways::of(all);
    for (node, zone, preferred, required) in [
        (None, None, &[0, 1, 2, 3][..], &[][..]),
        (None, z1, &[0, 1], &[0, 1]),
        (None, Some("z3"), &[0, 1, 2, 3], &[]),
        (Some("n1"), z1, &[0], &[0]),
        (Some("n9"), z1, &[0, 1], &[0, 1]),
        (Some("n3"), None, &[2], &[2]),
        // A gateway needn't say in which zone its node is.
        (Some("n4"), None, &[3], &[3]),
        (Some("n4"), z1, &[3], &[3]),
        (Some("n4"), Some("z3"), &[3], &[3]),
    ] {
        let near = |must| gateways.near(&all_of(&gateways), Place { node, zone }, must);
        assert_eq!((near(false), near(true)), (preferred.to_vec(), required.to_vec()), "{node:?} {zone:?}");
    }
    assert_eq!(gateways.near(&[2, 3], Place { node: Some("n1"), zone: z1 }, false), [2, 3], "of those that may");
}
