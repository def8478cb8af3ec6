//! Health checks at the VIP: a complete HTTP exchange without a session, from outside and from a pod.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use etherparse::{SlicedPacket, TransportSlice};
use vipgate_dataplane::flow::tunnel_metadata::TunnelMetadata;
use vipgate_dataplane::io::batch::BATCH_SIZE;
use vipgate_dataplane::policy::spec::*;
use vipgate_testkit::cluster::*;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

/// Probers with link-local addresses, and a VIP of their family. Google Cloud's is the first one.
const LINK_LOCAL: [(&str, &str); 2] = [("169.254.169.254:40000", VIPS[0]), ("[fe80::5]:40000", VIPS[1])];

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
        let mut sent = gateway.receive(0, interface, &on_link(interface, packet.to_vec()));
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
    let probers = [(at(CLIENTS[0]), VIPS[0]), (at(CLIENTS[1]), VIPS[1])];
    for (prober, vip) in probers.into_iter().chain(LINK_LOCAL.map(|(prober, vip)| (at(prober), vip))) {
        let response = probe(&mut gateway, OUTSIDE, prober, (ip(vip), 30_000).into());
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n") && response.contains("\"localEndpoints\":2"), "{response}");
    }
    gateway.set_service(&with_health_check(0));
    let response = probe(&mut gateway, OUTSIDE, client(7), vip(30_000));
    assert!(response.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{response}");
    assert_eq!((gateway.sessions(), gateway.drops()), (0, [].into()), "no session and no drop");
    assert!(gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, client(7), vip(30_000))).is_empty());
    gateway.assert_delta("drop no_service 1, replies sent 15, consumed 5");
}

/// The gateway replies itself: nothing of a link-local prober is forwarded (RFC 3927 section 7).
#[test]
fn link_local_hosts_reach_health_checks_and_nothing_else() {
    for (prober, address) in LINK_LOCAL {
        let mut gateway = Gateway::with_service(&Setup::default(), &with_health_check(2));
        let to = |port: u16| SocketAddr::from((ip(address), port));
        for frame in [
            tcp(at(prober), to(80), "S", 1000, 0),
            packet(Protocol::Udp, at(prober), to(53)),
            packet(Protocol::Udp, at(prober), to(30_000)),
            packet(Protocol::Echo, at(prober), to(30_000)),
            tcp(at(prober), to(40_000), "S", 1000, 0),
        ] {
            assert_eq!(gateway.receive(0, OUTSIDE, &frame), [], "{prober}");
        }
        gateway.assert_delta("drop martian 5");
    }
    // Not out of a tunnel: that is another link.
    let mut cluster = three_gateways();
    cluster.change_policy(|set| set.services = vec![with_health_check(2)]);
    let mark = TunnelMetadata { sides: Role::Outside.sides(), hop_count: 1, requests_port: false };
    for (prober, address) in LINK_LOCAL {
        let probe = tcp(at(prober), (ip(address), 30_000).into(), "S", 1000, 0);
        let frame = cluster.peer_packet(1, 0, mark, &probe);
        assert_eq!(cluster.receive(0, INSIDE, &frame), vec![]);
    }
    cluster.assert_delta(&["peer_in 2, drop martian 2", "", ""]);
}

#[test]
fn health_checks_from_a_pod_are_answered_via_its_vip() {
    let mut gateway = Gateway::with_service(&Setup::default(), &with_health_check(1));
    let response = probe(&mut gateway, INSIDE, at("10.244.1.21:4000"), vip(30_000));
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert_eq!(gateway.sessions(), 1, "the pod's own");
    gateway.assert_delta("egress 4, reply 3, service_reply 3, created 1, consumed 1");
}

/// Probers, and a VIP of their family.
fn probers() -> [(SocketAddr, SocketAddr); 2] {
    [0, 1].map(|family| (at(CLIENTS[family]), (ip(VIPS[family]), 30_000).into()))
}

