//! Nothing leaves by the node: without an agent, without policy, without a gateway, or when somebody changes the kernel.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use vipgate_lab::reflector::{UDP, query_http, query_udp};
use vipgate_tests::cluster::{L2_VIPS, SERVER, TUNNEL_PORT, sleep_ms};
use vipgate_tests::wait_for;

use crate::scenario::{NODE_ADDRESS, Scenario, manifests, neighbor};

/// A port whose datagrams nobody reads.
const DISCARD: u16 = 9;

#[test]
fn a_pod_that_policy_does_not_know_is_held_and_its_first_packet_translated() {
    let scenario = Scenario::start("node-hold");
    let uplink = scenario.capture_leaks();
    let server = SERVER[0].parse().unwrap();
    let pod = scenario.unknown().host.clone();
    // One datagram: it is held, not lost.
    let query = thread::spawn(move || {
        let began = Instant::now();
        query_udp(&pod, server).map(|source| (source, began.elapsed()))
    });
    sleep_ms(400);
    scenario.name_unknown();
    let (source, elapsed) = query.join().unwrap().unwrap_or_else(|error| panic!("{error}\n{}", scenario.evidence()));
    assert_eq!(source, L2_VIPS[0]);
    println!("held for {} ms", elapsed.as_millis());
    assert_eq!(query_http(&scenario.unknown().host, server).unwrap(), L2_VIPS[0]);
    let leaked = uplink.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
}

#[test]
fn rules_stay_when_the_agent_is_killed_and_the_next_one_goes_on() {
    let mut scenario = Scenario::start("node-kill");
    let uplink = scenario.capture_leaks();
    let server = SERVER[0].parse().unwrap();
    scenario.node.stop("KILL");
    assert_eq!(query_http(&scenario.covered().host, server).unwrap(), L2_VIPS[0]);
    assert!(query_udp(&scenario.unknown().host, server).is_err(), "an unknown pod's packets are dropped");
    scenario.node.start("");
    scenario.name_unknown();
    let known = || query_udp(&scenario.unknown().host, server).is_ok_and(|source| source == L2_VIPS[0]);
    assert!(wait_for(Duration::from_secs(10), known), "{}", scenario.evidence());
    scenario.check_kernel_agrees();
    scenario.node.stop("TERM");
    assert_eq!(query_http(&scenario.covered().host, server).unwrap(), L2_VIPS[0]);
    let leaked = uplink.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
}

/// A transaction of nftables stops no packet: those that are under way meet parts of both tables. Many are under way here.
#[test]
fn each_packet_goes_into_the_tunnel_while_agents_start_and_repair() {
    let mut scenario = Scenario::start("node-flood");
    let (host, pod) = (scenario.node.host.clone(), scenario.covered().clone());
    for command in [
        "add table ip seen",
        "add counter ip seen sent",
        "add counter ip seen steered",
        "add chain ip seen pre { type filter hook prerouting priority -400; }",
        "add chain ip seen post { type filter hook postrouting priority 400; }",
        &format!("add rule ip seen pre ip saddr {} udp dport {DISCARD} counter name sent", pod.addresses[0]),
        &format!("add rule ip seen post oifname vipgate0 udp dport {DISCARD} counter name steered"),
    ] {
        host.output(&["nft", command]).unwrap();
    }
    let _discards = scenario.cluster.server.run(|| UdpSocket::bind(("0.0.0.0", DISCARD))).join().unwrap().unwrap();
    // Its neighbor is resolved then.
    assert_eq!(query_http(&pod.host, SERVER[0].parse().unwrap()).unwrap(), L2_VIPS[0]);
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let flow = pod.host.run(move || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect((SERVER[0], DISCARD))?;
        while !flag.load(Relaxed) {
            (0..20).try_for_each(|_| socket.send(b"x").map(drop))?;
            thread::sleep(Duration::from_micros(300));
        }
        Ok(())
    });
    for _ in 0..12 {
        scenario.node.stop("KILL");
        scenario.node.start("");
    }
    for repairs in 1..=5 {
        host.output(&["nft", "add counter inet vipgate foreign"]).unwrap();
        let repaired = || scenario.node.log().matches("\"event\":\"kernel_repaired\"").count() >= repairs;
        assert!(wait_for(Duration::from_secs(5), repaired), "{}", scenario.evidence());
    }
    stop.store(true, Relaxed);
    flow.join().unwrap().unwrap();
    let packets = |counter: &str| -> u64 {
        let text = host.output(&["nft", "list", "counter", "ip", "seen", counter]).unwrap();
        text.split("packets ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap()
    };
    let [sent, steered] = ["sent", "steered"].map(packets);
    println!("{steered} of {sent} packets steered");
    assert!(sent > 20_000 && steered == sent, "{steered} of {sent} packets: {}", scenario.evidence());
}

