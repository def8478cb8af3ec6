//! Unconfirmed sessions: bounded per VIP and evicted first; sessions of confirmed clients stay.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::session::SessionFamily;
use vipgate_dataplane::session::end_reason::EndReason;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

fn evicted(gateway: &Gateway) -> u64 {
    gateway.workers.iter().map(|w| w.counters().sessions_ended[EndReason::Evicted as usize].get()).sum()
}

/// A spoofed client address.
fn spoofed_client(n: u32) -> SocketAddr {
    (IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 + n)), 4000).into()
}

/// Opens a connection that both sides confirm; returns its backend.
fn connect(gateway: &mut Gateway, port: u16) -> SocketAddr {
    let backend = gateway.client_sends(&tcp(client(port), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, client(port), "SA", 5000, 1001));
    assert_eq!(gateway.client_sends(&tcp(client(port), vip(80), "A", 1001, 5001)), backend);
    backend
}

fn exchange_data(gateway: &mut Gateway, port: u16, backend: SocketAddr) {
    assert_eq!(gateway.client_sends(&tcp(client(port), vip(80), "PA", 1001, 5001)), backend);
    let sent = gateway.backend_sends(0, &tcp(backend, client(port), "A", 5001, 1001));
    assert_eq!(sent, (vip(80), client(port)));
}

#[test]
fn a_flood_to_one_vip_is_limited_to_the_embryonic_bound() {
    let setup = Setup { capacity: 2000, embryonic: 300, ..Setup::default() };
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        let backends: Vec<SocketAddr> = (0..100).map(|n| connect(&mut gateway, 1000 + n)).collect();
        let port = if protocol == Protocol::Tcp { 80 } else { 53 };
        for n in 0..5000 {
            gateway.client_sends(&packet(protocol, spoofed_client(n), vip(port)));
            // A client connects during the flood.
            if n == 4000 {
                let backend = connect(&mut gateway, 900);
                exchange_data(&mut gateway, 900, backend);
            }
        }
        assert!((300..=400).contains(&(gateway.sessions() - 101)), "{}", gateway.sessions());
        assert!(evicted(&gateway) >= 4600, "{}", evicted(&gateway));
        for (n, backend) in backends.into_iter().enumerate() {
            exchange_data(&mut gateway, 1000 + n as u16, backend);
        }
        gateway.assert_delta("inbound 5303, service_reply 202, ended evicted 4700, created 5101");
    }
}

#[test]
fn a_full_table_evicts_unconfirmed_sessions_first() {
    let setup = Setup { capacity: 600, reserve: Some(0), embryonic: 100_000, ..Setup::default() };
    let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
    let backends: Vec<SocketAddr> = (0..300).map(|n| connect(&mut gateway, 1000 + n)).collect();
    for n in 0..2000 {
        gateway.client_sends(&packet(Protocol::Tcp, spoofed_client(n), vip(80)));
    }
    // Pods open sessions in the same table.
    for n in 0..30 {
        gateway.pod_sends(&packet(Protocol::Udp, at(&format!("10.244.1.5:{}", 3000 + n)), client(53)));
    }
    for n in 300..500 {
        connect(&mut gateway, 1000 + n);
    }
    assert!(gateway.sessions() <= 600);
    for (n, backend) in backends.into_iter().enumerate() {
        exchange_data(&mut gateway, 1000 + n as u16, backend);
    }
    assert_eq!(gateway.drops(), [].into());
    // Only when all sessions are confirmed is the table full.
    for n in 500..570 {
        connect(&mut gateway, 1000 + n);
    }
    for n in 0..100 {
        gateway.receive(0, OUTSIDE, &tcp(client(9000 + n), vip(80), "S", 1000, 0));
        gateway.receive(0, OUTSIDE, &tcp(client(9000 + n), vip(80), "A", 1001, 1));
    }
    assert!(gateway.drops()[&DropReason::SessionTableFull] > 0);
    assert!(gateway.sessions() <= 600);
    gateway.assert_delta(
        "egress 30, inbound 3440, service_reply 870, drop no_session 100, drop session_table_full 100, \
         ended evicted 2000, created 2600",
    );
}

#[test]
fn unconfirmed_sessions_keep_the_transitory_timeout() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let backend = gateway.client_sends(&packet(Protocol::Tcp, spoofed_client(1), vip(80)));
    gateway.backend_sends(0, &tcp(backend, spoofed_client(1), "SA", 5000, 1001));
    let connected = connect(&mut gateway, 1000);
    gateway.advance(6_000);
    assert_eq!(gateway.sessions(), 1, "four seconds, and one for the expiry sweep");
    exchange_data(&mut gateway, 1000, connected);
    gateway.assert_delta("inbound 4, service_reply 3, ended idle 1, created 2");
}

#[test]
fn a_repeated_syn_does_not_confirm_a_client() {
    let setup = Setup { capacity: 2000, embryonic: 300, ..Setup::default() };
    let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
    for n in 0..1000 {
        for _ in 0..2 {
            gateway.client_sends(&packet(Protocol::Tcp, spoofed_client(n), vip(80)));
        }
    }
    assert!((300..=400).contains(&gateway.sessions()), "{}", gateway.sessions());
    gateway.assert_delta("inbound 2000, ended evicted 700, created 1000");
}

