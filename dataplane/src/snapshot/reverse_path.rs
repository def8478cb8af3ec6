//! Reverse path of tunnels (RFC 3704 section 2.2, strict): the interfaces by which an address is routed are the only ones that packets
//! from it may come in on. So nobody on another link passes for a peer.

use std::net::IpAddr;

use super::network::{Network, RouteEntry, Routed, Target};
use crate::address::V6;
use crate::io::InterfaceId;

/// Some of a gateway's interfaces: one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interfaces([u64; 4]);

impl Interfaces {
    /// The interfaces by which packets to this address leave: of equal routes (ECMP), those of all. None: no route leads there.
    pub(super) fn toward(address: IpAddr, network: &Network) -> Self {
        match address {
            IpAddr::V4(v4) => Self::of_route(v4.to_bits(), network),
            IpAddr::V6(v6) => Self::of_route(V6::from_bits(v6.to_bits()), network),
        }
    }

    fn of_route<A: Routed>(address: A, network: &Network) -> Self {
        let mut interfaces = Self::default();
        if let Some(RouteEntry::Via { first, count }) = A::route(network, address).map(|answer| answer.0) {
            for target in network.targets.iter().skip(first as usize).take(count.into()) {
                interfaces.insert(match *target {
                    Target::Router(hop) => network.hop(hop).interface,
                    Target::OnLink(interface) => interface,
                });
            }
        }
        interfaces
    }

    fn insert(&mut self, id: InterfaceId) {
        self.0[usize::from(id.0 / 64)] |= 1 << (id.0 % 64);
    }

    /// Whether an interface is one of them.
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
            let mut interfaces = Interfaces::default();
            interfaces.insert(InterfaceId(inserted));
            assert!((0..=u8::MAX).all(|id| interfaces.contains(InterfaceId(id)) == (id == inserted)));
        }
    }
}
