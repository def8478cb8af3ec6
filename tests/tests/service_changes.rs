//! Backend changes of a Service while clients open connections continuously and hold others.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vipgate_lab::Host;
use vipgate_tests::services::{
    Backend, Connection, EchoReply, EchoService, TCP_PORT, UDP_PORT, VIP, connect, query_tcp, query_udp, ready_backend,
    terminating_backend,
};
use vipgate_tests::{Testbed, wait_for};

const P1: &str = "10.1.0.11";
const P2: &str = "10.1.0.12";
const P4: &str = "10.1.0.31";

fn start_testbed(tag: &str, served: &EchoService<'_>) -> Testbed {
    let mut testbed = Testbed::new(tag);
    testbed.start_backends();
    testbed.apply_service(served);
    testbed.start("node: node-1");
    testbed
}

/// A request's time, whether it used TCP, and its result.
type TimedReply<T = EchoReply> = (Instant, bool, T);

/// Clients that open new connections one after the other, and send datagrams, until stopped.
#[derive(Debug)]
struct Clients {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<TimedReply<std::io::Result<EchoReply>>>>>,
}

impl Clients {
    fn start(client: &Host) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let run = |tcp: bool| {
            let (client, stop) = (client.clone(), stop.clone());
            thread::spawn(move || {
                let mut replies = Vec::new();
                while !stop.load(Relaxed) {
                    let sent = Instant::now();
                    let reply = if tcp {
                        query_tcp(&client, (VIP[0], TCP_PORT))
                    } else {
                        query_udp(&client, (VIP[0], UDP_PORT), 8)
                    };
                    replies.push((sent, tcp, reply));
                    thread::sleep(Duration::from_millis(5));
                }
                replies
            })
        };
        Self { threads: [true, true, false].map(run).into(), stop }
    }

    /// Stops the clients and returns all replies; fails if a request got none.
    fn end(self) -> Vec<TimedReply> {
        self.stop.store(true, Relaxed);
        let all = self.threads.into_iter().flat_map(|thread| thread.join().unwrap());
        all.map(|(at, tcp, reply)| (at, tcp, reply.unwrap_or_else(|error| panic!("no reply: {error}")))).collect()
    }
}

/// Held connections, by backend.
fn held(client: &Host, count: usize) -> BTreeMap<String, Vec<Connection>> {
    let mut held: BTreeMap<String, Vec<Connection>> = BTreeMap::new();
    for _ in 0..count {
        let mut connection = connect(client, (VIP[0], TCP_PORT)).unwrap();
        let reply = connection.query().unwrap();
        held.entry(reply.backend).or_default().push(connection);
    }
    held
}

fn check_all_reply(held: &mut BTreeMap<String, Vec<Connection>>) {
    for (backend, connections) in held {
        for connection in connections {
            let reply = connection.query().unwrap();
            assert_eq!((&reply.backend, reply.observed), (backend, reply.local));
        }
    }
}

