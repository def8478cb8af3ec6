//! The routes of the tables main and local, all metrics, and what they mean for a packet: the kernel's own choice.
//!
//! Left out: policy rules (`ip rule`) and other tables, what vipgate itself gives routing daemons to announce, routes for
//! one source or one type of service, weights of next hops (all count alike), and routes to link-local and multicast
//! destinations, which nothing is forwarded to.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{HopSpec, RouteSpec, RouteTarget};

use super::links::{Effect, Links};
use super::message::{Change, Hop, OURS, Route};
use super::nexthops::NextHops;

/// Routes of one table: those of a prefix stand in the order in which the kernel would use them.
type Table = BTreeMap<IpNet, Vec<Route>>;

/// The routes of both tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Routes {
    local: Table,
    main: Table,
}

impl Routes {
    /// A route of a dump. The kernel lists routes of one prefix and metric in the order in which it uses them.
    pub(super) fn load(&mut self, route: Route) {
        if let Some(routes) = self.table(&route) {
            insert_last(routes.entry(route.prefix).or_default(), route);
        }
    }

    /// A route as it is now, or its end.
    ///
    /// Where a message leaves open what the kernel has now, the likely is assumed and the routes count as stale.
    pub(super) fn apply(&mut self, change: Change, route: Route) -> Effect {
        let prefix = route.prefix;
        let Some(table) = self.table(&route) else { return Effect::default() };
        let routes = table.entry(prefix).or_default();
        let effect = match change {
            Change::New => add(routes, route),
            Change::Replaced => replace(routes, route),
            Change::Gone => remove(routes, &route),
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
        // Ours lead nowhere: a routing daemon shall find them, in whatever table it looks, and no packet follow them.
        if route.protocol == OURS || link_local || matches!(route.kind, libc::RTN_MULTICAST | libc::RTN_UNSPEC) {
            return None;
        }
        match route.table {
            table if table == u32::from(libc::RT_TABLE_LOCAL) => Some(&mut self.local),
            table if table == u32::from(libc::RT_TABLE_MAIN) => Some(&mut self.main),
            _ => None,
        }
    }

    /// The routes, for the engine: one per prefix, sorted.
    pub(super) fn spec(&self, links: &Links, objects: &NextHops) -> Vec<RouteSpec> {
        // The kernel asks the table local first, whatever stands in main for a longer prefix.
        let local: Vec<RouteSpec> = best(&self.local, links, objects).collect();
        let covers: HashSet<IpNet> = local.iter().map(|route| route.prefix).collect();
        let lengths: HashSet<u8> = covers.iter().map(IpNet::prefix_len).collect();
        let is_covered = |prefix: IpNet| {
            let shorter = lengths.iter().filter(|length| **length <= prefix.prefix_len());
            shorter
                .filter_map(|length| IpNet::new(prefix.addr(), *length).ok())
                .any(|net| covers.contains(&net.trunc()))
        };
        let mut routes: Vec<RouteSpec> =
            best(&self.main, links, objects).filter(|route| !is_covered(route.prefix)).collect();
        routes.extend(local);
        routes.sort_by_key(|route| route.prefix);
        routes
    }

    /// Every single address that the node's own kernel answers for, broadcast addresses included, sorted.
    /// Without loopback addresses: on a wire they have no place.
    pub(super) fn locals(&self) -> Vec<IpAddr> {
        let is_local = |route: &Route| matches!(route.kind, libc::RTN_LOCAL | libc::RTN_BROADCAST | libc::RTN_ANYCAST);
        let single = |prefix: &IpNet| prefix.prefix_len() == prefix.max_prefix_len() && !prefix.addr().is_loopback();
        let routes = self.local.iter().filter(|(prefix, routes)| single(prefix) && routes.iter().any(is_local));
        let loopback_net = |address: &IpAddr| matches!(address, IpAddr::V4(address) if address.octets()[0] == 127);
        let mut locals: Vec<IpAddr> = routes.map(|(prefix, _)| prefix.addr()).filter(|a| !loopback_net(a)).collect();
        locals.sort_unstable();
        locals
    }
}

/// The route of each prefix that the kernel would use.
fn best<'a>(table: &'a Table, links: &'a Links, objects: &'a NextHops) -> impl Iterator<Item = RouteSpec> + 'a {
    table.iter().filter_map(move |(prefix, routes)| {
        let target = routes.iter().find_map(|route| target(route, links, objects))?;
        Some(RouteSpec { prefix: *prefix, target })
    })
}

