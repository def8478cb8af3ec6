//! Services with kernel stacks on both sides: observed addresses, load balancing, and rejected traffic.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use vipgate_tests::iperf3;
use vipgate_tests::services::{
    EchoService, HEALTH_CHECK_PORT, TCP_PORT, UDP_PORT, VIP, connect, query_tcp, query_udp, ready_backend,
    terminating_backend,
};
use vipgate_tests::{POD_FILTER, SERVER, Testbed, VIP_A, VIP_B, wait_for};

/// Backends p1, p2 and p4 in both families; no egress policy covers p4.
fn backends() -> Vec<vipgate_tests::services::Backend> {
    ["10.1.0.11", "10.1.0.12", "fd00:1::11", "fd00:1::12", "10.1.0.31", "fd00:1::31"].map(ready_backend).into()
}

/// A testbed with backends of the Service, and a gateway.
fn start_testbed(tag: &str, served: &EchoService<'_>, extra: &str) -> Testbed {
    let mut testbed = Testbed::new(tag);
    testbed.start_backends();
    testbed.apply_service(served);
    testbed.start(&format!("node: node-1\n{extra}"));
    testbed
}

#[test]
fn backends_see_the_client_address_and_clients_the_vip() {
    let testbed = start_testbed("svc", &EchoService { backends: &backends(), ..EchoService::default() }, "");
    let capture = testbed.capture(POD_FILTER);
    for (vip, client) in VIP.into_iter().zip(SERVER) {
        let mut names = HashSet::new();
        for _ in 0..20 {
            for reply in [query_tcp(&testbed.server, (vip, TCP_PORT)), query_udp(&testbed.server, (vip, UDP_PORT), 8)] {
                let reply = reply.unwrap();
                assert_eq!((reply.observed, reply.local.ip().to_string()), (reply.local, client.to_owned()));
                names.insert(reply.backend);
            }
        }
        assert_eq!(names, ["p1", "p2", "p4"].map(str::to_owned).into());
    }
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    assert!(testbed.forwarded("inbound") >= 200.0 && testbed.forwarded("service_reply") >= 200.0);
    assert!(
        testbed.service_status()["opened"].as_u64().unwrap() == 80
            && testbed.service_status()["sessions"].as_u64().unwrap() > 0
    );
    // Both ports have the same backends: one table of each family.
    assert_eq!(testbed.service_status()["lookup_table_bytes"], 2 * 2 * 2039);
    // The same pods' egress uses the VIP of their own Service.
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.check_frames();
}

#[test]
fn pods_reach_services_from_their_vip_with_hairpin() {
    let testbed = start_testbed("svcpod", &EchoService { backends: &backends()[..4], ..EchoService::default() }, "");
    for (pod, own) in [(0, VIP_A), (2, VIP_B)] {
        for (vip, own) in VIP.into_iter().zip(own) {
            let mut names = HashSet::new();
            for _ in 0..12 {
                let tcp = query_tcp(&testbed.pods[pod], (vip, TCP_PORT)).unwrap();
                let udp = query_udp(&testbed.pods[pod], (vip, UDP_PORT), 8).unwrap();
                assert_eq!([tcp.observed.ip().to_string(), udp.observed.ip().to_string()], [own, own]);
                names.extend([tcp.backend, udp.backend]);
            }
            assert_eq!(names, ["p1", "p2"].map(str::to_owned).into(), "including the pod itself");
        }
    }
    testbed.check_frames();
}

