//! ICMP errors both ways, and what the gateway says on its own.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::support::*;
use etherparse::{Icmpv4Slice, NetSlice, SlicedPacket, TransportSlice};
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::snapshot::spec::*;
use vipgate_dataplane::wire::icmp_error::{Error, compose_v4, compose_v6};

const ENDS: [(&str, &str, &str); 2] = [
    ("10.244.1.5:4000", "198.51.100.10:53", "192.0.2.10"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53", "2001:db8::10"),
];

/// The frame of an ICMP error from `router` about `packet`.
pub(crate) fn error_about(packet: &[u8], router: &str, error: Error, from_pod: bool) -> Vec<u8> {
    let mut bytes = vec![0; 14 + 1280];
    let link = if from_pod { (INSIDE_MAC, POD_MAC) } else { (OUTSIDE_MAC, ROUTER_MAC) };
    bytes[..6].copy_from_slice(&link.0);
    bytes[6..12].copy_from_slice(&link.1);
    bytes[12..14].copy_from_slice(&packet[12..14]);
    let length = match ip(router) {
        IpAddr::V4(v4) => compose_v4(&mut bytes[14..], &packet[14..], error, v4.to_bits()),
        IpAddr::V6(v6) => {
            let source = vipgate_dataplane::address::V6::from_bits(v6.to_bits());
            compose_v6(&mut bytes[14..], &packet[14..], error, source)
        }
    };
    bytes.truncate(14 + length.unwrap());
    bytes
}

/// Outer source and destination of an ICMP error, and the packet that it quotes, behind a link header.
fn quoted(frame: &[u8]) -> (IpAddr, IpAddr, Vec<u8>) {
    let parsed = SlicedPacket::from_ethernet(frame).unwrap();
    let (source, destination): (IpAddr, IpAddr) = match parsed.net.unwrap() {
        NetSlice::Ipv4(v4) => (v4.header().source_addr().into(), v4.header().destination_addr().into()),
        NetSlice::Ipv6(v6) => (v6.header().source_addr().into(), v6.header().destination_addr().into()),
        NetSlice::Arp(_) => panic!("ARP"),
    };
    let payload = match parsed.transport.unwrap() {
        TransportSlice::Icmpv4(icmp) => icmp.payload().to_vec(),
        TransportSlice::Icmpv6(icmp) => icmp.payload().to_vec(),
        other => panic!("{other:?}"),
    };
    (source, destination, [&frame[..14], &payload].concat())
}

fn kind(frame: &[u8]) -> (u8, u8) {
    let parsed = SlicedPacket::from_ethernet(frame).unwrap();
    match parsed.transport.unwrap() {
        TransportSlice::Icmpv4(icmp) => (Icmpv4Slice::type_u8(&icmp), icmp.code_u8()),
        TransportSlice::Icmpv6(icmp) => (icmp.type_u8(), icmp.code_u8()),
        other => panic!("{other:?}"),
    }
}

fn with_addresses() -> NetworkSpec {
    let mut network = network();
    network.interfaces[0].addresses = vec![ip("10.244.1.1"), ip("fe80::1"), ip("fd00:244:1::1")];
    network.interfaces[1].addresses = vec![ip("192.0.2.1"), ip("2001:db8::1")];
    network
}

#[test]
fn an_error_from_the_way_finds_the_pod_with_its_own_packet_inside() {
    for workers in [1, 2] {
        for (pod, far, _) in ENDS {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                for error in [Error::TtlExceeded, Error::PacketTooBig { mtu: 1400 }, Error::HostUnreachable] {
                    let mut gateway = Gateway::new(&Setup { workers, ..Setup::default() });
                    let original = packet(protocol, at(pod), at(far));
                    let left = gateway.pod_sends(&original);
                    let router = if at(pod).is_ipv4() { "203.0.113.77" } else { "2001:db8:77::1" };
                    let queue = usize::from(workers) - 1;
                    let sent = gateway.arrives(queue, OUTSIDE, &error_about(&left, router, error, false));
                    assert_eq!(sent.len(), 1, "{protocol:?} {error:?}: {:?}", gateway.drops());
                    let (source, destination, inner) = quoted(&sent[0].1);
                    assert_eq!((source, destination), (ip(router), at(pod).ip()));
                    // The hop limit had gone down when it left.
                    let (mut inner, mut expected) = (inner[14..].to_vec(), original[14..].to_vec());
                    let ttl = if at(pod).is_ipv4() { 8 } else { 7 };
                    (inner[ttl], expected[ttl]) = (0, 0);
                    if at(pod).is_ipv4() {
                        inner[4..6].copy_from_slice(&expected[4..6]);
                        inner[10..12].copy_from_slice(&expected[10..12]);
                    }
                    assert_eq!(inner, expected[..inner.len()], "{protocol:?}");
                    let handed_over = ["", ", handed over 1"][usize::from(workers) - 1];
                    gateway.assert_delta(&format!("egress 1, reply 1, created 1{handed_over}"));
                }
            }
        }
    }
}

