use vipgate_dataplane::snapshot::spec::Role;

use super::super::message::{Link, NextHop, NextHopTarget};
use super::super::network::Wanted;
use super::*;

const MAIN: u32 = libc::RT_TABLE_MAIN as u32;
const LOCAL: u32 = libc::RT_TABLE_LOCAL as u32;

/// Interfaces 0 and 1 have the kernel's indexes 10 and 11; 12 isn't ours.
fn links() -> Links {
    let link = |ifindex: u32, name: &str| Link {
        ifindex,
        name: name.into(),
        hardware: libc::ARPHRD_ETHER,
        flags: 0,
        mac: Some([2, 0, 0, 0, 0, 1]),
        mtu: 1500,
        master: None,
    };
    let wanted = [(0, "in", Role::Inside), (1, "out", Role::Outside)];
    let wanted = wanted.map(|(id, name, role)| Wanted { id: InterfaceId(id), name: name.into(), role });
    Links::new(&wanted, &[link(10, "in"), link(11, "out"), link(12, "other")]).unwrap()
}

fn route(prefix: &str, metric: u32, hops: &[(u32, &str)]) -> Route {
    let hop = |&(ifindex, gateway): &(u32, &str)| Hop {
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
        hops: hops.iter().map(hop).collect(),
        object: None,
    }
}

fn hop(interface: u8, gateway: &str) -> HopSpec {
    HopSpec { interface: InterfaceId(interface), gateway: gateway.parse().ok() }
}

fn spec(routes: &Routes) -> Vec<(String, RouteTarget)> {
    let spec = routes.spec(&links(), &NextHops::default());
    spec.into_iter().map(|route| (route.prefix.to_string(), route.target)).collect()
}

fn via(prefix: &str, hops: &[HopSpec]) -> (String, RouteTarget) {
    (prefix.into(), RouteTarget::Via(hops.to_vec()))
}

const NEWS: Effect = Effect { changed: true, routes_stale: false };

#[test]
fn the_best_metric_wins_and_the_next_one_takes_over() {
    let mut routes = Routes::default();
    assert_eq!(routes.apply(Change::New, route("10.0.0.0/8", 20, &[(11, "192.0.2.2")])), NEWS);
    assert_eq!(routes.apply(Change::New, route("10.0.0.0/8", 10, &[(11, "192.0.2.1")])), NEWS);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(1, "192.0.2.1")])]);
    assert_eq!(routes.apply(Change::Gone, route("10.0.0.0/8", 10, &[(11, "192.0.2.1")])), NEWS);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(1, "192.0.2.2")])]);
    assert_eq!(routes.apply(Change::Replaced, route("10.0.0.0/8", 20, &[(10, "192.0.2.3")])), NEWS);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(0, "192.0.2.3")])]);
    assert_eq!(routes.apply(Change::Gone, route("10.0.0.0/8", 20, &[(10, "192.0.2.3")])), NEWS);
    assert_eq!(routes, Routes::default());
}

#[test]
fn dead_hops_are_passed_over_and_so_are_routes_of_them() {
    let mut routes = Routes::default();
    let mut first = route("10.0.0.0/8", 1, &[(10, "192.0.2.1"), (11, "192.0.2.2")]);
    first.hops[0].dead = true;
    routes.load(first.clone());
    routes.load(route("10.0.0.0/8", 2, &[(10, "192.0.2.9")]));
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(1, "192.0.2.2")])]);
    first.hops[1].dead = true;
    assert_eq!(routes.apply(Change::Replaced, first), NEWS);
    assert_eq!(spec(&routes), [via("10.0.0.0/8", &[hop(0, "192.0.2.9")])]);
}

