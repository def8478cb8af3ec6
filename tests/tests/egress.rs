//! Egress through a gateway with kernel TCP stacks: source addresses, throughput, concurrent connections, uncovered
//! and excluded traffic.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use vipgate_tests::{EXCLUDED, POD_FILTER, SERVER, Testbed, VIP_A, VIP_B, wait_for};

#[test]
fn servers_see_the_tenant_vip_and_never_a_pod_address() {
    let testbed = Testbed::with_gateway("id");
    let capture = testbed.capture(&format!("{POD_FILTER} and not host 10.9.0.200 and not host fd00:9::200"));
    let [p1, p2, p3, p4] = &testbed.pods;
    testbed.check_source_addresses(p1, SERVER, VIP_A);
    testbed.check_source_addresses(p2, SERVER, VIP_A);
    testbed.check_source_addresses(p3, SERVER, VIP_B);
    testbed.check_source_addresses(p3, EXCLUDED, ["10.1.0.21", "fd00:1::21"]);
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    assert!(testbed.forwarded("unchanged") >= 8.0, "excluded destinations are routed unchanged, in both directions");
    // The kernel forwards a pod that no policy covers.
    let before = testbed.metric("vipgate_received_total", "");
    testbed.check_source_addresses(p4, SERVER, ["10.1.0.31", "fd00:1::31"]);
    assert!((testbed.metric("vipgate_received_total", "") - before).abs() < 0.5, "no AF_XDP socket received it");
    testbed.check_frames();
}

#[test]
fn iperf3_runs_in_both_directions() {
    let testbed = Testbed::with_gateway("iperf");
    testbed.run_iperf3();
    // One complete checksum of 65 536 looks like a partial one.
    let completed = share_completed(&testbed);
    assert!(completed < 1e-3, "{completed} of the packets had partial checksums, though offloads are off");
}

/// As pods, nodes and routers on one machine are by default: they leave checksums to the device, and a veth hands packets
/// on as they are. XDP alone switches off segmentation offload at its peers.
#[test]
fn hosts_may_leave_checksums_to_the_device() {
    let mut testbed = Testbed::new("offloads");
    let Testbed { pods, switch, router, server, .. } = &testbed;
    for (host, interface) in [(&pods[0], "eth0"), (switch, "p1"), (switch, "to-gw"), (router, "to-gw")]
        .into_iter()
        .chain([(router, "to-server"), (server, "eth0")])
    {
        host.output(&["ethtool", "-K", interface, "tx", "on", "rx", "on", "tso", "on", "gso", "on", "gro", "on"])
            .unwrap();
    }
    testbed.start("");
    testbed.run_iperf3();
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let completed = share_completed(&testbed);
    assert!(completed > 0.5, "{completed} of the packets had partial checksums");
}

/// The share of received packets whose checksums were completed.
fn share_completed(testbed: &Testbed) -> f64 {
    let count = |name: &str| testbed.metric(name, "");
    count("vipgate_checksums_completed_total") / count("vipgate_received_total")
}

#[test]
fn a_thousand_concurrent_connections_get_distinct_tuples() {
    const CONNECTIONS: usize = 1000;
    let testbed = Testbed::with_gateway("many");
    // The server listens before any client connects.
    let listener = testbed.server.run(|| TcpListener::bind("0.0.0.0:7000")).join().unwrap().unwrap();
    drop(thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream?;
            thread::spawn(move || {
                let mut byte = [0];
                stream.read_exact(&mut byte)?;
                let peer = stream.peer_addr()?.to_string();
                stream.write_all(peer.as_bytes())
            });
        }
        io::Result::Ok(())
    }));
    let clients = testbed.pods[..2].iter().map(|pod| {
        pod.run(|| {
            let server = SocketAddr::from(([198, 51, 100, 10], 7000));
            let connect = |_| TcpStream::connect_timeout(&server, Duration::from_secs(5));
            let mut streams = (0..CONNECTIONS / 2).map(connect).collect::<Result<Vec<_>, _>>()?;
            let mut sources = Vec::new();
            for stream in &mut streams {
                stream.set_read_timeout(Some(Duration::from_secs(5)))?;
                stream.write_all(b"?")?;
                let mut peer = String::new();
                stream.read_to_string(&mut peer)?;
                sources.push(peer);
            }
            Ok(sources)
        })
    });
    let clients: Vec<_> = clients.collect();
    let sources: Vec<String> = clients.into_iter().flat_map(|client| client.join().unwrap().unwrap()).collect();
    assert_eq!(sources.len(), CONNECTIONS);
    assert!(sources.iter().all(|peer| peer.starts_with("203.0.113.10:")));
    assert_eq!(sources.iter().collect::<HashSet<_>>().len(), CONNECTIONS, "all tuples are distinct");
    testbed.check_frames();
}

