//! Load on a Service: many concurrent clients, both directions on the same pods, and SYN floods.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use std::{fs, thread};

use vipgate_lab::reflector;
use vipgate_tests::cluster::{ClientConfig, Clients, LineServer};
use vipgate_tests::drop_accounting::RING_LOSSES;
use vipgate_tests::services::{BACKEND_PORT, EchoService, TCP_PORT, UDP_PORT, VIP, connect, query_tcp, ready_backend};
use vipgate_tests::{POD_FILTER, SERVER, Testbed, VIP_A, wait_for};

/// Number of concurrent clients.
const CLIENTS: u32 = 10_000;
/// Duration of the test of both directions, seconds; longer with `VIPGATE_SECONDS`.
const SECONDS: u64 = 15;

fn start_testbed(tag: &str, extra: &str) -> Testbed {
    let mut testbed = Testbed::new(tag);
    // Thousands of clients share the cores with the workers: rings between workers overflow, too, and late TCP
    // retransmissions may find no session.
    testbed.accounting.allow(RING_LOSSES);
    testbed.accounting.allow(["link_full", "no_session"]);
    let backends = ["10.1.0.11", "10.1.0.12", "fd00:1::11", "fd00:1::12"].map(ready_backend);
    testbed.apply_service(&EchoService { backends: &backends, ..EchoService::default() });
    testbed.start(&format!("node: node-1\n{extra}"));
    testbed
}

#[test]
fn ten_thousand_concurrent_clients_are_load_balanced() {
    let testbed = start_testbed("svcmany", "");
    let [first, second] =
        [0, 1].map(|pod| LineServer::start_at(testbed.folder.path(), &testbed.pods[pod], BACKEND_PORT));
    // Each sends again while the sessions are counted.
    let traffic = ClientConfig {
        server: (VIP[0], TCP_PORT),
        count: CLIENTS,
        intervals: vec![(100, 2.0, 3.0)],
        timeout: 15,
        ..ClientConfig::default()
    };
    let mut clients = Clients::start(testbed.folder.path(), &testbed.server, "many", 10_000_000, &traffic);
    clients.wait_established(Duration::from_mins(1));
    thread::sleep(Duration::from_secs(3));
    let served = testbed.service_status();
    assert_eq!(served["sessions"], CLIENTS, "{served}");
    let session_counts: Vec<u64> =
        served["backends"].as_array().unwrap().iter().map(|it| it["sessions"].as_u64().unwrap()).collect();
    assert!(session_counts.iter().filter(|count| (4_000..6_000).contains(*count)).count() == 2, "{session_counts:?}");
    clients.end().check_all_succeeded();
    let records = [first.end(), second.end()].concat();
    assert_eq!((records.len(), records.iter().map(|record| record.errors).sum::<u64>()), (CLIENTS as usize, 0));
    testbed.check_frames();
}

/// The same pods and servers open connections to each other, in both directions at once, over TCP and UDP: no reply
/// is misdelivered, and all ports and addresses stay.
#[test]
fn concurrent_egress_and_inbound_sessions_never_mix() {
    // Many short-lived sessions.
    let short = "sessions: {capacity: 1048576, state: null, timeouts: {tcp_transitory: 5s, udp: 5s}}";
    let testbed = start_testbed("svcboth", short);
    testbed.start_backends();
    let capture = testbed.capture(&format!("{POD_FILTER} and not host 10.1.0.31 and not host fd00:1::31"));
    let seconds = std::env::var("VIPGATE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for family in 0..2 {
        let vip = VIP[family];
        let (client, end) = (testbed.server.clone(), stop.clone());
        clients.push(thread::spawn(move || {
            let mut count = 0;
            let mut held: Vec<_> = (0..20).map(|_| connect(&client, (vip, TCP_PORT)).unwrap()).collect();
            let firsts: Vec<_> = held.iter_mut().map(|it| it.query().unwrap()).collect();
            while !end.load(Relaxed) {
                for (connection, first) in held.iter_mut().zip(&firsts) {
                    assert_eq!(&connection.query().unwrap(), first);
                }
                let tcp = query_tcp(&client, (vip, TCP_PORT)).unwrap();
                let udp = vipgate_tests::services::query_udp(&client, (vip, UDP_PORT), 8).unwrap();
                assert_eq!((tcp.observed, udp.observed), (tcp.local, udp.local));
                count += 22;
            }
            count
        }));
        for (pod, own) in [(0, VIP_A[family]), (1, VIP_A[family])] {
            let (host, end, server) = (testbed.pods[pod].clone(), stop.clone(), SERVER[family]);
            clients.push(thread::spawn(move || {
                let server: IpAddr = server.parse().unwrap();
                let mut count = 0;
                while !end.load(Relaxed) {
                    assert_eq!(reflector::query_http(&host, server).unwrap(), own);
                    assert_eq!(reflector::query_udp(&host, server).unwrap(), own);
                    count += 2;
                }
                count
            }));
        }
    }
    thread::sleep(Duration::from_secs(seconds));
    stop.store(true, Relaxed);
    let counts: Vec<u64> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(counts.iter().all(|count| *count > 20), "{counts:?}");
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    let drops = testbed.query(&["drops"]);
    for reason in ["no_service", "spoofed_source", "tuple_in_use", "malformed", "bad_checksum"] {
        assert_eq!(drops[reason], 0, "{drops}");
    }
    testbed.check_frames();
}

