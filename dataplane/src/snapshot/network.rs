//! The kernel's routes and neighbours as the stages read them.
//!
//! A session remembers its next hop by number. Numbers stay the same while routes do (one generation), so a neighbour
//! that changes its link address changes one entry here and no session.

use std::net::IpAddr;

use foldhash::HashMap;

use super::overlay::NodeId;
use super::prefixes::Prefixes;
use super::spec::InterfaceSpec;
#[cfg(doc)]
use super::spec::Role;
use crate::address::{Address, V6};
use crate::io::InterfaceId;
use crate::wire::ethernet::Link;

/// A next hop's number in its [`Network`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HopId(pub u16);

impl HopId {
    /// No hop of a network: the packet goes to a VIP of this gateway.
    pub const HAIRPIN: Self = Self(u16::MAX - 1);
}

/// A next hop: who gets the frame, on which interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The interface it is on.
    pub interface: InterfaceId,
    /// Its address.
    pub address: IpAddr,
    /// Its link address and ours before it, once the kernel knows it.
    pub link: Option<Link>,
}

/// What a packet needs to leave by a hop that is ready for it: small, so that those of a whole subnet stay in the first cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Exit {
    /// The frame's addresses.
    pub link: Link,
    /// The longest IP packet that the interface sends, bytes; 0 while the hop's link address isn't known.
    pub mtu: u16,
    /// The interface.
    pub interface: InterfaceId,
}

const _: () = assert!(size_of::<Exit>() == 16);

impl Exit {
    pub(super) fn of(hop: &Hop, interfaces: &[InterfaceSpec]) -> Self {
        let mtu = interfaces.get(usize::from(hop.interface.0)).map_or(0, InterfaceSpec::carried);
        let (link, mtu) = hop.link.map_or(([0; 12], 0), |link| (link, mtu));
        Self { link, mtu, interface: hop.interface }
    }
}

/// What a route says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteEntry {
    /// One of `count` targets from `first` on, chosen by hash.
    Via {
        /// Place of the first in `Network::targets`.
        first: u32,
        /// How many.
        count: u16,
    },
    /// The gateway's own kernel.
    Local,
    /// Nowhere.
    Unreachable,
}

/// One way of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// By a router.
    Router(HopId),
    /// The destination itself is on this link.
    OnLink(InterfaceId),
}

/// Numbers that an interface can have.
pub(super) const NUMBERS: usize = 256;

/// What the stages ask of an interface for each packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Its link address: the lower six bytes as they stand in a frame, read as one little-endian number.
    pub mac: u64,
    /// The longest IP packet that it sends, bytes.
    pub mtu: u16,
    /// See [`Role::sides`].
    pub sides: u8,
}

impl Port {
    pub(super) fn of(interface: &InterfaceSpec) -> Self {
        let mut mac = [0; 8];
        mac[..6].copy_from_slice(&interface.mac);
        Self { mac: u64::from_le_bytes(mac), mtu: interface.carried(), sides: interface.role.sides() }
    }

    /// Whether a frame that begins with these bytes is sent to this interface alone.
    #[inline]
    pub fn is_destination(self, frame: &[u8]) -> bool {
        frame.first_chunk().is_some_and(|first| (u64::from_le_bytes(*first) ^ self.mac) << 16 == 0)
    }
}

/// Where a packet goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextHop {
    /// To a next hop that has a number.
    Known(HopId),
    /// To a neighbour that the kernel hasn't heard of yet.
    Unknown(InterfaceId),
    /// To a VIP of this gateway.
    Hairpin,
    /// Into the tunnel to a node of the overlay network.
    Node(NodeId),
}

/// Why there is no way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoute;

/// Interfaces, routes and neighbours of one moment.
#[derive(Debug)]
pub struct Network {
    pub(super) interfaces: Vec<InterfaceSpec>,
    /// One for each number, so that no number has to be checked.
    pub(super) ports: Box<[Port; NUMBERS]>,
    pub(super) hops: Vec<Hop>,
    pub(super) exits: Vec<Exit>,
    pub(super) numbers: HashMap<(InterfaceId, IpAddr), HopId>,
    pub(super) targets: Vec<Target>,
    pub(super) v4: Prefixes<u32, RouteEntry>,
    pub(super) v6: Prefixes<V6, RouteEntry>,
}

