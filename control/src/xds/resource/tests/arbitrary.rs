//! Arbitrary placements, without consistency between resources.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use vipgate_dataplane::policy::spec::{
    NodeSpec, PrivateAddressSpec, SLOTS, ShardMapRef, ShardMapSpec, SlotRef, repeated_target,
};
use vipgate_policy::manifest::{MAX_WEIGHT, unusable_address};

use super::*;

fn address() -> impl Strategy<Value = IpAddr> {
    let any = prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), any::<[u8; 16]>().prop_map(IpAddr::from)];
    any.prop_filter("usable as a host address", |address| unusable_address(*address).is_none())
}

/// Any address of the same family.
fn vip_for(address: IpAddr) -> impl Strategy<Value = IpAddr> {
    let v4 = any::<[u8; 4]>().prop_map(IpAddr::from);
    let v6 = any::<[u8; 16]>().prop_map(IpAddr::from);
    let same = if address.is_ipv4() { v4.boxed() } else { v6.boxed() };
    same.prop_filter("usable as a host address", |address| unusable_address(*address).is_none())
}

fn net() -> impl Strategy<Value = IpNet> {
    let v4 = (any::<[u8; 4]>(), 0_u8..=32).prop_map(|(bits, length)| IpNet::new(bits.into(), length));
    let v6 = (any::<[u8; 16]>(), 0_u8..=128).prop_map(|(bits, length)| IpNet::new(bits.into(), length));
    prop_oneof![v4, v6].prop_map(|net| net.unwrap().trunc())
}

fn text() -> impl Strategy<Value = Arc<str>> {
    "\\PC{0,12}".prop_map(Arc::from)
}

fn name() -> impl Strategy<Value = Arc<str>> {
    "\\PC{1,12}".prop_map(Arc::from)
}

fn limit() -> impl Strategy<Value = Option<u32>> {
    prop::option::of(1..=u32::MAX)
}

fn policy(name: Arc<str>) -> impl Strategy<Value = EgressSpec> {
    let nets = || prop::collection::vec(net(), 0..4);
    let selection = prop::sample::select(vec![AddressSelection::PerEndpoint, AddressSelection::PerConnection]);
    let exhaustion = prop::sample::select(vec![OnExhaustion::Reject, OnExhaustion::Drop]);
    (nets(), nets(), selection, (limit(), limit(), limit()), exhaustion).prop_map(
        move |(destinations, excluded, address_selection, limits, on_exhaustion)| EgressSpec {
            name: name.clone(),
            destinations,
            excluded,
            address_selection,
            limits: Limits { sessions: limits.0, new_sessions_per_second: limits.1, guaranteed_ports: limits.2 },
            on_exhaustion,
        },
    )
}

fn blocks() -> impl Strategy<Value = Arc<BlockSet>> {
    any::<[[u8; 32]; BlockSet::BYTES / 32]>()
        .prop_map(|bytes| Arc::new(BlockSet::from_bytes(bytes.as_flattened().try_into().unwrap())))
}

fn vip(address: IpAddr) -> impl Strategy<Value = VipSpec> {
    let parts = (prop::option::of(blocks()), prop::collection::btree_set(name(), 0..=MAX_BACKUPS));
    let shard = |(gateway, (blocks, mut backups)): (Arc<str>, (_, BTreeSet<Arc<str>>))| {
        backups.remove(&gateway);
        (Just((gateway, blocks)), Just(backups.into_iter().collect::<Vec<_>>()).prop_shuffle())
            .prop_map(|((gateway, blocks), backups)| ShardSpec { gateway, blocks, backups })
    };
    let shares = prop::collection::btree_map(name(), parts, 0..4)
        .prop_flat_map(move |shards| shards.into_iter().map(shard).collect::<Vec<_>>())
        .prop_shuffle();
    let announce = prop::sample::select(vec![Announce::L2, Announce::Bgp]);
    let ports = prop::collection::btree_set(1..=u16::MAX, 0..6);
    let shard_map = prop::option::of((name(), 0..SLOTS as u16));
    let private = (any::<u16>(), name()).prop_map(move |(last, gateway)| PrivateAddressSpec {
        gateway,
        address: match address {
            IpAddr::V4(_) => Ipv4Addr::from_bits(0x0a00_0000 | u32::from(last)).into(),
            IpAddr::V6(_) => Ipv6Addr::from_bits(0xfd00 << 112 | u128::from(last)).into(),
        },
    });
    let private = prop::collection::vec(private, 0..3).prop_map(move |mut all| {
        all.sort_by(|a, b| a.gateway.cmp(&b.gateway));
        all.dedup_by(|a, b| a.gateway == b.gateway);
        all.retain(|private| private.address != address);
        all
    });
    let parts = (text(), announce, ports, shares, shard_map, private);
    parts.prop_map(move |(name, announce, ports, shares, map, private)| VipSpec {
        address,
        name,
        announce,
        reserved_ports: ports.into_iter().collect(),
        shards: shares,
        shard_map: map.map(|(map, rotation)| ShardMapRef { map, rotation }),
        private,
    })
}

