//! Tests of policy changes: the result equals a fresh build, numbers and counts are kept, and a rejected change has no
//! effect.

mod model;
mod sequences;
mod services;

use std::net::IpAddr;
use std::sync::Arc;

use self::model::ip;
use super::Snapshot;
use super::build::Builder;
use super::change::{Entries, PolicyChange};
use super::freshness::BUCKETS;
use super::spec::*;
use crate::flow::address::{Address, V6, of_family};
use crate::flow::ids::{MAX_VIPS, WorkerId};
use crate::flow::time::Tick;
use crate::policy::compiled::Policy;
use crate::policy::limits::{MAX_EGRESS_PREFIXES, MAX_ENDPOINTS};
use crate::policy::validation::BuildError;
use crate::policy_set::{Between, PolicySet, WithPolicy};
use crate::ports::BlockId;

fn bucket(address: IpAddr) -> usize {
    of_family!(address, it => it.bucket())
}

/// As [`Policy::permits`], for addresses of either family.
fn permits(policy: &Policy, addresses: [IpAddr; 3]) -> bool {
    if let [Some(endpoint), Some(remote), Some(vip)] = addresses.map(u32::from_ip) {
        return policy.permits(endpoint, remote, (vip, 40_000));
    }
    let [endpoint, remote, vip] = addresses.map(|it| V6::from_ip(it).unwrap());
    policy.permits(endpoint, remote, (vip, 40_000))
}

fn is_fresh(snapshot: &Snapshot, generation: u32, addresses: [IpAddr; 3]) -> bool {
    if let [Some(endpoint), Some(remote), Some(vip)] = addresses.map(u32::from_ip) {
        return snapshot.freshness.is_fresh(generation, (endpoint, remote, vip));
    }
    let [endpoint, remote, vip] = addresses.map(|it| V6::from_ip(it).unwrap());
    snapshot.freshness.is_fresh(generation, (endpoint, remote, vip))
}

/// The specs of a compiled policy, in the order of [`ModelState::policy_set`](model::ModelState::policy_set).
fn as_set(policy: &Policy) -> PolicySet {
    let position = |all: &[&str], address: IpAddr| all.iter().position(|text| ip(text) == address);
    let vip = |vip: &crate::policy::compiled::Vip| VipSpec {
        address: vip.address,
        name: vip.name.clone(),
        announce: vip.announce,
        reserved_ports: vip.ports.reserved.to_vec(),
        shards: vec![],
        shard_map: None,
        private: vec![],
    };
    let endpoint = |(address, endpoint): (IpAddr, &super::endpoints::Endpoint)| EndpointSpec {
        address,
        name: endpoint.name.clone(),
        policy: policy.egress_of(endpoint).spec.name.clone(),
        vips: {
            let mut vips: Vec<IpAddr> = policy.vips_of(endpoint).map(|vip| vip.address).collect();
            vips.sort_by_key(|vip| position(&model::VIPS, *vip));
            vips
        },
        gateway: None,
        slot: None,
        remarks: vec![],
    };
    let mut set = PolicySet {
        version: policy.version().to_owned(),
        policies: policy.egress().map(|egress| egress.spec.clone()).collect(),
        shard_maps: vec![],
        vips: policy.live_vips().map(vip).collect(),
        endpoints: policy.endpoints().map(endpoint).collect(),
        services: Vec::new(),
        nodes: policy.nodes().list().to_vec(),
        cluster: policy.cluster().clone(),
    };
    set.policies.sort_by(|a, b| a.name.cmp(&b.name));
    set.vips.sort_by_key(|vip| position(&model::VIPS, vip.address));
    set.endpoints.sort_by_key(|endpoint| position(&model::ENDPOINTS, endpoint.address));
    set
}

fn egress(name: &str) -> EgressSpec {
    EgressSpec {
        name: name.into(),
        destinations: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
        excluded: vec![],
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits::default(),
        on_exhaustion: OnExhaustion::Drop,
    }
}

fn vip(address: IpAddr) -> VipSpec {
    VipSpec {
        address,
        name: "Service tenant/api".into(),
        announce: Announce::L2,
        reserved_ports: vec![],
        shards: vec![],
        shard_map: None,
        private: vec![],
    }
}

