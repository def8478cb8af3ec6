//! Decoders of rtnetlink messages: what follows netlink's header.
//!
//! Only the needed attributes are decoded, so additions of newer kernels can't make a message unreadable. A malformed
//! message is an error; an unused type of message or route is `None`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::DecodeError;
use netlink_packet_route::address::AddressHeader;
use netlink_packet_route::link::LinkHeader;
use netlink_packet_route::neighbour::NeighbourHeader;
use netlink_packet_route::route::RouteHeader;

use super::{Address, Link, Neighbor, NextHop, NextHopObject, NextHopObjectTarget, Route};
use crate::message::attributes;

// linux/rtnetlink.h, linux/nexthop.h and linux/neighbour.h; not in the libc crate.
pub(crate) const RTM_NEWNEXTHOP: u16 = 104;
pub(crate) const RTM_DELNEXTHOP: u16 = 105;
pub(crate) const RTM_GETNEXTHOP: u16 = 106;
const RTA_NH_ID: u16 = 30;
const RTNH_F_DEAD: u32 = 1;
const NHA_ID: u16 = 1;
const NHA_GROUP: u16 = 2;
const NHA_BLACKHOLE: u16 = 4;
const NHA_OIF: u16 = 5;
const NHA_GATEWAY: u16 = 6;
const NHA_ENCAP: u16 = 8;
const NDA_PROTOCOL: u16 = 12;
const NDA_FLAGS_EXT: u16 = 15;
// linux/if_link.h.
const IFLA_VXLAN_PORT: u16 = 15;
const IFLA_VXLAN_COLLECT_METADATA: u16 = 25;

const IPV4: u8 = 2;
const IPV6: u8 = 10;

// Lengths of the fixed parts: ifinfomsg, ifaddrmsg, rtmsg, rtnexthop, nhmsg, nexthop_grp, ndmsg.
const LINK_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
const ROUTE_HEADER: usize = 12;
const ROUTE_HOP_HEADER: usize = 8;
const NEXTHOP_HEADER: usize = 8;
const NEXTHOP_MEMBER: usize = 8;
const NEIGHBOR_HEADER: usize = 12;

pub(crate) fn link(body: &[u8]) -> Result<Option<Link>, DecodeError> {
    let header = LinkHeader::parse(body)?;
    if u8::from(header.interface_family) != 0 {
        // AF_BRIDGE messages describe bridge ports; the device itself hasn't changed.
        return Ok(None);
    }
    let mut link = Link {
        ifindex: header.index,
        name: String::new(),
        hardware_type: header.link_layer_type.into(),
        flags: header.flags.bits(),
        mac: None,
        mtu: 0,
        master: None,
        is_virtual: false,
        metadata_vxlan_port: None,
    };
    for attribute in attributes(body, LINK_HEADER)? {
        let (kind, value) = attribute?;
        match kind {
            libc::IFLA_IFNAME => String::from_utf8_lossy(value).trim_end_matches('\0').clone_into(&mut link.name),
            libc::IFLA_ADDRESS => link.mac = value.try_into().ok(),
            libc::IFLA_MTU => link.mtu = number(value)?,
            libc::IFLA_MASTER => link.master = Some(number(value)?),
            libc::IFLA_LINKINFO => {
                let info = |wanted| {
                    let mut infos = attributes(value, 0).ok()?.flatten();
                    infos.find_map(|(kind, value)| (kind == wanted).then_some(value))
                };
                // The type of a device; a NIC has none.
                let kind = info(libc::IFLA_INFO_KIND);
                link.is_virtual = kind.is_some();
                if kind.is_some_and(|kind| kind.starts_with(b"vxlan")) {
                    link.metadata_vxlan_port = info(libc::IFLA_INFO_DATA).and_then(metadata_vxlan_port);
                }
            }
            _ => {}
        }
    }
    Ok(Some(link))
}

