//! One advertised route, and the netlink requests that add, remove and list such routes.

use std::collections::BTreeSet;
use std::net::IpAddr;

use vipgate_netlink::packet_route::route::{RouteAttribute, RouteMessage, RouteScope, RouteType};
use vipgate_netlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use vipgate_netlink::{PROTOCOL, Route};

use super::RouteTable;

/// linux/ipv6_route.h: the default metric of an IPv6 route (`IP6_RT_PRIO_USER`).
const V6_DEFAULT_METRIC: u32 = 1024;

/// An advertised route, by the fields that identify it in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AdvertisedRoute {
    table: u32,
    metric: u32,
    /// The VIP.
    pub(super) address: IpAddr,
}

impl AdvertisedRoute {
    /// The route for a VIP.
    pub(super) fn new(table: RouteTable, address: IpAddr) -> Self {
        let default = if address.is_ipv4() { 0 } else { V6_DEFAULT_METRIC };
        Self { table: table.table, metric: table.metric.unwrap_or(default), address }
    }

    /// The dumped route, if vipgate has installed it.
    pub(super) fn from_route(route: &Route) -> Option<Self> {
        let is_ours = route.protocol == PROTOCOL && route.prefix.prefix_len() == route.prefix.max_prefix_len();
        is_ours.then_some(Self { table: route.table, metric: route.metric, address: route.prefix.addr() })
    }

    /// Whether it is in this table.
    pub(super) fn is_in(&self, table: u32) -> bool {
        self.table == table
    }

    /// RTM_NEWROUTE: installs it.
    pub(super) fn add_request(self) -> RouteNetlinkMessage {
        let mut message = self.message();
        message.header.kind = RouteType::BlackHole;
        RouteNetlinkMessage::NewRoute(message)
    }

    /// RTM_DELROUTE: removes it, whatever its type.
    pub(super) fn remove_request(self) -> RouteNetlinkMessage {
        let mut message = self.message();
        message.header.scope = RouteScope::NoWhere;
        RouteNetlinkMessage::DelRoute(message)
    }

    fn message(self) -> RouteMessage {
        let mut message = base_message(self.address.is_ipv4(), Some(self.table));
        message.header.destination_prefix_length = if self.address.is_ipv4() { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(self.address.into()));
        if self.metric != 0 {
            message.attributes.push(RouteAttribute::Priority(self.metric));
        }
        message
    }
}

/// RTM_GETROUTE: lists vipgate's routes of one family, and of one table if given. Linux 4.20 and later filter in the
/// kernel.
pub(super) fn dump_request(v4: bool, table: Option<u32>) -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetRoute(base_message(v4, table))
}

fn base_message(v4: bool, table: Option<u32>) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.protocol = PROTOCOL.into();
    if let Some(table) = table {
        // The header field has 8 bits.
        message.header.table = u8::try_from(table).unwrap_or(0);
        message.attributes.push(RouteAttribute::Table(table));
    }
    message
}

/// The routes to remove and the routes to add.
pub(super) fn difference(
    desired: &BTreeSet<AdvertisedRoute>,
    installed: &BTreeSet<AdvertisedRoute>,
) -> (Vec<AdvertisedRoute>, Vec<AdvertisedRoute>) {
    (installed.difference(desired).copied().collect(), desired.difference(installed).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: RouteTable = RouteTable { table: 179, metric: None };

    fn entries(addresses: &[&str]) -> BTreeSet<AdvertisedRoute> {
        addresses.iter().map(|address| AdvertisedRoute::new(TABLE, address.parse().unwrap())).collect()
    }

    #[test]
    fn one_change_is_one_request() {
        let installed = entries(&["192.0.2.1", "192.0.2.2", "2001:db8::1"]);
        let desired = entries(&["192.0.2.2", "2001:db8::1", "2001:db8::2"]);
        let (removed, added) = difference(&desired, &installed);
        assert_eq!((removed, added), (vec![entry("192.0.2.1")], vec![entry("2001:db8::2")]));
        assert_eq!(difference(&desired, &desired), (vec![], vec![]));
    }

    fn entry(address: &str) -> AdvertisedRoute {
        AdvertisedRoute::new(TABLE, address.parse().unwrap())
    }

    #[test]
    fn another_table_or_metric_is_another_route() {
        let desired =
            [AdvertisedRoute::new(RouteTable { table: 254, metric: Some(7) }, "192.0.2.1".parse().unwrap())].into();
        let (removed, added) = difference(&desired, &entries(&["192.0.2.1"]));
        assert_eq!((removed.len(), added.len()), (1, 1));
    }

    #[test]
    fn other_protocols_and_network_prefixes_are_ignored() {
        let route = Route {
            table: 179,
            prefix: "2001:db8::1/128".parse().unwrap(),
            metric: V6_DEFAULT_METRIC,
            kind: libc::RTN_BLACKHOLE,
            protocol: PROTOCOL,
            next_hops: Vec::new(),
            nexthop_id: None,
        };
        let from_route = AdvertisedRoute::from_route;
        assert_eq!(from_route(&route), Some(entry("2001:db8::1")));
        assert_eq!(from_route(&Route { protocol: libc::RTPROT_STATIC, ..route.clone() }), None);
        assert_eq!(from_route(&Route { prefix: "2001:db8::/64".parse().unwrap(), ..route }), None);
    }
}
