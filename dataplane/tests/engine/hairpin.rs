//! Hairpinning (RFC 4787): pods that call VIPs of this gateway; the packet is translated to one VIP and received again
//! at another.

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::{Scope, ServiceSpec, VipSpec};
use vipgate_dataplane::ports::PortRange;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

const A: (&str, &str) = ("10.244.1.5:4000", "192.0.2.10:5000");
const B: (&str, &str) = ("10.244.1.21:4001", "192.0.2.11:5000");

/// With a single port in the range, both sides know the other's external port.
fn gateway(workers: u8) -> Gateway {
    let range = PortRange::new(5000, 5000).unwrap();
    Gateway::new(&Setup { workers, range, ..Setup::default() })
}

#[test]
fn pods_of_two_tenants_communicate_via_their_vips() {
    for workers in [1, 2] {
        for protocol in [Protocol::Udp, Protocol::Tcp] {
            let mut gateway = gateway(workers);
            // The first pod's packet finds no session yet.
            assert!(gateway.receive(0, INSIDE, &packet(protocol, at(B.0), at(A.1))).is_empty());
            assert_eq!(gateway.drops().get(&DropReason::NoService), Some(&1));
            let queue = usize::from(workers) - 1;
            let sent = gateway.receive(queue, INSIDE, &packet(protocol, at(A.0), at(B.1)));
            assert_eq!(sent.len(), 1, "{workers} workers, {protocol:?}: {:?}", gateway.drops());
            assert_eq!(sent[0].0, INSIDE);
            assert_eq!(ends(&sent[0].1), (at(A.1), at(B.0)), "B receives it from A's VIP");
            let reply = gateway.receive(0, INSIDE, &packet(protocol, at(B.0), at(A.1)));
            assert_eq!(ends(&reply[0].1), (at(B.1), at(A.0)), "A receives it from B's VIP");
            let handed_off = ["", ", handed off 2"][usize::from(workers) - 1];
            gateway.assert_delta(&format!("egress 3, reply 2, drop no_service 1, created 2{handed_off}"));
        }
    }
}

#[test]
fn a_pod_reaches_itself_at_its_own_vip() {
    let mut gateway = gateway(1);
    let sent = gateway.receive(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(A.1)));
    assert_eq!(ends(&sent[0].1), (at(A.1), at(A.0)), "from its VIP, never from its own address: {:?}", gateway.drops());
    gateway.assert_delta("egress 1, reply 1, created 1");
}

#[test]
fn packets_with_a_vip_source_from_the_wire_are_dropped() {
    let mut gateway = gateway(1);
    for (interface, source) in [(INSIDE, A.1), (OUTSIDE, A.1), (OUTSIDE, B.1)] {
        let bytes = on_link(interface, packet(Protocol::Udp, at(source), at(B.1)));
        assert!(gateway.receive(0, interface, &bytes).is_empty());
    }
    assert_eq!(gateway.drops().values().sum::<u64>(), 3);
    assert_eq!(gateway.sessions(), 0);
    gateway.assert_delta("drop spoofed_source 2, drop martian 1");
}

#[test]
fn a_spoofed_vip_source_reaches_no_session() {
    let mut gateway = gateway(1);
    gateway.receive(0, INSIDE, &packet(Protocol::Udp, at(B.0), at(A.1)));
    assert_eq!(gateway.receive(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(B.1))).len(), 1);
    for interface in [INSIDE, OUTSIDE] {
        let forged = on_link(interface, packet(Protocol::Udp, at(A.1), at(B.1)));
        assert!(gateway.receive(0, interface, &forged).is_empty());
    }
    assert_eq!(gateway.drops().get(&DropReason::SpoofedSource), Some(&2));
    assert_eq!(
        gateway.receive(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(B.1))).len(),
        1,
        "the genuine packet passes"
    );
    gateway.assert_delta("egress 3, reply 2, drop no_service 1, drop spoofed_source 2, created 2");
}

#[test]
fn a_remote_that_becomes_a_vip_is_accepted_only_hairpinned() {
    const REMOTE: &str = "198.51.100.10:5000";
    let mut gateway = gateway(1);
    let sent = gateway.receive(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(REMOTE)));
    assert_eq!(ends(&sent[0].1), (at(A.1), at(REMOTE)));
    let reply = packet(Protocol::Udp, at(REMOTE), at(A.1));
    assert_eq!(gateway.receive(0, OUTSIDE, &reply).len(), 1, "an outside remote");
    let mut with_remote_vip = policy();
    let vip = VipSpec { address: at(REMOTE).ip(), ..with_remote_vip.vips[0].clone() };
    with_remote_vip.vips.push(vip);
    with_remote_vip.vips.sort_by_key(|vip| vip.address);
    gateway.set_policy(&with_remote_vip);
    assert!(gateway.receive(0, OUTSIDE, &reply).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::SpoofedSource, 1)].into());
    gateway.set_policy(&policy());
    assert_eq!(gateway.receive(0, OUTSIDE, &reply).len(), 1);
    gateway.assert_delta("egress 1, reply 2, drop spoofed_source 1, created 1");
}

