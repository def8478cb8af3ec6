//! Inbound sessions: clients and Services, both directions, on one worker or two, and what is dropped.

use std::net::SocketAddr;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::*;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

#[test]
fn inbound_sessions_are_translated_in_both_directions() {
    for workers in [1, 2] {
        for (protocol, port, own) in [(Protocol::Tcp, 80, 8080), (Protocol::Udp, 53, 5353)] {
            let setup = Setup { workers, ..Setup::default() };
            let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
            for (client, vip) in CLIENTS.iter().zip(VIPS) {
                let (client, vip) = (at(client), (ip(vip), port).into());
                let backend = gateway.client_sends(&packet(protocol, client, vip));
                assert_eq!(backend.port(), own);
                // The reply is received on any queue.
                for worker in 0..usize::from(workers) {
                    let reply = match protocol {
                        Protocol::Tcp => tcp(backend, client, "SA", 5000, 1001),
                        _ => packet(protocol, backend, client),
                    };
                    assert_eq!(gateway.backend_sends(worker, &reply), (vip, client));
                }
                let segment = match protocol {
                    Protocol::Tcp => tcp(client, vip, "A", 1001, 5001),
                    _ => packet(protocol, client, vip),
                };
                assert_eq!(gateway.client_sends(&segment), backend);
            }
            assert_eq!(gateway.sessions(), 2);
            gateway.assert_delta(match workers {
                1 => "inbound 4, service_reply 2, created 2",
                _ => "inbound 4, service_reply 4, created 2, handed off 2",
            });
        }
    }
}

#[test]
fn only_first_packets_to_service_ports_open_sessions() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    for flags in ["A", "SA", "FA", "R", "PA"] {
        assert!(gateway.receive(0, OUTSIDE, &tcp(client(1), vip(80), flags, 7, 8)).is_empty(), "{flags}");
    }
    assert_eq!(gateway.drops(), [(DropReason::NoSession, 5)].into());
    for (protocol, port) in [(Protocol::Tcp, 53), (Protocol::Udp, 80), (Protocol::Tcp, 8080), (Protocol::Echo, 0)] {
        assert!(gateway.receive(0, OUTSIDE, &packet(protocol, client(1), vip(port))).is_empty());
    }
    assert_eq!(gateway.sessions(), 0);
    gateway.assert_delta("drop no_service 4, drop no_session 5");
}

#[test]
fn packets_without_service_or_backend_are_rejected_if_configured() {
    let setup = Setup { reject: true, ..Setup::default() };
    let mut gateway = Gateway::with_service(&setup, &service(&[]));
    // No Service, and a Service without backends.
    for port in [81, 80] {
        let sent = gateway.receive(0, OUTSIDE, &packet(Protocol::Tcp, client(1), vip(port)));
        assert_eq!((sent[0].0, ends(&sent[0].1)), (OUTSIDE, (vip(port), client(1))), "a reset: {:?}", gateway.drops());
        assert!(gateway.receive(0, OUTSIDE, &tcp(client(1), vip(port), "A", 7, 8)).is_empty(), "a late segment");
    }
    for port in [54, 53] {
        let sent = gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, client(1), vip(port)));
        let error = &sent[0].1;
        assert_eq!((error[23], error[34], error[35]), (1, 3, 3), "port unreachable");
        assert_eq!(error[26..30], [192, 0, 2, 10], "from the VIP");
    }
    let v6_packet = packet(Protocol::Udp, at(CLIENTS[1]), (ip(VIPS[1]), 53).into());
    let sent = gateway.receive(0, OUTSIDE, &v6_packet);
    assert_eq!((sent[0].1[20], sent[0].1[54], sent[0].1[55]), (58, 1, 4), "ICMPv6 port unreachable");
    let expected = [(DropReason::NoService, 3), (DropReason::NoBackend, 3), (DropReason::NoSession, 1)];
    assert_eq!(gateway.drops(), expected.into());
    assert!(gateway.receive(0, OUTSIDE, &packet(Protocol::Echo, client(1), vip(0))).is_empty());
    gateway.assert_delta("drop no_service 4, drop no_backend 3, drop no_session 1, replies sent 5");
}