fn endpoint(address: IpAddr, policy: &str, vips: &[IpAddr]) -> EndpointSpec {
    EndpointSpec {
        address,
        name: "".into(),
        policy: policy.into(),
        vips: vips.into(),
        gateway: None,
        slot: None,
        remarks: vec![],
    }
}

fn node(number: u8) -> NodeSpec {
    NodeSpec {
        name: format!("n{number}").into(),
        address: ([192, 0, 2, number], 4789).into(),
        vni: (1 << 24) - 1,
        mac: [2, 0, 0, 0, 0, 1],
        verify_mac: false,
        sends_covered_only: false,
        prefixes: vec![],
    }
}

/// Two endpoints of policy `a` with VIP .1, one of `b` with .2, one of `b` with IPv6.
fn small() -> PolicySet {
    let (one, two, six) = (ip("192.0.2.1"), ip("192.0.2.2"), ip("2001:db8::1"));
    PolicySet {
        version: "1".into(),
        policies: vec![egress("a"), egress("b")],
        vips: vec![vip(one), vip(two), vip(six)],
        endpoints: vec![
            endpoint(ip("10.0.0.1"), "a", &[one]),
            endpoint(ip("10.0.10.25"), "a", &[one]),
            endpoint(ip("10.0.0.4"), "b", &[two]),
            endpoint(ip("fd00::1"), "b", &[six]),
        ],
        ..PolicySet::default()
    }
}

fn built(set: &PolicySet) -> Builder {
    let mut builder = Builder::new(NetworkSpec::default());
    builder.with_policy(set).unwrap();
    builder
}

fn numbered(first: [u8; 4], count: usize) -> impl Iterator<Item = IpAddr> {
    let first = u32::from_be_bytes(first);
    (0..count as u32).map(move |n| (first + n).to_ip())
}

#[test]
fn an_inconsistent_change_is_rejected_with_its_reason() {
    use BuildError::*;
    let (one, two, pod, six) = (ip("192.0.2.1"), ip("192.0.2.2"), ip("10.0.0.1"), ip("2001:db8::1"));
    let change = PolicyChange::default;
    let with = |endpoints: Vec<EndpointSpec>| PolicyChange { endpoints: endpoints.into(), ..change() };
    let without_policy = || Entries::default().without([Arc::from("a")]);
    let (without_vip, without_pod) = (|| Entries::default().without([one]), || Entries::default().without([pod]));
    let again = endpoint(pod, "a", &[one]);
    let name = || Arc::from("a");
    for (change, error) in [
        (with(vec![endpoint(pod, "c", &[])]), UnknownPolicy { address: pod, policy: "c".into() }),
        (with(vec![endpoint(pod, "a", &[ip("192.0.2.3")])]), UnknownVip { address: pod, vip: ip("192.0.2.3") }),
        (with(vec![endpoint(pod, "a", &[one, six])]), UnknownVip { address: pod, vip: six }),
        (with(vec![endpoint(two, "a", &[])]), EndpointIsVip { address: two }),
        (PolicyChange { vips: vec![vip(pod)].into(), ..change() }, EndpointIsVip { address: pod }),
        (
            PolicyChange { policies: without_policy(), endpoints: without_pod(), ..change() },
            PolicyInUse { name: name() },
        ),
        (PolicyChange { vips: without_vip(), endpoints: without_pod(), ..change() }, VipInUse { vip: one }),
        (
            PolicyChange { policies: without_policy(), ..with(vec![again.clone()]) },
            UnknownPolicy { address: pod, policy: name() },
        ),
        (PolicyChange { vips: without_vip(), ..with(vec![again]) }, UnknownVip { address: pod, vip: one }),
    ] {
        assert_eq!(built(&small()).with_change(&change).unwrap_err(), error, "{change:?}");
    }
    // A retired VIP can't be assigned to an endpoint.
    let mut builder = built(&small());
    let policy = builder.snapshot().policy;
    assert!(policy.vip_at(two).unwrap().ports.pool.claim(BlockId(0), WorkerId(0)));
    let (vips, endpoints) = (Entries::default().without([two]), Entries::default().without([ip("10.0.0.4")]));
    builder.with_change(&PolicyChange { vips, endpoints, ..change() }).unwrap();
    let error = builder.with_change(&with(vec![endpoint(pod, "a", &[two])])).unwrap_err();
    assert_eq!(error, UnknownVip { address: pod, vip: two });
}

