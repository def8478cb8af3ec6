//! Placement in force, for `vipgate placement --dry-run`: what the gateway replies, and how the command reads it.

use std::net::{AddrParseError, IpAddr};
use std::sync::Arc;

use thiserror::Error;
use tonic::Status;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::endpoints::Endpoint;
use vipgate_dataplane::policy::spec::{Announce, BlockSet, ShardMapRef, ShardMapSpec, ShardSpec, VipSpec};
use vipgate_dataplane::ports::{BLOCKS, BlockId};
use vipgate_policy::compiler::{Homes, Peer};

use super::proto;
use crate::state::GatewayState;

/// A reply that is no placement: the gateway is of another version, or another program.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// An address that is none.
    #[error("the gateway's placement has the invalid address `{address}`")]
    Address {
        /// The text.
        address: String,
        /// The parser's error.
        source: AddrParseError,
    },
    /// A number of a block, order or rotation that is too large.
    #[error("the gateway's placement has the number {0}, which is out of range")]
    Number(u32),
    /// A shard without a gateway.
    #[error("the gateway's placement has a shard without a gateway")]
    NoHome,
}

/// The placement in force.
///
/// # Errors
/// While there is no policy yet.
pub(super) fn in_force(state: &GatewayState) -> Result<proto::PlacementReply, Status> {
    if state.engine.get().is_none() {
        return Err(Status::unavailable("the gateway is still starting: it has no policy yet"));
    }
    let (shard_maps, vips) = state.placement.get();
    let policy = state.compiled.load();
    let mut endpoints: Vec<_> = policy.endpoints().collect();
    endpoints.sort_by_key(|(address, _)| *address);
    Ok(proto::PlacementReply {
        gateways: state.policy.load().peers.iter().map(gateway).collect(),
        shard_maps: shard_maps.iter().map(shard_map).collect(),
        vips: vips.iter().map(vip).collect(),
        endpoints: endpoints.into_iter().map(|(address, it)| endpoint(address, it, &policy)).collect(),
    })
}

fn gateway(peer: &Peer) -> proto::PlacedGateway {
    proto::PlacedGateway {
        name: peer.name.to_string(),
        node: peer.node.to_string(),
        zone: peer.zone.to_string(),
        address: peer.address.map(|address| address.to_string()).unwrap_or_default(),
    }
}

fn order<'a>(names: impl Iterator<Item = &'a Arc<str>>) -> proto::PlacedOrder {
    proto::PlacedOrder { gateways: names.map(ToString::to_string).collect() }
}

fn shard_map(map: &ShardMapSpec) -> proto::PlacedMap {
    proto::PlacedMap {
        name: map.name.to_string(),
        orders: map.orders.iter().map(|it| order(it.iter())).collect(),
        slots: map.slots.iter().map(|order| (*order).into()).collect(),
    }
}

fn vip(vip: &VipSpec) -> proto::PlacedVip {
    let shard = |shard: &ShardSpec| proto::PlacedShard {
        order: Some(order(std::iter::once(&shard.gateway).chain(&shard.backups))),
        blocks: shard.blocks.iter().flat_map(|blocks| blocks.iter()).map(|block| block.0.into()).collect(),
    };
    proto::PlacedVip {
        address: vip.address.to_string(),
        announce: match vip.announce {
            Announce::L2 => "L2".to_owned(),
            Announce::Bgp => "BGP".to_owned(),
        },
        shards: vip.shards.iter().map(shard).collect(),
        map: vip.shard_map.as_ref().map(|it| it.map.to_string()).unwrap_or_default(),
        rotation: vip.shard_map.as_ref().map_or(0, |it| it.rotation.into()),
    }
}

fn endpoint(address: IpAddr, endpoint: &Endpoint, policy: &Policy) -> proto::PlacedEndpoint {
    let slot = policy.slot_of(endpoint);
    proto::PlacedEndpoint {
        address: address.to_string(),
        home: policy.home_of(endpoint).map(|home| policy.members().name(home).to_string()).unwrap_or_default(),
        slot: slot.as_ref().map(|it| it.slot.into()),
        map: slot.and_then(|it| it.map).map(|name| name.to_string()).unwrap_or_default(),
    }
}

impl TryFrom<proto::PlacementReply> for Homes {
    type Error = PlacementError;