#[test]
fn not_local_is_distinguished_from_no_backend() {
    let mut gateway = Gateway::new(&Setup::default());
    let elsewhere = BackendSpec { external: false, ..backend("10.244.1.5") };
    let unready = BackendSpec { state: BackendState::NotReady, internal: false, ..elsewhere.clone() };
    for (backends, expected) in [
        (vec![], DropReason::NoBackend),
        (vec![elsewhere], DropReason::NotLocal),
        (vec![unready], DropReason::NoBackend),
    ] {
        gateway.set_service(&ServiceSpec { external: Scope::Local, ..service(&backends) });
        let before = gateway.drops().get(&expected).copied().unwrap_or(0);
        assert!(gateway.receive(0, OUTSIDE, &packet(Protocol::Tcp, client(1), vip(80))).is_empty());
        assert_eq!(gateway.drops().get(&expected), Some(&(before + 1)));
    }
    gateway.assert_delta("drop no_backend 2, drop not_local 1");
}

#[test]
fn source_ranges_apply_to_new_and_existing_sessions() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let (allowed, excluded) = (at("198.51.100.10:4000"), at("198.51.101.10:4000"));
    for client in [allowed, excluded] {
        gateway.client_sends(&packet(Protocol::Udp, client, vip(53)));
    }
    let ranges = vec!["198.51.100.0/24".parse().unwrap()];
    gateway.set_service(&ServiceSpec { source_ranges: ranges, ..service(&both_pods()) });
    let backend = gateway.client_sends(&packet(Protocol::Udp, allowed, vip(53)));
    assert_eq!(gateway.backend_sends(0, &packet(Protocol::Udp, backend, allowed)).0, vip(53));
    assert!(gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, excluded, vip(53))).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::SourceRange, 1)].into());
    let v6_packet = packet(Protocol::Udp, at(CLIENTS[1]), (ip(VIPS[1]), 53).into());
    assert!(gateway.receive(0, OUTSIDE, &v6_packet).is_empty(), "no source range in its address family");
    gateway.assert_delta("inbound 3, service_reply 1, drop source_range 2, ended policy 1, created 2");
}

#[test]
fn packets_from_the_wrong_side_are_spoofed() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let (outside, backend) = (client(1), gateway.client_sends(&packet(Protocol::Udp, client(1), vip(53))));
    let forged = on_link(OUTSIDE, packet(Protocol::Udp, backend, outside));
    assert!(gateway.receive(0, OUTSIDE, &forged).is_empty(), "a backend's reply from outside");
    let forged = on_link(INSIDE, packet(Protocol::Udp, outside, vip(53)));
    assert!(gateway.receive(0, INSIDE, &forged).is_empty(), "an outside client's packet from inside");
    gateway.assert_delta("inbound 1, drop spoofed_source 2, created 1");
}

#[test]
fn a_backends_reply_without_a_session_is_translated_statelessly() {
    // .7 is covered by no policy.
    let backends = [both_pods(), vec![backend("10.244.1.7")]].concat();
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&backends));
    for (pod, v6) in [("10.244.1.5", false), ("10.244.1.7", false), ("fd00:244:1::5", true)] {
        let (client, vip) = (at(CLIENTS[usize::from(v6)]), ip(VIPS[usize::from(v6)]));
        let pod = |port: u16| (ip(pod), port).into();
        for flags in ["SA", "A", "FA", "R", "PA"] {
            let sent = gateway.backend_sends(0, &tcp(pod(8080), client, flags, 7, 8));
            assert_eq!(sent, ((vip, 80).into(), client), "{flags}");
        }
    }
    assert_eq!((gateway.sessions(), gateway.forwarded(Direction::ServiceReply)), (0, 15));
    // What opens a connection is egress, even from that port.
    let own = gateway.pod_sends(&packet(Protocol::Tcp, at("10.244.1.5:8080"), client(443)));
    assert_eq!(ends(&own).0.ip(), ip(VIPS[0]));
    assert_ne!(ends(&own).0.port(), 80);
    let own = gateway.backend_sends(0, &packet(Protocol::Tcp, at("10.244.1.7:8080"), client(443)));
    assert_eq!(own.0, at("10.244.1.7:8080"), "no policy translates it");
    gateway.assert_delta("egress 1, service_reply 15, unchanged 1, created 1");
}

