//! Policy changes while sessions are open: whom a change concerns feels it with the next packet, in both directions; for everybody
//! else it didn't happen.

use std::net::{IpAddr, SocketAddr};

use crate::support::*;
use crate::tally::property;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::FileFailurePersistence;
use vipgate_dataplane::counters::{DropReason, EndReason};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::spec::{EndpointSpec, PolicySet, VipSpec};

/// Publishes what makes `new` of the policy in force.
pub(crate) fn change(gateway: &mut Gateway, old: &PolicySet, new: &PolicySet) {
    let snapshot = gateway.builder.with_change(&PolicyChange::between(old, new)).unwrap();
    gateway.publisher.publish(snapshot);
}

/// A change of policy.
type How = fn(&mut PolicySet);

/// The policy that every gateway begins with, after a change.
fn changed(how: How) -> PolicySet {
    let mut set = policy();
    how(&mut set);
    set
}

pub(crate) fn endpoint<'a>(set: &'a mut PolicySet, address: &str) -> &'a mut EndpointSpec {
    set.endpoints.iter_mut().find(|endpoint| endpoint.address == ip(address)).unwrap()
}

pub(crate) fn add_vip(set: &mut PolicySet, address: &str) {
    set.vips.push(VipSpec { address: ip(address), ..set.vips[0].clone() });
}

pub(crate) fn ended_by_policy(gateway: &Gateway) -> u64 {
    gateway.workers.iter().map(|w| w.counters().sessions_ended[EndReason::Policy as usize].get()).sum()
}

/// Two connections through one gateway: A, whom the change concerns, and B, whom it doesn't.
struct Two {
    a: Connection,
    b: (SocketAddr, SocketAddr, SocketAddr),
}

const A: (&str, &str) = ("10.244.1.5:4000", "198.51.100.10:443");
const B: [(&str, &str); 2] = [("10.244.1.6:4000", "198.51.100.20:443"), ("10.244.1.21:4000", "198.51.100.20:443")];

impl Two {
    fn established(b: (&str, &str)) -> Self {
        let b = Connection::established(Gateway::new(&Setup::default()), b);
        let Connection { gateway, pod, far, vip } = b;
        Self { a: Connection::established(gateway, A), b: (pod, far, vip) }
    }

    /// Both directions of B go on, as the session that it was.
    fn b_goes_on(&mut self) {
        let (pod, far, vip) = self.b;
        let gateway = &mut self.a.gateway;
        assert_eq!(ends(&gateway.pod_sends(&tcp(pod, far, "A", 1001, 5001))), (vip, far));
        assert_eq!(ends(&gateway.far_sends(&tcp(far, vip, "A", 5001, 1001))), (far, pod));
    }
}

#[test]
fn a_change_that_concerns_neither_session_leaves_both_going() {
    let changes: [(&str, How); 7] = [
        ("version", |set| set.version = "next".into()),
        ("a VIP's reserved ports", |set| set.vips[0].reserved_ports = vec![22]),
        ("new VIP behind the others", |set| {
            add_vip(set, "192.0.2.12");
            for address in ["10.244.1.5", "10.244.1.6", "10.244.1.21"] {
                endpoint(set, address).vips.push(ip("192.0.2.12"));
            }
        }),
        ("somebody else goes", |set| set.endpoints.retain(|endpoint| endpoint.address != ip("fd00:244:1::5"))),
        ("somebody else's VIP goes", |set| {
            set.endpoints.retain(|endpoint| endpoint.address.is_ipv4());
            set.vips.retain(|vip| vip.address.is_ipv4());
        }),
        ("another policy that allows it", |set| {
            let mut other = set.policies[0].clone();
            other.name = "c".into();
            set.policies.push(other);
            for address in ["10.244.1.5", "10.244.1.6"] {
                endpoint(set, address).policy = "c".into();
            }
        }),
        ("limits", |set| set.policies[0].limits.sessions = Some(1)),
    ];
    for (what, how) in changes {
        for b in B {
            let mut two = Two::established(b);
            change(&mut two.a.gateway, &policy(), &changed(how));
            two.a.pod_says("A", 1001, 5001);
            two.b_goes_on();
            two.a.far_says("A", 5001, 1001);
            let gateway = &mut two.a.gateway;
            assert_eq!((gateway.sessions(), ended_by_policy(gateway)), (2, 0), "{what}");
            gateway.assert_delta("egress 6, reply 4, created 2");
        }
    }
}