#[test]
fn interfaces_that_are_not_polled_lead_nowhere() {
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
fn the_local_table_is_asked_first_whatever_main_has() {
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
    assert_eq!(routes.locals(), locals);
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
fn ipv6_hops_come_and_go_one_by_one() {
    let mut routes = Routes::default();
    let (a, b) = ((10, "2001:db8::a"), (11, "2001:db8::b"));
    assert_eq!(routes.apply(Change::New, route("2001:db8:1::/48", 5, &[a])), NEWS);
    assert_eq!(routes.apply(Change::New, route("2001:db8:1::/48", 5, &[a, b])), NEWS);
    assert_eq!(spec(&routes), [via("2001:db8:1::/48", &[hop(0, a.1), hop(1, b.1)])]);
    assert_eq!(routes.apply(Change::Gone, route("2001:db8:1::/48", 5, &[a])), NEWS);
    assert_eq!(spec(&routes), [via("2001:db8:1::/48", &[hop(1, b.1)])]);
    assert_eq!(routes.apply(Change::Gone, route("2001:db8:1::/48", 5, &[b])), NEWS);
    assert_eq!(spec(&routes), []);
}

#[test]
fn what_a_message_leaves_open_is_read_again() {
    let mut routes = Routes::default();
    routes.apply(Change::New, route("10.0.0.0/8", 0, &[(10, "192.0.2.1")]));
    // Before or behind the first one? Only the kernel knows.
    assert!(routes.apply(Change::New, route("10.0.0.0/8", 0, &[(10, "192.0.2.2")])).routes_stale);
    assert!(routes.apply(Change::Replaced, route("10.0.0.0/8", 0, &[(10, "192.0.2.3")])).routes_stale);
    assert!(routes.apply(Change::Gone, route("10.0.0.0/8", 0, &[(10, "192.0.2.9")])).routes_stale);
    assert_eq!(routes.apply(Change::Gone, route("10.0.0.0/8", 7, &[(10, "192.0.2.9")])), Effect::default());
}

#[test]
fn what_nothing_is_forwarded_to_is_left_out() {
    let mut routes = Routes::default();
    routes.load(route("fe80::/64", 256, &[(10, "")]));
    routes.load(Route { table: LOCAL, kind: libc::RTN_MULTICAST, ..route("ff00::/8", 256, &[(10, "")]) });
    routes.load(Route { protocol: OURS, kind: libc::RTN_BLACKHOLE, ..route("192.0.2.9/32", 0, &[]) });
    routes.load(Route { table: 100, ..route("10.0.0.0/8", 0, &[(10, "")]) });
    assert_eq!(routes, Routes::default());
}

#[test]
fn a_next_hop_object_counts_for_all_its_routes() {
    let mut objects = NextHops::default();
    let single = |id, ifindex, gateway: &str| NextHop {
        id,
        target: NextHopTarget::Hop(Hop { ifindex, gateway: gateway.parse().ok(), dead: false, encapsulated: false }),
    };
    objects.apply(Change::New, single(1, 10, "192.0.2.1"));
    objects.apply(Change::New, single(2, 11, "192.0.2.2"));
    objects.apply(Change::New, NextHop { id: 3, target: NextHopTarget::Group(vec![1, 2]) });
    objects.apply(Change::New, NextHop { id: 4, target: NextHopTarget::Blackhole });
    let mut routes = Routes::default();
    for (prefix, object) in [("10.1.0.0/16", 1), ("10.3.0.0/16", 3), ("10.4.0.0/16", 4)] {
        routes.load(Route { object: Some(object), ..route(prefix, 0, &[]) });
    }
    let targets = |objects: &NextHops| {
        let spec = routes.spec(&links(), objects);
        spec.into_iter().map(|route| route.target).collect::<Vec<_>>()
    };
    let (one, two) = (hop(0, "192.0.2.1"), hop(1, "192.0.2.2"));
    let expected = |first, both: [HopSpec; 2]| {
        vec![RouteTarget::Via(vec![first]), RouteTarget::Via(both.to_vec()), RouteTarget::Unreachable]
    };
    assert_eq!(targets(&objects), expected(one, [one, two]));
    assert!(objects.apply(Change::Replaced, single(1, 11, "192.0.2.9")));
    assert!(!objects.apply(Change::Replaced, single(1, 11, "192.0.2.9")), "no news");
    // In the order of interface and address, whatever the order in the group.
    let nine = hop(1, "192.0.2.9");
    assert_eq!(targets(&objects), expected(nine, [two, nine]));
}