/// As NTP, SIP, IKE and DNS servers ask others from the port that they serve.
#[test]
fn a_pods_own_datagram_from_a_served_port_is_no_reply() {
    let backends = [both_pods(), vec![backend("10.244.1.7")]].concat();
    for workers in [1, 2, 3] {
        let mut gateway = Gateway::with_service(&Setup { workers, ..Setup::default() }, &service(&backends));
        for (pod, v6) in [("10.244.1.5", false), ("fd00:244:1::5", true)] {
            let (server, vip) =
                (at(["198.51.100.10:53", "[2001:db8:51::10]:53"][usize::from(v6)]), ip(VIPS[usize::from(v6)]));
            let pod = SocketAddr::new(ip(pod), 5353);
            let seen = gateway.receive(0, INSIDE, &packet(Protocol::Udp, pod, server)).remove(0).1;
            let (source, destination) = ends(&seen);
            assert!(source.ip() == vip && source.port() != 53 && destination == server, "{source}");
            for queue in 0..usize::from(workers) {
                let received = gateway.receive(queue, OUTSIDE, &reply_to(&seen, Protocol::Udp));
                assert_eq!(ends(&received[0].1), (server, pod), "the answer reaches the pod that asked");
            }
        }
        // A client that has asked gets its answer from the frontend.
        let backend = gateway.client_sends(&packet(Protocol::Udp, client(4000), vip(53)));
        assert_eq!(gateway.backend_sends(0, &packet(Protocol::Udp, backend, client(4000))), (vip(53), client(4000)));
        // No policy translates what an uncovered pod asks.
        let own = gateway.backend_sends(0, &packet(Protocol::Udp, at("10.244.1.7:5353"), client(53)));
        assert_eq!(own, (at("10.244.1.7:5353"), client(53)));
        gateway.skip_counter_check();
    }
}

#[test]
fn replies_to_excluded_clients_match_how_they_called() {
    let backend = BackendSpec { ports: vec![8080, 5353, 3868], ..backend("10.244.1.21") };
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend]));
    let (excluded, pod) = (at("198.51.100.200:4000"), at("10.244.1.21:8080"));
    let sent = gateway.backend_sends(0, &tcp(pod, excluded, "SA", 7, 8));
    assert_eq!(sent, (pod, excluded), "called without the VIP");
    assert_eq!(gateway.client_sends(&packet(Protocol::Tcp, excluded, vip(80))), pod);
    let sent = gateway.backend_sends(0, &tcp(pod, excluded, "SA", 7, 1001));
    assert_eq!(sent, (vip(80), excluded), "called via the VIP");
    gateway.assert_delta("inbound 1, service_reply 1, unchanged 1, created 1");
}

#[test]
fn a_client_port_used_at_two_frontends_of_one_backend_is_translated() {
    let mut two = with_second_port(&[backend("10.244.1.5")]);
    let mut gateway = Gateway::with_service(&Setup::default(), &two);
    let backend = gateway.client_sends(&packet(Protocol::Tcp, client(5000), vip(80)));
    let second = ends(&gateway.remote_sends(&packet(Protocol::Tcp, client(5000), vip(81))));
    assert_eq!((second.0.ip(), second.1), (client(1).ip(), backend));
    assert_ne!(second.0.port(), 5000, "the port is translated, never the address");
    for (seen, vip) in [(client(5000), vip(80)), (second.0, vip(81))] {
        assert_eq!(gateway.backend_sends(0, &tcp(backend, seen, "SA", 7, 1001)), (vip, client(5000)));
    }
    gateway.assert_delta("inbound 2, service_reply 2, created 2");
    // Other backends are tried before the client's port changes.
    two.backends.push(BackendSpec { address: ip("10.244.1.6"), ..two.backends[0].clone() });
    let mut gateway = Gateway::with_service(&Setup::default(), &two);
    let mut kept_port = 0;
    for n in 1..200 {
        let one = gateway.client_sends(&packet(Protocol::Tcp, client(n), vip(80)));
        let other = ends(&gateway.remote_sends(&packet(Protocol::Tcp, client(n), vip(81))));
        assert!(one != other.1 || other.0 != client(n));
        kept_port += u32::from(other.0 == client(n));
    }
    assert!(kept_port > 150, "{kept_port} kept their port");
    gateway.assert_delta("inbound 398, created 398");
}

