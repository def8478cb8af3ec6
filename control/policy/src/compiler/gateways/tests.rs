//! Rendezvous hashing and VIP assignment, checked against brute-force definitions.

mod backups;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const NAMES: [&str; 6] = ["gw-a", "gw-b", "gw-c", "gw-d", "gw-e", "gw-f"];
const UNLIMITED: usize = usize::MAX;

fn gateway(
    name: &'static str,
    node: &'static str,
    zone: Option<&'static str>,
    capacity: usize,
) -> GatewayEntry<'static> {
    let (seed, labels) = (Fingerprint::of(name.as_bytes()), BTreeMap::new());
    GatewayEntry {
        name: name.into(),
        seed,
        labels,
        node,
        zone,
        peer_address: None,
        pods: [].into(),
        uncovered: None,
        capacity,
    }
}

/// The first gateways of `NAMES`, with these capacities.
fn gateways(capacities: &[usize]) -> Gateways<'static> {
    Gateways::from_entries(
        NAMES.iter().zip(capacities).map(|(name, capacity)| gateway(name, name, None, *capacity)).collect(),
    )
}

/// The same without one of them.
fn without(capacities: &[usize], removed: usize) -> Gateways<'static> {
    let mut rest = gateways(capacities);
    rest.all.remove(removed);
    rest
}

fn all_of(gateways: &Gateways<'_>) -> Vec<GatewayId> {
    (0..gateways.all.len()).collect()
}

fn vip(number: u8, v6: bool) -> IpAddr {
    if v6 { [0x2001, 0xdb8, 0, 0, 0, 0, 0, number.into()].into() } else { [192, 0, 2, number].into() }
}

/// A VIP to assign to one of the candidates, or to all of them.
#[derive(Clone, Debug)]
struct Request {
    vip: IpAddr,
    group: String,
    candidates: Vec<GatewayId>,
    shared: bool,
}

impl Request {
    /// A VIP in a group of its own.
    fn single(number: u8, candidates: Vec<GatewayId>) -> Self {
        let vip = vip(number, false);
        Self { vip, group: vip.to_string(), candidates, shared: false }
    }
}

/// Owners of each VIP, by name.
fn assigned(gateways: &Gateways<'_>, requests: &[Request]) -> BTreeMap<IpAddr, BTreeSet<String>> {
    let vip_requests = requests.iter().map(|Request { vip, group, candidates, shared }| VipRequest {
        vip: *vip,
        group,
        candidates: candidates.as_slice().into(),
        shared: *shared,
    });
    let vip_requests: Vec<VipRequest<'_>> = vip_requests.collect();
    let owners = gateways.assign(&vip_requests).owners;
    assert!(owners.iter().all(|owners| owners.is_sorted_by(|a, b| a < b)), "each once, sorted by name");
    let names = |ids: Vec<GatewayId>| ids.into_iter().map(|id| gateways.name(id).to_string()).collect();
    requests.iter().map(|it| it.vip).zip(owners.into_iter().map(names)).collect()
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

/// VIPs in groups, each with its own candidates.
fn random_requests(gateways: usize) -> impl Strategy<Value = Vec<Request>> {
    let one = (any::<u8>(), any::<bool>(), "[a-d]", some_of(gateways), prop::bool::weighted(0.2));
    prop::collection::vec(one, 0..24).prop_map(|all| {
        let mut requests: Vec<_> = all
            .into_iter()
            .map(|(number, v6, group, candidates, shared)| Request { vip: vip(number, v6), group, candidates, shared })
            .collect();
        requests.sort_by_key(|it| it.vip);
        requests.dedup_by_key(|it| it.vip);
        requests
    })
}

/// VIPs without groups, for `gateways` gateways.
fn ungrouped(gateways: usize, max: usize) -> impl Strategy<Value = Vec<Request>> {
    prop::collection::btree_map(any::<u8>(), some_of(gateways), 0..=max)
        .prop_map(|all| all.into_iter().map(|(number, candidates)| Request::single(number, candidates)).collect())
}

fn capacities(gateways: usize, max: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![3 => 1..=max, 1 => Just(UNLIMITED)], gateways)
}