/// An address family that is routed.
pub trait Routed: Address {
    /// The family's routes.
    #[doc(hidden)]
    fn route(network: &Network, destination: Self) -> Option<RouteAnswer>;
}

/// An opaque answer of the route table.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct RouteAnswer(pub(super) RouteEntry);

impl Routed for u32 {
    fn route(network: &Network, destination: Self) -> Option<RouteAnswer> {
        network.v4.find(destination).map(RouteAnswer)
    }
}

impl Routed for V6 {
    fn route(network: &Network, destination: Self) -> Option<RouteAnswer> {
        network.v6.find(destination).map(RouteAnswer)
    }
}

impl Network {
    /// The interface with this number; all numbers that a device hands out are known.
    #[inline]
    pub fn interface(&self, id: InterfaceId) -> &InterfaceSpec {
        &self.interfaces[usize::from(id.0)]
    }

    /// The same interface, as the stages need it.
    #[inline]
    pub fn port(&self, id: InterfaceId) -> Port {
        self.ports[usize::from(id.0)]
    }

    /// The addresses with which the gateway itself speaks on an interface. Without one, IPv4 has an address for just that
    /// (RFC 7600 section 4.8), and IPv6 stays silent.
    pub fn sources(&self, id: InterfaceId) -> (u32, Option<V6>) {
        const DUMMY: u32 = 0xc000_0008;
        let own = &self.interface(id).addresses;
        let v4 = own.iter().find_map(|&address| u32::from_ip(address)).unwrap_or(DUMMY);
        let v6 = own.iter().filter_map(|&address| V6::from_ip(address)).find(|&v6| !v6.is_martian());
        (v4, v6)
    }

    /// All interfaces, by number.
    pub fn interfaces(&self) -> &[InterfaceSpec] {
        &self.interfaces
    }

    /// The ways out, by the numbers of their hops.
    #[inline]
    pub fn exits(&self) -> &[Exit] {
        &self.exits
    }

    /// The interface of a next hop on a link; a hairpin and a tunnel have none of their own.
    #[inline]
    pub fn exit_of(&self, hop: NextHop) -> Option<InterfaceId> {
        match hop {
            NextHop::Known(id) => Some(self.hop(id).interface),
            NextHop::Unknown(interface) => Some(interface),
            NextHop::Hairpin | NextHop::Node(_) => None,
        }
    }

    /// The hop with this number.
    #[inline]
    pub fn hop(&self, id: HopId) -> &Hop {
        &self.hops[usize::from(id.0)]
    }

    /// The link addresses of a packet to a neighbour, once the kernel knows it.
    pub fn link_to(&self, interface: InterfaceId, address: IpAddr) -> Option<Link> {
        self.numbers.get(&(interface, address)).and_then(|&id| self.hop(id).link)
    }

    /// Where a packet to `destination` goes next; `hash` spreads sessions over equal ways.
    ///
    /// # Errors
    /// When no route leads there, or it leads to the gateway itself.
    pub fn next_hop<A: Routed>(&self, destination: A, hash: u64) -> Result<NextHop, NoRoute> {
        match A::route(self, destination).ok_or(NoRoute)?.0 {
            RouteEntry::Via { first, count } => {
                let way = ((hash >> 32) * u64::from(count)) >> 32;
                Ok(match self.targets[first as usize + usize::try_from(way).unwrap_or(0)] {
                    Target::Router(id) => NextHop::Known(id),
                    Target::OnLink(interface) => match self.numbers.get(&(interface, destination.to_ip())) {
                        Some(&id) => NextHop::Known(id),
                        None => NextHop::Unknown(interface),
                    },
                })
            }
            RouteEntry::Local | RouteEntry::Unreachable => Err(NoRoute),
        }
    }
}
