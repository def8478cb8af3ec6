//! SNAT: pods' packets leave with their VIP, and replies reach the pod; one worker, every protocol, both families.

use std::net::SocketAddr;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::{HopSpec, Limits, RouteTarget};
use vipgate_testkit::services::*;
use vipgate_testkit::*;

const ALL: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Echo];

#[test]
fn egress_is_translated_to_the_vip_and_replies_to_the_pod() {
    for (pod, vip, remote) in [
        ("10.244.1.5:4000", "192.0.2.10", "198.51.100.10:443"),
        ("[fd00:244:1::5]:4000", "2001:db8::10", "[2001:db8:51::10]:443"),
    ] {
        for protocol in ALL {
            let mut gateway = Gateway::new(&Setup::default());
            let seen = gateway.pod_sends(&packet(protocol, at(pod), at(remote)));
            let (source, destination) = ends(&seen);
            assert_eq!(source.ip(), ip(vip));
            assert!(source.port() >= 1024);
            assert_eq!(destination.ip(), at(remote).ip());
            assert_eq!(&seen[..12], [ROUTER_MAC, OUTSIDE_MAC].concat(), "MAC addresses");

            let received = gateway.receive(0, OUTSIDE, &reply_to(&seen, protocol));
            assert_eq!(received.len(), 1, "{protocol:?}: {:?}", gateway.drops());
            assert_eq!(received[0].0, INSIDE);
            assert_eq!(ends(&received[0].1).1, at(pod), "{protocol:?}");
            assert_eq!(&received[0].1[..12], [POD_MAC, INSIDE_MAC].concat());
            assert_eq!(gateway.sessions(), 1);
            assert_eq!((gateway.forwarded(Direction::Egress), gateway.forwarded(Direction::Reply)), (1, 1));
            gateway.assert_delta("egress 1, reply 1, created 1");
        }
    }
}

#[test]
fn a_flow_keeps_its_port() {
    let mut gateway = Gateway::new(&Setup::default());
    let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
    let first = ends(&gateway.pod_sends(&request)).0;
    for _ in 0..100 {
        assert_eq!(ends(&gateway.pod_sends(&request)).0, first);
    }
    assert_eq!(gateway.sessions(), 1);
    gateway.assert_delta("egress 101, created 1");
}

#[test]
fn packets_of_one_flow_in_one_batch_open_one_session() {
    let mut gateway = Gateway::new(&Setup::default());
    for _ in 0..20 {
        let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
        assert!(gateway.workers[0].io().inject(INSIDE, &request));
    }
    let sent = gateway.run();
    assert_eq!(sent.len(), 20);
    assert!(sent.iter().all(|(_, bytes)| ends(bytes).0 == ends(&sent[0].1).0));
    assert_eq!(gateway.sessions(), 1);
    gateway.assert_delta("egress 20, created 1");
}

#[test]
fn pods_with_the_same_source_port_get_distinct_external_ports() {
    let mut gateway = Gateway::new(&Setup::default());
    let remote = at("198.51.100.10:80");
    let seen: Vec<_> = ["10.244.1.5:4000", "10.244.1.6:4000"]
        .map(|pod| gateway.pod_sends(&packet(Protocol::Tcp, at(pod), remote)))
        .into();
    assert_ne!(ends(&seen[0]).0, ends(&seen[1]).0);
    for (seen, pod) in seen.iter().zip(["10.244.1.5:4000", "10.244.1.6:4000"]) {
        let received = gateway.receive(0, OUTSIDE, &reply_to(seen, Protocol::Tcp));
        assert_eq!(ends(&received[0].1).1, at(pod));
    }
    gateway.assert_delta("egress 2, reply 2, created 2");
}

#[test]
fn excluded_destinations_are_routed_unchanged_in_both_directions() {
    let mut gateway = Gateway::new(&Setup::default());
    let request = packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.200:53"));
    let seen = gateway.pod_sends(&request);
    assert_eq!(ends(&seen), (at("10.244.1.21:4000"), at("198.51.100.200:53")));
    assert_eq!(seen[22], 63, "the TTL is decremented");
    let received = gateway.receive(0, OUTSIDE, &reply_to(&seen, Protocol::Udp));
    assert_eq!(ends(&received[0].1).1, at("10.244.1.21:4000"));
    assert_eq!((gateway.sessions(), gateway.forwarded(Direction::Unchanged)), (0, 2));

    let covered = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.127:53")));
    assert_eq!(ends(&covered).0.ip(), ip("192.0.2.11"), "just outside the exclusion");
    gateway.assert_delta("egress 1, unchanged 2, created 1");
}

