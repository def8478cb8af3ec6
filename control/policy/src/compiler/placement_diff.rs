//! Placement difference: what moves between gateways when one placement replaces another. Pure: computed from the two
//! placements alone, whichever gateways are active.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::policy::spec::{SLOTS, ShardMapSpec, VipSpec};

use super::placement::{Peer, Placement};

/// Where a placement has gateways, VIPs and endpoints; a gateway replies with its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Homes {
    /// The gateways, by name.
    gateways: BTreeMap<String, GatewaySite>,
    vips: BTreeMap<IpAddr, VipShards>,
    /// The home of each slot of the shard maps that VIPs refer to.
    shard_maps: BTreeMap<String, Vec<String>>,
    /// The home of each endpoint; `None`: any gateway.
    endpoints: BTreeMap<IpAddr, Option<String>>,
}

/// What counts of a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GatewaySite {
    node: String,
    zone: String,
    /// For other gateways.
    address: Option<IpAddr>,
}

/// The homes of a VIP's shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum VipShards {
    /// One gateway has all of it; empty: any gateway.
    Whole(String),
    /// By a shard map: the slot of a port block is its number plus the rotation.
    Mapped { map: String, rotation: u16 },
    /// Each home with its port blocks.
    Blocks(Vec<(String, Vec<u16>)>),
}

/// What differs between two placements. An empty name: no gateway in particular.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlacementDiff {
    /// The gateways that differ.
    pub gateways: GatewayChanges,
    /// The VIPs that differ.
    pub vips: VipChanges,
    /// Port blocks of distributed VIPs that move.
    pub ports: PortChanges,
    /// Endpoints that differ.
    pub endpoints: EndpointChanges,
}

/// Names of the gateways that differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GatewayChanges {
    /// Those that are new.
    pub added: Vec<String>,
    /// Those that are gone.
    pub removed: Vec<String>,
    /// Those with another node, zone or address.
    pub changed: Vec<String>,
}

/// VIPs that differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VipChanges {
    /// VIPs in both placements.
    pub kept: usize,
    /// Those that are new.
    pub added: Vec<PlacedVip>,
    /// Those that are gone.
    pub removed: Vec<PlacedVip>,
    /// Those that one gateway owns as a whole, with another home.
    pub moved: Vec<VipMove>,
}

/// A VIP that only one of the placements has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlacedVip {
    pub vip: IpAddr,
    /// Its home; empty if it is distributed, or belongs to any gateway.
    pub home: String,
    /// Whether its ports are distributed over gateways.
    pub distributed: bool,
}

/// A VIP with another home.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VipMove {
    pub vip: IpAddr,
    /// Its home before.
    pub from: String,
    /// Its home after.
    pub to: String,
}

/// Port blocks of the VIPs in both placements that at least one of them distributes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PortChanges {
    /// These VIPs.
    pub vips: usize,
    /// Their blocks, each of 64 ports.
    pub blocks: usize,
    /// Those with another home.
    pub moved: Vec<BlockMoves>,
}

/// Port blocks that move from one gateway to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockMoves {
    /// Their home before.
    pub from: String,
    /// Their home after.
    pub to: String,
    /// The VIPs of which blocks move.
    pub vips: usize,
    /// The blocks of all these VIPs.
    pub blocks: usize,
}

/// Endpoints that differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EndpointChanges {
    /// Endpoints in both placements.
    pub kept: usize,
    /// Those that are new.
    pub added: usize,
    /// Those that are gone.
    pub removed: usize,
    /// Those with another home.
    pub moved: Vec<EndpointMoves>,
}

/// Endpoints that move from one gateway to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EndpointMoves {
    /// Their home before.
    pub from: String,
    /// Their home after.
    pub to: String,
    /// Their number.
    pub endpoints: usize,
}

impl PlacementDiff {
    /// Port blocks that move.
    pub fn moved_blocks(&self) -> usize {
        self.ports.moved.iter().map(|moves| moves.blocks).sum()
    }

