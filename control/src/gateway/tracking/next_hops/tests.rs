//! Each test runs for both families, in virtual time, and looks as often as the tracker wants it.

use std::time::Duration;

use vipgate_dataplane::snapshot::spec::{NeighbourSpec, Role};

use NextHopState::{Down, Unknown, Up};

use super::*;
use crate::config::{HealthTarget, Require};

const INSIDE: u8 = 0;
const OUTSIDE: u8 = 1;

/// What one family calls everything.
struct Names {
    is_v4: bool,
    family: &'static str,
    default: &'static str,
    net: &'static str,
    router: &'static str,
    second: &'static str,
    node: &'static str,
}

const FAMILIES: [Names; 2] = [
    Names {
        is_v4: true,
        family: "IPv4",
        default: "0.0.0.0/0",
        net: "10.9.0.0/16",
        router: "203.0.113.254",
        second: "203.0.113.253",
        node: "10.4.1.254",
    },
    Names {
        is_v4: false,
        family: "IPv6",
        default: "::/0",
        net: "fd00:9::/48",
        router: "fe80::1",
        second: "fe80::2",
        node: "fd00:4:1::fe",
    },
];

/// A gateway with one interface inside and one outside, both up, whose policy needs both families.
struct Scene {
    tracker: NextHopTracker,
    links: Vec<LinkStatus>,
    hops: Vec<NextHopStatus>,
    network: NetworkSpec,
    needs: [bool; 2],
    now: Instant,
}

impl Scene {
    fn new() -> Self {
        Self::with(Health::default())
    }

    fn with(health: Health) -> Self {
        let mut scene = Self {
            tracker: NextHopTracker::new(health),
            links: Vec::new(),
            hops: Vec::new(),
            network: NetworkSpec::default(),
            needs: [true; 2],
            now: Instant::now(),
        };
        scene.link(INSIDE, Role::Inside);
        scene.link(OUTSIDE, Role::Outside);
        scene
    }

    /// One more interface; or in place of one, and of all behind it.
    fn link(&mut self, id: u8, role: Role) {
        let (place, name) = (usize::from(id), format!("if{id}"));
        let (state, successor) = (LinkState::Up, None);
        self.links.truncate(place);
        self.links.push(LinkStatus {
            id: InterfaceId(id),
            name: name.clone(),
            ifindex: id.into(),
            role,
            state,
            successor,
        });
        self.network.interfaces.truncate(place);
        self.network.interfaces.push(InterfaceSpec {
            id: InterfaceId(id),
            name,
            ifindex: id.into(),
            role,
            mac: [2, 0, 0, 0, 0, id],
            mtu: 1500,
            up: true,
            addresses: vec!["192.0.2.1".parse().unwrap(), "fe80::99".parse().unwrap()],
        });
    }

    fn set_link(&mut self, id: u8, state: LinkState) {
        self.links[usize::from(id)].state = state;
    }

    /// The routes, and where they lead to.
    fn route(&mut self, routes: &[(&str, &[(u8, &str)])]) {
        let hop = |&(id, gateway): &(u8, &str)| HopSpec { interface: InterfaceId(id), gateway: gateway.parse().ok() };
        let route = |&(prefix, hops): &(&str, &[(u8, &str)])| RouteSpec {
            prefix: prefix.parse().unwrap(),
            target: RouteTarget::Via(hops.iter().map(hop).collect()),
        };
        self.network.routes = routes.iter().map(route).collect();
    }

    /// What the prober says of all next hops.
    fn probed(&mut self, hops: &[(u8, &str, NextHopState)]) {
        let hop = |&(id, address, state): &(u8, &str, NextHopState)| NextHopStatus {
            interface: InterfaceId(id),
            address: address.parse().unwrap(),
            state,
            answered: None,
        };
        self.hops = hops.iter().map(hop).collect();
    }

    fn look(&mut self) -> Vec<String> {
        let Self { tracker, links, hops, network, needs, now } = self;
        let needs = |is_v4: bool| needs[usize::from(is_v4)];
        let seen = Seen { links, next_hops: hops, network, needs: &needs };
        let faults = tracker.judge(&seen, *now);
        assert!(tracker.due().is_none_or(|due| due > *now), "it would look again and again");
        faults.iter().map(Fault::to_string).collect()
    }

    /// So many intervals between probes pass; what is wrong after them.
    fn pass(&mut self, intervals: u32) -> Vec<String> {
        let mut said = Vec::new();
        for _ in 0..intervals {
            self.now += self.tracker.health.interval;
            said = self.look();
        }
        said
    }
}

