//! Generators: valid placements over few names, and responses in random order with redundancy that the protocol allows.

use std::collections::VecDeque;

use ipnet::IpNet;
use vipgate_dataplane::policy::spec::{NodeSpec, SLOTS, ShardMapRef, ShardMapSpec, SlotRef};
use vipgate_dataplane::ports::{BLOCKS, BlockId};
use vipgate_policy::compiler::{Cluster, Peer};
use vipgate_policy::fingerprint::mix;

use super::*;

/// `g3` has few or no blocks, `g9` is in no placement.
pub(super) const GATEWAYS: [&str; 4] = ["g1", "g2", "g3", "g9"];
const POLICIES: [&str; 3] = ["EgressPolicy a/p", "EgressPolicy a/q", "Service a/s"];
/// `10.0.0.1` is an endpoint in placements where it isn't a VIP.
const VIPS: [&str; 6] = ["10.0.0.1", "203.0.113.1", "203.0.113.2", "203.0.113.3", "2001:db8::1", "2001:db8::2"];
const ENDPOINTS: [&str; 8] =
    ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "fd00::1", "fd00::2", "fd00::3"];

const SERVICES: [&str; 3] = ["Service a/s", "Service a/t", "Service b/s"];

/// Deterministic random numbers, by seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeededRng(pub(crate) u64);

impl SeededRng {
    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0) % bound as u64) as usize
    }

    /// True with a probability of 1/`n`.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

fn policy(name: &str, variant: u32) -> EgressSpec {
    EgressSpec {
        name: name.into(),
        destinations: vec![["0.0.0.0/0", "::/0", "198.51.100.0/24"][variant as usize].parse().unwrap()],
        excluded: Vec::new(),
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits { guaranteed_ports: (variant > 0).then_some(variant * 100), ..Limits::default() },
        on_exhaustion: OnExhaustion::Reject,
    }
}

/// The even (0) or odd (1) blocks.
fn half(parity: u16) -> Arc<BlockSet> {
    let mut blocks = BlockSet::default();
    (0..).take(BLOCKS).filter(|block| block % 2 == parity).for_each(|block| blocks.insert(BlockId(block)));
    Arc::new(blocks)
}

fn vip(address: &str, layout: usize, variant: u16) -> VipSpec {
    let shard = |gateway: &str, blocks| ShardSpec {
        gateway: gateway.into(),
        blocks,
        // Each variant has other backups.
        backups: GATEWAYS
            .iter()
            .map(|name| (*name).into())
            .filter(|name: &Arc<str>| **name != *gateway)
            .skip(variant.into())
            .collect(),
    };
    let shares = match layout {
        0 | 5 => vec![],
        1 => vec![shard("g1", None)],
        2 => vec![shard("g2", None)],
        3 => vec![shard("g1", Some(half(0))), shard("g2", Some(half(1)))],
        _ => vec![shard("g1", Some(half(0))), shard("g2", Some(half(1))), shard("g3", Some(Arc::default()))],
    };
    let announce = if variant == 2 { Announce::Bgp } else { Announce::L2 };
    VipSpec {
        address: ip(address),
        name: "Service a/s".into(),
        announce,
        reserved_ports: vec![80 + variant],
        shards: shares,
        shard_map: (layout == 5).then(|| ShardMapRef { map: SHARD_MAP.into(), rotation: 7 * variant }),
        private: vec![],
    }
}

/// The shard map of some VIPs; each variant has other gateways.
fn shard_map(variant: u16) -> ShardMapSpec {
    let gateways = GATEWAYS.iter().skip(usize::from(variant)).map(|name| Arc::from(*name));
    ShardMapSpec {
        name: SHARD_MAP.into(),
        orders: gateways.map(|name| vec![name]).collect(),
        slots: (0..SLOTS as u16).map(|slot| slot % (3 - variant)).collect(),
    }
}

/// The name of the shard map.
const SHARD_MAP: &str = "all/0";

