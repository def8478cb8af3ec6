//! Covered pod addresses, cut into shards by address: a change copies the shards that it concerns and shares all others
//! with the policy before it, so what one change costs doesn't depend on how many endpoints there are.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::freshness::BUCKETS;
use super::members::GatewayId;
use super::policy::{EgressId, VipId};
use super::quota::EndpointUse;
use crate::address::Address;

/// An endpoint's number in its policy: family, shard and place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointId(u32);

const V6: u32 = 1 << 31;
const PLACE_BITS: u32 = 20;
const PLACE: u32 = (1 << PLACE_BITS) - 1;
const _: () = assert!(BUCKETS << PLACE_BITS == V6 as usize);

impl EndpointId {
    /// A number that no packet is looked at by before it has a real one.
    pub const NONE: Self = Self(0);

    fn new<A: Address>(shard: usize, place: u32) -> Self {
        let family = if A::BITS == 32 { 0 } else { V6 };
        Self(family | (shard as u32) << PLACE_BITS | place)
    }

    /// Whether it is one of IPv6.
    pub(super) fn is_v6(self) -> bool {
        self.0 & V6 != 0
    }
}

/// A covered pod address.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its policy.
    pub(super) policy: EgressId,
    /// Its VIPs: first the one that it leaves with, where it has to keep one.
    pub(super) vips: Box<[VipId]>,
    /// Whom it was dealt to; `None`: whoever gets its packets.
    pub home: Option<GatewayId>,
    /// `namespace/pod`, for people; empty if nobody has said.
    pub name: Arc<str>,
    /// Why this policy and these VIPs, where that isn't plain, for people.
    pub remarks: Box<[Arc<str>]>,
    /// What it uses now, shared by the workers.
    pub usage: Arc<EndpointUse>,
}

/// The endpoints of one address family.
#[derive(Clone, Debug)]
pub struct Endpoints<A> {
    shards: Arc<[Arc<Shard<A>>]>,
    count: usize,
}

#[derive(Clone, Debug)]
struct Shard<A> {
    places: HashMap<A, u32>,
    endpoints: Vec<Endpoint>,
    /// Addresses that policy covers no more, but whose sessions haven't all ended.
    retired: HashMap<A, Arc<EndpointUse>>,
}

impl<A: Address> Endpoints<A> {
    pub(super) fn empty() -> Self {
        let nothing = Arc::new(Shard { places: HashMap::new(), endpoints: Vec::new(), retired: HashMap::new() });
        Self { shards: vec![nothing; BUCKETS].into(), count: 0 }
    }

    /// The endpoint with this address.
    #[inline]
    pub(super) fn get(&self, address: A) -> Option<(EndpointId, &Endpoint)> {
        let at = address.bucket();
        let shard = &self.shards[at];
        let place = *shard.places.get(&address)?;
        Some((EndpointId::new::<A>(at, place), &shard.endpoints[place as usize]))
    }

    /// The endpoint with this number, which is one of these.
    #[inline]
    pub(super) fn with(&self, EndpointId(number): EndpointId) -> &Endpoint {
        let shard = &self.shards[((number & !V6) >> PLACE_BITS) as usize];
        &shard.endpoints[(number & PLACE) as usize]
    }

    /// What an address uses that is an endpoint, or was one and still has sessions.
    pub(super) fn usage(&self, address: A) -> Option<&Arc<EndpointUse>> {
        let shard = &self.shards[address.bucket()];
        let live = shard.places.get(&address).map(|&place| &shard.endpoints[place as usize].usage);
        live.or_else(|| shard.retired.get(&address))
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (A, &Endpoint)> {
        self.shards
            .iter()
            .flat_map(|shard| shard.places.iter().map(|(&address, &place)| (address, &shard.endpoints[place as usize])))
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// How many shards these have in common with others, as the same memory.
    #[cfg(test)]
    pub(super) fn shared_with(&self, others: &Self) -> usize {
        self.shards.iter().zip(&*others.shards).filter(|(own, other)| Arc::ptr_eq(own, other)).count()
    }

    /// Adds or replaces an endpoint, or, with `None`, takes it away; its sessions keep their count. Copies its shard, unless
    /// an earlier change since the last clone has done so.
    pub(super) fn set(&mut self, address: A, endpoint: Option<Endpoint>) {
        let shard = Arc::make_mut(&mut Arc::make_mut(&mut self.shards)[address.bucket()]);
        shard.retired.retain(|_, usage| usage.sessions() > 0);
        match (shard.places.get(&address).copied(), endpoint) {
            (Some(place), Some(endpoint)) => shard.endpoints[place as usize] = endpoint,
            (None, Some(endpoint)) => {
                assert!(shard.endpoints.len() < PLACE as usize, "more endpoints in a shard than a number names");
                shard.places.insert(address, shard.endpoints.len() as u32);
                shard.endpoints.push(endpoint);
                shard.retired.remove(&address);
                self.count += 1;
            }
            (Some(place), None) => {
                shard.places.remove(&address);
                let gone = shard.endpoints.swap_remove(place as usize);
                if let Some(moved) = shard.places.values_mut().find(|other| **other as usize == shard.endpoints.len()) {
                    *moved = place;
                }
                if gone.usage.sessions() > 0 {
                    shard.retired.insert(address, gone.usage);
                }
                self.count -= 1;
            }
            (None, None) => {}
        }
    }
}
