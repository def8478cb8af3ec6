use vipgate_dataplane::policy::spec::Role;
use vipgate_netlink::{Link, NextHopObject, NextHopObjectTarget};

use super::super::network::InterfaceConfig;
use super::*;

const MAIN: u32 = libc::RT_TABLE_MAIN as u32;
const LOCAL: u32 = libc::RT_TABLE_LOCAL as u32;

/// Interfaces 0 and 1 have the indexes 10 and 11; index 12 isn't a gateway interface.
fn links() -> Links {
    let link = |ifindex: u32, name: &str| Link {
        ifindex,
        name: name.into(),
        hardware_type: libc::ARPHRD_ETHER,
        flags: 0,
        mac: Some([2, 0, 0, 0, 0, 1]),
        mtu: 1500,
        master: None,
        is_virtual: true,
        metadata_vxlan_port: None,
    };
    let wanted = [(0, "in", Role::Inside), (1, "out", Role::Outside)];
    let wanted = wanted.map(|(id, name, role)| InterfaceConfig { id: InterfaceId(id), name: name.into(), role });
    Links::new(&wanted, &[link(10, "in"), link(11, "out"), link(12, "other")]).unwrap()
}

fn route(prefix: &str, metric: u32, hops: &[(u32, &str)]) -> Route {
    let hop = |&(ifindex, gateway): &(u32, &str)| NextHop {
        ifindex,
        gateway: gateway.parse().ok(),
        dead: false,
        encapsulated: false,
    };
    Route {
        table: MAIN,
        prefix: prefix.parse().unwrap(),
        metric,
        kind: libc::RTN_UNICAST,
        protocol: libc::RTPROT_STATIC,
        next_hops: hops.iter().map(hop).collect(),
        nexthop_id: None,
    }
}

fn hop(interface: u8, gateway: &str) -> HopSpec {
    HopSpec { interface: InterfaceId(interface), gateway: gateway.parse().ok() }
}

fn spec(routes: &Routes) -> Vec<(String, RouteTarget)> {
    let spec = routes.spec(&links(), &NextHopObjects::default());
    spec.into_iter().map(|route| (route.prefix.to_string(), route.target)).collect()
}

fn via(prefix: &str, hops: &[HopSpec]) -> (String, RouteTarget) {
    (prefix.into(), RouteTarget::Via(hops.to_vec()))
}

const CHANGED: Effect = Effect { changed: true, routes_stale: false };

#[test]
fn the_lowest_metric_is_selected_and_the_next_one_after_its_removal() {
    let mut routes = Routes::default();
    assert_eq!(routes.apply(Change::New, route("10.0.0.0/8", 20, &[(11, "192.0.2.2")])), CHANGED);
    assert_eq!(routes.apply(Change::New, route("10.0.0.0/8", 10, &[(11, "192.0.2.1")])), CHANGED);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(1, "192.0.2.1")])]);
    assert_eq!(routes.apply(Change::Removed, route("10.0.0.0/8", 10, &[(11, "192.0.2.1")])), CHANGED);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(1, "192.0.2.2")])]);
    assert_eq!(routes.apply(Change::Replaced, route("10.0.0.0/8", 20, &[(10, "192.0.2.3")])), CHANGED);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(0, "192.0.2.3")])]);
    assert_eq!(routes.apply(Change::Removed, route("10.0.0.0/8", 20, &[(10, "192.0.2.3")])), CHANGED);
    assert_eq!(routes, Routes::default());
}

#[test]
fn dead_next_hops_and_routes_without_live_ones_are_skipped() {
    let mut routes = Routes::default();
    let mut first = route("10.0.0.0/8", 1, &[(10, "192.0.2.1"), (11, "192.0.2.2")]);
    first.next_hops[0].dead = true;
    routes.load(first.clone());
    routes.load(route("10.0.0.0/8", 2, &[(10, "192.0.2.9")]));
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(1, "192.0.2.2")])]);
    first.next_hops[1].dead = true;
    assert_eq!(routes.apply(Change::Replaced, first), CHANGED);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(0, "192.0.2.9")])]);
}

#[test]
fn routes_via_other_interfaces_are_unreachable() {
    let mut routes = Routes::default();
    routes.load(route("10.0.0.0/8", 0, &[(12, "192.0.2.1")]));
    routes.load(route("10.1.0.0/16", 0, &[(12, "192.0.2.1"), (11, "192.0.2.2")]));
    for (i, kind) in
        [libc::RTN_BLACKHOLE, libc::RTN_UNREACHABLE, libc::RTN_PROHIBIT, libc::RTN_THROW].into_iter().enumerate()
    {
        routes.load(Route { kind, ..route(&format!("10.2.{i}.0/24"), 0, &[]) });
    }
    let spec = spec(&routes);
    assert_eq!(spec[0], ("10.0.0.0/8".into(), RouteTarget::Unreachable));
    assert_eq!(spec[1], via("10.1.0.0/16", &[hop(1, "192.0.2.2")]));
    assert_eq!(spec.len(), 6);
    assert!(spec[2..].iter().all(|route| route.1 == RouteTarget::Unreachable));
}