#[test]
fn nginx_logs_the_client_address_and_servers_see_the_vip() {
    let testbed = Testbed::with_gateway("nginx");
    let folder = testbed.folder.path().display().to_string();
    for pod in &testbed.pods[..2] {
        let log = format!("{folder}/{}-access.log", pod.name());
        let config = format!(
            "daemon off; worker_processes 1; pid {folder}/{0}.pid; error_log {folder}/{0}-error.log;\n\
             events {{}}\nhttp {{ access_log {log}; \
             server {{ listen 8080; listen [::]:8080; return 200 \"hello\\n\"; }} }}\n",
            pod.name()
        );
        let path = format!("{folder}/{}.conf", pod.name());
        fs::write(&path, config).unwrap();
        let output = testbed.folder.path().join(format!("{}-nginx.log", pod.name()));
        // It ends with the network namespace.
        std::mem::forget(pod.spawn(&["nginx", "-p", &folder, "-c", &path], &output).unwrap());
    }
    for (vip, client) in VIP_A.into_iter().zip(SERVER) {
        let url = if vip.contains(':') { format!("http://[{vip}]/") } else { format!("http://{vip}/") };
        let up = || testbed.server.output(&["curl", "-s", "-m", "3", &url]).is_ok_and(|page| page == "hello\n");
        assert!(wait_for(Duration::from_secs(10), up), "{}", testbed.query(&["drops"]));
        for _ in 0..10 {
            assert_eq!(testbed.server.output(&["curl", "-s", "-m", "3", &url]).unwrap(), "hello\n");
        }
        let logs = ["p1", "p2"].map(|pod| fs::read_to_string(format!("{folder}/{pod}-access.log")).unwrap());
        let lines: Vec<&str> = logs.iter().flat_map(|log| log.lines()).collect();
        assert!(lines.iter().filter(|line| line.starts_with(&format!("{client} - "))).count() > 10, "{lines:?}");
    }
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.check_source_addresses(&testbed.pods[1], SERVER, VIP_A);
}

#[test]
fn iperf3_runs_through_a_service_in_both_directions() {
    let mut testbed = Testbed::new("svciperf");
    // Two workers and both iperf3 processes share two cores: the ring between workers overflows as those of the
    // device do.
    testbed.accounting.allow(["link_full"]);
    let text =
        EchoService { backends: &[ready_backend("10.1.0.11"), ready_backend("fd00:1::11")], ..EchoService::default() }
            .manifest();
    let text = text.replace("port: 80,", "port: 5201,").replace("port: 53,", "port: 5201,").replace("9000", "5201");
    testbed.write_policy("served.yaml", &text);
    testbed.start("node: node-1");
    let _server = iperf3::start_server(&testbed.pods[0], testbed.folder.path());
    for (vip, options) in
        [(VIP[0], &[][..]), (VIP[0], &["-R"]), (VIP[1], &[]), (VIP[1], &["-R"]), (VIP[0], &["-u", "-b", "20M"])]
    {
        let arguments = [&["-t", "2", "-c", vip], options].concat();
        let rate = iperf3::measure(&testbed.server, &arguments, "bits_per_second");
        assert!(rate > 15e6, "{vip} {options:?}: {rate} bit/s");
    }
    testbed.check_frames();
}

