//! Policy changes with open sessions: affected sessions are revalidated by their next packet, in both directions;
//! others are unaffected.

use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::FileFailurePersistence;
use vipgate_coverage::property;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::spec::{EndpointSpec, VipSpec};
use vipgate_dataplane::session::end_reason::EndReason;
use vipgate_testkit::*;

/// Publishes the difference between two policies.
pub(crate) fn publish_change(gateway: &mut Gateway, old: &PolicySet, new: &PolicySet) {
    let snapshot = gateway.builder.with_change(&PolicyChange::between(old, new)).unwrap();
    gateway.publisher.publish(snapshot);
}

/// A modification of the policy.
type Modification = fn(&mut PolicySet);

/// The initial policy with a modification.
fn modified(modify: Modification) -> PolicySet {
    let mut set = policy();
    modify(&mut set);
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

/// Two connections through one gateway: A is affected by the change, B is not.
struct TwoConnections {
    a: Connection,
    b: (SocketAddr, SocketAddr, SocketAddr),
}

const A: (&str, &str) = ("10.244.1.5:4000", "198.51.100.10:443");
const B: [(&str, &str); 2] = [("10.244.1.6:4000", "198.51.100.20:443"), ("10.244.1.21:4000", "198.51.100.20:443")];

impl TwoConnections {
    fn established(b: (&str, &str)) -> Self {
        let b = Connection::established(Gateway::new(&Setup::default()), b);
        let Connection { gateway, pod, remote, vip } = b;
        Self { a: Connection::established(gateway, A), b: (pod, remote, vip) }
    }

    /// B continues in both directions, in the same session.
    fn assert_b_continues(&mut self) {
        let (pod, remote, vip) = self.b;
        let gateway = &mut self.a.gateway;
        assert_eq!(ends(&gateway.pod_sends(&tcp(pod, remote, "A", 1001, 5001))), (vip, remote));
        assert_eq!(ends(&gateway.remote_sends(&tcp(remote, vip, "A", 5001, 1001))), (remote, pod));
    }
}

#[test]
fn an_unrelated_change_leaves_sessions_open() {
    let changes: [(&str, Modification); 7] = [
        ("version", |set| set.version = "next".into()),
        ("a VIP's reserved ports", |set| set.vips[0].reserved_ports = vec![22]),
        ("a new VIP after the others", |set| {
            add_vip(set, "192.0.2.12");
            for address in ["10.244.1.5", "10.244.1.6", "10.244.1.21"] {
                endpoint(set, address).vips.push(ip("192.0.2.12"));
            }
        }),
        ("another endpoint is removed", |set| set.endpoints.retain(|endpoint| endpoint.address != ip("fd00:244:1::5"))),
        ("another VIP is removed", |set| {
            set.endpoints.retain(|endpoint| endpoint.address.is_ipv4());
            set.vips.retain(|vip| vip.address.is_ipv4());
        }),
        ("another policy that covers it", |set| {
            let mut other = set.policies[0].clone();
            other.name = "c".into();
            set.policies.push(other);
            for address in ["10.244.1.5", "10.244.1.6"] {
                endpoint(set, address).policy = "c".into();
            }
        }),
        ("limits", |set| set.policies[0].limits.sessions = Some(1)),
    ];
    for (what, modify) in changes {
        for b in B {
            let mut two = TwoConnections::established(b);
            publish_change(&mut two.a.gateway, &policy(), &modified(modify));
            two.a.pod_sends("A", 1001, 5001);
            two.assert_b_continues();
            two.a.remote_sends("A", 5001, 1001);
            let gateway = &mut two.a.gateway;
            assert_eq!((gateway.sessions(), ended_by_policy(gateway)), (2, 0), "{what}");
            gateway.assert_delta("egress 6, reply 4, created 2");
        }
    }
}

#[test]
fn an_invalidated_session_ends_on_its_next_packet() {
    // The drop reason of the pod's next packet; the remote's is always no_service.
    let changes: [(&str, DropReason, Modification); 5] = [
        ("another policy", DropReason::NoSession, |set| {
            // .5 gets a policy with another VIP; for .6 the policy is renamed.
            set.policies[0].name = "c".into();
            set.endpoints.iter_mut().filter(|it| &*it.policy == "a").for_each(|it| it.policy = "c".into());
            endpoint(set, "10.244.1.5").policy = "b".into();
            endpoint(set, "10.244.1.5").vips = vec![ip("192.0.2.11")];
        }),
        ("another VIP", DropReason::NoSession, |set| endpoint(set, "10.244.1.5").vips = vec![ip("192.0.2.11")]),
        ("no VIPs", DropReason::NoSession, |set| endpoint(set, "10.244.1.5").vips.clear()),
        ("no endpoint", DropReason::NoPolicy, |set| set.endpoints.retain(|it| it.address != ip("10.244.1.5"))),
        ("no endpoint and no VIP", DropReason::NoPolicy, |set| {
            set.endpoints.retain(|it| !it.vips.contains(&ip("192.0.2.10")));
            set.vips.retain(|vip| vip.address != ip("192.0.2.10"));
        }),
    ];
    for (what, reason, modify) in changes {
        for remote_first in [false, true] {
            // In the last case, other pods of A's VIP are removed, too.
            for b in B.into_iter().filter(|b| b.0.contains(".21:") || !what.contains("and no VIP")) {
                let mut two = TwoConnections::established(b);
                publish_change(&mut two.a.gateway, &policy(), &modified(modify));
                two.assert_b_continues();
                let Connection { gateway, pod, remote, vip } = &mut two.a;
                let from_pod = tcp(*pod, *remote, "A", 1001, 5001);
                let from_remote = tcp(*remote, *vip, "A", 5001, 1001);
                let mut packets = [(INSIDE, from_pod, reason), (OUTSIDE, from_remote, DropReason::NoService)];
                packets.rotate_left(usize::from(remote_first));
                for (packet, (interface, bytes, _)) in packets.iter().enumerate() {
                    assert!(gateway.receive(0, *interface, bytes).is_empty(), "{what}, packet {packet}");
                    assert_eq!((gateway.sessions(), ended_by_policy(gateway)), (1, 1), "{what}, packet {packet}");
                }
                assert_eq!(gateway.drops(), packets.map(|(.., reason)| (reason, 1)).into(), "{what}");
                two.assert_b_continues();
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

/// Batches in which every session was last validated against an older policy.
#[test]
fn affected_sessions_are_found_among_unaffected_ones() {
    const EACH: u16 = 20;
    let mut gateway = Gateway::new(&Setup::default());
    let remote = at("198.51.100.10:53");
    let pods = ["10.244.1.5", "10.244.1.6", "10.244.1.21"];
    let sources = pods.iter().flat_map(|pod| (0..EACH).map(|n| SocketAddr::new(ip(pod), 4000 + n)));
    let seen = |sent: Vec<(InterfaceId, Vec<u8>)>| sent.iter().map(|(_, bytes)| ends(bytes)).collect::<Vec<_>>();
    let sources: Vec<SocketAddr> = sources.collect();
    let send = |gateway: &mut Gateway| {
        for &source in &sources {
            assert!(gateway.workers[0].io().inject(INSIDE, &packet(Protocol::Udp, source, remote)));
        }
        seen(gateway.run())
    };
    let first = send(&mut gateway);
    assert_eq!(first.len(), sources.len());
    let mut set = policy();
    for turn in 0..8 {
        // An unrelated endpoint is added or removed.
        let old = set.clone();
        set.endpoints.retain(|endpoint| !endpoint.address.to_string().starts_with("10.9."));
        set.endpoints.push(EndpointSpec { address: ip(&format!("10.9.0.{turn}")), ..set.endpoints[0].clone() });
        publish_change(&mut gateway, &old, &set);
        assert_eq!(send(&mut gateway), first, "turn {turn}");
    }
    let old = set.clone();
    endpoint(&mut set, "10.244.1.6").vips.clear();
    publish_change(&mut gateway, &old, &set);
    let others: Vec<_> =
        first.iter().enumerate().filter(|(i, _)| i / usize::from(EACH) != 1).map(|(_, it)| *it).collect();
    assert_eq!(send(&mut gateway), others);
    assert_eq!((gateway.sessions(), ended_by_policy(&gateway)), (2 * u64::from(EACH), u64::from(EACH)));
    gateway.assert_delta("egress 580, drop no_vip 20, ended policy 20, created 60");
}

#[test]
fn a_new_exclusion_ends_only_matching_sessions() {
    // A's remote is excluded, B's isn't; they have one policy.
    let excluding = modified(|set| set.policies[0].excluded.push("198.51.100.10/32".parse().unwrap()));
    for remote_first in [false, true] {
        let mut two = TwoConnections::established(B[0]);
        publish_change(&mut two.a.gateway, &policy(), &excluding);
        let Connection { gateway, pod, remote, vip } = &mut two.a;
        let from_pod = tcp(*pod, *remote, "A", 1001, 5001);
        for turn in [remote_first, !remote_first] {
            if turn {
                assert!(gateway.receive(0, OUTSIDE, &tcp(*remote, *vip, "A", 5001, 1001)).is_empty());
            } else {
                assert_eq!(ends(&gateway.pod_sends(&from_pod)), (*pod, *remote), "unchanged");
            }
            assert_eq!((gateway.sessions(), ended_by_policy(gateway)), (1, 1));
        }
        // The session has ended and does not return.
        publish_change(gateway, &excluding, &policy());
        assert!(gateway.receive(0, INSIDE, &from_pod).is_empty());
        assert_eq!(gateway.drops(), [(DropReason::NoService, 1), (DropReason::NoSession, 1)].into());
        two.assert_b_continues();
        two.a.gateway.assert_delta(
            "egress 5, reply 3, unchanged 1, drop no_service 1, drop no_session 1, ended policy 1, created 2",
        );
    }
}

#[test]
fn a_remote_that_becomes_a_vip_is_reached_by_hairpinning_only() {
    let mut two = TwoConnections::established(B[0]);
    let with_remote_vip = modified(|set| add_vip(set, "198.51.100.10"));
    publish_change(&mut two.a.gateway, &policy(), &with_remote_vip);
    let Connection { gateway, pod, remote, vip } = &mut two.a;
    assert!(gateway.receive(0, OUTSIDE, &tcp(*remote, *vip, "A", 5001, 1001)).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::SpoofedSource, 1)].into());
    assert!(gateway.receive(0, INSIDE, &tcp(*pod, *remote, "A", 1001, 5001)).is_empty());
    assert_eq!(gateway.drops().get(&DropReason::NoService), Some(&1), "hairpinned");
    two.assert_b_continues();
    publish_change(&mut two.a.gateway, &with_remote_vip, &policy());
    two.a.remote_sends("A", 5001, 1001);
    two.a.pod_sends("A", 1001, 5001);
    assert_eq!((two.a.gateway.sessions(), ended_by_policy(&two.a.gateway)), (2, 0));
    two.a.gateway.assert_delta("egress 7, reply 4, drop no_service 1, drop spoofed_source 1, created 2");
}

#[test]
fn a_removed_vip_is_kept_until_its_last_port_leaves_quarantine() {
    let mut gateway = Gateway::new(&Setup::default());
    let request = packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.10:53"));
    let seen = gateway.pod_sends(&request);
    let without = modified(|set| {
        set.endpoints.retain(|endpoint| &*endpoint.policy != "b");
        set.vips.remove(1);
    });
    let has_vip = |gateway: &mut Gateway, set: &PolicySet| {
        gateway.set_policy(set);
        gateway.builder.snapshot().policy.vips().any(|vip| vip.address == ip("192.0.2.11"))
    };
    assert!(has_vip(&mut gateway, &without));
    // The session ends with the next packet, its port is in quarantine for two seconds, and the sweep takes up to one.
    assert!(gateway.receive(0, OUTSIDE, &reply_to(&seen, Protocol::Udp)).is_empty());
    gateway.advance(1_900);
    assert!(has_vip(&mut gateway, &without));
    gateway.advance(1_500);
    assert!(!has_vip(&mut gateway, &without));
    // It can be added again.
    assert!(has_vip(&mut gateway, &policy()));
    gateway.pod_sends(&request);
    gateway.assert_delta("egress 2, drop no_service 1, ended policy 1, created 2");
}

/// One step of both gateways.
#[derive(Clone, Debug)]
enum Step {
    Pod { protocol: Protocol, pod: usize, port: u16, remote: usize, worker: usize, flags: usize },
    Reply { which: Index, worker: usize },
    Change(Vec<Edit>),
    Pass(u32),
}

/// One difference to the next policy.
#[derive(Clone, Copy, Debug)]
enum Edit {
    /// An endpoint gets this policy and these VIPs (a bit mask), or is removed.
    Endpoint { at: usize, assignment: Option<(usize, u8)> },
    /// A VIP is added or removed.
    Vip { at: usize, is_present: bool },
    /// Excluded destinations of a policy.
    Excluded { policy: usize, what: usize },
}

const PODS: [&str; 5] = ["10.244.1.5", "10.244.1.6", "10.244.1.21", "fd00:244:1::5", "fd00:244:1::6"];
/// Two of them are remotes as well, and become VIPs.
const VIPS: [&str; 5] = ["192.0.2.10", "192.0.2.11", "198.51.100.10", "2001:db8::10", "2001:db8:51::10"];
const REMOTES: [[&str; 4]; 2] = [
    ["198.51.100.10:53", "198.51.100.11:443", "198.51.100.200:53", "192.0.2.11:20001"],
    ["[2001:db8:51::10]:53", "[2001:db8:51::11]:443", "[2001:db8:51::12]:53", "[2001:db8::10]:20001"],
];
const FLAGS: [&str; 4] = ["S", "S", "A", "FA"];

/// Model of the next policy.
struct PolicyModel {
    endpoints: [Option<(usize, u8)>; PODS.len()],
    vips: [bool; VIPS.len()],
    excluded: [usize; 2],
}

impl PolicyModel {
    fn edit(&mut self, edits: Vec<Edit>) {
        for edit in edits {
            match edit {
                Edit::Endpoint { at, assignment } => self.endpoints[at] = assignment,
                Edit::Vip { at, is_present } => self.vips[at] = is_present,
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
        for (pod, assignment) in PODS.iter().zip(&self.endpoints) {
            let Some((policy, bits)) = *assignment else { continue };
            let (address, policy) = (ip(pod), set.policies[policy].name.clone());
            let own = there.iter().filter(|(at, vip)| bits >> at & 1 == 1 && vip.is_ipv4() == address.is_ipv4());
            let vips = own.map(|(_, vip)| *vip).collect();
            set.endpoints.push(EndpointSpec {
                address,
                policy,
                vips,
                name: "".into(),
                gateway: None,
                slot: None,
                remarks: vec![],
            });
        }
        set
    }
}

fn step() -> impl Strategy<Value = Step> {
    let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Echo)];
    let assignment = prop::option::weighted(0.8, (0..2_usize, any::<u8>()));
    let edit = prop_oneof![
        4 => (0..PODS.len(), assignment).prop_map(|(at, assignment)| Edit::Endpoint { at, assignment }),
        2 => (0..VIPS.len(), prop::bool::weighted(0.7)).prop_map(|(at, is_present)| Edit::Vip { at, is_present }),
        1 => (0..2_usize, 0..3_usize).prop_map(|(policy, what)| Edit::Excluded { policy, what }),
    ];
    prop_oneof![
        6 => (protocol, 0..PODS.len(), 1000_u16..1003, 0..4_usize, 0..2_usize, 0..FLAGS.len()).prop_map(
            |(protocol, pod, port, remote, worker, flags)| Step::Pod { protocol, pod, port, remote, worker, flags }
        ),
        5 => (any::<Index>(), 0..2_usize).prop_map(|(which, worker)| Step::Reply { which, worker }),
        2 => prop::collection::vec(edit, 0..4).prop_map(Step::Change),
        1 => (1_u32..1_500).prop_map(Step::Pass),
    ]
}

/// A gateway that revalidates every session after every change, and one that revalidates only affected sessions.
struct Pair {
    full: Gateway,
    selective: Gateway,
    set: PolicySet,
    has_duplicate_route: bool,
}

impl Pair {
    fn new() -> Self {
        let gateway = || {
            let mut gateway = Gateway::new(&Setup { workers: 2, ..Setup::default() });
            gateway.skip_counter_check();
            gateway
        };
        Self { full: gateway(), selective: gateway(), set: policy(), has_duplicate_route: false }
    }

    fn change(&mut self, set: PolicySet) {
        let old = std::mem::replace(&mut self.set, set);
        publish_change(&mut self.selective, &old, &self.set);
        // A duplicate route is added or removed: that invalidates all sessions and changes no next hop.
        let mut network = network();
        self.has_duplicate_route = !self.has_duplicate_route;
        network.routes.extend(self.has_duplicate_route.then(|| network.routes[0].clone()));
        self.full.builder.with_change(&PolicyChange::between(&old, &self.set)).unwrap();
        self.full.set_network(network);
    }

    /// Both gateways receive the packet; they must send and count the same.
    fn receive(&mut self, worker: usize, interface: InterfaceId, bytes: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
        let [(sent, seen), other] = [&mut self.full, &mut self.selective].map(|gateway| {
            let sent = gateway.receive(worker, interface, bytes);
            (sent, (gateway.drops(), gateway.sessions(), ended_by_policy(gateway)))
        });
        assert_eq!((&sent, seen), (&other.0, other.1));
        sent
    }
}

#[test]
fn selective_revalidation_equals_full_revalidation() {
    // Seeds of failures are kept in a file, and tried first.
    let seeds = FileFailurePersistence::Direct("tests/engine/policy_changes.regressions");
    let config = ProptestConfig { cases: 250, failure_persistence: Some(Box::new(seeds)), ..ProptestConfig::default() };
    let classes =
        ["sent", "reply delivered", "modified", "ended by policy", "no_policy", "no_vip", "no_session", "no_service"];
    property(config, &prop::collection::vec(step(), 1..100), &classes, |steps, coverage| {
        let endpoints = [Some((0, 0b01001)); PODS.len()];
        let mut model = PolicyModel { endpoints, vips: [true, true, false, true, false], excluded: [0, 1] };
        let mut pair = Pair::new();
        pair.change(model.set());
        let mut seen: Vec<(Protocol, Vec<u8>)> = Vec::new();
        for step in steps {
            match step {
                Step::Pod { protocol, pod, port, remote, worker, flags } => {
                    let source: SocketAddr = (ip(PODS[pod]), port).into();
                    let remote = at(REMOTES[usize::from(source.is_ipv6())][remote]);
                    let bytes = match protocol {
                        Protocol::Tcp => tcp(source, remote, FLAGS[flags], 1000, 1),
                        _ => packet(protocol, source, remote),
                    };
                    for (interface, bytes) in pair.receive(worker, INSIDE, &bytes) {
                        if interface == OUTSIDE {
                            assert_policy_conformance(&pair.set, source.ip(), &bytes);
                            coverage.count("sent");
                            seen.push((protocol, bytes));
                        }
                    }
                }
                Step::Reply { which, worker } => {
                    if let Some((protocol, bytes)) = seen.get(which.index(seen.len().max(1))) {
                        let reply = on_link(OUTSIDE, reply_to(bytes, *protocol));
                        for (_, bytes) in pair.receive(worker, OUTSIDE, &reply) {
                            coverage.count("reply delivered");
                            prop_assert!(PODS.contains(&ends(&bytes).1.ip().to_string().as_str()));
                        }
                    }
                }
                Step::Change(edits) => {
                    model.edit(edits);
                    coverage.count("modified");
                    pair.change(model.set());
                }
                Step::Pass(ms) => {
                    for gateway in [&mut pair.full, &mut pair.selective] {
                        gateway.advance(ms);
                    }
                }
            }
        }
        coverage.add("ended by policy", ended_by_policy(&pair.selective));
        pair.selective.drops().into_iter().for_each(|(reason, count)| coverage.add(reason.name(), count));
        Ok(())
    });
}

/// A packet that was sent belongs to an endpoint, and has one of its VIPs, or is unchanged if policy excludes the
/// destination.
fn assert_policy_conformance(set: &PolicySet, pod: IpAddr, bytes: &[u8]) {
    let (source, remote) = ends(bytes);
    let endpoint =
        set.endpoints.iter().find(|endpoint| endpoint.address == pod).expect("only endpoints' packets are sent");
    let policy = set.policies.iter().find(|policy| policy.name == endpoint.policy).unwrap();
    let is_excluded = policy.excluded.iter().any(|net| net.contains(&remote.ip()));
    assert!(
        if is_excluded { source.ip() == pod } else { endpoint.vips.contains(&source.ip()) },
        "{source} to {remote}"
    );
}
