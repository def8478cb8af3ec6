//! The routing tables main and local with all metrics, and the route that the kernel would select for each prefix.
//!
//! Not supported: policy rules (`ip rule`) and other tables, source-specific routes, type of service, and weights of
//! next hops (all are equal). Ignored: routes that vipgate advertises by BGP, and link-local and multicast
//! destinations, which aren't forwarded to.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{HopSpec, RouteSpec, RouteTarget};
use vipgate_netlink::{Change, NextHop, PROTOCOL, Route};

use super::links::{Effect, Links};
use crate::kernel::nexthop_objects::NextHopObjects;

/// The routes of one table by prefix, in the kernel's order of preference.
type Table = BTreeMap<IpNet, Vec<Route>>;

/// The routes of both tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Routes {
    local: Table,
    main: Table,
}

impl Routes {
    /// Adds a route of a dump. The kernel dumps routes of one prefix and metric in its order of preference.
    pub(super) fn load(&mut self, route: Route) {
        if let Some(routes) = self.table(&route) {
            insert_last(routes.entry(route.prefix).or_default(), route);
        }
    }

    /// Applies a route event.
    ///
    /// If a message is ambiguous, the likely result is assumed and the routes are marked as stale.
    pub(super) fn apply(&mut self, change: Change, route: Route) -> Effect {
        let prefix = route.prefix;
        let Some(table) = self.table(&route) else { return Effect::default() };
        let routes = table.entry(prefix).or_default();
        let effect = match change {
            Change::New => add(routes, route),
            Change::Replaced => replace(routes, route),
            Change::Removed => remove(routes, &route),
        };
        if routes.is_empty() {
            table.remove(&prefix);
        }
        effect
    }

    fn table(&mut self, route: &Route) -> Option<&mut Table> {
        let link_local = match route.prefix {
            IpNet::V4(_) => false,
            IpNet::V6(prefix) => prefix.addr().is_unicast_link_local() && route.kind == libc::RTN_UNICAST,
        };
        // Routes of vipgate exist only for a BGP daemon, in whichever table it reads; no packet is routed by them.
        if route.protocol == PROTOCOL || link_local || matches!(route.kind, libc::RTN_MULTICAST | libc::RTN_UNSPEC) {
            return None;
        }
        match route.table {
            table if table == u32::from(libc::RT_TABLE_LOCAL) => Some(&mut self.local),
            table if table == u32::from(libc::RT_TABLE_MAIN) => Some(&mut self.main),
            _ => None,
        }
    }

    /// The routes for the engine: one per prefix, sorted.
    pub(super) fn spec(&self, links: &Links, objects: &NextHopObjects) -> Vec<RouteSpec> {
        // The kernel looks up the local table first: its routes take precedence over longer prefixes in main.
        let local: Vec<RouteSpec> = selected(&self.local, links, objects).collect();
        let prefixes: HashSet<IpNet> = local.iter().map(|route| route.prefix).collect();
        let lengths: HashSet<u8> = prefixes.iter().map(IpNet::prefix_len).collect();
        let is_covered = |prefix: IpNet| {
            let shorter = lengths.iter().filter(|length| **length <= prefix.prefix_len());
            shorter
                .filter_map(|length| IpNet::new(prefix.addr(), *length).ok())
                .any(|net| prefixes.contains(&net.trunc()))
        };
        let mut routes: Vec<RouteSpec> =
            selected(&self.main, links, objects).filter(|route| !is_covered(route.prefix)).collect();
        routes.extend(local);
        routes.sort_by_key(|route| route.prefix);
        routes
    }

    /// All addresses local to the node, including broadcast and anycast addresses, sorted. Without loopback addresses,
    /// which aren't valid on a wire.
    pub(super) fn local_addresses(&self) -> Vec<IpAddr> {
        let is_local = |route: &Route| matches!(route.kind, libc::RTN_LOCAL | libc::RTN_BROADCAST | libc::RTN_ANYCAST);
        let single = |prefix: &IpNet| prefix.prefix_len() == prefix.max_prefix_len() && !prefix.addr().is_loopback();
        let routes = self.local.iter().filter(|(prefix, routes)| single(prefix) && routes.iter().any(is_local));
        let loopback_net = |address: &IpAddr| matches!(address, IpAddr::V4(address) if address.octets()[0] == 127);
        let mut locals: Vec<IpAddr> = routes.map(|(prefix, _)| prefix.addr()).filter(|a| !loopback_net(a)).collect();
        locals.sort_unstable();
        locals
    }
}

/// The route that the kernel selects for each prefix.
fn selected<'a>(
    table: &'a Table,
    links: &'a Links,
    objects: &'a NextHopObjects,
) -> impl Iterator<Item = RouteSpec> + 'a {
    table.iter().filter_map(move |(prefix, routes)| {
        let target = routes.iter().find_map(|route| target(route, links, objects))?;
        Some(RouteSpec { prefix: *prefix, target })
    })
}