#[test]
fn without_the_policy_server_the_last_policy_stays_also_after_a_restart() {
    let mut scenario = Scenario::start("node-cache");
    let server = SERVER[0].parse().unwrap();
    // The cache is written at most once a second.
    sleep_ms(1_500);
    scenario.cluster.policyd.take().unwrap().kill();
    scenario.node.stop("KILL");
    scenario.node.start("");
    assert_eq!(query_http(&scenario.covered().host, server).unwrap(), L2_VIPS[0], "{}", scenario.evidence());
}

#[test]
fn what_somebody_else_changes_is_in_place_again() {
    let scenario = Scenario::start("node-repair");
    let server = SERVER[0].parse().unwrap();
    let host = &scenario.node.host;
    let changes: [&[&str]; 6] = [
        &["nft", "flush ruleset"],
        &["nft", "delete table inet vipgate"],
        &["nft", "flush map inet vipgate endpoints4"],
        &["ip", "link", "del", "vipgate0"],
        &["ip", "rule", "del", "priority", "191"],
        &["ip", "route", "flush", "table", "7681"],
    ];
    for change in changes {
        host.output(change).unwrap();
        let works = || query_http(&scenario.covered().host, server).is_ok_and(|source| source == L2_VIPS[0]);
        assert!(wait_for(Duration::from_secs(15), works), "{change:?}\n{}", scenario.evidence());
        scenario.check_kernel_agrees();
    }
}

#[test]
fn without_any_gateway_pods_receive_icmp_errors_and_nothing_leaves() {
    let mut scenario = Scenario::start("node-none");
    let uplink = scenario.capture_leaks();
    for gateway in &mut scenario.cluster.gateways {
        gateway.kill();
    }
    let unreachable = || scenario.node.query(&["status"])["pods"]["unreachable"] == 2;
    assert!(wait_for(Duration::from_secs(10), unreachable), "{}", scenario.evidence());
    let error = query_http(&scenario.covered().host, SERVER[0].parse().unwrap()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable), "{error}");
    let leaked = uplink.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
}

#[test]
fn a_flow_that_was_masqueraded_goes_to_a_gateway_once_policy_covers_its_pod() {
    let scenario = Scenario::start("node-covered");
    let (pod, remote) = (scenario.uncovered().clone(), neighbor());
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    // The kernel would keep the entry of a flow that never pauses.
    let flow = pod.host.run(move || {
        let socket = UdpSocket::bind("0.0.0.0:4444")?;
        while !flag.load(Relaxed) {
            // Without a route there may be an error, later.
            let _ = socket.send_to(b"still here", (remote, UDP));
            sleep_ms(20);
        }
        Ok(())
    });
    let entries = || scenario.node.host.output(&["cat", "/proc/net/nf_conntrack"]).unwrap();
    let translated = |address: &str| entries().contains(&format!("dst={address} sport={UDP} dport=4444"));
    assert!(wait_for(Duration::from_secs(10), || translated(NODE_ADDRESS)), "it isn't masqueraded: {}", entries());
    let all = [(&scenario.node.pods[0], "tenant-b"), (&pod, "tenant-b")];
    scenario.cluster.write_policy("node-1.yaml", &manifests(&scenario.node, &all));
    // The kernel deletes masqueraded entries whose interface changes, and the agent those of other source NAT.
    assert!(wait_for(Duration::from_secs(10), || translated(&pod.addresses[0])), "{}", scenario.evidence());
    let uplink = scenario.cluster.capture_uplink(&scenario.node, &format!("dst host {remote}"));
    sleep_ms(300);
    stop.store(true, Relaxed);
    flow.join().unwrap().unwrap();
    let leaked = uplink.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
}