    /// Endpoints that move.
    pub fn moved_endpoints(&self) -> usize {
        self.endpoints.moved.iter().map(|moves| moves.endpoints).sum()
    }

    /// Whether anything that both placements have gets another home.
    pub fn moves_anything(&self) -> bool {
        !self.vips.moved.is_empty() || !self.ports.moved.is_empty() || !self.endpoints.moved.is_empty()
    }
}

impl Homes {
    /// Those of these gateways, VIPs and shard maps, and of endpoints with their homes.
    pub fn new<'a>(
        gateways: &[Peer],
        vips: impl IntoIterator<Item = &'a VipSpec>,
        shard_maps: &[ShardMapSpec],
        endpoints: impl IntoIterator<Item = (IpAddr, Option<&'a Arc<str>>)>,
    ) -> Self {
        let site = |it: &Peer| {
            (
                it.name.to_string(),
                GatewaySite { node: it.node.to_string(), zone: it.zone.to_string(), address: it.address },
            )
        };
        let slots = |map: &ShardMapSpec| {
            let home = |slot: usize| map.order(slot as u16).first().map(ToString::to_string).unwrap_or_default();
            (map.name.to_string(), (0..SLOTS).map(home).collect())
        };
        let home = |(address, home): (IpAddr, Option<&Arc<str>>)| (address, home.map(ToString::to_string));
        Self {
            gateways: gateways.iter().map(site).collect(),
            vips: vips.into_iter().map(|vip| (vip.address, VipShards::of(vip))).collect(),
            shard_maps: shard_maps.iter().map(slots).collect(),
            endpoints: endpoints.into_iter().map(home).collect(),
        }
    }
}

impl VipShards {
    fn of(vip: &VipSpec) -> Self {
        if let Some(reference) = &vip.shard_map {
            return Self::Mapped { map: reference.map.to_string(), rotation: reference.rotation };
        }
        if vip.shards.iter().all(|shard| shard.blocks.is_none()) {
            return Self::Whole(vip.shards.first().map(|shard| shard.gateway.to_string()).unwrap_or_default());
        }
        let shards = vip.shards.iter().map(|shard| {
            let blocks = shard.blocks.iter().flat_map(|blocks| blocks.iter());
            (shard.gateway.to_string(), blocks.map(|block| block.0).collect())
        });
        Self::Blocks(shards.collect())
    }
}

impl From<&Placement> for Homes {
    fn from(placement: &Placement) -> Self {
        let endpoints = placement.endpoints.iter().map(|it| (it.address, placement.gateway_of(it)));
        Self::new(&placement.peers, &placement.vips, &placement.shard_maps, endpoints)
    }
}

/// What moves when the placement `after` replaces `before`.
pub fn placement_diff(before: &Homes, after: &Homes) -> PlacementDiff {
    let (vips, ports) = vip_changes(before, after);
    PlacementDiff {
        gateways: gateway_changes(&before.gateways, &after.gateways),
        vips,
        ports,
        endpoints: endpoint_changes(before, after),
    }
}

type Gateways = BTreeMap<String, GatewaySite>;

fn gateway_changes(before: &Gateways, after: &Gateways) -> GatewayChanges {
    let names = |all: &Gateways, is_listed: &dyn Fn(&String) -> bool| {
        all.keys().filter(|name| is_listed(name)).cloned().collect()
    };
    GatewayChanges {
        added: names(after, &|name| !before.contains_key(name)),
        removed: names(before, &|name| !after.contains_key(name)),
        changed: names(after, &|name| before.get(name).is_some_and(|old| after.get(name) != Some(old))),
    }
}

