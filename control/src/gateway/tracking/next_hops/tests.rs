//! Each test runs for both address families, in virtual time, and evaluates whenever the tracker is due.

use std::time::Duration;

use NextHopState::{Down, Unknown, Up};
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::policy::spec::{NeighborSpec, Role};

use super::*;
use crate::config::{HealthTarget, LinkRequirement};

const INSIDE: u8 = 0;
const OUTSIDE: u8 = 1;

/// Addresses of one family.
struct Addresses {
    is_v4: bool,
    family: &'static str,
    default: &'static str,
    net: &'static str,
    router: &'static str,
    second: &'static str,
    node: &'static str,
}

const FAMILIES: [Addresses; 2] = [
    Addresses {
        is_v4: true,
        family: "IPv4",
        default: "0.0.0.0/0",
        net: "10.9.0.0/16",
        router: "203.0.113.254",
        second: "203.0.113.253",
        node: "10.4.1.254",
    },
    Addresses {
        is_v4: false,
        family: "IPv6",
        default: "::/0",
        net: "fd00:9::/48",
        router: "fe80::1",
        second: "fe80::2",
        node: "fd00:4:1::fe",
    },
];

/// A gateway with one interface inside and one outside, both up, and a policy that needs both families.
struct Fixture {
    tracker: NextHopTracker,
    links: Vec<LinkStatus>,
    hops: Vec<NextHopStatus>,
    network: NetworkSpec,
    needs: [bool; 2],
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Health::default())
    }

    fn with(health: Health) -> Self {
        let mut fixture = Self {
            tracker: NextHopTracker::new(health),
            links: Vec::new(),
            hops: Vec::new(),
            network: NetworkSpec::default(),
            needs: [true; 2],
            now: Instant::now(),
        };
        fixture.add_link(INSIDE, Role::Inside);
        fixture.add_link(OUTSIDE, Role::Outside);
        fixture
    }

    /// Adds an interface, or replaces one and removes those after it.
    fn add_link(&mut self, id: u8, role: Role) {
        let (index, name) = (usize::from(id), format!("if{id}"));
        let (state, successor) = (LinkState::Up, None);
        self.links.truncate(index);
        self.links.push(LinkStatus {
            id: InterfaceId(id),
            name: name.clone(),
            ifindex: id.into(),
            role,
            state,
            successor,
        });
        self.network.interfaces.truncate(index);
        self.network.interfaces.push(InterfaceSpec {
            id: InterfaceId(id),
            name,
            ifindex: id.into(),
            role,
            mac: [2, 0, 0, 0, 0, id],
            mtu: 1500,
            up: true,
            addresses: vec!["192.0.2.1".parse().unwrap(), "fe80::99".parse().unwrap()],
            frames: FrameLayout::default(),
            partial_checksums: false,
        });
    }

    fn set_link(&mut self, id: u8, state: LinkState) {
        self.links[usize::from(id)].state = state;
    }

    /// Sets the routes and their next hops.
    fn set_routes(&mut self, routes: &[(&str, &[(u8, &str)])]) {
        let hop = |&(id, gateway): &(u8, &str)| HopSpec { interface: InterfaceId(id), gateway: gateway.parse().ok() };
        let route = |&(prefix, hops): &(&str, &[(u8, &str)])| RouteSpec {
            prefix: prefix.parse().unwrap(),
            target: RouteTarget::Via(hops.iter().map(hop).collect()),
        };
        self.network.routes = routes.iter().map(route).collect();
    }

    /// Sets the prober's state of all next hops.
    fn set_probed(&mut self, hops: &[(u8, &str, NextHopState)]) {
        let hop = |&(id, address, state): &(u8, &str, NextHopState)| NextHopStatus {
            interface: InterfaceId(id),
            address: address.parse().unwrap(),
            state,
            last_reply: None,
        };
        self.hops = hops.iter().map(hop).collect();
    }

    fn evaluate(&mut self) -> Vec<String> {
        let Self { tracker, links, hops, network, needs, now } = self;
        let needs = |is_v4: bool| needs[usize::from(is_v4)];
        let input = TrackingInput { links, next_hops: hops, network, needs: &needs };
        let faults = tracker.evaluate(&input, *now);
        assert!(tracker.next_deadline().is_none_or(|due| due > *now), "the next deadline is in the past");
        faults.iter().map(Fault::to_string).collect()
    }

    /// Advances time by probe intervals; returns the faults after the last one.
    fn advance(&mut self, intervals: u32) -> Vec<String> {
        let mut faults = Vec::new();
        for _ in 0..intervals {
            self.now += self.tracker.health.interval;
            faults = self.evaluate();
        }
        faults
    }
}

const NO_FAULTS: [String; 0] = [];
/// Probe intervals until a next hop without a reply is down, or a missing route is a fault.
const TIMEOUT: u32 = 4;