fn endpoint(address: IpAddr) -> impl Strategy<Value = EndpointSpec> {
    let vips = prop::collection::hash_set(vip_for(address), 0..4);
    let remarks = prop::collection::vec(text(), 0..3);
    let slot = (prop::option::of(name()), 0..SLOTS as u16).prop_map(|(map, slot)| SlotRef { map, slot });
    let placed = (prop::option::of(name()), prop::option::of(slot));
    (text(), text(), vips, placed, remarks).prop_map(move |(name, policy, vips, (gateway, slot), remarks)| {
        EndpointSpec { address, name, policy, vips: vips.into_iter().collect(), gateway, slot, remarks }
    })
}

fn shard_map(name_of_map: Arc<str>) -> impl Strategy<Value = ShardMapSpec> {
    let order = prop::collection::btree_set(name(), 1..=MAX_BACKUPS + 1);
    let order = order.prop_flat_map(|names| Just(names.into_iter().collect::<Vec<_>>()).prop_shuffle());
    let slots = prop::collection::vec(any::<prop::sample::Index>(), SLOTS);
    (prop::collection::vec(order, 1..6), slots).prop_map(move |(orders, slots)| ShardMapSpec {
        name: name_of_map.clone(),
        slots: slots.iter().map(|at| at.index(orders.len()) as u16).collect(),
        orders,
    })
}

fn hints() -> impl Strategy<Value = Option<Arc<Hints>>> {
    let names = || prop::collection::btree_set(name(), 0..3).prop_map(|names| names.into_iter().collect::<Vec<_>>());
    (names(), names()).prop_map(|(nodes, zones)| {
        let has_any = !nodes.is_empty() || !zones.is_empty();
        has_any.then(|| Arc::new(Hints { nodes, zones }))
    })
}

/// A backend with this number of ports.
fn backend(address: IpAddr, ports: usize) -> impl Strategy<Value = PlacedBackend> {
    let state = prop::sample::select(vec![BackendState::Ready, BackendState::Terminating, BackendState::NotReady]);
    let ports = prop::collection::vec(any::<u16>(), ports);
    let locality = (prop::option::of(name()), prop::option::of(name()), hints());
    (text(), ports, 0..=MAX_WEIGHT, state, locality).prop_map(
        move |(name, ports, weight, state, (node, zone, hints))| PlacedBackend {
            address,
            name,
            ports: ports.into(),
            weight,
            state,
            node,
            zone,
            hints,
        },
    )
}

/// Backends in order, without those that have the address and a target port of another one, or only its address.
#[expect(clippy::needless_pass_by_value, reason = "strategies give values")]
fn distinct(by_address: Vec<Vec<PlacedBackend>>) -> Vec<PlacedBackend> {
    let mut all = by_address.concat();
    all.sort_by(|one, other| one.key().cmp(&other.key()));
    all.dedup_by(|one, other| one.key() == other.key());
    while let Some((at, _)) = repeated_target(all.iter().map(PlacedBackend::key)) {
        all.remove(at);
    }
    all
}

fn scope() -> impl Strategy<Value = Scope> {
    prop::sample::select(vec![Scope::Cluster, Scope::Local])
}

