//! Two workers: a flow has one session whatever queues its packets arrive on, and no packet is lost in a hand-off.

use std::collections::HashSet;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::ports::PortRange;
use vipgate_testkit::*;

fn two_workers() -> Gateway {
    Gateway::new(&Setup { workers: 2, ..Setup::default() })
}

#[test]
fn a_reply_on_the_wrong_queue_is_handed_off_to_its_owner() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let mut gateway = two_workers();
        let seen = gateway.pod_sends(&packet(protocol, at("10.244.1.5:4000"), at("198.51.100.10:443")));
        let received = gateway.receive(1, OUTSIDE, &reply_to(&seen, protocol));
        assert_eq!(received.len(), 1, "{protocol:?}: {:?}", gateway.drops());
        assert_eq!(ends(&received[0].1).1, at("10.244.1.5:4000"));
        assert_eq!((gateway.handoffs(), gateway.forwarded(Direction::Reply), gateway.sessions()), (1, 1, 1));
        gateway.assert_delta("egress 1, reply 1, created 1, handed off 1");
    }
}

#[test]
fn a_flow_on_another_queue_keeps_its_session() {
    for protocol in [Protocol::Udp, Protocol::Echo, Protocol::Tcp] {
        let mut gateway = two_workers();
        let request = packet(protocol, at("10.244.1.5:4000"), at("198.51.100.10:443"));
        let first = gateway.pod_sends(&request);
        let moved = gateway.receive(1, INSIDE, &request);
        assert_eq!(moved.len(), 1);
        assert_eq!(ends(&moved[0].1), ends(&first), "{protocol:?}: the same port");
        assert_eq!(gateway.sessions(), 1);
        gateway.assert_delta("egress 2, created 1, handed off 1");
    }
    let mut gateway = two_workers();
    gateway.pod_sends(&packet(Protocol::Tcp, at("10.244.1.5:4000"), at("198.51.100.10:443")));
    let data = tcp(at("10.244.1.5:4000"), at("198.51.100.10:443"), "PA", 1001, 5001);
    assert_eq!(
        gateway.receive(1, INSIDE, &data).len(),
        1,
        "a segment without SYN is handed off, too: {:?}",
        gateway.drops()
    );
    gateway.assert_delta("egress 2, created 1, handed off 1");
}

#[test]
fn packets_without_a_session_are_handed_off_at_most_once() {
    let mut gateway = two_workers();
    // Each worker claims blocks of the VIP's ports, so every port has an owner.
    gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:443")));
    let _ = gateway.receive(1, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:4001"), at("198.51.100.10:443")));
    for port in 1024..1424 {
        let stray = packet(Protocol::Udp, at("203.0.113.9:53"), (ip("192.0.2.10"), port).into());
        assert_eq!(gateway.receive(usize::from(port % 2), OUTSIDE, &stray), vec![]);
    }
    assert!(gateway.handoffs() <= 400);
    gateway.assert_delta("egress 2, drop no_service 400, created 2, handed off 200");
}

#[test]
fn sessions_of_two_workers_never_share_an_external_tuple() {
    let mut gateway = two_workers();
    let mut seen = HashSet::new();
    for n in 0..2_000_u16 {
        let pod = if n % 3 == 0 { "10.244.1.5" } else { "10.244.1.6" };
        let sent = gateway.receive(
            usize::from(n % 2),
            INSIDE,
            &packet(Protocol::Udp, (ip(pod), 1000 + n).into(), at("198.51.100.10:53")),
        );
        assert!(seen.insert(ends(&sent[0].1)), "two sessions share an external tuple");
    }
    assert_eq!(gateway.sessions(), 2_000);
    gateway.assert_delta("egress 2000, created 2000");
}

#[test]
fn flows_use_ports_of_another_worker_under_exhaustion() {
    let range = PortRange::new(20_000, 20_127).unwrap();
    let mut gateway = Gateway::new(&Setup { workers: 2, range, ..Setup::default() });
    // Each worker has a session, so neither releases its block.
    let remote = at("198.51.100.10:53");
    gateway.receive(1, INSIDE, &packet(Protocol::Udp, at("10.244.1.6:1"), at("198.51.100.99:53")));
    let mut ports = HashSet::new();
    for n in 0..128_u16 {
        let sent = gateway.receive(0, INSIDE, &packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), remote));
        assert_eq!(sent.len(), 1, "session {n}: {:?}", gateway.drops());
        assert!(ports.insert(ends(&sent[0].1).0.port()), "each port is used once");
    }
    let rejected = gateway.receive(0, INSIDE, &packet(Protocol::Udp, at("10.244.1.5:9"), remote));
    assert!(rejected.is_empty());
    assert_eq!(gateway.drops().get(&DropReason::PortsExhausted), Some(&1), "counted once, at the last worker tried");
    // On any queue, packets and replies of these flows reach the worker that has the port.
    for n in 0..128_u16 {
        let source = (ip("10.244.1.5"), 1000 + n).into();
        let sent = gateway.receive(usize::from(n % 2), INSIDE, &packet(Protocol::Udp, source, remote));
        let reply = gateway.receive(usize::from(n / 2 % 2), OUTSIDE, &reply_to(&sent[0].1, Protocol::Udp));
        assert_eq!(ends(&reply[0].1), (remote, source));
    }
    assert_eq!(gateway.sessions(), 129);
    gateway.assert_delta("egress 257, reply 128, drop ports_exhausted 1, created 129, handed off 193");
}
