//! Rendezvous hashing and VIP assignment, checked against brute-force definitions.

mod backups;
mod slots;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vipgate_dataplane::policy::spec::BackendState;

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
        capacity: Capacity { total: capacity, ..Capacity::UNLIMITED },
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
    Gateways::from_entries(rest.all)
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
    turn: usize,
    group: String,
    candidates: Vec<GatewayId>,
    shared: bool,
    requires_zone: bool,
    local: LocalBackends,
}

/// Gateways with backends on their nodes, ascending, with the best state of these.
type LocalBackends = Vec<(GatewayId, BackendState)>;

impl Request {
    /// A VIP in a group of its own, with its number as its turn.
    fn single(number: u8, candidates: Vec<GatewayId>) -> Self {
        let vip = vip(number, false);
        let (turn, group) = (number.into(), vip.to_string());
        Self { vip, turn, group, candidates, shared: false, requires_zone: false, local: Vec::new() }
    }
}

fn assignment(gateways: &Gateways<'_>, requests: &[Request]) -> Assignment {
    let vip_requests =
        requests.iter().map(|Request { vip, turn, group, candidates, shared, requires_zone, local }| VipRequest {
            vip: *vip,
            turn: *turn,
            group,
            candidates: Candidates { name: "some".into(), ids: candidates.as_slice().into() },
            shared: *shared,
            requires_zone: *requires_zone,
            local,
        });
    gateways.assign(&vip_requests.collect::<Vec<_>>())
}

/// Owners of each VIP, by name.
fn assigned(gateways: &Gateways<'_>, requests: &[Request]) -> BTreeMap<IpAddr, BTreeSet<String>> {
    let owners = assignment(gateways, requests).owners;
    assert!(owners.iter().all(|owners| owners.is_sorted_by(|a, b| a < b)), "each once, sorted by name");
    let names = |ids: Vec<GatewayId>| ids.into_iter().map(|id| gateways.name(id).to_string()).collect();
    requests.iter().map(|it| it.vip).zip(owners.into_iter().map(names)).collect()
}

/// Home and backups of the only VIP, by name.
fn order_of(gateways: &Gateways<'_>, request: Request) -> Vec<Arc<str>> {
    let Assignment { owners, backups } = assignment(gateways, &[request]);
    owners[0].iter().chain(&backups[0]).map(|id| gateways.name(*id).clone()).collect()
}

fn score(gateways: &Gateways<'_>, id: GatewayId, vip: IpAddr) -> Score {
    gateways.score(id, address_key(vip))
}

fn some_of(count: usize) -> impl Strategy<Value = Vec<GatewayId>> {
    prop::sample::subsequence((0..count).collect::<Vec<_>>(), 0..=count)
}

fn local_backends(gateways: usize) -> impl Strategy<Value = LocalBackends> {
    let states = vec![BackendState::Ready, BackendState::Terminating, BackendState::NotReady];
    let of_each = prop::collection::vec(prop::option::of(prop::sample::select(states)), gateways);
    of_each.prop_map(|all| all.into_iter().enumerate().filter_map(|(id, state)| Some((id, state?))).collect())
}

