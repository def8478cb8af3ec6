//! Several gateways with shared VIPs: a packet at any gateway reaches its owner.

use std::net::SocketAddr;

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_testkit::cluster::*;
use vipgate_testkit::*;

use crate::fragments::udp_fragments;
use crate::icmp::{error_about, quoted};

#[test]
fn a_reply_at_any_gateway_reaches_the_pod_via_its_owner() {
    for v6 in [false, true] {
        for (pod, remote) in POD_AND_REMOTE {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                let mut cluster = Cluster::with_tunnel_family(3, &Setup::default(), v6);
                let seen = cluster.pod_sends(0, 0, &packet(protocol, at(pod), at(remote)));
                assert_eq!(cluster.tunneled, 0, "no tunnel to its home gateway");
                for number in 0..3 {
                    let received = cluster.remote_sends(number, 0, &reply_to(&seen, protocol));
                    assert_eq!(ends(&received).1, at(pod), "{protocol:?} at {number}");
                }
                assert_eq!(cluster.tunneled, 2);
                cluster.assert_delta(&["egress 1, reply 3, peer_in 2, created 1", "peer_out 1", "peer_out 1"]);
            }
        }
    }
}

#[test]
fn a_pods_packet_at_another_gateway_is_sent_by_its_owner() {
    for (pod, remote) in POD_AND_REMOTE {
        let mut cluster = three_gateways();
        let request = packet(Protocol::Udp, at(pod), at(remote));
        let seen: Vec<_> = (0..3).map(|number| ends(&cluster.pod_sends(number, 0, &request)).0).collect();
        assert!(seen.iter().all(|vip| *vip == seen[0]), "one session: {seen:?}");
        assert_eq!((cluster.gateways[0].sessions(), cluster.tunneled), (1, 2));
        assert_eq!(seen[0].port() / 64 % 3, 0, "a port of its home gateway's blocks");
        cluster.assert_delta(&["egress 3, peer_in 2, created 1", "peer_out 1", "peer_out 1"]);
    }
}

#[test]
fn unknown_and_malformed_tunnel_packets_are_dropped() {
    let mut cluster = three_gateways();
    let inner = packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE));
    let tunnel = |from: &str, vni: u32, inner: &[u8]| {
        let outer = vipgate_dataplane::wire::vxlan::OuterHeaders::new(ip(from), at("10.2.0.1:4790")).unwrap();
        let mut frame = vec![0; outer.length()];
        outer.write(&mut frame, inner.len() as u16, vni, 7, 0);
        frame[..6].copy_from_slice(&INSIDE_MAC);
        frame.extend(inner);
        tag_key((1, 1), (0, 1)).write_tag(&mut frame[outer.length()..], vni);
        frame
    };
    for (frame, reason) in [
        (tunnel("10.2.0.9", 0x76_7009, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.1", 0x76_7009, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 0x76_7049, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 7, &inner), DropReason::PeerUnknown),
        // From no side, and both from an interface and hairpinned.
        (tunnel("10.2.0.2", 0x76_7008, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 0x76_700d, &inner), DropReason::PeerUnknown),
        (tunnel("10.2.0.2", 0x76_7009, &inner[..20]), DropReason::Malformed),
        (tunnel("10.2.0.2", 0x76_7009, &inner)[..60].to_vec(), DropReason::Malformed),
        // A nested tunnel: the inner packet is addressed to the gateway, which is no VIP.
        (tunnel("10.2.0.2", 0x76_7009, &tunnel("10.2.0.2", 0x76_7009, &inner)), DropReason::NoPolicy),
        // It was forwarded three times, and this gateway isn't its owner: it is not forwarded again.
        (tunnel("10.2.0.2", 0x76_7019, &packet(Protocol::Udp, at("10.244.1.6:4000"), at(REMOTE))), DropReason::NoOwner),
    ] {
        let before = cluster.gateways[0].drops().get(&reason).copied().unwrap_or(0);
        assert_eq!(cluster.receive(0, INSIDE, &frame), vec![]);
        if reason == DropReason::NoOwner {
            cluster.advance(1_050);
        }
        assert_eq!(cluster.gateways[0].drops().get(&reason).copied(), Some(before + 1), "{reason:?}");
    }
    cluster.pod_sends(0, 0, &tunnel("10.2.0.2", 0x76_7009, &inner));
    cluster.assert_delta(&[
        "egress 1, peer_in 4, drop no_policy 1, drop malformed 2, drop no_owner 1, drop peer_unknown 6, created 1",
        "",
        "",
    ]);
}

#[test]
fn packets_larger_than_the_tunnel_mtu_are_fragmented_or_rejected() {
    let mut cluster = three_gateways();
    let (vip, remote) = ends(&cluster.pod_sends(0, 0, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE))));
    let error = cluster.receive(1, OUTSIDE, &large_reply(remote, vip, false));
    let error = expect_one(error, 1, OUTSIDE, &cluster);
    assert_eq!((error[34], error[35], u16::from_be_bytes([error[40], error[41]])), (3, 4, 1450));
    let fragments = cluster.receive(1, OUTSIDE, &large_reply(remote, vip, true));
    let fragments: Vec<_> = fragments.into_iter().filter(|(_, out, _)| *out == INSIDE).collect();
    assert_eq!(fragments.len(), 2, "{:?}", cluster.drops());
    assert_eq!(fragments.iter().map(|(_, _, bytes)| bytes.len() - 34).sum::<usize>(), 1480);
    cluster.assert_delta(&[
        "egress 1, reply 2, peer_in 2, created 1",
        "peer_out 1, drop too_big 1, replies sent 1",
        "",
    ]);
}