    fn try_from(reply: proto::PlacementReply) -> Result<Self, PlacementError> {
        let home = |it: proto::PlacedEndpoint| {
            Ok((parse(&it.address)?, Some(it.home).filter(|home| !home.is_empty()).map(Arc::from)))
        };
        Ok(Self {
            gateways: reply.gateways.into_iter().map(read_gateway).collect::<Result<_, _>>()?,
            vips: reply.vips.into_iter().map(read_vip).collect::<Result<_, _>>()?,
            shard_maps: reply.shard_maps.into_iter().map(read_map).collect::<Result<_, _>>()?,
            endpoints: reply.endpoints.into_iter().map(home).collect::<Result<_, _>>()?,
        })
    }
}

fn parse(address: &str) -> Result<IpAddr, PlacementError> {
    address.parse().map_err(|source| PlacementError::Address { address: address.to_owned(), source })
}

fn small(number: u32) -> Result<u16, PlacementError> {
    u16::try_from(number).map_err(|_| PlacementError::Number(number))
}

fn read_gateway(it: proto::PlacedGateway) -> Result<Peer, PlacementError> {
    let address = if it.address.is_empty() { None } else { Some(parse(&it.address)?) };
    let (name, node, zone) = (it.name.into(), it.node.into(), it.zone.into());
    Ok(Peer { name, node, zone, address, pods: Arc::default(), uncovered: None })
}

fn read_map(map: proto::PlacedMap) -> Result<ShardMapSpec, PlacementError> {
    let names = |order: proto::PlacedOrder| order.gateways.into_iter().map(Arc::from).collect();
    Ok(ShardMapSpec {
        name: map.name.into(),
        orders: map.orders.into_iter().map(names).collect(),
        slots: map.slots.into_iter().map(small).collect::<Result<_, _>>()?,
    })
}

fn read_vip(vip: proto::PlacedVip) -> Result<VipSpec, PlacementError> {
    let rotation = small(vip.rotation)?;
    Ok(VipSpec {
        address: parse(&vip.address)?,
        name: Arc::default(),
        announce: if vip.announce == "BGP" { Announce::Bgp } else { Announce::L2 },
        reserved_ports: Vec::new(),
        shards: vip.shards.into_iter().map(read_shard).collect::<Result<_, _>>()?,
        shard_map: (!vip.map.is_empty()).then(|| ShardMapRef { map: vip.map.into(), rotation }),
        private: vec![],
    })
}

fn read_shard(shard: proto::PlacedShard) -> Result<ShardSpec, PlacementError> {
    let mut names = shard.order.unwrap_or_default().gateways.into_iter().map(Arc::from);
    let mut blocks = BlockSet::default();
    for number in &shard.blocks {
        let block = small(*number)?;
        if usize::from(block) >= BLOCKS {
            return Err(PlacementError::Number(*number));
        }
        blocks.insert(BlockId(block));
    }
    let gateway = names.next().ok_or(PlacementError::NoHome)?;
    let blocks = (!shard.blocks.is_empty()).then(|| Arc::new(blocks));
    Ok(ShardSpec { gateway, blocks, backups: names.collect() })
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

    fn reply(homes: &Homes) -> proto::PlacementReply {
        let endpoint = |(address, home): (&IpAddr, &Option<Arc<str>>)| proto::PlacedEndpoint {
            address: address.to_string(),
            home: home.as_deref().unwrap_or_default().to_owned(),
            ..proto::PlacedEndpoint::default()
        };
        proto::PlacementReply {
            gateways: homes.gateways.iter().map(gateway).collect(),
            shard_maps: homes.shard_maps.iter().map(shard_map).collect(),
            vips: homes.vips.iter().map(vip).collect(),
            endpoints: homes.endpoints.iter().map(endpoint).collect(),
        }
    }

    #[test]
    fn a_placement_is_read_as_it_was_sent() {
        assert_eq!(Homes::try_from(reply(&example())).unwrap(), example());
    }

    #[test]
    fn a_reply_that_is_no_placement_is_an_error() {
        let error = |edit: &dyn Fn(&mut proto::PlacementReply)| {
            let mut edited = reply(&example());
            edit(&mut edited);
            Homes::try_from(edited).unwrap_err().to_string()
        };
        assert!(error(&|it| it.vips[0].address = "x".into()).contains("`x`"));
        assert!(error(&|it| it.endpoints[0].address.clear()).contains("``"));
        assert!(error(&|it| it.gateways[0].address = "gw".into()).contains("`gw`"));
        assert!(error(&|it| it.vips[2].shards[0].blocks.push(1024)).contains("1024"));
        assert!(error(&|it| it.shard_maps[0].slots[5] = 70_000).contains("70000"));
        assert!(error(&|it| it.vips[1].rotation = 65_536).contains("65536"));
        assert!(error(&|it| it.vips[0].shards[0].order = None).contains("without a gateway"));
    }
}
