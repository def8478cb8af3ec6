//! Pods that call the VIPs of this gateway: the packet goes out as one VIP and comes in at another, without leaving.

use crate::support::services::*;
use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::snapshot::spec::{Scope, ServiceSpec, VipSpec};

const A: (&str, &str) = ("10.244.1.5:4000", "192.0.2.10:5000");
const B: (&str, &str) = ("10.244.1.21:4001", "192.0.2.11:5000");

/// With one port in the range, both sides know what the other one leaves with.
fn gateway(workers: u8) -> Gateway {
    let range = PortRange::new(5000, 5000).unwrap();
    Gateway::new(&Setup { workers, range, ..Setup::default() })
}

#[test]
fn two_tenants_meet_at_their_vips() {
    for workers in [1, 2] {
        for protocol in [Protocol::Udp, Protocol::Tcp] {
            let mut gateway = gateway(workers);
            // The first one's packet finds nobody yet.
            assert!(gateway.arrives(0, INSIDE, &packet(protocol, at(B.0), at(A.1))).is_empty());
            assert_eq!(gateway.drops().get(&DropReason::NoService), Some(&1));
            let queue = usize::from(workers) - 1;
            let sent = gateway.arrives(queue, INSIDE, &packet(protocol, at(A.0), at(B.1)));
            assert_eq!(sent.len(), 1, "{workers} workers, {protocol:?}: {:?}", gateway.drops());
            assert_eq!(sent[0].0, INSIDE);
            assert_eq!(ends(&sent[0].1), (at(A.1), at(B.0)), "B sees A's VIP");
            let back = gateway.arrives(0, INSIDE, &packet(protocol, at(B.0), at(A.1)));
            assert_eq!(ends(&back[0].1), (at(B.1), at(A.0)), "A sees B's VIP");
            let handed_over = ["", ", handed over 2"][usize::from(workers) - 1];
            gateway.assert_delta(&format!("egress 3, reply 2, drop no_service 1, created 2{handed_over}"));
        }
    }
}

#[test]
fn a_pod_meets_itself_at_its_own_vip() {
    let mut gateway = gateway(1);
    let sent = gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(A.1)));
    assert_eq!(ends(&sent[0].1), (at(A.1), at(A.0)), "from its VIP, never from its own address: {:?}", gateway.drops());
    gateway.assert_delta("egress 1, reply 1, created 1");
}

#[test]
fn a_packet_from_a_vip_that_comes_from_the_wire_goes_nowhere() {
    let mut gateway = gateway(1);
    for (interface, source) in [(INSIDE, A.1), (OUTSIDE, A.1), (OUTSIDE, B.1)] {
        let mut bytes = packet(Protocol::Udp, at(source), at(B.1));
        bytes[..6].copy_from_slice(if interface == INSIDE { &INSIDE_MAC } else { &OUTSIDE_MAC });
        assert!(gateway.arrives(0, interface, &bytes).is_empty());
    }
    assert_eq!(gateway.drops().values().sum::<u64>(), 3);
    assert_eq!(gateway.sessions(), 0);
    gateway.assert_delta("drop spoofed_source 2, drop martian 1");
}

#[test]
fn who_pretends_to_be_a_vip_on_the_wire_reaches_no_session_with_it() {
    let mut gateway = gateway(1);
    gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at(B.0), at(A.1)));
    assert_eq!(gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(B.1))).len(), 1);
    for interface in [INSIDE, OUTSIDE] {
        let mut forged = packet(Protocol::Udp, at(A.1), at(B.1));
        forged[..6].copy_from_slice(if interface == INSIDE { &INSIDE_MAC } else { &OUTSIDE_MAC });
        assert!(gateway.arrives(0, interface, &forged).is_empty());
    }
    assert_eq!(gateway.drops().get(&DropReason::SpoofedSource), Some(&2));
    assert_eq!(gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(B.1))).len(), 1, "the true one passes");
    gateway.assert_delta("egress 3, reply 2, drop no_service 1, drop spoofed_source 2, created 2");
}

#[test]
fn a_far_side_that_becomes_a_vip_is_heard_by_way_of_the_vip_only() {
    const FAR: &str = "198.51.100.10:5000";
    let mut gateway = gateway(1);
    let sent = gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at(A.0), at(FAR)));
    assert_eq!(ends(&sent[0].1), (at(A.1), at(FAR)));
    let mut answer = packet(Protocol::Udp, at(FAR), at(A.1));
    answer[..6].copy_from_slice(&OUTSIDE_MAC);
    assert_eq!(gateway.arrives(0, OUTSIDE, &answer).len(), 1, "a stranger out there");
    let mut with = policy();
    let vip = VipSpec { address: at(FAR).ip(), ..with.vips[0].clone() };
    with.vips.push(vip);
    with.vips.sort_by_key(|vip| vip.address);
    gateway.set_policy(&with);
    assert!(gateway.arrives(0, OUTSIDE, &answer).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::SpoofedSource, 1)].into());
    gateway.set_policy(&policy());
    assert_eq!(gateway.arrives(0, OUTSIDE, &answer).len(), 1);
    gateway.assert_delta("egress 1, reply 2, drop spoofed_source 1, created 1");
}