/// The target of a route; `None`: all its next hops are dead, so the kernel skips it.
fn target(route: &Route, links: &Links, objects: &NextHopObjects) -> Option<RouteTarget> {
    match route.kind {
        libc::RTN_LOCAL | libc::RTN_BROADCAST | libc::RTN_ANYCAST => Some(RouteTarget::Local),
        libc::RTN_UNICAST => {
            // The kernel lists a group's next hops in the route too, unless net.ipv4.nexthop_compat_mode is 0.
            let object = route.nexthop_id.and_then(|id| objects.resolve(id));
            if object.as_ref().is_some_and(Vec::is_empty) {
                return Some(RouteTarget::Unreachable);
            }
            let hops = object.as_ref().unwrap_or(&route.next_hops);
            if hops.iter().all(|hop| hop.dead) {
                return None;
            }
            let mut via: Vec<HopSpec> = hops.iter().filter_map(|hop| usable(hop, links)).collect();
            // The kernel's order of next hops varies; hash-based selection must not depend on it.
            via.sort_by_key(|hop| (hop.interface, hop.gateway));
            Some(if via.is_empty() { RouteTarget::Unreachable } else { RouteTarget::Via(via) })
        }
        // Blackhole, unreachable, prohibit; and throw, since no table is looked up after main.
        _ => Some(RouteTarget::Unreachable),
    }
}

/// The next hop, if vipgate can send to it.
fn usable(hop: &NextHop, links: &Links) -> Option<HopSpec> {
    let interface: InterfaceId = links.interface_id(hop.ifindex)?;
    (!hop.dead && !hop.encapsulated).then_some(HopSpec { interface, gateway: hop.gateway })
}

fn add(routes: &mut Vec<Route>, route: Route) -> Effect {
    let known = routes.iter_mut().find(|known| known.metric == route.metric && is_same(known, &route));
    if let Some(known) = known {
        let changed = *known != route;
        *known = route;
        return Effect { changed, routes_stale: false };
    }
    // IPv6 adds next hops to a route one by one, and each notification has the whole route.
    let grown = routes.iter_mut().find(|known| {
        let v6 = matches!(route.prefix, IpNet::V6(_));
        v6 && known.metric == route.metric && known.kind == route.kind && contains(&route.next_hops, &known.next_hops)
    });
    if let Some(known) = grown {
        *known = route;
        return Effect { changed: true, routes_stale: false };
    }
    // A second route of the same prefix and metric may come before or after the first one.
    let routes_stale = routes.iter().any(|known| known.metric == route.metric);
    insert_last(routes, route);
    Effect { changed: true, routes_stale }
}

fn replace(routes: &mut Vec<Route>, route: Route) -> Effect {
    let mut same_metric = routes.iter_mut().filter(|known| known.metric == route.metric);
    match (same_metric.next(), same_metric.next()) {
        (Some(known), None) => {
            let changed = *known != route;
            *known = route;
            Effect { changed, routes_stale: false }
        }
        (None, _) => {
            insert_last(routes, route);
            Effect { changed: true, routes_stale: false }
        }
        (Some(known), Some(_)) => {
            *known = route;
            Effect { changed: true, routes_stale: true }
        }
    }
}

fn remove(routes: &mut Vec<Route>, route: &Route) -> Effect {
    if let Some(index) = routes.iter().position(|known| known.metric == route.metric && is_same(known, route)) {
        routes.remove(index);
        return Effect { changed: true, routes_stale: false };
    }
    // IPv6 removes next hops one by one, and each notification has only the removed ones.
    let shrunk = routes.iter_mut().find(|known| {
        let v6 = matches!(route.prefix, IpNet::V6(_));
        v6 && known.metric == route.metric
            && !route.next_hops.is_empty()
            && contains(&known.next_hops, &route.next_hops)
    });
    if let Some(known) = shrunk {
        known.next_hops.retain(|hop| !route.next_hops.iter().any(|removed| removed.same_next_hop(hop)));
        return Effect { changed: true, routes_stale: false };
    }
    // An unknown route: the model is inconsistent with the kernel if it still has one with this metric.
    Effect { changed: false, routes_stale: routes.iter().any(|known| known.metric == route.metric) }
}

/// Inserts after all routes with the same or a lower metric.
fn insert_last(routes: &mut Vec<Route>, route: Route) {
    let index = routes.partition_point(|known| known.metric <= route.metric);
    routes.insert(index, route);
}

fn is_same(a: &Route, b: &Route) -> bool {
    a.kind == b.kind
        && a.nexthop_id == b.nexthop_id
        && (a.nexthop_id.is_some() || contains(&a.next_hops, &b.next_hops) && a.next_hops.len() == b.next_hops.len())
}

fn contains(all: &[NextHop], some: &[NextHop]) -> bool {
    some.iter().all(|hop| all.iter().any(|known| known.same_next_hop(hop)))
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;
