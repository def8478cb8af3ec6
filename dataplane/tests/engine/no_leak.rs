//! No leak under any frame: whatever arrives on either side, well-formed or not, with sessions open and policies that
//! change, nothing leaves on the outside interface with an address that its receiver must not see: that of a pod whose
//! packets to it are translated or dropped, as source or in the quote of an ICMP error. And nothing to a covered pod.
//!
//! The rule is written from the policy, and reads packets with a parser of its own (`rule.rs`). The seed of a failure is
//! stored in `no_leak.regressions`, and played again by every run; `PROPTEST_RNG_SEED` selects other frames.

mod frames;
mod packets;
mod rule;

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::PacketIo;
use vipgate_dataplane::policy::spec::*;
use vipgate_testkit::services::{backend, service};
use vipgate_testkit::*;

use self::frames::{Covered, FrameSpec, PolicyKind, Step, Sweep, policy_kind, step};
use self::packets::{INSIDE_PLACES, address, error_message, packet_with};
use self::rule::{Rule, Shown, shown};
use crate::batch_boundaries::config;
use crate::icmp::with_addresses;

/// Packets sent that later steps refer to.
const MAX_SEEN: usize = 48;
/// Frames that arrive before the workers run.
const BATCH: usize = 48;
/// Free frames of a worker below which it gets some of others.
const MIN_FREE: u64 = 96;

/// What there is at the start of a run.
#[derive(Clone, Copy, Debug)]
struct Start {
    workers: u8,
    policy: PolicyKind,
    /// Pods have routes of their own; else the default route, which leads outside, is all there is.
    has_pod_routes: bool,
}

fn start() -> impl Strategy<Value = Start> {
    (1..4_u8, policy_kind(), prop::bool::weighted(0.8)).prop_map(|(workers, policy, has_pod_routes)| Start {
        workers,
        policy,
        has_pod_routes,
    })
}

/// The network: every host inside is a neighbor, all others are behind the router outside.
fn world(has_pod_routes: bool) -> NetworkSpec {
    let mut network = with_addresses();
    network.neighbors.retain(|neighbor| neighbor.interface == OUTSIDE);
    network.routes.retain(|route| route.prefix.prefix_len() == 0 || has_pod_routes);
    let inside = |prefix: &str| RouteSpec {
        prefix: prefix.parse().unwrap(),
        target: RouteTarget::Via(vec![HopSpec { interface: INSIDE, gateway: None }]),
    };
    network.routes.extend(["10.99.0.0/16", "fd00:99::/64"].map(inside));
    if has_pod_routes {
        network.routes.extend(["10.244.0.0/16", "fd00:244::/32"].map(inside));
    }
    for place in INSIDE_PLACES {
        for v6 in [false, true] {
            let address = address(place, v6);
            network.neighbors.push(NeighborSpec { interface: INSIDE, address, mac: POD_MAC });
        }
    }
    network
}

fn nets(texts: [&str; 2]) -> Vec<IpNet> {
    texts.map(|text| text.parse().unwrap()).to_vec()
}

fn policy_of(kind: PolicyKind) -> PolicySet {
    if kind.covered == Covered::NoPolicy {
        return PolicySet::default();
    }
    let mut set = policy();
    let mut third = set.endpoints[4].clone();
    third.address = ip("fd00:244:1::21");
    third.policy = "b".into();
    set.endpoints.push(third);
    let excluded = nets(["198.51.100.128/25", "2001:db8:51::80/121"]);
    set.policies[1].excluded.clone_from(&excluded);
    if kind.has_exclusions {
        set.policies[0].excluded = excluded;
    }
    set.policies.iter_mut().for_each(|egress| egress.on_exhaustion = OnExhaustion::Reject);
    match kind.covered {
        Covered::All | Covered::NoPolicy => {}
        Covered::Others => set.endpoints.retain(|endpoint| !endpoint.address.to_string().ends_with('5')),
        Covered::Nobody => set.endpoints.clear(),
    }
    if let Some(drop_uncovered) = kind.pods {
        let (pods, others) = (nets(["10.244.0.0/16", "fd00:244::/32"]), nets(["10.96.0.0/12", "fd00:96::/108"]));
        set.cluster = ClusterSpec { pods, others, drop_uncovered };
    }
    if kind.has_services {
        set.services = vec![service(&["10.244.1.6", "10.244.1.8", "fd00:244:1::6", "fd00:244:1::8"].map(backend))];
    }
    set
}

