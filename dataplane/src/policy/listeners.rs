//! Listener tables: frontends at VIPs, and backends, which map return packets to their frontend. There are many
//! backends and they change all the time, so they are in copy-on-write buckets by address, like endpoints.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::freshness::BUCKETS;
use crate::flow::address::Address;
use crate::flow::ids::FrontendId;
use crate::flow::listener::Listener;

/// The frontends at VIPs; each belongs to one Service.
pub(super) type Frontends<A> = Arc<HashMap<Listener<A>, FrontendId>>;

/// The backends of one address family.
#[derive(Clone, Debug)]
pub(super) struct Backends<A> {
    buckets: Arc<[Arc<Bucket<A>>]>,
    count: usize,
}

/// The frontends of each backend, ascending.
type Bucket<A> = HashMap<Listener<A>, Vec<FrontendId>>;

impl<A: Address> Backends<A> {
    pub(super) fn empty() -> Self {
        let empty = Arc::new(HashMap::new());
        Self { buckets: vec![empty; BUCKETS].into(), count: 0 }
    }

    /// The frontends of a backend; with several, only the session determines which.
    #[inline]
    pub(super) fn get(&self, listener: &Listener<A>) -> &[FrontendId] {
        self.buckets[listener.address.bucket()].get(listener).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether a backend listens at this address.
    pub(super) fn has_address(&self, address: A) -> bool {
        self.buckets[address.bucket()].keys().any(|listener| listener.address == address)
    }

    /// All backends, unordered.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Listener<A>> {
        self.buckets.iter().flat_map(|bucket| bucket.keys())
    }

    /// Number of backends.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Adds or removes a backend of a frontend. Copies the bucket, unless it was already copied since the last clone.
    pub(super) fn set(&mut self, listener: Listener<A>, frontend: FrontendId, serves: bool) {
        let bucket = Arc::make_mut(&mut Arc::make_mut(&mut self.buckets)[listener.address.bucket()]);
        if serves {
            let frontends = bucket.entry(listener).or_insert_with(|| {
                self.count += 1;
                Vec::with_capacity(1)
            });
            if let Err(at) = frontends.binary_search(&frontend) {
                frontends.insert(at, frontend);
            }
        } else if let Some(frontends) = bucket.get_mut(&listener) {
            frontends.retain(|other| *other != frontend);
            if frontends.is_empty() {
                bucket.remove(&listener);
                self.count -= 1;
            }
        }
    }
}
