//! Clients and Services, with real kernels on both sides: who is seen by whom, and what nobody serves.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use vipgate_tests::services::{HEALTH, Served, TCP, UDP, VIP, ask_tcp, ask_udp, connect, ready, terminating};
use vipgate_tests::{POD_PACKETS, SERVER, VIP_A, VIP_B, World, wait_for};

/// Pods p1 and p2, in both families; p4, which no egress policy covers.
fn backends() -> Vec<vipgate_tests::services::Backend> {
    ["10.1.0.11", "10.1.0.12", "fd00:1::11", "fd00:1::12", "10.1.0.31", "fd00:1::31"].map(ready).into()
}

/// A world with backends behind the Service, and a gateway.
fn world(tag: &str, served: &Served<'_>, more: &str) -> World {
    let mut world = World::new(tag);
    world.start_backends();
    world.serve(served);
    world.start(&format!("node: node-1\n{more}"));
    world
}

#[test]
fn backends_see_the_client_itself_and_the_client_only_the_vip() {
    let world = world("svc", &Served { backends: &backends(), ..Served::default() }, "");
    let capture = world.capture(POD_PACKETS);
    for (vip, client) in VIP.into_iter().zip(SERVER) {
        let mut names = HashSet::new();
        for _ in 0..20 {
            for answer in [ask_tcp(&world.server, (vip, TCP)), ask_udp(&world.server, (vip, UDP), 8)] {
                let answer = answer.unwrap();
                assert_eq!((answer.seen, answer.own.ip().to_string()), (answer.own, client.to_owned()));
                names.insert(answer.backend);
            }
        }
        assert_eq!(names, ["p1", "p2", "p4"].map(str::to_owned).into());
    }
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    assert!(world.forwarded("inbound") >= 200.0 && world.forwarded("service_reply") >= 200.0);
    assert!(world.served()["opened"].as_u64().unwrap() == 80 && world.served()["sessions"].as_u64().unwrap() > 0);
    // The same pods call out, as whom their own Service says.
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.check_frames();
}

#[test]
fn pods_reach_services_as_their_own_vip_also_the_one_that_they_serve() {
    let world = world("svcpod", &Served { backends: &backends()[..4], ..Served::default() }, "");
    for (pod, own) in [(0, VIP_A), (2, VIP_B)] {
        for (vip, own) in VIP.into_iter().zip(own) {
            let mut names = HashSet::new();
            for _ in 0..12 {
                let tcp = ask_tcp(&world.pods[pod], (vip, TCP)).unwrap();
                let udp = ask_udp(&world.pods[pod], (vip, UDP), 8).unwrap();
                assert_eq!([tcp.seen.ip().to_string(), udp.seen.ip().to_string()], [own, own]);
                names.extend([tcp.backend, udp.backend]);
            }
            assert_eq!(names, ["p1", "p2"].map(str::to_owned).into(), "itself, too");
        }
    }
    world.check_frames();
}

#[test]
fn nginx_logs_the_client_and_the_far_side_the_vip() {
    let world = World::with_gateway("nginx");
    let folder = world.folder.path().display().to_string();
    for pod in &world.pods[..2] {
        let log = format!("{folder}/{}-access.log", pod.name());
        let config = format!(
            "daemon off; worker_processes 1; pid {folder}/{0}.pid; error_log {folder}/{0}-error.log;\n\
             events {{}}\nhttp {{ access_log {log}; server {{ listen 8080; listen [::]:8080; return 200 \"hello\\n\"; }} }}\n",
            pod.name()
        );
        let path = format!("{folder}/{}.conf", pod.name());
        fs::write(&path, config).unwrap();
        let output = world.folder.path().join(format!("{}-nginx.log", pod.name()));
        // It ends with the namespace.
        std::mem::forget(pod.spawn(&["nginx", "-p", &folder, "-c", &path], &output).unwrap());
    }
    for (vip, client) in VIP_A.into_iter().zip(SERVER) {
        let url = if vip.contains(':') { format!("http://[{vip}]/") } else { format!("http://{vip}/") };
        let up = || world.server.output(&["curl", "-s", "-m", "3", &url]).is_ok_and(|page| page == "hello\n");
        assert!(wait_for(Duration::from_secs(10), up), "{}", world.ask(&["drops"]));
        for _ in 0..10 {
            assert_eq!(world.server.output(&["curl", "-s", "-m", "3", &url]).unwrap(), "hello\n");
        }
        let logs = ["p1", "p2"].map(|pod| fs::read_to_string(format!("{folder}/{pod}-access.log")).unwrap());
        let lines: Vec<&str> = logs.iter().flat_map(|log| log.lines()).collect();
        assert!(lines.iter().filter(|line| line.starts_with(&format!("{client} - "))).count() > 10, "{lines:?}");
    }
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.check_identity(&world.pods[1], SERVER, VIP_A);
}