#[test]
fn two_workers_never_open_sessions_with_the_same_backend_tuple() {
    let two = with_second_port(&[backend("10.244.1.5")]);
    let mut gateway = Gateway::with_service(&Setup { workers: 2, ..Setup::default() }, &two);
    let mut seen = std::collections::HashSet::new();
    for n in 1000..1050 {
        for (worker, port) in [(0, 80), (1, 81)] {
            let sent = gateway.receive(worker, OUTSIDE, &packet(Protocol::Tcp, client(n), vip(port)));
            assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
            let (source, backend) = ends(&sent[0].1);
            assert!(seen.insert(source), "{source} is used twice");
            // On either worker: the reply, and the client's next segment.
            for other in 0..2 {
                let reply = tcp(backend, source, "SA", 7, 1001);
                assert_eq!(gateway.backend_sends(other, &reply), (vip(port), client(n)));
                let sent = gateway.receive(other, OUTSIDE, &tcp(client(n), vip(port), "A", 1001, 8));
                assert_eq!(ends(&sent[0].1), (source, backend));
            }
        }
    }
    assert_eq!((gateway.sessions(), gateway.drops()), (100, [].into()));
    gateway.assert_delta("inbound 300, service_reply 200, created 100, handed off 250");
}

#[test]
fn a_port_that_becomes_a_frontend_ends_its_session() {
    let range = vipgate_dataplane::ports::PortRange::new(7000, 7000).unwrap();
    let mut gateway = Gateway::new(&Setup { range, ..Setup::default() });
    let request = packet(Protocol::Udp, at("10.244.1.5:4000"), client(53));
    let (external, remote) = ends(&gateway.pod_sends(&request));
    assert_eq!(external, vip(7000));
    let mut frontend = service(&[backend("10.244.1.6")]);
    frontend.ports[1].port = 7000;
    let mut policy = with_services(&[frontend]);
    policy.vips[0].reserved_ports.insert(1, 7000);
    gateway.set_policy(&policy);
    // The remote of that session may still send packets for the pod: the port is in quarantine.
    assert!(gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, remote, external)).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::TupleInUse, 1)].into());
    gateway.advance(4_000);
    let backend = gateway.client_sends(&packet(Protocol::Udp, remote, external));
    assert_eq!(backend, at("10.244.1.6:5353"), "the frontend's backend, not the pod that had the port");
    assert!(gateway.receive(0, INSIDE, &request).is_empty(), "no other port in the range");
    gateway.assert_delta("egress 1, inbound 1, drop ports_exhausted 1, drop tuple_in_use 1, ended policy 1, created 2");
}

