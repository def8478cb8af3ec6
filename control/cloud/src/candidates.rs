//! Candidates of private addresses: which addresses of a subnet may be chosen, and the order in which they are tried.
//!
//! The order depends on what the address is for, and on nothing else: another attempt, or another server, comes to the same
//! address, while NICs in the same subnet seldom try the same one.

use std::net::IpAddr;

use ipnet::IpNet;
use ring::digest::{SHA256, digest};

/// Addresses at the start of a subnet that providers keep for themselves (AWS, Azure); so they do with the last one.
const RESERVED: u128 = 4;
/// Addresses of a range that are looked at.
const MAX_LOOKED_AT: u128 = 4096;
/// Distance of addresses that follow each other, at least, where the range has so many: the size of a delegated IPv4 prefix (AWS).
const MIN_STRIDE: u128 = 16;

/// First and last address.
pub(crate) type Range = (IpAddr, IpAddr);

/// The candidates in a subnet, without the addresses that the provider reserves.
pub(crate) fn within(subnet: &IpNet, candidates: &[IpNet]) -> Vec<Range> {
    let (first, last) = (bits(subnet.network()) + RESERVED, bits(subnet.broadcast()).saturating_sub(1));
    let is_ipv6 = subnet.network().is_ipv6();
    let of_version = candidates.iter().filter(|it| it.network().is_ipv6() == is_ipv6);
    let ranges = of_version.map(|it| (bits(it.network()).max(first), bits(it.broadcast()).min(last)));
    ranges.filter(|(first, last)| first <= last).map(|(a, b)| (address(a, is_ipv6), address(b, is_ipv6))).collect()
}

/// Addresses of a range in an order that depends on the seed. Neighbors don't follow each other: whatever uses addresses in
/// blocks (prefix delegation) is left by the next attempt.
pub(crate) fn shuffled((first, last): Range, seed: &str) -> impl Iterator<Item = IpAddr> {
    let (is_ipv6, start) = (first.is_ipv6(), bits(first));
    // At most 2^64, so that no product overflows.
    let count = bits(last).saturating_sub(start).min(u128::from(u64::MAX)) + 1;
    let digest = digest(&SHA256, seed.as_bytes());
    let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u128::from(*byte));
    let (offset, stride) = (number(&digest.as_ref()[..8]), number(&digest.as_ref()[8..16]));
    let least = if count > 4 * MIN_STRIDE { MIN_STRIDE } else { 0 };
    // Without a common divisor no address comes twice.
    let is_fit = |it: &u128| *it >= least && *it <= count - least && gcd(*it, count) == 1;
    let stride = (0..count).map(|step| (stride + step) % count).find(is_fit).unwrap_or(1);
    (0..count.min(MAX_LOOKED_AT)).map(move |step| address(start + (offset + step * stride) % count, is_ipv6))
}

fn gcd(mut one: u128, mut other: u128) -> u128 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address(bits: u128, is_ipv6: bool) -> IpAddr {
    if is_ipv6 { IpAddr::V6(bits.into()) } else { IpAddr::V4((bits as u32).into()) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn all(subnet: &str, candidates: &[&str]) -> Vec<String> {
        let candidates: Vec<IpNet> = candidates.iter().map(|it| it.parse().expect("a prefix")).collect();
        let ranges = within(&subnet.parse().expect("a prefix"), &candidates);
        ranges.into_iter().flat_map(|range| shuffled(range, "seed")).map(|it| it.to_string()).collect()
    }

    fn sorted(subnet: &str, candidates: &[&str]) -> Vec<String> {
        let mut all = all(subnet, candidates);
        all.sort();
        all
    }

    #[test]
    fn candidates_are_in_the_subnet_and_not_the_providers() {
        assert_eq!(sorted("10.0.1.0/29", &["10.0.0.0/16", "fd00::/64"]), ["10.0.1.4", "10.0.1.5", "10.0.1.6"]);
        assert_eq!(sorted("10.0.1.0/29", &["10.0.1.5/32", "10.0.2.0/24"]), ["10.0.1.5"]);
        assert_eq!(sorted("10.0.1.0/24", &["10.0.1.32/30"]), ["10.0.1.32", "10.0.1.33", "10.0.1.34", "10.0.1.35"]);
        assert!(all("10.0.1.0/29", &["10.0.1.0/30", "10.0.1.7/32"]).is_empty());
    }

    #[test]
    fn each_seed_has_an_order_of_its_own_and_no_address_comes_twice() {
        let range = |first: &str, last: &str| (first.parse().expect("an address"), last.parse().expect("an address"));
        for (first, last, count) in [
            ("10.0.0.0", "10.0.0.255", 256),
            ("10.0.0.3", "10.0.0.3", 1),
            ("10.0.0.4", "10.0.0.14", 11),
            ("10.0.0.0", "10.0.255.255", 4096),
            ("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 4096),
        ] {
            let of = |seed| shuffled(range(first, last), seed).collect::<Vec<_>>();
            assert_eq!(of("a").into_iter().collect::<BTreeSet<_>>().len(), count, "{first}");
            assert_eq!(of("a"), of("a"));
            assert!(count == 1 || of("a") != of("b"), "{first}");
        }
    }

    #[test]
    fn a_block_of_sixteen_is_left_by_the_next_attempt() {
        for seed in 0..100 {
            let range = ("10.0.0.4".parse().expect("an address"), "10.0.0.254".parse().expect("an address"));
            let first: Vec<u128> = shuffled(range, &seed.to_string()).take(2).map(bits).collect();
            assert!(first[0].abs_diff(first[1]) >= 16, "{first:?}");
        }
    }
}