/// As a policy server may send them: nothing before has checked them.
#[test]
fn an_invalid_shard_map_or_node_is_rejected_with_its_reason() {
    let map = ShardMapSpec { name: "m".into(), orders: vec![vec!["g1".into()]], slots: vec![0; SLOTS] };
    let maps = [
        (ShardMapSpec { slots: vec![0; SLOTS - 1], ..map.clone() }, "doesn't have 1024 slots"),
        (ShardMapSpec { orders: vec![map.orders[0].clone(); SLOTS + 1], ..map.clone() }, "has more orders than slots"),
        (ShardMapSpec { orders: vec![map.orders[0].clone(), vec![]], ..map.clone() }, "has an order without a gateway"),
        (ShardMapSpec { slots: vec![1; SLOTS], ..map.clone() }, "has a slot without an order"),
        (ShardMapSpec { slots: vec![u16::MAX; SLOTS], ..map.clone() }, "has a slot without an order"),
        (ShardMapSpec { orders: vec![], ..map.clone() }, "has a slot without an order"),
    ];
    for (map, reason) in maps {
        let (map, name) = (PolicyChange { shard_maps: vec![map.clone()].into(), ..PolicyChange::default() }, map.name);
        let error = built(&small()).with_change(&map).unwrap_err();
        assert_eq!(error, BuildError::InvalidShardMap { map: name, reason });
    }
    let (node, other) = (node(1), node(0));
    let nodes = [
        (NodeSpec { vni: 1 << 24, ..node.clone() }, "the VNI exceeds 24 bits"),
        (NodeSpec { mac: [1, 0, 0, 0, 0, 1], ..node.clone() }, "the MAC address is a group address"),
        (NodeSpec { address: "192.0.2.0:4790".parse().unwrap(), ..node.clone() }, "duplicate address"),
    ];
    let change = |nodes: Vec<NodeSpec>| PolicyChange { nodes: nodes.into(), ..PolicyChange::default() };
    assert!(built(&small()).with_change(&change(vec![node])).is_ok());
    for (node, reason) in nodes {
        let rejected = BuildError::InvalidNode { node: node.name.clone(), reason };
        let error = built(&small()).with_change(&change(vec![other.clone(), node.clone()])).unwrap_err();
        assert_eq!(error, rejected);
        let mut builder = built(&small());
        builder.with_change(&change(vec![other.clone()])).unwrap();
        assert_eq!(builder.with_change(&change(vec![node])).unwrap_err(), rejected, "beside one in force");
    }
}

#[test]
fn objects_can_be_removed_with_everything_that_refers_to_them() {
    let mut builder = built(&small());
    let mut rest = small();
    rest.policies.remove(0);
    rest.vips.remove(0);
    rest.endpoints.drain(..2);
    rest.endpoints.push(endpoint(ip("10.0.10.25"), "b", &[]));
    let policy = builder.with_change(&PolicyChange::between(&small(), &rest)).unwrap().policy;
    rest.endpoints.rotate_right(1);
    assert_eq!(as_set(&policy), rest);
}

#[test]
fn a_change_contains_exactly_the_differences() {
    let (old, mut new) = (small(), small());
    assert!(PolicyChange::between(&old, &new).is_empty());
    new.version = "2".into();
    assert!(PolicyChange::between(&old, &new).is_empty());
    new.policies[1].limits.sessions = Some(5);
    new.vips[0].reserved_ports = vec![80];
    new.vips.push(vip(ip("192.0.2.3")));
    let removed = new.endpoints.remove(2).address;
    new.endpoints.swap(0, 1);
    assert_eq!(
        PolicyChange::between(&old, &new),
        PolicyChange {
            version: "2".into(),
            policies: vec![new.policies[1].clone()].into(),
            vips: vec![new.vips[0].clone(), new.vips[3].clone()].into(),
            endpoints: Entries::default().without([removed]),
            ..PolicyChange::default()
        }
    );
}

