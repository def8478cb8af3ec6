//! Shard moves: owners of each VIP shard before and after a change of the active gateways, and the gateways that can
//! own one. Pure: computed from the placement alone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use vipgate_dataplane::policy::spec::{EndpointSpec, ShardMapSpec, ShardSpec, SlotRef, VipSpec};

/// The owner of a VIP's shards with one home before and after a change of the active gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardMove {
    /// VIP of the shard.
    pub vip: IpAddr,
    /// Gateway that the shard is assigned to.
    pub home: Arc<str>,
    /// Active owner before; `None`: no gateway.
    pub before: Option<Arc<str>>,
    /// Active owner after; `None`: no gateway.
    pub after: Option<Arc<str>>,
    /// Endpoints that move with it. Each counts once: for the first of its VIPs that has a shard map, or else a shard at
    /// the endpoint's home.
    pub endpoints: usize,
}

impl ShardMove {
    /// Whether the owner changes.
    pub fn changes_owner(&self) -> bool {
        self.before != self.after
    }
}

/// The placement that moves are computed from.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    pub vips: &'a [VipSpec],
    pub shard_maps: &'a [ShardMapSpec],
    pub endpoints: &'a [EndpointSpec],
}

/// Home, and owners before and after.
type Owners = (Arc<str>, Option<Arc<str>>, Option<Arc<str>>);

/// The owners of all shards while the gateways in `before` or in `after` are active, by VIP and home. A VIP without
/// shards has no entry: any gateway that receives its packets handles them.
pub fn shard_moves(placed: Placed<'_>, before: &BTreeSet<Arc<str>>, after: &BTreeSet<Arc<str>>) -> Vec<ShardMove> {
    let owners = |order: &mut dyn Iterator<Item = &Arc<str>>| -> Option<Owners> {
        let order: Vec<&Arc<str>> = order.collect();
        let owner = |active: &BTreeSet<Arc<str>>| order.iter().find(|name| active.contains(**name)).copied().cloned();
        Some(((*order.first()?).clone(), owner(before), owner(after)))
    };
    let of_orders = |map: &ShardMapSpec| map.orders.iter().filter_map(|order| owners(&mut order.iter())).collect();
    let maps: HashMap<&str, BTreeSet<Owners>> =
        placed.shard_maps.iter().map(|map| (&*map.name, of_orders(map))).collect();
    let mut moves: BTreeMap<(IpAddr, Owners), usize> = BTreeMap::new();
    for vip in placed.vips {
        let listed = vip.shards.iter().filter(|_| vip.shard_map.is_none());
        let listed = listed.filter_map(|shard| owners(&mut order(shard)));
        let of_map = vip.shard_map.as_ref().and_then(|it| maps.get(&*it.map)).into_iter().flatten().cloned();
        moves.extend(listed.chain(of_map).map(|owners| ((vip.address, owners), 0)));
    }
    let index = Index::of(placed);
    for endpoint in placed.endpoints {
        let found = match &endpoint.slot {
            Some(slot) => index.order_of_slot(endpoint, slot).map(|(vip, it)| (vip, owners(&mut it.iter()))),
            None => index.shard_of(endpoint).map(|(vip, shard)| (vip, owners(&mut order(shard)))),
        };
        if let Some((vip, Some(owners))) = found {
            *moves.entry((vip, owners)).or_default() += 1;
        }
    }
    let shard_move = |((vip, (home, before, after)), endpoints)| ShardMove { vip, home, before, after, endpoints };
    moves.into_iter().map(shard_move).collect()
}

/// VIPs by address and shard maps by name.
struct Index<'a> {
    vips: HashMap<IpAddr, &'a VipSpec>,
    maps: HashMap<&'a str, &'a ShardMapSpec>,
}

impl<'a> Index<'a> {
    fn of(placed: Placed<'a>) -> Self {
        Self {
            vips: placed.vips.iter().map(|vip| (vip.address, vip)).collect(),
            maps: placed.shard_maps.iter().map(|map| (&*map.name, map)).collect(),
        }
    }

    fn vips_of(&self, endpoint: &EndpointSpec) -> impl Iterator<Item = &'a VipSpec> {
        endpoint.vips.iter().filter_map(|vip| self.vips.get(vip).copied())
    }

    /// The gateways of an endpoint's slot, and the first VIP with a shard map.
    fn order_of_slot(&self, endpoint: &EndpointSpec, slot: &SlotRef) -> Option<(IpAddr, &'a [Arc<str>])> {
        let (vip, of_vip) = self.vips_of(endpoint).find_map(|vip| Some((vip, vip.shard_map.as_ref()?)))?;
        let map = self.maps.get(&**slot.map.as_ref().unwrap_or(&of_vip.map))?;
        Some((vip.address, map.order(slot.slot)))
    }

    /// The shard that an endpoint's home has of its first VIP with one there. `None`: any gateway handles its packets.
    fn shard_of(&self, endpoint: &EndpointSpec) -> Option<(IpAddr, &'a ShardSpec)> {
        let home = endpoint.gateway.as_ref()?;
        let at_home = |vip: &'a VipSpec| vip.shards.iter().find(|shard| shard.gateway == *home);
        self.vips_of(endpoint).find_map(|vip| Some((vip.address, at_home(vip)?)))
    }
}

/// The distinct groups of gateways that can own a shard, its home and its backups: sorted names. Few, since most shards
/// have the same candidates.
pub fn shard_groups<'a>(
    vips: impl IntoIterator<Item = &'a VipSpec>,
    shard_maps: &'a [ShardMapSpec],
) -> BTreeSet<Vec<Arc<str>>> {
    let listed = vips.into_iter().filter(|vip| vip.shard_map.is_none()).flat_map(|vip| &vip.shards);
    let groups = listed
        .map(|shard| order(shard).collect())
        .chain(shard_maps.iter().flat_map(|map| &map.orders).map(|order| order.iter().collect::<Vec<&Arc<str>>>()));
    let mut known: HashSet<Vec<&Arc<str>>> = HashSet::default();
    for mut names in groups {
        names.sort_unstable();
        names.dedup();
        known.insert(names);
    }
    known.into_iter().map(|names| names.into_iter().cloned().collect()).collect()
}

/// The gateways of a listed shard, home first.
fn order(shard: &ShardSpec) -> impl Iterator<Item = &Arc<str>> {
    std::iter::once(&shard.gateway).chain(&shard.backups)
}