#[test]
fn what_takes_a_sessions_ground_away_ends_it_on_its_next_packet() {
    // What the pod's next packet is told; the far side's always that nobody is there.
    let changes: [(&str, DropReason, How); 5] = [
        ("its policy", DropReason::NoSession, |set| {
            // .5 comes under a policy with another VIP; for .6 it has a new name.
            set.policies[0].name = "c".into();
            set.endpoints.iter_mut().filter(|it| &*it.policy == "a").for_each(|it| it.policy = "c".into());
            endpoint(set, "10.244.1.5").policy = "b".into();
            endpoint(set, "10.244.1.5").vips = vec![ip("192.0.2.11")];
        }),
        ("its VIP", DropReason::NoSession, |set| endpoint(set, "10.244.1.5").vips = vec![ip("192.0.2.11")]),
        ("all its VIPs", DropReason::NoSession, |set| endpoint(set, "10.244.1.5").vips.clear()),
        ("itself", DropReason::NoPolicy, |set| set.endpoints.retain(|it| it.address != ip("10.244.1.5"))),
        ("itself, and what it had", DropReason::NoPolicy, |set| {
            set.endpoints.retain(|it| !it.vips.contains(&ip("192.0.2.10")));
            set.vips.retain(|vip| vip.address != ip("192.0.2.10"));
        }),
    ];
    for (what, reason, how) in changes {
        for far_first in [false, true] {
            // Whoever has the VIP of A goes with it, in the last case.
            for b in B.into_iter().filter(|b| b.0.contains(".21:") || !what.contains("and what")) {
                let mut two = Two::established(b);
                change(&mut two.a.gateway, &policy(), &changed(how));
                two.b_goes_on();
                let Connection { gateway, pod, far, vip } = &mut two.a;
                let from_pod = tcp(*pod, *far, "A", 1001, 5001);
                let from_far = tcp(*far, *vip, "A", 5001, 1001);
                let mut packets = [(INSIDE, from_pod, reason), (OUTSIDE, from_far, DropReason::NoService)];
                packets.rotate_left(usize::from(far_first));
                for (packet, (interface, bytes, _)) in packets.iter().enumerate() {
                    assert!(gateway.arrives(0, *interface, bytes).is_empty(), "{what}, packet {packet}");
                    assert_eq!((gateway.sessions(), ended_by_policy(gateway)), (1, 1), "{what}, packet {packet}");
                }
                assert_eq!(gateway.drops(), packets.map(|(.., reason)| (reason, 1)).into(), "{what}");
                two.b_goes_on();
                two.a.gateway.assert_delta(match reason {
                    DropReason::NoSession => {
                        "egress 6, reply 4, drop no_service 1, drop no_session 1, ended policy 1, created 2"
                    }
                    _ => "egress 6, reply 4, drop no_service 1, drop no_policy 1, ended policy 1, created 2",
                });
            }
        }
    }
}

/// Batch after batch in which every session was checked against an older policy.
#[test]
fn whoever_a_change_concerns_is_found_among_many_that_it_does_not_concern() {
    const EACH: u16 = 20;
    let mut gateway = Gateway::new(&Setup::default());
    let far = at("198.51.100.10:53");
    let pods = ["10.244.1.5", "10.244.1.6", "10.244.1.21"];
    let sources = pods.iter().flat_map(|pod| (0..EACH).map(|n| SocketAddr::new(ip(pod), 4000 + n)));
    let seen = |sent: Vec<(InterfaceId, Vec<u8>)>| sent.iter().map(|(_, bytes)| ends(bytes)).collect::<Vec<_>>();
    let sources: Vec<SocketAddr> = sources.collect();
    let send = |gateway: &mut Gateway| {
        for &source in &sources {
            assert!(gateway.workers[0].io().inject(INSIDE, &packet(Protocol::Udp, source, far)));
        }
        seen(gateway.run())
    };
    let first = send(&mut gateway);
    assert_eq!(first.len(), sources.len());
    let mut set = policy();
    for turn in 0..8 {
        // An endpoint that nobody has heard of.
        let was = set.clone();
        set.endpoints.retain(|endpoint| !endpoint.address.to_string().starts_with("10.9."));
        set.endpoints.push(EndpointSpec { address: ip(&format!("10.9.0.{turn}")), ..set.endpoints[0].clone() });
        change(&mut gateway, &was, &set);
        assert_eq!(send(&mut gateway), first, "turn {turn}");
    }
    let was = set.clone();
    endpoint(&mut set, "10.244.1.6").vips.clear();
    change(&mut gateway, &was, &set);
    let others: Vec<_> =
        first.iter().enumerate().filter(|(i, _)| i / usize::from(EACH) != 1).map(|(_, it)| *it).collect();
    assert_eq!(send(&mut gateway), others);
    assert_eq!((gateway.sessions(), ended_by_policy(&gateway)), (2 * u64::from(EACH), u64::from(EACH)));
    assert_eq!(gateway.drops(), [(DropReason::NoVip, u64::from(EACH))].into());
    gateway.assert_delta("egress 580, drop no_vip 20, ended policy 20, created 60");
}