#[test]
fn an_endpoint_keeps_its_session_count_across_policy_changes() {
    let pod = ip("10.0.0.1");
    let mut builder = built(&small());
    let usage = builder.snapshot().policy.endpoint_at(pod).unwrap().usage.clone();
    usage.open(Limits::default(), Tick(0)).unwrap();
    let mut moved = small();
    moved.endpoints[0] = endpoint(pod, "b", &[ip("192.0.2.2")]);
    let mut without = small();
    without.endpoints.remove(0);
    let other = small().endpoints[1].address;
    for set in [&moved, &without, &small()] {
        let policy = builder.with_policy(set).unwrap().policy;
        assert!(std::ptr::eq(policy.usage_of(pod).unwrap(), &raw const *usage));
        assert!(!std::ptr::eq(policy.usage_of(other).unwrap(), &raw const *usage), "its neighbor in the bucket");
    }
    // Nothing is kept without sessions.
    usage.close();
    assert!(builder.with_policy(&without).unwrap().policy.usage_of(pod).is_none());
}

#[test]
fn a_rate_limit_that_a_policy_gets_later_applies_to_its_endpoints() {
    let mut builder = built(&small());
    let mut policies = small().policies;
    for policy in &mut policies {
        policy.limits.new_sessions_per_second = Some(1);
    }
    // The endpoints are not part of the change.
    let snapshot = builder.with_change(&PolicyChange { policies: policies.into(), ..PolicyChange::default() }).unwrap();
    let endpoint = snapshot.policy.endpoint_at(ip("10.0.0.1")).unwrap();
    let limits = snapshot.policy.egress_of(endpoint).spec.limits;
    let opened = [0, 100].map(|ms| endpoint.usage.open(limits, Tick(ms)).is_ok());
    assert_eq!(opened, [true, false]);
}

#[test]
fn vips_are_limited_to_the_size_of_the_port_tables() {
    let all: Vec<IpAddr> = numbered([198, 18, 0, 0], MAX_VIPS).collect();
    let set = PolicySet { vips: all.iter().copied().map(vip).collect(), ..PolicySet::default() };
    let mut builder = built(&set);
    let (first, one_more, two_more) = (all[0], ip("203.0.113.1"), ip("203.0.113.2"));
    let added = |vips: &[IpAddr]| PolicyChange { vips: vips.iter().copied().map(vip).collect(), ..Default::default() };
    let too_many = Some(BuildError::TooManyVips { count: MAX_VIPS + 1 });
    assert_eq!(builder.with_change(&added(&[one_more])).err(), too_many);
    // A removed VIP keeps its slot while a worker holds ports of it.
    let pool = builder.snapshot().policy.vip_at(first).unwrap().ports.pool.clone();
    assert!(pool.claim(BlockId(0), WorkerId(0)));
    let removal = PolicyChange { vips: Entries::default().without([first]), ..PolicyChange::default() };
    builder.with_change(&removal).unwrap();
    assert_eq!(builder.with_change(&added(&[one_more])).err(), too_many);
    assert_eq!(builder.with_change(&added(&[first, one_more])).err(), too_many);
    // Once they are released, the slot is free for one VIP: the same or another.
    pool.release_block(BlockId(0), WorkerId(0));
    assert_eq!(builder.with_change(&added(&[first, one_more])).err(), too_many);
    assert_eq!(builder.with_change(&added(&[one_more, two_more])).err(), too_many);
    let policy = builder.with_change(&added(&[one_more])).unwrap().policy;
    assert!(policy.vips().count() == MAX_VIPS && policy.vips().all(|vip| usize::from(vip.ports.id.0) < MAX_VIPS));
    assert!(policy.vip_at(first).is_none() && !pool.claim(BlockId(0), WorkerId(0)), "forgotten for good");
}

#[test]
fn endpoints_are_limited_to_the_capacity_of_the_steering_program() {
    let mut set = small();
    set.endpoints = numbered([10, 0, 0, 0], MAX_ENDPOINTS).map(|address| endpoint(address, "a", &[])).collect();
    let mut builder = built(&set);
    let added = |address: &str| Entries::from(vec![endpoint(ip(address), "a", &[])]);
    let change = |endpoints| PolicyChange { endpoints, ..PolicyChange::default() };
    let too_many = Some(BuildError::TooManyEndpoints { count: MAX_ENDPOINTS + 1 });
    assert_eq!(builder.with_change(&change(added("10.9.0.1"))).err(), too_many);
    builder.with_change(&change(added("fd00::1"))).unwrap();
    let exchanged = added("10.9.0.1").without(["10.0.0.0", "10.9.9.9"].map(ip));
    let policy = builder.with_change(&change(exchanged)).unwrap().policy;
    assert_eq!(policy.endpoint_count(), MAX_ENDPOINTS + 1);
    set.endpoints.push(endpoint(ip("10.9.0.1"), "a", &[]));
    assert_eq!(built(&small()).with_policy(&set).err(), too_many);
}

