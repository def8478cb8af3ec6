//! Reverse path filter for tunnel packets (RFC 3704 section 2.2, strict mode): a packet is accepted only on the
//! interfaces through which its source is routed. So a host on another network can't impersonate a peer.

use std::net::IpAddr;

use super::network::{Network, RouteEntry, RoutePath, Routed};
use crate::flow::address::of_family;
use crate::flow::ids::InterfaceId;

/// A set of interfaces, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InterfaceSet([u64; 4]);

impl InterfaceSet {
    /// The interfaces of the route to an address, of all paths with ECMP; none without a route.
    pub(super) fn toward(address: IpAddr, network: &Network) -> Self {
        of_family!(address, it => Self::of_route(it, network))
    }

    fn of_route<A: Routed>(address: A, network: &Network) -> Self {
        let mut interfaces = Self::default();
        if let Some(RouteEntry::Via { first, count }) = A::route(network, address).map(|answer| answer.0) {
            for target in network.paths.iter().skip(first as usize).take(count.into()) {
                interfaces.insert(match *target {
                    RoutePath::Router(hop) => network.neighbor(hop).interface,
                    RoutePath::OnLink(interface) => interface,
                });
            }
        }
        interfaces
    }

    fn insert(&mut self, id: InterfaceId) {
        self.0[usize::from(id.0 / 64)] |= 1 << (id.0 % 64);
    }

    /// Whether an interface is in the set.
    #[inline]
    pub fn contains(&self, id: InterfaceId) -> bool {
        self.0[usize::from(id.0 / 64)] >> (id.0 % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interface_has_a_bit_of_its_own() {
        for inserted in 0..=u8::MAX {
            let mut interfaces = InterfaceSet::default();
            interfaces.insert(InterfaceId(inserted));
            assert!((0..=u8::MAX).all(|id| interfaces.contains(InterfaceId(id)) == (id == inserted)));
        }
    }
}