#[test]
fn a_pods_error_leaves_from_its_vip_and_quotes_it() {
    for (pod, far, vip) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        let left = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(far)));
        let answer = answer_to(&left, Protocol::Udp);
        let home = gateway.arrives(0, OUTSIDE, &answer);
        let error = error_about(&home[0].1, &at(pod).ip().to_string(), Error::PortUnreachable, true);
        let sent = gateway.arrives(0, INSIDE, &error);
        assert_eq!((sent.len(), sent[0].0), (1, OUTSIDE), "{:?}", gateway.drops());
        let (source, destination, inner) = quoted(&sent[0].1);
        assert_eq!((source, destination), (ip(vip), at(far).ip()));
        assert_eq!(ends(&inner), ends(&answer));
        gateway.assert_delta("egress 2, reply 1, created 1");
    }
}

#[test]
fn an_error_that_nobody_can_have_caused_is_dropped_by_name() {
    let mut gateway = Gateway::new(&Setup::default());
    let (pod, far, _) = ENDS[0];
    let left = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(far)));
    let good = error_about(&left, "203.0.113.77", Error::TtlExceeded, false);
    let mut other_port = left.clone();
    other_port[35] ^= 1;
    let stray = error_about(&other_port, "203.0.113.77", Error::TtlExceeded, false);
    let (mut bad_checksum, mut bad_quote) = (good.clone(), good.clone());
    bad_checksum[14 + 20 + 2] ^= 1;
    bad_quote[14 + 20 + 8 + 8] ^= 1;
    bad_quote[14 + 20 + 2] ^= 1;
    let small = error_about(&left, "203.0.113.77", Error::PacketTooBig { mtu: 60 }, false);
    for (bytes, reason) in [
        (stray, DropReason::NoSession),
        (bad_checksum, DropReason::BadChecksum),
        (bad_quote, DropReason::BadChecksum),
        (small, DropReason::Malformed),
    ] {
        let before = gateway.drops().get(&reason).copied().unwrap_or_default();
        assert!(gateway.arrives(0, OUTSIDE, &bytes).is_empty());
        assert_eq!(gateway.drops().get(&reason), Some(&(before + 1)), "{reason:?}: {:?}", gateway.drops());
    }
    assert_eq!(gateway.arrives(0, OUTSIDE, &good).len(), 1);
    gateway.assert_delta("egress 1, reply 1, drop no_session 1, drop malformed 1, drop bad_checksum 2, created 1");
}

