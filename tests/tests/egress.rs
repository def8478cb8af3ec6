//! Kernel TCP stacks through a gateway: identity, throughput, many connections at once, and what is not covered.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use vipgate_tests::ledger::RING_LOSSES;
use vipgate_tests::{EXCLUDED, POD_PACKETS, SERVER, VIP_A, VIP_B, World, wait_for};

#[test]
fn the_far_side_sees_each_tenants_vip_and_never_a_pods_address() {
    let world = World::with_gateway("id");
    let capture = world.capture(&format!("{POD_PACKETS} and not host 10.9.0.200 and not host fd00:9::200"));
    let [p1, p2, p3, p4] = &world.pods;
    world.check_identity(p1, SERVER, VIP_A);
    world.check_identity(p2, SERVER, VIP_A);
    world.check_identity(p3, SERVER, VIP_B);
    world.check_identity(p3, EXCLUDED, ["10.1.0.21", "fd00:1::21"]);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    assert!(world.forwarded("unchanged") >= 8.0, "excluded destinations are routed unchanged, both ways");
    // A pod that no policy covers is the kernel's business.
    let before = world.metric("vipgate_received_total", "");
    world.check_identity(p4, SERVER, ["10.1.0.31", "fd00:1::31"]);
    assert!((world.metric("vipgate_received_total", "") - before).abs() < 0.5, "no socket has seen it");
    world.check_frames();
}

#[test]
fn iperf3_runs_both_ways() {
    let world = World::with_gateway("iperf");
    world.ledger.allow(RING_LOSSES);
    // Two workers, sources and sinks share two cores: the ring between workers overflows as those of the device do.
    world.ledger.allow(["link_full"]);
    let log = world.folder.path().join("iperf3.log");
    let _server = world.server.spawn(&["iperf3", "-s", "--forceflush"], &log).unwrap();
    assert!(
        wait_for(Duration::from_secs(5), || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("listening")))
    );
    for (server, reverse) in [(SERVER[0], false), (SERVER[0], true), (SERVER[1], false), (SERVER[1], true)] {
        let mut command = vec!["iperf3", "-J", "-t", "2", "-c", server];
        if reverse {
            command.push("-R");
        }
        let answer: serde_json::Value = serde_json::from_str(&world.pods[0].output(&command).unwrap()).unwrap();
        let rate = answer["end"]["sum_received"]["bits_per_second"].as_f64().unwrap();
        assert!(rate > 50e6, "{server}, reverse {reverse}: {rate} bit/s");
    }
    world.check_frames();
}

#[test]
fn a_thousand_connections_at_once_all_work_and_all_look_different() {
    const CONNECTIONS: usize = 1000;
    let world = World::with_gateway("many");
    // It listens before anybody connects.
    let listener = world.server.run(|| TcpListener::bind("0.0.0.0:7000")).join().unwrap().unwrap();
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
    let clients = world.pods[..2].iter().map(|pod| {
        pod.run(|| {
            let server = SocketAddr::from(([198, 51, 100, 10], 7000));
            let connect = |_| TcpStream::connect_timeout(&server, Duration::from_secs(5));
            let mut streams = (0..CONNECTIONS / 2).map(connect).collect::<Result<Vec<_>, _>>()?;
            let mut seen = Vec::new();
            for stream in &mut streams {
                stream.set_read_timeout(Some(Duration::from_secs(5)))?;
                stream.write_all(b"?")?;
                let mut peer = String::new();
                stream.read_to_string(&mut peer)?;
                seen.push(peer);
            }
            Ok(seen)
        })
    });
    let clients: Vec<_> = clients.collect();
    let seen: Vec<String> = clients.into_iter().flat_map(|client| client.join().unwrap().unwrap()).collect();
    assert_eq!(seen.len(), CONNECTIONS);
    assert!(seen.iter().all(|peer| peer.starts_with("203.0.113.10:")));
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), CONNECTIONS, "no two look alike");
    world.check_frames();
}

#[test]
fn replies_on_the_wrong_queue_are_handed_to_their_owner() {
    let world = World::with_gateway("queues");
    for _ in 0..20 {
        world.check_identity(&world.pods[0], SERVER, VIP_A);
    }
    let status = world.ask(&["status"]);
    let workers = status["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    let used = workers.iter().filter(|worker| worker["packets"]["egress"].as_u64().unwrap_or(0) > 0).count();
    assert_eq!(used, 2, "both workers have work");
    // Sixty flows, and a reply's queue is chosen by a hash that knows nothing of ours.
    assert!(world.metric("vipgate_handoffs_total", "") > 0.0);
    assert_eq!(world.ask(&["drops"])["link_full"], 0);
    world.check_frames();
}

#[test]
fn the_first_packet_waits_for_its_neighbour() {
    let world = World::with_gateway("neigh");
    for (server, vip) in SERVER.into_iter().zip(VIP_A) {
        for interface in ["gw-in", "gw-out"] {
            world.gateway.ip(&["neigh", "flush", "dev", interface]).unwrap();
        }
        // One datagram, never sent again.
        let seen = vipgate::lab::peers::ask_udp(&world.pods[0], server.parse().unwrap()).unwrap();
        assert_eq!(seen, vip);
    }
    assert_eq!(world.ask(&["drops"])["no_neighbor"], 0);
}

#[test]
fn a_neighbour_that_moves_is_followed() {
    let world = World::with_gateway("moves");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.router.ip(&["link", "set", "to-gw", "address", "02:00:00:00:77:01"]).unwrap();
    for (address, family) in [("203.0.113.254", "-4"), ("2001:db8:113::fe", "-6")] {
        let _ = world.gateway.ip(&[family, "neigh", "change", address, "dev", "gw-out", "lladdr", "02:00:00:00:77:01"]);
    }
    let works = || vipgate::lab::peers::ask_udp(&world.pods[0], SERVER[0].parse().unwrap()).is_ok();
    assert!(wait_for(Duration::from_secs(10), works), "{:?}", world.ask(&["drops"]));
}

#[test]
fn a_link_that_flaps_loses_no_buffer_and_comes_back() {
    let world = World::with_gateway("flap");
    let server: std::net::IpAddr = SERVER[0].parse().unwrap();
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    // A pod that sends all along.
    let ping = ["ping", "-i", "0.02", "-c", "150", "-W", "1", SERVER[0]];
    let log = world.folder.path().join("ping.log");
    let mut pinging = world.pods[1].spawn(&ping, &log).unwrap();
    for _ in 0..5 {
        world.gateway.ip(&["link", "set", "gw-in", "down"]).unwrap();
        thread::sleep(Duration::from_millis(100));
        world.gateway.ip(&["link", "set", "gw-in", "up"]).unwrap();
        let works = || vipgate::lab::peers::ask_udp(&world.pods[0], server).is_ok_and(|seen| seen == VIP_A[0]);
        assert!(wait_for(Duration::from_secs(8), works), "{:?}", world.ask(&["drops"]));
    }
    pinging.wait(Duration::from_secs(8));
    world.check_frames();
}