#[test]
fn iperf3_runs_through_a_service_both_ways() {
    let mut world = World::new("svciperf");
    // Two workers, sources and sinks share two cores: the ring between workers overflows as those of the device do.
    world.ledger.allow(["link_full"]);
    let text = Served { backends: &[ready("10.1.0.11"), ready("fd00:1::11")], ..Served::default() }.manifest();
    let text = text.replace("port: 80,", "port: 5201,").replace("port: 53,", "port: 5201,").replace("9000", "5201");
    world.write_policy("served.yaml", &text);
    world.start("node: node-1");
    let log = world.folder.path().join("iperf3.log");
    let _server = world.pods[0].spawn(&["iperf3", "-s", "--forceflush"], &log).unwrap();
    assert!(wait_for(Duration::from_secs(5), || fs::read_to_string(&log).is_ok_and(|log| log.contains("listening"))));
    for (vip, more) in
        [(VIP[0], &[][..]), (VIP[0], &["-R"]), (VIP[1], &[]), (VIP[1], &["-R"]), (VIP[0], &["-u", "-b", "20M"])]
    {
        let command = [&["iperf3", "-J", "-t", "2", "-c", vip], more].concat();
        let answer: serde_json::Value = serde_json::from_str(&world.server.output(&command).unwrap()).unwrap();
        let sum = if more.contains(&"-u") { "sum" } else { "sum_received" };
        let rate = answer["end"][sum]["bits_per_second"].as_f64().unwrap_or_else(|| panic!("{answer}"));
        assert!(rate > 15e6, "{vip} {more:?}: {rate} bit/s");
    }
    world.check_frames();
}