/// Where a route leads; `None`: its next hops are dead, so the kernel would pass on to the next one.
fn target(route: &Route, links: &Links, objects: &NextHops) -> Option<RouteTarget> {
    match route.kind {
        libc::RTN_LOCAL | libc::RTN_BROADCAST | libc::RTN_ANYCAST => Some(RouteTarget::Local),
        libc::RTN_UNICAST => {
            // The kernel writes a group's hops into the route too, unless net.ipv4.nexthop_compat_mode is 0.
            let object = route.object.and_then(|id| objects.hops(id));
            if object.as_ref().is_some_and(Vec::is_empty) {
                return Some(RouteTarget::Unreachable);
            }
            let hops = object.as_ref().unwrap_or(&route.hops);
            if hops.iter().all(|hop| hop.dead) {
                return None;
            }
            let mut via: Vec<HopSpec> = hops.iter().filter_map(|hop| via(hop, links)).collect();
            // The kernel tells the hops of one route in changing order; which one a hash picks must not depend on that.
            via.sort_by_key(|hop| (hop.interface, hop.gateway));
            Some(if via.is_empty() { RouteTarget::Unreachable } else { RouteTarget::Via(via) })
        }
        // Blackhole, unreachable, prohibit; and throw, since no other table is asked after main.
        _ => Some(RouteTarget::Unreachable),
    }
}

/// A next hop that vipgate can send to.
fn via(hop: &Hop, links: &Links) -> Option<HopSpec> {
    let interface: InterfaceId = links.own(hop.ifindex)?;
    (!hop.dead && !hop.encapsulated).then_some(HopSpec { interface, gateway: hop.gateway })
}

fn add(routes: &mut Vec<Route>, route: Route) -> Effect {
    let known = routes.iter_mut().find(|known| known.metric == route.metric && is_same(known, &route));
    if let Some(known) = known {
        let changed = *known != route;
        *known = route;
        return Effect { changed, routes_stale: false };
    }
    // IPv6 adds next hops to a route one by one, and tells the whole route each time.
    let grown = routes.iter_mut().find(|known| {
        let v6 = matches!(route.prefix, IpNet::V6(_));
        v6 && known.metric == route.metric && known.kind == route.kind && contains(&route.hops, &known.hops)
    });
    if let Some(known) = grown {
        *known = route;
        return Effect { changed: true, routes_stale: false };
    }
    // A second route of the same prefix and metric may stand before or behind the first one.
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
    if let Some(place) = routes.iter().position(|known| known.metric == route.metric && is_same(known, route)) {
        routes.remove(place);
        return Effect { changed: true, routes_stale: false };
    }
    // IPv6 removes next hops one by one, and tells the removed ones only.
    let shrunk = routes.iter_mut().find(|known| {
        let v6 = matches!(route.prefix, IpNet::V6(_));
        v6 && known.metric == route.metric && !route.hops.is_empty() && contains(&known.hops, &route.hops)
    });
    if let Some(known) = shrunk {
        known.hops.retain(|hop| !route.hops.iter().any(|gone| gone.is_same(hop)));
        return Effect { changed: true, routes_stale: false };
    }
    // Unknown: all is well if nothing of this metric is left here, else the two have lost each other.
    Effect { changed: false, routes_stale: routes.iter().any(|known| known.metric == route.metric) }
}

/// Behind all routes with a metric that is as good.
fn insert_last(routes: &mut Vec<Route>, route: Route) {
    let place = routes.partition_point(|known| known.metric <= route.metric);
    routes.insert(place, route);
}

fn is_same(a: &Route, b: &Route) -> bool {
    a.kind == b.kind
        && a.object == b.object
        && (a.object.is_some() || contains(&a.hops, &b.hops) && a.hops.len() == b.hops.len())
}

fn contains(all: &[Hop], some: &[Hop]) -> bool {
    some.iter().all(|hop| all.iter().any(|known| known.is_same(hop)))
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;