/// A gateway and the policy in force.
struct Run<'a> {
    gateway: Gateway,
    set: PolicySet,
    /// IP packets sent lately.
    seen: Vec<(InterfaceId, Vec<u8>)>,
    pending: usize,
    coverage: &'a Coverage,
}

impl<'a> Run<'a> {
    fn new(start: Start, coverage: &'a Coverage) -> Self {
        let setup = Setup { workers: start.workers, frames: 1024, reject: true, ..Setup::default() };
        let set = policy_of(start.policy);
        let mut gateway = Gateway::with(&setup, world(start.has_pod_routes), &set);
        gateway.skip_counter_check();
        gateway.hostile = true;
        start.policy.classes().into_iter().for_each(|class| coverage.count(class));
        coverage.count(format!("{} workers", start.workers));
        coverage.count(if start.has_pod_routes { "pods have routes" } else { "pods without routes" });
        Self { gateway, set, seen: Vec::new(), pending: 0, coverage }
    }

    fn play(mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for step in steps {
            self.take(step)?;
        }
        self.flush()?;
        let counted = self.gateway.take_delta();
        for counted in counted.split(", ").filter(|it| !it.is_empty()) {
            self.coverage.count(counted.rsplit_once(' ').map_or(counted, |(name, _)| name));
        }
        Ok(())
    }

    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Frames(spec) => {
                spec.classes().into_iter().for_each(|class| self.coverage.count(class));
                self.receive_all(spec, &spec.build())
            }
            Step::Sweep(sweep, spec) => {
                self.coverage.count(format!("sweep: {sweep:?}"));
                self.receive_all(spec, &Sweep::frames(*sweep, spec))
            }
            Step::Open { pod, remote, protocol, v6 } => {
                let ends =
                    [(*pod, 4000), (*remote, 443)].map(|(place, port)| SocketAddr::new(address(place, *v6), port));
                self.receive(0, INSIDE, &packet(*protocol, ends[0], ends[1]))
            }
            Step::Call { remote, protocol, v6 } => {
                let vip = if *v6 { "[2001:db8::10]:80" } else { "192.0.2.10:80" };
                let client = SocketAddr::new(address(*remote, *v6), 7000);
                let mut call = packet(*protocol, client, at(vip));
                call[..12].copy_from_slice(&[OUTSIDE_MAC, ROUTER_MAC].concat());
                self.receive(0, OUTSIDE, &call)
            }
            Step::Reply { which, worker } => {
                self.flush()?;
                let reply = (!self.seen.is_empty()).then(|| reply(which.get(&self.seen)));
                reply.map_or(Ok(()), |(interface, bytes)| self.receive(*worker, interface, &bytes))
            }
            Step::Report { which, router, kind, worker } => {
                self.flush()?;
                let error = (!self.seen.is_empty()).then(|| report(which.get(&self.seen), *router, *kind));
                error.map_or(Ok(()), |(interface, bytes)| self.receive(*worker, interface, &bytes))
            }
            Step::Policy(kind) => {
                self.flush()?;
                kind.classes().into_iter().for_each(|class| self.coverage.count(class));
                self.set = policy_of(*kind);
                self.gateway.set_policy(&self.set);
                Ok(())
            }
            Step::Advance(ms) => {
                self.flush()?;
                self.gateway.advance(*ms);
                Ok(())
            }
        }
    }

    fn receive_all(&mut self, spec: &FrameSpec, frames: &[Vec<u8>]) -> Result<(), TestCaseError> {
        frames.iter().try_for_each(|frame| self.receive(spec.arrival.worker, spec.arrival.interface(), frame))
    }

    /// A worker receives a frame; now and then all run.
    fn receive(&mut self, worker: usize, interface: InterfaceId, frame: &[u8]) -> Result<(), TestCaseError> {
        let worker = worker % self.gateway.workers.len();
        self.balance_frames(worker);
        prop_assert!(self.gateway.workers[worker].io().inject(interface, frame), "a buffer for each frame");
        self.pending += 1;
        if self.pending < BATCH { Ok(()) } else { self.flush() }
    }

    /// Gives a worker frames of others, as the shared pool of a real device does.
    fn balance_frames(&mut self, worker: usize) {
        while self.gateway.workers[worker].io().audit().free < MIN_FREE {
            let of_other = self.gateway.workers.iter_mut().find_map(|other| {
                let io = other.io();
                if io.audit().free > MIN_FREE { io.allocate(0) } else { None }
            });
            let Some(frame) = of_other else { return };
            self.gateway.workers[worker].io().release(frame);
        }
    }

    /// Runs the workers and checks what they send, by the policy in force.
    fn flush(&mut self) -> Result<(), TestCaseError> {
        self.pending = 0;
        for _ in 0..2 {
            for (interface, bytes) in self.gateway.run() {
                if interface == OUTSIDE {
                    self.check(&bytes)?;
                }
                if shown(&bytes).is_some() {
                    self.seen.push((interface, bytes));
                }
            }
        }
        let old = self.seen.len().saturating_sub(MAX_SEEN);
        self.seen.drain(..old);
        Ok(())
    }

    fn check(&self, bytes: &[u8]) -> Result<(), TestCaseError> {
        let rule = Rule(&self.set);
        let Some(sent) = shown(bytes) else { return Ok(()) };
        let receiver = sent.receiver;
        for address in sent.quoted.iter().chain([&sent.source]) {
            let is_hidden = rule.hides(*address, receiver);
            prop_assert!(!is_hidden, "{} sees {} in {:?}: {:02x?}", receiver, address, sent, bytes);
        }
        let may_be_to_pod = sent.is_neighbor_discovery || !rule.covers(receiver);
        prop_assert!(may_be_to_pod, "to covered pod {} outside: {:02x?}", receiver, bytes);
        self.count(&sent, &rule);
        Ok(())
    }

    /// Counts what the rule permits, which shows that it was asked.
    fn count(&self, sent: &Shown, rule: &Rule<'_>) {
        let is_pod =
            |address: &IpAddr| rule.covers(*address) || self.set.cluster.pods.iter().any(|net| net.contains(address));
        let shows_pod = sent.quoted.iter().chain([&sent.source]).any(is_pod);
        let class = match (sent.is_error, rule.is_vip(sent.source)) {
            (true, true) if !sent.quoted.is_empty() => "sent: an error from a VIP",
            (true, false) if sent.quoted.iter().any(is_pod) => "sent: an error that quotes a pod's address",
            (false, true) => "sent: from a VIP",
            _ => "sent: other",
        };
        self.coverage.count(class);
        if shows_pod {
            let is_internal = rule.cluster_prefix(sent.receiver).is_some();
            let receiver = if is_internal { "a cluster address" } else { "another destination" };
            self.coverage.count(format!("sent: a pod's address to {receiver}"));
        }
    }
}

