//! Whichever gateway of a group, and whichever queue there, a packet arrives at: a client's flow reaches one backend and gets
//! its replies from the frontend that it has called, a router's ICMP errors about these reach the backend, and what a pod asks
//! is answered to that pod. The rule is the test's own: it remembers who has asked whom. When members come and go, a packet may
//! be lost until the client has sent another one; nothing ever leaves with another address or port.

use std::net::SocketAddr;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::TestCaseResult;
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::ClusterSpec;
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_testkit::cluster::{Cluster, MemberState};
use vipgate_testkit::services::{backend, both_pods, service, tcp_service};
use vipgate_testkit::*;

use crate::batch_boundaries::config;
use crate::icmp::{error_about, quoted};

/// Frontends with one backend port each: of one and of several frontends, of TCP and UDP, at VIPs of all gateways and of one.
const FRONTENDS: [(&str, Protocol); 7] = [
    ("192.0.2.10:80", Protocol::Tcp),
    ("192.0.2.10:53", Protocol::Udp),
    ("[2001:db8::10]:80", Protocol::Tcp),
    ("[2001:db8::10]:53", Protocol::Udp),
    ("192.0.2.10:90", Protocol::Tcp),
    ("192.0.2.11:80", Protocol::Tcp),
    ("192.0.2.11:81", Protocol::Tcp),
];
/// Clients; policy excludes the second one of each family.
const CLIENTS: [&str; 4] = ["198.51.100.10", "198.51.100.11", "2001:db8:51::10", "2001:db8:51::11"];
const PODS: [&str; 4] = ["10.244.1.5", "10.244.1.6", "fd00:244:1::5", "fd00:244:1::6"];
/// A port of the pods that nobody calls, and the served ports.
const POD_PORTS: [(u16, Protocol); 3] = [(4000, Protocol::Udp), (5353, Protocol::Udp), (4000, Protocol::Tcp)];

const CLASSES: [&str; 16] = [
    "opened",
    "client again",
    "reply",
    "reply to an excluded client",
    "reply of a shared backend",
    "reply of UDP",
    "own question from a served port",
    "answer",
    "called without the VIP",
    "IPv4 error about a reply",
    "IPv6 error about a reply",
    "error about a reply of a shared backend",
    "error about a reply via its owner",
    "member gone",
    "member back",
    "tunneled",
];

#[derive(Clone, Debug)]
enum Step {
    Open {
        client: Index,
        frontend: Index,
    },
    Continue(Index),
    Reply(Index),
    Ask {
        pod: Index,
        port: Index,
    },
    Answer(Index),
    /// A pod replies to an excluded client that has called its own address.
    ReplyWithoutVip(Index),
    /// A router outside reports on a reply to a client.
    Error(Index),
    Replicate,
    Member(Index),
}

/// A step, and the gateway and queue that its packet arrives at.
type Arrival = (Step, Index, Index);

fn steps() -> impl Strategy<Value = Vec<Arrival>> {
    let index = any::<Index>;
    let step = prop_oneof![
        5 => (index(), index()).prop_map(|(client, frontend)| Step::Open { client, frontend }),
        4 => index().prop_map(Step::Continue),
        8 => index().prop_map(Step::Reply),
        4 => (index(), index()).prop_map(|(pod, port)| Step::Ask { pod, port }),
        4 => index().prop_map(Step::Answer),
        1 => index().prop_map(Step::ReplyWithoutVip),
        3 => index().prop_map(Step::Error),
        1 => Just(Step::Replicate),
        1 => index().prop_map(Step::Member),
    ];
    prop::collection::vec((step, index(), index()), 5..60)
}

/// What a client has asked.
struct Flow {
    protocol: Protocol,
    client: SocketAddr,
    frontend: SocketAddr,
    backend: SocketAddr,
    /// Packets so far.
    packets: u32,
    /// How often members had changed when it was opened, and at its last packet.
    opened: u32,
    members: u32,
    /// Whether its session was lost with a gateway, and its backend's packet has opened one of the pod's own: the two
    /// have nothing to do with each other then.
    is_lost: bool,
}

/// What a pod has asked, as it was seen outside.
struct Question {
    protocol: Protocol,
    pod: SocketAddr,
    remote: SocketAddr,
    seen: Vec<u8>,
    members: u32,
}

struct Run<'a> {
    cluster: Cluster,
    workers: usize,
    flows: Vec<Flow>,
    questions: Vec<Question>,
    /// How often members have changed.
    members: u32,
    /// Packets received that may wait, and leave with a later one of their flow.
    waiting: usize,
    next_port: u16,
    coverage: &'a Coverage,
}