#[test]
fn a_live_next_hop_of_another_route_does_not_hide_a_dead_default_router() {
    for Addresses { default, net, router, second, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.set_routes(&[(default, &[(OUTSIDE, router)]), (net, &[(OUTSIDE, second)])]);
        fixture.set_probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        fixture.set_probed(&[(OUTSIDE, router, Down), (OUTSIDE, second, Up)]);
        assert_eq!(fixture.evaluate(), [format!("no next hop of the default route answers outside: {router} on if1")]);
        // The other way round, most destinations are reachable.
        fixture.set_probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Down)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
    }
}

#[test]
fn one_next_hop_of_the_default_route_that_is_up_is_enough() {
    for Addresses { default, router, second, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.set_routes(&[(default, &[(OUTSIDE, router), (OUTSIDE, second)])]);
        for states in [[Up, Down], [Down, Up], [Down, Unknown]] {
            fixture.set_probed(&[(OUTSIDE, router, states[0]), (OUTSIDE, second, states[1])]);
            assert_eq!(fixture.evaluate(), NO_FAULTS, "{states:?}");
        }
        fixture.set_probed(&[(OUTSIDE, router, Down), (OUTSIDE, second, Down)]);
        let text = format!("no next hop of the default route answers outside: {router} on if1, {second} on if1");
        assert_eq!(fixture.evaluate(), [text]);
    }
}

#[test]
fn default_routes_of_the_two_families_are_independent() {
    let [four, six] = FAMILIES;
    let mut fixture = Fixture::new();
    fixture.set_routes(&[(four.default, &[(OUTSIDE, four.router)]), (six.default, &[(OUTSIDE, six.router)])]);
    for (dead, [a, b]) in [(&four, [Down, Up]), (&six, [Up, Down])] {
        fixture.set_probed(&[(OUTSIDE, four.router, a), (OUTSIDE, six.router, b)]);
        let text = format!("no next hop of the default route answers outside: {} on if1", dead.router);
        assert_eq!(fixture.evaluate(), [text]);
    }
}

#[test]
fn without_a_default_route_one_next_hop_of_a_side_is_enough() {
    for Addresses { default, net, router, second, node, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.set_routes(&[(net, &[(OUTSIDE, router), (OUTSIDE, second)])]);
        for states in [[Up, Down], [Down, Up], [Up, Unknown], [Unknown, Unknown], [Down, Unknown]] {
            fixture.set_probed(&[(OUTSIDE, router, states[0]), (OUTSIDE, second, states[1]), (INSIDE, node, Up)]);
            assert_eq!(fixture.evaluate(), NO_FAULTS, "{states:?}");
        }
        fixture.set_probed(&[(OUTSIDE, router, Down), (OUTSIDE, second, Down), (INSIDE, node, Up)]);
        assert_eq!(fixture.evaluate(), [format!("no next hop answers outside: {router} on if1, {second} on if1")]);
        // An on-link default route has no next hop to probe.
        fixture.set_routes(&[(default, &[(OUTSIDE, "")]), (net, &[(OUTSIDE, second)])]);
        fixture.set_probed(&[(OUTSIDE, second, Down)]);
        assert_eq!(fixture.evaluate(), [format!("no next hop answers outside: {second} on if1")]);
    }
}

#[test]
fn a_router_that_never_replied_is_down_after_the_timeout() {
    for Addresses { default, router, second, net, .. } in FAMILIES {
        for others in [None, Some((OUTSIDE, second, Up))] {
            let mut fixture = Fixture::new();
            fixture.set_routes(&[(default, &[(OUTSIDE, router)]), (net, &[(OUTSIDE, second)])]);
            let hops: Vec<_> = [(OUTSIDE, router, Unknown)].into_iter().chain(others).collect();
            fixture.set_probed(&hops);
            assert_eq!(fixture.evaluate(), NO_FAULTS, "no fault at the start");
            assert_eq!(fixture.advance(TIMEOUT - 1), NO_FAULTS, "the timeout hasn't expired");
            let text = format!("no next hop of the default route answers outside: {router} on if1");
            assert_eq!(fixture.advance(1), std::slice::from_ref(&text));
            assert_eq!(fixture.advance(100), [text], "it stays down");
            fixture.set_probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
            assert_eq!(fixture.evaluate(), NO_FAULTS);
        }
    }
}