/// The reply to a packet as it was sent: addresses, ports and the kind of echo exchanged.
fn reply((interface, sent): &(InterfaceId, Vec<u8>)) -> (InterfaceId, Vec<u8>) {
    let mut bytes = sent.clone();
    let is_v4 = sent[12] == 8;
    let (at, length, protocol, l4) = if is_v4 { (26, 4, sent[23], 34) } else { (22, 16, sent[20], 54) };
    bytes[..6].copy_from_slice(&sent[6..12]);
    bytes[6..12].copy_from_slice(&sent[..6]);
    bytes[at..at + length].copy_from_slice(&sent[at + length..at + 2 * length]);
    bytes[at + length..at + 2 * length].copy_from_slice(&sent[at..at + length]);
    bytes[if is_v4 { 22 } else { 21 }] = 64;
    if let (6 | 17 | 132, Some(ports)) = (protocol, sent.get(l4..l4 + 4)) {
        bytes[l4..l4 + 2].copy_from_slice(&ports[2..]);
        bytes[l4 + 2..l4 + 4].copy_from_slice(&ports[..2]);
    }
    if let (6, Some(flags)) = (protocol, bytes.get_mut(l4 + 13)) {
        *flags |= 0x10;
    }
    if let (1 | 58, Some(kind)) = (protocol, bytes.get_mut(l4)) {
        *kind = match *kind {
            8 => 0,
            128 => 129,
            other => other,
        };
    }
    update_header_checksum(&mut bytes);
    (*interface, bytes)
}