#[test]
fn errors_neither_keep_a_session_alive_nor_end_it() {
    let mut gateway = Gateway::new(&Setup::default());
    let (pod, far, _) = ENDS[0];
    let left = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(far)));
    let error = error_about(&left, "203.0.113.77", Error::HostUnreachable, false);
    for _ in 0..40 {
        gateway.arrives(0, OUTSIDE, &error);
    }
    assert_eq!(gateway.arrives(0, OUTSIDE, &answer_to(&left, Protocol::Udp)).len(), 1, "it goes on");
    for _ in 0..12 {
        gateway.pass(500);
        gateway.arrives(0, OUTSIDE, &error);
    }
    assert_eq!(gateway.sessions(), 0, "after five seconds without packets of its own");
    gateway.assert_delta("egress 1, reply 50, drop no_session 3, ended idle 1, created 1");
}

#[test]
fn the_gateway_answers_when_the_hops_run_out_both_ways() {
    for (pod, far, vip) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        gateway.set_network(with_addresses());
        let v4 = at(pod).is_ipv4();
        let mut last = packet(Protocol::Udp, at(pod), at(far));
        let sent = gateway.pod_sends(&last);
        set_ttl(&mut last, 1);
        let told = gateway.arrives(0, INSIDE, &last);
        assert_eq!((told.len(), told[0].0), (1, INSIDE));
        assert_eq!(kind(&told[0].1), if v4 { (11, 0) } else { (3, 0) });
        let (source, destination, inner) = quoted(&told[0].1);
        let own = if v4 { "10.244.1.1" } else { "fd00:244:1::1" };
        assert_eq!((source, destination), (ip(own), at(pod).ip()));
        assert_eq!(inner[14..], last[14..14 + inner.len() - 14], "as it came");
        assert_eq!(&told[0].1[..12], [POD_MAC, INSIDE_MAC].concat());
        let mut answer = answer_to(&sent, Protocol::Udp);
        set_ttl(&mut answer, 1);
        let told = gateway.arrives(0, OUTSIDE, &answer);
        let (source, destination, inner) = quoted(&told[0].1);
        assert_eq!((source, destination), (ip(if v4 { "192.0.2.1" } else { "2001:db8::1" }), at(far).ip()));
        assert_eq!(ends(&inner).1.ip(), ip(vip), "nothing of the pod is told outside");
        assert_eq!(gateway.drops(), HashMap::from([(DropReason::Ttl, 2)]));
        gateway.assert_delta("egress 1, drop ttl 2, created 1, answered 2");
    }
}

#[test]
fn too_big_is_answered_with_what_fits() {
    for (pod, far, _) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        let mut network = with_addresses();
        network.interfaces[1].mtu = 1300;
        gateway.set_network(network);
        let mut large = Vec::new();
        let builder = etherparse::PacketBuilder::ethernet2(POD_MAC, INSIDE_MAC);
        match (at(pod).ip(), at(far).ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let mut header =
                    etherparse::Ipv4Header::new(0, 64, etherparse::IpNumber::UDP, from.octets(), to.octets()).unwrap();
                header.dont_fragment = true;
                builder
                    .ip(etherparse::IpHeaders::Ipv4(header, etherparse::Ipv4Extensions::default()))
                    .udp(1, 2)
                    .write(&mut large, &[7; 1400])
                    .unwrap();
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                builder.ipv6(from.octets(), to.octets(), 64).udp(1, 2).write(&mut large, &[7; 1400]).unwrap();
            }
            _ => unreachable!(),
        }
        let told = gateway.arrives(0, INSIDE, &large);
        assert_eq!(kind(&told[0].1), if at(pod).is_ipv4() { (3, 4) } else { (2, 0) });
        let mtu_at = 14 + if at(pod).is_ipv4() { 20 + 6 } else { 40 + 6 };
        assert_eq!(told[0].1[mtu_at..mtu_at + 2], 1300_u16.to_be_bytes());
        assert_eq!(gateway.drops(), HashMap::from([(DropReason::TooBig, 1)]));
        gateway.assert_delta("drop too_big 1, created 1, answered 1");
    }
}

