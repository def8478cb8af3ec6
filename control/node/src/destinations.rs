//! Destinations of a policy as disjoint ranges. Of prefixes that overlap the longest decides, and nftables' interval sets
//! don't permit overlaps.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// A range of addresses of one family, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AddressRange {
    pub first: IpAddr,
    /// The last address, of the same family.
    pub last: IpAddr,
}

impl std::fmt::Display for AddressRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    fn last(self) -> u128 {
        match self {
            Self::V4 => u128::from(u32::MAX),
            Self::V6 => u128::MAX,
        }
    }

    fn address(self, number: u128) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::from_bits(number as u32).into(),
            Self::V6 => Ipv6Addr::from_bits(number).into(),
        }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// A prefix with its verdict. Of equally long ones, the one with the highest rank decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rule {
    first: u128,
    /// Longer prefixes sort later.
    length: u8,
    rank: Rank,
    last: u128,
}

/// Precedence among equally long prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Cluster,
    Destination,
    Excluded,
}

/// The destinations of a family that are routed unchanged: all but those whose longest prefix is one of `destinations`.
/// Of equally long prefixes, `excluded` precedes `destinations`, which precede those of the cluster.
pub fn unchanged(family: Family, destinations: &[IpNet], excluded: &[IpNet], cluster: &[IpNet]) -> Vec<AddressRange> {
    let of = |nets: &[IpNet], rank: Rank| {
        let nets = nets.iter().filter(move |net| Family::of(net.addr()) == family);
        let rule = move |net: &IpNet| Rule {
            first: number(net.network()),
            length: net.prefix_len(),
            rank,
            last: number(net.broadcast()),
        };
        nets.map(rule).collect::<Vec<_>>()
    };
    let mut rules = of(destinations, Rank::Destination);
    rules.extend(of(excluded, Rank::Excluded));
    rules.extend(of(cluster, Rank::Cluster));
    rules.sort_unstable();
    let mut sweep = Sweep { at: 0, open: Vec::new(), ranges: Vec::new() };
    for rule in &rules {
        sweep.advance(rule.first);
        sweep.open.push(*rule);
    }
    sweep.finish(family.last());
    sweep
        .ranges
        .into_iter()
        .map(|(first, last)| AddressRange { first: family.address(first), last: family.address(last) })
        .collect()
}

/// A pass over the addresses in ascending order.
struct Sweep {
    /// Addresses below have been decided.
    at: u128,
    /// The prefixes that contain `at`, the innermost last. Prefixes either nest or are disjoint.
    open: Vec<Rule>,
    /// The ranges that are unchanged.
    ranges: Vec<(u128, u128)>,
}

impl Sweep {
    /// Decides the addresses below `end`.
    fn advance(&mut self, end: u128) {
        while let Some(rule) = self.open.last().copied().filter(|rule| rule.last < end) {
            self.decide(rule.last);
            self.open.pop();
            self.at = rule.last + 1;
        }
        if let Some(last) = end.checked_sub(1) {
            self.decide(last);
            self.at = end;
        }
    }

    /// Decides all other addresses.
    fn finish(&mut self, end: u128) {
        while let Some(rule) = self.open.last().copied() {
            self.decide(rule.last);
            self.open.pop();
            let Some(next) = rule.last.checked_add(1).filter(|next| *next <= end) else { return };
            self.at = next;
        }
        self.decide(end);
    }

    /// Decides the addresses from `at` to `last` by the innermost prefix.
    fn decide(&mut self, last: u128) {
        if last < self.at || self.open.last().is_some_and(|rule| rule.rank == Rank::Destination) {
            return;
        }
        match self.ranges.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(self.at) => *end = last,
            _ => self.ranges.push((self.at, last)),
        }
    }
}

/// Prefixes of a family as disjoint ranges.
pub fn union(family: Family, nets: &[IpNet]) -> Vec<AddressRange> {
    let nets: Vec<IpNet> = IpNet::aggregate(&nets.iter().map(IpNet::trunc).collect());
    let mut ranges: Vec<AddressRange> = nets
        .iter()
        .filter(|net| Family::of(net.addr()) == family)
        .map(|net| AddressRange { first: net.network(), last: net.broadcast() })
        .collect();
    ranges.sort_unstable();
    ranges
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn texts(ranges: &[AddressRange]) -> Vec<String> {
        ranges.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_longest_prefix_decides() {
        let (all, excluded) = (nets(&["0.0.0.0/0", "10.9.0.0/16", "::/0"]), nets(&["10.0.0.0/8", "2001:db8::/32"]));
        let cluster = nets(&["10.244.0.0/16", "192.0.2.101/32"]);
        let v4 = unchanged(Family::V4, &all, &excluded, &cluster);
        assert_eq!(texts(&v4), ["10.0.0.0-10.8.255.255", "10.10.0.0-10.255.255.255", "192.0.2.101"]);
        let v6 = unchanged(Family::V6, &all, &excluded, &cluster);
        assert_eq!(texts(&v6), ["2001:db8::-2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"]);
        assert_eq!(
            texts(&unchanged(Family::V4, &all, &nets(&["0.0.0.0/0"]), &[])),
            ["0.0.0.0-10.8.255.255", "10.10.0.0-255.255.255.255"]
        );
        assert_eq!(texts(&unchanged(Family::V4, &[], &[], &[])), ["0.0.0.0-255.255.255.255"]);
        assert_eq!(
            texts(&unchanged(Family::V6, &nets(&["8000::/1"]), &[], &[])),
            ["::-7fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]
        );
    }

    /// Prefixes of a few addresses, so that they overlap; both ends of the family are among them.
    fn prefix() -> impl Strategy<Value = IpNet> {
        (prop::sample::select(vec![0_u32, 0x0a00_0000, 0x0a00_0001, 0x0a00_00ff, 0x0a80_0000, u32::MAX]), 0_u8..=32)
            .prop_map(|(address, length)| IpNet::new(Ipv4Addr::from_bits(address).into(), length).unwrap().trunc())
    }

    proptest! {
        #[test]
        fn ranges_agree_with_longest_prefix_match(
            lists in prop::array::uniform3(prop::collection::vec(prefix(), 0..6)),
            others in prop::collection::vec(any::<u32>(), 4),
        ) {
            let [destinations, excluded, cluster] = &lists;
            let ranges = unchanged(Family::V4, destinations, excluded, cluster);
            prop_assert!(ranges.windows(2).all(|pair| number(pair[0].last) + 1 < number(pair[1].first)));
            let ends = lists.iter().flatten().flat_map(|net| {
                let (first, last) = (number(net.network()) as u32, number(net.broadcast()) as u32);
                [first.wrapping_sub(1), first, last, last.wrapping_add(1)]
            });
            for bits in ends.chain(others) {
                let address = IpAddr::from(Ipv4Addr::from_bits(bits));
                let best = |nets: &[IpNet]| nets.iter().filter(|net| net.contains(&address)).map(IpNet::prefix_len).max();
                let (to, not, inside) = (best(destinations), best(excluded), best(cluster));
                let is_translated = to.is_some() && to > not && to >= inside;
                let is_unchanged = ranges.iter().any(|range| range.first <= address && address <= range.last);
                prop_assert_eq!(is_unchanged, !is_translated, "{}", address);
            }
        }
    }
}
