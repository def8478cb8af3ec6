//! Routes into tunnels: a table for each gateway, with a default route that says where the tunnel ends (lightweight
//! tunnel encapsulation), and one for held packets.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use futures::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::route::{
    RouteAttribute, RouteIp6Tunnel, RouteIpTunnel, RouteLwTunnelEncap, RouteMessage, RouteProtocol,
};
use rtnetlink::{Handle, RouteMessageBuilder};

use super::PROTOCOL;
use super::error::{KernelError, is_errno};
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
        let protocol = RouteProtocol::from(PROTOCOL);
        if self.is_ipv6 {
            let builder = RouteMessageBuilder::<Ipv6Addr>::new().table_id(self.table).protocol(protocol);
            let builder = builder.output_interface(self.device);
            match self.tunnel {
                Some(tunnel) => tunnel.encapsulate(builder.gateway(NEXT_HOP_V6).onlink()).build(),
                None => builder.build(),
            }
        } else {
            let builder = RouteMessageBuilder::<Ipv4Addr>::new().table_id(self.table).protocol(protocol);
            let builder = builder.output_interface(self.device);
            match self.tunnel {
                Some(tunnel) => tunnel.encapsulate(builder.gateway(NEXT_HOP_V4).onlink()).build(),
                None => builder.build(),
            }
        }
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
    fn encapsulate<T>(&self, builder: RouteMessageBuilder<T>) -> RouteMessageBuilder<T> {
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => builder.encap_ip(vec![
                RouteIpTunnel::Id(self.vni.into()),
                RouteIpTunnel::Destination(destination),
                RouteIpTunnel::Source(source),
                RouteIpTunnel::Ttl(TTL),
            ]),
            (IpAddr::V6(source), IpAddr::V6(destination)) => builder.encap_ip6(vec![
                RouteIp6Tunnel::Id(self.vni.into()),
                RouteIp6Tunnel::Destination(destination),
                RouteIp6Tunnel::Source(source),
                RouteIp6Tunnel::Hoplimit(TTL),
            ]),
            // A plan has no such tunnel: `Fault::IncompatibleEndpoint`.
            _ => builder,
        }
    }
}

/// Adds, replaces and removes routes until exactly these are in the tables; how many.
pub(super) async fn ensure(
    handle: &Handle,
    desired: &BTreeSet<Route>,
    tables: &RangeInclusive<u32>,
) -> Result<usize, KernelError> {
    let (mut missing, mut stale) = (desired.clone(), Vec::new());
    for is_ipv6 in [false, true] {
        let request = if is_ipv6 {
            RouteMessageBuilder::<Ipv6Addr>::new().build()
        } else {
            RouteMessageBuilder::<Ipv4Addr>::new().build()
        };
        let mut dump = handle.route().get(request).execute();
        while let Some(message) = dump.try_next().await.map_err(KernelError::request("listing routes"))? {
            if message.header.protocol != RouteProtocol::from(PROTOCOL) || !tables.contains(&table_of(&message)) {
                continue;
            }
            if !Route::parse(&message).is_some_and(|route| missing.remove(&route)) {
                stale.push(message);
            }
        }
    }
    let mut changed = missing.len() + stale.len();
    // A table never is without a route if it has one before and after.
    for route in &missing {
        match handle.route().add(route.message()).replace().execute().await {
            // IPv6 is disabled.
            Err(error) if route.is_ipv6 && (is_errno(&error, libc::EACCES) || is_errno(&error, libc::ENODEV)) => {
                changed -= 1;
            }
            result => result.map_err(KernelError::request(format!("adding {route:?}")))?,
        }
    }
    for message in stale {
        let is_replaced = Route::parse(&message).is_some_and(|old| {
            !old.is_ipv6 && desired.iter().any(|new| new.table == old.table && new.is_ipv6 == old.is_ipv6)
        });
        if is_replaced {
            continue;
        }
        match handle.route().del(message).execute().await {
            Err(error) if is_errno(&error, libc::ESRCH) => {}
            result => result.map_err(KernelError::request("removing a route"))?,
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