/// The home of a VIP.
#[derive(Debug, PartialEq, Eq)]
enum VipHome<'a> {
    /// Of the whole VIP.
    Whole(&'a str),
    /// Of each of its blocks.
    Blocks(Vec<&'a str>),
}

impl<'a> VipHome<'a> {
    fn of(shards: &'a VipShards, shard_maps: &'a BTreeMap<String, Vec<String>>) -> Self {
        match shards {
            VipShards::Whole(home) => Self::Whole(home),
            VipShards::Mapped { map, rotation } => {
                let slots = shard_maps.get(map).map(Vec::as_slice).unwrap_or_default();
                let slot = |block: usize| (block + usize::from(*rotation)) % SLOTS;
                let home = |block| slots.get(slot(block)).map_or("", String::as_str);
                Self::Blocks((0..SLOTS).map(home).collect())
            }
            VipShards::Blocks(shards) => {
                let mut homes = vec![""; SLOTS];
                for (home, blocks) in shards {
                    for block in blocks {
                        if let Some(of_block) = homes.get_mut(usize::from(*block)) {
                            *of_block = home;
                        }
                    }
                }
                Self::Blocks(homes)
            }
        }
    }

    fn of_block(&self, block: usize) -> &'a str {
        match self {
            Self::Whole(home) => home,
            Self::Blocks(homes) => homes[block],
        }
    }

    fn placed(&self, vip: IpAddr) -> PlacedVip {
        match self {
            Self::Whole(home) => PlacedVip { vip, home: (*home).to_owned(), distributed: false },
            Self::Blocks(_) => PlacedVip { vip, home: String::new(), distributed: true },
        }
    }
}

fn vip_homes(of: &Homes) -> BTreeMap<IpAddr, VipHome<'_>> {
    of.vips.iter().map(|(vip, shards)| (*vip, VipHome::of(shards, &of.shard_maps))).collect()
}

fn vip_changes(before: &Homes, after: &Homes) -> (VipChanges, PortChanges) {
    let (before, after) = (vip_homes(before), vip_homes(after));
    let mut vips = VipChanges {
        added: after.iter().filter(|(vip, _)| !before.contains_key(vip)).map(|(vip, it)| it.placed(*vip)).collect(),
        ..VipChanges::default()
    };
    let mut ports = PortChanges::default();
    let mut moved: BTreeMap<(&str, &str), (BTreeSet<IpAddr>, usize)> = BTreeMap::new();
    for (vip, old) in &before {
        let Some(new) = after.get(vip) else {
            vips.removed.push(old.placed(*vip));
            continue;
        };
        vips.kept += 1;
        if let (VipHome::Whole(from), VipHome::Whole(to)) = (old, new) {
            if from != to {
                vips.moved.push(VipMove { vip: *vip, from: (*from).to_owned(), to: (*to).to_owned() });
            }
            continue;
        }
        ports.vips += 1;
        ports.blocks += SLOTS;
        let homes = (0..SLOTS).map(|block| (old.of_block(block), new.of_block(block)));
        for homes in homes.filter(|(from, to)| from != to) {
            let (vips, blocks) = moved.entry(homes).or_default();
            vips.insert(*vip);
            *blocks += 1;
        }
    }
    let moves = |((from, to), (vips, blocks)): ((&str, &str), (BTreeSet<IpAddr>, usize))| BlockMoves {
        from: from.to_owned(),
        to: to.to_owned(),
        vips: vips.len(),
        blocks,
    };
    ports.moved = moved.into_iter().map(moves).collect();
    (vips, ports)
}

fn endpoint_changes(before: &Homes, after: &Homes) -> EndpointChanges {
    let added = after.endpoints.keys().filter(|address| !before.endpoints.contains_key(address)).count();
    let mut changes = EndpointChanges { added, ..EndpointChanges::default() };
    let mut moved: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (address, old) in &before.endpoints {
        let Some(new) = after.endpoints.get(address) else {
            changes.removed += 1;
            continue;
        };
        changes.kept += 1;
        if old != new {
            *moved.entry((old.as_deref().unwrap_or_default(), new.as_deref().unwrap_or_default())).or_default() += 1;
        }
    }
    let moves = |((from, to), endpoints): ((&str, &str), usize)| EndpointMoves {
        from: from.to_owned(),
        to: to.to_owned(),
        endpoints,
    };
    changes.moved = moved.into_iter().map(moves).collect();
    changes
}