#[test]
fn a_resolved_or_unprobed_next_hop_is_not_down() {
    for Addresses { is_v4, default, router, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.set_routes(&[(default, &[(OUTSIDE, router)])]);
        fixture.set_probed(&[(OUTSIDE, router, Unknown)]);
        let neighbor = NeighborSpec { interface: InterfaceId(OUTSIDE), address: router.parse().unwrap(), mac: [2; 6] };
        fixture.network.neighbors.push(neighbor);
        assert_eq!(fixture.advance(100), NO_FAULTS, "the kernel has resolved its MAC address");
        fixture.network.neighbors.clear();
        assert_eq!(fixture.advance(TIMEOUT), NO_FAULTS, "the timeout starts now");
        assert_eq!(fixture.advance(1).len(), 1);
        // The interface loses its carrier, and gets it back.
        fixture.set_link(OUTSIDE, LinkState::NoCarrier);
        assert_eq!(fixture.advance(100), NO_FAULTS, "the interface is the fault");
        fixture.set_link(OUTSIDE, LinkState::Up);
        assert_eq!(fixture.advance(TIMEOUT), NO_FAULTS);
        assert_eq!(fixture.advance(1).len(), 1);
        // Without a source address, neighbor solicitations can't be sent.
        fixture.network.interfaces[usize::from(OUTSIDE)].addresses.clear();
        assert_eq!(fixture.advance(100).len(), usize::from(is_v4));
    }
}

