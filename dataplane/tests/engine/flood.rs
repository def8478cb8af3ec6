//! Clients that nobody answers for: what they open is bounded, and the first to go; whoever confirmed stays.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::support::services::*;
use crate::support::*;
use vipgate_dataplane::counters::{DropReason, EndReason};
use vipgate_dataplane::session::SessionFamily;
use vipgate_dataplane::session::tuple::Tuple;

fn evicted(gateway: &Gateway) -> u64 {
    gateway.workers.iter().map(|w| w.counters().sessions_ended[EndReason::Evicted as usize].get()).sum()
}

/// An invented client.
fn stranger(n: u32) -> SocketAddr {
    (IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 + n)), 4000).into()
}

/// Opens a connection that both sides confirm; its backend.
fn connect(gateway: &mut Gateway, port: u16) -> SocketAddr {
    let backend = gateway.client_sends(&tcp(client(port), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, client(port), "SA", 5000, 1001));
    assert_eq!(gateway.client_sends(&tcp(client(port), vip(80), "A", 1001, 5001)), backend);
    backend
}

fn speak(gateway: &mut Gateway, port: u16, backend: SocketAddr) {
    assert_eq!(gateway.client_sends(&tcp(client(port), vip(80), "PA", 1001, 5001)), backend);
    let sent = gateway.backend_sends(0, &tcp(backend, client(port), "A", 5001, 1001));
    assert_eq!(sent, (vip(80), client(port)));
}

#[test]
fn a_flood_to_one_vip_takes_its_own_part_and_no_more() {
    let setup = Setup { capacity: 2000, embryonic: 300, ..Setup::default() };
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        let backends: Vec<SocketAddr> = (0..100).map(|n| connect(&mut gateway, 1000 + n)).collect();
        let port = if protocol == Protocol::Tcp { 80 } else { 53 };
        for n in 0..5000 {
            gateway.client_sends(&packet(protocol, stranger(n), vip(port)));
            // In the midst of it somebody connects.
            if n == 4000 {
                let backend = connect(&mut gateway, 900);
                speak(&mut gateway, 900, backend);
            }
        }
        assert!((300..=400).contains(&(gateway.sessions() - 101)), "{}", gateway.sessions());
        assert!(evicted(&gateway) >= 4600, "{}", evicted(&gateway));
        for (n, backend) in backends.into_iter().enumerate() {
            speak(&mut gateway, 1000 + n as u16, backend);
        }
        assert_eq!(gateway.drops(), [].into());
        gateway.assert_delta("inbound 5303, service_reply 202, ended evicted 4700, created 5101");
    }
}

#[test]
fn when_the_table_is_full_the_unconfirmed_go_and_the_confirmed_stay() {
    let setup = Setup { capacity: 600, reserve: Some(0), embryonic: 100_000, ..Setup::default() };
    let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
    let backends: Vec<SocketAddr> = (0..300).map(|n| connect(&mut gateway, 1000 + n)).collect();
    for n in 0..2000 {
        gateway.client_sends(&packet(Protocol::Tcp, stranger(n), vip(80)));
    }
    // Pods need the table, too.
    for n in 0..30 {
        gateway.pod_sends(&packet(Protocol::Udp, at(&format!("10.244.1.5:{}", 3000 + n)), client(53)));
    }
    for n in 300..500 {
        connect(&mut gateway, 1000 + n);
    }
    assert!(gateway.sessions() <= 600);
    for (n, backend) in backends.into_iter().enumerate() {
        speak(&mut gateway, 1000 + n as u16, backend);
    }
    assert_eq!(gateway.drops(), [].into());
    // Only when all of them are confirmed is there no room.
    for n in 500..570 {
        connect(&mut gateway, 1000 + n);
    }
    for n in 0..100 {
        gateway.arrives(0, OUTSIDE, &tcp(client(9000 + n), vip(80), "S", 1000, 0));
        gateway.arrives(0, OUTSIDE, &tcp(client(9000 + n), vip(80), "A", 1001, 1));
    }
    assert!(gateway.drops()[&DropReason::SessionTableFull] > 0);
    assert!(gateway.sessions() <= 600);
    gateway.assert_delta("egress 30, inbound 3440, service_reply 870, drop no_session 100, drop session_table_full 100, ended evicted 2000, created 2600");
}

#[test]
fn what_was_not_confirmed_ends_soon_though_the_backend_answered() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let backend = gateway.client_sends(&packet(Protocol::Tcp, stranger(1), vip(80)));
    gateway.backend_sends(0, &tcp(backend, stranger(1), "SA", 5000, 1001));
    let known = connect(&mut gateway, 1000);
    gateway.pass(6_000);
    assert_eq!(gateway.sessions(), 1, "four seconds, and one for the sweep");
    speak(&mut gateway, 1000, known);
    gateway.assert_delta("inbound 4, service_reply 3, ended idle 1, created 2");
}

#[test]
fn whoever_only_repeats_its_syn_has_confirmed_nothing() {
    let setup = Setup { capacity: 2000, embryonic: 300, ..Setup::default() };
    let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
    for n in 0..1000 {
        for _ in 0..2 {
            gateway.client_sends(&packet(Protocol::Tcp, stranger(n), vip(80)));
        }
    }
    assert!((300..=400).contains(&gateway.sessions()), "{}", gateway.sessions());
    gateway.assert_delta("inbound 2000, ended evicted 700, created 1000");
}