#[test]
fn backend_changes_under_load_affect_only_their_own_sessions() {
    let two = [ready_backend(P1), ready_backend(P2)];
    let testbed = start_testbed("svcchange", &EchoService { backends: &two, ..EchoService::default() });
    let clients = Clients::start(&testbed.server);
    let mut held = held(&testbed.server, 40);
    assert_eq!(held.keys().collect::<Vec<_>>(), ["p1", "p2"]);
    // A backend is added.
    testbed.apply_service(&EchoService {
        backends: &[ready_backend(P1), ready_backend(P2), ready_backend(P4)],
        ..EchoService::default()
    });
    let added = Instant::now();
    check_all_reply(&mut held);
    thread::sleep(Duration::from_secs(1));
    // A backend drains: it keeps its sessions.
    testbed.apply_service(&EchoService {
        backends: &[terminating_backend(P1), ready_backend(P2), ready_backend(P4)],
        ..EchoService::default()
    });
    let draining = Instant::now();
    check_all_reply(&mut held);
    thread::sleep(Duration::from_secs(1));
    check_all_reply(&mut held);
    // It is removed: its connections end, others stay. What its clients still send has no session.
    testbed.accounting.expect(["no_session"]);
    testbed.apply_service(&EchoService { backends: &[ready_backend(P2), ready_backend(P4)], ..EchoService::default() });
    let mut lost = held.remove("p1").unwrap();
    assert!(lost[0].query().is_err());
    check_all_reply(&mut held);
    let replies = clients.end();
    // TCP only: a reused UDP port is the same session, and stays at its backend.
    let names = |from: Instant, until: Instant| {
        let between = replies.iter().filter(|(at, tcp, _)| *tcp && (from..until).contains(at));
        let mut names: Vec<_> = between.map(|(.., reply)| &*reply.backend).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    let end = Instant::now();
    assert_eq!(names(added, draining), ["p1", "p2", "p4"]);
    assert_eq!(names(draining, end), ["p2", "p4"], "no new sessions to a draining backend");
    assert!(replies.iter().all(|(.., reply)| reply.observed == reply.local));
    assert!(replies.len() > 100, "{}", replies.len());
    testbed.check_frames();
}

#[test]
fn udp_sessions_move_to_another_backend_after_removal() {
    let testbed = start_testbed(
        "svcudp",
        &EchoService { backends: &[ready_backend(P1), ready_backend(P2)], ..EchoService::default() },
    );
    let server = testbed.server.clone();
    let to: std::net::SocketAddr = format!("{}:{UDP_PORT}", VIP[0]).parse().unwrap();
    let (backend_sender, backends) = std::sync::mpsc::channel();
    let (send_next, next) = std::sync::mpsc::channel::<()>();
    let client = server.run(move || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(Duration::from_secs(3)))?;
        socket.connect(to)?;
        while next.recv().is_ok() {
            socket.send(b"?")?;
            let mut reply = [0; 256];
            let length = socket.recv(&mut reply)?;
            let text = String::from_utf8_lossy(&reply[..length]).into_owned();
            backend_sender
                .send(text.split(' ').next().unwrap_or_default().to_owned())
                .map_err(std::io::Error::other)?;
        }
        Ok(())
    });
    let query = || {
        send_next.send(()).unwrap();
        backends.recv_timeout(Duration::from_secs(4)).unwrap()
    };
    let first = query();
    let (remaining, name) = if first == "p1" { (P2, "p2") } else { (P1, "p1") };
    assert_eq!(query(), first);
    testbed.apply_service(&EchoService { backends: &[ready_backend(remaining)], ..EchoService::default() });
    assert_eq!(query(), name, "the next datagram already");
    drop(send_next);
    client.join().unwrap().unwrap();
}

#[test]
fn client_ip_affinity_holds_until_the_backend_is_removed() {
    fn with_affinity(backends: &[Backend]) -> EchoService<'_> {
        EchoService { spec: "  sessionAffinity: ClientIP", backends, ..EchoService::default() }
    }
    let testbed = start_testbed("svcstick", &with_affinity(&[ready_backend(P1), ready_backend(P2)]));
    let first = query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap().backend;
    let same = |count: usize, expected: &str| {
        (0..count).all(|_| query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap().backend == expected)
    };
    assert!(same(70, &first));
    testbed.apply_service(&with_affinity(&[ready_backend(P1), ready_backend(P2), ready_backend(P4)]));
    assert!(same(20, &first));
    let (draining, remaining) = if first == "p1" { (P1, P2) } else { (P2, P1) };
    testbed.apply_service(&with_affinity(&[
        terminating_backend(draining),
        ready_backend(remaining),
        ready_backend(P4),
    ]));
    let other = query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap().backend;
    assert!(other != first && same(30, &other), "{other}");
    assert!(wait_for(Duration::from_secs(2), || testbed.service_status()["affinity_seconds"] == 10_800));
}