/// All stable matchings: no VIP and gateway prefer each other to their assignment. A VIP prefers a higher score to its
/// owner, a gateway prefers it to free capacity or to one of its VIPs.
fn stable_assignments(gateways: &Gateways<'_>, requests: &[Request]) -> Vec<Vec<Option<GatewayId>>> {
    let mut all = vec![Vec::new()];
    for it in requests {
        let choices = || it.candidates.iter().copied().map(Some).chain([None]);
        all = all.iter().flat_map(|done| choices().map(move |next| [&done[..], &[next]].concat())).collect();
    }
    all.retain(|assignment: &Vec<Option<GatewayId>>| {
        let of = |id: GatewayId| assignment.iter().zip(requests).filter(move |(owner, _)| **owner == Some(id));
        let is_full = |id: GatewayId| of(id).count() >= gateways.all[id].capacity;
        let fits = (0..gateways.all.len()).all(|id| of(id).count() <= gateways.all[id].capacity);
        let would_take = |id: GatewayId, vip: IpAddr| {
            !is_full(id) || of(id).any(|(_, other)| score(gateways, id, other.vip) < score(gateways, id, vip))
        };
        let is_blocking = |(owner, it): (&Option<GatewayId>, &Request)| {
            let better = |id: &GatewayId| {
                owner.is_none_or(|owner| score(gateways, owner, it.vip) < score(gateways, *id, it.vip))
            };
            it.candidates.iter().any(|id| Some(*id) != *owner && better(id) && would_take(*id, it.vip))
        };
        fits && !assignment.iter().zip(requests).any(is_blocking)
    });
    all
}