/// The error of a router about a packet as it was sent, on the link where it was.
fn report((interface, sent): &(InterfaceId, Vec<u8>), router: usize, kind: usize) -> (InterfaceId, Vec<u8>) {
    let is_v6 = sent[12] != 8;
    let messages = if is_v6 { [(1, 4), (2, 0), (3, 0), (4, 1)] } else { [(3, 1), (3, 4), (11, 0), (12, 0)] };
    let receiver = shown(sent).map_or(address(0, is_v6), |sent| sent.source);
    let ends = [address(router, is_v6), receiver];
    let quote = &sent[14..sent.len().min(14 + 200)];
    let packet = packet_with(ends, error_message(ends, messages[kind], 0, quote));
    (*interface, [&sent[6..12], &sent[..6], &sent[12..14], &packet].concat())
}

const CLASSES: &[&str] = &[
    "1 workers",
    "2 workers",
    "3 workers",
    "pods have routes",
    "pods without routes",
    "covered: All",
    "covered: Others",
    "covered: Nobody",
    "covered: NoPolicy",
    "no pod prefixes",
    "uncovered pods are dropped",
    "uncovered pods pass",
    "policy with exclusions",
    "policy without exclusions",
    "own MAC address",
    "broadcast MAC address",
    "multicast MAC address",
    "other MAC address",
    "untagged",
    "tagged",
    "LLC and SNAP",
    "other EtherType",
    "padded",
    "undamaged",
    "truncated",
    "changed byte",
    "wrong length",
    "with options",
    "with extension headers",
    "in fragments",
    "from inside",
    "from outside",
    "TCP over IPv4",
    "TCP over IPv6",
    "UDP over IPv4",
    "UDP over IPv6",
    "SCTP over IPv4",
    "SCTP over IPv6",
    "ICMP query over IPv4",
    "ICMP query over IPv6",
    "other protocol over IPv4",
    "other protocol over IPv6",
    "ICMP error over IPv4",
    "ICMP error over IPv6",
    "error about an error over IPv4",
    "error about an error over IPv6",
    "from: covered pod",
    "from: covered backend",
    "from: pod of another policy",
    "from: uncovered pod",
    "from: router inside",
    "from: router in a pod prefix",
    "from: VIP",
    "to: remote",
    "to: excluded remote",
    "to: cluster address",
    "to: VIP",
    "to: covered pod",
    "to: multicast",
    "sweep: Protocols",
    "sweep: Types",
    "sweep: Codes",
    "sweep: Truncations",
    "sweep: Extensions",
    "egress",
    "reply",
    "inbound",
    "service_reply",
    "unchanged",
    "created",
    "handed off",
    "drop no_policy",
    "drop no_session",
    "drop unknown_protocol",
    "drop fragment",
    "ended policy",
    "sent: an error from a VIP",
    "sent: an error that quotes a pod's address",
    "sent: a pod's address to a cluster address",
    "sent: a pod's address to another destination",
];

#[test]
fn no_hidden_address_leaves_whatever_arrives() {
    let runs = (start(), prop::collection::vec(step(), 20..90));
    property(config(128, "tests/engine/no_leak.regressions"), &runs, CLASSES, |(start, steps), coverage| {
        Run::new(start, coverage).play(&steps)
    });
}
