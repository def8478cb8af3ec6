//! Which candidates of private addresses are in a subnet.

use std::net::IpAddr;

use ipnet::IpNet;
use ring::digest::{SHA256, digest};
use serde_json::Value;

use super::client::Client;
use super::prepare::Candidates;
use crate::error::{CloudError, ErrorKind};

/// Addresses at the start of a subnet that Azure keeps for itself; so does it with the last one.
const RESERVED: u128 = 4;
/// Addresses of a range that are looked at.
const MAX_LOOKED_AT: u128 = 4096;

/// The candidates that a NIC in this subnet can have.
pub(super) async fn usable(client: &Client, id: &str, candidates: &[IpNet]) -> Result<Candidates, CloudError> {
    let subnet = client.subnet(id).await?;
    let subnet = subnet.ok_or_else(|| CloudError::new(ErrorKind::NotFound, "Subnets_Get", "NotFound", id))?;
    let ranges = prefixes(&subnet).iter().flat_map(|prefix| within(prefix, candidates)).collect();
    Ok(Candidates { is_given: true, ranges, ..Candidates::default() })
}

/// The prefixes of a subnet: one, or one per IP version.
fn prefixes(subnet: &Value) -> Vec<IpNet> {
    let properties = &subnet["properties"];
    let several = properties["addressPrefixes"].as_array().into_iter().flatten();
    several.chain([&properties["addressPrefix"]]).filter_map(|it| it.as_str()?.parse().ok()).collect()
}

fn within(prefix: &IpNet, candidates: &[IpNet]) -> Vec<(IpAddr, IpAddr)> {
    let (first, last) = (bits(prefix.network()) + RESERVED, bits(prefix.broadcast()).saturating_sub(1));
    let is_ipv6 = prefix.network().is_ipv6();
    let of_version = candidates.iter().filter(|it| it.network().is_ipv6() == is_ipv6);
    let ranges = of_version.map(|it| (bits(it.network()).max(first), bits(it.broadcast()).min(last)));
    ranges.filter(|(first, last)| first <= last).map(|(a, b)| (address(a, is_ipv6), address(b, is_ipv6))).collect()
}

/// Addresses of a range, from one that depends on the seed on, so that NICs with the same candidates seldom try the same.
pub(super) fn shuffled((first, last): (IpAddr, IpAddr), seed: &str) -> impl Iterator<Item = IpAddr> {
    let (is_ipv6, start) = (first.is_ipv6(), bits(first));
    let count = bits(last).saturating_sub(start).saturating_add(1).min(MAX_LOOKED_AT);
    let seed =
        digest(&SHA256, seed.as_bytes()).as_ref().iter().take(8).fold(0, |sum, byte| sum << 8 | u128::from(*byte));
    (0..count).map(move |step| address(start + (seed + step) % count, is_ipv6))
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

    use serde_json::json;

    use super::*;

    fn all(subnet: &Value, candidates: &[&str]) -> BTreeSet<String> {
        let candidates: Vec<IpNet> = candidates.iter().map(|it| it.parse().expect("a prefix")).collect();
        let ranges = prefixes(subnet).into_iter().flat_map(|prefix| within(&prefix, &candidates));
        ranges.flat_map(|range| shuffled(range, "seed")).map(|it| it.to_string()).collect()
    }

    #[test]
    fn candidates_are_in_the_subnet_and_not_azures() {
        let subnet = json!({ "properties": { "addressPrefix": "10.0.1.0/29" } });
        let expected = BTreeSet::from(["10.0.1.4".to_owned(), "10.0.1.5".into(), "10.0.1.6".into()]);
        assert_eq!(all(&subnet, &["10.0.0.0/16", "fd00::/64"]), expected);
        assert_eq!(all(&subnet, &["10.0.1.5/32", "10.0.2.0/24"]), BTreeSet::from(["10.0.1.5".to_owned()]));
        assert!(all(&subnet, &["10.0.1.0/30", "10.0.1.7/32"]).is_empty());
    }

    #[test]
    fn both_versions_have_candidates() {
        let subnet = json!({ "properties": { "addressPrefixes": ["10.0.1.0/24", "fd00::/64"] } });
        let found = all(&subnet, &["10.0.1.64/30", "fd00::40/126"]);
        assert_eq!(found.len(), 8);
        assert!(found.contains("fd00::43") && found.contains("10.0.1.67"));
    }

    #[test]
    fn each_seed_starts_elsewhere_and_no_address_comes_twice() {
        let range = ("10.0.0.0".parse().expect("an address"), "10.0.0.255".parse().expect("an address"));
        let of = |seed| shuffled(range, seed).collect::<Vec<_>>();
        assert_eq!(of("a").into_iter().collect::<BTreeSet<_>>().len(), 256);
        assert_ne!(of("a")[0], of("b")[0]);
        assert_eq!(of("a"), of("a"));
    }
}