/// With a pod's own route gone, the default route would take its packets outside, with its address.
#[test]
fn packets_to_a_pod_without_a_route_of_its_own_stay_inside() {
    let without_pods = || {
        let mut network = network();
        let is_inside = |hop: &HopSpec| hop.interface == INSIDE;
        network.routes.retain(|route| !matches!(&route.target, RouteTarget::Via(hops) if hops.iter().all(is_inside)));
        network
    };
    for (pod, remote) in [("10.244.1.5:4000", "198.51.100.10:443"), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:443")] {
        for protocol in ALL {
            let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
            let seen = gateway.pod_sends(&packet(protocol, at(pod), at(remote)));
            gateway.remote_sends(&reply_to(&seen, protocol));
            let vip = SocketAddr::new(ends(&seen).0.ip(), 80);
            gateway.set_network(without_pods());
            let of_session = reply_to(&seen, protocol);
            let to_service = tcp(at(remote), vip, "S", 1, 0);
            for bytes in [of_session.clone(), of_session.clone(), to_service] {
                let sent = gateway.receive(0, OUTSIDE, &bytes);
                let has_pod = |bytes: &[u8]| [ends(bytes).0, ends(bytes).1].iter().any(|end| end.ip() == at(pod).ip());
                assert!(sent.iter().all(|(_, bytes)| !has_pod(bytes)), "{protocol:?} {sent:?}");
            }
            assert_eq!(gateway.drops(), [(DropReason::NoRoute, 3)].into(), "{protocol:?}");
            gateway.set_network(network());
            assert_eq!(ends(&gateway.remote_sends(&of_session)).1, at(pod), "{protocol:?}");
            // Without an IPv6 address the gateway sends no ICMPv6 error.
            let errors = if at(pod).is_ipv4() { ", replies sent 3" } else { "" };
            gateway.assert_delta(&format!("egress 1, reply 2, drop no_route 3, created 1{errors}"));
        }
    }
    // Replies from destinations that policy excludes have the pod's address, and their way is the same.
    let mut gateway = Gateway::new(&Setup::default());
    let seen = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.200:53")));
    gateway.set_network(without_pods());
    assert_eq!(gateway.receive(0, OUTSIDE, &reply_to(&seen, Protocol::Udp)).len(), 1, "an ICMP error");
    gateway.assert_delta("unchanged 1, drop no_route 1, replies sent 1");
}

#[test]
fn unsolicited_packets_are_dropped_with_a_reason() {
    let pod = at("10.244.1.5:4000");
    let remote = at("198.51.100.10:443");
    let cases = [
        (OUTSIDE, packet(Protocol::Tcp, remote, at("192.0.2.10:5555")), DropReason::NoService),
        (OUTSIDE, packet(Protocol::Udp, remote, at("192.0.2.10:80")), DropReason::NoService),
        (OUTSIDE, packet(Protocol::Echo, remote, at("192.0.2.10:1")), DropReason::NoService),
        (INSIDE, tcp(pod, remote, "A", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, remote, "SA", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, remote, "R", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, remote, "SF", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, remote, "", 1, 1), DropReason::NoSession),
        (INSIDE, echo(false, pod, remote, 5), DropReason::NoSession),
        (OUTSIDE, with_destination_mac(packet(Protocol::Udp, pod, remote), OUTSIDE_MAC), DropReason::SpoofedSource),
        (
            INSIDE,
            with_destination_mac(packet(Protocol::Udp, at("192.0.2.10:9"), remote), INSIDE_MAC),
            DropReason::SpoofedSource,
        ),
        (
            INSIDE,
            with_destination_mac(packet(Protocol::Udp, at("10.9.9.9:9"), remote), INSIDE_MAC),
            DropReason::NoPolicy,
        ),
        (INSIDE, packet(Protocol::Udp, pod, at("224.0.0.5:9")), DropReason::Martian),
        (INSIDE, packet(Protocol::Udp, pod, at("127.0.0.1:9")), DropReason::Martian),
        (INSIDE, packet(Protocol::Udp, pod, pod), DropReason::Martian),
        (INSIDE, with_destination_mac(packet(Protocol::Udp, pod, remote), [2, 9, 9, 9, 9, 9]), DropReason::NotOurs),
        (INSIDE, with_ttl(packet(Protocol::Udp, pod, remote), 1), DropReason::Ttl),
    ];
    for (interface, bytes, reason) in cases {
        let mut gateway = Gateway::new(&Setup::default());
        // An expired TTL is reported to the sender by ICMP (icmp.rs).
        let replies = usize::from(reason == DropReason::Ttl);
        assert_eq!(gateway.receive(0, interface, &bytes).len(), replies, "{reason:?}");
        assert_eq!(gateway.drops(), [(reason, 1)].into(), "{reason:?}");
        assert_eq!(gateway.sessions(), 0, "{reason:?} leaves no session");
        let replied = ["", ", replies sent 1"][replies];
        gateway.assert_delta(&format!("drop {} 1{replied}", reason.name()));
    }
}

