//! Many clients at once, both directions on the same pods, and clients that nobody can answer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use vipgate::lab::peers;
use vipgate_tests::ledger::RING_LOSSES;
use vipgate_tests::services::{OWN, Served, TCP, UDP, VIP, ask_tcp, connect, ready};
use vipgate_tests::{POD_PACKETS, SERVER, VIP_A, World, wait_for};

/// Clients that are connected at once.
const CLIENTS: u32 = 10_000;
/// How long both directions are watched, seconds; more by `VIPGATE_SECONDS`.
const SECONDS: u64 = 15;

fn world(tag: &str, more: &str) -> World {
    let mut world = World::new(tag);
    // Clients by the thousand share the cores with the workers: rings between workers overflow, too, and what TCP repeats much later may
    // find no session.
    world.ledger.allow(RING_LOSSES);
    world.ledger.allow(["link_full", "no_session"]);
    let backends = ["10.1.0.11", "10.1.0.12", "fd00:1::11", "fd00:1::12"].map(ready);
    world.serve(&Served { backends: &backends, ..Served::default() });
    world.start(&format!("node: node-1\n{more}"));
    world
}

#[test]
fn ten_thousand_clients_are_served_at_once() {
    let world = world("svcmany", "");
    let script = |name: &str| format!("{}/scripts/{name}", env!("CARGO_MANIFEST_DIR"));
    for pod in &world.pods[..2] {
        let log = world.folder.path().join(format!("echo-{}.log", pod.name()));
        let server = pod.spawn(&["python3", &script("echo_server.py"), &OWN.to_string()], &log).unwrap();
        std::mem::forget(server);
        assert!(wait_for(Duration::from_secs(10), || fs::read_to_string(&log).unwrap().contains("listening")));
    }
    let log = world.folder.path().join("clients.log");
    let (port, count) = (TCP.to_string(), CLIENTS.to_string());
    let command = ["python3", &script("echo_clients.py"), VIP[0], &port, &count];
    let mut clients = world.server.spawn(&command, &log).unwrap();
    let said = || fs::read_to_string(&log).unwrap();
    assert!(wait_for(Duration::from_mins(1), || said().contains("open ")), "{}", said());
    thread::sleep(Duration::from_secs(3));
    let served = world.served();
    assert_eq!(served["sessions"], CLIENTS, "{served}");
    let shares: Vec<u64> =
        served["backends"].as_array().unwrap().iter().map(|it| it["sessions"].as_u64().unwrap()).collect();
    assert!(shares.iter().filter(|share| (4_000..6_000).contains(*share)).count() == 2, "{shares:?}");
    clients.signal("TERM").unwrap();
    clients.wait(Duration::from_secs(40)).expect("the clients end");
    let last = said().lines().last().unwrap().to_owned();
    assert!(last.starts_with(&format!("alive {CLIENTS} changed 0 ")), "{last}");
    world.check_frames();
}