/// Removes all neighbor entries inside, which is also where tunnels between gateways go.
fn remove_neighbors_inside(cluster: &mut Cluster, number: GatewayIndex) {
    let mut network = Cluster::network(3, false);
    network.neighbors.retain(|neighbor| neighbor.interface != INSIDE);
    cluster.gateways[number].set_network(network);
}

/// Asserts that this neighbor was requested and resolves it; returns what is sent then.
fn resolve_neighbor(
    cluster: &mut Cluster,
    number: GatewayIndex,
    address: &str,
) -> Vec<(GatewayIndex, InterfaceId, Vec<u8>)> {
    let requested = cluster.gateways[number].resolution_requests.queue.pop().map(|it| (it.interface, it.address));
    assert_eq!(requested, Some((INSIDE, ip(address))), "no resolution request: {:?}", cluster.drops());
    cluster.gateways[number].set_network(Cluster::network(3, false));
    let sent = cluster.gateways[number].run();
    cluster.deliver_tunneled(sent.into_iter().map(|(out, bytes)| (number, out, bytes)).collect())
}

#[test]
fn tunneled_packets_await_neighbor_resolution() {
    let mut cluster = three_gateways();
    let seen = cluster.pod_sends(0, 0, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE)));
    let (vip, remote) = ends(&seen);
    for (reply, count) in [(reply_to(&seen, Protocol::Udp), 1), (large_reply(remote, vip, true), 2)] {
        remove_neighbors_inside(&mut cluster, 1);
        assert_eq!(cluster.receive(1, OUTSIDE, &reply), vec![]);
        let received = resolve_neighbor(&mut cluster, 1, "10.2.0.1");
        assert!(received.iter().all(|(number, out, _)| (*number, *out) == (0, INSIDE)));
        let bytes = received.iter().map(|(_, _, bytes)| bytes.len() - 34).sum::<usize>();
        assert_eq!((received.len(), bytes), (count, reply.len() - 34));
    }
    cluster.assert_delta(&["egress 1, reply 3, peer_in 3, created 1", "peer_out 2", ""]);
}

#[test]
fn an_owners_icmp_error_awaits_neighbor_resolution() {
    let mut cluster = three_gateways();
    let mut last_hop = packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE));
    set_ttl(&mut last_hop, 1);
    remove_neighbors_inside(&mut cluster, 0);
    assert_eq!(cluster.receive(1, INSIDE, &last_hop), vec![]);
    let error = resolve_neighbor(&mut cluster, 0, "10.244.1.5");
    let error = expect_one(error, 0, INSIDE, &cluster);
    assert_eq!((error[34], error[35], &error[..6]), (11, 0, &POD_MAC[..]));
    cluster.assert_delta(&["peer_in 1, drop ttl 1, replies sent 1", "peer_out 1", ""]);
}

