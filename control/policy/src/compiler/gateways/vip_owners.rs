//! Owners of VIPs: each VIP in turn gets the candidate with the highest score among those that own the fewest VIPs of
//! its group; if clients reach only backends on its owner's node, among those with the best of such backends.
//!
//! VIPs get their turn by age: what is added later displaces nothing that was there before. So a new VIP moves no other
//! one, and a gateway that is added takes few VIPs besides those that it has the highest score for. Backends that
//! change move their own VIPs, and younger ones only by the capacity that these take or free.

use std::cmp::Reverse;
use std::net::IpAddr;

use foldhash::{HashMap, HashMapExt};
use vipgate_dataplane::policy::spec::BackendState;

use super::{Candidates, Capacity, GatewayId, Gateways, MAX_BACKUPS, address_key};
use crate::compiler::placement::preference;

/// A VIP to assign.
#[derive(Debug)]
pub(in crate::compiler) struct VipRequest<'a> {
    pub(in crate::compiler) vip: IpAddr,
    /// Its turn: lower ones precede it.
    pub(in crate::compiler) turn: usize,
    /// Anti-affinity group: its VIPs are spread over as many gateways as possible.
    pub(in crate::compiler) group: &'a str,
    /// Eligible gateways.
    pub(in crate::compiler) candidates: Candidates,
    /// Whether all candidates own it, or one.
    pub(in crate::compiler) shared: bool,
    /// Whether its backups have to be in the zone of its owner.
    pub(in crate::compiler) requires_zone: bool,
    /// Gateways on whose nodes it has backends, ascending, with the best state of these; empty: it doesn't matter.
    pub(in crate::compiler) local: &'a [(GatewayId, BackendState)],
}

impl VipRequest<'_> {
    /// How far a gateway is preferred for the backends on its node; `None`: it has none.
    fn local_preference(&self, id: GatewayId) -> Option<u8> {
        let at = self.local.binary_search_by_key(&id, |(gateway, _)| *gateway).ok()?;
        self.local.get(at).map(|(_, state)| preference(*state))
    }
}

/// Owners of all VIPs, in the order of the requests.
#[derive(Debug)]
pub(in crate::compiler) struct Assignment {
    /// Owners: of a shared VIP all, ascending; of another one its home, and none if no candidate has capacity.
    pub(in crate::compiler) owners: Vec<Vec<GatewayId>>,
    /// The backups of the VIPs that are not shared.
    pub(in crate::compiler) backups: Vec<Vec<GatewayId>>,
}

/// The VIPs of a group that a gateway owns, by family.
type OwnedInGroup<'a> = HashMap<(&'a str, bool, GatewayId), usize>;

impl Gateways<'_> {
    /// Assigns VIPs to gateways with capacity (`spec.maxAddresses`).
    pub(in crate::compiler) fn assign(&self, requests: &[VipRequest<'_>]) -> Assignment {
        let mut owners = vec![Vec::new(); requests.len()];
        let mut backups = vec![Vec::new(); requests.len()];
        if self.is_empty() {
            return Assignment { owners, backups };
        }
        let mut capacity: Vec<Capacity> = self.all.iter().map(|gateway| gateway.capacity).collect();
        let is_limited = capacity.iter().any(|capacity| *capacity != Capacity::UNLIMITED);
        let mut owned = OwnedInGroup::new();
        let mut turns: Vec<usize> = (0..requests.len()).collect();
        turns.sort_unstable_by_key(|&at| requests[at].turn);
        for at in turns {
            let request = &requests[at];
            let candidates = request.candidates.ids.iter().copied();
            if request.shared {
                owners[at] = candidates.filter(|&id| capacity[id].fits(request.vip)).collect();
                owners[at].iter().for_each(|&id| capacity[id].take(request.vip));
                continue;
            }
            let in_group = |id: GatewayId| (request.group, request.vip.is_ipv4(), id);
            let rank = |id: GatewayId| {
                let owned = owned.get(&in_group(id)).copied().unwrap_or(0);
                (!capacity[id].fits(request.vip), Reverse(request.local_preference(id)), owned)
            };
            // Of all candidates, those in the zone and those that have capacity in the end may be backups.
            let count = if is_limited || request.requires_zone { self.all.len() } else { 1 + MAX_BACKUPS };
            let order = self.order(candidates.map(|id| (rank(id), id)), address_key(request.vip), count);
            let Some((&home, others)) = order.split_first().filter(|(home, _)| capacity[**home].fits(request.vip))
            else {
                continue;
            };
            capacity[home].take(request.vip);
            *owned.entry(in_group(home)).or_default() += 1;
            let may_take_over = |id: &GatewayId| !request.requires_zone || self.share_zone(home, *id);
            owners[at] = vec![home];
            backups[at] = others.iter().copied().filter(may_take_over).collect();
        }
        for (backups, request) in backups.iter_mut().zip(requests) {
            // Gateways without capacity for another VIP take over only if no other gateway can.
            backups.sort_by_key(|&id| !capacity[id].fits(request.vip));
            backups.truncate(MAX_BACKUPS);
        }
        Assignment { owners, backups }
    }

    fn share_zone(&self, one: GatewayId, other: GatewayId) -> bool {
        let zone = self.all[one].zone;
        zone.is_some() && zone == self.all[other].zone
    }
}
