//! Who listens where: frontends at their VIPs, and backends, from whose packets alone it shows which frontend they answer for.
//! Backends are many and change all the time: cut into shards by address, like endpoints.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::freshness::BUCKETS;
use super::service::{FrontendId, Listener};
use crate::address::Address;

/// The frontends at each VIP: each is one Service's alone.
pub(super) type Frontends<A> = Arc<HashMap<Listener<A>, FrontendId>>;

/// What the backends of one address family listen on.
#[derive(Clone, Debug)]
pub(super) struct Backends<A> {
    shards: Arc<[Arc<Shard<A>>]>,
    count: usize,
}

/// For each, the frontends that it serves, ascending.
type Shard<A> = HashMap<Listener<A>, Vec<FrontendId>>;

impl<A: Address> Backends<A> {
    pub(super) fn empty() -> Self {
        let nobody = Arc::new(HashMap::new());
        Self { shards: vec![nobody; BUCKETS].into(), count: 0 }
    }

    /// The frontends that a backend serves; where there are several, nothing but a session tells which.
    #[inline]
    pub(super) fn get(&self, listener: &Listener<A>) -> &[FrontendId] {
        self.shards[listener.address.bucket()].get(listener).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether anybody listens at an address.
    pub(super) fn is_at(&self, address: A) -> bool {
        self.shards[address.bucket()].keys().any(|listener| listener.address == address)
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Listener<A>> {
        self.shards.iter().flat_map(|shard| shard.keys())
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Notes that a backend serves a frontend, or does so no more. Copies a shard, unless that was done since the last clone.
    pub(super) fn set(&mut self, listener: Listener<A>, frontend: FrontendId, serves: bool) {
        let shard = Arc::make_mut(&mut Arc::make_mut(&mut self.shards)[listener.address.bucket()]);
        if serves {
            let frontends = shard.entry(listener).or_insert_with(|| {
                self.count += 1;
                Vec::with_capacity(1)
            });
            if let Err(place) = frontends.binary_search(&frontend) {
                frontends.insert(place, frontend);
            }
        } else if let Some(frontends) = shard.get_mut(&listener) {
            frontends.retain(|other| *other != frontend);
            if frontends.is_empty() {
                shard.remove(&listener);
                self.count -= 1;
            }
        }
    }
}