#[test]
fn a_clients_connection_keeps_its_backend_at_any_gateway() {
    use vipgate_testkit::services::*;
    let mut cluster = three_gateways();
    cluster.change_policy(|set| set.services = vec![service(&both_pods())]);
    for (client, vip) in CLIENTS.iter().zip(VIPS) {
        let (client, vip) = (at(client), (ip(vip), 80).into());
        let backend = ends(&cluster.remote_sends(0, 0, &tcp(client, vip, "S", 1000, 0))).1;
        for number in 0..3 {
            assert_eq!(
                ends(&cluster.pod_sends(number, number, &tcp(backend, client, "SA", 5000, 1001))),
                (vip, client)
            );
            assert_eq!(
                ends(&cluster.remote_sends(number, number, &tcp(client, vip, "A", 1001, 5001))).1,
                backend,
                "at {number}"
            );
        }
    }
    assert_eq!(
        (cluster.gateways[0].sessions(), cluster.gateways[1].sessions()),
        (2, 0),
        "no session at other gateways"
    );
    assert_eq!((cluster.tunneled, cluster.drops()), (0, [].into()));
    cluster.assert_delta(&[
        "inbound 4, service_reply 2, created 2",
        "inbound 2, service_reply 2",
        "inbound 2, service_reply 2",
    ]);
}

#[test]
fn fragments_at_several_gateways_reach_the_owner() {
    let mut cluster = three_gateways();
    let (vip, remote) = ends(&cluster.pod_sends(0, 0, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE))));
    let fragments = udp_fragments(remote, vip, 1000, 99);
    assert_eq!(fragments.len(), 3);
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut received = Vec::new();
        for (at, number) in order.into_iter().zip([2, 0, 1]) {
            received.extend(cluster.receive(number, OUTSIDE, &fragments[at]));
        }
        let received: Vec<_> = received.into_iter().filter(|(number, out, _)| (*number, *out) == (0, INSIDE)).collect();
        assert_eq!(received.len(), 3, "{order:?}: {:?}", cluster.drops());
        cluster.advance(3_000);
    }
    assert!(cluster.tunneled <= 18, "at most two tunnel hops each: {}", cluster.tunneled);
    cluster.assert_delta(&["egress 1, reply 9, peer_in 6, created 1", "peer_out 3", "peer_out 3"]);
}

#[test]
fn an_icmp_error_at_any_gateway_reaches_the_pod() {
    let mut cluster = three_gateways();
    let seen = cluster.pod_sends(0, 0, &packet(Protocol::Udp, at("10.244.1.5:4000"), at(REMOTE)));
    let error = error_about(&seen, "203.0.113.77", IcmpError::TtlExceeded, false);
    for number in 0..3 {
        let received = cluster.remote_sends(number, 0, &error);
        assert_eq!(received[30..34], [10, 244, 1, 5], "at {number}");
    }
    cluster.assert_delta(&["egress 1, reply 3, peer_in 2, created 1", "peer_out 1", "peer_out 1"]);
}

/// A client, its VIP, and a router outside that reports on replies, in each address family.
const ERROR_ENDS: [(&str, &str, &str); 2] = [
    ("198.51.100.10:40000", "192.0.2.10", "203.0.113.77"),
    ("[2001:db8:51::10]:40000", "2001:db8::10", "2001:db8:77::1"),
];