#[test]
fn what_is_excluded_concerns_everybody() {
    // A's far side is excluded, and B's isn't; they have one policy.
    let excluding = changed(|set| set.policies[0].excluded.push("198.51.100.10/32".parse().unwrap()));
    for far_first in [false, true] {
        let mut two = Two::established(B[0]);
        change(&mut two.a.gateway, &policy(), &excluding);
        let Connection { gateway, pod, far, vip } = &mut two.a;
        let from_pod = tcp(*pod, *far, "A", 1001, 5001);
        for turn in [far_first, !far_first] {
            if turn {
                assert!(gateway.arrives(0, OUTSIDE, &tcp(*far, *vip, "A", 5001, 1001)).is_empty());
            } else {
                assert_eq!(ends(&gateway.pod_sends(&from_pod)), (*pod, *far), "as it came");
            }
            assert_eq!((gateway.sessions(), ended_by_policy(gateway)), (1, 1));
        }
        // No way back: the session has ended.
        change(gateway, &excluding, &policy());
        assert!(gateway.arrives(0, INSIDE, &from_pod).is_empty());
        assert_eq!(gateway.drops(), [(DropReason::NoService, 1), (DropReason::NoSession, 1)].into());
        two.b_goes_on();
        two.a.gateway.assert_delta(
            "egress 5, reply 3, unchanged 1, drop no_service 1, drop no_session 1, ended policy 1, created 2",
        );
    }
}

#[test]
fn a_far_side_that_becomes_a_vip_is_reached_inside_and_heard_no_more_from_outside() {
    let mut two = Two::established(B[0]);
    let with = changed(|set| add_vip(set, "198.51.100.10"));
    change(&mut two.a.gateway, &policy(), &with);
    let Connection { gateway, pod, far, vip } = &mut two.a;
    assert!(gateway.arrives(0, OUTSIDE, &tcp(*far, *vip, "A", 5001, 1001)).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::SpoofedSource, 1)].into());
    assert!(gateway.arrives(0, INSIDE, &tcp(*pod, *far, "A", 1001, 5001)).is_empty());
    assert_eq!(gateway.drops().get(&DropReason::NoService), Some(&1), "it has come around");
    two.b_goes_on();
    change(&mut two.a.gateway, &with, &policy());
    two.a.far_says("A", 5001, 1001);
    two.a.pod_says("A", 1001, 5001);
    assert_eq!((two.a.gateway.sessions(), ended_by_policy(&two.a.gateway)), (2, 0));
    two.a.gateway.assert_delta("egress 7, reply 4, drop no_service 1, drop spoofed_source 1, created 2");
}

#[test]
fn a_vip_stays_known_until_the_last_port_of_it_has_rested() {
    let mut gateway = Gateway::new(&Setup::default());
    let question = packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.10:53"));
    let seen = gateway.pod_sends(&question);
    let without = changed(|set| {
        set.endpoints.retain(|endpoint| &*endpoint.policy != "b");
        set.vips.remove(1);
    });
    let knows = |gateway: &mut Gateway, set: &PolicySet| {
        gateway.set_policy(set);
        gateway.builder.snapshot().policy.vips().any(|vip| vip.address == ip("192.0.2.11"))
    };
    assert!(knows(&mut gateway, &without));
    // Its session ends with the next packet, its port rests for two seconds, and the sweep takes one to come.
    assert!(gateway.arrives(0, OUTSIDE, &answer_to(&seen, Protocol::Udp)).is_empty());
    gateway.pass(1_900);
    assert!(knows(&mut gateway, &without));
    gateway.pass(1_500);
    assert!(!knows(&mut gateway, &without));
    // And it comes back as if it were new.
    assert!(knows(&mut gateway, &policy()));
    gateway.pod_sends(&question);
    gateway.assert_delta("egress 2, drop no_service 1, ended policy 1, created 2");
}

/// One thing that happens to both gateways.
#[derive(Clone, Debug)]
enum Step {
    Pod { protocol: Protocol, pod: usize, port: u16, far: usize, worker: usize, flags: usize },
    Answer { which: Index, worker: usize },
    Change(Vec<Edit>),
    Pass(u32),
}