#[test]
fn where_nobody_listens_nothing_is_heard_and_where_nobody_serves_it_is_said_at_once() {
    let world = world("svcnone", &Served::default(), "");
    // The last is sent again until its patience ends.
    world.ledger.expect_exactly([("no_backend", 5)]);
    world.ledger.expect(["no_service"]);
    for vip in VIP {
        let begin = Instant::now();
        let refused = connect(&world.server, (vip, TCP)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(ask_udp(&world.server, (vip, UDP), 8).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert!(begin.elapsed() < Duration::from_secs(1));
        let silent = connect(&world.server, (vip, TCP + 1)).unwrap_err();
        assert!(matches!(silent.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock), "{silent}");
    }
    // A pod hears it too, by way of its own VIP.
    assert_eq!(connect(&world.pods[2], (VIP[0], TCP)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    // Backends come: in a moment all is well.
    world.serve(&Served { backends: &backends(), ..Served::default() });
    for vip in VIP {
        ask_tcp(&world.server, (vip, TCP)).unwrap();
    }
}

#[test]
fn a_local_service_has_its_own_nodes_backends_and_says_so_to_health_checks() {
    let local = format!("  externalTrafficPolicy: Local\n  healthCheckNodePort: {HEALTH}");
    let served = |backends| Served { spec: &local, backends, ..Served::default() };
    let there = [ready("10.1.0.11"), ready("fd00:1::11"), ready("10.1.0.12").on("node-2")];
    let world = world("svclocal", &served(&there), "");
    let health = |from: &vipgate::lab::Host, at: &str| {
        let at = if at.contains(':') { format!("[{at}]") } else { at.to_owned() };
        let url = format!("http://{at}:{HEALTH}/healthz");
        let text = from.output(&["curl", "-s", "-m", "3", "-i", &url]).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        (head.to_lowercase(), body)
    };
    // On the VIPs, through the packet path; and on the node's own addresses.
    let places = [VIP[0], VIP[1], "203.0.113.1", "2001:db8:113::1"];
    for at in places {
        let (head, body) = health(&world.server, at);
        assert!(head.starts_with("http/1.1 200 ok\r\n"), "{at}: {head}");
        assert!(head.contains("content-type: application/json") && head.contains("x-content-type-options: nosniff"));
        assert!(head.contains("x-load-balancing-endpoint-weight: 1"), "{head}");
        let expected = serde_json::json!({
            "service": {"namespace": "served", "name": "echo"}, "localEndpoints": 1, "serviceProxyHealthy": true,
        });
        assert_eq!(body, expected, "{at}");
    }
    for _ in 0..20 {
        assert_eq!(ask_tcp(&world.server, (VIP[0], TCP)).unwrap().backend, "p1");
    }
    // Pods have all backends.
    let names: HashSet<_> = (0..20).map(|_| ask_tcp(&world.pods[2], (VIP[0], TCP)).unwrap().backend).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    // The last one here drains: health says no before clients do.
    let draining = [terminating("10.1.0.11"), ready("10.1.0.12").on("node-2")];
    world.serve(&served(&draining));
    for at in places {
        let (head, body) = health(&world.server, at);
        assert!(head.starts_with("http/1.1 503"), "{at}: {head}");
        assert_eq!(body["localEndpoints"], 0);
    }
    assert_eq!(ask_tcp(&world.server, (VIP[0], TCP)).unwrap().backend, "p1", "as long as it serves");
    world.serve(&served(&[ready("10.1.0.12").on("node-2")]));
    world.ledger.expect(["not_local"]);
    assert!(connect(&world.server, (VIP[0], TCP)).is_err());
    // Another Service beside it is as it was.
    world.serve(&Served { backends: &there, ..Served::default() });
    let names: HashSet<_> = (0..20).map(|_| ask_tcp(&world.server, (VIP[0], TCP)).unwrap().backend).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let closed = world.server.output(&["curl", "-s", "-m", "2", &format!("http://203.0.113.1:{HEALTH}/")]);
    assert!(closed.is_err(), "the port is closed");
    world.check_frames();
}

#[test]
fn a_health_port_that_is_in_use_is_named_and_taken_when_it_is_free() {
    let mut world = World::new("svcport");
    world.start_backends();
    let local = format!("  externalTrafficPolicy: Local\n  healthCheckNodePort: {HEALTH}");
    world.serve(&Served { spec: &local, backends: &[ready("10.1.0.11")], ..Served::default() });
    let log = world.folder.path().join("squatter.log");
    let script =
        format!("import socket,time; s=socket.create_server(('::',{HEALTH}),family=socket.AF_INET6); time.sleep(60)");
    let squatter = world.gateway.spawn(&["python3", "-c", &script], &log).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    world.start("node: node-1");
    let error = || world.served()["health"]["error"].as_str().unwrap_or_default().to_owned();
    assert!(error().contains("Service served/echo on port 30030: Address already in use"), "{}", error());
    assert!(world.log().contains("cannot answer health checks of Service served/echo"), "{}", world.log());
    ask_tcp(&world.server, (VIP[0], TCP)).unwrap();
    squatter.signal("KILL").unwrap();
    assert!(wait_for(Duration::from_secs(5), || error().is_empty()));
}

#[test]
fn only_clients_in_its_ranges_are_served() {
    let ranges = |text| format!("  loadBalancerSourceRanges: [{text}]");
    let others = ranges("192.0.2.0/24");
    let world = world("svcrange", &Served { spec: &others, backends: &backends(), ..Served::default() }, "");
    world.ledger.expect(["source_range"]);
    assert!(connect(&world.server, (VIP[0], TCP)).is_err());
    ask_tcp(&world.pods[2], (VIP[0], TCP)).unwrap();
    let own = ranges("198.51.100.0/24, \"2001:db8:51::/48\"");
    world.serve(&Served { spec: &own, backends: &backends(), ..Served::default() });
    for vip in VIP {
        ask_tcp(&world.server, (vip, TCP)).unwrap();
    }
}

#[test]
fn large_datagrams_come_whole_to_one_backend_and_back_from_the_vip() {
    let world = world("svcfrag", &Served { backends: &backends(), ..Served::default() }, "");
    for vip in VIP {
        for bytes in [4_000, 20_000] {
            let answer = ask_udp(&world.server, (vip, UDP), bytes).unwrap();
            assert_eq!(answer.seen, answer.own);
        }
    }
    world.check_frames();
}

#[test]
fn the_older_of_two_services_keeps_what_both_want() {
    let metadata = "  creationTimestamp: \"2024-01-01T00:00:00Z\"\n";
    let world = world("svctwo", &Served { metadata, backends: &backends()[..1], ..Served::default() }, "");
    let other = Served {
        backends: &backends()[1..2],
        metadata: "  creationTimestamp: \"2025-01-01T00:00:00Z\"\n",
        ..Served::default()
    };
    world.write_policy("other.yaml", &other.manifest().replace("namespace: served", "namespace: another"));
    let said = || {
        let (_, shown, _) = if world.served { world.policy_status(&[]) } else { (0, world.log(), String::new()) };
        shown.contains("belongs to Service served/echo") && shown.contains("another")
    };
    assert!(wait_for(Duration::from_secs(5), said), "{}\n{}", world.log(), world.policy_status(&[]).1);
    for _ in 0..10 {
        assert_eq!(ask_tcp(&world.server, (VIP[0], TCP)).unwrap().backend, "p1");
    }
}

#[test]
fn connections_outlive_the_process_that_carries_them() {
    let (_folder, state) = vipgate_tests::state();
    let mut world = world("svckill", &Served { backends: &backends(), ..Served::default() }, &state);
    let mut connections: Vec<_> = (0..20).map(|n| connect(&world.server, (VIP[n % 2], TCP)).unwrap()).collect();
    let before: Vec<_> = connections.iter_mut().map(|it| it.ask().unwrap()).collect();
    world.end("KILL");
    world.start(&format!("node: node-1\n{state}"));
    let after: Vec<_> = connections.iter_mut().map(|it| it.ask().unwrap()).collect();
    assert_eq!(before, after);
    assert!(world.served()["sessions"].as_u64().unwrap() >= 20, "{}", world.served());
}
