//! A small world of deals that contradict nothing, and a server that tells them in any order, with all the noise that
//! the protocol allows.

use std::collections::VecDeque;

use ipnet::IpNet;
use vipgate_dataplane::ports::{BLOCKS, BlockId};
use vipgate_dataplane::snapshot::spec::NodeSpec;

use super::*;
use crate::policy::{Cluster, Peer, mix};

/// `g3` is a gateway that gets little, `g9` one that nobody knows.
pub(super) const GATEWAYS: [&str; 4] = ["g1", "g2", "g3", "g9"];
const POLICIES: [&str; 3] = ["EgressPolicy a/p", "EgressPolicy a/q", "Service a/s"];
/// `10.0.0.1` is an endpoint where it is no VIP.
const VIPS: [&str; 6] = ["10.0.0.1", "203.0.113.1", "203.0.113.2", "203.0.113.3", "2001:db8::1", "2001:db8::2"];
const ENDPOINTS: [&str; 8] =
    ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "fd00::1", "fd00::2", "fd00::3"];

const SERVICES: [&str; 3] = ["Service a/s", "Service a/t", "Service b/s"];

/// Numbers that look random and are the same in each run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// A number below `sides`.
    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0) % sides as u64) as usize
    }

    pub(crate) fn once_in(&mut self, sides: usize) -> bool {
        self.roll(sides) == 0
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

/// Half of the blocks.
fn half(rest: u16) -> Arc<BlockSet> {
    let mut blocks = BlockSet::default();
    (0..).take(BLOCKS).filter(|block| block % 2 == rest).for_each(|block| blocks.insert(BlockId(block)));
    Arc::new(blocks)
}

fn vip(address: &str, shares: usize, variant: u16) -> VipSpec {
    let share = |gateway: &str, blocks| ShareSpec {
        gateway: gateway.into(),
        blocks,
        // Another one stands in when the VIP has another variant.
        backups: GATEWAYS
            .iter()
            .map(|name| (*name).into())
            .filter(|name: &Arc<str>| **name != *gateway)
            .skip(variant.into())
            .collect(),
    };
    let shares = match shares {
        0 => vec![],
        1 => vec![share("g1", None)],
        2 => vec![share("g2", None)],
        3 => vec![share("g1", Some(half(0))), share("g2", Some(half(1)))],
        _ => vec![share("g1", Some(half(0))), share("g2", Some(half(1))), share("g3", Some(Arc::default()))],
    };
    let announce = if variant == 2 { Announce::Bgp } else { Announce::L2 };
    VipSpec { address: ip(address), name: "Service a/s".into(), announce, reserved_ports: vec![80 + variant], shares }
}

/// A deal in which endpoints have only VIPs that their gateway holds.
pub(super) fn deal() -> impl Strategy<Value = Deal> {
    let policies = prop::collection::vec(prop::option::weighted(0.8, 0..3_u32), POLICIES.len());
    let vips = prop::collection::vec(prop::option::of((0..5_usize, 0..3_u16)), VIPS.len());
    let endpoints = prop::collection::vec(
        prop::option::weighted(0.7, (any::<prop::sample::Index>(), 0..3_usize, any::<u8>(), 0..2_u8)),
        ENDPOINTS.len(),
    );
    let services = prop::collection::vec(prop::option::of(0..16_u8), SERVICES.len());
    let peers = prop::collection::vec(prop::option::of(0..3_u8), 3);
    (policies, vips, endpoints, services, peers).prop_map(|(policies, vips, endpoints, services, peers)| {
        let named = POLICIES.iter().zip(policies);
        let policies: Vec<_> = named.filter_map(|(name, it)| Some(policy(name, it?))).collect();
        let named = VIPS.iter().zip(vips);
        let vips: Vec<_> =
            named.filter_map(|(it, how)| how.map(|(shares, variant)| vip(it, shares, variant))).collect();
        let endpoint = |(text, how): (&&str, Option<(prop::sample::Index, usize, u8, u8)>)| {
            let ((of_policy, gateway, vip_bits, name), address) = (how?, ip(text));
            let policy = policies.get(of_policy.index(policies.len().max(1)))?.name.clone();
            let gateway = [None, Some("g1"), Some("g2")][gateway];
            let fits = |vip: &&VipSpec| {
                let is_home = |name: &str| vip.shares.iter().any(|share| *share.gateway == *name);
                let is_there = vip.shares.is_empty() || gateway.is_some_and(is_home);
                is_there && vip.address.is_ipv4() == address.is_ipv4()
            };
            if vips.iter().any(|vip| vip.address == address) {
                return None;
            }
            let bits = vips.iter().filter(fits).enumerate().filter(|(i, _)| vip_bits >> i & 1 == 1);
            let mut own: Vec<_> = bits.map(|(_, vip)| vip.address).collect();
            if vip_bits & 0x80 != 0 {
                own.reverse();
            }
            let (name, gateway) = (format!("a/{name}").into(), gateway.map(Into::into));
            Some(EndpointSpec { address, name, policy, vips: own, gateway, remarks: vec![] })
        };
        let endpoints = ENDPOINTS.iter().zip(endpoints).filter_map(endpoint).collect();
        let peer = |(name, zone): (&&str, Option<u8>)| {
            let zone = format!("z{}", zone?).into();
            Some(Peer {
                name: (**name).into(),
                node: "n".into(),
                zone,
                address: None,
                pods: [].into(),
                uncovered: None,
            })
        };
        let peers: Vec<Peer> = GATEWAYS.iter().zip(peers).filter_map(peer).collect();
        let service = |((name, bits), number): ((&&str, Option<u8>), u16)| {
            let bits = bits?;
            let backends: Vec<u8> = (0..3).filter(|bit| bits >> bit & 1 == 1).collect();
            let internal = if bits & 8 == 0 { Scope::Cluster } else { Scope::Local };
            let mut service = DealtService { name: (*name).into(), internal, ..service(&backends) };
            // None has what is another one's, and no backend is a VIP.
            service.ports[0].port += number;
            service.health_port = service.health_port.map(|port| port + number);
            service.backends.retain(|backend| vips.iter().all(|vip| vip.address != backend.address));
            Some(service)
        };
        let services = SERVICES.iter().zip(services).zip(0..).filter_map(service).collect();
        let cluster = cluster(&peers);
        // Whoever is a gateway is a node, too, in this world.
        let nodes = peers.iter().map(node).collect();
        Deal { policies, vips, endpoints, services, nodes, peers, cluster }
    })
}

/// What is said of the cluster's own addresses changes with the gateways.
fn cluster(peers: &[Peer]) -> Option<Cluster> {
    let net =
        |peer: &Peer| IpNet::from(IpAddr::from([10, 8, 0, peer.name.as_bytes().last().copied().unwrap_or_default()]));
    let pods = peers.iter().filter(|peer| &*peer.zone != "z1").map(net).collect();
    let nodes = peers.iter().map(net).collect();
    Cluster { pods, nodes, ..Cluster::default() }.said()
}

fn node(peer: &Peer) -> NodeSpec {
    let zone = peer.zone.len() as u32 + u32::from(peer.zone.as_bytes().last().copied().unwrap_or_default());
    let address = IpAddr::from([10, 9, 0, peer.name.as_bytes().last().copied().unwrap_or_default()]);
    let prefixes = vec![IpNet::from(address)];
    NodeSpec { name: peer.name.clone(), address: (address, 8472).into(), vni: zone, mac: [2; 6], prefixes }
}

impl Told {
    /// Everything but the settings that a client must hear to get here from `before`, in any order and any number of
    /// responses: with repetitions, with states of the past that are taken back, with removals of what never was.
    pub(super) fn tell(&self, before: &Self, past: &[Self], dice: &mut Dice) -> Vec<DeltaDiscoveryResponse> {
        let all = past.iter().chain([before, self]).flat_map(|server| server.held.keys());
        let keys: BTreeSet<_> = all.filter(|key| key.kind != Kind::Settings).cloned().collect();
        let mut queues: Vec<VecDeque<(Key, Option<Held>)>> = Vec::new();
        for key in keys {
            let mut queue = VecDeque::new();
            if dice.once_in(4) && !past.is_empty() {
                queue.push_back((key.clone(), past[dice.roll(past.len())].held.get(&key).cloned()));
            }
            let is_news = self.held.get(&key) != before.held.get(&key);
            for _ in 0..usize::from(is_news || !queue.is_empty() || dice.once_in(8)) + usize::from(dice.once_in(8)) {
                queue.push_back((key.clone(), self.held.get(&key).cloned()));
            }
            queues.push(queue);
        }
        if dice.once_in(2) {
            let never =
                [(Kind::Vip, "2001:DB8::1"), (Kind::Endpoint, "10.9.9.9"), (Kind::Gateway, ""), (Kind::Service, "x")];
            let (kind, name) = never[dice.roll(never.len())];
            queues.push(VecDeque::from([(key(kind, name), None)]));
        }
        let mut said: Vec<DeltaDiscoveryResponse> = Vec::new();
        let mut names: BTreeSet<Key> = BTreeSet::new();
        loop {
            queues.retain(|queue| !queue.is_empty());
            if queues.is_empty() {
                return said;
            }
            let at = dice.roll(queues.len());
            // The queue isn't empty: those went a moment ago.
            let (key, held) = queues[at].pop_front().unwrap();
            let goes_on = said.last().is_some_and(|last| last.type_url == key.kind.type_url());
            if !goes_on || names.contains(&key) || dice.once_in(4) {
                if dice.once_in(6) {
                    said.extend(said.last().cloned());
                }
                said.push(DeltaDiscoveryResponse { type_url: key.kind.type_url().to_owned(), ..Default::default() });
                names.clear();
            }
            let last = said.last_mut().unwrap();
            match held {
                Some(held) => last.resources.push(resource(&key, &held)),
                None if dice.once_in(2) => {
                    last.removed_resource_names.push(ResourceName { name: key.name.to_string(), ..Default::default() });
                }
                None => last.removed_resources.push(key.name.to_string()),
            }
            names.insert(key);
        }
    }
}