#[test]
fn exhaustion_is_answered_where_policy_says_so() {
    let range = PortRange::new(5000, 5000).unwrap();
    for on_exhaustion in [OnExhaustion::Reject, OnExhaustion::Drop] {
        let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
        let mut policy = policy();
        policy.policies.iter_mut().for_each(|egress| egress.on_exhaustion = on_exhaustion);
        gateway.set_policy(&policy);
        gateway.set_network(with_addresses());
        for (pod, far, _) in ENDS {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                assert_eq!(gateway.arrives(0, INSIDE, &packet(protocol, at(pod), at(far))).len(), 1);
                let mut second = at(pod);
                second.set_port(4001);
                let told = gateway.arrives(0, INSIDE, &packet(protocol, second, at(far)));
                if on_exhaustion == OnExhaustion::Drop {
                    assert!(told.is_empty());
                    continue;
                }
                assert_eq!((told.len(), told[0].0), (1, INSIDE), "{protocol:?}");
                if protocol == Protocol::Tcp {
                    assert_eq!(ends(&told[0].1), (at(far), second));
                    let parsed = SlicedPacket::from_ethernet(&told[0].1).unwrap();
                    let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("a reset") };
                    assert!(tcp.rst() && tcp.ack() && tcp.acknowledgment_number() == 1001);
                } else {
                    assert_eq!(kind(&told[0].1), if at(pod).is_ipv4() { (3, 13) } else { (1, 1) });
                }
            }
        }
        assert_eq!(gateway.drops(), HashMap::from([(DropReason::PortsExhausted, 4)]));
        assert_eq!(gateway.sessions(), 4, "nobody was thrown out to make room");
        let answered = if on_exhaustion == OnExhaustion::Drop { "" } else { ", answered 4" };
        gateway.assert_delta(&format!("egress 4, drop ports_exhausted 4, created 4{answered}"));
    }
}

#[test]
fn who_provokes_answers_gets_few() {
    let mut gateway = Gateway::new(&Setup { frames: 4096, ..Setup::default() });
    gateway.set_network(with_addresses());
    let mut told = 0;
    for port in 0..500 {
        let mut last = packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + port).into(), at("198.51.100.10:53"));
        set_ttl(&mut last, 1);
        told += gateway.arrives(0, INSIDE, &last).len();
    }
    assert!((10..=30).contains(&told), "{told}");
    let mut other = packet(Protocol::Udp, at("10.244.1.6:1"), at("198.51.100.10:53"));
    set_ttl(&mut other, 1);
    assert_eq!(gateway.arrives(0, INSIDE, &other).len(), 1, "another one is heard");
    assert_eq!(gateway.forwarded(Direction::Egress), 0);
    gateway.assert_delta("drop ttl 501, answered 21, answers limited 480");
}

#[test]
fn errors_about_a_clients_session_find_their_way_both_ways() {
    use crate::support::services::{CLIENTS, VIPS, both_pods, service};
    for workers in [1, 2] {
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for ((client, vip), router) in CLIENTS.iter().zip(VIPS).zip(["198.51.100.254", "2001:db8:51::fe"]) {
            let (client, vip) = (at(client), (ip(vip), 53).into());
            let came = gateway.far_sends(&packet(Protocol::Udp, client, vip));
            let (_, backend) = ends(&came);
            let answer = gateway.arrives(0, INSIDE, &packet(Protocol::Udp, backend, client)).remove(0).1;
            // The client's side says that the answer is too big; the backend hears it about what it sent.
            let too_big = error_about(&answer, router, Error::PacketTooBig { mtu: 1280 }, false);
            let sent = gateway.arrives(usize::from(workers) - 1, OUTSIDE, &too_big);
            assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
            let (source, destination, quote) = quoted(&sent[0].1);
            assert_eq!((sent[0].0, source, destination), (INSIDE, ip(router), backend.ip()));
            assert_eq!(ends(&quote), (backend, client));
            // The backend says that nobody listens; the client hears it from the VIP.
            let refused = error_about(&came, &backend.ip().to_string(), Error::PortUnreachable, true);
            let sent = gateway.arrives(usize::from(workers) - 1, INSIDE, &refused);
            assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
            let (source, destination, quote) = quoted(&sent[0].1);
            assert_eq!((sent[0].0, source, destination), (OUTSIDE, vip.ip(), client.ip()));
            assert_eq!(ends(&quote), (client, vip));
        }
        let handed_over = ["", ", handed over 4"][usize::from(workers) - 1];
        gateway.assert_delta(&format!("inbound 4, service_reply 4, created 2{handed_over}"));
    }
}

