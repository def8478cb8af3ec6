//! Allocation from the addresses of a cloud provider. Which there are changes without a change of the manifest, so a policy keeps
//! what is claimed for it, and takes of the others those with the highest score for it.

use std::cmp::Reverse;
use std::net::IpAddr;

use crate::fingerprint::{Fingerprint, mix};
use crate::manifest::{CloudAddress, CloudPool, Family};

/// Finds `count` addresses of a family, or fewer, each with whether it is claimed for the owner; `None`: the pool has no such
/// family. A pool without any address lacks IPv4 ones.
pub(super) fn find(
    cloud: &CloudPool,
    (owner, family): (&str, Family),
    count: usize,
    is_free: impl Fn(IpAddr) -> bool,
) -> Option<Vec<(IpAddr, bool)>> {
    let mut families = cloud.addresses.keys().map(|address| Family::of(*address));
    let is_missing = cloud.addresses.is_empty() && family == Family::V4;
    if !is_missing && !families.any(|it| it == family) {
        return None;
    }
    let seed = Fingerprint::of(owner.as_bytes());
    let free = cloud.addresses.iter().filter(|(address, _)| Family::of(**address) == family);
    let free = free.filter(|(address, cloud)| is_free(**address) && may_have(cloud, owner));
    let mut free: Vec<_> =
        free.map(|(address, cloud)| (rank(*address, cloud, seed), *address, cloud.owner.is_some())).collect();
    free.sort_unstable();
    free.truncate(count);
    Some(free.into_iter().map(|(_, address, is_claimed)| (address, is_claimed)).collect())
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

    fn take(pool: &CloudPool, count: usize) -> Vec<(IpAddr, bool)> {
        find(pool, ("EgressPolicy t/p", Family::V4), count, |_| true).unwrap()
    }

    #[test]
    fn a_policy_keeps_what_is_claimed_for_it_whatever_is_added() {
        let mut owners: Vec<(u8, Option<&str>)> = (1..=20).map(|last| (last, None)).collect();
        let first = take(&pool(&owners), 1);
        let &[(address, false)] = &first[..] else { panic!("{first:?}") };
        for (last, owner) in &mut owners {
            if IpAddr::from(Ipv4Addr::new(203, 0, 113, *last)) == address {
                *owner = Some("Service t/s, EgressPolicy t/p");
            }
        }
        owners.extend((21..=200).map(|last| (last, None)));
        assert_eq!(take(&pool(&owners), 1), [(address, true)]);
    }

    #[test]
    fn what_is_claimed_for_others_is_not_free() {
        let pool = pool(&[(1, Some("EgressPolicy t/other")), (2, None)]);
        assert_eq!(take(&pool, 2), [([203, 0, 113, 2].into(), false)]);
    }

    #[test]
    fn an_empty_pool_lacks_ipv4_addresses() {
        assert_eq!(take(&CloudPool::default(), 1), []);
        assert_eq!(find(&CloudPool::default(), ("EgressPolicy t/p", Family::V6), 1, |_| true), None);
    }
}