const NOTHING: [String; 0] = [];
/// Intervals that a next hop has for its first answer, and a route to come back.
const PATIENCE: u32 = 4;

#[test]
fn a_live_next_hop_of_another_route_does_not_hide_a_dead_default_router() {
    for Names { default, net, router, second, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.route(&[(default, &[(OUTSIDE, router)]), (net, &[(OUTSIDE, second)])]);
        scene.probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
        assert_eq!(scene.look(), NOTHING);
        scene.probed(&[(OUTSIDE, router, Down), (OUTSIDE, second, Up)]);
        assert_eq!(scene.look(), [format!("no next hop of the default route answers outside: {router} on if1")]);
        // The other way round, most destinations are reached.
        scene.probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Down)]);
        assert_eq!(scene.look(), NOTHING);
    }
}

#[test]
fn one_next_hop_of_the_default_route_that_answers_is_enough() {
    for Names { default, router, second, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.route(&[(default, &[(OUTSIDE, router), (OUTSIDE, second)])]);
        for states in [[Up, Down], [Down, Up], [Down, Unknown]] {
            scene.probed(&[(OUTSIDE, router, states[0]), (OUTSIDE, second, states[1])]);
            assert_eq!(scene.look(), NOTHING, "{states:?}");
        }
        scene.probed(&[(OUTSIDE, router, Down), (OUTSIDE, second, Down)]);
        let words = format!("no next hop of the default route answers outside: {router} on if1, {second} on if1");
        assert_eq!(scene.look(), [words]);
    }
}

#[test]
fn a_default_route_of_one_family_says_nothing_of_the_other() {
    let [four, six] = FAMILIES;
    let mut scene = Scene::new();
    scene.route(&[(four.default, &[(OUTSIDE, four.router)]), (six.default, &[(OUTSIDE, six.router)])]);
    for (dead, [a, b]) in [(&four, [Down, Up]), (&six, [Up, Down])] {
        scene.probed(&[(OUTSIDE, four.router, a), (OUTSIDE, six.router, b)]);
        let words = format!("no next hop of the default route answers outside: {} on if1", dead.router);
        assert_eq!(scene.look(), [words]);
    }
}

#[test]
fn without_a_default_route_one_next_hop_speaks_for_its_side() {
    for Names { default, net, router, second, node, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.route(&[(net, &[(OUTSIDE, router), (OUTSIDE, second)])]);
        for states in [[Up, Down], [Down, Up], [Up, Unknown], [Unknown, Unknown], [Down, Unknown]] {
            scene.probed(&[(OUTSIDE, router, states[0]), (OUTSIDE, second, states[1]), (INSIDE, node, Up)]);
            assert_eq!(scene.look(), NOTHING, "{states:?}");
        }
        scene.probed(&[(OUTSIDE, router, Down), (OUTSIDE, second, Down), (INSIDE, node, Up)]);
        assert_eq!(scene.look(), [format!("no next hop answers outside: {router} on if1, {second} on if1")]);
        // A default route that leads to the link itself has no next hop that could be asked.
        scene.route(&[(default, &[(OUTSIDE, "")]), (net, &[(OUTSIDE, second)])]);
        scene.probed(&[(OUTSIDE, second, Down)]);
        assert_eq!(scene.look(), [format!("no next hop answers outside: {second} on if1")]);
    }
}

#[test]
fn a_router_that_was_dead_before_the_start_is_down_after_as_many_probes() {
    for Names { default, router, second, net, .. } in FAMILIES {
        for others in [None, Some((OUTSIDE, second, Up))] {
            let mut scene = Scene::new();
            scene.route(&[(default, &[(OUTSIDE, router)]), (net, &[(OUTSIDE, second)])]);
            let hops: Vec<_> = [(OUTSIDE, router, Unknown)].into_iter().chain(others).collect();
            scene.probed(&hops);
            assert_eq!(scene.look(), NOTHING, "nothing at the start");
            assert_eq!(scene.pass(PATIENCE - 1), NOTHING, "it has its time");
            let words = format!("no next hop of the default route answers outside: {router} on if1");
            assert_eq!(scene.pass(1), std::slice::from_ref(&words));
            assert_eq!(scene.pass(100), [words], "it stays so");
            scene.probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
            assert_eq!(scene.look(), NOTHING);
        }
    }
}