/// VIPs whose owners differ, with the owners before and after; only VIPs in both.
fn moved<'a>(
    before: &'a BTreeMap<IpAddr, BTreeSet<String>>,
    after: &'a BTreeMap<IpAddr, BTreeSet<String>>,
) -> Vec<(&'a BTreeSet<String>, &'a BTreeSet<String>)> {
    let both = before.iter().filter_map(|(vip, owners)| Some((owners, after.get(vip)?)));
    both.filter(|(before, after)| before != after).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_order_of_requests_does_not_matter(
        capacities in capacities(4, 4),
        (requests, shuffled) in
            random_requests(4).prop_flat_map(|requests| (Just(requests.clone()), Just(requests).prop_shuffle())),
    ) {
        let gateways = gateways(&capacities);
        prop_assert_eq!(assigned(&gateways, &requests), assigned(&gateways, &shuffled));
    }

    /// Also if this puts two VIPs of a group on one gateway.
    #[test]
    fn capacity_is_never_exceeded_and_no_vip_is_unassigned_while_a_candidate_has_capacity(
        capacities in capacities(4, 4), requests in random_requests(4),
    ) {
        let gateways = gateways(&capacities);
        let assigned = assigned(&gateways, &requests);
        let has = |id: GatewayId| assigned.values().filter(|owners| owners.contains(&**gateways.name(id))).count();
        for id in all_of(&gateways) {
            prop_assert!(has(id) <= capacities[id]);
        }
        for it in &requests {
            let owners = &assigned[&it.vip];
            let is_candidate = |name: &String| it.candidates.iter().any(|id| **gateways.name(*id) == **name);
            prop_assert!(owners.iter().all(is_candidate));
            prop_assert!(it.shared || owners.len() <= 1);
            let is_no_owner = |id: &&GatewayId| !owners.contains(&**gateways.name(**id));
            if it.shared || owners.is_empty() {
                let full = it.candidates.iter().filter(is_no_owner).all(|id| has(*id) == capacities[*id]);
                prop_assert!(full, "owners of {}: {:?}", it.vip, owners);
            }
        }
    }

    #[test]
    fn the_assignment_is_the_only_stable_matching(capacities in capacities(3, 2), requests in ungrouped(3, 5)) {
        let gateways = gateways(&capacities);
        let assigned = assigned(&gateways, &requests);
        let got: Vec<Option<GatewayId>> = requests
            .iter()
            .map(|it| (0..capacities.len()).find(|id| assigned[&it.vip].contains(&**gateways.name(*id))))
            .collect();
        prop_assert_eq!(stable_assignments(&gateways, &requests), vec![got]);
    }

    /// An added VIP displaces the VIP with the lowest score, which displaces one with a lower score, and so on; so each
    /// gateway loses at most one. The same holds in reverse, when a VIP is removed.
    #[test]
    fn an_added_or_removed_vip_displaces_at_most_one_vip_per_gateway(
        capacities in capacities(5, 3), requests in ungrouped(5, 16),
    ) {
        let gateways = gateways(&capacities);
        let Some((_, before)) = requests.split_last() else { return Ok(()) };
        let (before, after) = (assigned(&gateways, before), assigned(&gateways, &requests));
        let mut losers: Vec<_> = moved(&before, &after).into_iter().map(|(from, _)| from).collect();
        let count = losers.len();
        losers.sort_unstable();
        losers.dedup();
        prop_assert!(losers.len() == count, "{:?}", moved(&before, &after));
        let had_owner = losers.iter().all(|from| !from.is_empty());
        prop_assert!(had_owner, "an unassigned VIP gets no owner: {:?}", moved(&before, &after));
    }

    /// Each VIP that the added gateway takes frees capacity elsewhere, which is filled as above. The same holds in
    /// reverse, when a gateway is removed.
    #[test]
    fn an_added_gateway_moves_what_it_takes_and_what_fills_the_freed_capacity(
        capacities in capacities(5, 3), requests in ungrouped(5, 16), at in 0..5_usize,
    ) {
        let (all, fewer) = (gateways(&capacities), without(&capacities, at));
        let rest: Vec<_> = requests.iter().map(|it| {
            let others = it.candidates.iter().filter(|id| **id != at);
            Request { candidates: others.map(|id| id - usize::from(*id > at)).collect(), ..it.clone() }
        }).collect();
        let (before, after) = (assigned(&fewer, &rest), assigned(&all, &requests));
        let taken = after.values().filter(|owners| owners.contains(NAMES[at])).count();
        let moved = moved(&before, &after);
        prop_assert!(moved.len() <= taken * NAMES.len());
        if capacities.iter().all(|capacity| *capacity == UNLIMITED) {
            prop_assert_eq!(moved.len(), taken);
        }
        for (vip, owners) in &before {
            let best = |gateways: &Gateways<'_>, owners: &BTreeSet<String>| {
                let ids = all_of(gateways).into_iter().filter(|id| owners.contains(&**gateways.name(*id)));
                ids.map(|id| score(gateways, id, *vip).0).max()
            };
            prop_assert!(best(&fewer, owners) <= best(&all, &after[vip]), "the score of {} is lower", vip);
        }
    }

    /// For endpoints, blocks, and VIPs without limits and groups.
    #[test]
    fn without_limits_an_added_or_removed_gateway_moves_only_its_own_keys(
        count in 2..=NAMES.len(), at in any::<prop::sample::Index>(), number in any::<u8>(), key in any::<u64>(),
    ) {
        let (capacities, at) = (vec![UNLIMITED; count], at.index(count));
        let (all, fewer) = (gateways(&capacities), without(&capacities, at));
        let stays = |before: &str, after: &str| after == NAMES[at] || after == before;
        let winner = |gateways: &Gateways<'_>| {
            gateways.winner(&all_of(gateways), key).map(|id| gateways.name(id).to_string())
        };
        prop_assert!(stays(&winner(&fewer).unwrap(), &winner(&all).unwrap()));

        let vip = vip(number, false);
        let owners = |gateways: &Gateways<'_>| -> Vec<Arc<str>> {
            let blocks = gateways.port_blocks(vip, &all_of(gateways));
            let owner = |block| {
                let owners: Vec<_> = (0..blocks.len()).filter(|at| blocks[*at].contains(block)).collect();
                assert_eq!(owners.len(), 1, "each block has one owner");
                gateways.name(owners[0]).clone()
            };
            all_blocks().map(owner).collect()
        };
        prop_assert!(owners(&fewer).iter().zip(owners(&all)).all(|(before, after)| stays(before, &after)));

        let single =
            |gateways: &Gateways<'_>| assigned(gateways, &[Request::single(number, all_of(gateways))])[&vip].clone();
        let (before, after) = (single(&fewer), single(&all));
        prop_assert!(stays(before.first().unwrap(), after.first().unwrap()));
        let first = all.winner(&all_of(&all), address_key(vip)).map(|id| all.name(id).to_string());
        prop_assert_eq!(after.first(), first.as_ref());
    }

    /// The numbers of a group's VIPs per gateway differ by at most one, for each family. Groups don't affect each
    /// other.
    #[test]
    fn a_group_is_spread_evenly_while_there_is_capacity(
        count in 1..=NAMES.len(), numbers in prop::collection::btree_set((any::<u8>(), any::<bool>()), 1..24),
    ) {
        let gateways = gateways(&vec![UNLIMITED; count]);
        let grouped = |group: &str, (number, v6): (u8, bool)| {
            Request { vip: vip(number, v6), group: group.into(), candidates: all_of(&gateways), shared: false }
        };
        let (one, two): (Vec<_>, Vec<_>) = numbers.into_iter().partition(|(number, _)| number % 3 > 0);
        let one: Vec<_> = one.into_iter().map(|it| grouped("one", it)).collect();
        let two: Vec<_> = two.into_iter().map(|it| grouped("two", it)).collect();
        let both = assigned(&gateways, &[&one[..], &two].concat());
        for group in [&one, &two] {
            prop_assert!(moved(&assigned(&gateways, group), &both).is_empty());
            for v6 in [false, true] {
                let own: Vec<_> = group.iter().filter(|it| it.vip.is_ipv6() == v6).collect();
                for name in &NAMES[..count] {
                    let has = own.iter().filter(|it| both[&it.vip].contains(*name)).count();
                    let even = own.len() / count..=own.len().div_ceil(count);
                    prop_assert!(even.contains(&has), "{} has {}", name, has);
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
    // Standard deviation: 40.
    assert!(counts.iter().all(|count| (1_840..2_160).contains(count)), "{counts:?}");
    let blocks = gateways.port_blocks(vip(1, true), &all_of(&gateways));
    let counts: Vec<_> = blocks.iter().map(BlockSet::count).collect();
    // Standard deviation: 13.
    assert!(counts.iter().all(|count| (150..260).contains(count)), "{counts:?}");
    assert_eq!(counts.iter().sum::<u32>() as usize, BLOCKS);
}

#[test]
fn a_group_exceeds_its_limit_on_gateways_with_capacity_when_others_are_full() {
    let gateways = gateways(&[1, UNLIMITED, UNLIMITED]);
    let group: Vec<_> = (1..=9)
        .map(|number| Request { group: "g".into(), ..Request::single(number, vec![0, 1, 2]) })
        .chain([Request { group: "g".into(), ..Request::single(100, vec![0]) }])
        .collect();
    let assigned = assigned(&gateways, &group);
    let has = |name: &str| assigned.values().filter(|owners| owners.contains(name)).count();
    assert_eq!((has("gw-a"), has("gw-b") + has("gw-c")), (1, 8 + usize::from(!assigned[&vip(100, false)].is_empty())));
    assert!(has("gw-b") >= 3 && has("gw-c") >= 3);
}

#[test]
fn the_nearest_gateway_is_on_the_node_then_in_the_zone() {
    let (z1, z2) = (Some("z1"), Some("z2"));
    let all = vec![
        gateway("a", "n1", z1, UNLIMITED),
        gateway("b", "n2", z1, UNLIMITED),
        gateway("c", "n3", z2, UNLIMITED),
        gateway("d", "n4", None, UNLIMITED),
    ];
    let gateways = Gateways::from_entries(all);
    for (node, zone, preferred, required) in [
        (None, None, &[0, 1, 2, 3][..], &[][..]),
        (None, z1, &[0, 1], &[0, 1]),
        (None, Some("z3"), &[0, 1, 2, 3], &[]),
        (Some("n1"), z1, &[0], &[0]),
        (Some("n9"), z1, &[0, 1], &[0, 1]),
        (Some("n3"), None, &[2], &[2]),
        // On its own node, a gateway needs no zone.
        (Some("n4"), None, &[3], &[3]),
        (Some("n4"), z1, &[3], &[3]),
        (Some("n4"), Some("z3"), &[3], &[3]),
    ] {
        let nearest = |required| gateways.nearest(&all_of(&gateways), Locality { node, zone }, required);
        assert_eq!((nearest(false), nearest(true)), (preferred.to_vec(), required.to_vec()), "{node:?} {zone:?}");
    }
    assert_eq!(gateways.nearest(&[2, 3], Locality { node: Some("n1"), zone: z1 }, false), [2, 3], "candidates only");
}