#[test]
fn fragments_are_translated_for_services_in_both_directions() {
    let body = vec![7_u8; 1200];
    let fragmented = |mut whole: Vec<u8>, id: u8| {
        whole[19] = id;
        let mut fragments = Vec::new();
        for (n, data) in whole[34..].chunks(400).enumerate() {
            let mut fragment = whole[..34].to_vec();
            fragment[16..18].copy_from_slice(&(20 + data.len() as u16).to_be_bytes());
            let more_fragments = u16::from(n * 400 + data.len() < whole.len() - 34) << 13;
            fragment[20..22].copy_from_slice(&(more_fragments | (n as u16 * 50)).to_be_bytes());
            update_header_checksum(&mut fragment);
            fragment.extend(data);
            fragments.push(fragment);
        }
        fragments
    };
    let datagram = |source: SocketAddr, destination: SocketAddr| {
        let mut bytes = packet(Protocol::Udp, source, destination);
        bytes.truncate(42);
        bytes.extend(&body);
        bytes[38..40].copy_from_slice(&(body.len() as u16 + 8).to_be_bytes());
        // UDP without a checksum (RFC 768).
        bytes[40..42].fill(0);
        bytes
    };
    for workers in [1, 2] {
        for backend_address in ["10.244.1.5", "10.244.1.7"] {
            let setup = Setup { workers, ..Setup::default() };
            let mut gateway = Gateway::with_service(&setup, &service(&[backend(backend_address)]));
            let to = |bytes: &[u8]| std::net::Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[30..34]).unwrap());
            let from = |bytes: &[u8]| std::net::Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[26..30]).unwrap());
            let mut sent = Vec::new();
            for (n, fragment) in fragmented(datagram(client(4000), vip(53)), 9).into_iter().enumerate() {
                sent.extend(gateway.receive(n % usize::from(workers), OUTSIDE, &fragment));
            }
            assert_eq!(sent.len(), 4, "{:?}", gateway.drops());
            assert!(sent.iter().all(|(out, bytes)| *out == INSIDE && to(bytes) == ip(backend_address)));
            let backend = SocketAddr::from((ip(backend_address), 5353));
            let mut sent = Vec::new();
            // The last fragment first.
            for fragment in fragmented(datagram(backend, client(4000)), 10).into_iter().rev() {
                sent.extend(gateway.receive(0, INSIDE, &fragment));
            }
            assert_eq!(sent.len(), 4, "{:?}", gateway.drops());
            assert!(sent.iter().all(|(out, bytes)| *out == OUTSIDE && from(bytes) == ip(VIPS[0])));
            let handed_off = ["", ", handed off 6"][usize::from(workers) - 1];
            gateway.assert_delta(&format!("inbound 4, service_reply 4, created 1{handed_off}"));
        }
    }
}

#[test]
fn stateless_replies_without_df_get_an_identification_of_the_vip() {
    let identification = |frame: &[u8]| u16::from_be_bytes([frame[18], frame[19]]);
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend("10.244.1.5")]));
    for (may_fragment, port) in [(true, 4000), (false, 4001)] {
        let mut reply = tcp(at("10.244.1.5:8080"), client(port), "PA", 7, 8);
        reply[18..22].copy_from_slice(&[0, 77, if may_fragment { 0 } else { 0x40 }, 0]);
        update_header_checksum(&mut reply);
        let sent: Vec<_> = (0..3).map(|_| gateway.receive(0, INSIDE, &reply).remove(0).1).collect();
        assert!(sent.iter().all(|frame| ends(frame) == (vip(80), client(port))));
        let numbers: std::collections::BTreeSet<_> = sent.iter().map(|frame| identification(frame)).collect();
        if may_fragment {
            assert!(numbers.len() == 3 && !numbers.contains(&77), "allocated per VIP: {numbers:?}");
        } else {
            assert_eq!(numbers, [77].into(), "unchanged if DF is set");
        }
    }
    gateway.assert_delta("service_reply 6");
}

#[test]
fn a_clients_packet_keeps_its_identification_with_and_without_a_session() {
    let mut cluster = cluster::Cluster::new(2, &Setup::default());
    let api = service(&[backend("10.244.1.5")]);
    cluster.change_policy(|set| set.services = vec![api]);
    let segment = |sequence| {
        let mut frame = tcp(client(4000), vip(80), "A", sequence, 8);
        frame[18..22].copy_from_slice(&[0, 77, 0, 0]);
        update_header_checksum(&mut frame);
        frame
    };
    for sequence in [7, 8] {
        let received = cluster.remote_sends(1, 1, &segment(sequence));
        assert_eq!((ends(&received).1, &received[18..20]), (at("10.244.1.5:8080"), &[0, 77][..]));
    }
    cluster.assert_delta(&["", "inbound 2"]);
}