/// One thing that is different in the next policy.
#[derive(Clone, Copy, Debug)]
enum Edit {
    /// An endpoint has this policy and these VIPs (bits), or is none.
    Endpoint { at: usize, look: Option<(usize, u8)> },
    /// A VIP is there, or isn't.
    Vip { at: usize, is_there: bool },
    /// What a policy excludes.
    Excluded { policy: usize, what: usize },
}

const PODS: [&str; 5] = ["10.244.1.5", "10.244.1.6", "10.244.1.21", "fd00:244:1::5", "fd00:244:1::6"];
/// Two of them are far sides as well, and become VIPs.
const VIPS: [&str; 5] = ["192.0.2.10", "192.0.2.11", "198.51.100.10", "2001:db8::10", "2001:db8:51::10"];
const FARS: [[&str; 4]; 2] = [
    ["198.51.100.10:53", "198.51.100.11:443", "198.51.100.200:53", "192.0.2.11:20001"],
    ["[2001:db8:51::10]:53", "[2001:db8:51::11]:443", "[2001:db8:51::12]:53", "[2001:db8::10]:20001"],
];
const FLAGS: [&str; 4] = ["S", "S", "A", "FA"];

/// What the next policy is made of.
struct World {
    endpoints: [Option<(usize, u8)>; PODS.len()],
    vips: [bool; VIPS.len()],
    excluded: [usize; 2],
}

impl World {
    fn edit(&mut self, edits: Vec<Edit>) {
        for edit in edits {
            match edit {
                Edit::Endpoint { at, look } => self.endpoints[at] = look,
                Edit::Vip { at, is_there } => self.vips[at] = is_there,
                Edit::Excluded { policy, what } => self.excluded[policy] = what,
            }
        }
    }

    fn set(&self) -> PolicySet {
        let mut set = policy();
        for (policy, what) in set.policies.iter_mut().zip(self.excluded) {
            let nets = [&[][..], &["198.51.100.128/25"], &["198.51.100.11/32", "2001:db8:51::11/128"]][what];
            policy.excluded = nets.iter().map(|net| net.parse().unwrap()).collect();
        }
        let there: Vec<(usize, IpAddr)> =
            VIPS.iter().enumerate().filter(|(at, _)| self.vips[*at]).map(|(at, text)| (at, ip(text))).collect();
        set.vips = there.iter().map(|(_, address)| VipSpec { address: *address, ..set.vips[0].clone() }).collect();
        set.endpoints.clear();
        for (pod, look) in PODS.iter().zip(&self.endpoints) {
            let Some((policy, bits)) = *look else { continue };
            let (address, policy) = (ip(pod), set.policies[policy].name.clone());
            let own = there.iter().filter(|(at, vip)| bits >> at & 1 == 1 && vip.is_ipv4() == address.is_ipv4());
            let vips = own.map(|(_, vip)| *vip).collect();
            set.endpoints.push(EndpointSpec { address, policy, vips, name: "".into(), gateway: None, remarks: vec![] });
        }
        set
    }
}

fn step() -> impl Strategy<Value = Step> {
    let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Echo)];
    let look = prop::option::weighted(0.8, (0..2_usize, any::<u8>()));
    let edit = prop_oneof![
        4 => (0..PODS.len(), look).prop_map(|(at, look)| Edit::Endpoint { at, look }),
        2 => (0..VIPS.len(), prop::bool::weighted(0.7)).prop_map(|(at, is_there)| Edit::Vip { at, is_there }),
        1 => (0..2_usize, 0..3_usize).prop_map(|(policy, what)| Edit::Excluded { policy, what }),
    ];
    prop_oneof![
        6 => (protocol, 0..PODS.len(), 1000_u16..1003, 0..4_usize, 0..2_usize, 0..FLAGS.len()).prop_map(
            |(protocol, pod, port, far, worker, flags)| Step::Pod { protocol, pod, port, far, worker, flags }
        ),
        5 => (any::<Index>(), 0..2_usize).prop_map(|(which, worker)| Step::Answer { which, worker }),
        2 => prop::collection::vec(edit, 0..4).prop_map(Step::Change),
        1 => (1_u32..1_500).prop_map(Step::Pass),
    ]
}

/// A gateway that checks every session again after every change, and one that does so with those that the change concerns.
struct Pair {
    slow: Gateway,
    fast: Gateway,
    set: PolicySet,
    has_route_twice: bool,
}

