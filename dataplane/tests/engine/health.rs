//! Health checks at the VIP: a whole HTTP exchange with nobody's address, asked from outside and by a pod.

use std::net::SocketAddr;

use crate::support::services::*;
use crate::support::*;
use etherparse::{SlicedPacket, TransportSlice};
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::snapshot::spec::*;

fn checked(local_endpoints: u32) -> ServiceSpec {
    let health = Some(HealthSpec { port: 30_000, local_endpoints });
    ServiceSpec { health, external: Scope::Local, ..service(&both_pods()) }
}

/// Sequence, acknowledgement, flags and data of a segment.
fn heard(frame: &[u8]) -> (u32, u32, [bool; 3], Vec<u8>) {
    let Some(TransportSlice::Tcp(tcp)) = SlicedPacket::from_ethernet(frame).unwrap().transport else {
        panic!("no TCP")
    };
    let flags = [tcp.syn(), tcp.fin(), tcp.rst()];
    (tcp.sequence_number(), tcp.acknowledgment_number(), flags, tcp.payload().to_vec())
}

/// A segment with data.
fn with_data(source: SocketAddr, destination: SocketAddr, sequence: u32, ack: u32, data: &[u8]) -> Vec<u8> {
    let mut frame = tcp(source, destination, "PA", sequence, ack);
    frame.extend(data);
    sealed_tcp(frame)
}

/// Asks for the health at a VIP; the answer.
fn probe(
    gateway: &mut Gateway,
    interface: vipgate_dataplane::io::InterfaceId,
    prober: SocketAddr,
    vip: SocketAddr,
) -> String {
    let ask = |gateway: &mut Gateway, packet: &[u8]| {
        let mut packet = packet.to_vec();
        packet[..6].copy_from_slice(if interface == INSIDE { &INSIDE_MAC } else { &OUTSIDE_MAC });
        let mut sent = gateway.arrives(0, interface, &packet);
        assert!(sent.len() <= 1 && sent.iter().all(|(out, bytes)| *out == interface && ends(bytes) == (vip, prober)));
        sent.pop().map(|(_, bytes)| bytes)
    };
    let (cookie, acknowledged, flags, _) = heard(&ask(gateway, &tcp(prober, vip, "S", 100, 0)).unwrap());
    assert_eq!((acknowledged, flags), (101, [true, false, false]));
    let first = cookie.wrapping_add(1);
    assert_eq!(ask(gateway, &tcp(prober, vip, "A", 101, first)), None);
    let request = with_data(prober, vip, 101, first, b"GET /healthz HTTP/1.1\r\nHost: it\r\n\r\n");
    let (sequence, _, flags, answer) = heard(&ask(gateway, &request).unwrap());
    assert_eq!((sequence, flags), (first, [false, true, false]));
    let behind = first.wrapping_add(answer.len() as u32 + 1);
    assert_eq!(heard(&ask(gateway, &tcp(prober, vip, "FA", 136, behind)).unwrap()).1, 137);
    String::from_utf8(answer).unwrap()
}

#[test]
fn a_prober_outside_hears_how_the_service_is() {
    let mut gateway = Gateway::with_service(&Setup::default(), &checked(2));
    let google = at("169.254.169.254:40000");
    for (prober, vip) in [(at(CLIENTS[0]), VIPS[0]), (at(CLIENTS[1]), VIPS[1]), (google, VIPS[0])] {
        let answer = probe(&mut gateway, OUTSIDE, prober, (ip(vip), 30_000).into());
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\"localEndpoints\":2"), "{answer}");
    }
    gateway.serve(&checked(0));
    let answer = probe(&mut gateway, OUTSIDE, client(7), vip(30_000));
    assert!(answer.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{answer}");
    assert_eq!((gateway.sessions(), gateway.drops()), (0, [].into()), "no state, and nothing lost");
    assert!(gateway.arrives(0, OUTSIDE, &packet(Protocol::Udp, client(7), vip(30_000))).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::NoService, 1)].into());
    gateway.assert_delta("drop no_service 1, answered 12, heard 4");
}

#[test]
fn a_pod_hears_it_too_by_way_of_its_own_vip() {
    let mut gateway = Gateway::with_service(&Setup::default(), &checked(1));
    let answer = probe(&mut gateway, INSIDE, at("10.244.1.21:4000"), vip(30_000));
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert_eq!(gateway.sessions(), 1, "the pod's own");
    gateway.assert_delta("egress 4, reply 3, service_reply 3, created 1, heard 1");
}
