//! ICMP errors in both directions, and those of the gateway itself.

use std::collections::HashMap;
use std::net::IpAddr;

use etherparse::{Icmpv4Slice, SlicedPacket, TransportSlice};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::wire::icmp_error::{IcmpError, compose_v4, compose_v6};
use vipgate_testkit::*;

const ENDS: [(&str, &str, &str); 2] = [
    ("10.244.1.5:4000", "198.51.100.10:53", "192.0.2.10"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53", "2001:db8::10"),
];

/// The frame of an ICMP error from `router` about `packet`.
pub(crate) fn error_about(packet: &[u8], router: &str, error: IcmpError, from_pod: bool) -> Vec<u8> {
    let mut bytes = vec![0; 14 + 1280];
    bytes[12..14].copy_from_slice(&packet[12..14]);
    let length = match ip(router) {
        IpAddr::V4(v4) => compose_v4(&mut bytes[14..], &packet[14..], error, v4.to_bits()),
        IpAddr::V6(v6) => {
            let source = vipgate_dataplane::flow::address::V6::from_bits(v6.to_bits());
            compose_v6(&mut bytes[14..], &packet[14..], error, source)
        }
    };
    bytes.truncate(14 + length.unwrap());
    on_link(if from_pod { INSIDE } else { OUTSIDE }, bytes)
}

/// Outer source and destination of an ICMP error, and the packet that it quotes, after an Ethernet header.
pub(crate) fn quoted(frame: &[u8]) -> (IpAddr, IpAddr, Vec<u8>) {
    let parsed = SlicedPacket::from_ethernet(frame).unwrap();
    let (source, destination) = addresses(&parsed.net.unwrap());
    let payload = match parsed.transport.unwrap() {
        TransportSlice::Icmpv4(icmp) => icmp.payload().to_vec(),
        TransportSlice::Icmpv6(icmp) => icmp.payload().to_vec(),
        other => panic!("{other:?}"),
    };
    (source, destination, [&frame[..14], &payload].concat())
}

pub(crate) fn type_and_code(frame: &[u8]) -> (u8, u8) {
    let parsed = SlicedPacket::from_ethernet(frame).unwrap();
    match parsed.transport.unwrap() {
        TransportSlice::Icmpv4(icmp) => (Icmpv4Slice::type_u8(&icmp), icmp.code_u8()),
        TransportSlice::Icmpv6(icmp) => (icmp.type_u8(), icmp.code_u8()),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn with_addresses() -> NetworkSpec {
    let mut network = network();
    network.interfaces[0].addresses = vec![ip("10.244.1.1"), ip("fe80::1"), ip("fd00:244:1::1")];
    network.interfaces[1].addresses = vec![ip("192.0.2.1"), ip("2001:db8::1")];
    network
}

#[test]
fn an_icmp_error_reaches_the_pod_with_its_original_packet_quoted() {
    for workers in [1, 2] {
        for (pod, remote, _) in ENDS {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                for error in [IcmpError::TtlExceeded, IcmpError::PacketTooBig { mtu: 1400 }, IcmpError::HostUnreachable]
                {
                    let mut gateway = Gateway::new(&Setup { workers, ..Setup::default() });
                    let original = packet(protocol, at(pod), at(remote));
                    let translated = gateway.pod_sends(&original);
                    let router = if at(pod).is_ipv4() { "203.0.113.77" } else { "2001:db8:77::1" };
                    let queue = usize::from(workers) - 1;
                    let sent = gateway.receive(queue, OUTSIDE, &error_about(&translated, router, error, false));
                    assert_eq!(sent.len(), 1, "{protocol:?} {error:?}: {:?}", gateway.drops());
                    let (source, destination, inner) = quoted(&sent[0].1);
                    assert_eq!((source, destination), (ip(router), at(pod).ip()));
                    // The TTL was decremented before the packet was quoted.
                    let (mut inner, mut expected) = (inner[14..].to_vec(), original[14..].to_vec());
                    let ttl = if at(pod).is_ipv4() { 8 } else { 7 };
                    (inner[ttl], expected[ttl]) = (0, 0);
                    if at(pod).is_ipv4() {
                        inner[4..6].copy_from_slice(&expected[4..6]);
                        inner[10..12].copy_from_slice(&expected[10..12]);
                    }
                    assert_eq!(inner, expected[..inner.len()], "{protocol:?}");
                    let handed_off = ["", ", handed off 1"][usize::from(workers) - 1];
                    gateway.assert_delta(&format!("egress 1, reply 1, created 1{handed_off}"));
                }
            }
        }
    }
}

#[test]
fn a_pods_icmp_error_is_translated_outside_and_in_the_quote() {
    for (pod, remote, vip) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        let translated = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
        let reply = reply_to(&translated, Protocol::Udp);
        let received = gateway.receive(0, OUTSIDE, &reply);
        let error = error_about(&received[0].1, &at(pod).ip().to_string(), IcmpError::PortUnreachable, true);
        let sent = gateway.receive(0, INSIDE, &error);
        assert_eq!((sent.len(), sent[0].0), (1, OUTSIDE), "{:?}", gateway.drops());
        let (source, destination, inner) = quoted(&sent[0].1);
        assert_eq!((source, destination), (ip(vip), at(remote).ip()));
        assert_eq!(ends(&inner), ends(&reply));
        gateway.assert_delta("egress 2, reply 1, created 1");
    }
}

#[test]
fn an_icmp_error_without_a_valid_quote_is_dropped_with_a_reason() {
    let mut gateway = Gateway::new(&Setup::default());
    let (pod, remote, _) = ENDS[0];
    let translated = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
    let valid = error_about(&translated, "203.0.113.77", IcmpError::TtlExceeded, false);
    let mut other_port = translated.clone();
    other_port[35] ^= 1;
    let unmatched = error_about(&other_port, "203.0.113.77", IcmpError::TtlExceeded, false);
    let (mut bad_checksum, mut bad_quote) = (valid.clone(), valid.clone());
    bad_checksum[14 + 20 + 2] ^= 1;
    bad_quote[14 + 20 + 8 + 8] ^= 1;
    bad_quote[14 + 20 + 2] ^= 1;
    let small = error_about(&translated, "203.0.113.77", IcmpError::PacketTooBig { mtu: 60 }, false);
    for (bytes, reason) in [
        (unmatched, DropReason::NoSession),
        (bad_checksum, DropReason::BadChecksum),
        (bad_quote, DropReason::BadChecksum),
        (small, DropReason::Malformed),
    ] {
        let before = gateway.drops().get(&reason).copied().unwrap_or_default();
        assert!(gateway.receive(0, OUTSIDE, &bytes).is_empty());
        assert_eq!(gateway.drops().get(&reason), Some(&(before + 1)), "{reason:?}: {:?}", gateway.drops());
    }
    assert_eq!(gateway.receive(0, OUTSIDE, &valid).len(), 1);
    gateway.assert_delta("egress 1, reply 1, drop no_session 1, drop malformed 1, drop bad_checksum 2, created 1");
}

#[test]
fn icmp_errors_neither_refresh_nor_end_a_session() {
    let mut gateway = Gateway::new(&Setup::default());
    let (pod, remote, _) = ENDS[0];
    let translated = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
    let error = error_about(&translated, "203.0.113.77", IcmpError::HostUnreachable, false);
    for _ in 0..40 {
        gateway.receive(0, OUTSIDE, &error);
    }
    assert_eq!(
        gateway.receive(0, OUTSIDE, &reply_to(&translated, Protocol::Udp)).len(),
        1,
        "the session is still open"
    );
    for _ in 0..12 {
        gateway.advance(500);
        gateway.receive(0, OUTSIDE, &error);
    }
    assert_eq!(gateway.sessions(), 0, "after five seconds without packets of its own");
    gateway.assert_delta("egress 1, reply 50, drop no_session 3, ended idle 1, created 1");
}

#[test]
fn an_expired_ttl_is_reported_in_both_directions() {
    for (pod, remote, vip) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.set_network(with_addresses());
        let v4 = at(pod).is_ipv4();
        let mut expiring = packet(Protocol::Udp, at(pod), at(remote));
        let sent = gateway.pod_sends(&expiring);
        set_ttl(&mut expiring, 1);
        let error = gateway.receive(0, INSIDE, &expiring);
        assert_eq!((error.len(), error[0].0), (1, INSIDE));
        assert_eq!(type_and_code(&error[0].1), if v4 { (11, 0) } else { (3, 0) });
        let (source, destination, inner) = quoted(&error[0].1);
        let gateway_address = if v4 { "10.244.1.1" } else { "fd00:244:1::1" };
        assert_eq!((source, destination), (ip(gateway_address), at(pod).ip()));
        assert_eq!(inner[14..], expiring[14..14 + inner.len() - 14], "as received");
        assert_eq!(&error[0].1[..12], [POD_MAC, INSIDE_MAC].concat());
        let mut reply = reply_to(&sent, Protocol::Udp);
        set_ttl(&mut reply, 1);
        let error = gateway.receive(0, OUTSIDE, &reply);
        let (source, destination, inner) = quoted(&error[0].1);
        assert_eq!((source, destination), (ip(if v4 { "192.0.2.1" } else { "2001:db8::1" }), at(remote).ip()));
        assert_eq!(ends(&inner).1.ip(), ip(vip), "the quote doesn't reveal the pod's address");
        gateway.assert_delta("egress 1, drop ttl 2, created 1, replies sent 2");
    }
}

