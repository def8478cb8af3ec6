//! Address pools: allocation of VIPs to policies, and the announce mode of pool addresses.
//!
//! Stateless: the first address that a policy tries is a hash of its name, and older policies allocate first. So adding
//! or removing a policy changes another one's addresses only where both hash to the same address.

mod provided;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};

use foldhash::HashSet;

use super::inventory::{Inventory, ObjectRef, age_key};
use crate::diagnostic::{Code, Diagnostic};
use crate::fingerprint::Fingerprint;
use crate::manifest::{AddressPool, AddressRange, Announce, CloudPool, EgressPolicy, Family};

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

    /// Allocates `count` addresses of each family of the pool for the policy `owner`. If a family has too few free
    /// addresses, returns fewer, and the family.
    pub(super) fn allocate(
        &self,
        name: &str,
        owner: &ObjectRef<'_, EgressPolicy>,
        count: u32,
        allocated: &mut HashSet<IpAddr>,
    ) -> (Vec<IpAddr>, Option<Family>) {
        let Some(pool) = self.by_name.get(name) else { return (vec![], None) };
        if let Some(cloud) = &pool.body.cloud {
            return provided::allocate(cloud, owner.name, count, allocated);
        }
        let owner = &*owner.id.path();
        let ranges = &pool.body.spec.ranges;
        let of_family = |family| ranges.iter().filter(|range| Family::of(range.first) == family).collect();
        let ranges: [Vec<_>; 2] = Family::ALL.map(of_family);
        let sizes = ranges.each_ref().map(|all| all.iter().fold(0_u128, |sum, range| sum.saturating_add(range.size())));
        let (mut addresses, mut exhausted) = (Vec::new(), [false; 2]);
        // By slot, then by family: what a greater count adds is last.
        for slot in 0..count {
            let left: Vec<usize> = (0..2).filter(|at| sizes[*at] > 0 && !exhausted[*at]).collect();
            if left.is_empty() {
                break;
            }
            for at in left {
                let size = sizes[at];
                let start = u128::from(start(owner, name, Family::ALL[at], slot)) % size;
                let mut probes = (0..size).map(|step| nth(&ranges[at], (start + step) % size));
                match probes.find(|address| !allocated.contains(address)) {
                    Some(address) => {
                        allocated.insert(address);
                        addresses.push(address);
                    }
                    None => exhausted[at] = true,
                }
            }
        }
        let exhausted = Family::ALL.into_iter().zip(exhausted).find(|(_, is_exhausted)| *is_exhausted);
        (addresses, exhausted.map(|(family, _)| family))
    }
}

fn start(owner: &str, pool: &str, family: Family, slot: u32) -> u64 {
    let mut fingerprint = Fingerprint::default();
    // Writing into a fingerprint can't fail.
    let _ = write!(fingerprint, "{owner}\n{pool}\n{family}\n{slot}");
    fingerprint.finish()
}

/// The `n`th address of ranges with more than `n` addresses in total.
fn nth(ranges: &[&AddressRange], mut n: u128) -> IpAddr {
    let mut last = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    for range in ranges {
        last = range.last;
        if n < range.size() {
            return range.nth(n);
        }
        n -= range.size();
    }
    last
}