#[test]
fn unused_ports_drop_silently_and_services_without_backends_reject() {
    let testbed = start_testbed("svcnone", &EchoService::default(), "");
    // SYNs to an unused port are retransmitted until the client's timeout.
    testbed.accounting.expect_exactly([("no_backend", 5)]);
    testbed.accounting.expect(["no_service"]);
    for vip in VIP {
        let started = Instant::now();
        let refused = connect(&testbed.server, (vip, TCP_PORT)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(query_udp(&testbed.server, (vip, UDP_PORT), 8).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert!(started.elapsed() < Duration::from_secs(1));
        let silent = connect(&testbed.server, (vip, TCP_PORT + 1)).unwrap_err();
        assert!(matches!(silent.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock), "{silent}");
    }
    // A pod is rejected as well, through its own VIP.
    assert_eq!(connect(&testbed.pods[2], (VIP[0], TCP_PORT)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    // Backends are added: requests succeed at once.
    testbed.apply_service(&EchoService { backends: &backends(), ..EchoService::default() });
    for vip in VIP {
        query_tcp(&testbed.server, (vip, TCP_PORT)).unwrap();
    }
}

#[test]
fn external_traffic_policy_local_uses_node_backends_and_health_checks() {
    let local = format!("  externalTrafficPolicy: Local\n  healthCheckNodePort: {HEALTH_CHECK_PORT}");
    let served = |backends| EchoService { spec: &local, backends, ..EchoService::default() };
    let two_nodes =
        [ready_backend("10.1.0.11"), ready_backend("fd00:1::11"), ready_backend("10.1.0.12").on_node("node-2")];
    let testbed = start_testbed("svclocal", &served(&two_nodes), "");
    let health = |from: &vipgate_lab::Host, at: &str| {
        let at = if at.contains(':') { format!("[{at}]") } else { at.to_owned() };
        let url = format!("http://{at}:{HEALTH_CHECK_PORT}/healthz");
        let text = from.output(&["curl", "-s", "-m", "3", "-i", &url]).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        (head.to_lowercase(), body)
    };
    // At the VIPs through the packet path, and at the node's own addresses.
    let targets = [VIP[0], VIP[1], "203.0.113.1", "2001:db8:113::1"];
    for at in targets {
        let (head, body) = health(&testbed.server, at);
        assert!(head.starts_with("http/1.1 200 ok\r\n"), "{at}: {head}");
        assert!(head.contains("content-type: application/json") && head.contains("x-content-type-options: nosniff"));
        assert!(head.contains("x-load-balancing-endpoint-weight: 1"), "{head}");
        let expected = serde_json::json!({
            "service": {"namespace": "served", "name": "echo"}, "localEndpoints": 1, "serviceProxyHealthy": true,
        });
        assert_eq!(body, expected, "{at}");
    }
    for _ in 0..20 {
        assert_eq!(query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap().backend, "p1");
    }
    // Pods use all backends.
    let names: HashSet<_> = (0..20).map(|_| query_tcp(&testbed.pods[2], (VIP[0], TCP_PORT)).unwrap().backend).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    // The last backend of this node drains: health checks fail before client requests do.
    let draining = [terminating_backend("10.1.0.11"), ready_backend("10.1.0.12").on_node("node-2")];
    testbed.apply_service(&served(&draining));
    for at in targets {
        let (head, body) = health(&testbed.server, at);
        assert!(head.starts_with("http/1.1 503"), "{at}: {head}");
        assert_eq!(body["localEndpoints"], 0);
    }
    assert_eq!(query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap().backend, "p1", "while it still serves");
    testbed.apply_service(&served(&[ready_backend("10.1.0.12").on_node("node-2")]));
    testbed.accounting.expect(["not_local"]);
    assert!(connect(&testbed.server, (VIP[0], TCP_PORT)).is_err());
    // Without the local policy, all backends are used again.
    testbed.apply_service(&EchoService { backends: &two_nodes, ..EchoService::default() });
    let names: HashSet<_> = (0..20).map(|_| query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap().backend).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let closed = testbed.server.output(&["curl", "-s", "-m", "2", &format!("http://203.0.113.1:{HEALTH_CHECK_PORT}/")]);
    assert!(closed.is_err(), "the port is closed");
    testbed.check_frames();
}

#[test]
fn an_occupied_health_check_port_is_reported_and_bound_later() {
    let mut testbed = Testbed::new("svcport");
    testbed.start_backends();
    let local = format!("  externalTrafficPolicy: Local\n  healthCheckNodePort: {HEALTH_CHECK_PORT}");
    testbed.apply_service(&EchoService {
        spec: &local,
        backends: &[ready_backend("10.1.0.11")],
        ..EchoService::default()
    });
    let log = testbed.folder.path().join("listener.log");
    let script = format!(
        "import socket,time; s=socket.create_server(('::',{HEALTH_CHECK_PORT}),family=socket.AF_INET6); time.sleep(60)"
    );
    let listener = testbed.gateway.spawn(&["python3", "-c", &script], &log).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    testbed.start("node: node-1");
    let error = || testbed.service_status()["health"]["error"].as_str().unwrap_or_default().to_owned();
    assert!(error().contains("Service served/echo on port 30030: Address already in use"), "{}", error());
    assert!(testbed.log().contains("cannot answer health checks of Service served/echo"), "{}", testbed.log());
    query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap();
    listener.signal("KILL").unwrap();
    assert!(wait_for(Duration::from_secs(5), || error().is_empty()));
}

#[test]
fn load_balancer_source_ranges_are_enforced() {
    let ranges = |text| format!("  loadBalancerSourceRanges: [{text}]");
    let other_range = ranges("192.0.2.0/24");
    let testbed = start_testbed(
        "svcrange",
        &EchoService { spec: &other_range, backends: &backends(), ..EchoService::default() },
        "",
    );
    testbed.accounting.expect(["source_range"]);
    assert!(connect(&testbed.server, (VIP[0], TCP_PORT)).is_err());
    query_tcp(&testbed.pods[2], (VIP[0], TCP_PORT)).unwrap();
    let own_ranges = ranges("198.51.100.0/24, \"2001:db8:51::/48\"");
    testbed.apply_service(&EchoService { spec: &own_ranges, backends: &backends(), ..EchoService::default() });
    for vip in VIP {
        query_tcp(&testbed.server, (vip, TCP_PORT)).unwrap();
    }
}

#[test]
fn fragmented_datagrams_reach_one_backend() {
    let testbed = start_testbed("svcfrag", &EchoService { backends: &backends(), ..EchoService::default() }, "");
    for vip in VIP {
        for bytes in [4_000, 20_000] {
            let reply = query_udp(&testbed.server, (vip, UDP_PORT), bytes).unwrap();
            assert_eq!(reply.observed, reply.local);
        }
    }
    testbed.check_frames();
}

#[test]
fn the_older_service_keeps_a_contested_vip_port() {
    let metadata = "  creationTimestamp: \"2024-01-01T00:00:00Z\"\n";
    let testbed =
        start_testbed("svctwo", &EchoService { metadata, backends: &backends()[..1], ..EchoService::default() }, "");
    let other = EchoService {
        backends: &backends()[1..2],
        metadata: "  creationTimestamp: \"2025-01-01T00:00:00Z\"\n",
        ..EchoService::default()
    };
    testbed.write_policy("other.yaml", &other.manifest().replace("namespace: served", "namespace: another"));
    let is_reported = || {
        let (_, shown, _) =
            if testbed.uses_policy_server { testbed.policy_status(&[]) } else { (0, testbed.log(), String::new()) };
        shown.contains("is already used by Service served/echo") && shown.contains("another")
    };
    assert!(wait_for(Duration::from_secs(5), is_reported), "{}\n{}", testbed.log(), testbed.policy_status(&[]).1);
    for _ in 0..10 {
        assert_eq!(query_tcp(&testbed.server, (VIP[0], TCP_PORT)).unwrap().backend, "p1");
    }
}

#[test]
fn inbound_connections_survive_a_gateway_restart() {
    let (_folder, state_config) = vipgate_tests::session_state();
    let mut testbed =
        start_testbed("svckill", &EchoService { backends: &backends(), ..EchoService::default() }, &state_config);
    let mut connections: Vec<_> = (0..20).map(|n| connect(&testbed.server, (VIP[n % 2], TCP_PORT)).unwrap()).collect();
    let before: Vec<_> = connections.iter_mut().map(|it| it.query().unwrap()).collect();
    testbed.stop("KILL");
    testbed.start(&format!("node: node-1\n{state_config}"));
    let after: Vec<_> = connections.iter_mut().map(|it| it.query().unwrap()).collect();
    assert_eq!(before, after);
    assert!(testbed.service_status()["sessions"].as_u64().unwrap() >= 20, "{}", testbed.service_status());
}