#[test]
fn an_icmp_error_about_a_clients_flow_reaches_its_backend_via_its_owner() {
    use vipgate_testkit::services::*;
    for (client, vip, router) in ERROR_ENDS {
        for (protocol, port) in [(Protocol::Udp, 53), (Protocol::Tcp, 80), (Protocol::Tcp, 81)] {
            let mut cluster = three_gateways();
            cluster.change_policy(|set| set.services = vec![with_second_port(&both_pods())]);
            let frontend = SocketAddr::new(ip(vip), port);
            let sent = cluster.receive(0, OUTSIDE, &packet(protocol, at(client), frontend));
            assert_eq!(sent.len(), 1, "{:?}", cluster.drops());
            let (owner, _, request) = &sent[0];
            let (owner, backend) = (*owner, ends(request).1);
            let reply = cluster.pod_sends(owner, owner, &reply_to(request, protocol));
            // New sessions get another backend; this one keeps its own.
            let pods = ["10.244.1.5", "10.244.1.6", "fd00:244:1::5", "fd00:244:1::6"];
            let gone = backend.ip();
            let changed = pods.map(|pod| if ip(pod) == gone { terminating(pod) } else { services::backend(pod) });
            cluster.change_policy(|set| set.services = vec![with_second_port(&changed)]);
            for number in 0..3 {
                let error = error_about(&reply, router, IcmpError::HostUnreachable, false);
                let (source, destination, quote) = quoted(&cluster.remote_sends(number, owner, &error));
                assert_eq!((source, destination), (ip(router), backend.ip()), "{protocol:?} at {number}");
                assert_eq!(ends(&quote), (backend, at(client)), "{protocol:?} at {number}");
            }
            let is_forwarded = owner != 0;
            let of_owner = format!("inbound 4, service_reply 1, peer_in {}, created 1", 2 + u32::from(is_forwarded));
            let expected = [0, 1, 2].map(|number| match number {
                _ if number == owner => of_owner.as_str(),
                0 => "peer_out 2",
                _ => "peer_out 1",
            });
            cluster.assert_delta(&expected);
        }
    }
}

#[test]
fn an_icmp_error_about_a_clients_flow_without_a_session_is_translated_only_if_policy_shows_how() {
    use vipgate_testkit::services::*;
    for (client, vip, router) in ERROR_ENDS {
        let mut cluster = three_gateways();
        cluster.skip_counter_check();
        cluster.change_policy(|set| set.services = vec![service(&both_pods())]);
        let [udp, tcp] = [53, 80].map(|port| SocketAddr::new(ip(vip), port));
        let error = |protocol, frontend| {
            error_about(&packet(protocol, frontend, at(client)), router, IcmpError::HostUnreachable, false)
        };
        for number in 0..3 {
            assert_eq!(cluster.receive(number, OUTSIDE, &error(Protocol::Udp, udp)), vec![]);
        }
        assert_eq!(cluster.drops(), [(DropReason::NoSession, 3)].into());
        assert_eq!(cluster.tunneled, 2, "dropped at its owner");
        let backend = ends(&cluster.remote_sends(0, 0, &packet(Protocol::Tcp, at(client), tcp))).1;
        for number in 0..3 {
            let (_, destination, quote) = quoted(&cluster.remote_sends(number, number, &error(Protocol::Tcp, tcp)));
            assert_eq!((destination, ends(&quote)), (backend.ip(), (backend, at(client))), "at {number}");
        }
        assert_eq!(cluster.tunneled, 2, "any gateway translates what policy shows");
    }
}

mod random_failures {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use proptest::test_runner::TestCaseResult;
    use vipgate_coverage::{Coverage, property};

    use super::*;

