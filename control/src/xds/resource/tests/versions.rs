//! Versions: equal for equal content, different for different content.

use std::collections::BTreeSet;

use vipgate_dataplane::policy::spec::{SLOTS, ShardMapRef, ShardMapSpec};
use vipgate_dataplane::ports::BlockId;

use super::arbitrary::any_placement;
use super::*;

fn policy() -> EgressSpec {
    EgressSpec {
        name: "EgressPolicy a/web".into(),
        destinations: vec!["0.0.0.0/0".parse().unwrap()],
        excluded: vec!["10.0.0.0/8".parse().unwrap()],
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits { sessions: Some(7), new_sessions_per_second: Some(8), guaranteed_ports: Some(9) },
        on_exhaustion: OnExhaustion::Reject,
    }
}

fn block(number: u16) -> Arc<BlockSet> {
    let mut blocks = BlockSet::default();
    blocks.insert(BlockId(number));
    Arc::new(blocks)
}

fn vip() -> VipSpec {
    VipSpec {
        address: ip("203.0.113.1"),
        name: "Service a/web".into(),
        announce: Announce::L2,
        reserved_ports: vec![80, 443],
        shards: vec![
            ShardSpec { gateway: "g1".into(), blocks: Some(block(17)), backups: vec![] },
            ShardSpec { gateway: "g2".into(), blocks: None, backups: vec![] },
        ],
        shard_map: None,
        private: vec![],
    }
}

fn endpoint() -> EndpointSpec {
    EndpointSpec {
        address: ip("10.0.0.1"),
        name: "a/web-1".into(),
        policy: "EgressPolicy a/web".into(),
        vips: vec![ip("203.0.113.1"), ip("203.0.113.2")],
        gateway: Some("g1".into()),
        slot: None,
        remarks: vec![],
    }
}

fn service() -> PlacedService {
    let hints = Hints { nodes: vec!["n1".into()], zones: vec!["z1".into()] };
    let backend = PlacedBackend {
        address: ip("10.0.0.1"),
        name: "a/web-1".into(),
        ports: [8080].into(),
        weight: 5,
        state: BackendState::Ready,
        node: Some("n1".into()),
        zone: Some("z1".into()),
        hints: Some(Arc::new(hints)),
    };
    PlacedService {
        name: "Service a/web".into(),
        vips: vec![ip("203.0.113.1")],
        ports: vec![ServicePortSpec { name: "http".into(), protocol: 6, port: 80 }],
        backends: vec![backend],
        source_ranges: vec!["198.51.100.0/24".parse().unwrap()],
        affinity: Some(10_800),
        table_size: 2039,
        external: Scope::Local,
        internal: Scope::Cluster,
        health_port: Some(30_000),
    }
}

fn peer() -> Peer {
    Peer {
        name: "g1".into(),
        node: "n1".into(),
        zone: "z1".into(),
        address: Some(ip("192.0.2.1")),
        pods: [].into(),
        uncovered: None,
    }
}

fn with<T: Clone>(base: &T, change: impl FnOnce(&mut T)) -> T {
    let mut changed = base.clone();
    change(&mut changed);
    changed
}

/// Checks that all versions differ, and that encoding is deterministic.
fn all_differ<T>(encode: impl Fn(&T) -> (Key, Content), all: &[T]) {
    let versions: BTreeSet<u64> = all.iter().map(|item| encode(item).1.version).collect();
    assert_eq!(versions.len(), all.len());
    assert!(all.iter().all(|item| encode(item) == encode(item)));
}

#[test]
fn every_field_of_a_policy_is_in_its_version() {
    let base = policy();
    all_differ(
        encode::egress_policy,
        &[
            base.clone(),
            with(&base, |it| it.name = "EgressPolicy a/wed".into()),
            with(&base, |it| it.destinations[0] = "0.0.0.0/1".parse().unwrap()),
            with(&base, |it| it.destinations.clear()),
            with(&base, |it| it.excluded[0] = "10.0.0.0/9".parse().unwrap()),
            with(&base, |it| std::mem::swap(&mut it.destinations, &mut it.excluded)),
            with(&base, |it| it.address_selection = AddressSelection::PerConnection),
            with(&base, |it| it.limits.sessions = None),
            with(&base, |it| it.limits.new_sessions_per_second = None),
            with(&base, |it| it.limits.guaranteed_ports = None),
            with(&base, |it| it.limits.guaranteed_ports = Some(10)),
            with(&base, |it| it.on_exhaustion = OnExhaustion::Drop),
        ],
    );
}

