//! Routes into tunnels: a table for each gateway, with a default route that says where the tunnel ends (lightweight
//! tunnel encapsulation), and one for held packets.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use vipgate_netlink::packet_route::route::{
    RouteAttribute, RouteFlags, RouteIp6Tunnel, RouteIpTunnel, RouteLwEnCapType, RouteLwTunnelEncap, RouteMessage,
    RouteType,
};
use vipgate_netlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use vipgate_netlink::{Client, FAMILIES, NLM_F_CREATE, NLM_F_REPLACE, PROTOCOL};

use crate::error::{NodeError, is_errno};
use crate::policy::TunnelEndpoint;
use crate::tunnel::{NEXT_HOP_V4, NEXT_HOP_V6};

/// TTL of the outer header.
const TTL: u8 = 64;

/// The default route of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Route {
    table: u32,
    is_ipv6: bool,
    device: u32,
    /// Into the tunnel with these addresses.
    tunnel: Option<Tunnel>,
}

/// The outer header of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tunnel {
    vni: u32,
    source: IpAddr,
    destination: IpAddr,
}

impl Route {
    /// The routes of both families into the tunnel to a gateway.
    pub(super) fn into_tunnel(table: u32, device: u32, own: TunnelEndpoint, destination: IpAddr) -> [Self; 2] {
        let tunnel = Some(Tunnel { vni: own.vni, source: own.address.ip(), destination });
        [false, true].map(|is_ipv6| Self { table, is_ipv6, device, tunnel })
    }

    /// The routes of held packets.
    pub(super) fn to_hold(table: u32, device: u32) -> [Self; 2] {
        [false, true].map(|is_ipv6| Self { table, is_ipv6, device, tunnel: None })
    }

    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = if self.is_ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        message.header.protocol = PROTOCOL.into();
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![RouteAttribute::Table(self.table), RouteAttribute::Oif(self.device)];
        if let Some(tunnel) = self.tunnel {
            let gateway: IpAddr = if self.is_ipv6 { NEXT_HOP_V6.into() } else { NEXT_HOP_V4.into() };
            message.header.flags = RouteFlags::Onlink;
            message.attributes.push(RouteAttribute::Gateway(gateway.into()));
            message.attributes.extend(tunnel.encapsulation());
        }
        message
    }

    /// A route as the kernel lists it; `None`: none that could be ours.
    fn parse(message: &RouteMessage) -> Option<Self> {
        let is_ipv6 = message.header.address_family == AddressFamily::Inet6;
        let (mut table, mut device) = (u32::from(message.header.table), None);
        let (mut vni, mut source, mut destination, mut is_tunnel) = (0, None, None, false);
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Table(number) => table = *number,
                RouteAttribute::Oif(index) => device = Some(*index),
                RouteAttribute::Encap(list) => {
                    is_tunnel = true;
                    for encap in list {
                        match encap {
                            RouteLwTunnelEncap::Ip(RouteIpTunnel::Id(id))
                            | RouteLwTunnelEncap::Ip6(RouteIp6Tunnel::Id(id)) => {
                                vni = *id as u32;
                            }
                            RouteLwTunnelEncap::Ip(RouteIpTunnel::Source(v4)) => source = Some((*v4).into()),
                            RouteLwTunnelEncap::Ip(RouteIpTunnel::Destination(v4)) => destination = Some((*v4).into()),
                            RouteLwTunnelEncap::Ip6(RouteIp6Tunnel::Source(v6)) => source = Some((*v6).into()),
                            RouteLwTunnelEncap::Ip6(RouteIp6Tunnel::Destination(v6)) => {
                                destination = Some((*v6).into());
                            }
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        let tunnel = if is_tunnel { Some(Tunnel { vni, source: source?, destination: destination? }) } else { None };
        (message.header.destination_prefix_length == 0).then_some(Self { table, is_ipv6, device: device?, tunnel })
    }
}

impl Tunnel {
    fn encapsulation(&self) -> Vec<RouteAttribute> {
        let id = self.vni.into();
        let (kind, header) = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let header = [
                    RouteIpTunnel::Id(id),
                    RouteIpTunnel::Destination(destination),
                    RouteIpTunnel::Source(source),
                    RouteIpTunnel::Ttl(TTL),
                ];
                (RouteLwEnCapType::Ip, header.map(RouteLwTunnelEncap::Ip))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let header = [
                    RouteIp6Tunnel::Id(id),
                    RouteIp6Tunnel::Destination(destination),
                    RouteIp6Tunnel::Source(source),
                    RouteIp6Tunnel::Hoplimit(TTL),
                ];
                (RouteLwEnCapType::Ip6, header.map(RouteLwTunnelEncap::Ip6))
            }
            // A plan has no such tunnel: `Fault::IncompatibleEndpoint`.
            _ => return Vec::new(),
        };
        vec![RouteAttribute::EncapType(kind), RouteAttribute::Encap(header.into())]
    }
}

/// Adds, replaces and removes routes until exactly these are in the tables; how many.
pub(super) async fn ensure(
    client: &mut Client,
    desired: &BTreeSet<Route>,
    tables: &RangeInclusive<u32>,
) -> Result<usize, NodeError> {
    let (mut missing, mut stale) = (desired.clone(), Vec::new());
    for family in FAMILIES {
        let routes = client.own_routes(family).await.map_err(NodeError::of("listing routes"))?;
        for message in routes.into_iter().filter(|message| tables.contains(&table_of(message))) {
            if !Route::parse(&message).is_some_and(|route| missing.remove(&route)) {
                stale.push(message);
            }
        }
    }
    let mut changed = missing.len() + stale.len();
    // A table never is without a route if it has one before and after.
    for route in &missing {
        match client.set(RouteNetlinkMessage::NewRoute(route.message()), NLM_F_CREATE | NLM_F_REPLACE).await {
            // IPv6 is disabled.
            Err(error) if route.is_ipv6 && (is_errno(&error, libc::EACCES) || is_errno(&error, libc::ENODEV)) => {
                changed -= 1;
            }
            result => result.map_err(NodeError::of(format!("adding {route:?}")))?,
        }
    }
    for message in stale {
        let is_replaced = Route::parse(&message).is_some_and(|old| {
            !old.is_ipv6 && desired.iter().any(|new| new.table == old.table && new.is_ipv6 == old.is_ipv6)
        });
        if is_replaced {
            continue;
        }
        match client.set(RouteNetlinkMessage::DelRoute(message), 0).await {
            Err(error) if is_errno(&error, libc::ESRCH) => {}
            result => result.map_err(NodeError::of("removing a route"))?,
        }
    }
    Ok(changed)
}

fn table_of(message: &RouteMessage) -> u32 {
    let attribute = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(number) => Some(*number),
        _ => None,
    });
    attribute.unwrap_or(u32::from(message.header.table))
}
