//! What packets on the short way are asked, which has their addresses, ports and protocol at hand: before, and in their session after.

use ipnet::IpNet;

use super::filter::TapFilter;
use crate::address::{Address, V6};
use crate::session::entry::Entry;
use crate::session::key::Key;

/// What packets on the short way are asked, in each family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub v4: Near,
    pub v6: Near,
}

/// Which packets on the short way may match. One criterion is enough to leave others alone; the rest is asked later.
#[derive(Clone, Copy, Debug)]
pub enum Near {
    /// None.
    Nobody,
    /// Those that have an address in a prefix, before or after.
    In(Pattern),
    /// Those that have a port, before or after.
    At(Pattern),
    /// Those of a protocol.
    Of(u8),
    /// Each.
    Everybody,
}

/// What one of four words is, masked: see [`Address::is_one`]. For addresses in a prefix, or for a port, as they stand in packets.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    mask: [u32; 4],
    wanted: [u32; 4],
}

impl Pattern {
    /// `None` if it is of the other family.
    fn of_prefix<A: Address>(net: IpNet) -> Option<Self> {
        let first = A::from_ip(net.network())?;
        let last = first.last_of_prefix(net.prefix_len());
        let [wanted, last] = [first, last].map(|it| it.in_packet_order().quad());
        Some(Self { mask: std::array::from_fn(|i| !(wanted[i] ^ last[i])), wanted })
    }

    /// Source and destination stand in one word.
    fn of_port(port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        let [source, destination] = [[high, low, 0, 0], [0, 0, high, low]].map(u32::from_ne_bytes);
        let [sources, destinations] = [[u8::MAX, u8::MAX, 0, 0], [0, 0, u8::MAX, u8::MAX]].map(u32::from_ne_bytes);
        let twice = |one, other| [one, one, other, other];
        Self { mask: twice(sources, destinations), wanted: twice(source, destination) }
    }

    #[inline]
    fn has<A: Address>(&self, [source, destination]: [A; 2], [to_source, to_destination]: [A; 2]) -> bool {
        A::is_one([source, destination, to_source, to_destination], self.mask, self.wanted)
    }

    #[inline]
    fn has_port(&self, ports: [u8; 4], to_ports: [u8; 4]) -> bool {
        let [ports, to_ports] = [ports, to_ports].map(u32::from_ne_bytes);
        u32::is_one([ports, to_ports, ports, to_ports], self.mask, self.wanted)
    }

    /// Whether a packet of a session has an address in the prefix, before or after.
    #[inline]
    pub fn has_address_of<A: Address>(&self, key: &Key<A>, entry: &Entry<A>) -> bool {
        let (addresses, _) = key.in_packet();
        self.has(addresses, entry.to_addresses())
    }

    /// Whether a packet of a session has the port, before or after.
    #[inline]
    pub fn has_port_of<A: Address>(&self, key: &Key<A>, entry: &Entry<A>) -> bool {
        let (_, ports) = key.in_packet();
        self.has_port(ports, entry.to_ports())
    }
}

impl Asked {
    pub(super) fn by(filter: &TapFilter) -> Self {
        Self { v4: Near::of::<u32>(filter), v6: Near::of::<V6>(filter) }
    }
}

impl Near {
    fn of<A: Address>(filter: &TapFilter) -> Self {
        match (filter.nets.first(), filter.port, filter.protocol) {
            (Some(net), ..) => Pattern::of_prefix::<A>(*net).map_or(Self::Nobody, Self::In),
            (None, Some(port), _) => Self::At(Pattern::of_port(port)),
            (None, None, Some(protocol)) => Self::Of(protocol),
            (None, None, None) => Self::Everybody,
        }
    }

    /// Whether a packet of a session may match.
    pub(super) fn is_near<A: Address>(&self, key: &Key<A>, entry: &Entry<A>) -> bool {
        match self {
            Self::Nobody => false,
            Self::In(pattern) => pattern.has_address_of(key, entry),
            Self::At(pattern) => pattern.has_port_of(key, entry),
            Self::Of(protocol) => key.protocol() == *protocol,
            Self::Everybody => true,
        }
    }

    /// Whether a packet that nobody translates may match.
    pub(super) fn is_near_as_it_is<A: Address>(&self, key: &Key<A>) -> bool {
        let (addresses, ports) = key.in_packet();
        match self {
            Self::Nobody => false,
            Self::In(pattern) => pattern.has(addresses, addresses),
            Self::At(pattern) => pattern.has_port(ports, ports),
            Self::Of(protocol) => key.protocol() == *protocol,
            Self::Everybody => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use ipnet::{Ipv4Net, Ipv6Net};
    use proptest::prelude::*;

    use super::*;

    /// Addresses that differ from the first in one bit each, or not.
    fn beside<A: Address>(first: u128, flips: [u8; 4]) -> [A; 4] {
        let to_ip = |bits: u128| match A::BITS {
            32 => IpAddr::from((bits as u32).to_be_bytes()),
            _ => IpAddr::from(bits.to_be_bytes()),
        };
        flips.map(|flip| A::from_ip(to_ip(first ^ 1_u128.checked_shl(flip.into()).unwrap_or(0))).unwrap())
    }

    fn agrees<A: Address>(net: IpNet, addresses: [A; 4]) -> bool {
        let expected = addresses.iter().any(|address| net.contains(&address.to_ip()));
        let [a, b, c, d] = addresses.map(Address::in_packet_order);
        Pattern::of_prefix::<A>(net).unwrap().has([a, b], [c, d]) == expected
    }

    proptest! {
        #[test]
        fn a_prefix_has_what_ipnet_says(
            first: u128, length in 0_u8..=128, flips in prop::array::uniform4(0_u8..=128),
        ) {
            let v4 = Ipv4Net::new((first as u32).into(), length % 33).unwrap();
            let v6 = Ipv6Net::new(first.into(), length).unwrap();
            prop_assert!(agrees::<V6>(v6.into(), beside(first, flips)), "{v6}");
            prop_assert!(agrees::<u32>(v4.into(), beside(first, flips.map(|flip| flip % 33))), "{v4}");
            prop_assert!(Pattern::of_prefix::<u32>(v6.into()).is_none() && Pattern::of_prefix::<V6>(v4.into()).is_none());
        }

        #[test]
        fn a_port_is_found_where_it_stands(ports: [u16; 4], which in 0..5_usize) {
            let wanted = ports.get(which).copied().unwrap_or(4711);
            let [before, after] = [0, 2].map(|at| {
                let [[a, b], [c, d]] = [ports[at], ports[at + 1]].map(u16::to_be_bytes);
                [a, b, c, d]
            });
            prop_assert_eq!(Pattern::of_port(wanted).has_port(before, after), ports.contains(&wanted));
        }
    }
}