#[test]
fn a_reply_from_the_wrong_side_is_dropped() {
    let mut gateway = Gateway::new(&Setup::default());
    let seen = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53")));
    let forged = with_destination_mac(reply_to(&seen, Protocol::Udp), INSIDE_MAC);
    assert_eq!(gateway.receive(0, INSIDE, &forged), vec![]);
    gateway.assert_delta("egress 1, drop spoofed_source 1, created 1");
}

#[test]
fn every_port_is_usable_and_released_on_expiry() {
    let range = vipgate_dataplane::ports::PortRange::new(30_000, 30_099).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let remote = at("198.51.100.10:53");
    let mut ports = std::collections::HashSet::new();
    // Port 30000 is reserved for a Service.
    for n in 0..99 {
        let seen = gateway.pod_sends(&packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), remote));
        assert!(ports.insert(ends(&seen).0.port()));
    }
    assert!(!ports.contains(&30_000));
    assert_eq!(gateway.receive(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:9999"), remote)), vec![]);
    assert_eq!(gateway.drops(), [(DropReason::PortsExhausted, 1)].into());
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:9999"), at("198.51.100.11:53")));

    gateway.advance(8_000);
    assert_eq!(gateway.sessions(), 0, "all have expired");
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:9999"), remote));
    gateway.assert_delta("egress 101, drop ports_exhausted 1, ended idle 100, created 101");
}

#[test]
fn a_port_is_quarantined_before_another_pod_gets_it() {
    let range = vipgate_dataplane::ports::PortRange::new(30_001, 30_001).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let remote = at("198.51.100.10:53");
    let seen = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), remote));
    gateway.advance(6_000);
    assert_eq!(gateway.sessions(), 0);
    assert_eq!(
        gateway.receive(0, OUTSIDE, &reply_to(&seen, Protocol::Udp)),
        vec![],
        "the first pod's session has expired"
    );
    assert_eq!(gateway.receive(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.6:4000"), remote)), vec![]);
    assert_eq!(gateway.drops(), [(DropReason::NoService, 1), (DropReason::PortsExhausted, 1)].into());
    let again = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), remote));
    assert_eq!(ends(&again).0, ends(&seen).0, "the same pod may reuse it at once");
    gateway.advance(9_000);
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.6:4000"), remote));
    gateway.assert_delta("egress 3, drop no_service 1, drop ports_exhausted 1, ended idle 2, created 3");
}

#[test]
fn session_limits_apply_per_endpoint() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut limited = policy();
    limited.policies[0].limits = Limits { sessions: Some(3), ..Limits::default() };
    gateway.set_policy(&limited);
    for n in 0..5 {
        let _ = gateway.receive(
            0,
            INSIDE,
            &packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), at("198.51.100.10:53")),
        );
    }
    assert_eq!((gateway.sessions(), gateway.drops()), (3, [(DropReason::Quota, 2)].into()));
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.6:4000"), at("198.51.100.10:53")));
    gateway.advance(6_000);
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53")));
    gateway.assert_delta("egress 5, drop quota 2, ended idle 4, created 5");
}

#[test]
fn guaranteed_ports_are_available_under_exhaustion() {
    // Two blocks; pods .5 and .6 are guaranteed 10 ports each, so the second block is set aside for that.
    let range = vipgate_dataplane::ports::PortRange::new(1024, 1151).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let mut fair = policy();
    fair.policies[0].limits = Limits { guaranteed_ports: Some(10), ..Limits::default() };
    gateway.set_policy(&fair);
    let mut opened = |pod: &str, count: u16| {
        let before = gateway.sessions();
        for n in 0..count {
            let request = packet(Protocol::Udp, (ip(pod), 4000 + n).into(), at("198.51.100.10:53"));
            let _ = gateway.receive(0, INSIDE, &request);
        }
        gateway.sessions() - before
    };
    let greedy = opened("10.244.1.5", 200);
    assert!((64..=74).contains(&greedy), "{greedy}: the first block, and up to ten guaranteed ports in the second one");
    assert_eq!(opened("10.244.1.6", 10), 10);
    assert_eq!(opened("10.244.1.5", 200), 0, "rejected flows are rejected again");
    gateway.assert_delta("egress 152, drop ports_exhausted 258, created 81");
}

#[test]
fn a_full_table_rejects_new_sessions_and_keeps_existing_ones() {
    let mut gateway = Gateway::new(&Setup { capacity: 10, ..Setup::default() });
    let remote = at("198.51.100.10:53");
    for n in 0..15 {
        let _ = gateway.receive(0, INSIDE, &packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), remote));
    }
    assert_eq!((gateway.sessions(), gateway.drops()), (10, [(DropReason::SessionTableFull, 5)].into()));
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), remote));
    gateway.assert_delta("egress 11, drop session_table_full 5, created 10");
}