impl Pair {
    fn new() -> Self {
        let gateway = || {
            let mut gateway = Gateway::new(&Setup { workers: 2, ..Setup::default() });
            gateway.counts_vary();
            gateway
        };
        Self { slow: gateway(), fast: gateway(), set: policy(), has_route_twice: false }
    }

    fn change(&mut self, set: PolicySet) {
        let old = std::mem::replace(&mut self.set, set);
        change(&mut self.fast, &old, &self.set);
        // A route is there twice, or isn't any more: that concerns everybody and moves nobody.
        let mut network = network();
        self.has_route_twice = !self.has_route_twice;
        network.routes.extend(self.has_route_twice.then(|| network.routes[0].clone()));
        self.slow.builder.with_change(&PolicyChange::between(&old, &self.set)).unwrap();
        self.slow.set_network(network);
    }

    /// What both send: the same, with the same said about the rest.
    fn arrives(&mut self, worker: usize, interface: InterfaceId, bytes: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
        let [(sent, seen), other] = [&mut self.slow, &mut self.fast].map(|gateway| {
            let sent = gateway.arrives(worker, interface, bytes);
            (sent, (gateway.drops(), gateway.sessions(), ended_by_policy(gateway)))
        });
        assert_eq!((&sent, seen), (&other.0, other.1));
        sent
    }
}

#[test]
fn whoever_is_not_checked_again_would_have_passed() {
    // Each failure is kept in a file, from which later runs try it first.
    let kept = FileFailurePersistence::Direct("tests/engine/policy_changes.regressions");
    let config = ProptestConfig { cases: 250, failure_persistence: Some(Box::new(kept)), ..ProptestConfig::default() };
    let classes = ["sent", "answered", "changed", "ended by policy", "no_policy", "no_vip", "no_session", "no_service"];
    property(config, &prop::collection::vec(step(), 1..100), &classes, |steps, tally| {
        let endpoints = [Some((0, 0b01001)); PODS.len()];
        let mut world = World { endpoints, vips: [true, true, false, true, false], excluded: [0, 1] };
        let mut pair = Pair::new();
        pair.change(world.set());
        let mut seen: Vec<(Protocol, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Pod { protocol, pod, port, far, worker, flags } => {
                    let source: SocketAddr = (ip(PODS[pod]), port).into();
                    let far = at(FARS[usize::from(source.is_ipv6())][far]);
                    let bytes = match protocol {
                        Protocol::Tcp => tcp(source, far, FLAGS[flags], 1000, 1),
                        _ => packet(protocol, source, far),
                    };
                    for (interface, bytes) in pair.arrives(worker, INSIDE, &bytes) {
                        if interface == OUTSIDE {
                            is_what_policy_wants(&pair.set, source.ip(), &bytes);
                            tally.count("sent");
                            seen.push((protocol, bytes));
                        }
                    }
                }
                Step::Answer { which, worker } => {
                    if let Some((protocol, bytes)) = seen.get(which.index(seen.len().max(1))) {
                        let mut answer = answer_to(bytes, *protocol);
                        answer[..6].copy_from_slice(&OUTSIDE_MAC);
                        for (_, bytes) in pair.arrives(worker, OUTSIDE, &answer) {
                            tally.count("answered");
                            prop_assert!(PODS.contains(&ends(&bytes).1.ip().to_string().as_str()));
                        }
                    }
                }
                Step::Change(edits) => {
                    world.edit(edits);
                    tally.count("changed");
                    pair.change(world.set());
                }
                Step::Pass(ms) => [&mut pair.slow, &mut pair.fast].into_iter().for_each(|gateway| gateway.pass(ms)),
            }
        }
        tally.add("ended by policy", ended_by_policy(&pair.fast));
        pair.fast.drops().into_iter().for_each(|(reason, count)| tally.add(reason.name(), count));
        Ok(())
    });
}

/// A packet that has left is one of an endpoint, with a VIP of that, or unchanged where policy says so.
fn is_what_policy_wants(set: &PolicySet, pod: IpAddr, bytes: &[u8]) {
    let (source, far) = ends(bytes);
    let endpoint = set.endpoints.iter().find(|endpoint| endpoint.address == pod).expect("nobody else's leaves");
    let policy = set.policies.iter().find(|policy| policy.name == endpoint.policy).unwrap();
    let is_excluded = policy.excluded.iter().any(|net| net.contains(&far.ip()));
    assert!(if is_excluded { source.ip() == pod } else { endpoint.vips.contains(&source.ip()) }, "{source} to {far}");
}