/// Any placement in which endpoints have only VIPs of which their gateway owns a shard.
pub(crate) fn any_placement() -> impl Strategy<Value = Placement> {
    let policies = prop::collection::vec(prop::option::weighted(0.8, 0..3_u32), POLICIES.len());
    let vips = (0..3_u16, prop::collection::vec(prop::option::of((0..6_usize, 0..3_u16)), VIPS.len()));
    let endpoints = prop::collection::vec(
        prop::option::weighted(0.7, (any::<prop::sample::Index>(), 0..3_usize, any::<u8>(), 0..2_u8)),
        ENDPOINTS.len(),
    );
    let services = prop::collection::vec(prop::option::of(0..16_u8), SERVICES.len());
    let peers = prop::collection::vec(prop::option::of(0..3_u8), 3);
    (policies, vips, endpoints, services, peers).prop_map(|(policies, vips, endpoints, services, peers)| {
        let named = POLICIES.iter().zip(policies);
        let policies: Vec<_> = named.filter_map(|(name, it)| Some(policy(name, it?))).collect();
        let (map_variant, vips) = vips;
        let named = VIPS.iter().zip(vips);
        let vips: Vec<_> =
            named.filter_map(|(it, params)| params.map(|(layout, variant)| vip(it, layout, variant))).collect();
        let endpoint = |(text, params): (&&str, Option<(prop::sample::Index, usize, u8, u8)>)| {
            let ((policy_index, gateway, vip_bits, name), address) = (params?, ip(text));
            let policy = policies.get(policy_index.index(policies.len().max(1)))?.name.clone();
            let gateway = [None, Some("g1"), Some("g2")][gateway];
            let is_eligible = |vip: &&VipSpec| {
                let owns_shard = |name: &str| vip.shards.iter().any(|shard| *shard.gateway == *name);
                let is_owned = vip.shards.is_empty() || vip.shard_map.is_some() || gateway.is_some_and(owns_shard);
                is_owned && vip.address.is_ipv4() == address.is_ipv4()
            };
            if vips.iter().any(|vip| vip.address == address) {
                return None;
            }
            let selected = vips.iter().filter(is_eligible).enumerate().filter(|(i, _)| vip_bits >> i & 1 == 1);
            let mut addresses: Vec<_> = selected.map(|(_, vip)| vip.address).collect();
            if vip_bits & 0x80 != 0 {
                addresses.reverse();
            }
            let (name, gateway) = (format!("a/{name}").into(), gateway.map(Into::into));
            let has_map = vips.iter().any(|vip| addresses.contains(&vip.address) && vip.shard_map.is_some());
            let map = (vip_bits & 0x40 != 0).then(|| SHARD_MAP.into());
            let slot = has_map.then(|| SlotRef { map, slot: u16::from(vip_bits) });
            Some(EndpointSpec { address, name, policy, vips: addresses, gateway, slot, remarks: vec![] })
        };
        let endpoints = ENDPOINTS.iter().zip(endpoints).filter_map(endpoint).collect();
        let peers: Vec<Peer> = GATEWAYS.iter().zip(peers).filter_map(peer).collect();
        let service = |((name, bits), number): ((&&str, Option<u8>), u16)| {
            let bits = bits?;
            let backends: Vec<u8> = (0..3).filter(|bit| bits >> bit & 1 == 1).collect();
            let internal = if bits & 8 == 0 { Scope::Cluster } else { Scope::Local };
            let mut service = PlacedService { name: (*name).into(), internal, ..service(&backends) };
            // Ports are unique over Services, and no backend is a VIP.
            service.ports[0].port += number;
            service.health_port = service.health_port.map(|port| port + number);
            service.backends.retain(|backend| vips.iter().all(|vip| vip.address != backend.address));
            Some(service)
        };
        let services = SERVICES.iter().zip(services).zip(0..).filter_map(service).collect();
        let cluster = cluster(&peers);
        // Each gateway is also an overlay node.
        let nodes = peers.iter().map(node).collect();
        let has_map = vips.iter().any(|vip| vip.shard_map.is_some());
        let shard_maps = has_map.then(|| shard_map(map_variant)).into_iter().collect();
        let (policies, vips) = (Vec::into(policies), Vec::into(vips));
        let agents = [].into();
        Placement { policies, shard_maps, vips, endpoints, services, nodes, agents, peers, cluster }
    })
}

