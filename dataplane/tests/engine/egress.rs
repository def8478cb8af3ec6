//! Pods leave as their VIP, and answers come home: one worker, every protocol, both families.

use crate::support::*;
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::snapshot::spec::Limits;

const ALL: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Echo];

#[test]
fn a_pods_packet_leaves_as_its_vip_and_the_answer_comes_home() {
    for (pod, vip, far) in [
        ("10.244.1.5:4000", "192.0.2.10", "198.51.100.10:443"),
        ("[fd00:244:1::5]:4000", "2001:db8::10", "[2001:db8:51::10]:443"),
    ] {
        for protocol in ALL {
            let mut gateway = Gateway::new(&Setup::default());
            let seen = gateway.pod_sends(&packet(protocol, at(pod), at(far)));
            let (source, destination) = ends(&seen);
            assert_eq!(source.ip(), ip(vip));
            assert!(source.port() >= 1024);
            assert_eq!(destination.ip(), at(far).ip());
            assert_eq!(&seen[..12], [ROUTER_MAC, OUTSIDE_MAC].concat(), "link addresses");

            let home = gateway.arrives(0, OUTSIDE, &answer_to(&seen, protocol));
            assert_eq!(home.len(), 1, "{protocol:?}: {:?}", gateway.drops());
            assert_eq!(home[0].0, INSIDE);
            assert_eq!(ends(&home[0].1).1, at(pod), "{protocol:?}");
            assert_eq!(&home[0].1[..12], [POD_MAC, INSIDE_MAC].concat());
            assert_eq!(gateway.sessions(), 1);
            assert_eq!((gateway.forwarded(Direction::Egress), gateway.forwarded(Direction::Reply)), (1, 1));
            assert!(gateway.drops().is_empty());
            gateway.assert_delta("egress 1, reply 1, created 1");
        }
    }
}

#[test]
fn the_port_stays_the_same_for_all_packets_of_a_flow() {
    let mut gateway = Gateway::new(&Setup::default());
    let question = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
    let first = ends(&gateway.pod_sends(&question)).0;
    for _ in 0..100 {
        assert_eq!(ends(&gateway.pod_sends(&question)).0, first);
    }
    assert_eq!(gateway.sessions(), 1);
    gateway.assert_delta("egress 101, created 1");
}

#[test]
fn several_packets_of_a_new_session_in_one_batch_are_one_session() {
    let mut gateway = Gateway::new(&Setup::default());
    for _ in 0..20 {
        let question = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
        assert!(gateway.workers[0].io().inject(INSIDE, &question));
    }
    let sent = gateway.run();
    assert_eq!(sent.len(), 20);
    assert!(sent.iter().all(|(_, bytes)| ends(bytes).0 == ends(&sent[0].1).0));
    assert_eq!(gateway.sessions(), 1);
    gateway.assert_delta("egress 20, created 1");
}

#[test]
fn two_pods_with_one_source_port_get_two_ports_and_each_its_own_answer() {
    let mut gateway = Gateway::new(&Setup::default());
    let far = at("198.51.100.10:80");
    let seen: Vec<_> = ["10.244.1.5:4000", "10.244.1.6:4000"]
        .map(|pod| gateway.pod_sends(&packet(Protocol::Tcp, at(pod), far)))
        .into();
    assert_ne!(ends(&seen[0]).0, ends(&seen[1]).0);
    for (seen, pod) in seen.iter().zip(["10.244.1.5:4000", "10.244.1.6:4000"]) {
        let home = gateway.arrives(0, OUTSIDE, &answer_to(seen, Protocol::Tcp));
        assert_eq!(ends(&home[0].1).1, at(pod));
    }
    gateway.assert_delta("egress 2, reply 2, created 2");
}

#[test]
fn excluded_destinations_are_routed_unchanged_both_ways() {
    let mut gateway = Gateway::new(&Setup::default());
    let question = packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.200:53"));
    let seen = gateway.pod_sends(&question);
    assert_eq!(ends(&seen), (at("10.244.1.21:4000"), at("198.51.100.200:53")));
    assert_eq!(seen[22], 63, "the TTL went down");
    let home = gateway.arrives(0, OUTSIDE, &answer_to(&seen, Protocol::Udp));
    assert_eq!(ends(&home[0].1).1, at("10.244.1.21:4000"));
    assert_eq!((gateway.sessions(), gateway.forwarded(Direction::Unchanged)), (0, 2));

    let covered = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.21:4000"), at("198.51.100.127:53")));
    assert_eq!(ends(&covered).0.ip(), ip("192.0.2.11"), "just outside the exclusion");
    gateway.assert_delta("egress 1, unchanged 2, created 1");
}