#[test]
fn every_field_of_the_cluster_is_in_its_version() {
    let nets = |text: &str| BTreeSet::from([text.parse().unwrap()]);
    let base = Cluster { pods: nets("10.244.0.0/16"), services: nets("10.96.0.0/12"), ..Cluster::default() };
    all_differ(
        encode::cluster,
        &[
            base.clone(),
            with(&base, |it| it.pods = nets("10.244.0.0/17")),
            with(&base, |it| it.pods.clear()),
            with(&base, |it| it.services = nets("10.96.0.0/13")),
            with(&base, |it| std::mem::swap(&mut it.pods, &mut it.services)),
            with(&base, |it| it.nodes = nets("10.244.1.0/24")),
            with(&base, |it| it.uncovered = Some(UncoveredAction::Drop)),
            with(&base, |it| it.uncovered = Some(UncoveredAction::Pass)),
        ],
    );
}

#[test]
fn every_field_of_a_vip_is_in_its_version() {
    let base = vip();
    all_differ(
        encode::vip,
        &[
            base.clone(),
            with(&base, |it| it.address = ip("203.0.113.2")),
            with(&base, |it| it.name = "".into()),
            with(&base, |it| it.announce = Announce::Bgp),
            with(&base, |it| it.reserved_ports[1] = 444),
            with(&base, |it| it.reserved_ports.truncate(1)),
            with(&base, |it| it.shards[0].gateway = "g3".into()),
            with(&base, |it| it.shards[0].blocks = Some(block(16))),
            with(&base, |it| it.shards[0].blocks = Some(Arc::default())),
            with(&base, |it| it.shards[0].blocks = None),
            with(&base, |it| it.shards[0].backups = vec!["g2".into(), "g3".into()]),
            // The order of backups is significant.
            with(&base, |it| it.shards[0].backups = vec!["g3".into(), "g2".into()]),
            with(&base, |it| it.shards[1].backups = vec!["g2".into(), "g3".into()]),
            with(&base, |it| drop(it.shards.pop())),
            with(&base, |it| it.shards.clear()),
            with(&base, |it| it.shard_map = Some(ShardMapRef { map: "m".into(), rotation: 0 })),
            with(&base, |it| it.shard_map = Some(ShardMapRef { map: "m".into(), rotation: 1 })),
            with(&base, |it| it.shard_map = Some(ShardMapRef { map: "n".into(), rotation: 1 })),
        ],
    );
}

#[test]
fn every_field_of_a_shard_map_is_in_its_version() {
    let names = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect::<Vec<Arc<str>>>();
    let orders = vec![names(&["g1", "g2"]), names(&["g2"])];
    let base = ShardMapSpec { name: "m".into(), orders, slots: (0..SLOTS as u16).map(|slot| slot % 2).collect() };
    all_differ(
        encode::shard_map,
        &[
            base.clone(),
            with(&base, |it| it.name = "n".into()),
            with(&base, |it| it.orders[0].reverse()),
            with(&base, |it| it.orders[1] = names(&["g3"])),
            with(&base, |it| it.orders[1].push("g1".into())),
            with(&base, |it| it.slots[7] = 0),
        ],
    );
}

#[test]
fn every_field_of_an_endpoint_is_in_its_version() {
    let base = endpoint();
    all_differ(
        encode::endpoint,
        &[
            base.clone(),
            with(&base, |it| it.address = ip("10.0.0.2")),
            with(&base, |it| it.name = "a/web-2".into()),
            with(&base, |it| it.policy = "EgressPolicy a/wed".into()),
            with(&base, |it| it.vips.truncate(1)),
            // The order of VIPs is significant: it decides which VIP an endpoint uses.
            with(&base, |it| it.vips.swap(0, 1)),
            with(&base, |it| it.gateway = Some("g2".into())),
            with(&base, |it| it.gateway = None),
        ],
    );
}

#[test]
fn every_field_of_a_service_is_in_its_version() {
    let base = service();
    all_differ(
        encode::service,
        &[
            base.clone(),
            with(&base, |it| it.name = "Service a/wed".into()),
            with(&base, |it| it.vips[0] = ip("203.0.113.2")),
            with(&base, |it| it.ports[0].name = "".into()),
            with(&base, |it| it.ports[0].protocol = 17),
            with(&base, |it| it.ports[0].port = 81),
            with(&base, |it| it.backends.clear()),
            with(&base, |it| it.backends[0].address = ip("10.0.0.2")),
            with(&base, |it| it.backends[0].name = "".into()),
            with(&base, |it| it.backends[0].ports = [8081].into()),
            with(&base, |it| it.backends.push(PlacedBackend { ports: [8081].into(), ..base.backends[0].clone() })),
            with(&base, |it| it.backends.push(PlacedBackend { ports: [8082].into(), ..base.backends[0].clone() })),
            with(&base, |it| it.backends[0].weight = 0),
            with(&base, |it| it.backends[0].state = BackendState::Terminating),
            with(&base, |it| it.backends[0].state = BackendState::NotReady),
            with(&base, |it| it.backends[0].node = None),
            with(&base, |it| it.backends[0].zone = None),
            with(&base, |it| it.backends[0].hints = None),
            with(&base, |it| it.backends[0].hints = Some(Arc::new(Hints { nodes: vec!["n1".into()], zones: vec![] }))),
            with(&base, |it| it.source_ranges.clear()),
            with(&base, |it| it.affinity = None),
            with(&base, |it| it.table_size = 4093),
            with(&base, |it| it.external = Scope::Cluster),
            with(&base, |it| it.internal = Scope::Local),
            with(&base, |it| it.health_port = None),
        ],
    );
}