/// Tunnel packets of a host that is no gateway: an inner frame for a pod, with a source outside.
#[test]
fn a_node_takes_tunnel_packets_of_gateways_only() {
    let scenario = Scenario::start("node-foreign");
    let node: std::net::IpAddr = NODE_ADDRESS.parse().unwrap();
    let sender = scenario.neighbor_host.run(move || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        for _ in 0..5 {
            socket.send_to(&[8, 0, 0, 0, 0, 0, 7, 0], (node, TUNNEL_PORT))?;
        }
        Ok(())
    });
    sender.join().unwrap().unwrap();
    let counted = || {
        let status = scenario.node.query(&["status"]);
        let drops = status["drops"].as_array().unwrap().clone();
        drops.iter().any(|drop| drop["reason"] == "tunnel_unknown" && drop["packets"] == 5)
    };
    assert!(wait_for(Duration::from_secs(5), counted), "{}", scenario.evidence());
}

#[test]
fn without_ipv6_on_the_node_nothing_is_out_of_line() {
    let mut scenario = Scenario::without_agent("node-v4");
    scenario.node.host.sysctl("net.ipv6.conf.all.disable_ipv6", 1).unwrap();
    scenario.node.host.sysctl("net.ipv6.conf.default.disable_ipv6", 1).unwrap();
    scenario.node.start("");
    scenario.node.wait_for_pods(4);
    assert_eq!(query_http(&scenario.covered().host, SERVER[0].parse().unwrap()).unwrap(), L2_VIPS[0]);
    // Each `status` compares the kernel with the plan.
    for _ in 0..3 {
        scenario.check_kernel_agrees();
    }
    assert!(!scenario.node.log().contains("kernel_repaired"), "{}", scenario.evidence());
    assert_eq!(scenario.node.query(&["status"])["kernel"]["repairs"], 0, "{}", scenario.evidence());
}

#[test]
fn detached_a_node_forwards_as_before_and_a_running_agent_is_not_detached() {
    let mut scenario = Scenario::start("node-detach");
    let (server, host) = (SERVER[0].parse().unwrap(), scenario.node.host.clone());
    let error = scenario.node.detach().unwrap_err();
    assert!(error.to_string().contains("an agent runs here"), "{error}");
    assert_eq!(query_http(&scenario.covered().host, server).unwrap(), L2_VIPS[0]);
    scenario.node.stop("TERM");
    assert_eq!(query_http(&scenario.covered().host, server).unwrap(), L2_VIPS[0], "as before: stopped isn't detached");
    scenario.node.detach().unwrap();
    for (command, trace) in [
        (&["nft", "list", "tables"][..], "inet vipgate"),
        (&["ip", "rule"], "fwmark"),
        (&["ip", "-6", "rule"], "fwmark"),
        (&["ip", "route", "show", "table", "all"], "vipgate0"),
        (&["ip", "link"], "vipgate0"),
    ] {
        let output = host.output(command).unwrap();
        assert!(!output.contains(trace), "{command:?}: {output}");
    }
    // By the node's masquerading, where a way back leads to the node.
    let source = query_http(&scenario.covered().host, neighbor()).unwrap();
    assert_eq!(source, NODE_ADDRESS);
    // A second time there is nothing to remove.
    scenario.node.detach().unwrap();
    scenario.node.start("");
    scenario.node.wait_for_pods(4);
    assert_eq!(query_http(&scenario.covered().host, server).unwrap(), L2_VIPS[0]);
}

#[test]
fn with_the_table_of_the_boot_nothing_leaves_before_the_agent_runs() {
    let mut scenario = Scenario::without_agent("node-boot");
    // The configuration of an agent that ran before.
    scenario.node.start("");
    scenario.node.stop("TERM");
    scenario.node.detach().unwrap();
    let (remote, uplink) = (neighbor(), scenario.capture_leaks());
    let masqueraded = query_udp(&scenario.covered().host, remote).unwrap();
    assert_eq!(masqueraded, NODE_ADDRESS, "without the table it leaves by the node");
    scenario.node.load_boot_table();
    for pod in &scenario.node.pods {
        assert!(query_udp(&pod.host, remote).is_err());
        assert!(query_http(&pod.host, remote).is_err());
    }
    scenario.node.start("");
    scenario.node.wait_for_pods(4);
    assert_eq!(query_http(&scenario.covered().host, SERVER[0].parse().unwrap()).unwrap(), L2_VIPS[0]);
    assert_eq!(query_udp(&scenario.uncovered().host, remote).unwrap(), NODE_ADDRESS);
    scenario.check_kernel_agrees();
    let leaked = uplink.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
}
