//! Address pools: which VIPs a policy gets from them, and how those are announced.
//!
//! Nothing is remembered: where a policy starts to look depends on its own name alone, and older policies choose first.
//! So what comes later or goes away moves an address only where two policies wanted the same one.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use foldhash::HashSet;

use super::fingerprint::Fingerprint;
use super::inventory::{Inventory, Located};
use crate::complaint::Complaint;
use crate::manifest::{AddressPool, AddressRange, Announce, Family};

/// All pools.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    by_name: BTreeMap<&'a str, &'a [AddressRange]>,
    /// Sorted by first address, without overlaps.
    ranges: Vec<(AddressRange, Located<'a, AddressPool>)>,
}

impl<'a> Pools<'a> {
    pub(super) fn new(inventory: &Inventory<'a>, log: &mut Vec<Complaint>) -> Self {
        let mut ranges = Vec::new();
        for pool in &inventory.pools {
            ranges.extend(pool.body.spec.ranges.iter().enumerate().map(|(i, range)| (*range, i, *pool)));
        }
        ranges.sort_by_key(|(range, i, pool)| (*range, &pool.id.name, *i));
        let mut kept: Vec<(AddressRange, Located<'a, AddressPool>)> = Vec::new();
        for (range, i, pool) in ranges {
            match kept.last() {
                Some((before, other)) if before.overlaps(&range) => {
                    // Within one pool the document was told so already.
                    if other.id != pool.id {
                        let reason = format!("{range} overlaps {before} of {} ({})", other.id, other.origin);
                        log.push(pool.error(&format!("spec.ranges[{i}]"), reason));
                    }
                }
                _ => kept.push((range, pool)),
            }
        }
        let by_name = inventory.pools.iter().map(|pool| (pool.id.name.as_str(), pool.body.spec.ranges.as_slice()));
        Self { by_name: by_name.collect(), ranges: kept }
    }

    /// The pool that an address is of, and how that announces it.
    pub(super) fn announce(&self, address: IpAddr) -> Option<(Announce, &'a str)> {
        let after = self.ranges.partition_point(|(range, _)| range.first <= address);
        let (range, pool) = &self.ranges[after.checked_sub(1)?];
        range.contains(address).then_some((pool.body.spec.announce, pool.id.name.as_str()))
    }

    /// Whether there is a pool of this name.
    pub(super) fn exists(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Takes `count` addresses of each family that the pool has, for the policy `owner`. Fewer when no more are free;
    /// then the family is returned too.
    pub(super) fn take(
        &self,
        name: &str,
        owner: &str,
        count: u32,
        taken: &mut HashSet<IpAddr>,
    ) -> (Vec<IpAddr>, Option<Family>) {
        let (mut got, mut short) = (Vec::new(), None);
        for family in Family::ALL {
            let ranges = self.by_name.get(name).copied().unwrap_or_default();
            let ranges: Vec<_> = ranges.iter().filter(|range| Family::of(range.first) == family).collect();
            let size = ranges.iter().fold(0_u128, |sum, range| sum.saturating_add(size(range)));
            for slot in 0..count {
                if size == 0 {
                    break;
                }
                let start = u128::from(start(owner, name, family, slot)) % size;
                let free = (0..size).map(|step| nth(&ranges, (start + step) % size)).find(|free| !taken.contains(free));
                let Some(address) = free else {
                    short = short.or(Some(family));
                    break;
                };
                taken.insert(address);
                got.push(address);
            }
        }
        (got, short)
    }
}

fn start(owner: &str, pool: &str, family: Family, slot: u32) -> u64 {
    let mut print = Fingerprint::default();
    // Writing into a fingerprint can't fail.
    let _ = write!(print, "{owner}\n{pool}\n{family}\n{slot}");
    print.finish()
}

fn size(range: &AddressRange) -> u128 {
    // Only all of IPv6 is one more than fits, and one less makes no difference there.
    (number(range.last) - number(range.first)).saturating_add(1)
}

/// The `n`th address of ranges that hold more than `n`.
fn nth(ranges: &[&AddressRange], mut n: u128) -> IpAddr {
    let mut last = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    for range in ranges {
        last = range.last;
        if n < size(range) {
            let address = number(range.first) + n;
            return match range.first {
                // An IPv4 range holds numbers of 32 bits.
                IpAddr::V4(_) => Ipv4Addr::from_bits(u32::try_from(address).unwrap_or(u32::MAX)).into(),
                IpAddr::V6(_) => Ipv6Addr::from_bits(address).into(),
            };
        }
        n -= size(range);
    }
    last
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}
