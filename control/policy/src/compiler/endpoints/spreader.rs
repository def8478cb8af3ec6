//! Placement of a policy's endpoints on gateways: by a slot of a shard map if any of its VIPs is distributed by one, else
//! on an owner of a VIP.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};
use vipgate_dataplane::policy::spec::SlotRef;

use crate::compiler::claim::Claim;
use crate::compiler::gateways::{GatewayId, Gateways, Locality, address_key};
use crate::compiler::pods::CoveredAddress;
use crate::compiler::shard_maps::{MapKey, ShardMaps};
use crate::compiler::vips::AssignedVip;
use crate::manifest::{Distribution, Family, ZoneAffinity};

/// Why a covered endpoint has no VIP: what is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Missing {
    /// A VIP of its family.
    Vip(Family),
    /// A gateway that owns one: no gateway is eligible, or all eligible ones are at `maxAddresses`.
    Gateway(Family),
    /// A gateway in its zone, which the policy requires.
    Zone,
}

/// A claim's VIPs that are assigned to gateways, by family.
pub(super) struct PolicyVips<'a>([FamilyVips<'a>; 2]);

/// The VIPs of one family.
struct FamilyVips<'a> {
    /// With their owners, sorted.
    assigned: Vec<&'a AssignedVip>,
    /// All eligible owners, sorted.
    owners: Vec<GatewayId>,
    /// Those of VIPs with a shard map.
    distributed: Vec<GatewayId>,
}

impl<'a> PolicyVips<'a> {
    pub(super) fn of(claim: &Claim<'_>, vips: &'a [AssignedVip]) -> Self {
        let mut addresses: Vec<IpAddr> = claim.vips.iter().map(|(_, vip)| *vip).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let find = |vip: &IpAddr| vips.binary_search_by_key(vip, |vip| vip.spec.address).ok();
        let (v4, v6): (Vec<_>, Vec<_>) =
            addresses.iter().filter_map(find).map(|at| &vips[at]).partition(|vip| vip.spec.address.is_ipv4());
        let of_family = |assigned: Vec<&'a AssignedVip>| FamilyVips {
            owners: owners(claim, assigned.iter()),
            distributed: owners(claim, assigned.iter().filter(|vip| vip.spec.shard_map.is_some())),
            assigned,
        };
        Self([of_family(v4), of_family(v6)])
    }

    fn of_family(&self, family: Family) -> &FamilyVips<'a> {
        &self.0[usize::from(family == Family::V6)]
    }
}

/// The eligible owners of these VIPs, sorted. Those that only another policy of the same VIP allows are not eligible.
fn owners<'a>(claim: &Claim<'_>, vips: impl Iterator<Item = &'a &'a AssignedVip>) -> Vec<GatewayId> {
    let mut all: Vec<GatewayId> = vips.flat_map(|vip| vip.owners.iter().copied()).collect();
    all.sort_unstable();
    all.dedup();
    all.retain(|id| claim.gateways.contains(*id));
    all
}

/// Placement of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Assigned {
    pub(super) vips: Vec<IpAddr>,
    pub(super) gateway: Option<Arc<str>>,
    pub(super) slot: Option<SlotRef>,
}

/// The shard map of endpoints.
#[derive(Clone, Debug)]
struct EndpointMap {
    name: Arc<str>,
    /// Whether all their VIPs with a map have this one.
    is_of_vips: bool,
}

/// Distributes endpoints over gateways.
pub(super) struct Spreader<'a, 'b> {
    gateways: &'a Gateways<'a>,
    shard_maps: &'b mut ShardMaps,
    /// Round-robin counters by claim, family and candidate gateways.
    turns: HashMap<(usize, Family, Vec<GatewayId>), usize>,
    /// VIPs by claim, family and, if the policy requires a gateway in the endpoint's zone, that gateway: most endpoints
    /// share one of few lists.
    lists: HashMap<(usize, Family, Option<GatewayId>), Vec<IpAddr>>,
    /// Shard maps by claim, family and place.
    maps: HashMap<(usize, Family, Locality<'a>), EndpointMap>,
}

impl<'a, 'b> Spreader<'a, 'b> {
    pub(super) fn new(gateways: &'a Gateways<'a>, shard_maps: &'b mut ShardMaps) -> Self {
        Self { gateways, shard_maps, turns: HashMap::new(), lists: HashMap::new(), maps: HashMap::new() }
    }

