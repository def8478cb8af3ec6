//! Listener tables: frontends at VIPs, and backends, which map return packets to their frontend. There are many
//! backends and they change all the time, so they are in copy-on-write buckets by address, like endpoints.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt};

use super::freshness::BUCKETS;
use crate::flow::address::Address;
use crate::flow::ids::FrontendId;
use crate::flow::listener::Listener;

/// The frontends at VIPs; each belongs to one Service.
pub(super) type Frontends<A> = Arc<FrontendTable<A>>;

/// Bits of the filter of a frontend table, as a power of two. Half a kilobyte, which stays in the first cache.
const FILTER_BITS: u32 = 12;

/// A table of frontends. Nearly every packet that asks is for a port without one, so a filter answers most questions.
#[derive(Clone, Debug)]
pub(super) struct FrontendTable<A> {
    table: HashMap<Listener<A>, FrontendId>,
    /// A bit for each hash of an address and port: 0 if there is no such frontend, of any protocol.
    filter: [u64; (1 << FILTER_BITS) / u64::BITS as usize],
    /// Frontends of each bit.
    counts: Box<[u32]>,
}

impl<A: Address> Default for FrontendTable<A> {
    fn default() -> Self {
        let filter = [0; (1 << FILTER_BITS) / u64::BITS as usize];
        Self { table: HashMap::new(), filter, counts: vec![0; 1 << FILTER_BITS].into() }
    }
}

impl<A: Address> FrontendTable<A> {
    /// The frontend of a listener.
    #[inline]
    pub(super) fn get(&self, listener: &Listener<A>) -> Option<&FrontendId> {
        self.table.get(listener)
    }

    /// False if no frontend has this address and port.
    #[inline]
    pub(super) fn may_have(&self, address: A, port: u16) -> bool {
        let (word, bit) = Self::bit_of(address, port);
        self.filter[word] & bit != 0
    }

    /// Adds a frontend, or changes its number.
    pub(super) fn insert(&mut self, listener: Listener<A>, frontend: FrontendId) {
        if self.table.insert(listener, frontend).is_none() {
            let (word, bit) = Self::bit_of(listener.address, listener.port);
            self.filter[word] |= bit;
            self.counts[word * u64::BITS as usize + bit.trailing_zeros() as usize] += 1;
        }
    }

    /// Removes a frontend.
    pub(super) fn remove(&mut self, listener: &Listener<A>) {
        if self.table.remove(listener).is_some() {
            let (word, bit) = Self::bit_of(listener.address, listener.port);
            let count = &mut self.counts[word * u64::BITS as usize + bit.trailing_zeros() as usize];
            *count -= 1;
            if *count == 0 {
                self.filter[word] &= !bit;
            }
        }
    }

    /// Index of the word of the filter, and the bit in it.
    #[inline]
    fn bit_of(address: A, port: u16) -> (usize, u64) {
        let hash = (address.mix() ^ u32::from(port)).wrapping_mul(0x9e37_79b1) >> (u32::BITS - FILTER_BITS);
        ((hash / u64::BITS) as usize, 1 << (hash % u64::BITS))
    }
}

/// The backends of one address family.
#[derive(Clone, Debug)]
pub(super) struct Backends<A> {
    buckets: Arc<[Arc<Bucket<A>>]>,
    count: usize,
    /// How many backends of a frontend serve others, too. Few frontends have any.
    shared: Arc<HashMap<FrontendId, u32>>,
}

/// The frontends of each backend, ascending.
type Bucket<A> = HashMap<Listener<A>, Vec<FrontendId>>;

impl<A: Address> Backends<A> {
    pub(super) fn empty() -> Self {
        let empty = Arc::new(HashMap::new());
        Self { buckets: vec![empty; BUCKETS].into(), count: 0, shared: Arc::default() }
    }