#[test]
fn too_big_packets_are_reported_with_the_next_hop_mtu() {
    for (pod, remote, _) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        let mut network = with_addresses();
        network.interfaces[1].mtu = 1300;
        gateway.set_network(network);
        let mut large = Vec::new();
        on_ip(at(pod), at(remote)).udp(1, 2).write(&mut large, &[7; 1400]).unwrap();
        let error = gateway.receive(0, INSIDE, &large);
        assert_eq!(type_and_code(&error[0].1), if at(pod).is_ipv4() { (3, 4) } else { (2, 0) });
        let mtu_at = 14 + if at(pod).is_ipv4() { 20 + 6 } else { 40 + 6 };
        assert_eq!(error[0].1[mtu_at..mtu_at + 2], 1300_u16.to_be_bytes());
        gateway.assert_delta("drop too_big 1, created 1, replies sent 1");
    }
}

#[test]
fn port_exhaustion_is_rejected_or_dropped_as_configured() {
    let range = PortRange::new(5000, 5000).unwrap();
    for on_exhaustion in [OnExhaustion::Reject, OnExhaustion::Drop] {
        let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
        let mut policy = policy();
        policy.policies.iter_mut().for_each(|egress| egress.on_exhaustion = on_exhaustion);
        gateway.set_policy(&policy);
        gateway.set_network(with_addresses());
        for (pod, remote, _) in ENDS {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                assert_eq!(gateway.receive(0, INSIDE, &packet(protocol, at(pod), at(remote))).len(), 1);
                let mut second = at(pod);
                second.set_port(4001);
                let error = gateway.receive(0, INSIDE, &packet(protocol, second, at(remote)));
                if on_exhaustion == OnExhaustion::Drop {
                    assert!(error.is_empty());
                    continue;
                }
                assert_eq!((error.len(), error[0].0), (1, INSIDE), "{protocol:?}");
                if protocol == Protocol::Tcp {
                    assert_eq!(ends(&error[0].1), (at(remote), second));
                    let parsed = SlicedPacket::from_ethernet(&error[0].1).unwrap();
                    let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("not a TCP reset") };
                    assert!(tcp.rst() && tcp.ack() && tcp.acknowledgment_number() == 1001);
                } else {
                    assert_eq!(type_and_code(&error[0].1), if at(pod).is_ipv4() { (3, 13) } else { (1, 1) });
                }
            }
        }
        assert_eq!(gateway.drops(), HashMap::from([(DropReason::PortsExhausted, 4)]));
        assert_eq!(gateway.sessions(), 4, "no session was evicted");
        let replied = if on_exhaustion == OnExhaustion::Drop { "" } else { ", replies sent 4" };
        gateway.assert_delta(&format!("egress 4, drop ports_exhausted 4, created 4{replied}"));
    }
}

