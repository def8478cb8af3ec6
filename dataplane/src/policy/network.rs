//! Forwarding state: interfaces, routes and neighbors, as the stages read them.
//!
//! A session stores its next hop as a number. Numbers stay the same while the routes do (one generation), so a
//! neighbor's new MAC address changes one entry here and no session.

use std::net::IpAddr;

use foldhash::HashMap;

use super::prefixes::Prefixes;
use super::spec::InterfaceSpec;
#[cfg(doc)]
use super::spec::Role;
use crate::flow::address::{Address, V6};
use crate::flow::ids::{InterfaceId, NodeId};
use crate::flow::special_purpose;
use crate::wire::ethernet::MacPair;

/// Number of a next hop in its [`Network`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NextHopId(pub u16);

impl NextHopId {
    /// No neighbor: the packet is hairpinned to a VIP of this gateway.
    pub const HAIRPIN: Self = Self(u16::MAX - 1);
}

/// A neighbor: the next hop of packets on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbor {
    pub interface: InterfaceId,
    pub address: IpAddr,
    /// Destination and source MAC address of frames to it, once resolved.
    pub macs: Option<MacPair>,
}

/// Adjacency: what is needed to send a packet to a resolved neighbor. Small, so that those of a whole subnet fit in the
/// L1 cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Adjacency {
    /// Destination and source MAC address.
    pub macs: MacPair,
    /// MTU of the interface, bytes; 0 while the neighbor isn't resolved.
    pub mtu: u16,
    pub interface: InterfaceId,
}

const _: () = assert!(size_of::<Adjacency>() == 16);

impl Adjacency {
    pub(super) fn of(hop: &Neighbor, interfaces: &[InterfaceSpec]) -> Self {
        let mtu = interfaces.get(usize::from(hop.interface.0)).map_or(0, InterfaceSpec::usable_mtu);
        let (link, mtu) = hop.macs.map_or(([0; 12], 0), |link| (link, mtu));
        Self { macs: link, mtu, interface: hop.interface }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteEntry {
    /// One of `count` paths from `first` on, selected by hash (ECMP).
    Via {
        /// Index of the first path in [`Network::paths`].
        first: u32,
        /// Number of paths.
        count: u16,
    },
    /// Delivered to the gateway's own kernel.
    Local,
    Unreachable,
}

/// One path of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoutePath {
    /// Via a router.
    Router(NextHopId),
    /// The destination is on-link.
    OnLink(InterfaceId),
}

/// Interface numbers.
pub(super) const MAX_INTERFACES: usize = 256;

/// Per-packet data of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InterfaceEntry {
    /// Its MAC address in the lower six bytes: the bytes of a frame as one little-endian number.
    pub mac: u64,
    /// Its MTU, bytes.
    pub mtu: u16,
    /// See [`Role::sides`].
    pub sides: u8,
    /// See [`InterfaceSpec::partial_checksums`].
    pub partial_checksums: bool,
}

impl InterfaceEntry {
    pub(super) fn of(interface: &InterfaceSpec) -> Self {
        let mut mac = [0; 8];
        mac[..6].copy_from_slice(&interface.mac);
        Self {
            mac: u64::from_le_bytes(mac),
            mtu: interface.usable_mtu(),
            sides: interface.role.sides(),
            partial_checksums: interface.partial_checksums,
        }
    }

    /// Whether the destination MAC address of a frame is this interface's.
    #[inline]
    pub fn is_destination(self, frame: &[u8]) -> bool {
        frame.first_chunk().is_some_and(|first| (u64::from_le_bytes(*first) ^ self.mac) << 16 == 0)
    }
}

/// Result of a route lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextHop {
    /// A numbered next hop.
    Neighbor(NextHopId),
    /// An on-link destination that isn't in the neighbor table.
    OnLink(InterfaceId),
    /// A VIP of this gateway.
    Hairpin,
    /// The tunnel to an overlay node.
    Node(NodeId),
}

/// There is no route, or it isn't forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoute;

/// Interfaces, routes and neighbors at one moment.
#[derive(Debug)]
pub struct Network {
    pub(super) interfaces: Vec<InterfaceSpec>,
    /// One per possible number, so that a lookup needs no bounds check.
    pub(super) interface_entries: Box<[InterfaceEntry; MAX_INTERFACES]>,
    pub(super) has_partial_checksums: bool,
    pub(super) neighbors: Vec<Neighbor>,
    pub(super) adjacencies: Vec<Adjacency>,
    pub(super) next_hop_ids: HashMap<(InterfaceId, IpAddr), NextHopId>,
    pub(super) paths: Vec<RoutePath>,
    pub(super) v4: Prefixes<u32, RouteEntry>,
    pub(super) v6: Prefixes<V6, RouteEntry>,
}