/// The frame of a router's error about an answer of `api` that a client has never had a session for.
fn error_about_an_answer(protocol: Protocol, port: u16) -> Vec<u8> {
    use crate::support::services::{client, vip};
    error_about(&packet(protocol, vip(port), client(4000)), "203.0.113.77", Error::HostUnreachable, false)
}

#[test]
fn an_error_about_a_connection_that_nobody_knows_reaches_a_backend_only_where_several_gateways_serve() {
    use crate::support::cluster::{Cluster, only, shared_policy};
    use crate::support::services::{backend, service};
    let api = service(&[backend("10.244.1.5")]);
    let mut alone = Gateway::with_service(&Setup::default(), &api);
    assert_eq!(alone.arrives(0, OUTSIDE, &error_about_an_answer(Protocol::Udp, 53)), vec![]);
    alone.assert_delta("drop no_session 1");
    let mut cluster = Cluster::new(2, &Setup::default());
    let set = PolicySet { services: vec![api], ..shared_policy(2) };
    cluster.gateways.iter_mut().for_each(|gateway| gateway.set_policy(&set));
    for number in 0..2 {
        let sent = cluster.arrives(number, OUTSIDE, &error_about_an_answer(Protocol::Udp, 53));
        let (source, destination, quote) = quoted(&only(sent, number, INSIDE, &cluster));
        assert_eq!((source, destination), (ip("203.0.113.77"), ip("10.244.1.5")));
        assert_eq!(ends(&quote), (at("10.244.1.5:5353"), services::client(4000)));
        // Nothing is served at that port.
        assert_eq!(cluster.arrives(number, OUTSIDE, &error_about_an_answer(Protocol::Udp, 54)), vec![]);
    }
    cluster.assert_delta(&["inbound 1, peer_in 1, drop no_session 2", "inbound 1, peer_out 1"]);
}

#[test]
fn an_uncovered_backends_errors_are_its_frontends_where_they_are_about_a_client() {
    use crate::support::services::{backend, client, service, vip};
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend("10.244.1.7")]));
    let came = gateway.far_sends(&packet(Protocol::Udp, client(4000), vip(53)));
    let refused = error_about(&came, "10.244.1.7", Error::PortUnreachable, true);
    let sent = gateway.arrives(0, INSIDE, &refused);
    let (source, destination, quote) = quoted(&sent[0].1);
    assert_eq!((source, destination), (vip(53).ip(), client(4000).ip()));
    assert_eq!(ends(&quote), (client(4000), vip(53)));
    // What is no session's is its own affair: it goes as it came.
    let own = packet(Protocol::Udp, client(4000), at("10.244.1.7:9999"));
    let sent = gateway.arrives(0, INSIDE, &error_about(&own, "10.244.1.7", Error::PortUnreachable, true));
    let (source, destination, quote) = quoted(&sent[0].1);
    assert_eq!((source, destination), (ip("10.244.1.7"), client(4000).ip()));
    assert_eq!(ends(&quote), ends(&own));
    // Of a covered pod, nothing goes as it came.
    let own = packet(Protocol::Udp, client(4000), at("10.244.1.5:9999"));
    assert_eq!(gateway.arrives(0, INSIDE, &error_about(&own, "10.244.1.5", Error::PortUnreachable, true)), vec![]);
    gateway.assert_delta("inbound 1, service_reply 1, unchanged 1, drop no_session 1, created 1");
}