#[test]
fn what_nobody_asked_for_is_dropped_by_name() {
    let pod = at("10.244.1.5:4000");
    let far = at("198.51.100.10:443");
    let cases = [
        (OUTSIDE, packet(Protocol::Tcp, far, at("192.0.2.10:5555")), DropReason::NoService),
        (OUTSIDE, packet(Protocol::Udp, far, at("192.0.2.10:80")), DropReason::NoService),
        (OUTSIDE, packet(Protocol::Echo, far, at("192.0.2.10:1")), DropReason::NoService),
        (INSIDE, tcp(pod, far, "A", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, far, "SA", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, far, "R", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, far, "SF", 1, 1), DropReason::NoSession),
        (INSIDE, tcp(pod, far, "", 1, 1), DropReason::NoSession),
        (INSIDE, echo(false, pod, far, 5), DropReason::NoSession),
        (OUTSIDE, with_link(packet(Protocol::Udp, pod, far), OUTSIDE_MAC), DropReason::SpoofedSource),
        (INSIDE, with_link(packet(Protocol::Udp, at("192.0.2.10:9"), far), INSIDE_MAC), DropReason::SpoofedSource),
        (INSIDE, with_link(packet(Protocol::Udp, at("10.9.9.9:9"), far), INSIDE_MAC), DropReason::NoPolicy),
        (INSIDE, packet(Protocol::Udp, pod, at("224.0.0.5:9")), DropReason::Martian),
        (INSIDE, packet(Protocol::Udp, pod, at("127.0.0.1:9")), DropReason::Martian),
        (INSIDE, packet(Protocol::Udp, pod, pod), DropReason::Martian),
        (INSIDE, with_link(packet(Protocol::Udp, pod, far), [2, 9, 9, 9, 9, 9]), DropReason::NotOurs),
        (INSIDE, with_ttl(packet(Protocol::Udp, pod, far), 1), DropReason::Ttl),
    ];
    for (interface, bytes, reason) in cases {
        let mut gateway = Gateway::new(&Setup::default());
        // Where hops run out, the sender hears of it (tests/icmp.rs).
        let answers = usize::from(reason == DropReason::Ttl);
        assert_eq!(gateway.arrives(0, interface, &bytes).len(), answers, "{reason:?}");
        assert_eq!(gateway.drops(), [(reason, 1)].into(), "{reason:?}");
        assert_eq!(gateway.sessions(), 0, "{reason:?} leaves no session behind");
        let answered = ["", ", answered 1"][answers];
        gateway.assert_delta(&format!("drop {} 1{answered}", reason.name()));
    }
}

#[test]
fn an_answer_from_the_wrong_side_is_dropped() {
    let mut gateway = Gateway::new(&Setup::default());
    let seen = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53")));
    let forged = with_link(answer_to(&seen, Protocol::Udp), INSIDE_MAC);
    assert_eq!(gateway.arrives(0, INSIDE, &forged), vec![]);
    assert_eq!(gateway.drops(), [(DropReason::SpoofedSource, 1)].into());
    gateway.assert_delta("egress 1, drop spoofed_source 1, created 1");
}

#[test]
fn ports_run_out_exactly_at_the_last_one_and_come_back() {
    let range = vipgate_dataplane::ports::PortRange::new(30_000, 30_099).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let far = at("198.51.100.10:53");
    let mut ports = std::collections::HashSet::new();
    // Port 30000 is a Service's.
    for n in 0..99 {
        let seen = gateway.pod_sends(&packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), far));
        assert!(ports.insert(ends(&seen).0.port()));
    }
    assert!(!ports.contains(&30_000));
    assert_eq!(gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:9999"), far)), vec![]);
    assert_eq!(gateway.drops(), [(DropReason::PortsExhausted, 1)].into());
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:9999"), at("198.51.100.11:53")));

    gateway.pass(8_000);
    assert_eq!(gateway.sessions(), 0, "all have expired");
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:9999"), far));
    gateway.assert_delta("egress 101, drop ports_exhausted 1, ended idle 100, created 101");
}