impl Run<'_> {
    fn new(gateways: usize, workers: u8, coverage: &Coverage) -> Run<'_> {
        let setup = Setup { workers, ..Setup::default() };
        let mut cluster = Cluster::new(gateways, &setup);
        cluster.change_policy(|set| {
            set.policies[0].excluded =
                ["198.51.100.11/32", "2001:db8:51::11/128"].map(|net| net.parse().unwrap()).into();
            let pods = ["10.244.0.0/16", "fd00:244::/32"].map(|net| net.parse().unwrap()).into();
            set.cluster = ClusterSpec { pods, others: vec![], drop_uncovered: true };
            set.services = vec![
                service(&both_pods()),
                // At the VIP of one gateway, with two ports in front of the same pods and ports as the first.
                tcp_service("Service tenant/web", "192.0.2.11", &[80, 81], 8080, &both_pods()),
                // Of all gateways, with a backend that has no other frontend.
                tcp_service("Service tenant/alone", "192.0.2.10", &[90], 9090, &[backend("10.244.1.5")]),
            ];
        });
        cluster.gateways.iter_mut().for_each(Gateway::skip_counter_check);
        let (flows, questions) = Default::default();
        let workers = usize::from(workers);
        Run { cluster, workers, flows, questions, members: 0, waiting: 0, next_port: 10_000, coverage }
    }

    /// A packet arrives at any gateway that is there; what leaves the group, and where.
    fn receive(&mut self, at: (Index, Index), interface: InterfaceId, packet: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
        let alive: Vec<usize> =
            (0..self.cluster.gateways.len()).filter(|it| self.cluster.members[*it].active).collect();
        let (number, worker) = (*at.0.get(&alive), at.1.index(self.workers));
        let sent = self.cluster.gateways[number].receive(worker, interface, packet);
        let sent = sent.into_iter().map(|(out, bytes)| (number, out, bytes)).collect();
        let all = self.cluster.deliver_tunneled(sent).into_iter().map(|(_, out, bytes)| (out, bytes));
        let remote = remote_of(interface == OUTSIDE, packet);
        let (mut sent, late): (Vec<_>, Vec<_>) =
            all.partition(|(out, bytes)| *out != interface && remote_of(*out == INSIDE, bytes) == remote);
        self.check_late(&late);
        let count = sent.len();
        if count > 1 && count - 1 <= self.waiting {
            sent.dedup_by_key(|(out, bytes)| (*out, ends(bytes)));
            self.waiting -= count - sent.len();
        }
        self.waiting += usize::from(count == 0);
        sent
    }

    /// What waited for a gateway that was on its way back, or for its sessions, reaches its destination later.
    fn check_late(&mut self, late: &[(InterfaceId, Vec<u8>)]) {
        for (out, bytes) in late {
            let (source, destination) = ends(bytes);
            let is_of_flow = self.flows.iter().any(|flow| match *out {
                OUTSIDE => (source, destination) == (flow.frontend, flow.client),
                _ => (source, destination) == (flow.client, flow.backend),
            });
            let is_of_question = self.questions.iter().any(|question| match *out {
                OUTSIDE => (source, destination) == ends(&question.seen),
                _ => (source, destination) == (question.remote, question.pod),
            });
            let members = self.members;
            let lost = self.flows.iter_mut().find(|flow| {
                let is_own = source.ip() == flow.frontend.ip() && destination == flow.client;
                flow.protocol == Protocol::Udp && is_own && *out == OUTSIDE && flow.members != members
            });
            let is_known = is_of_flow || is_of_question || lost.is_some();
            assert!(members > 0 && is_known, "{source} to {destination}");
            // As at once: a datagram that nobody is known to have asked for is the pod's own.
            if let Some(lost) = lost {
                lost.is_lost |= !is_of_flow;
            }
            self.coverage.count("late");
        }
    }

    fn step(&mut self, (step, gateway, queue): Arrival) -> TestCaseResult {
        let at = (gateway, queue);
        match step {
            Step::Open { client, frontend } => self.open(client, frontend, at),
            Step::Continue(which) => self.client_sends(which, at),
            Step::Reply(which) => self.backend_replies(which, at),
            Step::Ask { pod, port } => self.pod_asks(pod, port, at),
            Step::Answer(which) => self.remote_answers(which, at),
            Step::ReplyWithoutVip(pod) => self.pod_replies_without_vip(pod, at),
            Step::Error(which) => self.router_reports(which, at),
            Step::Replicate => {
                self.cluster.replicate();
                Ok(())
            }
            Step::Member(which) => {
                self.change_member(which);
                Ok(())
            }
        }
    }

    fn open(&mut self, client: Index, frontend: Index, at: (Index, Index)) -> TestCaseResult {
        let (frontend, protocol) = FRONTENDS[frontend.index(FRONTENDS.len())];
        let frontend = vipgate_testkit::at(frontend);
        let clients: Vec<&str> = CLIENTS.into_iter().filter(|it| ip(it).is_ipv4() == frontend.is_ipv4()).collect();
        self.next_port += 1;
        let client = SocketAddr::new(ip(clients[client.index(clients.len())]), self.next_port);
        let (backend, opened) = (frontend, self.members);
        let flow = Flow { protocol, client, frontend, backend, packets: 0, opened, members: opened, is_lost: false };
        self.flows.push(flow);
        self.coverage.count("opened");
        self.send_of_client(self.flows.len() - 1, at)
    }

    fn client_sends(&mut self, which: Index, at: (Index, Index)) -> TestCaseResult {
        if self.flows.is_empty() {
            return Ok(());
        }
        if self.flows[which.index(self.flows.len())].is_lost {
            return Ok(());
        }
        self.coverage.count("client again");
        self.send_of_client(which.index(self.flows.len()), at)
    }

    fn send_of_client(&mut self, number: usize, at: (Index, Index)) -> TestCaseResult {
        let Flow { protocol, client, frontend, packets, .. } = self.flows[number];
        let bytes = match (protocol, packets) {
            (Protocol::Tcp, 0) => tcp(client, frontend, "S", 1000, 0),
            (Protocol::Tcp, _) => tcp(client, frontend, "PA", 1001, 5001),
            _ => packet(protocol, client, frontend),
        };
        let sent = self.receive(at, OUTSIDE, &bytes);
        prop_assert_eq!(sent.len(), 1, "{} to {}: {:?}", client, frontend, self.cluster.drops());
        let (source, backend) = ends(&sent[0].1);
        prop_assert_eq!((sent[0].0, source), (INSIDE, client), "the client's address is kept");
        let members = self.members;
        let flow = &mut self.flows[number];
        // A late reply has become the pod's own just now.
        if flow.is_lost {
            return Ok(());
        }
        prop_assert!(flow.packets == 0 || flow.backend == backend, "{} and {}", flow.backend, backend);
        (flow.backend, flow.packets, flow.members) = (backend, packets + 1, members);
        Ok(())
    }

    fn backend_replies(&mut self, which: Index, at: (Index, Index)) -> TestCaseResult {
        if self.flows.is_empty() {
            return Ok(());
        }
        let number = which.index(self.flows.len());
        let Flow { protocol, client, frontend, backend, packets, members, is_lost, .. } = self.flows[number];
        if is_lost {
            return Ok(());
        }
        let bytes = match (protocol, packets) {
            (Protocol::Tcp, 1) => tcp(backend, client, "SA", 5000, 1001),
            (Protocol::Tcp, _) => tcp(backend, client, "PA", 5001, 1001),
            _ => packet(protocol, backend, client),
        };
        let sent = self.receive(at, INSIDE, &bytes);
        if members != self.members && sent.is_empty() {
            return Ok(());
        }
        let seen: Vec<_> = sent.iter().map(|(out, bytes)| (*out, ends(bytes))).collect();
        let is_excluded = client.ip() == ip(CLIENTS[1]) || client.ip() == ip(CLIENTS[3]);
        // What nobody is known to have asked for is the pod's own: a datagram has a port of its VIP, and what policy
        // excludes its own address.
        let is_own = members != self.members
            && (is_excluded && seen[0].1.0 == backend
                || protocol == Protocol::Udp && !is_excluded && seen[0].1.0.ip() == frontend.ip());
        self.flows[number].is_lost |= is_own && seen[0].1.0 != frontend;
        if !is_own {
            prop_assert_eq!(seen, [(OUTSIDE, (frontend, client))], "of {}: {:?}", backend, self.cluster.drops());
        }
        self.coverage.count("reply");
        self.coverage.add("reply to an excluded client", is_excluded.into());
        self.coverage.add("reply of a shared backend", (frontend.ip() == ip("192.0.2.11")).into());
        self.coverage.add("reply of UDP", (protocol == Protocol::Udp).into());
        Ok(())
    }

    fn pod_asks(&mut self, pod: Index, port: Index, at: (Index, Index)) -> TestCaseResult {
        let pod = PODS[pod.index(PODS.len())];
        let (port, protocol) = POD_PORTS[port.index(POD_PORTS.len())];
        let (remote, vip) = if ip(pod).is_ipv4() { (CLIENTS[0], "192.0.2.10") } else { (CLIENTS[2], "2001:db8::10") };
        self.next_port += 1;
        let (pod, remote) = (SocketAddr::new(ip(pod), port), SocketAddr::new(ip(remote), self.next_port));
        let sent = self.receive(at, INSIDE, &packet(protocol, pod, remote));
        prop_assert_eq!(sent.len(), 1, "{} to {}: {:?}", pod, remote, self.cluster.drops());
        let (out, seen) = sent.into_iter().next().unwrap();
        let (source, destination) = ends(&seen);
        prop_assert_eq!((out, source.ip(), destination), (OUTSIDE, ip(vip), remote));
        prop_assert!(![80, 53, 90].contains(&source.port()), "a port of a frontend");
        self.coverage.add("own question from a served port", (port == 5353).into());
        self.questions.push(Question { protocol, pod, remote, seen, members: self.members });
        Ok(())
    }

    fn remote_answers(&mut self, which: Index, at: (Index, Index)) -> TestCaseResult {
        if self.questions.is_empty() {
            return Ok(());
        }
        let question = &self.questions[which.index(self.questions.len())];
        let (pod, remote, members) = (question.pod, question.remote, question.members);
        let bytes = reply_to(&question.seen, question.protocol);
        let sent = self.receive(at, OUTSIDE, &bytes);
        if members != self.members && sent.is_empty() {
            return Ok(());
        }
        let seen: Vec<_> = sent.iter().map(|(out, bytes)| (*out, ends(bytes))).collect();
        prop_assert_eq!(seen, [(INSIDE, (remote, pod))], "{:?}", self.cluster.drops());
        self.coverage.count("answer");
        Ok(())
    }

    fn pod_replies_without_vip(&mut self, pod: Index, at: (Index, Index)) -> TestCaseResult {
        let pod = PODS[pod.index(PODS.len())];
        self.next_port += 1;
        let client = SocketAddr::new(ip(CLIENTS[if ip(pod).is_ipv4() { 1 } else { 3 }]), self.next_port);
        let pod = SocketAddr::new(ip(pod), 8080);
        let sent = self.receive(at, INSIDE, &tcp(pod, client, "SA", 5000, 1001));
        let seen: Vec<_> = sent.iter().map(|(out, bytes)| (*out, ends(bytes))).collect();
        prop_assert_eq!(seen, [(OUTSIDE, (pod, client))], "{:?}", self.cluster.drops());
        self.coverage.count("called without the VIP");
        Ok(())
    }

    fn router_reports(&mut self, which: Index, at: (Index, Index)) -> TestCaseResult {
        if self.flows.is_empty() {
            return Ok(());
        }
        let number = which.index(self.flows.len());
        let Flow { protocol, client, frontend, backend, opened, is_lost, .. } = self.flows[number];
        if is_lost {
            return Ok(());
        }
        let reply = match protocol {
            Protocol::Tcp => tcp(frontend, client, "PA", 5001, 1001),
            _ => packet(protocol, frontend, client),
        };
        let (router, class) = if client.is_ipv4() {
            ("203.0.113.77", "IPv4 error about a reply")
        } else {
            ("2001:db8:77::1", "IPv6 error about a reply")
        };
        let tunneled = self.cluster.tunneled;
        let sent = self.receive(at, OUTSIDE, &error_about(&reply, router, IcmpError::HostUnreachable, false));
        // Its session may have been lost, though the client's segments reach the backend.
        if opened != self.members && sent.is_empty() {
            return Ok(());
        }
        prop_assert_eq!(sent.len(), 1, "about {} to {}: {:?}", frontend, client, self.cluster.drops());
        let (source, destination, quote) = quoted(&sent[0].1);
        prop_assert_eq!((sent[0].0, source, destination), (INSIDE, ip(router), backend.ip()));
        prop_assert_eq!(ends(&quote), (backend, client), "the backend's packet");
        self.coverage.count(class);
        self.coverage.add("error about a reply of a shared backend", (frontend.ip() == ip("192.0.2.11")).into());
        self.coverage.add("error about a reply via its owner", (self.cluster.tunneled > tunneled).into());
        Ok(())
    }

    /// A gateway fails, or the one that has failed is back.
    fn change_member(&mut self, which: Index) {
        let count = self.cluster.gateways.len();
        self.members += 1;
        if let Some(gone) = self.cluster.members.iter().position(|it| !it.active) {
            self.cluster.members[gone] = MemberState { active: true, connected: true, may_open: true };
            self.cluster.publish_views();
            self.coverage.count("member back");
        } else if count > 1 {
            self.cluster.kill(which.index(count));
            self.coverage.count("member gone");
        }
    }
}

/// The host outside of a packet; `is_from_it`: whether it has sent it.
fn remote_of(is_from_it: bool, packet: &[u8]) -> SocketAddr {
    let (source, destination) = ends(packet);
    if is_from_it { source } else { destination }
}

#[test]
fn packets_reach_their_destination_by_any_gateway_and_queue() {
    let strategy = (steps(), select(vec![2_usize, 3]), 1_u8..=2);
    property(
        config(300, "tests/engine/any_gateway.regressions"),
        &strategy,
        &CLASSES,
        |(steps, gateways, workers), coverage| {
            let mut run = Run::new(gateways, workers, coverage);
            for step in steps {
                run.step(step)?;
            }
            coverage.add("tunneled", run.cluster.tunneled);
            Ok(())
        },
    );
}
