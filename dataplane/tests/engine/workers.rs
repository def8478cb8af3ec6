//! Two workers: whichever queue a packet comes in on, its session is one, and nothing is lost on the way between them.

use std::collections::HashSet;

use crate::support::*;
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::ports::PortRange;

fn two() -> Gateway {
    Gateway::new(&Setup { workers: 2, ..Setup::default() })
}

#[test]
fn a_reply_on_the_wrong_queue_reaches_its_owner() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let mut gateway = two();
        let seen = gateway.pod_sends(&packet(protocol, at("10.244.1.5:4000"), at("198.51.100.10:443")));
        let home = gateway.arrives(1, OUTSIDE, &answer_to(&seen, protocol));
        assert_eq!(home.len(), 1, "{protocol:?}: {:?}", gateway.drops());
        assert_eq!(ends(&home[0].1).1, at("10.244.1.5:4000"));
        assert_eq!((gateway.handoffs(), gateway.forwarded(Direction::Reply), gateway.sessions()), (1, 1, 1));
        gateway.assert_delta("egress 1, reply 1, created 1, handed over 1");
    }
}

#[test]
fn a_flow_that_moves_to_another_queue_stays_one_session() {
    for protocol in [Protocol::Udp, Protocol::Echo, Protocol::Tcp] {
        let mut gateway = two();
        let question = packet(protocol, at("10.244.1.5:4000"), at("198.51.100.10:443"));
        let first = gateway.pod_sends(&question);
        let moved = gateway.arrives(1, INSIDE, &question);
        assert_eq!(moved.len(), 1);
        assert_eq!(ends(&moved[0].1), ends(&first), "{protocol:?}: the same port");
        assert_eq!(gateway.sessions(), 1);
        gateway.assert_delta("egress 2, created 1, handed over 1");
    }
    let mut gateway = two();
    gateway.pod_sends(&packet(Protocol::Tcp, at("10.244.1.5:4000"), at("198.51.100.10:443")));
    let data = tcp(at("10.244.1.5:4000"), at("198.51.100.10:443"), "PA", 1001, 5001);
    assert_eq!(gateway.arrives(1, INSIDE, &data).len(), 1, "a segment without SYN, too: {:?}", gateway.drops());
    gateway.assert_delta("egress 2, created 1, handed over 1");
}

#[test]
fn nobodys_packets_are_handed_over_at_most_once() {
    let mut gateway = two();
    // Each worker takes its share of the VIP's ports, so every port has an owner.
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:443")));
    let _ = gateway.arrives(1, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4001"), at("198.51.100.10:443")));
    for port in 1024..1424 {
        let stray = packet(Protocol::Udp, at("203.0.113.9:53"), (ip("192.0.2.10"), port).into());
        assert_eq!(gateway.arrives(usize::from(port % 2), OUTSIDE, &stray), vec![]);
    }
    assert_eq!(gateway.drops(), [(DropReason::NoService, 400)].into());
    assert!(gateway.handoffs() <= 400);
    gateway.assert_delta("egress 2, drop no_service 400, created 2, handed over 200");
}

#[test]
fn no_two_sessions_of_two_workers_look_alike_from_outside() {
    let mut gateway = two();
    let mut seen = HashSet::new();
    for n in 0..2_000_u16 {
        let pod = if n % 3 == 0 { "10.244.1.5" } else { "10.244.1.6" };
        let sent = gateway.arrives(
            usize::from(n % 2),
            INSIDE,
            &packet(Protocol::Udp, (ip(pod), 1000 + n).into(), at("198.51.100.10:53")),
        );
        assert!(seen.insert(ends(&sent[0].1)), "two sessions share a tuple");
    }
    assert_eq!(gateway.sessions(), 2_000);
    gateway.assert_delta("egress 2000, created 2000");
}

#[test]
fn the_last_port_of_another_worker_is_lent_and_the_flow_stays_there() {
    let range = PortRange::new(20_000, 20_127).unwrap();
    let mut gateway = Gateway::new(&Setup { workers: 2, range, ..Setup::default() });
    // Each worker has a session, so neither gives its block back.
    let far = at("198.51.100.10:53");
    gateway.arrives(1, INSIDE, &packet(Protocol::Udp, at("10.244.1.6:1"), at("198.51.100.99:53")));
    let mut ports = HashSet::new();
    for n in 0..128_u16 {
        let sent = gateway.arrives(0, INSIDE, &packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), far));
        assert_eq!(sent.len(), 1, "session {n}: {:?}", gateway.drops());
        assert!(ports.insert(ends(&sent[0].1).0.port()), "each port once");
    }
    let refused = gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:9"), far));
    assert!(refused.is_empty());
    assert_eq!(gateway.drops().get(&DropReason::PortsExhausted), Some(&1), "refused once, by the last that was asked");
    // Whatever queue they come in on, packets of lent flows reach their worker, and so do answers.
    for n in 0..128_u16 {
        let source = (ip("10.244.1.5"), 1000 + n).into();
        let sent = gateway.arrives(usize::from(n % 2), INSIDE, &packet(Protocol::Udp, source, far));
        let back = gateway.arrives(usize::from(n / 2 % 2), OUTSIDE, &answer_to(&sent[0].1, Protocol::Udp));
        assert_eq!(ends(&back[0].1), (far, source));
    }
    assert_eq!(gateway.sessions(), 129);
    gateway.assert_delta("egress 257, reply 128, drop ports_exhausted 1, created 129, handed over 193");
}