fn metadata_vxlan_port(data: &[u8]) -> Option<u16> {
    let (mut port, mut collects_metadata) = (None, false);
    for (kind, value) in attributes(data, 0).ok()?.flatten() {
        match kind {
            IFLA_VXLAN_PORT => port = value.try_into().ok().map(u16::from_be_bytes),
            IFLA_VXLAN_COLLECT_METADATA => collects_metadata = value.first() == Some(&1),
            _ => {}
        }
    }
    port.filter(|_| collects_metadata)
}

pub(crate) fn address(body: &[u8]) -> Result<Option<Address>, DecodeError> {
    let header = AddressHeader::parse(body)?;
    let mut flags = u32::from(header.flags.bits());
    let (mut local, mut peer) = (None, None);
    for attribute in attributes(body, ADDRESS_HEADER)? {
        let (kind, value) = attribute?;
        match kind {
            libc::IFA_LOCAL => local = ip(value),
            libc::IFA_ADDRESS => peer = ip(value),
            libc::IFA_FLAGS => flags = number(value)?,
            _ => {}
        }
    }
    // On a point-to-point link IFA_ADDRESS is the remote address; IPv6 has only IFA_ADDRESS otherwise.
    Ok(local.or(peer).map(|address| Address {
        ifindex: header.index,
        v6: address.is_ipv6(),
        secondary: flags & libc::IFA_F_SECONDARY != 0 && address.is_ipv4(),
        scope: header.scope.into(),
        ip: address,
        usable: flags & (libc::IFA_F_TENTATIVE | libc::IFA_F_DADFAILED) == 0,
    }))
}

pub(crate) fn route(body: &[u8]) -> Result<Option<Route>, DecodeError> {
    let header = RouteHeader::parse(body)?;
    let family = u8::from(header.address_family);
    let unspecified: IpAddr = match family {
        IPV4 => Ipv4Addr::UNSPECIFIED.into(),
        IPV6 => Ipv6Addr::UNSPECIFIED.into(),
        _ => return Ok(None),
    };
    // Ignored: cached routes, source-specific routes and type of service.
    if header.flags.bits() & libc::RTM_F_CLONED != 0 || header.source_prefix_length != 0 || header.tos != 0 {
        return Ok(None);
    }
    let mut destination = unspecified;
    let mut route = Route {
        table: header.table.into(),
        prefix: IpNet::from(unspecified),
        metric: 0,
        kind: header.kind.into(),
        protocol: header.protocol.into(),
        next_hops: Vec::new(),
        nexthop_id: None,
    };
    let mut single = NextHop { ifindex: 0, gateway: None, dead: is_dead(header.flags.bits()), encapsulated: false };
    for attribute in attributes(body, ROUTE_HEADER)? {
        let (kind, value) = attribute?;
        match kind {
            libc::RTA_DST => destination = ip(value).ok_or_else(|| invalid("RTA_DST"))?,
            libc::RTA_TABLE => route.table = number(value)?,
            libc::RTA_PRIORITY => route.metric = number(value)?,
            libc::RTA_MULTIPATH => route.next_hops = hops(value)?,
            RTA_NH_ID => route.nexthop_id = Some(number(value)?),
            _ => hop_attribute(&mut single, kind, value)?,
        }
    }
    if route.next_hops.is_empty() && single.ifindex != 0 {
        route.next_hops.push(single);
    }
    let length = header.destination_prefix_length;
    route.prefix = IpNet::new(destination, length).map_err(|_| invalid("prefix length"))?.trunc();
    Ok(Some(route))
}