    /// The frontends of a backend; with several, only the session determines which.
    #[inline]
    pub(super) fn get(&self, listener: &Listener<A>) -> &[FrontendId] {
        self.buckets[listener.address.bucket()].get(listener).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether a frontend shares one of its backends with another one: a reply of that backend doesn't show which of them
    /// its client has called.
    #[inline]
    pub(super) fn shares(&self, frontend: FrontendId) -> bool {
        self.shared.contains_key(&frontend)
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
            let Err(at) = frontends.binary_search(&frontend) else { return };
            frontends.insert(at, frontend);
            match *frontends.as_slice() {
                [_] => {}
                [one, other] => [one, other].into_iter().for_each(|id| share(&mut self.shared, id)),
                _ => share(&mut self.shared, frontend),
            }
        } else if let Some(frontends) = bucket.get_mut(&listener) {
            let Ok(at) = frontends.binary_search(&frontend) else { return };
            frontends.remove(at);
            match *frontends.as_slice() {
                [] => {
                    bucket.remove(&listener);
                    self.count -= 1;
                }
                [last] => [last, frontend].into_iter().for_each(|id| unshare(&mut self.shared, id)),
                _ => unshare(&mut self.shared, frontend),
            }
        }
    }
}

/// One more backend of a frontend serves another one, too.
fn share(shared: &mut Arc<HashMap<FrontendId, u32>>, frontend: FrontendId) {
    *Arc::make_mut(shared).entry(frontend).or_default() += 1;
}

/// One backend less of a frontend serves another one, too.
fn unshare(shared: &mut Arc<HashMap<FrontendId, u32>>, frontend: FrontendId) {
    let shared = Arc::make_mut(shared);
    let Some(count) = shared.get_mut(&frontend) else { return };
    *count -= 1;
    if *count == 0 {
        shared.remove(&frontend);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vipgate_coverage::property;

    use super::*;
    use crate::flow::ids::ServiceId;

    #[test]
    fn a_frontend_shares_backends_exactly_while_one_of_them_has_another_one() {
        let steps = proptest::collection::vec((0..3_u16, 0..3_u32, any::<bool>()), 1..60);
        property(ProptestConfig::default(), &steps, &["shared", "no longer shared"], |steps, coverage| {
            let mut table = Backends::<u32>::empty();
            let mut model: Vec<(Listener<u32>, FrontendId)> = Vec::new();
            let mut was_shared = false;
            for (port, service, serves) in steps {
                let listener = Listener { address: 7, port, protocol: 6 };
                let frontend = FrontendId { service: ServiceId(service), port: 0 };
                table.set(listener, frontend, serves);
                model.retain(|it| *it != (listener, frontend));
                model.extend(serves.then_some((listener, frontend)));
                for service in 0..3 {
                    let id = FrontendId { service: ServiceId(service), port: 0 };
                    let own = || model.iter().filter(|(_, frontend)| *frontend == id);
                    let others =
                        |at: &Listener<u32>| model.iter().any(|(other, frontend)| other == at && *frontend != id);
                    prop_assert_eq!(table.shares(id), own().any(|(listener, _)| others(listener)));
                }
                let is_shared = !table.shared.is_empty();
                coverage.add("shared", is_shared.into());
                coverage.add("no longer shared", (was_shared && !is_shared).into());
                was_shared = is_shared;
            }
            Ok(())
        });
    }

    #[test]
    fn the_filter_of_frontends_never_hides_one_and_forgets_removed_ones() {
        let steps =
            proptest::collection::vec((0..4_u32, 0..5_u16, prop_oneof![Just(6_u8), Just(17)], any::<bool>()), 1..200);
        property(ProptestConfig::default(), &steps, &["removed", "shared"], |steps, coverage| {
            let (mut table, mut model) = (FrontendTable::<u32>::default(), HashMap::new());
            for (address, port, protocol, adds) in steps {
                let listener = Listener { address: address * 0x0101, port: port * 1000, protocol };
                let id = FrontendId { service: ServiceId(address), port };
                if adds {
                    table.insert(listener, id);
                    model.insert(listener, id);
                } else {
                    table.remove(&listener);
                    coverage.add("removed", model.remove(&listener).is_some().into());
                }
                for listener in model.keys() {
                    prop_assert!(table.may_have(listener.address, listener.port));
                    prop_assert_eq!(table.get(listener), model.get(listener));
                }
                coverage.add("shared", model.contains_key(&Listener { protocol: 23 - protocol, ..listener }).into());
            }
            for listener in model.into_keys() {
                table.remove(&listener);
            }
            prop_assert_eq!(table.filter, FrontendTable::<u32>::default().filter);
            Ok(())
        });
    }
}