/// Opens sessions of another tenant's pod; how many of them.
fn another_tenant_opens(gateway: &mut Gateway, count: u16) -> usize {
    let open = |n: u16| packet(Protocol::Udp, at(&format!("10.244.1.21:{}", 3000 + n)), client(53));
    (0..count).filter(|n| !gateway.arrives(0, INSIDE, &open(*n)).is_empty()).count()
}

#[test]
fn two_blind_packets_confirm_nothing_and_take_no_place_from_others() {
    let setup = Setup { capacity: 600, embryonic: 100_000, ..Setup::default() };
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for n in 0..2000 {
            let blind = match protocol {
                Protocol::Tcp => ["S", "A"].map(|flags| {
                    let sequence = if flags == "S" { 1000 } else { 1001 };
                    tcp(stranger(n), vip(80), flags, sequence, 77 + n)
                }),
                _ => [(); 2].map(|()| packet(protocol, stranger(n), vip(53))),
            };
            for packet in blind {
                gateway.client_sends(&packet);
            }
        }
        assert_eq!(another_tenant_opens(&mut gateway, 50), 50, "{:?}", gateway.drops());
        assert!(gateway.sessions() <= 600);
        assert_eq!(gateway.drops(), [].into());
        // How many of them go, and when, is a matter of the queue.
        assert!(evicted(&gateway) >= 1450, "{}", evicted(&gateway));
        gateway.counts_vary();
    }
}

/// Whether a client has shown that it receives what it is answered.
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
fn what_a_backend_answers_to_is_confirmed_by_who_receives_it() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    // Two datagrams before the answer, then one behind it; a connection, and a blind acknowledgement of its answer.
    let ask = packet(Protocol::Udp, stranger(1), vip(53));
    let backend = gateway.client_sends(&ask);
    gateway.client_sends(&ask);
    assert!(!is_confirmed(&gateway, stranger(1), 53));
    gateway.backend_sends(0, &packet(Protocol::Udp, backend, stranger(1)));
    assert!(!is_confirmed(&gateway, stranger(1), 53));
    gateway.client_sends(&ask);
    assert!(is_confirmed(&gateway, stranger(1), 53));

    let backend = gateway.client_sends(&tcp(stranger(2), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, stranger(2), "SA", 5000, 1001));
    for blind in [0, 1, 5000, 5002, 1 << 31] {
        gateway.client_sends(&tcp(stranger(2), vip(80), "A", 1001, blind));
        assert!(!is_confirmed(&gateway, stranger(2), 80), "{blind}");
    }
    let known = connect(&mut gateway, 1000);
    gateway.pass(6_000);
    assert_eq!(gateway.sessions(), 1, "four seconds, five for datagrams, and one for the sweep");
    speak(&mut gateway, 1000, known);
    gateway.assert_delta("inbound 12, service_reply 4, ended idle 2, created 3");
}

/// A segment with data in two fragments.
fn in_pieces(source: SocketAddr, destination: SocketAddr, sequence: u32, ack: u32) -> [Vec<u8>; 2] {
    const HEADERS: usize = 14 + 20;
    // A TCP header, and the first bytes of the data.
    const FIRST: usize = 24;
    let mut whole = Vec::new();
    let builder = on_ip(source, destination).tcp(source.port(), destination.port(), sequence, 64_000).ack(ack);
    builder.write(&mut whole, &[7; 40]).unwrap();
    [0..FIRST, FIRST..whole.len() - HEADERS].map(|range| {
        let place = (range.start / 8) as u16 | if range.start == 0 { 1 << 13 } else { 0 };
        let mut piece = [&whole[..HEADERS], &whole[HEADERS..][range.clone()]].concat();
        piece[16..18].copy_from_slice(&(20 + range.len() as u16).to_be_bytes());
        piece[18..20].copy_from_slice(&4711_u16.to_be_bytes());
        piece[20..22].copy_from_slice(&place.to_be_bytes());
        seal_header(&mut piece);
        piece
    })
}

/// A later fragment has no numbers, so it proves nothing, and keeps nothing alive.
#[test]
fn fragments_of_blind_segments_confirm_nothing() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let backend = gateway.client_sends(&tcp(stranger(1), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, stranger(1), "SA", 5000, 1001));
    for piece in in_pieces(stranger(1), vip(80), 70_000, 9_000_000) {
        assert_eq!(gateway.arrives(0, OUTSIDE, &piece).len(), 1, "they are passed on, for the backend knows better");
    }
    assert!(!is_confirmed(&gateway, stranger(1), 80));
    for _ in 0..3 {
        gateway.pass(1_900);
        let [_, piece] = in_pieces(stranger(1), vip(80), 70_000, 9_000_000);
        gateway.arrives(0, OUTSIDE, &piece);
    }
    assert_eq!(gateway.sessions(), 0, "four seconds, and one for the sweep");
    // What is right is believed in fragments, too.
    let backend = gateway.client_sends(&tcp(stranger(2), vip(80), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, stranger(2), "SA", 5000, 1001));
    for piece in in_pieces(stranger(2), vip(80), 1001, 5001) {
        gateway.arrives(0, OUTSIDE, &piece);
    }
    assert!(is_confirmed(&gateway, stranger(2), 80));
    gateway.counts_vary();
}
