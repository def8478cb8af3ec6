//! ICMP errors of routers between the gateway and the pods: the session of the quoted packet translates them; without
//! one, none shows a pod's address to whom policy hides it from.

use std::net::SocketAddr;

use etherparse::{NetSlice, SlicedPacket};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_testkit::cluster::Cluster;
use vipgate_testkit::services::{CLIENTS, VIPS, backend, both_pods, service, with_services};
use vipgate_testkit::*;

use crate::icmp::{error_about, quoted};

/// A pod, a remote and the pod's VIP.
const ENDS: [(&str, &str, &str); 2] = [
    ("10.244.1.5:4000", "198.51.100.10:53", "192.0.2.10"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53", "2001:db8::10"),
];
/// Routers inside, of both families: in no known prefix, and in a pod prefix.
const ROUTERS: [[&str; 2]; 2] = [["10.99.0.1", "fd00:99::1"], ["10.244.9.1", "fd00:244:9::1"]];
/// Remotes that policy may exclude, and a cluster address, which is behind the default route.
const EXCLUDED: [&str; 2] = ["198.51.100.200:53", "[2001:db8:51::c8]:53"];
const INTERNAL: [&str; 2] = ["10.96.0.10:53", "[fd00:96::10]:53"];

fn nets(texts: &[&str]) -> Vec<ipnet::IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// The test policy in a cluster, with remotes that policy a excludes.
fn in_cluster(drop_uncovered: bool) -> PolicySet {
    let (pods, others) = (nets(&["10.244.0.0/16", "fd00:244::/32"]), nets(&["10.96.0.0/12", "fd00:96::/108"]));
    let mut set = PolicySet { cluster: ClusterSpec { pods, others, drop_uncovered }, ..policy() };
    set.policies[0].excluded = nets(&["198.51.100.128/25", "2001:db8:51::80/121"]);
    set
}

fn gateway(set: &PolicySet, workers: u8) -> Gateway {
    Gateway::with(&Setup { workers, ..Setup::default() }, network(), set)
}

/// A datagram from `from` to a pod, as the router inside has it.
fn to_pod(from: &str, pod: &str) -> Vec<u8> {
    packet(Protocol::Udp, at(from), at(pod))
}

fn unreachable(about: &[u8], router: &str) -> Vec<u8> {
    error_about(about, router, IcmpError::HostUnreachable, true)
}

/// Asserts that an error is dropped.
#[track_caller]
fn assert_dropped(gateway: &mut Gateway, error: &[u8], reason: DropReason) {
    assert_eq!(gateway.receive(0, INSIDE, error), vec![], "{:?}", gateway.drops());
    gateway.assert_delta(&format!("drop {} 1", reason.name()));
}

#[test]
fn an_inside_routers_error_reaches_the_remote_from_the_vip_about_the_packet_that_it_sent() {
    for set in [policy(), in_cluster(true), in_cluster(false)] {
        for workers in [1, 2] {
            for (family, (pod, remote, vip)) in ENDS.into_iter().enumerate() {
                for router in ROUTERS.map(|both| both[family]) {
                    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                        let errors = [IcmpError::TtlExceeded, IcmpError::PacketTooBig { mtu: 1400 }];
                        for error in errors.into_iter().chain([IcmpError::HostUnreachable]) {
                            let mut gateway = gateway(&set, workers);
                            let translated = gateway.pod_sends(&packet(protocol, at(pod), at(remote)));
                            let reply = reply_to(&translated, protocol);
                            let received = gateway.remote_sends(&reply);
                            let error = error_about(&received, router, error, true);
                            let sent = gateway.receive(usize::from(workers) - 1, INSIDE, &error);
                            assert_eq!((sent.len(), sent[0].0), (1, OUTSIDE), "{:?}", gateway.drops());
                            let (source, destination, inner) = quoted(&sent[0].1);
                            assert_eq!((source, destination), (ip(vip), at(remote).ip()), "{router}");
                            assert_eq!(ends(&inner), ends(&reply), "the quote has the VIP and its SNAT port");
                            let handed_off = ["", ", handed off 1"][usize::from(workers) - 1];
                            gateway.assert_delta(&format!("egress 2, reply 1, created 1{handed_off}"));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn an_inside_routers_error_about_a_clients_packet_reaches_the_client_from_the_vip() {
    let backends = [both_pods(), vec![backend("10.244.1.7"), backend("fd00:244:1::7")]];
    for backends in backends {
        for workers in [1, 2] {
            for drop_uncovered in [true, false] {
                let set = PolicySet { services: vec![service(&backends)], ..in_cluster(drop_uncovered) };
                let mut network = network();
                let address = ip("fd00:244:1::7");
                network.neighbors.push(NeighborSpec { interface: INSIDE, address, mac: POD_MAC });
                let mut gateway = Gateway::with(&Setup { workers, ..Setup::default() }, network, &set);
                for (family, (client, vip)) in CLIENTS.iter().zip(VIPS).enumerate() {
                    let (client, vip) = (at(client), SocketAddr::new(ip(vip), 53));
                    let received = gateway.remote_sends(&packet(Protocol::Udp, client, vip));
                    let error = unreachable(&received, ROUTERS[0][family]);
                    let sent = gateway.receive(usize::from(workers) - 1, INSIDE, &error);
                    assert_eq!((sent.len(), sent[0].0), (1, OUTSIDE), "{:?}", gateway.drops());
                    let (source, destination, inner) = quoted(&sent[0].1);
                    assert_eq!((source, destination), (vip.ip(), client.ip()));
                    assert_eq!(ends(&inner), (client, vip));
                }
                let handed_off = ["", ", handed off 2"][usize::from(workers) - 1];
                gateway.assert_delta(&format!("inbound 2, service_reply 2, created 2{handed_off}"));
            }
        }
    }
}

#[test]
fn no_backend_sees_the_address_of_a_pod_that_reports_on_its_replies() {
    let set = with_services(&[service(&["10.244.1.6", "fd00:244:1::6"].map(backend))]);
    for ((client, vip), (pod, ..)) in CLIENTS.iter().zip(VIPS).zip(ENDS) {
        let mut gateway = gateway(&set, 1);
        let (client, vip) = (at(client), SocketAddr::new(ip(vip), 53));
        let received = gateway.remote_sends(&packet(Protocol::Udp, client, vip));
        let seen = gateway.pod_sends(&reply_to(&received, Protocol::Udp));
        gateway.assert_delta("inbound 1, service_reply 1, created 1");
        assert_dropped(&mut gateway, &unreachable(&seen, &at(pod).ip().to_string()), DropReason::SpoofedSource);
    }
}

#[test]
fn at_another_gateway_an_inside_routers_error_goes_to_the_one_that_has_the_session() {
    let mut cluster = Cluster::new(2, &Setup::default());
    let (pod, remote, vip) = ENDS[0];
    let translated = cluster.pod_sends(0, 0, &packet(Protocol::Udp, at(pod), at(remote)));
    let reply = reply_to(&translated, Protocol::Udp);
    let received = cluster.remote_sends(0, 0, &reply);
    let (source, destination, inner) = quoted(&cluster.pod_sends(1, 0, &unreachable(&received, ROUTERS[0][0])));
    assert_eq!((source, destination), (ip(vip), at(remote).ip()));
    assert_eq!(ends(&inner), ends(&reply));
    cluster.assert_delta(&["egress 2, reply 1, peer_in 1, created 1", "peer_out 1"]);
}

#[test]
fn without_a_session_an_inside_routers_error_shows_no_pod_to_a_remote() {
    for (family, (pod, remote, _)) in ENDS.into_iter().enumerate() {
        let uncovered = pod.replace("5]", "7]").replace(".5:", ".7:");
        for router in ROUTERS.map(|both| both[family]) {
            let (about_covered, about_uncovered) = (to_pod(remote, pod), to_pod(remote, &uncovered));
            for set in [policy(), in_cluster(true), in_cluster(false)] {
                let mut gateway = gateway(&set, 1);
                assert_dropped(&mut gateway, &unreachable(&about_covered, router), DropReason::NoSession);
            }
            let mut gateway = gateway(&in_cluster(true), 1);
            assert_dropped(&mut gateway, &unreachable(&about_uncovered, router), DropReason::NoPolicy);
            // No more by removing its policy, with a session open.
            let mut set = in_cluster(true);
            gateway.set_policy(&set);
            let translated = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
            let received = gateway.remote_sends(&reply_to(&translated, Protocol::Udp));
            gateway.assert_delta("egress 1, reply 1, created 1");
            set.endpoints.clear();
            gateway.set_policy(&set);
            assert_dropped(&mut gateway, &unreachable(&received, router), DropReason::NoPolicy);
            gateway.set_policy(&PolicySet::default());
            assert_dropped(&mut gateway, &unreachable(&received, router), DropReason::NoPolicy);
        }
    }
}

/// Asserts that an error leaves unchanged; returns the interface.
#[track_caller]
fn assert_unchanged(gateway: &mut Gateway, error: &[u8]) -> InterfaceId {
    let sent = gateway.receive(0, INSIDE, error);
    assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
    let [(source, destination, inner), before] = [&sent[0].1[..], error].map(quoted);
    assert_eq!((source, destination, &inner[14..]), (before.0, before.1, &before.2[14..]));
    gateway.assert_delta("unchanged 1");
    sent[0].0
}

#[test]
fn an_error_about_an_untranslated_packet_leaves_untranslated_to_its_sender_alone() {
    for drop_uncovered in [true, false] {
        for (family, (pod, remote, _)) in ENDS.into_iter().enumerate() {
            let mut gateway = gateway(&in_cluster(drop_uncovered), 1);
            let [router, in_pod_prefix] = ROUTERS.map(|both| both[family]);
            for sender in [EXCLUDED[family], INTERNAL[family]] {
                assert_eq!(assert_unchanged(&mut gateway, &unreachable(&to_pod(sender, pod), router)), OUTSIDE);
            }
            let internal = unreachable(&to_pod(INTERNAL[family], pod), in_pod_prefix);
            assert_eq!(assert_unchanged(&mut gateway, &internal), OUTSIDE);
            // A router with a pod's address is dropped as an uncovered pod is.
            let from_pod_prefix = unreachable(&to_pod(EXCLUDED[family], pod), in_pod_prefix);
            if drop_uncovered {
                assert_dropped(&mut gateway, &from_pod_prefix, DropReason::NoPolicy);
            } else {
                assert_eq!(assert_unchanged(&mut gateway, &from_pod_prefix), OUTSIDE);
            }
            // What a pod has sent to another pod, and to a remote.
            let other_pod = pod.replace("5]", "6]").replace(".5:", ".6:");
            for destination in [remote, other_pod.as_str()] {
                let about = packet(Protocol::Udp, at(pod), at(destination));
                assert_eq!(assert_unchanged(&mut gateway, &unreachable(&about, router)), INSIDE);
            }
        }
    }
}

#[test]
fn a_pods_error_to_an_excluded_remote_shows_no_other_pod() {
    let mut set = in_cluster(true);
    // The remote is excluded for the first pod only.
    set.endpoints[1].policy = "b".into();
    set.policies[1].excluded.clear();
    let mut gateway = gateway(&set, 1);
    let (own, others) = (to_pod(EXCLUDED[0], ENDS[0].0), to_pod(EXCLUDED[0], "10.244.1.6:4000"));
    assert_eq!(assert_unchanged(&mut gateway, &unreachable(&own, "10.244.1.5")), OUTSIDE);
    assert_dropped(&mut gateway, &unreachable(&others, "10.244.1.5"), DropReason::NoSession);
    // Also if the quoted packet is of a protocol without sessions.
    let with_protocol = |mut frame: Vec<u8>| {
        frame[23] = 47;
        update_header_checksum(&mut frame);
        frame
    };
    assert_eq!(assert_unchanged(&mut gateway, &unreachable(&with_protocol(own), "10.244.1.5")), OUTSIDE);
    assert_dropped(&mut gateway, &unreachable(&with_protocol(others), "10.244.1.5"), DropReason::NoSession);
}

#[test]
fn an_error_to_another_than_the_sender_of_the_quoted_packet_is_dropped() {
    for set in [policy(), in_cluster(true)] {
        let mut gateway = gateway(&set, 1);
        for remote in ["198.51.100.10:53", EXCLUDED[0], INTERNAL[0]] {
            let mut error = unreachable(&to_pod(remote, ENDS[0].0), ROUTERS[0][0]);
            error[33] ^= 1;
            update_header_checksum(&mut error);
            assert_dropped(&mut gateway, &error, DropReason::SpoofedSource);
        }
    }
}

/// The first fragment of an ICMP error: all but the last bytes of it.
fn first_fragment(error: &[u8]) -> Vec<u8> {
    let mut frame = error.to_vec();
    if frame[12] == 8 {
        frame.truncate(14 + 20 + 40);
        frame[16..18].copy_from_slice(&60_u16.to_be_bytes());
        frame[20..22].copy_from_slice(&[0x20, 0]);
        update_header_checksum(&mut frame);
    } else {
        frame.truncate(14 + 40 + 56);
        frame[18..20].copy_from_slice(&64_u16.to_be_bytes());
        frame[20] = 44;
        frame.splice(54..54, [58, 0, 0, 1, 0, 0, 0, 9]);
    }
    frame
}

#[test]
fn errors_in_fragments_are_dropped_whoever_sends_them() {
    for (family, (pod, ..)) in ENDS.into_iter().enumerate() {
        let mut gateway = gateway(&in_cluster(false), 1);
        let about = to_pod(EXCLUDED[family], pod);
        for sender in [at(pod).ip().to_string(), ROUTERS[0][family].to_owned(), ROUTERS[1][family].to_owned()] {
            let fragment = first_fragment(&unreachable(&about, &sender));
            let parsed = SlicedPacket::from_ethernet(&fragment).unwrap();
            let is_fragment = match parsed.net.unwrap() {
                NetSlice::Ipv4(v4) => v4.is_payload_fragmented(),
                NetSlice::Ipv6(v6) => v6.is_payload_fragmented(),
                NetSlice::Arp(_) => false,
            };
            assert!(is_fragment, "{fragment:02x?}");
            assert_dropped(&mut gateway, &fragment, DropReason::Fragment);
        }
    }
}

#[test]
fn an_error_from_inside_with_a_vip_as_source_is_spoofed() {
    for (pod, remote, vip) in ENDS {
        let mut gateway = gateway(&policy(), 1);
        let translated = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
        let received = gateway.remote_sends(&reply_to(&translated, Protocol::Udp));
        gateway.assert_delta("egress 1, reply 1, created 1");
        assert_dropped(&mut gateway, &unreachable(&received, vip), DropReason::SpoofedSource);
    }
}

#[test]
fn errors_from_outside_about_a_pods_own_address_stay_outside() {
    for (pod, remote, _) in ENDS {
        let mut gateway = Gateway::with(&Setup::default(), network(), &with_services(&[service(&both_pods())]));
        let translated = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
        let received = gateway.remote_sends(&reply_to(&translated, Protocol::Udp));
        gateway.assert_delta("egress 1, reply 1, created 1");
        let router = if at(pod).is_ipv4() { "203.0.113.77" } else { "2001:db8:77::1" };
        let error = error_about(&received, router, IcmpError::HostUnreachable, false);
        assert_eq!(gateway.receive(0, OUTSIDE, &error), vec![]);
        gateway.assert_delta("drop no_policy 1");
    }
}
