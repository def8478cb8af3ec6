//! Tunnel sources: the gateways that send tunnel packets from an address, and how those are authenticated. Almost
//! always one per address; but after a replacement, the view may have two names with the same address for a while, and
//! only one of them is alive.
//!
//! Every tunnel packet is checked here first, so all data for it is contiguous and found with one lookup in a small
//! table.

use std::net::{IpAddr, Ipv4Addr};

use foldhash::HashSet;

use super::members::Authentication;
use super::reverse_path::InterfaceSet;
use crate::flow::address::{Address, of_family};
use crate::flow::ids::InterfaceId;

/// Address buckets: see [`Address::bucket`]. With the maximum number of gateways, nine of ten have a bucket of their
/// own.
const BUCKETS: usize = 2048;

/// A gateway that sends tunnel packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelSource {
    address: IpAddr,
    /// Interfaces on which its packets are accepted.
    interfaces: InterfaceSet,
    /// Authentication of its packets.
    authentication: Authentication,
}

impl TunnelSource {
    pub(super) fn new(address: IpAddr, interfaces: InterfaceSet, authentication: Authentication) -> Self {
        Self { address, interfaces, authentication }
    }

    fn is_tagged(&self) -> bool {
        matches!(self.authentication, Authentication::Tagged { .. })
    }

    /// Whether its packets are accepted on an interface (reverse path filter).
    #[inline]
    pub fn passes_reverse_path(&self, interface: InterfaceId) -> bool {
        self.interfaces.contains(interface)
    }

    /// Whether the tag of an inner frame is valid, if one is required.
    #[inline]
    pub fn is_authentic(&self, inner: &[u8], vni: u32) -> bool {
        match &self.authentication {
            Authentication::None => true,
            Authentication::Tagged { receive_keys: taken, .. } => {
                taken.iter().flatten().any(|key| key.verify_tag(inner, vni))
            }
            Authentication::Rejected => false,
        }
    }
}

/// All tunnel sources, by address.
#[derive(Debug, Default)]
pub(super) struct TunnelSources {
    /// Sorted by bucket.
    list: Vec<TunnelSource>,
    /// First index and number of each bucket; a byte suffices for all gateways.
    buckets: Box<[(u8, u8)]>,
}

impl TunnelSources {
    /// The sources of a gateway group.
    pub(super) fn new(mut list: Vec<TunnelSource>) -> Self {
        // A name without a key must not bypass the authentication of another one with the same address.
        let tagged: HashSet<IpAddr> = list.iter().filter(|it| it.is_tagged()).map(|it| it.address).collect();
        list.retain(|it| it.authentication != Authentication::None || !tagged.contains(&it.address));
        list.sort_by_key(|source| bucket(source.address));
        let mut buckets = vec![(0, 0); BUCKETS];
        for (source, at) in list.iter().zip(0..u8::MAX) {
            let (first, count) = &mut buckets[bucket(source.address)];
            *first = if *count == 0 { at } else { *first };
            *count += 1;
        }
        Self { list, buckets: buckets.into_boxed_slice() }
    }

    /// The source with an address; `None` if there are none, or several in its bucket.
    #[inline]
    pub(super) fn only(&self, address: u32) -> Option<&TunnelSource> {
        let &(at, count) = self.buckets.get(address.bucket())?;
        let source = self.list.get(usize::from(at)).filter(|_| count == 1)?;
        (source.address == IpAddr::V4(Ipv4Addr::from_bits(address))).then_some(source)
    }

    /// The sources with an address.
    #[inline]
    pub(super) fn at(&self, address: IpAddr) -> impl Iterator<Item = &TunnelSource> {
        let (first, count) = self.buckets.get(bucket(address)).copied().unwrap_or_default();
        let near = self.list.get(usize::from(first)..usize::from(first) + usize::from(count)).unwrap_or_default();
        near.iter().filter(move |source| source.address == address)
    }
}

#[inline]
fn bucket(address: IpAddr) -> usize {
    of_family!(address, it => it.bucket())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::members::MAX_GATEWAYS;
    use crate::wire::tunnel_auth::TagKey;

    fn source(address: IpAddr, number: u8) -> TunnelSource {
        let key = TagKey::new(&[number; 16]);
        TunnelSource::new(
            address,
            InterfaceSet::default(),
            Authentication::Tagged { transmit_key: key, receive_keys: [Some(key), None] },
        )
    }

    #[test]
    fn a_name_without_a_key_does_not_bypass_the_key_of_another_with_its_address() {
        let ip = |n: u8| IpAddr::from([10, 2, 0, n]);
        let without = |n| TunnelSource::new(ip(n), InterfaceSet::default(), Authentication::None);
        let sources = TunnelSources::new(vec![without(1), source(ip(1), 7), without(2), without(2)]);
        assert_eq!(sources.at(ip(1)).collect::<Vec<_>>(), [&source(ip(1), 7)]);
        assert_eq!(sources.at(ip(2)).count(), 2, "without keys, packets are identified by address");
    }

    #[test]
    fn a_lookup_finds_exactly_the_sources_with_an_address() {
        for v6 in [false, true] {
            let ip =
                |n: u8| if v6 { IpAddr::from([0xfd00, 2, 0, 0, 0, 0, 0, u16::from(n)]) } else { [10, 2, 0, n].into() };
            // The maximum number; every fifth one has the same address.
            let all: Vec<TunnelSource> =
                (0..MAX_GATEWAYS as u8).map(|n| source(ip(if n.is_multiple_of(5) { 255 } else { n }), n)).collect();
            let sources = TunnelSources::new(all.clone());
            for n in 0..=255 {
                let expected: Vec<&TunnelSource> = all.iter().filter(|it| it.address == ip(n)).collect();
                assert_eq!(sources.at(ip(n)).collect::<Vec<_>>(), expected, "{}", ip(n));
                assert_eq!(TunnelSources::default().at(ip(n)).next(), None);
            }
        }
    }
}
