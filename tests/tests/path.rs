//! What paths do to packets: fragments, hops that run out, links that are narrow. Real kernels at both ends.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use vipgate::lab::Host;
use vipgate_tests::{POD_PACKETS, SERVER, VIP_A, World};

#[test]
fn large_pings_and_datagrams_cross_in_fragments() {
    let world = World::with_gateway("fragments");
    let capture = world.capture(POD_PACKETS);
    for server in SERVER {
        for size in ["4000", "20000", "65000"] {
            let pings = world.pods[0].output(&["ping", "-c", "2", "-i", "0.2", "-W", "3", "-s", size, server]).unwrap();
            assert!(pings.contains("2 received"), "{size} bytes to {server}: {pings}");
        }
    }
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    assert!(world.ask(&["drops"])["fragment"].as_u64() == Some(0));
    world.check_frames();
}

/// Who answers a ping whose hops run out after `ttl`.
fn hop(pod: &Host, ttl: u8, server: &str) -> String {
    let ping = ["ping", "-c", "1", "-W", "2", "-t", &ttl.to_string(), server];
    // It fails, since the server never answers.
    pod.output(&ping).unwrap_or_else(|error| error.to_string())
}

#[test]
fn every_hop_can_be_seen_and_the_gateway_is_one() {
    let world = World::with_gateway("hops");
    let own = ["10.1.0.1", "fd00:1::1"];
    let routers = ["203.0.113.254", "2001:db8:113::fe"];
    world.ledger.expect_exactly([("ttl", 2)]);
    for (n, server) in SERVER.into_iter().enumerate() {
        let pod = &world.pods[0];
        for (ttl, expected) in [(1, own[n]), (2, routers[n])] {
            let seen = hop_by_probe(pod, ttl, server);
            assert!(seen.contains(expected), "hop {ttl} to {server} is {seen}, not {expected}");
        }
        assert!(hop(pod, 3, server).contains("1 received"), "the server is the third");
    }
}

/// Sends a datagram whose hops run out, and prints who says so.
const PROBE: &str = r#"
import socket, sys, time
ttl, server = int(sys.argv[1]), sys.argv[2]
v6 = ":" in server
family = socket.AF_INET6 if v6 else socket.AF_INET
errors = socket.socket(family, socket.SOCK_RAW, 58 if v6 else 1)
errors.settimeout(3)
probe = socket.socket(family, socket.SOCK_DGRAM)
probe.setsockopt(41 if v6 else 0, 16 if v6 else 2, ttl)
probe.sendto(b"?" * 32, (server, 33434))
until = time.monotonic() + 3
while time.monotonic() < until:
    data, sender = errors.recvfrom(2048)
    kind = data[0] if v6 else data[20]
    if kind == (3 if v6 else 11):
        print(sender[0])
        break
"#;

/// The same by a raw socket, since ping keeps errors to itself when its output is no terminal.
fn hop_by_probe(pod: &Host, ttl: u8, server: &str) -> String {
    pod.output(&["python3", "-c", PROBE, &ttl.to_string(), server]).unwrap()
}

#[test]
fn a_transfer_finds_its_way_through_a_narrow_link() {
    let world = World::with_gateway("narrow");
    // Behind the router the path is narrower than what pods and server think.
    world.router.ip(&["link", "set", "to-server", "mtu", "1300"]).unwrap();
    for server in SERVER {
        let address: IpAddr = server.parse().unwrap();
        let port = 9000 + u16::from(address.is_ipv6());
        let bind = SocketAddr::new(address, port);
        let listener = world.server.run(move || TcpListener::bind(bind)).join().unwrap().unwrap();
        let receiver = thread::spawn(move || {
            let (mut stream, peer) = listener.accept().unwrap();
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            (bytes.len(), peer.ip())
        });
        let sender = world.pods[0].run(move || {
            let mut stream = TcpStream::connect_timeout(&bind, Duration::from_secs(5))?;
            stream.set_write_timeout(Some(Duration::from_secs(10)))?;
            stream.write_all(&vec![7; 2 << 20])
        });
        sender.join().unwrap().unwrap();
        let (length, peer) = receiver.join().unwrap();
        assert_eq!(length, 2 << 20, "all of it to {server}");
        assert!(VIP_A.contains(&peer.to_string().as_str()));
    }
    // And where the gateway's own link is the narrow one, the gateway says so.
    world.gateway.ip(&["link", "set", "gw-out", "mtu", "1320"]).unwrap();
    world.router.ip(&["link", "set", "to-gw", "mtu", "1320"]).unwrap();
    world.router.ip(&["link", "set", "to-server", "mtu", "1500"]).unwrap();
    thread::sleep(Duration::from_millis(500));
    // What nobody may cut: of p2 in both families, and of p3 until it has heard what fits.
    world.ledger.expect_exactly([("too_big", 3)]);
    for server in SERVER {
        let ping = ["ping", "-c", "1", "-W", "2", "-M", "do", "-s", "1350", server];
        let said = world.pods[1].output(&ping).unwrap_or_else(|error| error.to_string());
        assert!(!said.contains("1 received"), "{said}");
        // IPv4 is cut by the gateway; over IPv6 the pod hears what fits, and cuts itself.
        let cut = ["ping", "-c", "3", "-i", "0.3", "-W", "3", "-M", "dont", "-s", "1350", server];
        let said = world.pods[2].output(&cut).unwrap_or_else(|error| error.to_string());
        // The server, too, must first hear what its answers may have.
        assert!(!said.contains(" 0 received"), "{server}: {said}");
    }
}

/// Takes all of 64 ports, and one more.
const TAKE_ALL: &str = r#"
import errno, socket, sys
held = []
for n in range(64):
    held.append(socket.create_connection((sys.argv[1], 80), timeout=5))
try:
    socket.create_connection((sys.argv[1], 80), timeout=5)
    print("connected")
except OSError as error:
    print(errno.errorcode.get(error.errno, str(error)))
"#;

#[test]
fn exhaustion_is_heard_at_once() {
    let mut world = World::new("exhausted");
    world.start("ports: {range: 20032-20095, quarantine: 2s}\nworkers: {cores: [0]}");
    world.ledger.expect_exactly([("ports_exhausted", 2)]);
    for server in SERVER {
        let said = world.pods[0].output(&["python3", "-c", TAKE_ALL, server]).unwrap();
        assert_eq!(said.trim(), "ECONNREFUSED", "{server}");
    }
    assert!((world.metric("vipgate_refused_total", "tenant-a") - 2.0).abs() < 0.5);
    let endpoints = world.ask(&["endpoints"]);
    let refused: u64 = endpoints["endpoints"].as_array().unwrap().iter().map(|e| e["refused"].as_u64().unwrap()).sum();
    assert_eq!(refused, 2);
}