#[test]
fn a_change_of_one_endpoint_copies_only_its_bucket() {
    let vips: Vec<IpAddr> = numbered([198, 18, 0, 0], 100).collect();
    let names: Vec<String> = (0..50).map(|n| format!("policy {n}")).collect();
    let spec = |(n, address): (usize, IpAddr)| endpoint(address, &names[n % 50], &[vips[n % 100]]);
    let set = PolicySet {
        version: "1".into(),
        policies: names.iter().map(|name| egress(name)).collect(),
        vips: vips.iter().copied().map(vip).collect(),
        endpoints: numbered([10, 0, 0, 0], 20_000).enumerate().map(spec).collect(),
        ..PolicySet::default()
    };
    let mut builder = built(&set);
    let known = ip("10.0.1.2");
    for endpoints in [
        vec![endpoint(known, &names[7], &vips[..3])].into(),
        Entries::default().without([known]),
        vec![endpoint(known, &names[8], &[])].into(),
        vec![endpoint(ip("10.200.0.1"), &names[8], &[])].into(),
    ] {
        let before = builder.snapshot().policy;
        let change = PolicyChange { endpoints, ..PolicyChange::default() };
        let after = builder.with_change(&change).unwrap().policy;
        assert_eq!(after.v4.endpoints.shared_buckets(&before.v4.endpoints), BUCKETS - 1);
        assert_eq!(after.v6.endpoints.shared_buckets(&before.v6.endpoints), BUCKETS);
        assert!(Arc::ptr_eq(&after.egress, &before.egress) && Arc::ptr_eq(&after.vips, &before.vips));
        assert!(Arc::ptr_eq(&after.v4.vips, &before.v4.vips) && Arc::ptr_eq(&after.v6.vips, &before.v6.vips));
    }
}

/// A policy with this many IPv4 prefixes, each twice.
fn with_prefixes(name: &str, count: u32) -> EgressSpec {
    let nets = (0..count).map(|n| ipnet::IpNet::new(std::net::Ipv4Addr::from_bits(n << 8).into(), 24).unwrap());
    let destinations: Vec<_> = nets.collect();
    EgressSpec { excluded: destinations.clone(), destinations, ..egress(name) }
}

#[test]
fn prefixes_of_all_policies_are_limited_and_the_one_above_the_limit_is_named() {
    let max = MAX_EGRESS_PREFIXES as u32;
    let mut builder = Builder::new(NetworkSpec::default());
    let change = |policies| PolicyChange { policies, ..PolicyChange::default() };
    let policies = |specs: Vec<EgressSpec>| change(specs.into());
    let too_many = |policy: &str, count| BuildError::TooManyPrefixes { policy: policy.into(), count };
    builder.with_change(&policies(vec![with_prefixes("a", max - 2), egress("b")])).unwrap();
    let error = builder.with_change(&policies(vec![egress("c"), with_prefixes("d", 3)])).unwrap_err();
    assert_eq!(error, too_many("d", max as usize + 3));
    assert!(error.to_string().starts_with("d: with its prefixes, all policies have "), "{error}");
    // A rejected change counts nothing.
    builder.with_change(&policies(vec![egress("c")])).unwrap();
    let error = builder.with_change(&policies(vec![with_prefixes("e", 1)])).unwrap_err();
    assert_eq!(error, too_many("e", max as usize + 1));
    // What a change replaces or removes makes room, wherever it stands in the change.
    let exchanged = Entries::from(vec![with_prefixes("e", 3), with_prefixes("a", max - 4)]).without(["b".into()]);
    builder.with_change(&change(exchanged)).unwrap();
    let error = builder.with_change(&policies(vec![egress("f")])).unwrap_err();
    assert_eq!(error, too_many("f", max as usize + 1));
    builder.with_change(&change(Entries::default().without(["a", "c", "e"].map(Into::into)))).unwrap();
    assert_eq!(builder.references().prefixes(), [0, 0]);
}

