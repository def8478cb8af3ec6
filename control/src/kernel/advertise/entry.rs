//! One route of ours: what is wanted, what stands in the kernel, and the orders that make one of the other.

use std::collections::BTreeSet;
use std::net::IpAddr;

use rtnetlink::packet_route::route::{RouteAttribute, RouteMessage, RouteScope, RouteType};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use super::super::message::{Event, OURS};
use super::Place;

/// linux/ipv6_route.h: what the kernel makes of an IPv6 route without a metric (`IP6_RT_PRIO_USER`).
const V6_METRIC: u32 = 1024;

/// A route of ours, as the kernel tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    table: u32,
    metric: u32,
    /// The VIP.
    pub(super) address: IpAddr,
}

impl Entry {
    /// The route for a VIP.
    pub(super) fn new(place: Place, address: IpAddr) -> Self {
        let unset = if address.is_ipv4() { 0 } else { V6_METRIC };
        Self { table: place.table, metric: place.metric.unwrap_or(unset), address }
    }

    /// The route of a dump, if it is one of ours.
    pub(super) fn of(event: &Event) -> Option<Self> {
        match event {
            Event::Route(_, route)
                if route.protocol == OURS && route.prefix.prefix_len() == route.prefix.max_prefix_len() =>
            {
                Some(Self { table: route.table, metric: route.metric, address: route.prefix.addr() })
            }
            Event::Route(..) | Event::Link(..) | Event::Address(..) | Event::NextHop(..) | Event::Neighbour(..) => None,
        }
    }

    /// Whether it stands in this table.
    pub(super) fn is_in(&self, table: u32) -> bool {
        self.table == table
    }

    /// "Have it."
    pub(super) fn add(self) -> RouteNetlinkMessage {
        let mut message = self.message();
        message.header.kind = RouteType::BlackHole;
        RouteNetlinkMessage::NewRoute(message)
    }

    /// "Have it no longer", of whatever type it is.
    pub(super) fn remove(self) -> RouteNetlinkMessage {
        let mut message = self.message();
        message.header.scope = RouteScope::NoWhere;
        RouteNetlinkMessage::DelRoute(message)
    }

    fn message(self) -> RouteMessage {
        let mut message = question(self.address.is_ipv4(), Some(self.table));
        message.header.destination_prefix_length = if self.address.is_ipv4() { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(self.address.into()));
        if self.metric != 0 {
            message.attributes.push(RouteAttribute::Priority(self.metric));
        }
        message
    }
}

/// "Which routes of ours are there", of one family and perhaps of one table. The kernel leaves out all others where it can
/// (Linux 4.20).
pub(super) fn list(v4: bool, table: Option<u32>) -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetRoute(question(v4, table))
}

fn question(v4: bool, table: Option<u32>) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.protocol = OURS.into();
    if let Some(table) = table {
        // The header has room for small numbers only.
        message.header.table = u8::try_from(table).unwrap_or(0);
        message.attributes.push(RouteAttribute::Table(table));
    }
    message
}

/// What must go and what must come, in this order.
pub(super) fn difference(wanted: &BTreeSet<Entry>, there: &BTreeSet<Entry>) -> (Vec<Entry>, Vec<Entry>) {
    (there.difference(wanted).copied().collect(), wanted.difference(there).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::super::super::message::{Change, Route};
    use super::*;

    const PLACE: Place = Place { table: 179, metric: None };

    fn entries(addresses: &[&str]) -> BTreeSet<Entry> {
        addresses.iter().map(|address| Entry::new(PLACE, address.parse().unwrap())).collect()
    }

    #[test]
    fn one_change_is_one_order() {
        let there = entries(&["192.0.2.1", "192.0.2.2", "2001:db8::1"]);
        let wanted = entries(&["192.0.2.2", "2001:db8::1", "2001:db8::2"]);
        let (less, more) = difference(&wanted, &there);
        assert_eq!((less, more), (vec![entry("192.0.2.1")], vec![entry("2001:db8::2")]));
        assert_eq!(difference(&wanted, &wanted), (vec![], vec![]));
    }

    fn entry(address: &str) -> Entry {
        Entry::new(PLACE, address.parse().unwrap())
    }

    #[test]
    fn another_table_or_metric_is_another_route() {
        let wanted = [Entry::new(Place { table: 254, metric: Some(7) }, "192.0.2.1".parse().unwrap())].into();
        let (less, more) = difference(&wanted, &entries(&["192.0.2.1"]));
        assert_eq!((less.len(), more.len()), (1, 1));
    }

    #[test]
    fn routes_of_others_and_routes_to_networks_are_not_ours() {
        let route = Route {
            table: 179,
            prefix: "2001:db8::1/128".parse().unwrap(),
            metric: V6_METRIC,
            kind: libc::RTN_BLACKHOLE,
            protocol: OURS,
            hops: Vec::new(),
            object: None,
        };
        let of = |route| Entry::of(&Event::Route(Change::New, route));
        assert_eq!(of(route.clone()), Some(entry("2001:db8::1")));
        assert_eq!(of(Route { protocol: libc::RTPROT_STATIC, ..route.clone() }), None);
        assert_eq!(of(Route { prefix: "2001:db8::/64".parse().unwrap(), ..route }), None);
    }
}
