//! Placement in force, for `vipgate placement --dry-run`: what the gateway replies, and how the command reads it.

use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vipgate_dataplane::policy::spec::{Announce, BlockSet, ShardMapRef, ShardMapSpec, ShardSpec, VipSpec};
use vipgate_dataplane::ports::{BLOCKS, BlockId};
use vipgate_policy::compiler::{Homes, Peer};

use super::protocol::RequestError;
use crate::state::GatewayState;

/// A reply that is no placement: a port block that no VIP has.
#[derive(Debug, Error)]
#[error("the gateway's placement has the port block {0}, which is out of range")]
pub struct PlacementError(u16);

/// The placement of a gateway's policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementReply {
    /// The gateways of the policy; none: this one is standalone and owns everything.
    gateways: Vec<PlacedGateway>,
    shard_maps: Vec<PlacedMap>,
    vips: Vec<PlacedVip>,
    /// The endpoints, with their home gateways; none: any.
    endpoints: Vec<(IpAddr, Option<String>)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PlacedGateway {
    name: String,
    node: String,
    zone: String,
    /// For other gateways.
    address: Option<IpAddr>,
}

/// A shard map: for each slot the gateways that may own it, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PlacedMap {
    name: String,
    /// The distinct orders: home first, then the backups.
    orders: Vec<Vec<String>>,
    /// The index in `orders` of each slot.
    slots: Vec<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PlacedVip {
    address: IpAddr,
    is_bgp: bool,
    /// Without a shard map; none: it belongs to any gateway.
    shards: Vec<PlacedShard>,
    /// Its shard map, and what is added to the number of a port block to get its slot.
    map: Option<(String, u16)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PlacedShard {
    home: String,
    backups: Vec<String>,
    /// Its port blocks; none: all.
    blocks: Option<Vec<u16>>,
}

/// The placement in force.
///
/// # Errors
/// While there is no policy yet.
pub(super) fn in_force(state: &GatewayState) -> Result<PlacementReply, RequestError> {
    if state.engine.get().is_none() {
        return Err(RequestError::unavailable("the gateway is still starting: it has no policy yet"));
    }
    let (shard_maps, vips) = state.placement.get();
    let policy = state.compiled.load();
    let mut endpoints: Vec<_> = policy.endpoints().collect();
    endpoints.sort_by_key(|(address, _)| *address);
    let home = |endpoint| policy.home_of(endpoint).map(|home| policy.members().name(home).to_string());
    Ok(PlacementReply {
        gateways: state.policy.load().peers.iter().map(gateway).collect(),
        shard_maps: shard_maps.iter().map(shard_map).collect(),
        vips: vips.iter().map(vip).collect(),
        endpoints: endpoints.into_iter().map(|(address, it)| (address, home(it))).collect(),
    })
}

fn texts(names: &[Arc<str>]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn names(texts: Vec<String>) -> Vec<Arc<str>> {
    texts.into_iter().map(Arc::from).collect()
}

fn gateway(peer: &Peer) -> PlacedGateway {
    let Peer { name, node, zone, address, .. } = peer;
    PlacedGateway { name: name.to_string(), node: node.to_string(), zone: zone.to_string(), address: *address }
}

fn shard_map(map: &ShardMapSpec) -> PlacedMap {
    let orders = map.orders.iter().map(|order| texts(order)).collect();
    PlacedMap { name: map.name.to_string(), orders, slots: map.slots.clone() }
}

fn vip(vip: &VipSpec) -> PlacedVip {
    let shard = |shard: &ShardSpec| PlacedShard {
        home: shard.gateway.to_string(),
        backups: texts(&shard.backups),
        blocks: shard.blocks.as_ref().map(|blocks| blocks.iter().map(|block| block.0).collect()),
    };
    PlacedVip {
        address: vip.address,
        is_bgp: vip.announce == Announce::Bgp,
        shards: vip.shards.iter().map(shard).collect(),
        map: vip.shard_map.as_ref().map(|it| (it.map.to_string(), it.rotation)),
    }
}

impl TryFrom<PlacementReply> for Homes {
    type Error = PlacementError;

    fn try_from(reply: PlacementReply) -> Result<Self, PlacementError> {
        let map = |PlacedMap { name, orders, slots }| ShardMapSpec {
            name: name.into(),
            orders: orders.into_iter().map(names).collect(),
            slots,
        };
        let homes = reply.endpoints.into_iter().map(|(address, home)| (address, home.map(Arc::from)));
        Ok(Self {
            gateways: reply.gateways.into_iter().map(read_gateway).collect(),
            vips: reply.vips.into_iter().map(read_vip).collect::<Result<_, _>>()?,
            shard_maps: reply.shard_maps.into_iter().map(map).collect(),
            endpoints: homes.collect(),
        })
    }
}

fn read_gateway(PlacedGateway { name, node, zone, address }: PlacedGateway) -> Peer {
    let (name, node, zone) = (name.into(), node.into(), zone.into());
    Peer { name, node, zone, address, pods: Arc::default(), uncovered: None }
}

fn read_vip(vip: PlacedVip) -> Result<VipSpec, PlacementError> {
    Ok(VipSpec {
        address: vip.address,
        name: Arc::default(),
        announce: if vip.is_bgp { Announce::Bgp } else { Announce::L2 },
        reserved_ports: Vec::new(),
        shards: vip.shards.into_iter().map(read_shard).collect::<Result<_, _>>()?,
        shard_map: vip.map.map(|(map, rotation)| ShardMapRef { map: map.into(), rotation }),
        private: vec![],
    })
}

fn read_shard(shard: PlacedShard) -> Result<ShardSpec, PlacementError> {
    let blocks = shard.blocks.map(|numbers| {
        let mut blocks = BlockSet::default();
        for number in numbers {
            if usize::from(number) >= BLOCKS {
                return Err(PlacementError(number));
            }
            blocks.insert(BlockId(number));
        }
        Ok(Arc::new(blocks))
    });
    Ok(ShardSpec { gateway: shard.home.into(), blocks: blocks.transpose()?, backups: names(shard.backups) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Homes {
        let mut blocks = BlockSet::default();
        for block in [0, 7, 1023] {
            blocks.insert(BlockId(block));
        }
        let shard = |gateway: &str, blocks| ShardSpec {
            gateway: gateway.into(),
            blocks,
            backups: vec!["gw-b".into(), "gw-c".into()],
        };
        let vip = |address: &str, announce, shards, shard_map| VipSpec {
            address: address.parse().unwrap(),
            name: Arc::default(),
            announce,
            reserved_ports: vec![],
            shards,
            shard_map,
            private: vec![],
        };
        let reference = ShardMapRef { map: "all/0".into(), rotation: 1023 };
        Homes {
            gateways: vec![Peer {
                name: "gw-a".into(),
                node: "n1".into(),
                zone: "z1".into(),
                address: Some([192, 0, 2, 1].into()),
                pods: Arc::default(),
                uncovered: None,
            }],
            vips: vec![
                vip("203.0.113.1", Announce::L2, vec![shard("gw-a", None)], None),
                vip("203.0.113.2", Announce::Bgp, vec![], Some(reference)),
                vip("2001:db8::1", Announce::L2, vec![shard("gw-a", Some(Arc::new(blocks)))], None),
                vip("2001:db8::2", Announce::L2, vec![], None),
            ],
            shard_maps: vec![ShardMapSpec {
                name: "all/0".into(),
                orders: vec![vec!["gw-a".into(), "gw-b".into()], vec!["gw-b".into()]],
                slots: (0..1024).map(|slot| slot % 2).collect(),
            }],
            endpoints: [("10.0.0.1", Some("gw-a")), ("fd00::1", None)]
                .map(|(address, home)| (address.parse().unwrap(), home.map(Arc::from)))
                .into(),
        }
    }

    fn reply(homes: &Homes) -> PlacementReply {
        let endpoint =
            |(address, home): (&IpAddr, &Option<Arc<str>>)| (*address, home.as_ref().map(ToString::to_string));
        PlacementReply {
            gateways: homes.gateways.iter().map(gateway).collect(),
            shard_maps: homes.shard_maps.iter().map(shard_map).collect(),
            vips: homes.vips.iter().map(vip).collect(),
            endpoints: homes.endpoints.iter().map(endpoint).collect(),
        }
    }

    #[test]
    fn a_placement_is_read_as_it_was_sent() {
        let json = serde_json::to_string(&reply(&example())).unwrap();
        let read: PlacementReply = serde_json::from_str(&json).unwrap();
        assert_eq!(Homes::try_from(read).unwrap(), example());
    }

    #[test]
    fn a_port_block_that_no_vip_has_is_an_error() {
        let mut edited = reply(&example());
        edited.vips[2].shards[0].blocks.as_mut().unwrap().push(1024);
        assert!(Homes::try_from(edited).unwrap_err().to_string().contains("1024"));
    }
}