    /// A step of a scenario with three gateways.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// A pod sends a packet, received by some gateway.
        Pod {
            pod: u8,
            port: u8,
            to: u8,
            at: u8,
        },
        /// The remote replies to a packet that it has received.
        Reply {
            which: prop::sample::Index,
            at: u8,
        },
        Time(u16),
        Fails(u8),
        /// A failed gateway returns, gets a full sync, and is active again.
        Returns(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..2_u8, 0..12_u8, 0..2_u8, 0..3_u8).prop_map(|(pod, port, to, at)| Step::Pod { pod, port, to, at }),
            4 => (any::<prop::sample::Index>(), 0..3_u8).prop_map(|(which, at)| Step::Reply { which, at }),
            2 => (10..900_u16).prop_map(Step::Time),
            1 => (0..3_u8).prop_map(Step::Fails),
            2 => (0..3_u8).prop_map(Step::Returns),
        ]
    }

    /// Full sync from all active gateways to all connected ones, as after each change.
    fn sync_all(cluster: &mut Cluster) {
        for (from, to) in (0..9).map(|at| (at / 3, at % 3)) {
            if from != to && cluster.members[from].active && cluster.members[to].connected {
                cluster.full_sync(from, to);
            }
        }
    }

    /// Three gateways, and what was seen outside.
    struct Run<'a> {
        cluster: Cluster,
        /// Per external tuple: the pod, and when it last sent.
        seen: HashMap<(String, String), (String, u32)>,
        /// External tuples in the order of their first packet.
        order: Vec<(String, String)>,
        clock: u32,
        coverage: &'a Coverage,
    }

    impl Run<'_> {
        fn step(&mut self, step: Step) -> TestCaseResult {
            match step {
                Step::Pod { pod, port, to, at } => return self.pod_sends((pod, port), to, at.into()),
                Step::Reply { which, at } => return self.remote_replies(which, at.into()),
                Step::Time(ms) => self.advance(ms.into()),
                Step::Fails(number) => {
                    // A failure loses records that are pending; here they are all sent before.
                    self.advance(200);
                    if self.cluster.members.iter().filter(|it| it.active).count() > 1 {
                        self.coverage.count("failed");
                        self.cluster.kill(number.into());
                        sync_all(&mut self.cluster);
                    }
                }
                Step::Returns(number) => self.return_gateway(number.into()),
            }
            Ok(())
        }

        fn advance(&mut self, ms: u32) {
            self.cluster.advance(ms);
            self.clock += ms;
        }

        fn pod_sends(&mut self, (pod, port): (u8, u8), to: u8, number: GatewayIndex) -> TestCaseResult {
            if !self.cluster.members[number].connected {
                return Ok(());
            }
            let pod = format!("10.244.1.{}:{}", 5 + pod, 4000 + u16::from(port));
            let remote = format!("198.51.100.10:{}", 443 + u16::from(to));
            for (_, out, bytes) in self.cluster.receive(number, INSIDE, &packet(Protocol::Udp, at(&pod), at(&remote))) {
                prop_assert_eq!(out, OUTSIDE);
                let (vip, remote) = ends(&bytes);
                let key = (vip.to_string(), remote.to_string());
                if let Some((other, last_sent)) = self.seen.insert(key.clone(), (pod.clone(), self.clock)) {
                    let is_expired = self.clock.wrapping_sub(last_sent) >= 5_000;
                    self.coverage.count("sent again");
                    prop_assert!(other == pod || is_expired, "{:?} is {} and {}", key, other, pod);
                } else {
                    self.coverage.count("sent");
                    self.order.push(key);
                }
            }
            Ok(())
        }

        fn remote_replies(&mut self, which: prop::sample::Index, number: GatewayIndex) -> TestCaseResult {
            if self.order.is_empty() || !self.cluster.members[number].connected {
                return Ok(());
            }
            let key = which.get(&self.order);
            let ((vip, remote), pod) = (key, &self.seen[key].0);
            let received = self.cluster.receive(number, OUTSIDE, &packet(Protocol::Udp, at(remote), at(vip)));
            self.coverage.count(if received.is_empty() { "lost" } else { "reply received" });
            for (_, out, bytes) in received {
                prop_assert_eq!(out, INSIDE);
                prop_assert_eq!(&ends(&bytes).1.to_string(), pod);
            }
            Ok(())
        }

        fn return_gateway(&mut self, number: GatewayIndex) {
            let cluster = &mut self.cluster;
            if cluster.members[number].active {
                return;
            }
            cluster.members[number] = MemberState { active: false, connected: true, may_open: true };
            cluster.publish_views();
            let active: Vec<_> = (0..3).filter(|other| cluster.members[*other].active).collect();
            for other in active {
                cluster.full_sync(other, number);
            }
            cluster.members[number].active = true;
            cluster.publish_views();
            sync_all(cluster);
            self.coverage.count("returned");
        }
    }

    /// Under any failures and returns, a reply only reaches the pod that it is for, and no two pods share an external
    /// tuple while both are active.
    #[test]
    fn no_reply_reaches_another_pod() {
        let classes = ["sent", "sent again", "reply received", "tunneled", "failed", "returned", "failed over"];
        let strategy = prop::collection::vec(step(), 1..120);
        property(ProptestConfig::with_cases(96), &strategy, &classes, |steps, coverage| {
            let mut cluster = Cluster::new(3, &Setup::default());
            cluster.skip_counter_check();
            let mut run = Run { cluster, seen: HashMap::new(), order: Vec::new(), clock: 0, coverage };
            for step in steps {
                run.step(step)?;
            }
            let cluster = run.cluster;
            coverage.add("tunneled", cluster.tunneled);
            let failed_over =
                cluster.gateways.iter().flat_map(|it| &it.workers).map(|it| it.counters().sessions_failed_over.get());
            coverage.add("failed over", failed_over.sum());
            Ok(())
        });
    }
}
