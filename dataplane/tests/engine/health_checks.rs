//! Health checks at the VIP: a complete HTTP exchange without a session, from outside and from a pod.

use std::net::SocketAddr;

use etherparse::{SlicedPacket, TransportSlice};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::*;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

pub(crate) fn with_health_check(local_endpoints: u32) -> ServiceSpec {
    let health = Some(HealthSpec { port: 30_000, local_endpoints });
    ServiceSpec { health, external: Scope::Local, ..service(&both_pods()) }
}

/// Sequence number, acknowledgment number, SYN/FIN/RST flags and data of a segment.
fn parse_segment(frame: &[u8]) -> (u32, u32, [bool; 3], Vec<u8>) {
    let Some(TransportSlice::Tcp(tcp)) = SlicedPacket::from_ethernet(frame).unwrap().transport else {
        panic!("not a TCP segment")
    };
    let flags = [tcp.syn(), tcp.fin(), tcp.rst()];
    (tcp.sequence_number(), tcp.acknowledgment_number(), flags, tcp.payload().to_vec())
}

/// A segment with data.
fn with_data(source: SocketAddr, destination: SocketAddr, sequence: u32, ack: u32, data: &[u8]) -> Vec<u8> {
    let mut frame = tcp(source, destination, "PA", sequence, ack);
    frame.extend(data);
    with_tcp_checksums(frame)
}

/// Runs a health check at a VIP; returns the HTTP response.
pub(crate) fn probe(
    gateway: &mut Gateway,
    interface: vipgate_dataplane::flow::ids::InterfaceId,
    prober: SocketAddr,
    vip: SocketAddr,
) -> String {
    let exchange = |gateway: &mut Gateway, packet: &[u8]| {
        let mut packet = packet.to_vec();
        packet[..6].copy_from_slice(if interface == INSIDE { &INSIDE_MAC } else { &OUTSIDE_MAC });
        let mut sent = gateway.receive(0, interface, &packet);
        assert!(sent.len() <= 1 && sent.iter().all(|(out, bytes)| *out == interface && ends(bytes) == (vip, prober)));
        sent.pop().map(|(_, bytes)| bytes)
    };
    let (cookie, acknowledged, flags, _) = parse_segment(&exchange(gateway, &tcp(prober, vip, "S", 100, 0)).unwrap());
    assert_eq!((acknowledged, flags), (101, [true, false, false]));
    let first = cookie.wrapping_add(1);
    assert_eq!(exchange(gateway, &tcp(prober, vip, "A", 101, first)), None);
    let request = with_data(prober, vip, 101, first, b"GET /healthz HTTP/1.1\r\nHost: it\r\n\r\n");
    let (sequence, _, flags, response) = parse_segment(&exchange(gateway, &request).unwrap());
    assert_eq!((sequence, flags), (first, [false, true, false]));
    let next_sequence = first.wrapping_add(response.len() as u32 + 1);
    assert_eq!(parse_segment(&exchange(gateway, &tcp(prober, vip, "FA", 136, next_sequence)).unwrap()).1, 137);
    String::from_utf8(response).unwrap()
}

#[test]
fn health_checks_from_outside_report_the_local_endpoints() {
    let mut gateway = Gateway::with_service(&Setup::default(), &with_health_check(2));
    let google_prober = at("169.254.169.254:40000");
    for (prober, vip) in [(at(CLIENTS[0]), VIPS[0]), (at(CLIENTS[1]), VIPS[1]), (google_prober, VIPS[0])] {
        let response = probe(&mut gateway, OUTSIDE, prober, (ip(vip), 30_000).into());
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n") && response.contains("\"localEndpoints\":2"), "{response}");
    }
    gateway.set_service(&with_health_check(0));
    let response = probe(&mut gateway, OUTSIDE, client(7), vip(30_000));
    assert!(response.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{response}");
    assert_eq!((gateway.sessions(), gateway.drops()), (0, [].into()), "no session and no drop");
    assert!(gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, client(7), vip(30_000))).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::NoService, 1)].into());
    gateway.assert_delta("drop no_service 1, replies sent 12, consumed 4");
}

#[test]
fn health_checks_from_a_pod_are_answered_via_its_vip() {
    let mut gateway = Gateway::with_service(&Setup::default(), &with_health_check(1));
    let response = probe(&mut gateway, INSIDE, at("10.244.1.21:4000"), vip(30_000));
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert_eq!(gateway.sessions(), 1, "the pod's own");
    gateway.assert_delta("egress 4, reply 3, service_reply 3, created 1, consumed 1");
}