#[test]
fn a_port_rests_before_another_pod_gets_it() {
    let range = vipgate_dataplane::ports::PortRange::new(30_001, 30_001).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let far = at("198.51.100.10:53");
    let seen = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), far));
    gateway.pass(6_000);
    assert_eq!(gateway.sessions(), 0);
    assert_eq!(gateway.arrives(0, OUTSIDE, &answer_to(&seen, Protocol::Udp)), vec![], "too late for the first pod");
    assert_eq!(gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.6:4000"), far)), vec![]);
    assert_eq!(gateway.drops(), [(DropReason::NoService, 1), (DropReason::PortsExhausted, 1)].into());
    let again = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), far));
    assert_eq!(ends(&again).0, ends(&seen).0, "the same pod may have it back at once");
    gateway.pass(9_000);
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.6:4000"), far));
    gateway.assert_delta("egress 3, drop no_service 1, drop ports_exhausted 1, ended idle 2, created 3");
}

#[test]
fn limits_of_an_endpoint_hold_for_it_alone() {
    let mut gateway = Gateway::new(&Setup::default());
    let mut limited = policy();
    limited.policies[0].limits = Limits { sessions: Some(3), ..Limits::default() };
    gateway.set_policy(&limited);
    for n in 0..5 {
        let _ = gateway.arrives(
            0,
            INSIDE,
            &packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), at("198.51.100.10:53")),
        );
    }
    assert_eq!((gateway.sessions(), gateway.drops()), (3, [(DropReason::Quota, 2)].into()));
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.6:4000"), at("198.51.100.10:53")));
    gateway.pass(6_000);
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53")));
    gateway.assert_delta("egress 5, drop quota 2, ended idle 4, created 5");
}

#[test]
fn an_endpoint_has_its_guaranteed_ports_whatever_the_others_have() {
    // Two blocks; pods 5 and 6 are guaranteed 10 ports each: the second block is for that.
    let range = vipgate_dataplane::ports::PortRange::new(1024, 1151).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let mut fair = policy();
    fair.policies[0].limits = Limits { guaranteed_ports: Some(10), ..Limits::default() };
    gateway.set_policy(&fair);
    let mut opened = |pod: &str, count: u16| {
        let before = gateway.sessions();
        for n in 0..count {
            let question = packet(Protocol::Udp, (ip(pod), 4000 + n).into(), at("198.51.100.10:53"));
            let _ = gateway.arrives(0, INSIDE, &question);
        }
        gateway.sessions() - before
    };
    let greedy = opened("10.244.1.5", 200);
    assert!(
        (64..=74).contains(&greedy),
        "{greedy}: the first block, and what it found in the second one with its first ten"
    );
    assert_eq!(opened("10.244.1.6", 10), 10);
    assert_eq!(opened("10.244.1.5", 200), 0, "those that were refused are refused again");
    gateway.assert_delta("egress 152, drop ports_exhausted 258, created 81");
}

#[test]
fn a_full_table_refuses_new_sessions_and_keeps_the_old_ones() {
    let mut gateway = Gateway::new(&Setup { capacity: 10, ..Setup::default() });
    let far = at("198.51.100.10:53");
    for n in 0..15 {
        let _ = gateway.arrives(0, INSIDE, &packet(Protocol::Udp, (ip("10.244.1.5"), 4000 + n).into(), far));
    }
    assert_eq!((gateway.sessions(), gateway.drops()), (10, [(DropReason::SessionTableFull, 5)].into()));
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), far));
    gateway.assert_delta("egress 11, drop session_table_full 5, created 10");
}

fn with_link(mut bytes: Vec<u8>, destination: [u8; 6]) -> Vec<u8> {
    bytes[..6].copy_from_slice(&destination);
    bytes
}

fn with_ttl(mut bytes: Vec<u8>, ttl: u8) -> Vec<u8> {
    set_ttl(&mut bytes, ttl);
    bytes
}