#[test]
fn icmp_errors_are_rate_limited_per_sender() {
    let mut gateway = Gateway::new(&Setup { frames: 4096, ..Setup::default() });
    gateway.set_network(with_addresses());
    let mut replies = 0;
    for port in 0..500 {
        let mut expiring = packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + port).into(), at("198.51.100.10:53"));
        set_ttl(&mut expiring, 1);
        replies += gateway.receive(0, INSIDE, &expiring).len();
    }
    assert!((10..=30).contains(&replies), "{replies}");
    let mut other = packet(Protocol::Udp, at("10.244.1.6:1"), at("198.51.100.10:53"));
    set_ttl(&mut other, 1);
    assert_eq!(gateway.receive(0, INSIDE, &other).len(), 1, "another sender gets its error");
    gateway.assert_delta("drop ttl 501, replies sent 21, replies suppressed 480");
}

#[test]
fn icmp_errors_of_service_sessions_are_translated_in_both_directions() {
    use vipgate_testkit::services::{CLIENTS, VIPS, both_pods, service};
    for workers in [1, 2] {
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for ((client, vip), router) in CLIENTS.iter().zip(VIPS).zip(["198.51.100.254", "2001:db8:51::fe"]) {
            let (client, vip) = (at(client), (ip(vip), 53).into());
            let received = gateway.remote_sends(&packet(Protocol::Udp, client, vip));
            let (_, backend) = ends(&received);
            let reply = gateway.receive(0, INSIDE, &packet(Protocol::Udp, backend, client)).remove(0).1;
            // A router reports that the reply is too big; the backend receives the error about the packet that it sent.
            let too_big = error_about(&reply, router, IcmpError::PacketTooBig { mtu: 1280 }, false);
            let sent = gateway.receive(usize::from(workers) - 1, OUTSIDE, &too_big);
            assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
            let (source, destination, quote) = quoted(&sent[0].1);
            assert_eq!((sent[0].0, source, destination), (INSIDE, ip(router), backend.ip()));
            assert_eq!(ends(&quote), (backend, client));
            // The backend reports an unreachable port; the client receives the error from the VIP.
            let unreachable = error_about(&received, &backend.ip().to_string(), IcmpError::PortUnreachable, true);
            let sent = gateway.receive(usize::from(workers) - 1, INSIDE, &unreachable);
            assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
            let (source, destination, quote) = quoted(&sent[0].1);
            assert_eq!((sent[0].0, source, destination), (OUTSIDE, vip.ip(), client.ip()));
            assert_eq!(ends(&quote), (client, vip));
        }
        let handed_off = ["", ", handed off 4"][usize::from(workers) - 1];
        gateway.assert_delta(&format!("inbound 4, service_reply 4, created 2{handed_off}"));
    }
}