fn with_destination_mac(mut bytes: Vec<u8>, destination: [u8; 6]) -> Vec<u8> {
    bytes[..6].copy_from_slice(&destination);
    bytes
}

fn with_ttl(mut bytes: Vec<u8>, ttl: u8) -> Vec<u8> {
    set_ttl(&mut bytes, ttl);
    bytes
}

#[test]
fn the_mss_of_syns_is_clamped() {
    let mut gateway = Gateway::new(&Setup { mss: Some(1360), ..Setup::default() });
    for (pod, remote, mss) in
        [("10.244.1.5:4000", "198.51.100.10:443", 1360_u16), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:443", 1340)]
    {
        let with_mss = |from: &str, to: &str, flags: &str| {
            let mut bytes = tcp(at(from), at(to), flags, 1000, 1001);
            let l4 = if at(from).is_ipv4() { 34 } else { 54 };
            bytes[l4 + 12] = 0x60;
            bytes.extend([2, 4, 0x05, 0xb4]);
            with_tcp_checksums(bytes)
        };
        let sent = gateway.receive(0, INSIDE, &with_mss(pod, remote, "S")).remove(0).1;
        assert_eq!(sent[sent.len() - 2..], mss.to_be_bytes());
        let (vip, _) = ends(&sent);
        let replies = gateway.receive(0, OUTSIDE, &with_mss(remote, &vip.to_string(), "SA"));
        assert_eq!(replies[0].1[replies[0].1.len() - 2..], mss.to_be_bytes(), "in both directions");
    }
    gateway.assert_delta("egress 2, reply 2, created 2");
}

#[test]
fn a_suspended_worker_expires_no_session_with_queued_packets() {
    let mut gateway = Gateway::new(&Setup::default());
    let remote = at("198.51.100.10:53");
    let requests: Vec<_> =
        (0..200_u16).map(|n| packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), remote)).collect();
    let seen: Vec<_> = requests.iter().map(|request| gateway.pod_sends(request)).collect();
    // Four of the five seconds pass; then each session has another packet, but the worker is suspended before it
    // processes them.
    gateway.advance(4_000);
    for request in &requests {
        assert!(gateway.workers[0].io().inject(INSIDE, request));
    }
    gateway.now = gateway.now.plus(60_000);
    let again = gateway.run();
    assert_eq!(again.len(), 200);
    assert!(again.iter().zip(&seen).all(|((_, after), before)| ends(after) == ends(before)), "the same ports");
    assert_eq!(gateway.sessions(), 200);
    gateway.assert_delta("egress 400, created 200");
}

#[test]
fn a_packet_with_expired_ttl_opens_no_session() {
    for (ttl, sent) in [(0, 0), (1, 0), (2, 1)] {
        let mut gateway = Gateway::new(&Setup::default());
        let request = with_ttl(packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53")), ttl);
        let sent_packets = gateway.receive(0, INSIDE, &request);
        assert_eq!(sent_packets.iter().filter(|(out, _)| *out == OUTSIDE).count(), sent, "{ttl}");
        assert_eq!(gateway.sessions(), sent as u64);
        gateway.assert_delta(if sent == 1 { "egress 1, created 1" } else { "drop ttl 1, replies sent 1" });
    }
}

/// The range has a single port, so the first session's quarantined port would be in the way of the next one.
#[test]
fn a_vip_change_leaves_the_old_port_in_quarantine() {
    let range = vipgate_dataplane::ports::PortRange::new(30_001, 30_001).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
    let old = gateway.pod_sends(&request);
    gateway.advance(6_000);
    let mut set = policy();
    set.endpoints[0].vips = vec![ip("192.0.2.11")];
    gateway.set_policy(&set);
    let new = gateway.pod_sends(&request);
    assert_eq!((ends(&old).0, ends(&new).0), (at("192.0.2.10:30001"), at("192.0.2.11:30001")));
    assert_eq!(gateway.receive(0, OUTSIDE, &reply_to(&old, Protocol::Udp)), vec![]);
    assert_eq!(gateway.remote_sends(&reply_to(&new, Protocol::Udp))[30..34], [10, 244, 1, 5]);
    // Another pod behind the old VIP gets the port only after its quarantine.
    let other = packet(Protocol::Udp, at("10.244.1.6:4000"), at("198.51.100.10:53"));
    assert_eq!(gateway.receive(0, INSIDE, &other), vec![]);
    gateway.advance(3_000);
    assert_eq!(ends(&gateway.pod_sends(&other)).0, at("192.0.2.10:30001"));
    gateway.assert_delta("egress 3, reply 1, drop no_service 1, drop ports_exhausted 1, ended idle 1, created 3");
}
