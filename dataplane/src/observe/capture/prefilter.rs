//! Capture prefilter on the fast path: checks the addresses, ports or protocol of a packet before translation (its key)
//! and after it (its session).

use ipnet::IpNet;

use super::filter::CaptureFilter;
use crate::flow::address::{Address, V6};
use crate::flow::key::Key;
use crate::session::entry::Entry;

/// The prefilter of each address family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefilters {
    pub v4: Prefilter,
    pub v6: Prefilter,
}

/// The fast-path packets that may match the filter. One criterion is enough to exclude most packets; the full filter is
/// applied later.
#[derive(Clone, Copy, Debug)]
pub enum Prefilter {
    NoPackets,
    /// Packets with an address in a prefix, before or after translation.
    Prefix(Pattern),
    /// Packets with a port, before or after translation.
    Port(Pattern),
    /// Packets of a protocol.
    Protocol(u8),
    AllPackets,
}

/// A masked compare of any of four words, see [`Address::any_matches`]: for addresses in a prefix, or for a port, in
/// network byte order.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    mask: [u32; 4],
    wanted: [u32; 4],
}

impl Pattern {
    /// `None` if the prefix is of the other family.
    fn of_prefix<A: Address>(net: IpNet) -> Option<Self> {
        let first = A::from_ip(net.network())?;
        let last = first.last_of_prefix(net.prefix_len());
        let [wanted, last] = [first, last].map(|it| it.swap_network_order().to_u32x4());
        Some(Self { mask: std::array::from_fn(|i| !(wanted[i] ^ last[i])), wanted })
    }

    /// Source and destination port are in one word.
    fn of_port(port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        let [source, destination] = [[high, low, 0, 0], [0, 0, high, low]].map(u32::from_ne_bytes);
        let [sources, destinations] = [[u8::MAX, u8::MAX, 0, 0], [0, 0, u8::MAX, u8::MAX]].map(u32::from_ne_bytes);
        let twice = |one, other| [one, one, other, other];
        Self { mask: twice(sources, destinations), wanted: twice(source, destination) }
    }

    #[inline]
    fn has<A: Address>(&self, [source, destination]: [A; 2], [to_source, to_destination]: [A; 2]) -> bool {
        A::any_matches([source, destination, to_source, to_destination], self.mask, self.wanted)
    }

    #[inline]
    fn has_port(&self, ports: [u8; 4], to_ports: [u8; 4]) -> bool {
        let [ports, to_ports] = [ports, to_ports].map(u32::from_ne_bytes);
        u32::any_matches([ports, to_ports, ports, to_ports], self.mask, self.wanted)
    }

    /// Whether a packet of a session has an address in the prefix, before or after translation.
    #[inline]
    pub fn has_address_of<A: Address>(&self, key: &Key<A>, entry: &Entry<A>) -> bool {
        let (addresses, _) = key.in_packet();
        self.has(addresses, entry.translated_addresses())
    }

    /// Whether a packet of a session has the port, before or after translation.
    #[inline]
    pub fn has_port_of<A: Address>(&self, key: &Key<A>, entry: &Entry<A>) -> bool {
        let (_, ports) = key.in_packet();
        self.has_port(ports, entry.translated_ports())
    }
}

impl Prefilters {
    pub(super) fn new(filter: &CaptureFilter) -> Self {
        Self { v4: Prefilter::of::<u32>(filter), v6: Prefilter::of::<V6>(filter) }
    }
}

impl Prefilter {
    fn of<A: Address>(filter: &CaptureFilter) -> Self {
        match (filter.nets.first(), filter.port, filter.protocol) {
            (Some(net), ..) => Pattern::of_prefix::<A>(*net).map_or(Self::NoPackets, Self::Prefix),
            (None, Some(port), _) => Self::Port(Pattern::of_port(port)),
            (None, None, Some(protocol)) => Self::Protocol(protocol),
            (None, None, None) => Self::AllPackets,
        }
    }

    /// Whether a packet of a session may match.
    pub(super) fn matches_session<A: Address>(&self, key: &Key<A>, entry: &Entry<A>) -> bool {
        match self {
            Self::NoPackets => false,
            Self::Prefix(pattern) => pattern.has_address_of(key, entry),
            Self::Port(pattern) => pattern.has_port_of(key, entry),
            Self::Protocol(protocol) => key.protocol() == *protocol,
            Self::AllPackets => true,
        }
    }

    /// Whether an untranslated packet may match.
    pub(super) fn matches_untranslated<A: Address>(&self, key: &Key<A>) -> bool {
        let (addresses, ports) = key.in_packet();
        match self {
            Self::NoPackets => false,
            Self::Prefix(pattern) => pattern.has(addresses, addresses),
            Self::Port(pattern) => pattern.has_port(ports, ports),
            Self::Protocol(protocol) => key.protocol() == *protocol,
            Self::AllPackets => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use ipnet::{Ipv4Net, Ipv6Net};
    use proptest::prelude::*;

    use super::*;

    /// Four addresses, each equal to `first` or different in one bit.
    fn with_flipped_bits<A: Address>(first: u128, flips: [u8; 4]) -> [A; 4] {
        let to_ip = |bits: u128| match A::BITS {
            32 => IpAddr::from((bits as u32).to_be_bytes()),
            _ => IpAddr::from(bits.to_be_bytes()),
        };
        flips.map(|flip| A::from_ip(to_ip(first ^ 1_u128.checked_shl(flip.into()).unwrap_or(0))).unwrap())
    }

    fn agrees<A: Address>(net: IpNet, addresses: [A; 4]) -> bool {
        let expected = addresses.iter().any(|address| net.contains(&address.to_ip()));
        let [a, b, c, d] = addresses.map(Address::swap_network_order);
        Pattern::of_prefix::<A>(net).unwrap().has([a, b], [c, d]) == expected
    }

    proptest! {
        #[test]
        fn a_prefix_pattern_matches_like_ipnet(
            first: u128, length in 0_u8..=128, flips in prop::array::uniform4(0_u8..=128),
        ) {
            let v4 = Ipv4Net::new((first as u32).into(), length % 33).unwrap();
            let v6 = Ipv6Net::new(first.into(), length).unwrap();
            prop_assert!(agrees::<V6>(v6.into(), with_flipped_bits(first, flips)), "{v6}");
            prop_assert!(agrees::<u32>(v4.into(), with_flipped_bits(first, flips.map(|flip| flip % 33))), "{v4}");
            prop_assert!(Pattern::of_prefix::<u32>(v6.into()).is_none());
            prop_assert!(Pattern::of_prefix::<V6>(v4.into()).is_none());
        }

        #[test]
        fn a_port_pattern_matches_every_position(ports: [u16; 4], which in 0..5_usize) {
            let wanted = ports.get(which).copied().unwrap_or(4711);
            let [before, after] = [0, 2].map(|at| {
                let [[a, b], [c, d]] = [ports[at], ports[at + 1]].map(u16::to_be_bytes);
                [a, b, c, d]
            });
            prop_assert_eq!(Pattern::of_port(wanted).has_port(before, after), ports.contains(&wanted));
        }
    }
}