fn peer((name, zone): (&&str, Option<u8>)) -> Option<Peer> {
    let zone = format!("z{}", zone?).into();
    Some(Peer { name: (**name).into(), node: "n".into(), zone, address: None, pods: [].into(), uncovered: None })
}

/// The cluster's own prefixes, derived from the gateways.
fn cluster(peers: &[Peer]) -> Option<Cluster> {
    let net =
        |peer: &Peer| IpNet::from(IpAddr::from([10, 8, 0, peer.name.as_bytes().last().copied().unwrap_or_default()]));
    let pods = peers.iter().filter(|peer| &*peer.zone != "z1").map(net).collect();
    let nodes = peers.iter().map(net).collect();
    Cluster { pods, nodes, ..Cluster::default() }.non_empty()
}

fn node(peer: &Peer) -> NodeSpec {
    let zone = peer.zone.len() as u32 + u32::from(peer.zone.as_bytes().last().copied().unwrap_or_default());
    let address = IpAddr::from([10, 9, 0, peer.name.as_bytes().last().copied().unwrap_or_default()]);
    let prefixes = vec![IpNet::from(address)];
    NodeSpec {
        name: peer.name.clone(),
        address: (address, 8472).into(),
        vni: zone,
        mac: [2; 6],
        verify_mac: false,
        sends_covered_only: false,
        prefixes,
    }
}

impl ServerPolicy {
    /// The responses, without Settings, that lead from `before` to this state, in random order and number: with
    /// repetitions, with outdated states from `history` that are superseded, with removals of unknown resources.
    pub(super) fn shuffled_responses(
        &self,
        before: &Self,
        history: &[Self],
        rng: &mut SeededRng,
    ) -> Vec<DeltaDiscoveryResponse> {
        let all = history.iter().chain([before, self]).flat_map(|server| server.resources.keys());
        let keys: BTreeSet<_> = all.filter(|key| key.kind != Kind::Settings).cloned().collect();
        let mut queues: Vec<VecDeque<(Key, Option<StoredResource>)>> = Vec::new();
        for key in keys {
            let mut queue = VecDeque::new();
            if rng.one_in(4) && !history.is_empty() {
                queue.push_back((key.clone(), history[rng.below(history.len())].resources.get(&key).cloned()));
            }
            let is_changed = self.resources.get(&key) != before.resources.get(&key);
            for _ in 0..usize::from(is_changed || !queue.is_empty() || rng.one_in(8)) + usize::from(rng.one_in(8)) {
                queue.push_back((key.clone(), self.resources.get(&key).cloned()));
            }
            queues.push(queue);
        }
        if rng.one_in(2) {
            let unknown =
                [(Kind::Vip, "2001:DB8::1"), (Kind::Endpoint, "10.9.9.9"), (Kind::Gateway, ""), (Kind::Service, "x")];
            let (kind, name) = unknown[rng.below(unknown.len())];
            queues.push(VecDeque::from([(key(kind, name), None)]));
        }
        let mut responses: Vec<DeltaDiscoveryResponse> = Vec::new();
        let mut names: BTreeSet<Key> = BTreeSet::new();
        loop {
            queues.retain(|queue| !queue.is_empty());
            if queues.is_empty() {
                return responses;
            }
            let at = rng.below(queues.len());
            // Not empty: empty queues were removed above.
            let (key, stored) = queues[at].pop_front().unwrap();
            let fits_last = responses.last().is_some_and(|last| last.type_url == key.kind.type_url());
            if !fits_last || names.contains(&key) || rng.one_in(4) {
                if rng.one_in(6) {
                    responses.extend(responses.last().cloned());
                }
                let type_url = key.kind.type_url().to_owned();
                responses.push(DeltaDiscoveryResponse { type_url, ..Default::default() });
                names.clear();
            }
            let last = responses.last_mut().unwrap();
            match stored {
                Some(stored) => last.resources.push(resource(&key, &stored)),
                None if rng.one_in(2) => {
                    last.removed_resource_names.push(ResourceName { name: key.name.to_string(), ..Default::default() });
                }
                None => last.removed_resources.push(key.name.to_string()),
            }
            names.insert(key);
        }
    }
}
