//! Egress and inbound traffic of pods behind a node agent.

use std::net::SocketAddr;
use std::time::Duration;
use vipgate_lab::reflector::{query_http, query_http_at, query_udp, start_at};
use vipgate_tests::cluster::{HTTP_PORT, L2_VIPS, LINE_PORT, SERVER};
use vipgate_tests::wait_for;

use crate::scenario::{NODE_ADDRESS, Scenario, neighbor};

#[test]
fn covered_pods_leave_by_their_vip_and_others_as_without_vipgate() {
    let scenario = Scenario::start("node-egress");
    let uplink = scenario.capture_leaks();
    for (server, vip) in SERVER.into_iter().zip(L2_VIPS) {
        let server = server.parse().unwrap();
        assert_eq!(query_http(&scenario.covered().host, server).unwrap(), vip, "{}", scenario.evidence());
        assert_eq!(query_udp(&scenario.covered().host, server).unwrap(), vip);
    }
    let leaked = uplink.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
    // The CNI's masquerading applies to a pod without a policy.
    assert_eq!(query_http(&scenario.uncovered().host, neighbor()).unwrap(), NODE_ADDRESS);
    let endpoints = scenario.node.query(&["endpoints"]);
    println!("{}\n{endpoints}", scenario.node.run(&["status"]));
    let trace = scenario.node.run(&["trace", &scenario.covered().addresses[0], SERVER[0]]);
    assert!(trace.contains("to gateway gw-"), "{trace}");
    scenario.check_kernel_agrees();
}

#[test]
fn clients_reach_a_pod_by_the_vip_and_directly() {
    let scenario = Scenario::start("node-inbound");
    let pod = scenario.covered();
    start_at(&pod.host, &pod.addresses.each_ref().map(String::as_str), LINE_PORT);
    for ((vip, address), server) in L2_VIPS.into_iter().zip(&pod.addresses).zip(SERVER) {
        let frontend = SocketAddr::new(vip.parse().unwrap(), HTTP_PORT);
        // Other backends of the Service don't listen there.
        let reached = || query_http_at(&scenario.cluster.server, frontend).is_ok_and(|client| client == server);
        assert!(wait_for(Duration::from_secs(30), reached), "{}", scenario.evidence());
        let direct = SocketAddr::new(address.parse().unwrap(), LINE_PORT);
        let client = query_http_at(&scenario.neighbor_host, direct).unwrap();
        assert!(client.parse::<std::net::IpAddr>().is_ok(), "{client}");
    }
}