/// VIPs in groups, each with its own candidates, some with local backends.
fn random_requests(gateways: usize) -> impl Strategy<Value = Vec<Request>> {
    let local = prop_oneof![2 => Just(LocalBackends::new()), 1 => local_backends(gateways)];
    let one = (any::<u8>(), any::<bool>(), "[a-d]", some_of(gateways), prop::bool::weighted(0.2), local);
    prop::collection::vec(one, 0..24).prop_map(|all| {
        let request = |(turn, (number, v6, group, candidates, shared, local))| Request {
            vip: vip(number, v6),
            turn,
            group,
            candidates,
            shared,
            requires_zone: false,
            local,
        };
        let mut requests: Vec<_> = all.into_iter().enumerate().map(request).collect();
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

/// The owner of each VIP that one gateway owns, by definition: in its turn, of the candidates with capacity those with
/// the best backends, of these the ones with the fewest VIPs of its group and family, and of these the one with the
/// highest score.
fn owners_by_definition(gateways: &Gateways<'_>, requests: &[Request]) -> BTreeMap<IpAddr, Option<GatewayId>> {
    let mut owners: Vec<(&Request, GatewayId)> = Vec::new();
    let mut all = BTreeMap::new();
    let mut in_turn: Vec<&Request> = requests.iter().collect();
    in_turn.sort_by_key(|it| it.turn);
    for it in in_turn {
        let owned = |id: GatewayId| owners.iter().filter(move |(_, owner)| *owner == id);
        let is_similar = |other: &Request| other.group == it.group && other.vip.is_ipv4() == it.vip.is_ipv4();
        let in_group = |id: GatewayId| owned(id).filter(|(other, _)| !other.shared && is_similar(other)).count();
        let mut eligible = it.candidates.clone();
        eligible.retain(|id| owned(*id).count() < gateways.all[*id].capacity.total);
        if it.shared {
            owners.extend(eligible.into_iter().map(|id| (it, id)));
            continue;
        }
        let state = |id: GatewayId| it.local.iter().find(|(of, _)| *of == id).map(|(_, state)| *state);
        let states = [Some(BackendState::Ready), Some(BackendState::Terminating), Some(BackendState::NotReady), None];
        let best = states.into_iter().find(|best| eligible.iter().any(|id| state(*id) == *best));
        eligible.retain(|id| Some(state(*id)) == best);
        let fewest = eligible.iter().map(|id| in_group(*id)).min();
        let best = eligible.into_iter().filter(|id| Some(in_group(*id)) == fewest);
        let owner = best.max_by_key(|id| score(gateways, *id, it.vip));
        owners.extend(owner.map(|id| (it, id)));
        all.insert(it.vip, owner);
    }
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
    fn each_vip_has_the_best_candidate_of_its_turn(capacities in capacities(4, 3), requests in random_requests(4)) {
        let gateways = gateways(&capacities);
        let assigned = assigned(&gateways, &requests);
        for (vip, owner) in owners_by_definition(&gateways, &requests) {
            let name: BTreeSet<String> = owner.map(|id| gateways.name(id).to_string()).into_iter().collect();
            prop_assert_eq!(&assigned[&vip], &name, "{}", vip);
        }
    }

    /// Whether gateways have limits, and whether VIPs have groups. The same holds in reverse, when it is removed.
    #[test]
    fn a_vip_with_the_last_turn_displaces_nothing(capacities in capacities(5, 3), requests in random_requests(5)) {
        let gateways = gateways(&capacities);
        let last = requests.iter().map(|it| it.turn).max();
        let before: Vec<Request> = requests.iter().filter(|it| Some(it.turn) != last).cloned().collect();
        let (before, after) = (assigned(&gateways, &before), assigned(&gateways, &requests));
        prop_assert!(moved(&before, &after).is_empty(), "{:?}", moved(&before, &after));
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

    /// For endpoints, and VIPs without limits and groups.
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

        let order = |gateways: &Gateways<'_>| order_of(gateways, Request::single(number, all_of(gateways)));
        let (before, after) = (order(&fewer), order(&all));
        prop_assert!(stays(&before[0], &after[0]));
        let others: Vec<_> = after.iter().filter(|name| ***name != *NAMES[at]).collect();
        prop_assert_eq!(&others, &before.iter().take(others.len()).collect::<Vec<_>>());
        let first = all.winner(&all_of(&all), address_key(vip(number, false))).map(|id| all.name(id));
        prop_assert_eq!(after.first(), first);
    }

    /// Without limits and groups: a VIP moves only if its gateway loses a backend, or another one gets one.
    #[test]
    fn backends_that_end_elsewhere_move_no_vip(
        number in any::<u8>(), local in local_backends(NAMES.len()), gone in 0..NAMES.len(),
    ) {
        let gateways = gateways(&[UNLIMITED; NAMES.len()]);
        let order = |local| order_of(&gateways, Request { local, ..Request::single(number, all_of(&gateways)) });
        let rest = local.iter().filter(|(id, _)| *id != gone).copied().collect();
        let (before, after) = (order(local), order(rest));
        prop_assert!(*before[0] == *NAMES[gone] || before[0] == after[0], "{:?} {:?}", before, after);
        let others = |order: &[Arc<str>]| -> Vec<Arc<str>> {
            order.iter().filter(|name| ***name != *NAMES[gone]).cloned().collect()
        };
        let (before, after) = (others(&before), others(&after));
        prop_assert!(before.iter().zip(&after).all(|(a, b)| a == b), "{:?} {:?}", before, after);
    }

    /// The numbers of a group's VIPs per gateway differ by at most one, for each family. Groups don't affect each
    /// other.
    #[test]
    fn a_group_is_spread_evenly_while_there_is_capacity(
        count in 1..=NAMES.len(), numbers in prop::collection::btree_set((any::<u8>(), any::<bool>()), 1..24),
    ) {
        let gateways = gateways(&vec![UNLIMITED; count]);
        let grouped = |group: &str, (number, v6): (u8, bool)| {
            let single = Request::single(number, all_of(&gateways));
            Request { vip: vip(number, v6), group: group.into(), ..single }
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
}

#[test]
fn a_group_is_spread_over_gateways_with_capacity_when_others_are_full() {
    let gateways = gateways(&[1, UNLIMITED, UNLIMITED]);
    // One more VIP has one candidate. Whether it has its turn first or last decides on the only VIP of that gateway.
    for (turn, expected) in [(0, [0, 5, 4]), (100, [1, 4, 4])] {
        let in_group = |number| Request { group: "g".into(), ..Request::single(number, vec![0, 1, 2]) };
        let other = Request { group: "g".into(), turn, ..Request::single(100, vec![0]) };
        let assigned = assigned(&gateways, &(1..=9).map(in_group).chain([other]).collect::<Vec<_>>());
        let others = || assigned.iter().filter(|(it, _)| **it != vip(100, false));
        let mut counts =
            ["gw-a", "gw-b", "gw-c"].map(|name| others().filter(|(_, names)| names.contains(name)).count());
        counts[1..].sort_unstable_by_key(|count| Reverse(*count));
        assert_eq!((counts, assigned[&vip(100, false)].len()), (expected, usize::from(turn == 0)));
    }
}

#[test]
fn gateways_with_local_backends_come_first_also_as_backups() {
    let gateways = gateways(&[UNLIMITED; 5]);
    let local = vec![(0, BackendState::NotReady), (2, BackendState::Ready), (3, BackendState::Terminating)];
    for number in 0..20 {
        let order = order_of(&gateways, Request { local: local.clone(), ..Request::single(number, all_of(&gateways)) });
        assert_eq!(order[..3].iter().map(|name| &**name).collect::<Vec<_>>(), ["gw-c", "gw-d", "gw-a"]);
        let local = vec![(1, BackendState::Ready)];
        let order = order_of(&gateways, Request { local, ..Request::single(number, vec![0, 2, 4]) });
        assert_eq!(order, order_of(&gateways, Request::single(number, vec![0, 2, 4])), "it is no candidate");
    }
}

/// Backends decide among the gateways with capacity, in the VIP's turn.
#[test]
fn a_full_gateway_gets_no_vip_for_its_backends() {
    let with_local = |number: u8, id: GatewayId| Request {
        local: vec![(id, BackendState::Ready)],
        ..Request::single(number, vec![0, 1])
    };
    let full = gateways(&[1, UNLIMITED]);
    let (older, younger) = (with_local(1, 0), with_local(2, 0));
    assert_eq!(assignment(&full, &[older.clone(), younger]).owners, [vec![0], vec![1]]);
    let has_none = Request { local: vec![], candidates: vec![0], ..with_local(2, 0) };
    assert_eq!(assignment(&full, &[older, has_none]).owners, [vec![0], vec![]], "the younger one gives way");
    // Those of one group are together where the only backends are.
    let unlimited = gateways(&[UNLIMITED; 2]);
    let grouped = [1, 2, 3].map(|number| Request { group: "g".into(), ..with_local(number, 1) });
    assert_eq!(assignment(&unlimited, &grouped).owners, [vec![1], vec![1], vec![1]]);
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

#[test]
fn the_capacity_of_one_family_is_nothing_to_the_other() {
    let mut gateways = gateways(&[UNLIMITED]);
    gateways.all[0].capacity = Capacity { ipv4: 2, ipv6: 1, ..Capacity::UNLIMITED };
    let vips: [IpAddr; 4] = ["fd00::1", "192.0.2.1", "fd00::2", "192.0.2.2"].map(|vip| vip.parse().unwrap());
    let candidates = Candidates { name: "all".into(), ids: [0].into() };
    let request = |(turn, vip): (usize, &IpAddr)| VipRequest {
        vip: *vip,
        turn,
        group: "",
        candidates: candidates.clone(),
        shared: false,
        requires_zone: false,
        local: &[],
    };
    let requests: Vec<VipRequest<'_>> = vips.iter().enumerate().map(request).collect();
    assert_eq!(gateways.assign(&requests).owners, [vec![0], vec![0], vec![], vec![0]]);
}