#[test]
fn syns_announce_no_more_than_the_configuration_says() {
    let mut gateway = Gateway::new(&Setup { mss: Some(1360), ..Setup::default() });
    for (pod, far, most) in
        [("10.244.1.5:4000", "198.51.100.10:443", 1360_u16), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:443", 1340)]
    {
        let announces = |from: &str, to: &str, flags: &str| {
            let mut bytes = tcp(at(from), at(to), flags, 1000, 1001);
            let l4 = if at(from).is_ipv4() { 34 } else { 54 };
            bytes[l4 + 12] = 0x60;
            bytes.extend([2, 4, 0x05, 0xb4]);
            sealed_tcp(bytes)
        };
        let sent = gateway.arrives(0, INSIDE, &announces(pod, far, "S")).remove(0).1;
        assert_eq!(sent[sent.len() - 2..], most.to_be_bytes());
        let (vip, _) = ends(&sent);
        let back = gateway.arrives(0, OUTSIDE, &announces(far, &vip.to_string(), "SA"));
        assert_eq!(back[0].1[back[0].1.len() - 2..], most.to_be_bytes(), "both ways");
    }
    gateway.assert_delta("egress 2, reply 2, created 2");
}

#[test]
fn a_worker_that_was_stopped_ends_no_session_whose_packets_wait() {
    let mut gateway = Gateway::new(&Setup::default());
    let far = at("198.51.100.10:53");
    let questions: Vec<_> =
        (0..200_u16).map(|n| packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), far)).collect();
    let seen: Vec<_> = questions.iter().map(|question| gateway.pod_sends(question)).collect();
    // Four of its five seconds pass; then each session is heard of, but nobody looks for two more.
    gateway.pass(4_000);
    for question in &questions {
        assert!(gateway.workers[0].io().inject(INSIDE, question));
    }
    gateway.now = gateway.now.plus(60_000);
    let again = gateway.run();
    assert_eq!(again.len(), 200);
    assert!(again.iter().zip(&seen).all(|((_, after), before)| ends(after) == ends(before)), "the same ports");
    assert_eq!(gateway.sessions(), 200);
    gateway.assert_delta("egress 400, created 200");
}

#[test]
fn a_pods_packet_on_its_last_hop_opens_nothing() {
    for (ttl, sent) in [(0, 0), (1, 0), (2, 1)] {
        let mut gateway = Gateway::new(&Setup::default());
        let question = with_ttl(packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53")), ttl);
        let left = gateway.arrives(0, INSIDE, &question);
        assert_eq!(left.iter().filter(|(out, _)| *out == OUTSIDE).count(), sent, "{ttl}");
        assert_eq!(gateway.sessions(), sent as u64);
        gateway.assert_delta(if sent == 1 { "egress 1, created 1" } else { "drop ttl 1, answered 1" });
    }
}

/// Its ports are one port: what the first session leaves behind is in the way of the next one.
#[test]
fn a_pod_that_begins_anew_with_another_vip_leaves_the_old_port_in_quarantine() {
    let range = vipgate_dataplane::ports::PortRange::new(30_001, 30_001).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let question = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
    let old = gateway.pod_sends(&question);
    gateway.pass(6_000);
    let mut set = policy();
    set.endpoints[0].vips = vec![ip("192.0.2.11")];
    gateway.set_policy(&set);
    let new = gateway.pod_sends(&question);
    assert_eq!((ends(&old).0, ends(&new).0), (at("192.0.2.10:30001"), at("192.0.2.11:30001")));
    assert_eq!(gateway.arrives(0, OUTSIDE, &answer_to(&old, Protocol::Udp)), vec![]);
    assert_eq!(gateway.far_sends(&answer_to(&new, Protocol::Udp))[30..34], [10, 244, 1, 5]);
    // Another pod behind the old VIP doesn't get its port before it has rested.
    let other = packet(Protocol::Udp, at("10.244.1.6:4000"), at("198.51.100.10:53"));
    assert_eq!(gateway.arrives(0, INSIDE, &other), vec![]);
    gateway.pass(3_000);
    assert_eq!(ends(&gateway.pod_sends(&other)).0, at("192.0.2.10:30001"));
    gateway.assert_delta("egress 3, reply 1, drop no_service 1, drop ports_exhausted 1, ended idle 1, created 3");
}