#[test]
fn a_next_hop_is_not_silent_while_the_kernel_knows_it_or_nobody_can_ask() {
    for Names { is_v4, default, router, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.route(&[(default, &[(OUTSIDE, router)])]);
        scene.probed(&[(OUTSIDE, router, Unknown)]);
        let neighbour =
            NeighbourSpec { interface: InterfaceId(OUTSIDE), address: router.parse().unwrap(), mac: [2; 6] };
        scene.network.neighbours.push(neighbour);
        assert_eq!(scene.pass(100), NOTHING, "the kernel knows its MAC address");
        scene.network.neighbours.clear();
        assert_eq!(scene.pass(PATIENCE), NOTHING, "it has its time from then on");
        assert_eq!(scene.pass(1).len(), 1);
        // The link goes, and comes back.
        scene.set_link(OUTSIDE, LinkState::NoCarrier);
        assert_eq!(scene.pass(100), NOTHING, "the link is what is wrong");
        scene.set_link(OUTSIDE, LinkState::Up);
        assert_eq!(scene.pass(PATIENCE), NOTHING);
        assert_eq!(scene.pass(1).len(), 1);
        // Without an address, a neighbour solicitation can't be sent.
        scene.network.interfaces[usize::from(OUTSIDE)].addresses.clear();
        assert_eq!(scene.pass(100).len(), usize::from(is_v4));
    }
}

/// The process was suspended: answers may lie there that nobody has read yet.
#[test]
fn a_pause_of_ours_counts_as_one_interval() {
    for Names { default, router, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.route(&[(default, &[(OUTSIDE, router)])]);
        scene.probed(&[(OUTSIDE, router, Unknown)]);
        assert_eq!(scene.look(), NOTHING);
        for _ in 1..PATIENCE {
            scene.now += Duration::from_hours(1);
            assert_eq!(scene.look(), NOTHING);
            assert_eq!(scene.look(), NOTHING, "however often we look");
        }
        assert_eq!(scene.pass(1).len(), 1);
    }
}

#[test]
fn routes_that_are_gone_are_missed_until_a_next_hop_answers_again() {
    for Names { family, net, node, second, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.route(&[(net, &[(INSIDE, node)])]);
        scene.probed(&[(INSIDE, node, Up)]);
        assert_eq!(scene.look(), NOTHING);
        scene.route(&[]);
        scene.probed(&[]);
        assert_eq!(scene.look(), NOTHING);
        assert_eq!(scene.pass(PATIENCE - 1), NOTHING);
        let words = format!("no route for {family} is left inside, it led to {node} on if0");
        assert_eq!(scene.pass(1), std::slice::from_ref(&words));
        assert_eq!(scene.pass(100), std::slice::from_ref(&words));
        // Another one comes, which doesn't answer yet, and then never does.
        scene.route(&[(net, &[(INSIDE, second)])]);
        scene.probed(&[(INSIDE, second, Unknown)]);
        assert_eq!(scene.look(), std::slice::from_ref(&words));
        assert_eq!(scene.pass(PATIENCE - 1), [words]);
        assert_eq!(scene.pass(1), [format!("no next hop answers inside: {second} on if0")]);
        scene.probed(&[(INSIDE, second, Up)]);
        assert_eq!(scene.look(), NOTHING);
        assert_eq!(scene.pass(100), NOTHING);
    }
}

#[test]
fn a_default_route_that_is_gone_is_missed_whatever_others_answer() {
    for Names { family, default, net, router, second, .. } in FAMILIES {
        let mut scene = Scene::new();
        let (main, other) = ([(OUTSIDE, router)], [(OUTSIDE, second)]);
        let whole: [(&str, &[(u8, &str)]); 2] = [(default, &main), (net, &other)];
        scene.route(&whole);
        scene.probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
        assert_eq!(scene.look(), NOTHING);
        scene.route(&whole[1..]);
        scene.probed(&[(OUTSIDE, second, Up)]);
        assert_eq!(scene.pass(PATIENCE), NOTHING);
        let words = format!("no default route for {family} is left outside, it led to {router} on if1");
        assert_eq!(scene.pass(1), std::slice::from_ref(&words));
        assert_eq!(scene.pass(100), [words]);
        scene.route(&whole);
        scene.probed(&[(OUTSIDE, router, Up), (OUTSIDE, second, Up)]);
        assert_eq!(scene.look(), NOTHING);
        // It leads to the other side now.
        scene.route(&[(default, &[(INSIDE, second)])]);
        scene.probed(&[(INSIDE, second, Up)]);
        assert_eq!(scene.pass(100), NOTHING);
    }
}

#[test]
fn routes_that_are_replaced_in_steps_are_not_missed() {
    for Names { default, router, .. } in FAMILIES {
        let mut scene = Scene::new();
        for _ in 0..10 {
            scene.route(&[(default, &[(OUTSIDE, router)])]);
            scene.probed(&[(OUTSIDE, router, Up)]);
            assert_eq!(scene.pass(1), NOTHING);
            scene.route(&[]);
            scene.probed(&[]);
            assert_eq!(scene.pass(PATIENCE), NOTHING);
            scene.route(&[(default, &[(OUTSIDE, router)])]);
            scene.probed(&[(OUTSIDE, router, Unknown)]);
            assert_eq!(scene.pass(1), NOTHING, "back in time, and asked for");
        }
    }
}