/// A sender in the nth prefix, of both families in turn, and a VIP of its family.
fn spoofed(n: u32) -> (SocketAddr, SocketAddr) {
    let (address, vip): (IpAddr, _) = if n.is_multiple_of(2) {
        (Ipv4Addr::from_bits(0x0b00_0007 + (n << 8)).into(), VIPS[0])
    } else {
        (Ipv6Addr::from_bits(0x2a00_u128 << 112 | u128::from(n) << 80 | 7).into(), VIPS[1])
    };
    ((address, 40_000).into(), (ip(vip), 30_000).into())
}

#[test]
fn a_flood_gets_few_replies_and_probers_get_all_of_theirs() {
    let mut gateway = Gateway::with_service(&Setup::default(), &with_health_check(2));
    let probe_all = |gateway: &mut Gateway| {
        for (prober, vip) in probers() {
            assert!(probe(gateway, OUTSIDE, prober, vip).starts_with("HTTP/1.1 200 OK\r\n"));
        }
    };
    probe_all(&mut gateway);
    let mut replies = 0;
    for batch in 0..20_000 / BATCH_SIZE as u32 {
        gateway.now = gateway.now.plus(1);
        for n in batch * BATCH_SIZE as u32..(batch + 1) * BATCH_SIZE as u32 {
            let (sender, vip) = spoofed(n);
            // The reply to the second kind is a reset.
            let segment =
                if n % 3 < 2 { tcp(sender, vip, "S", n, 0) } else { tcp(sender, vip, "A", n, n.rotate_left(16)) };
            assert!(gateway.workers[0].io().inject(OUTSIDE, &segment));
        }
        replies += gateway.run().len();
        if batch % 16 == 0 {
            probe_all(&mut gateway);
        }
    }
    let suppressed = gateway.workers[0].counters().replies_suppressed.get();
    assert!((100..=420).contains(&replies), "{replies} of 20 000 in a third of a second");
    assert_eq!(suppressed + replies as u64, 19_968);
    assert_eq!((gateway.sessions(), gateway.drops()), (0, [].into()));
    gateway.skip_counter_check();
}

/// The ranges are those of clients; kube-proxy's port has none, either.
#[test]
fn source_ranges_do_not_apply_to_health_checks() {
    let source_ranges = vec!["203.0.113.0/24".parse().unwrap()];
    let service = ServiceSpec { source_ranges, ..with_health_check(2) };
    let mut gateway = Gateway::with_service(&Setup::default(), &service);
    for (prober, vip) in probers() {
        assert!(probe(&mut gateway, OUTSIDE, prober, vip).starts_with("HTTP/1.1 200 OK\r\n"));
        let request = tcp(prober, (vip.ip(), 80).into(), "S", 1000, 0);
        assert_eq!(gateway.receive(0, OUTSIDE, &request), vec![]);
    }
    gateway.assert_delta("drop source_range 2, replies sent 6, consumed 2");
}

#[test]
fn a_request_in_pieces_gets_its_response_with_the_first_one() {
    let mut gateway = Gateway::with_service(&Setup::default(), &with_health_check(2));
    for (prober, vip) in probers() {
        let mut exchange = |segment: &[u8]| parse_segment(&gateway.receive(0, OUTSIDE, segment)[0].1);
        let first = exchange(&tcp(prober, vip, "S", 100, 0)).0.wrapping_add(1);
        let (mut next, mut streams) = (101, Vec::new());
        for piece in [&b"GE"[..], b"T / HTTP/1.1\r\nHost: it\r\n\r", b"\n"] {
            let (sequence, acknowledged, flags, data) = exchange(&with_data(prober, vip, next, first, piece));
            next += piece.len() as u32;
            assert_eq!((sequence, acknowledged, flags), (first, next, [false, true, false]));
            streams.push(data);
        }
        assert!(streams[0].starts_with(b"HTTP/1.1 200 OK\r\n") && streams.iter().all(|data| *data == streams[0]));
        let after_fin = first.wrapping_add(streams[0].len() as u32 + 1);
        let closed = (after_fin, next + 1, [false; 3], vec![]);
        assert_eq!(exchange(&tcp(prober, vip, "FA", next, after_fin)), closed);
    }
    gateway.assert_delta("replies sent 10");
}
