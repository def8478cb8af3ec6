//! Address pools: which one an address is in, and its announce mode there.

mod allocator;
mod provided;

use std::collections::BTreeMap;
use std::net::IpAddr;

pub(super) use self::allocator::{Allocation, Allocator, Lack, Reserved};
use super::inventory::{Inventory, ObjectRef, age_key};
use crate::address_record::{NamespaceUse, Recorded};
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{AddressPool, AddressPoolSpec, AddressRange, Announce, CloudPool, Family};

/// All address pools.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    by_name: BTreeMap<&'a str, ObjectRef<'a, AddressPool>>,
    /// Sorted by first address, without overlaps.
    ranges: Vec<(AddressRange, ObjectRef<'a, AddressPool>)>,
}

impl<'a> Pools<'a> {
    /// Pools whose listed ranges overlap those of an older one are left out.
    pub(super) fn new(inventory: &Inventory<'a>, diagnostics: &mut Vec<Diagnostic>) -> Self {
        let mut oldest_first: Vec<ObjectRef<'a, AddressPool>> = inventory.pools.clone();
        oldest_first.sort_by_key(|pool| age_key(pool.body.metadata.creation_timestamp.as_ref(), pool.id));
        let mut by_name = BTreeMap::new();
        let mut all: BTreeMap<IpAddr, (AddressRange, ObjectRef<'a, AddressPool>)> = BTreeMap::new();
        for pool in oldest_first {
            let mut own = Vec::new();
            let mut is_refused = false;
            for (i, range) in pool.body.ranges().iter().enumerate() {
                // Ranges of one pool are compared by the manifest reader.
                let before = all.range(..=range.last).next_back().map(|(_, it)| it);
                let Some((previous, other)) = before.filter(|(before, _)| before.overlaps(range)) else {
                    own.push(*range);
                    continue;
                };
                let reason = format!("{range} overlaps {previous} of {} ({})", other.id, other.origin);
                if i < pool.body.spec.ranges.len() {
                    is_refused = true;
                    diagnostics.push(pool.error(Code::OverlappingRanges, &format!("spec.ranges[{i}]"), reason));
                } else {
                    // The provider's tags are no fault of the manifest: the rest of the pool is used.
                    diagnostics.push(pool.warning(Code::OverlappingRanges, "spec.provider", reason));
                }
            }
            if !is_refused {
                by_name.insert(pool.id.name.as_str(), pool);
                all.extend(own.into_iter().map(|range| (range.first, (range, pool))));
            }
        }
        Self { by_name, ranges: all.into_values().collect() }
    }

    /// The pool with this address.
    pub(super) fn of(&self, address: IpAddr) -> Option<ObjectRef<'a, AddressPool>> {
        let after = self.ranges.partition_point(|(range, _)| range.first <= address);
        let (range, pool) = &self.ranges[after.checked_sub(1)?];
        range.contains(address).then_some(*pool)
    }

    /// Name and spec of the pool with this address.
    pub(super) fn spec_of(&self, address: IpAddr) -> Option<(&'a str, &'a AddressPoolSpec)> {
        self.of(address).map(|pool| (pool.id.name.as_str(), &pool.body.spec))
    }

    /// Whether a pool limits what a namespace has.
    fn limit_namespaces(&self) -> bool {
        self.by_name.values().any(|pool| pool.body.spec.max_per_namespace.is_some())
    }

    /// What namespaces have by the record.
    pub(super) fn recorded_use(&self, recorded: Option<&'a Recorded>) -> NamespaceUse<'a> {
        recorded.map(|it| NamespaceUse::recorded(it, |address| self.spec_of(address))).unwrap_or_default()
    }

    /// What a cloud provider has for the pool with this address.
    pub(super) fn cloud(&self, address: IpAddr) -> Option<&'a CloudPool> {
        self.of(address)?.body.cloud.as_deref()
    }

    /// Announce mode and name of the pool with this address.
    pub(super) fn announce(&self, address: IpAddr) -> Option<(Announce, &'a str)> {
        self.of(address).map(|pool| (pool.body.spec.announce, pool.id.name.as_str()))
    }

    /// The pool with this name.
    pub(super) fn named(&self, name: &str) -> Option<ObjectRef<'a, AddressPool>> {
        self.by_name.get(name).copied()
    }

    /// Whether addresses of a family can be allocated at the provider of a pool, which was observed.
    pub(super) fn may_grow(&self, name: &str, family: Family) -> bool {
        let pool = self.by_name.get(name).map(|pool| pool.body);
        pool.is_some_and(|pool| pool.cloud.is_some() && pool.spec.provider.allocates(family))
    }
}