/// The frame of a router's error about a reply of `api` without a session.
fn error_about_a_reply(protocol: Protocol, port: u16) -> Vec<u8> {
    use vipgate_testkit::services::{client, vip};
    error_about(&packet(protocol, vip(port), client(4000)), "203.0.113.77", IcmpError::HostUnreachable, false)
}

#[test]
fn an_icmp_error_without_a_session_reaches_a_backend_only_in_a_gateway_group() {
    use vipgate_testkit::cluster::Cluster;
    use vipgate_testkit::services::{backend, service};
    let api = service(&[backend("10.244.1.5")]);
    let mut alone = Gateway::with_service(&Setup::default(), &api);
    assert_eq!(alone.receive(0, OUTSIDE, &error_about_a_reply(Protocol::Tcp, 80)), vec![]);
    alone.assert_delta("drop no_session 1");
    let mut cluster = Cluster::new(2, &Setup::default());
    cluster.change_policy(|set| set.services = vec![api]);
    for number in 0..2 {
        let (source, destination, quote) =
            quoted(&cluster.remote_sends(number, number, &error_about_a_reply(Protocol::Tcp, 80)));
        assert_eq!((source, destination), (ip("203.0.113.77"), ip("10.244.1.5")));
        assert_eq!(ends(&quote), (at("10.244.1.5:8080"), services::client(4000)));
        // No Service has this port.
        assert_eq!(cluster.receive(number, OUTSIDE, &error_about_a_reply(Protocol::Tcp, 54)), vec![]);
    }
    cluster.assert_delta(&["inbound 1, peer_in 1, drop no_session 2", "inbound 1, peer_out 1"]);
}

#[test]
fn an_uncovered_backends_icmp_errors_are_translated_only_for_service_sessions() {
    use vipgate_testkit::services::{backend, client, service, vip};
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend("10.244.1.7")]));
    let received = gateway.remote_sends(&packet(Protocol::Udp, client(4000), vip(53)));
    let unreachable = error_about(&received, "10.244.1.7", IcmpError::PortUnreachable, true);
    let sent = gateway.receive(0, INSIDE, &unreachable);
    let (source, destination, quote) = quoted(&sent[0].1);
    assert_eq!((source, destination), (vip(53).ip(), client(4000).ip()));
    assert_eq!(ends(&quote), (client(4000), vip(53)));
    // An error without a session is routed unchanged.
    let original = packet(Protocol::Udp, client(4000), at("10.244.1.7:9999"));
    let sent = gateway.receive(0, INSIDE, &error_about(&original, "10.244.1.7", IcmpError::PortUnreachable, true));
    let (source, destination, quote) = quoted(&sent[0].1);
    assert_eq!((source, destination), (ip("10.244.1.7"), client(4000).ip()));
    assert_eq!(ends(&quote), ends(&original));
    // Not if the pod is covered by a policy.
    let original = packet(Protocol::Udp, client(4000), at("10.244.1.5:9999"));
    assert_eq!(
        gateway.receive(0, INSIDE, &error_about(&original, "10.244.1.5", IcmpError::PortUnreachable, true)),
        vec![]
    );
    gateway.assert_delta("inbound 1, service_reply 1, unchanged 1, drop no_session 1, created 1");
}