#[test]
fn replies_on_another_queue_are_handed_off_to_the_owner() {
    let testbed = Testbed::with_gateway("queues");
    for _ in 0..20 {
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    }
    let status = testbed.query(&["status"]);
    let workers = status["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    let active = workers.iter().filter(|worker| worker["packets"]["egress"].as_u64().unwrap_or(0) > 0).count();
    assert_eq!(active, 2, "both workers forward packets");
    // Sixty flows: the device chooses a reply's queue by its own hash, so some replies arrive at another worker.
    assert!(testbed.metric("vipgate_handoffs_total", "") > 0.0);
    assert_eq!(testbed.query(&["drops"])["link_full"], 0);
    testbed.check_frames();
}

#[test]
fn the_first_packet_waits_for_neighbor_resolution() {
    let testbed = Testbed::with_gateway("neigh");
    for (server, vip) in SERVER.into_iter().zip(VIP_A) {
        for interface in ["gw-in", "gw-out"] {
            testbed.gateway.ip(&["neigh", "flush", "dev", interface]).unwrap();
        }
        // One datagram, without retransmission.
        let source = vipgate_lab::reflector::query_udp(&testbed.pods[0], server.parse().unwrap()).unwrap();
        assert_eq!(source, vip);
    }
    assert_eq!(testbed.query(&["drops"])["no_neighbor"], 0);
}

#[test]
fn a_changed_neighbor_mac_is_used() {
    let testbed = Testbed::with_gateway("moves");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.router.ip(&["link", "set", "to-gw", "address", "02:00:00:00:77:01"]).unwrap();
    for (address, family) in [("203.0.113.254", "-4"), ("2001:db8:113::fe", "-6")] {
        let _ =
            testbed.gateway.ip(&[family, "neigh", "change", address, "dev", "gw-out", "lladdr", "02:00:00:00:77:01"]);
    }
    let works = || vipgate_lab::reflector::query_udp(&testbed.pods[0], SERVER[0].parse().unwrap()).is_ok();
    assert!(wait_for(Duration::from_secs(10), works), "{:?}", testbed.query(&["drops"]));
}

#[test]
fn an_interface_flap_loses_no_packet_buffer() {
    let testbed = Testbed::with_gateway("flap");
    let server: std::net::IpAddr = SERVER[0].parse().unwrap();
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    // While the interface is down, replies must not take the default route.
    testbed.accounting.allow(["no_route"]);
    // Another pod sends continuously.
    let ping = ["ping", "-i", "0.02", "-c", "150", "-W", "1", SERVER[0]];
    let log = testbed.folder.path().join("ping.log");
    let mut pinging = testbed.pods[1].spawn(&ping, &log).unwrap();
    for _ in 0..5 {
        testbed.gateway.ip(&["link", "set", "gw-in", "down"]).unwrap();
        thread::sleep(Duration::from_millis(100));
        testbed.gateway.ip(&["link", "set", "gw-in", "up"]).unwrap();
        let works =
            || vipgate_lab::reflector::query_udp(&testbed.pods[0], server).is_ok_and(|source| source == VIP_A[0]);
        assert!(wait_for(Duration::from_secs(8), works), "{:?}", testbed.query(&["drops"]));
    }
    pinging.wait(Duration::from_secs(8));
    testbed.check_frames();
}