proptest::proptest! {
    /// Two changes in a row, and both as one.
    #[test]
    fn changes_in_a_row_are_combined(
        edits in proptest::array::uniform3(proptest::collection::vec(model::edit(), 1..20)),
        nodes in proptest::array::uniform3(proptest::collection::btree_map(0..4_u8, 1..3_u32, 0..4)),
    ) {
        let [first, second, third] = edits;
        let state = model::ModelState::default().edited(&first);
        let next = state.edited(&second);
        let [mut a, mut b, mut c] = [&state, &next, &next.edited(&third)].map(model::ModelState::policy_set);
        for (set, nodes) in [&mut a, &mut b, &mut c].into_iter().zip(nodes) {
            set.nodes = nodes.into_iter().map(|(number, vni)| NodeSpec { vni, ..node(number) }).collect();
        }
        let mut builder = Builder::new(NetworkSpec::default());
        builder.with_policy(&a).unwrap();
        let combined = PolicyChange::between(&a, &b).then(PolicyChange::between(&b, &c));
        let snapshot = builder.with_change(&combined).unwrap();
        let mut expected = c.clone();
        expected.policies.sort_by(|a, b| a.name.cmp(&b.name));
        proptest::prop_assert_eq!(as_set(&snapshot.policy), expected);
    }
}

/// With several VIPs an endpoint uses the one at its own gateway first, also if only that VIP has moved there.
#[test]
fn a_vip_that_moves_to_another_gateway_reorders_the_vips_of_unchanged_endpoints() {
    for (pods, vips) in [("10.0.0", ["192.0.2.1", "192.0.2.2"]), ("fd00::", ["2001:db8::1", "2001:db8::2"])] {
        let vips = vips.map(ip);
        let set = |homes: [&str; 2]| {
            let at = |(address, home): (IpAddr, &str)| {
                let shards = vec![ShardSpec { gateway: home.into(), blocks: None, backups: vec![] }];
                VipSpec { shards, ..vip(address) }
            };
            // Of some the first by rendezvous hashing is at home, of others the second.
            let endpoints = (1..9).map(|number| {
                let address = if pods.ends_with(':') { format!("{pods}{number}") } else { format!("{pods}.{number}") };
                EndpointSpec { gateway: Some("gw-a".into()), ..endpoint(ip(&address), "a", &vips) }
            });
            PolicySet {
                version: "1".into(),
                policies: vec![egress("a")],
                vips: vips.into_iter().zip(homes).map(at).collect(),
                endpoints: endpoints.collect(),
                ..PolicySet::default()
            }
        };
        let orders = |policy: &Policy| -> std::collections::BTreeMap<IpAddr, Vec<IpAddr>> {
            let order = |endpoint| policy.vips_of(endpoint).map(|vip| vip.address).collect();
            policy.endpoints().map(|(address, endpoint)| (address, order(endpoint))).collect()
        };
        let mut builder = Builder::new(NetworkSpec::default());
        let before = builder.with_policy(&set(["gw-a", "gw-b"])).unwrap();
        assert!(orders(&before.policy).values().all(|order| order[0] == vips[0]));
        let moved =
            PolicyChange { version: "2".into(), vips: set(["gw-b", "gw-a"]).vips.into(), ..PolicyChange::default() };
        let after = builder.with_change(&moved).unwrap();
        assert!(orders(&after.policy).values().all(|order| order[0] == vips[1]), "{:?}", orders(&after.policy));
        let fresh = Builder::new(NetworkSpec::default()).with_policy(&set(["gw-b", "gw-a"])).unwrap();
        assert_eq!(orders(&after.policy), orders(&fresh.policy));
        let address = ip(if pods.ends_with(':') { "fd00::1" } else { "10.0.0.1" });
        let remote = ip(if pods.ends_with(':') { "2001:db8:51::1" } else { "198.51.100.1" });
        assert!(!is_fresh(&after, before.generation, [address, remote, vips[0]]), "its sessions are revalidated");
    }
}