/// The same pods and the same far hosts call each other, in both directions at once, by TCP and UDP: nobody hears what is meant for
/// another, and all ports and addresses stay.
#[test]
fn both_directions_at_once_never_cross() {
    // Connections are many, and over soon.
    let short = "sessions: {capacity: 1048576, state: null, timeouts: {tcp_transitory: 5s, udp: 5s}}";
    let world = world("svcboth", short);
    world.start_backends();
    let capture = world.capture(&format!("{POD_PACKETS} and not host 10.1.0.31 and not host fd00:1::31"));
    let seconds = std::env::var("VIPGATE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = Vec::new();
    for family in 0..2 {
        let vip = VIP[family];
        let (client, end) = (world.server.clone(), stop.clone());
        callers.push(thread::spawn(move || {
            let mut count = 0;
            let mut held: Vec<_> = (0..20).map(|_| connect(&client, (vip, TCP)).unwrap()).collect();
            let firsts: Vec<_> = held.iter_mut().map(|it| it.ask().unwrap()).collect();
            while !end.load(Relaxed) {
                for (connection, first) in held.iter_mut().zip(&firsts) {
                    assert_eq!(&connection.ask().unwrap(), first);
                }
                let tcp = ask_tcp(&client, (vip, TCP)).unwrap();
                let udp = vipgate_tests::services::ask_udp(&client, (vip, UDP), 8).unwrap();
                assert_eq!((tcp.seen, udp.seen), (tcp.own, udp.own));
                count += 22;
            }
            count
        }));
        for (pod, own) in [(0, VIP_A[family]), (1, VIP_A[family])] {
            let (host, end, server) = (world.pods[pod].clone(), stop.clone(), SERVER[family]);
            callers.push(thread::spawn(move || {
                let server: IpAddr = server.parse().unwrap();
                let mut count = 0;
                while !end.load(Relaxed) {
                    assert_eq!(peers::ask_http(&host, server).unwrap(), own);
                    assert_eq!(peers::ask_udp(&host, server).unwrap(), own);
                    count += 2;
                }
                count
            }));
        }
    }
    thread::sleep(Duration::from_secs(seconds));
    stop.store(true, Relaxed);
    let counts: Vec<u64> = callers.into_iter().map(|caller| caller.join().unwrap()).collect();
    assert!(counts.iter().all(|count| *count > 20), "{counts:?}");
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    let drops = world.ask(&["drops"]);
    for reason in ["no_service", "spoofed_source", "tuple_in_use", "malformed", "bad_checksum"] {
        assert_eq!(drops[reason], 0, "{drops}");
    }
    world.check_frames();
}

/// A client and a pod call each other at the same moment, from and to the very same ports.
#[test]
fn both_ends_that_begin_at_once_keep_their_ports() {
    let mut world = World::new("svcclash");
    world.serve(&Served { backends: &[ready("10.1.0.11")], ..Served::default() });
    world.start("node: node-1");
    let (client, pod): (SocketAddr, SocketAddr) =
        (format!("{}:56789", SERVER[0]).parse().unwrap(), format!("10.1.0.11:{OWN}").parse().unwrap());
    let vip: SocketAddr = format!("{}:{UDP}", VIP[0]).parse().unwrap();
    let talk = |host: &vipgate::lab::Host, own: SocketAddr, to: SocketAddr| {
        host.run(move || {
            let socket = UdpSocket::bind(own)?;
            socket.set_read_timeout(Some(Duration::from_millis(10)))?;
            let (mut sent, mut heard, end) = (0, Vec::new(), Instant::now() + Duration::from_secs(3));
            let mut datagram = [0; 64];
            while Instant::now() < end {
                socket.send_to(b"hello", to)?;
                sent += 1;
                heard.extend(socket.recv_from(&mut datagram).ok().map(|(_, from)| from));
            }
            while let Ok((_, from)) = socket.recv_from(&mut datagram) {
                heard.push(from);
            }
            Ok((sent, heard))
        })
    };
    let ends = [talk(&world.server, client, vip), talk(&world.pods[0], pod, client)];
    let [(asked, from_vip), (told, from_client)] = ends.map(|end| end.join().unwrap().unwrap());
    assert!(from_vip.iter().all(|from| *from == vip) && from_client.iter().all(|from| *from == client));
    // The first few may find a link address unknown.
    assert!(
        from_vip.len() + 3 >= told && from_client.len() + 3 >= asked,
        "{asked} {} {told} {}",
        from_client.len(),
        from_vip.len()
    );
}

/// Invented clients open whatever they can, from addresses that don't exist.
#[test]
fn a_flood_leaves_connections_alone_and_new_clients_get_through() {
    let world = world("svcflood", "sessions: {capacity: 20000, state: null}\nservices: {embryonic_per_vip: 2000}");
    world.start_backends();
    let mut held: Vec<_> = (0..50).map(|n| connect(&world.server, (VIP[n % 2], TCP)).unwrap()).collect();
    let firsts: Vec<_> = held.iter_mut().map(|it| it.ask().unwrap()).collect();
    let log = world.folder.path().join("flood.log");
    let script = format!("{}/scripts/syn_flood.py", env!("CARGO_MANIFEST_DIR"));
    // A first datagram, to a port of nobody, is for the kernel to learn the VIP's MAC address.
    world.ledger.expect_exactly([("no_service", 1)]);
    let mut flood = world.router.spawn(&["python3", &script, "to-gw", VIP[0], &TCP.to_string(), "10"], &log).unwrap();
    let evicted = || world.metric("vipgate_sessions_expired_total", "reason=\"evicted\"");
    assert!(wait_for(Duration::from_secs(10), || evicted() > 5_000.0), "{}", fs::read_to_string(&log).unwrap());
    let (mut good, mut asked) = (0, 0);
    while flood.is_alive() {
        for (connection, first) in held.iter_mut().zip(&firsts) {
            assert_eq!(&connection.ask().unwrap(), first, "a connection that stands");
        }
        asked += 1;
        good += u32::from(ask_tcp(&world.server, (VIP[0], TCP)).is_ok());
    }
    assert!(good * 100 >= asked * 95 && asked > 10, "{good} of {asked} new clients");
    let sessions = world.metric("vipgate_sessions", "");
    assert!(sessions < 2_000.0 + 1_000.0, "{sessions}: what one VIP may have, and what stands");
    let sent = fs::read_to_string(&log).unwrap();
    println!("{}: {good} of {asked} new clients, {} evicted", sent.trim(), evicted());
    world.check_frames();
}