    /// Places an endpoint of the claim with this index.
    pub(super) fn assign(
        &mut self,
        index: usize,
        claim: &Claim<'_>,
        policy_vips: &PolicyVips<'_>,
        cover: &CoveredAddress<'a>,
    ) -> Result<Assigned, Missing> {
        let family = Family::of(cover.address);
        let vips = policy_vips.of_family(family);
        if !claim.vips.iter().any(|(_, vip)| Family::of(*vip) == family) {
            return Err(Missing::Vip(family));
        }
        if self.gateways.is_empty() {
            return Ok(Assigned { vips: self.list((index, family), vips, None), ..Assigned::default() });
        }
        let requires_zone = claim.zone_affinity == ZoneAffinity::Require;
        let is_eligible = |id: &GatewayId| !requires_zone || self.gateways.distance(*id, cover.locality) < 2;
        let (home, slot) = if vips.distributed.iter().any(is_eligible) {
            let home = match claim.distribution {
                Distribution::Rendezvous => None,
                Distribution::RoundRobin => Some(self.home((index, family), claim, &vips.distributed, cover)?),
            };
            let map = self.map((index, family), claim, vips, cover);
            let slot = self.shard_maps.slot(&map.name, address_key(cover.address), home);
            let (slot, home) = slot.ok_or(Missing::Zone)?;
            (home, Some(SlotRef { map: (!map.is_of_vips).then_some(map.name), slot }))
        } else {
            (self.home((index, family), claim, &vips.owners, cover)?, None)
        };
        let list = self.list((index, family), vips, requires_zone.then_some(home));
        let gateway = slot.is_none().then(|| self.gateways.name(home).clone());
        Ok(Assigned { vips: list, gateway, slot })
    }

    /// The names of the shard maps of each of `count` claims, ascending.
    pub(super) fn maps_of(self, count: usize) -> Vec<Vec<Arc<str>>> {
        let mut names = vec![Vec::new(); count];
        for ((index, ..), map) in self.maps {
            names[index].push(map.name);
        }
        for names in &mut names {
            names.sort_unstable();
            names.dedup();
        }
        names
    }

    /// The VIPs of an endpoint, only those of one gateway or all.
    fn list(&mut self, of: (usize, Family), vips: &FamilyVips<'_>, only_of: Option<GatewayId>) -> Vec<IpAddr> {
        let list = self.lists.entry((of.0, of.1, only_of)).or_insert_with(|| {
            let usable = vips.assigned.iter().filter(|vip| only_of.is_none_or(|id| vip.owners.contains(&id)));
            usable.map(|vip| vip.spec.address).collect()
        });
        list.clone()
    }

    /// The shard map of an endpoint. It follows from the policy and the place alone, so that a VIP that the policy gets
    /// moves none of its endpoints.
    fn map(
        &mut self,
        of: (usize, Family),
        claim: &Claim<'_>,
        vips: &FamilyVips<'_>,
        cover: &CoveredAddress<'a>,
    ) -> EndpointMap {
        let locality = match claim.zone_affinity {
            ZoneAffinity::None => Locality::default(),
            ZoneAffinity::Prefer | ZoneAffinity::Require => cover.locality,
        };
        let known = self.maps.entry((of.0, of.1, locality));
        let of_place = known.or_insert_with(|| {
            // Nodes without a gateway share the map of their zone.
            let is_on_node = |id: &GatewayId| self.gateways.distance(*id, locality) == 0;
            let node = locality.node.filter(|_| vips.distributed.iter().any(is_on_node));
            let key = MapKey {
                candidates: &claim.gateways,
                gateways: &vips.distributed,
                group: claim.group,
                locality: Locality { node, ..locality },
                requires_zone: claim.zone_affinity == ZoneAffinity::Require,
            };
            let name = self.shard_maps.get(&key, self.gateways).spec.name.clone();
            let mut of_vips = vips.assigned.iter().filter_map(|vip| vip.spec.shard_map.as_ref());
            EndpointMap { is_of_vips: of_vips.all(|reference| reference.map == name), name }
        });
        of_place.clone()
    }

    /// The gateway that an endpoint is placed on.
    fn home(
        &mut self,
        (index, family): (usize, Family),
        claim: &Claim<'_>,
        owners: &[GatewayId],
        cover: &CoveredAddress<'_>,
    ) -> Result<GatewayId, Missing> {
        if owners.is_empty() {
            return Err(Missing::Gateway(family));
        }
        let nearest = match claim.zone_affinity {
            ZoneAffinity::None => owners.to_vec(),
            affinity => self.gateways.nearest(owners, cover.locality, affinity == ZoneAffinity::Require),
        };
        let home = match claim.distribution {
            Distribution::Rendezvous => self.gateways.winner(&nearest, address_key(cover.address)),
            Distribution::RoundRobin => {
                let count = nearest.len().max(1);
                let turn = self.turns.entry((index, family, nearest.clone())).or_default();
                *turn += 1;
                nearest.get((*turn - 1) % count).copied()
            }
        };
        home.ok_or(Missing::Zone)
    }
}