/// A client and a pod send to each other at the same time, with the same ports. Whoever is first is asked at the other's
/// port; the pod's own question, before the client's, has a port of its VIP, and then the client's has another port, too.
#[test]
fn a_client_and_a_pod_that_ask_each_other_at_once_get_all() {
    let mut testbed = Testbed::new("svcclash");
    testbed.apply_service(&EchoService { backends: &[ready_backend("10.1.0.11")], ..EchoService::default() });
    testbed.start("node: node-1");
    let (client, pod): (SocketAddr, SocketAddr) =
        (format!("{}:56789", SERVER[0]).parse().unwrap(), format!("10.1.0.11:{BACKEND_PORT}").parse().unwrap());
    let vip: SocketAddr = format!("{}:{UDP_PORT}", VIP[0]).parse().unwrap();
    // No datagram arrives before the other end's socket is bound: its host would reply with an ICMP error, whose session
    // the client's first datagram may have replaced.
    let both_bound = Arc::new(Barrier::new(2));
    let exchange = |host: &vipgate_lab::Host, own: SocketAddr, to: SocketAddr| {
        let both_bound = both_bound.clone();
        host.run(move || {
            let socket = UdpSocket::bind(own);
            both_bound.wait();
            let socket = socket?;
            socket.set_read_timeout(Some(Duration::from_millis(10)))?;
            let (mut sent, mut sources, end) = (0, Vec::new(), Instant::now() + Duration::from_secs(3));
            let mut datagram = [0; 64];
            while Instant::now() < end {
                socket.send_to(b"hello", to)?;
                sent += 1;
                sources.extend(socket.recv_from(&mut datagram).ok().map(|(_, from)| from));
            }
            while let Ok((_, from)) = socket.recv_from(&mut datagram) {
                sources.push(from);
            }
            Ok((sent, sources))
        })
    };
    let ends = [exchange(&testbed.server, client, vip), exchange(&testbed.pods[0], pod, client)];
    let [(sent_by_client, from_vip), (sent_by_pod, from_client)] = ends.map(|end| end.join().unwrap().unwrap());
    let is_pods_question = from_vip.first().is_some_and(|from| *from != vip);
    let seen = |first: Option<&SocketAddr>, kept| first.copied().filter(|_| is_pods_question).unwrap_or(kept);
    let (expected_vip, expected_client) = (seen(from_vip.first(), vip), seen(from_client.first(), client));
    let own: IpAddr = VIP_A[0].parse().unwrap();
    assert_eq!(expected_vip.ip(), if is_pods_question { own } else { vip.ip() });
    assert_eq!(expected_client.ip(), client.ip());
    let is_one = from_vip.iter().all(|from| *from == expected_vip);
    assert!(is_one && from_client.iter().all(|from| *from == expected_client), "{expected_vip} {expected_client}");
    // The first datagrams may be lost while MAC addresses are resolved.
    assert!(
        from_vip.len() + 3 >= sent_by_pod && from_client.len() + 3 >= sent_by_client,
        "{sent_by_client} {} {sent_by_pod} {}",
        from_client.len(),
        from_vip.len()
    );
}

/// Random clients from addresses that don't exist open sessions by SYNs.
#[test]
fn a_syn_flood_spares_connections_and_new_clients() {
    let testbed =
        start_testbed("svcflood", "sessions: {capacity: 20000, state: null}\nservices: {embryonic_per_vip: 2000}");
    testbed.start_backends();
    let mut held: Vec<_> = (0..50).map(|n| connect(&testbed.server, (VIP[n % 2], TCP_PORT)).unwrap()).collect();
    let firsts: Vec<_> = held.iter_mut().map(|it| it.query().unwrap()).collect();
    let log = testbed.folder.path().join("flood.log");
    let script = format!("{}/scripts/syn_flood.py", env!("CARGO_MANIFEST_DIR"));
    // The flood first sends one datagram to an unused port, for the kernel to resolve the VIP's MAC address.
    testbed.accounting.expect_exactly([("no_service", 1)]);
    let mut flood =
        testbed.router.spawn(&["python3", &script, "to-gw", VIP[0], &TCP_PORT.to_string(), "10"], &log).unwrap();
    let evicted = || testbed.metric("vipgate_sessions_expired_total", "reason=\"evicted\"");
    assert!(wait_for(Duration::from_secs(10), || evicted() > 5_000.0), "{}", fs::read_to_string(&log).unwrap());
    let (mut answered, mut attempts) = (0, 0);
    while flood.is_alive() {
        for (connection, first) in held.iter_mut().zip(&firsts) {
            assert_eq!(&connection.query().unwrap(), first, "an established connection");
        }
        attempts += 1;
        answered += u32::from(query_tcp(&testbed.server, (VIP[0], TCP_PORT)).is_ok());
    }
    // On a busy machine there are few attempts, of which one that the flood costs its SYN is more than 5 %.
    let is_spared = answered * 100 >= attempts * 95 || answered + 1 >= attempts;
    assert!(is_spared && attempts > 10, "{answered} of {attempts} new clients got a reply");
    let sessions = testbed.metric("vipgate_sessions", "");
    assert!(sessions < 2_000.0 + 1_000.0, "{sessions}: embryonic sessions of one VIP, and established ones");
    let sent = fs::read_to_string(&log).unwrap();
    println!("{}: {answered} of {attempts} new clients got a reply, {} evicted", sent.trim(), evicted());
    testbed.check_frames();
}
