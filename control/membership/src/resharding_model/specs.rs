//! What a gateway's engine gets in the model: its network, and one VIP with two shards. Every session is of an endpoint
//! of its own, since a flush selects sessions by endpoint; all are to the same remote, so that ports can conflict.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::spec::{
    BlockSet, EndpointSpec, HopSpec, NetworkSpec, RouteSpec, RouteTarget, SLOTS, ShardMapRef, ShardMapSpec, ShardSpec,
    SlotRef, VipSpec,
};
use vipgate_dataplane::ports::{BLOCK_PORTS, BlockId, PortRange};
use vipgate_dataplane::wire::protocol;

use super::policies::{NAMES, Order, Placement, SHARDS};

/// The VIP.
pub(super) const VIP: u32 = 0xc000_020a;
/// The remote of all sessions.
const REMOTE: u32 = 0xc633_640a;
const REMOTE_PORT: u16 = 443;
/// The port of all endpoints, and the first endpoint.
const ENDPOINT_PORT: u16 = 4000;
const FIRST_ENDPOINT: u32 = 0x0af4_0901;
/// Sessions that a world may open.
pub(super) const MAX_SESSIONS: usize = 64;
/// The block of ports of the first shard; the next one belongs to the other shard.
const FIRST_BLOCK: u16 = 16;
/// Ports of a shard that may be allocated: three of each stripe, so that two gateways that use one stripe at once soon
/// allocate the same port.
const PORTS: u16 = 24;

/// The first port of a shard.
pub(super) fn first_port(shard: usize) -> u16 {
    (FIRST_BLOCK + shard as u16) * BLOCK_PORTS as u16
}

/// The shard of a port.
pub(super) fn shard_of(port: u16) -> usize {
    usize::from(BlockId::of(port).0) % SHARDS
}

/// The end of the first shard's block, and the beginning of the other one's.
pub(super) fn port_range() -> PortRange {
    let middle = first_port(1);
    PortRange::new(middle - PORTS, middle + PORTS - 1).expect("a range")
}

/// The original direction of a session. The endpoint's slot is one of the shard that `id` has, modulo the number of
/// shards.
pub(super) fn origin(id: u32) -> Tuple<u32> {
    Tuple {
        source: FIRST_ENDPOINT + id,
        destination: REMOTE,
        source_port: ENDPOINT_PORT,
        destination_port: REMOTE_PORT,
        protocol: protocol::UDP,
    }
}

/// The session with this original direction.
pub(super) fn id_of(origin: &Tuple<u32>) -> u32 {
    origin.source - FIRST_ENDPOINT
}

/// The endpoint of a session.
pub(super) fn endpoint(id: u32) -> IpAddr {
    Ipv4Addr::from_bits(FIRST_ENDPOINT + id).into()
}

/// Source and destination of a session's first packet.
pub(super) fn ends(id: u32) -> (SocketAddr, SocketAddr) {
    ((endpoint(id), ENDPOINT_PORT).into(), remote())
}

pub(super) fn remote() -> SocketAddr {
    (Ipv4Addr::from_bits(REMOTE), REMOTE_PORT).into()
}

/// The VIP with a port.
pub(super) fn vip(port: u16) -> SocketAddr {
    (Ipv4Addr::from_bits(VIP), port).into()
}

/// That of the testkit; the endpoints are behind one of its pods.
pub(super) fn network() -> NetworkSpec {
    let mut network = vipgate_testkit::network();
    let hop = HopSpec { interface: vipgate_testkit::INSIDE, gateway: Some([10, 244, 1, 5].into()) };
    let prefix = "10.244.9.0/24".parse().expect("a prefix");
    network.routes.push(RouteSpec { prefix, target: RouteTarget::Via(vec![hop]) });
    network
}

/// The change from nothing to a policy.
pub(super) fn first_policy(version: &str, placement: Placement) -> PolicyChange {
    let set = vipgate_testkit::policy();
    let policy = set.policies.into_iter().next().expect("the testkit has one");
    let endpoint = |id: u32| EndpointSpec {
        address: endpoint(id),
        name: "".into(),
        policy: policy.name.clone(),
        vips: vec![vip(0).ip()],
        gateway: None,
        slot: Some(SlotRef { map: None, slot: (id as usize % SHARDS) as u16 }),
        remarks: Vec::new(),
    };
    PolicyChange {
        endpoints: (0..(MAX_SESSIONS * SHARDS) as u32).map(endpoint).collect(),
        policies: vec![policy.clone()].into(),
        vips: vec![vip_spec(placement)].into(),
        shard_maps: placement.has_map.then(|| shard_map(placement.orders)).into_iter().collect(),
        version: version.to_owned(),
        ..PolicyChange::default()
    }
}

/// The change to another placement.
pub(super) fn next_policy(version: &str, placement: Placement) -> PolicyChange {
    let change = PolicyChange { version: version.to_owned(), ..PolicyChange::default() };
    if placement.has_map {
        PolicyChange { shard_maps: vec![shard_map(placement.orders)].into(), ..change }
    } else {
        PolicyChange { vips: vec![vip_spec(placement)].into(), ..change }
    }
}

fn vip_spec(placement: Placement) -> VipSpec {
    let vips = vipgate_testkit::policy().vips;
    let first = vips.into_iter().next().expect("the testkit has one");
    VipSpec {
        address: vip(0).ip(),
        reserved_ports: Vec::new(),
        shards: if placement.has_map { Vec::new() } else { listed_shards(placement.orders) },
        shard_map: placement.has_map.then(|| ShardMapRef { map: "map".into(), rotation: 0 }),
        ..first
    }
}

fn names(order: Order) -> Vec<Arc<str>> {
    order.iter().map(|at| NAMES[at].into()).collect()
}

/// Every second block, or slot, belongs to the same shard.
fn shard_map(orders: [Order; SHARDS]) -> ShardMapSpec {
    let orders: Vec<_> = if orders[0] == orders[1] { vec![names(orders[0])] } else { orders.map(names).into() };
    let slots = (0..SLOTS).map(|slot| (slot % orders.len()) as u16).collect();
    ShardMapSpec { name: "map".into(), orders, slots }
}

fn listed_shards(orders: [Order; SHARDS]) -> Vec<ShardSpec> {
    let shard = |(at, order): (usize, Order)| {
        let mut blocks = BlockSet::default();
        (at..SLOTS).step_by(SHARDS).for_each(|block| blocks.insert(BlockId(block as u16)));
        let mut gateways = names(order).into_iter();
        let gateway = gateways.next().unwrap_or_default();
        ShardSpec { gateway, blocks: Some(Arc::new(blocks)), backups: gateways.collect() }
    };
    orders.into_iter().enumerate().map(shard).collect()
}