/// An address family with a routing table.
pub trait Routed: Address {
    /// Looks up a route.
    #[doc(hidden)]
    fn route(network: &Network, destination: Self) -> Option<RouteLookup>;
}

/// An opaque result of a lookup in the routing table.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct RouteLookup(pub(super) RouteEntry);

impl Routed for u32 {
    fn route(network: &Network, destination: Self) -> Option<RouteLookup> {
        network.v4.find(destination).map(RouteLookup)
    }
}

impl Routed for V6 {
    fn route(network: &Network, destination: Self) -> Option<RouteLookup> {
        network.v6.find(destination).map(RouteLookup)
    }
}

impl Network {
    /// The interface with this number, which must come from a device.
    #[inline]
    pub fn interface(&self, id: InterfaceId) -> &InterfaceSpec {
        &self.interfaces[usize::from(id.0)]
    }

    /// Per-packet data of an interface.
    #[inline]
    pub fn interface_entry(&self, id: InterfaceId) -> InterfaceEntry {
        self.interface_entries[usize::from(id.0)]
    }

    /// Source addresses of the gateway's own packets (ICMP errors) on an interface: none that is link-local, since the
    /// next router wouldn't forward them. Without an IPv4 address, the dummy address of RFC 7600 section 4.8 is used;
    /// without an IPv6 address, none is sent.
    pub fn source_addresses(&self, id: InterfaceId) -> (u32, Option<V6>) {
        let own = &self.interface(id).addresses;
        let v4 = own.iter().filter_map(|&address| u32::from_ip(address)).find(|v4| !v4.is_martian());
        let v6 = own.iter().filter_map(|&address| V6::from_ip(address)).find(|v6| !v6.is_martian());
        (v4.unwrap_or(special_purpose::DUMMY_V4), v6)
    }

    /// Whether packets of any interface may have partial checksums.
    #[inline]
    pub fn has_partial_checksums(&self) -> bool {
        self.has_partial_checksums
    }

    /// All interfaces, by number.
    pub fn interfaces(&self) -> &[InterfaceSpec] {
        &self.interfaces
    }

    /// Adjacencies, by next hop number.
    #[inline]
    pub fn adjacencies(&self) -> &[Adjacency] {
        &self.adjacencies
    }

    /// The interface of a next hop; hairpin and tunnel have none of their own.
    #[inline]
    pub fn interface_of(&self, hop: NextHop) -> Option<InterfaceId> {
        match hop {
            NextHop::Neighbor(id) => Some(self.neighbor(id).interface),
            NextHop::OnLink(interface) => Some(interface),
            NextHop::Hairpin | NextHop::Node(_) => None,
        }
    }

    /// The neighbor with this number.
    #[inline]
    pub fn neighbor(&self, id: NextHopId) -> &Neighbor {
        &self.neighbors[usize::from(id.0)]
    }

    /// Destination and source MAC address of frames to a neighbor, once resolved.
    pub fn neighbor_macs(&self, interface: InterfaceId, address: IpAddr) -> Option<MacPair> {
        self.next_hop_ids.get(&(interface, address)).and_then(|&id| self.neighbor(id).macs)
    }

    /// Looks up the next hop of a packet to `destination`; `hash` selects one of several equal paths.
    ///
    /// # Errors
    /// If there is no route, or it leads to the gateway itself.
    pub fn next_hop<A: Routed>(&self, destination: A, hash: u64) -> Result<NextHop, NoRoute> {
        match A::route(self, destination).ok_or(NoRoute)?.0 {
            RouteEntry::Via { first, count } => {
                let index = ((hash >> 32) * u64::from(count)) >> 32;
                Ok(match self.paths[first as usize + usize::try_from(index).unwrap_or(0)] {
                    RoutePath::Router(id) => NextHop::Neighbor(id),
                    RoutePath::OnLink(interface) => match self.next_hop_ids.get(&(interface, destination.to_ip())) {
                        Some(&id) => NextHop::Neighbor(id),
                        None => NextHop::OnLink(interface),
                    },
                })
            }
            RouteEntry::Local | RouteEntry::Unreachable => Err(NoRoute),
        }
    }
}