#[test]
fn every_field_of_a_gateway_is_in_its_version() {
    let base = peer();
    all_differ(
        encode::gateway,
        &[
            base.clone(),
            with(&base, |it| it.name = "g2".into()),
            with(&base, |it| it.node = "n2".into()),
            with(&base, |it| it.zone = "".into()),
            with(&base, |it| it.address = Some(ip("192.0.2.2"))),
            with(&base, |it| it.address = None),
        ],
    );
}

/// Caches have them: with other numbers, the version of the cache is another one, too.
#[test]
fn kind_numbers_are_stable() {
    assert_eq!(Kind::ALL.map(Kind::number), [0, 8, 1, 2, 9, 5, 3, 6, 7, 4, 10, 11]);
}

/// Versions are persisted by gateways and compared between servers: their computation must not change.
#[test]
fn versions_are_stable() {
    let placement = Placement {
        policies: vec![policy()].into(),
        shard_maps: Vec::new().into(),
        vips: vec![vip()].into(),
        endpoints: vec![endpoint()].into(),
        services: vec![service()].into(),
        nodes: Vec::new(),
        agents: [].into(),
        peers: vec![peer()],
        cluster: None,
    };
    let versions: Vec<_> = encode_all(&placement).iter().map(|(_, it)| Content::version_text(it.version)).collect();
    assert_eq!(
        versions,
        ["4776d3467db09b73", "e18f1eef900f31e2", "157fa53a4a1d10a5", "99d98d8ded80ee08", "ba8b937d36f16929"]
    );
    assert_eq!(version_of(&placement), "6e7c5a9d86765b1c");
    assert_eq!(version_of(&Placement::default()), "0000000000000000");
}

/// A table without one item.
fn without<T: Keyed + Clone>(table: &Table<T>, at: usize) -> Table<T> {
    let mut items = table.to_vec();
    items.remove(at);
    items.into()
}

/// Gives an endpoint another name.
fn rename(endpoints: &mut Table<EndpointSpec>, at: usize) {
    let mut items = endpoints.to_vec();
    items[at].name = "\u{1}".into();
    *endpoints = items.into();
}

/// A placement, and the same with shuffled lists.
fn shuffled() -> impl Strategy<Value = (Placement, Placement)> {
    any_placement().prop_flat_map(|placement| {
        let Placement { policies, shard_maps, vips, endpoints, services, nodes, peers, cluster, .. } =
            placement.clone();
        let vips = Just(vips.to_vec()).prop_shuffle();
        let endpoints = Just(endpoints.to_vec()).prop_shuffle();
        let (services, peers) = (Just(services.to_vec()).prop_shuffle(), Just(peers).prop_shuffle());
        let nodes = Just(nodes).prop_shuffle();
        let parts = (Just(policies.to_vec()).prop_shuffle(), vips, endpoints, services, peers, nodes);
        let shuffled = parts.prop_map(move |(policies, vips, endpoints, services, peers, nodes)| Placement {
            policies: policies.into(),
            vips: vips.into(),
            endpoints: endpoints.into(),
            services: services.into(),
            nodes,
            agents: [].into(),
            peers,
            cluster: cluster.clone(),
            shard_maps: shard_maps.iter().rev().cloned().collect(),
        });
        (Just(placement), shuffled)
    })
}

proptest! {
    #[test]
    fn the_version_does_not_depend_on_the_order((placement, shuffled) in shuffled()) {
        prop_assert_eq!(encode_all(&placement), encode_all(&shuffled));
        prop_assert_eq!(version_of(&placement), version_of(&shuffled));
    }

    #[test]
    fn the_version_depends_on_every_resource(placement in any_placement()) {
        let version = version_of(&placement);
        let is_new = |it: &str| !placement.peers.iter().any(|peer| *peer.name == *it);
        if is_new("g1") {
            prop_assert_ne!(&version, &version_of(&with(&placement, |it| it.peers.push(peer()))));
        }
        for i in 0..placement.endpoints.len() {
            prop_assert_ne!(&version, &version_of(&with(&placement, |it| it.endpoints = without(&it.endpoints, i))));
            prop_assert_ne!(&version, &version_of(&with(&placement, |it| rename(&mut it.endpoints, i))));
        }
        for i in 0..placement.policies.len() {
            prop_assert_ne!(&version, &version_of(&with(&placement, |it| it.policies = without(&it.policies, i))));
        }
        for i in 0..placement.vips.len() {
            prop_assert_ne!(&version, &version_of(&with(&placement, |it| it.vips = without(&it.vips, i))));
        }
        for i in 0..placement.services.len() {
            prop_assert_ne!(&version, &version_of(&with(&placement, |it| it.services = without(&it.services, i))));
        }
    }
}