#[test]
fn the_local_table_takes_precedence_over_main() {
    let mut routes = Routes::default();
    let local = |prefix: &str, kind| Route { table: LOCAL, kind, ..route(prefix, 0, &[(12, "")]) };
    routes.load(local("192.0.2.1/32", libc::RTN_LOCAL));
    routes.load(local("192.0.2.255/32", libc::RTN_BROADCAST));
    routes.load(local("127.0.0.1/32", libc::RTN_LOCAL));
    routes.load(local("10.0.0.0/8", libc::RTN_LOCAL));
    routes.load(local("2001:db8::/128", libc::RTN_ANYCAST));
    routes.load(route("192.0.2.1/32", 0, &[(10, "192.0.2.7")]));
    routes.load(route("10.1.0.0/16", 0, &[(10, "192.0.2.7")]));
    routes.load(route("192.0.2.0/24", 0, &[(10, "")]));
    let locals: Vec<IpAddr> = ["192.0.2.1", "192.0.2.255", "2001:db8::"].iter().map(|a| a.parse().unwrap()).collect();
    assert_eq!(routes.local_addresses(), locals);
    let is_local = |prefix: &str| (prefix.to_owned(), RouteTarget::Local);
    assert_eq!(
        spec(&routes),
        [
            is_local("10.0.0.0/8"),
            is_local("127.0.0.1/32"),
            via("192.0.2.0/24", &[hop(0, "")]),
            is_local("192.0.2.1/32"),
            is_local("192.0.2.255/32"),
            is_local("2001:db8::/128"),
        ]
    );
}

#[test]
fn ipv6_next_hops_are_added_and_removed_one_by_one() {
    let mut routes = Routes::default();
    let (a, b) = ((10, "2001:db8::a"), (11, "2001:db8::b"));
    assert_eq!(routes.apply(Change::New, route("2001:db8:1::/48", 5, &[a])), CHANGED);
    assert_eq!(routes.apply(Change::New, route("2001:db8:1::/48", 5, &[a, b])), CHANGED);
    assert_eq!(spec(&routes), [via("2001:db8:1::/48", &[hop(0, a.1), hop(1, b.1)])]);
    assert_eq!(routes.apply(Change::Removed, route("2001:db8:1::/48", 5, &[a])), CHANGED);
    assert_eq!(spec(&routes), [via("2001:db8:1::/48", &[hop(1, b.1)])]);
    assert_eq!(routes.apply(Change::Removed, route("2001:db8:1::/48", 5, &[b])), CHANGED);
    assert_eq!(spec(&routes), []);
}

#[test]
fn ambiguous_events_mark_the_routes_as_stale() {
    let mut routes = Routes::default();
    routes.apply(Change::New, route("10.0.0.0/8", 0, &[(10, "192.0.2.1")]));
    // The order of the two routes isn't in the message.
    assert!(routes.apply(Change::New, route("10.0.0.0/8", 0, &[(10, "192.0.2.2")])).routes_stale);
    assert!(routes.apply(Change::Replaced, route("10.0.0.0/8", 0, &[(10, "192.0.2.3")])).routes_stale);
    assert!(routes.apply(Change::Removed, route("10.0.0.0/8", 0, &[(10, "192.0.2.9")])).routes_stale);
    assert_eq!(routes.apply(Change::Removed, route("10.0.0.0/8", 7, &[(10, "192.0.2.9")])), Effect::default());
}

#[test]
fn link_local_multicast_and_own_routes_are_ignored() {
    let mut routes = Routes::default();
    routes.load(route("fe80::/64", 256, &[(10, "")]));
    routes.load(Route { table: LOCAL, kind: libc::RTN_MULTICAST, ..route("ff00::/8", 256, &[(10, "")]) });
    routes.load(Route { protocol: PROTOCOL, kind: libc::RTN_BLACKHOLE, ..route("192.0.2.9/32", 0, &[]) });
    routes.load(Route { table: 100, ..route("10.0.0.0/8", 0, &[(10, "")]) });
    assert_eq!(routes, Routes::default());
}

#[test]
fn a_nexthop_object_applies_to_all_its_routes() {
    let mut objects = NextHopObjects::default();
    let single = |id, ifindex, gateway: &str| NextHopObject {
        id,
        target: NextHopObjectTarget::Single(NextHop {
            ifindex,
            gateway: gateway.parse().ok(),
            dead: false,
            encapsulated: false,
        }),
    };
    objects.apply(Change::New, single(1, 10, "192.0.2.1"));
    objects.apply(Change::New, single(2, 11, "192.0.2.2"));
    objects.apply(Change::New, NextHopObject { id: 3, target: NextHopObjectTarget::Group(vec![1, 2]) });
    objects.apply(Change::New, NextHopObject { id: 4, target: NextHopObjectTarget::Blackhole });
    let mut routes = Routes::default();
    for (prefix, object) in [("10.1.0.0/16", 1), ("10.3.0.0/16", 3), ("10.4.0.0/16", 4)] {
        routes.load(Route { nexthop_id: Some(object), ..route(prefix, 0, &[]) });
    }
    let targets = |objects: &NextHopObjects| {
        let spec = routes.spec(&links(), objects);
        spec.into_iter().map(|route| route.target).collect::<Vec<_>>()
    };
    let (one, two) = (hop(0, "192.0.2.1"), hop(1, "192.0.2.2"));
    let expected = |first, both: [HopSpec; 2]| {
        vec![RouteTarget::Via(vec![first]), RouteTarget::Via(both.to_vec()), RouteTarget::Unreachable]
    };
    assert_eq!(targets(&objects), expected(one, [one, two]));
    assert!(objects.apply(Change::Replaced, single(1, 11, "192.0.2.9")));
    assert!(!objects.apply(Change::Replaced, single(1, 11, "192.0.2.9")), "unchanged");
    // Sorted by interface and address, regardless of the order in the group.
    let nine = hop(1, "192.0.2.9");
    assert_eq!(targets(&objects), expected(nine, [two, nine]));
}
