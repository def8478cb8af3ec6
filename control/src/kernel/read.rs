//! From netlink messages to what the engine is told.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteNextHopFlags, RouteType,
};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{HopSpec, InterfaceSpec, RouteSpec, RouteTarget};

use super::Wanted;

/// The table of addresses that the kernel answers for.
const LOCAL_TABLE: u32 = 255;
const MAIN_TABLE: u32 = RouteHeader::RT_TABLE_MAIN as u32;

/// The question for all routes of IPv4.
pub(super) fn any_ipv4_route() -> RouteMessage {
    RouteMessageBuilder::<Ipv4Addr>::new().build()
}

/// The question for all routes of IPv6.
pub(super) fn any_ipv6_route() -> RouteMessage {
    RouteMessageBuilder::<Ipv6Addr>::new().build()
}

/// An interface as the kernel knows it; with index 0, and down, if it doesn't.
pub(super) fn interface(wanted: &Wanted, links: &[LinkMessage], addresses: &[AddressMessage]) -> InterfaceSpec {
    let is_it = |link: &&LinkMessage| {
        link.attributes.iter().any(|a| matches!(a, LinkAttribute::IfName(name) if *name == wanted.name))
    };
    let mut spec = InterfaceSpec {
        id: wanted.id,
        name: wanted.name.clone(),
        ifindex: 0,
        role: wanted.role,
        mac: [0; 6],
        mtu: 0,
        up: false,
        addresses: Vec::new(),
    };
    let Some(link) = links.iter().find(is_it) else { return spec };
    spec.ifindex = link.header.index;
    spec.up = link.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::Address(mac) => spec.mac = mac.as_slice().try_into().unwrap_or([0; 6]),
            LinkAttribute::Mtu(mtu) => spec.mtu = u16::try_from(*mtu).unwrap_or(u16::MAX),
            _ => {}
        }
    }
    let own = addresses.iter().filter(|address| address.header.index == link.header.index);
    spec.addresses = own.filter_map(address).collect();
    spec.addresses.sort_unstable();
    spec
}

/// The address itself: on a point-to-point link `Address` is the other end's.
fn address(message: &AddressMessage) -> Option<IpAddr> {
    let find = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
    find(|attribute| if let AddressAttribute::Local(address) = attribute { Some(*address) } else { None }).or_else(
        || find(|attribute| if let AddressAttribute::Address(address) = attribute { Some(*address) } else { None }),
    )
}

/// A neighbour's address, and its link address if that can be used.
pub(super) fn neighbour(message: &NeighbourMessage) -> Option<(IpAddr, Option<[u8; 6]>)> {
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })?;
    let usable = matches!(
        message.header.state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
            | NeighbourState::Noarp
    );
    let mac = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(mac) => mac.as_slice().try_into().ok(),
        _ => None,
    });
    Some((address, mac.filter(|_| usable)))
}

/// A route's rank: the local table stands before all others, then the lowest metric counts.
type Rank = (u8, u32);

/// The best route for each prefix of the local and main tables.
pub(super) fn routes(messages: &[RouteMessage], interfaces: &[InterfaceSpec]) -> Vec<RouteSpec> {
    let mut best: BTreeMap<IpNet, (Rank, RouteTarget)> = BTreeMap::new();
    for message in messages {
        let Some((prefix, rank, target)) = route(message, interfaces) else { continue };
        match best.get_mut(&prefix) {
            // IPv6 lists the ways of one route as several of equal metric.
            Some((known, RouteTarget::Via(ways))) if *known == rank => {
                if let RouteTarget::Via(more) = target {
                    ways.extend(more);
                }
            }
            Some((known, _)) if *known <= rank => {}
            _ => drop(best.insert(prefix, (rank, target))),
        }
    }
    best.into_iter().map(|(prefix, (_, target))| RouteSpec { prefix, target }).collect()
}

fn route(message: &RouteMessage, interfaces: &[InterfaceSpec]) -> Option<(IpNet, Rank, RouteTarget)> {
    let header = &message.header;
    if header.tos != 0 || header.source_prefix_length != 0 || header.flags.contains(RouteFlags::Cloned) {
        return None;
    }
    let mut table = u32::from(header.table);
    let mut metric = 0;
    let mut destination = match header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Priority(number) => metric = *number,
            RouteAttribute::Destination(address) => destination = ip(address)?,
            _ => {}
        }
    }
    if table != MAIN_TABLE && table != LOCAL_TABLE {
        return None;
    }
    let target = match header.kind {
        RouteType::Unicast => via(message, interfaces),
        RouteType::Local | RouteType::Broadcast | RouteType::Anycast => RouteTarget::Local,
        RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit => RouteTarget::Unreachable,
        _ => return None,
    };
    let prefix = IpNet::new(destination, header.destination_prefix_length).ok()?.trunc();
    Some((prefix, (u8::from(table != LOCAL_TABLE), metric), target))
}

/// The ways of a unicast route that vipgate can go: by interfaces that it polls, and not dead.
fn via(message: &RouteMessage, interfaces: &[InterfaceSpec]) -> RouteTarget {
    let number = |index: u32| interfaces.iter().find(|i| i.ifindex == index && index != 0).map(|i| i.id);
    let mut hops = Vec::new();
    let mut interface = None;
    let mut own_gateway = None;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => interface = number(*index),
            RouteAttribute::Gateway(address) => own_gateway = ip(address),
            RouteAttribute::MultiPath(ways) => {
                for way in ways.iter().filter(|way| !way.flags.contains(RouteNextHopFlags::Dead)) {
                    hops.extend(hop(number(way.interface_index), gateway(&way.attributes)));
                }
            }
            _ => {}
        }
    }
    if !message.header.flags.contains(RouteFlags::Dead) {
        hops.extend(hop(interface, own_gateway));
    }
    if hops.is_empty() { RouteTarget::Unreachable } else { RouteTarget::Via(hops) }
}

fn hop(interface: Option<InterfaceId>, gateway: Option<IpAddr>) -> Option<HopSpec> {
    interface.map(|interface| HopSpec { interface, gateway })
}

fn gateway(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        _ => None,
    })
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}