/// The next hops of a multipath route.
fn hops(mut value: &[u8]) -> Result<Vec<NextHop>, DecodeError> {
    let mut hops = Vec::new();
    while value.len() >= ROUTE_HOP_HEADER {
        let length = usize::from(u16::from_ne_bytes([value[0], value[1]]));
        let body = value.get(..length).filter(|body| body.len() >= ROUTE_HOP_HEADER);
        let body = body.ok_or_else(|| invalid("length of a next hop"))?;
        let mut hop = NextHop {
            ifindex: number(&body[4..8])?,
            gateway: None,
            dead: is_dead(u32::from(body[2])),
            encapsulated: false,
        };
        for attribute in attributes(body, ROUTE_HOP_HEADER)? {
            let (kind, value) = attribute?;
            hop_attribute(&mut hop, kind, value)?;
        }
        hops.push(hop);
        value = value.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(hops)
}

fn hop_attribute(hop: &mut NextHop, kind: u16, value: &[u8]) -> Result<(), DecodeError> {
    match kind {
        libc::RTA_OIF => hop.ifindex = number(value)?,
        libc::RTA_GATEWAY => hop.gateway = ip(value),
        // struct rtvia: a two-byte address family precedes the address.
        libc::RTA_VIA => hop.gateway = value.get(2..).and_then(ip),
        libc::RTA_ENCAP => hop.encapsulated = true,
        _ => {}
    }
    Ok(())
}

pub(crate) fn next_hop(body: &[u8]) -> Result<NextHopObject, DecodeError> {
    let flags = body.get(4..NEXTHOP_HEADER).ok_or_else(|| invalid("length of a next-hop message"))?;
    let mut hop = NextHop { ifindex: 0, gateway: None, dead: is_dead(number(flags)?), encapsulated: false };
    let mut id = None;
    let mut target = None;
    for attribute in attributes(body, NEXTHOP_HEADER)? {
        let (kind, value) = attribute?;
        match kind {
            NHA_ID => id = Some(number(value)?),
            NHA_GROUP => {
                let members = value.chunks_exact(NEXTHOP_MEMBER).map(|member| number(&member[..4]));
                target = Some(NextHopObjectTarget::Group(members.collect::<Result<_, _>>()?));
            }
            NHA_BLACKHOLE => target = Some(NextHopObjectTarget::Blackhole),
            NHA_OIF => hop.ifindex = number(value)?,
            NHA_GATEWAY => hop.gateway = ip(value),
            NHA_ENCAP => hop.encapsulated = true,
            _ => {}
        }
    }
    let id = id.ok_or_else(|| invalid("nexthop object: no id"))?;
    Ok(NextHopObject { id, target: target.unwrap_or(NextHopObjectTarget::Single(hop)) })
}

pub(crate) fn neighbor(body: &[u8]) -> Result<Option<Neighbor>, DecodeError> {
    let header = NeighbourHeader::parse(body)?;
    if !matches!(u8::from(header.family), IPV4 | IPV6) {
        // Bridge FDB entries are sent to the same multicast group.
        return Ok(None);
    }
    let mut address = None;
    let mut neighbor = Neighbor {
        ifindex: header.ifindex,
        address: Ipv4Addr::UNSPECIFIED.into(),
        state: header.state.into(),
        flags: header.flags.bits(),
        ext_flags: 0,
        protocol: 0,
        mac: None,
    };
    for attribute in attributes(body, NEIGHBOR_HEADER)? {
        let (kind, value) = attribute?;
        match kind {
            libc::NDA_DST => address = ip(value),
            libc::NDA_LLADDR => neighbor.mac = value.try_into().ok(),
            NDA_FLAGS_EXT => neighbor.ext_flags = number(value)?,
            NDA_PROTOCOL => neighbor.protocol = value.first().copied().unwrap_or(0),
            _ => {}
        }
    }
    Ok(address.map(|address| Neighbor { address, ..neighbor }))
}

fn is_dead(flags: u32) -> bool {
    flags & RTNH_F_DEAD != 0
}

/// A four-byte attribute in host byte order.
fn number(value: &[u8]) -> Result<u32, DecodeError> {
    value.try_into().map(u32::from_ne_bytes).map_err(|_| invalid("length of a number"))
}

/// An IPv4 or IPv6 address, by length.
fn ip(value: &[u8]) -> Option<IpAddr> {
    if let Ok(octets) = <[u8; 4]>::try_from(value) {
        return Some(octets.into());
    }
    <[u8; 16]>::try_from(value).ok().map(Into::into)
}

fn invalid(what: &str) -> DecodeError {
    format!("invalid {what}").into()
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
