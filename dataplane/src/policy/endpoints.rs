//! Endpoint table: covered pod addresses in copy-on-write buckets. A change copies only the buckets that it touches and
//! shares all others with the previous policy, so its cost doesn't depend on the number of endpoints.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::freshness::BUCKETS;
use super::quota::EndpointUsage;
use crate::flow::address::Address;
use crate::flow::ids::{EgressId, EndpointId, GatewayId, INDEX_BITS, IPV6_BIT, ShardMapId, VipId};

const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const _: () = assert!(BUCKETS << INDEX_BITS == IPV6_BIT as usize);

/// An endpoint: a covered pod address.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub(super) policy: EgressId,
    /// Its VIPs; the first one is the one it is paired with (RFC 4787 REQ-2).
    pub(super) vips: Box<[VipId]>,
    /// The gateway that it is placed on; `None`: that of its slot, or any gateway.
    pub(super) home: Option<GatewayId>,
    /// Its slot of a shard map; takes precedence over `home`.
    pub(super) slot: Option<EndpointSlot>,
    /// The gateway that handled its packets before the last change of its placement.
    pub(super) former_owner: Option<GatewayId>,
    /// `namespace/pod`, for display; empty if unknown.
    pub name: Arc<str>,
    /// Remarks on the choice of policy and VIPs, for display.
    pub remarks: Box<[Arc<str>]>,
    /// Its resource usage, shared by the workers.
    pub usage: Arc<EndpointUsage>,
}

/// A slot of a shard map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndpointSlot {
    /// `None`: of the first VIP that has one.
    pub(super) map: Option<ShardMapId>,
    pub(super) slot: u16,
}

/// Endpoints of one address family.
#[derive(Clone, Debug)]
pub struct Endpoints<A> {
    buckets: Arc<[Arc<Bucket<A>>]>,
    count: usize,
}

#[derive(Clone, Debug)]
struct Bucket<A> {
    indices: HashMap<A, u32>,
    endpoints: Vec<Endpoint>,
    /// Addresses that policy no longer covers, but that still have sessions.
    retired: HashMap<A, Arc<EndpointUsage>>,
}

impl<A: Address> Endpoints<A> {
    pub(super) fn empty() -> Self {
        let empty = Arc::new(Bucket { indices: HashMap::new(), endpoints: Vec::new(), retired: HashMap::new() });
        Self { buckets: vec![empty; BUCKETS].into(), count: 0 }
    }

    /// The endpoint with this address.
    #[inline]
    pub(super) fn get(&self, address: A) -> Option<(EndpointId, &Endpoint)> {
        let at = address.bucket();
        let bucket = &self.buckets[at];
        let index = *bucket.indices.get(&address)?;
        Some((EndpointId::new::<A>(at, index), &bucket.endpoints[index as usize]))
    }

    /// The endpoint with this number, which must be of this policy.
    #[inline]
    pub(super) fn by_id(&self, EndpointId(number): EndpointId) -> &Endpoint {
        let bucket = &self.buckets[((number & !IPV6_BIT) >> INDEX_BITS) as usize];
        &bucket.endpoints[(number & INDEX_MASK) as usize]
    }

    /// Usage of an endpoint, or of a former endpoint that still has sessions.
    pub(super) fn usage(&self, address: A) -> Option<&Arc<EndpointUsage>> {
        let bucket = &self.buckets[address.bucket()];
        let live = bucket.indices.get(&address).map(|&index| &bucket.endpoints[index as usize].usage);
        live.or_else(|| bucket.retired.get(&address))
    }

    /// All endpoints, unordered.
    pub(super) fn iter(&self) -> impl Iterator<Item = (A, &Endpoint)> {
        self.buckets.iter().flat_map(|bucket| {
            bucket.indices.iter().map(|(&address, &index)| (address, &bucket.endpoints[index as usize]))
        })
    }

    /// Number of endpoints.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Number of buckets that are shared with another table.
    #[cfg(test)]
    pub(super) fn shared_buckets(&self, others: &Self) -> usize {
        self.buckets.iter().zip(&*others.buckets).filter(|(own, other)| Arc::ptr_eq(own, other)).count()
    }

    /// Adds or replaces an endpoint, or removes it (`None`); its session count is kept. Copies the bucket, unless it
    /// was already copied since the last clone.
    pub(super) fn set(&mut self, address: A, endpoint: Option<Endpoint>) {
        let bucket = Arc::make_mut(&mut Arc::make_mut(&mut self.buckets)[address.bucket()]);
        bucket.retired.retain(|_, usage| usage.sessions() > 0);
        match (bucket.indices.get(&address).copied(), endpoint) {
            (Some(index), Some(endpoint)) => bucket.endpoints[index as usize] = endpoint,
            (None, Some(endpoint)) => {
                assert!(bucket.endpoints.len() < INDEX_MASK as usize, "bucket index overflow");
                bucket.indices.insert(address, bucket.endpoints.len() as u32);
                bucket.endpoints.push(endpoint);
                bucket.retired.remove(&address);
                self.count += 1;
            }
            (Some(index), None) => {
                bucket.indices.remove(&address);
                let removed = bucket.endpoints.swap_remove(index as usize);
                if let Some(moved) =
                    bucket.indices.values_mut().find(|other| **other as usize == bucket.endpoints.len())
                {
                    *moved = index;
                }
                if removed.usage.sessions() > 0 {
                    bucket.retired.insert(address, removed.usage);
                }
                self.count -= 1;
            }
            (None, None) => {}
        }
    }
}