/// After the process was suspended there may be unread replies.
#[test]
fn a_suspension_counts_as_one_interval() {
    for Addresses { default, router, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.set_routes(&[(default, &[(OUTSIDE, router)])]);
        fixture.set_probed(&[(OUTSIDE, router, Unknown)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        for _ in 1..TIMEOUT {
            fixture.now += Duration::from_hours(1);
            assert_eq!(fixture.evaluate(), NO_FAULTS);
            assert_eq!(fixture.evaluate(), NO_FAULTS, "repeated evaluations don't count");
        }
        assert_eq!(fixture.advance(1).len(), 1);
    }
}

#[test]
fn missing_routes_are_a_fault_until_a_next_hop_is_up() {
    for Addresses { family, net, node, second, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.set_routes(&[(net, &[(INSIDE, node)])]);
        fixture.set_probed(&[(INSIDE, node, Up)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        fixture.set_routes(&[]);
        fixture.set_probed(&[]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        assert_eq!(fixture.advance(TIMEOUT - 1), NO_FAULTS);
        let text = format!("no {family} route inside, last next hops: {node} on if0");
        assert_eq!(fixture.advance(1), std::slice::from_ref(&text));
        assert_eq!(fixture.advance(100), std::slice::from_ref(&text));
        // A new route, whose next hop never replies.
        fixture.set_routes(&[(net, &[(INSIDE, second)])]);
        fixture.set_probed(&[(INSIDE, second, Unknown)]);
        assert_eq!(fixture.evaluate(), std::slice::from_ref(&text));
        assert_eq!(fixture.advance(TIMEOUT - 1), [text]);
        assert_eq!(fixture.advance(1), [format!("no next hop answers inside: {second} on if0")]);
        fixture.set_probed(&[(INSIDE, second, Up)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        assert_eq!(fixture.advance(100), NO_FAULTS);
    }
}

#[test]
fn a_missing_default_route_is_a_fault_whatever_other_next_hops_are_up() {
    for Addresses { family, default, net, router, second, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        let (main, other) = ([(OUTSIDE, router)], [(OUTSIDE, second)]);
        let both: [(&str, &[(u8, &str)]); 2] = [(default, &main), (net, &other)];
        fixture.set_routes(&both);
        fixture.set_probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        fixture.set_routes(&both[1..]);
        fixture.set_probed(&[(OUTSIDE, second, Up)]);
        assert_eq!(fixture.advance(TIMEOUT), NO_FAULTS);
        let text = format!("no {family} default route outside, last next hops: {router} on if1");
        assert_eq!(fixture.advance(1), std::slice::from_ref(&text));
        assert_eq!(fixture.advance(100), [text]);
        fixture.set_routes(&both);
        fixture.set_probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        // The default route moves to the other side.
        fixture.set_routes(&[(default, &[(INSIDE, second)])]);
        fixture.set_probed(&[(INSIDE, second, Up)]);
        assert_eq!(fixture.advance(100), NO_FAULTS);
    }
}

#[test]
fn routes_replaced_in_steps_are_no_fault() {
    for Addresses { default, router, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        for _ in 0..10 {
            fixture.set_routes(&[(default, &[(OUTSIDE, router)])]);
            fixture.set_probed(&[(OUTSIDE, router, Up)]);
            assert_eq!(fixture.advance(1), NO_FAULTS);
            fixture.set_routes(&[]);
            fixture.set_probed(&[]);
            assert_eq!(fixture.advance(TIMEOUT), NO_FAULTS);
            fixture.set_routes(&[(default, &[(OUTSIDE, router)])]);
            fixture.set_probed(&[(OUTSIDE, router, Unknown)]);
            assert_eq!(fixture.advance(1), NO_FAULTS, "back before the timeout, being probed");
        }
    }
}

#[test]
fn families_without_need_or_without_earlier_routes_have_no_fault() {
    for Addresses { is_v4, default, router, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.set_routes(&[(default, &[(OUTSIDE, router)])]);
        fixture.set_probed(&[(OUTSIDE, router, Up)]);
        assert_eq!(fixture.advance(100), NO_FAULTS, "the other family never had a route");
        fixture.set_routes(&[]);
        fixture.set_probed(&[]);
        assert_eq!(fixture.advance(TIMEOUT + 1).len(), 1);
        fixture.needs[usize::from(is_v4)] = false;
        assert_eq!(fixture.evaluate(), NO_FAULTS, "its VIPs are removed");
        fixture.needs[usize::from(is_v4)] = true;
        assert_eq!(fixture.advance(100), NO_FAULTS, "the earlier routes are forgotten");
    }
}

#[test]
fn missing_routes_of_an_interface_that_is_down_are_no_fault() {
    for Addresses { default, router, .. } in FAMILIES {
        for require in [LinkRequirement::All, LinkRequirement::Any] {
            let mut fixture = Fixture::with(Health { links: require, ..Health::default() });
            fixture.set_routes(&[(default, &[(OUTSIDE, router)])]);
            fixture.set_probed(&[(OUTSIDE, router, Up)]);
            assert_eq!(fixture.evaluate(), NO_FAULTS);
            fixture.set_link(OUTSIDE, LinkState::Down);
            fixture.set_routes(&[]);
            fixture.set_probed(&[]);
            assert_eq!(fixture.advance(100), NO_FAULTS);
            // The kernel doesn't restore routes when the interface is up again.
            fixture.set_link(OUTSIDE, LinkState::Up);
            assert_eq!(fixture.advance(TIMEOUT), NO_FAULTS, "a routing daemon has until the timeout");
            assert_eq!(fixture.advance(1).len(), 1);
            fixture.set_link(OUTSIDE, LinkState::Down);
            assert_eq!(fixture.advance(100), NO_FAULTS);
            // Another interface of the side replaces the interface, but not its routes.
            fixture.add_link(2, Role::Outside);
            assert_eq!(fixture.advance(100).len(), usize::from(require == LinkRequirement::Any));
        }
    }
}

#[test]
fn targets_represent_the_default_route_of_their_interface() {
    for Addresses { default, net, router, second, node, .. } in FAMILIES {
        let target = HealthTarget { interface: "if1".to_owned(), address: node.parse().unwrap() };
        let mut fixture = Fixture::with(Health { targets: vec![target], ..Health::default() });
        fixture.add_link(2, Role::Outside);
        fixture.set_routes(&[(default, &[(OUTSIDE, router)]), (net, &[(2, second)])]);
        fixture.set_probed(&[(OUTSIDE, node, Up), (2, second, Down)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        fixture.set_probed(&[(OUTSIDE, node, Down), (2, second, Up)]);
        assert_eq!(fixture.evaluate(), [format!("no next hop of the default route answers outside: {node} on if1")]);
    }
}

#[test]
fn on_an_interface_of_both_sides_it_is_one_fault() {
    for Addresses { family, default, net, router, second, .. } in FAMILIES {
        let mut fixture = Fixture::new();
        fixture.add_link(INSIDE, Role::Both);
        fixture.set_routes(&[(default, &[(INSIDE, router)]), (net, &[(INSIDE, second)])]);
        fixture.set_probed(&[(INSIDE, router, Down), (INSIDE, second, Up)]);
        assert_eq!(fixture.evaluate(), [format!("no next hop of the default route answers inside: {router} on if0")]);
        fixture.set_probed(&[(INSIDE, router, Up), (INSIDE, second, Down)]);
        assert_eq!(fixture.evaluate(), NO_FAULTS);
        fixture.set_routes(&[]);
        fixture.set_probed(&[]);
        let text = format!("no {family} default route inside, last next hops: {router} on if0");
        assert_eq!(fixture.advance(TIMEOUT + 1), [text]);
    }
}

#[test]
fn a_fault_names_three_next_hops_and_counts_the_others() {
    let mut fixture = Fixture::new();
    let names: Vec<String> = (1..=9).map(|n| format!("10.0.0.{n}")).collect();
    let hops: Vec<_> = names.iter().map(|name| (INSIDE, name.as_str(), Down)).collect();
    fixture.set_probed(&hops);
    let faults = fixture.evaluate();
    assert_eq!(faults.len(), 1);
    assert!(faults[0].ends_with(": 10.0.0.1 on if0, 10.0.0.2 on if0, 10.0.0.3 on if0 and 6 more"), "{faults:?}");
}