#[test]
fn an_excluded_vip_is_not_reached_with_the_pods_address() {
    let mut policy = policy();
    policy.policies[1].excluded.push("192.0.2.0/24".parse().unwrap());
    let mut gateway = gateway(1);
    gateway.set_policy(&policy);
    assert!(gateway.receive(0, INSIDE, &packet(Protocol::Udp, at(B.0), at(A.1))).is_empty());
    gateway.assert_delta("drop no_service 1");
}

/// A pod calls a Service at its VIP, and a backend replies from the VIP; returns the backend.
fn call_service(
    gateway: &mut Gateway,
    pod: &str,
    own_vip: &str,
    protocol: Protocol,
    service: std::net::SocketAddr,
) -> std::net::SocketAddr {
    let pod = at(pod);
    let sent = gateway.receive(0, INSIDE, &packet(protocol, pod, service));
    assert_eq!(sent.len(), 1, "{protocol:?} {pod} -> {service}: {:?}", gateway.drops());
    assert_eq!(sent[0].0, INSIDE);
    let (seen, backend) = ends(&sent[0].1);
    assert_eq!(seen.ip(), ip(own_vip), "the backend receives it from the caller's VIP");
    let queue = gateway.workers.len() - 1;
    let reply = match protocol {
        Protocol::Tcp => tcp(backend, seen, "SA", 5000, 1001),
        _ => packet(protocol, backend, seen),
    };
    let sent = gateway.receive(queue, INSIDE, &reply);
    assert_eq!(sent.len(), 1, "{protocol:?} reply: {:?}", gateway.drops());
    assert_eq!((sent[0].0, ends(&sent[0].1)), (INSIDE, (service, pod)));
    backend
}

#[test]
fn pods_reach_services_of_their_own_and_other_tenants() {
    for workers in [1, 2] {
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for (protocol, port) in [(Protocol::Tcp, 80), (Protocol::Udp, 53)] {
            let mut backends = std::collections::HashSet::new();
            for n in 0..20 {
                backends.insert(
                    call_service(&mut gateway, &format!("10.244.1.5:{}", 3000 + n), VIPS[0], protocol, vip(port)).ip(),
                );
                call_service(&mut gateway, &format!("10.244.1.21:{}", 3000 + n), "192.0.2.11", protocol, vip(port));
                let vip_v6 = (ip(VIPS[1]), port).into();
                call_service(&mut gateway, &format!("[fd00:244:1::5]:{}", 3000 + n), VIPS[1], protocol, vip_v6);
            }
            assert_eq!(backends, ["10.244.1.5", "10.244.1.6"].map(ip).into(), "itself and the other backend");
        }
        let handed_off = ["", ", handed off 120"][usize::from(workers) - 1];
        let all = "egress 120, reply 120, inbound 120, service_reply 120, created 240";
        gateway.assert_delta(&format!("{all}{handed_off}"));
    }
}

#[test]
fn an_uncovered_pod_reaches_a_service_with_its_own_address() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend("10.244.1.5")]));
    call_service(&mut gateway, "10.244.1.7:3000", "10.244.1.7", Protocol::Tcp, vip(80));
    gateway.assert_delta("inbound 1, service_reply 1, created 1");
}

#[test]
fn pods_follow_the_internal_traffic_policy_and_are_rejected_without_backends() {
    let setup = Setup { reject: true, ..Setup::default() };
    let mut gateway = Gateway::new(&setup);
    let mut local = ServiceSpec {
        external: Scope::Local,
        source_ranges: vec!["203.0.113.0/24".parse().unwrap()],
        ..service(&[backend("10.244.1.5")])
    };
    local.backends[0].external = false;
    gateway.set_service(&local);
    call_service(&mut gateway, "10.244.1.21:3000", "192.0.2.11", Protocol::Tcp, vip(80));
    gateway.set_service(&service(&[]));
    let sent = gateway.receive(0, INSIDE, &packet(Protocol::Tcp, at("10.244.1.21:3001"), vip(80)));
    assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
    assert_eq!((sent[0].0, ends(&sent[0].1)), (INSIDE, (vip(80), at("10.244.1.21:3001"))), "a reset from the VIP");
    gateway.assert_delta("egress 2, reply 2, inbound 1, service_reply 2, drop no_backend 1, created 3");
}