#[test]
fn a_vip_that_policy_excludes_is_not_reached_with_the_pods_address() {
    let mut policy = policy();
    policy.policies[1].excluded.push("192.0.2.0/24".parse().unwrap());
    let mut gateway = gateway(1);
    gateway.set_policy(&policy);
    assert!(gateway.arrives(0, INSIDE, &packet(Protocol::Udp, at(B.0), at(A.1))).is_empty());
    assert_eq!(gateway.drops().get(&DropReason::NoService), Some(&1));
    gateway.assert_delta("drop no_service 1");
}

/// A pod calls a Service at its VIP, is served by a pod, and hears the answer from the VIP.
fn calls(
    gateway: &mut Gateway,
    pod: &str,
    own_vip: &str,
    protocol: Protocol,
    service: std::net::SocketAddr,
) -> std::net::SocketAddr {
    let pod = at(pod);
    let sent = gateway.arrives(0, INSIDE, &packet(protocol, pod, service));
    assert_eq!(sent.len(), 1, "{protocol:?} {pod} -> {service}: {:?}", gateway.drops());
    assert_eq!(sent[0].0, INSIDE);
    let (seen, backend) = ends(&sent[0].1);
    assert_eq!(seen.ip(), ip(own_vip), "the backend sees the VIP of whoever calls");
    let queue = gateway.workers.len() - 1;
    let answer = match protocol {
        Protocol::Tcp => tcp(backend, seen, "SA", 5000, 1001),
        _ => packet(protocol, backend, seen),
    };
    let sent = gateway.arrives(queue, INSIDE, &answer);
    assert_eq!(sent.len(), 1, "{protocol:?} back: {:?}", gateway.drops());
    assert_eq!((sent[0].0, ends(&sent[0].1)), (INSIDE, (service, pod)));
    backend
}

#[test]
fn a_pod_reaches_its_own_service_until_it_is_its_own_backend_and_another_tenants() {
    for workers in [1, 2] {
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for (protocol, port) in [(Protocol::Tcp, 80), (Protocol::Udp, 53)] {
            let mut backends = std::collections::HashSet::new();
            for n in 0..20 {
                backends.insert(
                    calls(&mut gateway, &format!("10.244.1.5:{}", 3000 + n), VIPS[0], protocol, vip(port)).ip(),
                );
                calls(&mut gateway, &format!("10.244.1.21:{}", 3000 + n), "192.0.2.11", protocol, vip(port));
                let six = (ip(VIPS[1]), port).into();
                calls(&mut gateway, &format!("[fd00:244:1::5]:{}", 3000 + n), VIPS[1], protocol, six);
            }
            assert_eq!(backends, ["10.244.1.5", "10.244.1.6"].map(ip).into(), "itself, and the other one");
        }
        let handed_over = ["", ", handed over 120"][usize::from(workers) - 1];
        let all = "egress 120, reply 120, inbound 120, service_reply 120, created 240";
        gateway.assert_delta(&format!("{all}{handed_over}"));
    }
}

#[test]
fn a_pod_without_policy_reaches_a_service_with_its_own_address() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend("10.244.1.5")]));
    calls(&mut gateway, "10.244.1.7:3000", "10.244.1.7", Protocol::Tcp, vip(80));
    gateway.assert_delta("inbound 1, service_reply 1, created 1");
}

#[test]
fn pods_are_served_as_the_internal_policy_says_and_hear_that_nobody_serves() {
    let setup = Setup { reject: true, ..Setup::default() };
    let mut gateway = Gateway::new(&setup);
    let mut local = ServiceSpec {
        external: Scope::Local,
        source_ranges: vec!["203.0.113.0/24".parse().unwrap()],
        ..service(&[backend("10.244.1.5")])
    };
    local.backends[0].external = false;
    gateway.serve(&local);
    calls(&mut gateway, "10.244.1.21:3000", "192.0.2.11", Protocol::Tcp, vip(80));
    gateway.serve(&service(&[]));
    let sent = gateway.arrives(0, INSIDE, &packet(Protocol::Tcp, at("10.244.1.21:3001"), vip(80)));
    assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
    assert_eq!(
        (sent[0].0, ends(&sent[0].1)),
        (INSIDE, (vip(80), at("10.244.1.21:3001"))),
        "a reset, by way of its VIP"
    );
    gateway.assert_delta("egress 2, reply 2, inbound 1, service_reply 2, drop no_backend 1, created 3");
}