#[test]
fn a_family_that_policy_does_not_need_or_that_never_had_a_route_is_not_missed() {
    for Names { is_v4, default, router, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.route(&[(default, &[(OUTSIDE, router)])]);
        scene.probed(&[(OUTSIDE, router, Up)]);
        assert_eq!(scene.pass(100), NOTHING, "the other family is needed, and never had a route");
        scene.route(&[]);
        scene.probed(&[]);
        assert_eq!(scene.pass(PATIENCE + 1).len(), 1);
        scene.needs[usize::from(is_v4)] = false;
        assert_eq!(scene.look(), NOTHING, "its VIPs are removed, too");
        scene.needs[usize::from(is_v4)] = true;
        assert_eq!(scene.pass(100), NOTHING, "that is forgotten");
    }
}

#[test]
fn while_a_link_is_the_fault_its_routes_are_not_missed() {
    for Names { default, router, .. } in FAMILIES {
        for require in [Require::All, Require::Any] {
            let mut scene = Scene::with(Health { links: require, ..Health::default() });
            scene.route(&[(default, &[(OUTSIDE, router)])]);
            scene.probed(&[(OUTSIDE, router, Up)]);
            assert_eq!(scene.look(), NOTHING);
            scene.set_link(OUTSIDE, LinkState::Down);
            scene.route(&[]);
            scene.probed(&[]);
            assert_eq!(scene.pass(100), NOTHING);
            // The kernel doesn't put routes back with the link.
            scene.set_link(OUTSIDE, LinkState::Up);
            assert_eq!(scene.pass(PATIENCE), NOTHING, "whoever does has time");
            assert_eq!(scene.pass(1).len(), 1);
            scene.set_link(OUTSIDE, LinkState::Down);
            assert_eq!(scene.pass(100), NOTHING);
            // One that is up stands in for its link, but not for its routes.
            scene.link(2, Role::Outside);
            assert_eq!(scene.pass(100).len(), usize::from(require == Require::Any));
        }
    }
}

#[test]
fn targets_stand_for_the_default_route_of_their_interface() {
    for Names { default, net, router, second, node, .. } in FAMILIES {
        let target = HealthTarget { interface: "if1".to_owned(), address: node.parse().unwrap() };
        let mut scene = Scene::with(Health { targets: vec![target], ..Health::default() });
        scene.link(2, Role::Outside);
        scene.route(&[(default, &[(OUTSIDE, router)]), (net, &[(2, second)])]);
        scene.probed(&[(OUTSIDE, node, Up), (2, second, Down)]);
        assert_eq!(scene.look(), NOTHING);
        scene.probed(&[(OUTSIDE, node, Down), (2, second, Up)]);
        assert_eq!(scene.look(), [format!("no next hop of the default route answers outside: {node} on if1")]);
    }
}

#[test]
fn on_a_link_that_is_both_sides_it_is_one_fault() {
    for Names { family, default, net, router, second, .. } in FAMILIES {
        let mut scene = Scene::new();
        scene.link(INSIDE, Role::Both);
        scene.route(&[(default, &[(INSIDE, router)]), (net, &[(INSIDE, second)])]);
        scene.probed(&[(INSIDE, router, Down), (INSIDE, second, Up)]);
        assert_eq!(scene.look(), [format!("no next hop of the default route answers inside: {router} on if0")]);
        scene.probed(&[(INSIDE, router, Up), (INSIDE, second, Down)]);
        assert_eq!(scene.look(), NOTHING);
        scene.route(&[]);
        scene.probed(&[]);
        let words = format!("no default route for {family} is left inside, it led to {router} on if0");
        assert_eq!(scene.pass(PATIENCE + 1), [words]);
    }
}

#[test]
fn a_fault_names_three_next_hops_and_counts_the_others() {
    let mut scene = Scene::new();
    let names: Vec<String> = (1..=9).map(|n| format!("10.0.0.{n}")).collect();
    let hops: Vec<_> = names.iter().map(|name| (INSIDE, name.as_str(), Down)).collect();
    scene.probed(&hops);
    let said = scene.look();
    assert_eq!(said.len(), 1);
    assert!(said[0].ends_with(": 10.0.0.1 on if0, 10.0.0.2 on if0, 10.0.0.3 on if0 and 6 more"), "{said:?}");
}
