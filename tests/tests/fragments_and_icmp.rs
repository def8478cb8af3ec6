//! Path behavior with kernel stacks at both ends: fragmentation, TTL expiry, path MTU, port exhaustion.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use vipgate_lab::Host;
use vipgate_tests::{POD_FILTER, SERVER, Testbed, VIP_A};

#[test]
fn fragmented_pings_and_datagrams_pass() {
    let testbed = Testbed::with_gateway("fragments");
    let capture = testbed.capture(POD_FILTER);
    for server in SERVER {
        for size in ["4000", "20000", "65000"] {
            let pings =
                testbed.pods[0].output(&["ping", "-c", "2", "-i", "0.2", "-W", "3", "-s", size, server]).unwrap();
            assert!(pings.contains("2 received"), "{size} bytes to {server}: {pings}");
        }
    }
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    assert!(testbed.query(&["drops"])["fragment"].as_u64() == Some(0));
    testbed.check_frames();
}

/// Output of a ping with this TTL.
fn ping_with_ttl(pod: &Host, ttl: u8, server: &str) -> String {
    let ping = ["ping", "-c", "1", "-W", "2", "-t", &ttl.to_string(), server];
    // ping fails without a reply.
    pod.output(&ping).unwrap_or_else(|error| error.to_string())
}

#[test]
fn traceroute_shows_the_gateway_and_every_hop() {
    let testbed = Testbed::with_gateway("hops");
    let own = ["10.1.0.1", "fd00:1::1"];
    let routers = ["203.0.113.254", "2001:db8:113::fe"];
    testbed.accounting.expect_exactly([("ttl", 2)]);
    for (n, server) in SERVER.into_iter().enumerate() {
        let pod = &testbed.pods[0];
        for (ttl, expected) in [(1, own[n]), (2, routers[n])] {
            let hop = traceroute_hop(pod, ttl, server);
            assert!(hop.contains(expected), "hop {ttl} to {server} is {hop}, not {expected}");
        }
        assert!(ping_with_ttl(pod, 3, server).contains("1 received"), "the server is hop 3");
    }
}

/// Sends a datagram with a TTL, and prints the source of the time exceeded error.
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
deadline = time.monotonic() + 3
while time.monotonic() < deadline:
    data, sender = errors.recvfrom(2048)
    kind = data[0] if v6 else data[20]
    if kind == (3 if v6 else 11):
        print(sender[0])
        break
"#;

/// Address of the hop at this TTL, by a raw socket: ping doesn't print errors when its output is no terminal.
fn traceroute_hop(pod: &Host, ttl: u8, server: &str) -> String {
    pod.output(&["python3", "-c", PROBE, &ttl.to_string(), server]).unwrap()
}

#[test]
fn path_mtu_discovery_works_through_the_gateway() {
    let testbed = Testbed::with_gateway("narrow");
    // The path behind the router has a smaller MTU than pods and server assume.
    testbed.router.ip(&["link", "set", "to-server", "mtu", "1300"]).unwrap();
    for server in SERVER {
        let address: IpAddr = server.parse().unwrap();
        let port = 9000 + u16::from(address.is_ipv6());
        let bind = SocketAddr::new(address, port);
        let listener = testbed.server.run(move || TcpListener::bind(bind)).join().unwrap().unwrap();
        let receiver = thread::spawn(move || {
            let (mut stream, peer) = listener.accept().unwrap();
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            (bytes.len(), peer.ip())
        });
        let sender = testbed.pods[0].run(move || {
            let mut stream = TcpStream::connect_timeout(&bind, Duration::from_secs(5))?;
            stream.set_write_timeout(Some(Duration::from_secs(10)))?;
            stream.write_all(&vec![7; 2 << 20])
        });
        sender.join().unwrap().unwrap();
        let (length, peer) = receiver.join().unwrap();
        assert_eq!(length, 2 << 20, "all of it to {server}");
        assert!(VIP_A.contains(&peer.to_string().as_str()));
    }
    // Then the gateway's own interface has the smallest MTU, and the gateway sends the errors.
    testbed.gateway.ip(&["link", "set", "gw-out", "mtu", "1320"]).unwrap();
    testbed.router.ip(&["link", "set", "to-gw", "mtu", "1320"]).unwrap();
    testbed.router.ip(&["link", "set", "to-server", "mtu", "1500"]).unwrap();
    thread::sleep(Duration::from_millis(500));
    // Packets with DF: of p2 in both families, and of p3 over IPv6 until it has learned the path MTU.
    testbed.accounting.expect_exactly([("too_big", 3)]);
    for server in SERVER {
        let ping = ["ping", "-c", "1", "-W", "2", "-M", "do", "-s", "1350", server];
        let output = testbed.pods[1].output(&ping).unwrap_or_else(|error| error.to_string());
        assert!(!output.contains("1 received"), "{output}");
        // The gateway fragments IPv4; over IPv6 the pod learns the path MTU and fragments itself.
        let fragmented = ["ping", "-c", "3", "-i", "0.3", "-W", "3", "-M", "dont", "-s", "1350", server];
        let output = testbed.pods[2].output(&fragmented).unwrap_or_else(|error| error.to_string());
        // The server has to learn the path MTU of its replies, too.
        assert!(!output.contains(" 0 received"), "{server}: {output}");
    }
}

/// Opens connections on all of 64 ports, and one more.
const EXHAUST_PORTS: &str = r#"
import errno, socket, sys
connections = []
for n in range(64):
    connections.append(socket.create_connection((sys.argv[1], 80), timeout=5))
try:
    socket.create_connection((sys.argv[1], 80), timeout=5)
    print("connected")
except OSError as error:
    print(errno.errorcode.get(error.errno, str(error)))
"#;

#[test]
fn port_exhaustion_rejects_immediately() {
    let mut testbed = Testbed::new("exhausted");
    testbed.start("ports: {range: 20032-20095, quarantine: 2s}\nworkers: {cores: [0]}");
    testbed.accounting.expect_exactly([("ports_exhausted", 2)]);
    for server in SERVER {
        let output = testbed.pods[0].output(&["python3", "-c", EXHAUST_PORTS, server]).unwrap();
        assert_eq!(output.trim(), "ECONNREFUSED", "{server}");
    }
    assert!((testbed.metric("vipgate_refused_total", "tenant-a") - 2.0).abs() < 0.5);
    let endpoints = testbed.query(&["endpoints"]);
    let refused: u64 = endpoints["endpoints"].as_array().unwrap().iter().map(|e| e["refused"].as_u64().unwrap()).sum();
    assert_eq!(refused, 2);
}