fn service(name: Arc<str>) -> impl Strategy<Value = PlacedService> {
    let numbers = (prop::sample::select(vec![6_u8, 17, 132]), 1..=u16::MAX);
    let port = |((protocol, port), name)| ServicePortSpec { name, protocol, port };
    let ports = prop::collection::btree_map(numbers, text(), 0..4)
        .prop_map(move |ports| ports.into_iter().map(port).collect::<Vec<_>>())
        .prop_shuffle();
    ports.prop_flat_map(move |ports| {
        let name = name.clone();
        let count = ports.len();
        let vips = prop::collection::btree_set(address(), 0..3);
        let ranges = prop::collection::btree_set(net(), 0..3);
        let backends = each(address(), move |address| prop::collection::vec(backend(address, count), 1..4));
        let backends = backends.prop_map(distinct);
        let numbers = (limit(), prop::sample::select(vec![7_u32, 2039, 131_071]), prop::option::of(1..=u16::MAX));
        (vips, ranges, backends, numbers, scope(), scope()).prop_map(
            move |(vips, ranges, backends, (affinity, table_size, health_port), external, internal)| PlacedService {
                name: name.clone(),
                vips: vips.into_iter().collect(),
                ports: ports.clone(),
                backends,
                source_ranges: ranges.into_iter().collect(),
                affinity,
                table_size,
                external,
                internal,
                health_port,
            },
        )
    })
}

fn peer(name: Arc<str>) -> impl Strategy<Value = Peer> {
    let cluster = (ranges(), uncovered());
    (text(), text(), prop::option::of(address()), cluster).prop_map(move |(node, zone, address, (pods, uncovered))| {
        Peer { name: name.clone(), node, zone, address, pods: pods.into_iter().collect(), uncovered }
    })
}

fn ranges() -> impl Strategy<Value = BTreeSet<IpNet>> {
    prop::collection::btree_set(net().prop_filter("not all addresses", |net| net.prefix_len() > 0), 0..4)
}

fn uncovered() -> impl Strategy<Value = Option<UncoveredAction>> {
    prop::sample::select(vec![None, Some(UncoveredAction::Drop), Some(UncoveredAction::Pass)])
}

fn cluster() -> impl Strategy<Value = Option<Cluster>> {
    let parts = (ranges(), ranges(), ranges(), uncovered());
    parts.prop_map(|(pods, services, nodes, uncovered)| {
        Cluster { pods, services, nodes, uncovered, ..Cluster::default() }.non_empty()
    })
}

fn node(name: Arc<str>) -> impl Strategy<Value = NodeSpec> {
    let tunnel = (address(), 1..=u16::MAX, 0..1_u32 << 24);
    // Unicast.
    let mac = any::<[u8; 6]>().prop_map(|[a, b, c, d, e, f]| [a & !1, b, c, d, e, f]);
    let mac = (mac, any::<bool>(), any::<bool>());
    (tunnel, mac, prop::collection::vec(net(), 0..4)).prop_map(
        move |((address, port, vni), (mac, verify_mac, sends_covered_only), prefixes)| NodeSpec {
            name: name.clone(),
            address: (address, port).into(),
            vni,
            mac,
            verify_mac,
            sends_covered_only,
            prefixes,
        },
    )
}

/// Up to four items with unique keys, sorted by key.
fn each<K, T, S>(key: impl Strategy<Value = K>, of: impl Fn(K) -> S + Clone + 'static) -> impl Strategy<Value = Vec<T>>
where
    K: Ord + Clone + fmt::Debug + 'static,
    T: fmt::Debug,
    S: Strategy<Value = T> + 'static,
{
    let keyed = key.prop_flat_map(move |key| {
        let of = of.clone();
        (Just(key.clone()), of(key))
    });
    prop::collection::vec(keyed, 0..5)
        .prop_map(|keyed| keyed.into_iter().collect::<BTreeMap<_, _>>().into_values().collect())
}

pub(super) fn any_placement() -> impl Strategy<Value = Placement> {
    let vips = each(address(), vip);
    let endpoints = each(address(), endpoint);
    let others = (each(name(), node), cluster(), each(name(), shard_map));
    let parts = (each(name(), policy), vips, endpoints, each(name(), service), each(name(), peer), others);
    parts.prop_map(|(policies, vips, endpoints, services, peers, (nodes, cluster, shard_maps))| Placement {
        policies: Vec::into(policies),
        shard_maps: Vec::into(shard_maps),
        vips: Vec::into(vips),
        endpoints: Vec::into(endpoints),
        services: Vec::into(services),
        nodes,
        agents: [].into(),
        peers,
        cluster,
    })
}
