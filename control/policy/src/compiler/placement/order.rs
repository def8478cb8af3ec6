//! The gateways of an endpoint, as gateways derive them (`Policy::shard_of` in the engine).

use std::cmp::Reverse;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::flow::tuple::{HashKey, Tuple};
use vipgate_dataplane::policy::spec::{EndpointSpec, ShardMapSpec, ShardSpec, SlotRef, VipSpec};

use super::Placement;

impl Placement {
    /// The gateways that may have an endpoint's packets, its home first; `None`: any gateway.
    pub fn order_of<'a>(&'a self, endpoint: &'a EndpointSpec) -> Option<Vec<&'a Arc<str>>> {
        if let Some(SlotRef { map, slot }) = &endpoint.slot {
            let of_vip = |vip: &IpAddr| self.vips.get(vip)?.shard_map.as_ref().map(|reference| &reference.map);
            let name = map.as_ref().or_else(|| endpoint.vips.iter().find_map(of_vip));
            if let Some(map) = name.and_then(|name| self.shard_map(name)) {
                return Some(map.order(*slot).iter().collect());
            }
        }
        let home = endpoint.gateway.as_ref();
        let shard = self.paired_vip(endpoint).and_then(|vip| self.shard_of(vip, home));
        shard.or_else(|| Some(vec![home?]))
    }

    fn shard_map(&self, name: &str) -> Option<&ShardMapSpec> {
        let at = self.shard_maps.binary_search_by(|map| (*map.name).cmp(name)).ok()?;
        self.shard_maps.get(at)
    }

    /// The gateways of the shard of a VIP at this home; of a VIP that is no one else's, of the whole VIP.
    fn shard_of<'a>(&'a self, vip: &'a VipSpec, home: Option<&'a Arc<str>>) -> Option<Vec<&'a Arc<str>>> {
        if let Some(reference) = &vip.shard_map {
            let map = self.shard_map(&reference.map)?;
            let mut orders = map.slots.iter().filter_map(|order| map.orders.get(usize::from(*order)));
            return Some(orders.find(|order| home.is_some() && order.first() == home)?.iter().collect());
        }
        let is_home = |shard: &&ShardSpec| Some(&shard.gateway) == home;
        let has_blocks =
            |shard: &&ShardSpec| shard.blocks.as_ref().is_some_and(|blocks| blocks.iter().next().is_some());
        let shard = whole(vip).or_else(|| vip.shards.iter().filter(has_blocks).find(is_home))?;
        Some(std::iter::once(&shard.gateway).chain(&shard.backups).collect())
    }

    /// The VIP that gateways pair an endpoint with: one at its home before others, then by rendezvous hashing.
    fn paired_vip(&self, endpoint: &EndpointSpec) -> Option<&VipSpec> {
        if let [only] = &endpoint.vips[..] {
            return self.vips.get(only);
        }
        let home = endpoint.gateway.as_ref();
        let is_elsewhere = |vip: &VipSpec| home.is_some() && whole(vip).is_some_and(|it| Some(&it.gateway) != home);
        let vips = endpoint.vips.iter().filter_map(|vip| self.vips.get(vip));
        vips.min_by_key(|vip| (is_elsewhere(vip), Reverse(weight(endpoint.address, vip.address))))
    }
}

/// The only shard of a VIP that has one owner.
fn whole(vip: &VipSpec) -> Option<&ShardSpec> {
    match &vip.shards[..] {
        [only] if only.blocks.is_none() && vip.shard_map.is_none() => Some(only),
        _ => None,
    }
}

/// The weight of a VIP for an endpoint: the engine's.
fn weight(endpoint: IpAddr, vip: IpAddr) -> u64 {
    const RENDEZVOUS: HashKey = HashKey::fixed();
    fn of<A: Address>(endpoint: IpAddr, vip: IpAddr) -> u64 {
        let of = |address| A::from_ip(address).unwrap_or_default();
        RENDEZVOUS.hash(&Tuple { source: of(endpoint), destination: of(vip), ..Tuple::default() })
    }
    if endpoint.is_ipv4() { of::<u32>(endpoint, vip) } else { of::<V6>(endpoint, vip) }
}