/// Opens sessions of another tenant's pod; returns how many.
fn open_other_tenant(gateway: &mut Gateway, count: u16) -> usize {
    let open = |n: u16| packet(Protocol::Udp, at(&format!("10.244.1.21:{}", 3000 + n)), client(53));
    (0..count).filter(|n| !gateway.receive(0, INSIDE, &open(*n)).is_empty()).count()
}

#[test]
fn blind_packets_do_not_confirm_a_client_or_displace_others() {
    let setup = Setup { capacity: 600, embryonic: 100_000, ..Setup::default() };
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for n in 0..2000 {
            let blind = match protocol {
                Protocol::Tcp => ["S", "A"].map(|flags| {
                    let sequence = if flags == "S" { 1000 } else { 1001 };
                    tcp(spoofed_client(n), vip(80), flags, sequence, 77 + n)
                }),
                _ => [(); 2].map(|()| packet(protocol, spoofed_client(n), vip(53))),
            };
            for packet in blind {
                gateway.client_sends(&packet);
            }
        }
        assert_eq!(open_other_tenant(&mut gateway, 50), 50, "{:?}", gateway.drops());
        assert!(gateway.sessions() <= 600);
        assert_eq!(gateway.drops(), [].into());
        // How many are evicted depends on the order of the queue.
        assert!(evicted(&gateway) >= 1450, "{}", evicted(&gateway));
        gateway.skip_counter_check();
    }
}

/// Whether a client has proved that it receives the replies.
fn is_confirmed(gateway: &Gateway, source: SocketAddr, port: u16) -> bool {
    let tables = gateway.workers[0].tables();
    let (SocketAddr::V4(source), SocketAddr::V4(vip)) = (source, vip(port)) else { panic!("IPv4") };
    let tuple = Tuple {
        source: source.ip().to_bits(),
        destination: vip.ip().to_bits(),
        source_port: source.port(),
        destination_port: port,
        protocol: if port == 53 { 17 } else { 6 },
    };
    let slot = tables.sessions.find(tables.sessions.hash(&tuple), &tuple).unwrap();
    u32::table(&tables.sessions).entry(slot).is_confirmed()
}

#[test]
fn a_client_is_confirmed_by_what_only_a_receiver_knows() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    // Two datagrams before the reply, then one after it; a connection, and blind acknowledgments of its SYN-ACK.
    let request = packet(Protocol::Udp, spoofed_client(1), vip(53));
    let backend = gateway.client_sends(&request);
    gateway.client_sends(&request);
    assert!(!is_confirmed(&gateway, spoofed_client(1), 53));
    gateway.backend_sends(0, &packet(Protocol::Udp, backend, spoofed_client(1)));
    assert!(!is_confirmed(&gateway, spoofed_client(1), 53));
    gateway.client_sends(&request);
    assert!(is_confirmed(&gateway, spoofed_client(1), 53));

    let backend = gateway.client_sends(&tcp(spoofed_client(2), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, spoofed_client(2), "SA", 5000, 1001));
    for blind in [0, 1, 5000, 5002, 1 << 31] {
        gateway.client_sends(&tcp(spoofed_client(2), vip(80), "A", 1001, blind));
        assert!(!is_confirmed(&gateway, spoofed_client(2), 80), "{blind}");
    }
    let connected = connect(&mut gateway, 1000);
    gateway.advance(6_000);
    assert_eq!(gateway.sessions(), 1, "four seconds, five for UDP, and one for the expiry sweep");
    exchange_data(&mut gateway, 1000, connected);
    gateway.assert_delta("inbound 12, service_reply 4, ended idle 2, created 3");
}

/// A segment in two fragments: a TCP header with the first bytes of the data, and the rest.
fn tcp_fragments(source: SocketAddr, destination: SocketAddr, sequence: u32, ack: u32) -> Vec<Vec<u8>> {
    let mut segment = Vec::new();
    let builder = on_ip(source, destination).tcp(source.port(), destination.port(), sequence, 64_000).ack(ack);
    builder.write(&mut segment, &[7; 20]).unwrap();
    ip_fragments(&segment, 24, 4711)
}

/// A later fragment has no sequence numbers, so it confirms nothing and doesn't refresh the session.
#[test]
fn fragments_of_blind_segments_do_not_confirm_a_client() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let backend = gateway.client_sends(&tcp(spoofed_client(1), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, spoofed_client(1), "SA", 5000, 1001));
    for fragment in tcp_fragments(spoofed_client(1), vip(80), 70_000, 9_000_000) {
        assert_eq!(gateway.receive(0, OUTSIDE, &fragment).len(), 1, "they are forwarded: the backend validates them");
    }
    assert!(!is_confirmed(&gateway, spoofed_client(1), 80));
    for _ in 0..3 {
        gateway.advance(1_900);
        gateway.receive(0, OUTSIDE, &tcp_fragments(spoofed_client(1), vip(80), 70_000, 9_000_000)[1]);
    }
    assert_eq!(gateway.sessions(), 0, "four seconds, and one for the expiry sweep");
    // Valid numbers count in fragments, too.
    let backend = gateway.client_sends(&tcp(spoofed_client(2), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, spoofed_client(2), "SA", 5000, 1001));
    for fragment in tcp_fragments(spoofed_client(2), vip(80), 1001, 5001) {
        gateway.receive(0, OUTSIDE, &fragment);
    }
    assert!(is_confirmed(&gateway, spoofed_client(2), 80));
    gateway.skip_counter_check();
}
