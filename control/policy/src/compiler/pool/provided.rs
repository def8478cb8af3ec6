//! Allocation from the addresses of a cloud provider. Which there are changes without a change of the manifest, so a policy keeps
//! what is claimed for it, and takes of the others those with the highest score for it.

use std::cmp::Reverse;
use std::net::IpAddr;

use foldhash::HashSet;

use crate::fingerprint::{Fingerprint, mix};
use crate::manifest::{CloudAddress, CloudPool, Family};

/// Allocates `count` addresses of each family that the pool has. If a family has too few free ones, returns fewer, and the
/// family; a pool without any address lacks IPv4 ones.
pub(super) fn allocate(
    cloud: &CloudPool,
    owner: &str,
    count: u32,
    allocated: &mut HashSet<IpAddr>,
) -> (Vec<IpAddr>, Option<Family>) {
    let (mut addresses, mut exhausted) = (Vec::new(), None);
    let seed = Fingerprint::of(owner.as_bytes());
    for family in Family::ALL {
        let mut families = cloud.addresses.keys().map(|address| Family::of(*address));
        let is_missing = cloud.addresses.is_empty() && family == Family::V4;
        if !is_missing && !families.any(|it| it == family) {
            continue;
        }
        let free = cloud.addresses.iter().filter(|(address, _)| Family::of(**address) == family);
        let free = free.filter(|(address, cloud)| !allocated.contains(address) && may_have(cloud, owner));
        let mut free: Vec<_> = free.map(|(address, cloud)| (rank(*address, cloud, seed), *address)).collect();
        free.sort_unstable();
        free.truncate(count as usize);
        if free.len() < count as usize {
            exhausted = Some(family);
        }
        allocated.extend(free.iter().map(|(_, address)| *address));
        addresses.extend(free.into_iter().map(|(_, address)| address));
    }
    (addresses, exhausted)
}

/// An address that is claimed for another policy may be about to be given up: then it is free in the next compilation.
fn may_have(address: &CloudAddress, owner: &str) -> bool {
    address.owner.is_none() || address.is_claimed_for(owner)
}

/// Lower ranks are taken first. `seed`: fingerprint of the owner.
fn rank(address: IpAddr, cloud: &CloudAddress, seed: u64) -> (bool, Reverse<u64>) {
    let score = mix(seed ^ super::super::gateways::address_key(address));
    (cloud.owner.is_none(), Reverse(score))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn pool(owners: &[(u8, Option<&str>)]) -> CloudPool {
        let address = |(last, owner): &(u8, Option<&str>)| {
            let cloud = CloudAddress { owner: owner.map(str::to_owned), ..CloudAddress::default() };
            (Ipv4Addr::new(203, 0, 113, *last).into(), cloud)
        };
        CloudPool { addresses: owners.iter().map(address).collect(), ..CloudPool::default() }
    }

    fn take(pool: &CloudPool, owner: &str, count: u32) -> (Vec<IpAddr>, Option<Family>) {
        allocate(pool, owner, count, &mut HashSet::default())
    }

    #[test]
    fn a_policy_keeps_what_is_claimed_for_it_whatever_is_added() {
        let mut owners: Vec<(u8, Option<&str>)> = (1..=20).map(|last| (last, None)).collect();
        let (first, exhausted) = take(&pool(&owners), "EgressPolicy t/p", 1);
        assert_eq!((first.len(), exhausted), (1, None));
        for (last, owner) in &mut owners {
            if IpAddr::from(Ipv4Addr::new(203, 0, 113, *last)) == first[0] {
                *owner = Some("Service t/s, EgressPolicy t/p");
            }
        }
        owners.extend((21..=200).map(|last| (last, None)));
        assert_eq!(take(&pool(&owners), "EgressPolicy t/p", 1), (first, None));
    }

    #[test]
    fn what_is_claimed_for_others_is_not_free() {
        let pool = pool(&[(1, Some("EgressPolicy t/other")), (2, None)]);
        assert_eq!(take(&pool, "EgressPolicy t/p", 2), (vec![[203, 0, 113, 2].into()], Some(Family::V4)));
    }

    #[test]
    fn an_empty_pool_is_exhausted() {
        assert_eq!(take(&CloudPool::default(), "EgressPolicy t/p", 1), (vec![], Some(Family::V4)));
    }
}
