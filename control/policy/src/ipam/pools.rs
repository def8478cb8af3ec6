//! The pools of address management: which one an address is in, and the lowest free address of each.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::compiler::Tenancy;
use crate::manifest::{
    AddressPool, AddressPoolSpec, AddressRange, CloudAddress, CloudPool, Family, ServiceRequest, unusable_address,
};

/// Maximum addresses that are tried for one Service; those in use before are not tried again.
const MAX_PROBES: u32 = 1 << 20;

/// A pool with its ranges.
#[derive(Debug)]
pub(super) struct Pool<'a> {
    pub(super) name: &'a str,
    spec: &'a AddressPoolSpec,
    /// What its provider has.
    cloud: Option<&'a CloudPool>,
    /// Its ranges that overlap none of another pool, by family.
    ranges: [Vec<AddressRange>; 2],
    /// The range and the offset in it where the search for a free address goes on.
    cursors: [(usize, u128); 2],
}

/// All pools, by name.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    pub(super) all: Vec<Pool<'a>>,
    /// Sorted by first address, without overlaps; with the index of the pool.
    ranges: Vec<(AddressRange, usize)>,
    tenancy: Tenancy,
    namespaces: &'a BTreeMap<String, BTreeMap<String, String>>,
}

impl<'a> Pools<'a> {
    pub(super) fn new(
        manifests: impl Iterator<Item = (&'a str, &'a AddressPool)>,
        tenancy: Tenancy,
        namespaces: &'a BTreeMap<String, BTreeMap<String, String>>,
    ) -> Self {
        let mut manifests: Vec<(&str, &AddressPool)> = manifests.collect();
        manifests.sort_by_key(|(name, _)| *name);
        let of_pool = |(index, (_, pool)): (usize, &(&str, &AddressPool))| {
            pool.ranges().iter().map(move |range| (*range, index)).collect::<Vec<_>>()
        };
        let mut sorted: Vec<(AddressRange, usize)> = manifests.iter().enumerate().flat_map(of_pool).collect();
        let pool = |(name, pool): (&'a str, &'a AddressPool)| Pool {
            name,
            spec: &pool.spec,
            cloud: pool.cloud.as_deref(),
            ranges: Default::default(),
            cursors: [(0, 0); 2],
        };
        let mut all: Vec<Pool<'a>> = manifests.into_iter().map(pool).collect();
        sorted.sort_unstable();
        let mut ranges: Vec<(AddressRange, usize)> = Vec::new();
        for (range, index) in sorted {
            // As in the compiler, which reports it.
            if ranges.last().is_none_or(|(previous, _)| !previous.overlaps(&range)) {
                ranges.push((range, index));
                all[index].ranges[Family::of(range.first) as usize].push(range);
            }
        }
        Self { all, ranges, tenancy, namespaces }
    }

    /// The pool with this address.
    pub(super) fn of(&self, address: IpAddr) -> Option<usize> {
        let after = self.ranges.partition_point(|(range, _)| range.first <= address);
        let (range, pool) = self.ranges.get(after.checked_sub(1)?)?;
        range.contains(address).then_some(*pool)
    }

    /// Whether a Service may have addresses of a pool.
    pub(super) fn allows(&self, pool: usize, service: &ServiceRequest) -> bool {
        let spec = self.all[pool].spec;
        let namespaces = spec.namespaces.as_ref().filter(|_| self.tenancy == Tenancy::Strict);
        let none = BTreeMap::new();
        let labels = self.namespaces.get(&service.namespace).unwrap_or(&none);
        namespaces.is_none_or(|selector| selector.selects(labels))
            && spec.service_selector.as_ref().is_none_or(|selector| selector.selects(&service.labels))
            && service.pool.as_deref().is_none_or(|named| named == self.all[pool].name)
    }

    /// The pools that a Service gets addresses from if it names none.
    pub(super) fn candidates(&self, service: &ServiceRequest) -> Vec<usize> {
        let is_candidate =
            |pool: &usize| self.allows(*pool, service) && (service.pool.is_some() || self.all[*pool].spec.auto_assign);
        (0..self.all.len()).filter(is_candidate).collect()
    }

    /// Whether a pool has addresses of a family, or can get some.
    pub(super) fn has(&self, pool: usize, family: Family) -> bool {
        !self.all[pool].ranges[family as usize].is_empty() || self.may_grow(pool, family)
    }

    /// Whether addresses of a family can be allocated at the provider of a pool, which was observed.
    pub(super) fn may_grow(&self, pool: usize, family: Family) -> bool {
        let Pool { spec, cloud, .. } = &self.all[pool];
        cloud.is_some() && spec.provider.allocates(family)
    }

    /// The addresses of a pool that are claimed at its provider for a Service.
    pub(super) fn claimed_for(&self, pool: usize, service: &ServiceRequest, family: Family) -> Vec<IpAddr> {
        let claimed = self.all[pool].cloud.into_iter().flat_map(|cloud| &cloud.addresses);
        let claimed = claimed.filter(|(address, cloud)| cloud.owner.is_some() && Family::of(**address) == family);
        let owner = service.owner();
        let is_its =
            |address: &IpAddr, cloud: &CloudAddress| self.of(*address) == Some(pool) && cloud.is_claimed_for(&owner);
        claimed.filter(|(address, cloud)| is_its(address, cloud)).map(|(address, _)| *address).collect()
    }

    /// Name and spec of the pool with this address.
    pub(super) fn spec_of(&self, address: IpAddr) -> Option<(&'a str, &'a AddressPoolSpec)> {
        self.of(address).map(|pool| self.spec(pool))
    }

    /// Name and spec of a pool.
    pub(super) fn spec(&self, pool: usize) -> (&'a str, &'a AddressPoolSpec) {
        let Pool { name, spec, .. } = &self.all[pool];
        (name, spec)
    }

    /// Whether an address may be given: nobody has claimed it at its pool's provider, and it can be a VIP.
    pub(super) fn is_unclaimed(&self, address: IpAddr) -> bool {
        let cloud = self.of(address).and_then(|pool| self.all[pool].cloud);
        let is_claimed = cloud.and_then(|cloud| cloud.addresses.get(&address)).is_some_and(|it| it.owner.is_some());
        !is_claimed && unusable_address(address).is_none()
    }

    /// The lowest free address of a pool, which nobody has claimed at its provider. Addresses that were in use at an earlier call are not tried again.
    pub(super) fn free(&mut self, pool: usize, family: Family, is_used: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
        let Pool { ranges, cursors, cloud, .. } = &mut self.all[pool];
        let is_claimed = |address: &IpAddr| {
            cloud.is_some_and(|cloud| cloud.addresses.get(address).is_some_and(|cloud| cloud.owner.is_some()))
        };
        let (ranges, (index, offset)) = (&ranges[family as usize], &mut cursors[family as usize]);
        for _ in 0..MAX_PROBES {
            let range = ranges.get(*index)?;
            if *offset >= range.size() {
                (*index, *offset) = (*index + 1, 0);
                continue;
            }
            let address = range.nth(*offset);
            if !is_used(&address) && !is_claimed(&address) && unusable_address(address).is_none() {
                return Some(address);
            }
            *offset += 1;
        }
        None
    }

    /// Begins searches anew: an address was given back.
    pub(super) fn rewind(&mut self) {
        self.all.iter_mut().for_each(|pool| pool.cursors = [(0, 0); 2]);
    }

    /// Number of addresses of a pool, of a family.
    pub(super) fn size(&self, pool: usize, family: Family) -> u128 {
        self.all[pool].ranges[family as usize].iter().fold(0, |sum, range| sum.saturating_add(range.size()))
    }
}
