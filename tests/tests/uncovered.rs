//! Uncovered pods: with `pod_cidrs`, traffic that no policy covers is dropped before, with and after a policy, and
//! traffic inside of the cluster is not translated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::Host;
use vipgate::lab::reflector::query_udp;
use vipgate_tests::{EXCLUDED, POD_FILTER, SERVER, Testbed, VIP_A, wait_for};

/// Pod CIDRs of the testbed; the server's other addresses serve as Service CIDRs.
const CLUSTER: &str = "pod_cidrs: [10.1.0.0/16, \"fd00:1::/32\"]\nservice_cidrs: [10.9.0.0/16, \"fd00:9::/32\"]";

fn observed_source(pod: &Host, server: &str) -> Option<String> {
    query_udp(pod, server.parse().unwrap()).ok()
}

/// Asserts that these pods get no reply from any server. All wait at the same time.
fn check_unreachable(testbed: &Testbed, pods: &[usize]) {
    std::thread::scope(|scope| {
        for (pod, server) in pods.iter().flat_map(|pod| SERVER.map(|server| (*pod, server))) {
            let host = &testbed.pods[pod];
            scope.spawn(move || assert_eq!(observed_source(host, server), None, "pod {pod} reaches {server}"));
        }
    });
}

/// Addresses in the drops with `no_policy`.
fn dropped_addresses(testbed: &Testbed) -> Vec<String> {
    let drops = testbed.query(&["drops", "--reason", "no_policy"]).to_string();
    let pods = ["10.1.0.31", "fd00:1::31", "10.1.0.11"].into_iter();
    pods.filter(|address| drops.contains(&format!("\"{address}\""))).map(str::to_owned).collect()
}

/// Tenants' pods are covered, p4 is not; the gateway gets pod CIDRs from `extra` or from its policy server.
fn check_uncovered(testbed: &mut Testbed, extra: &str) {
    let capture = testbed.capture(POD_FILTER);
    testbed.start(extra);
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.accounting.expect_exactly([("no_policy", 2)]);
    check_unreachable(testbed, &[3]);
    let cluster = &testbed.query(&["status"])["policy"]["cluster"];
    assert!(cluster["drop_uncovered"] == true && cluster["pods"].to_string().contains("10.1.0.0/"), "{cluster}");
    assert_eq!(dropped_addresses(testbed), ["10.1.0.31", "fd00:1::31"]);
    let trace =
        testbed.query(&["trace", "--from", "10.1.0.31", "--to", "198.51.100.10:53", "--proto", "udp"]).to_string();
    assert!(trace.contains("no_policy") && trace.contains("doesn't leave the cluster"), "{trace}");

    let original = testbed.read_policy("tenant-a.yaml");
    // p1 is removed from its slice.
    testbed
        .write_policy("tenant-a.yaml", &original.replace("10.1.0.11", "10.1.0.99").replace("fd00:1::11", "fd00:1::99"));
    let covers = || testbed.query(&["endpoints"]).to_string().contains("10.1.0.11\"");
    assert!(wait_for(Duration::from_secs(10), || !covers()), "{}", testbed.log());
    testbed.accounting.expect_exactly([("no_policy", 4)]);
    check_unreachable(testbed, &[0, 3]);
    assert!(dropped_addresses(testbed).contains(&"10.1.0.11".to_owned()));

    // Without a running gateway.
    testbed.stop("KILL");
    check_unreachable(testbed, &[0, 3]);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address leaked");
    testbed.write_policy("tenant-a.yaml", &original);
}

/// Addresses inside of the cluster are reached by every pod without translation.
fn check_cluster_traffic(testbed: &Testbed) {
    for (pod, own) in [(0, ["10.1.0.11", "fd00:1::11"]), (3, ["10.1.0.31", "fd00:1::31"])] {
        for (server, own) in EXCLUDED.into_iter().zip(own) {
            assert_eq!(observed_source(&testbed.pods[pod], server).as_deref(), Some(own), "pod {pod} to {server}");
        }
    }
}

#[test]
fn uncovered_pods_never_leak() {
    let mut testbed = Testbed::new("uncovered");
    testbed.uses_policy_server = false;
    check_uncovered(&mut testbed, CLUSTER);
    // The program that the previous process left attached stays in effect until the next one starts with another
    // configuration.
    testbed.start(&format!("{CLUSTER}\nuncovered: pass"));
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.check_source_addresses(&testbed.pods[3], SERVER, ["10.1.0.31", "fd00:1::31"]);
    check_cluster_traffic(&testbed);
    assert_eq!(dropped_addresses(&testbed), Vec::<String>::new());
    testbed.check_frames();
}

#[test]
fn a_policy_server_distributes_pod_cidrs() {
    let mut testbed = Testbed::new("podcidrs");
    testbed.uses_policy_server = true;
    // Without a policy everything is dropped.
    let capture = testbed.capture(POD_FILTER);
    testbed.spawn_gateway("");
    assert!(
        wait_for(Duration::from_secs(20), || testbed.log().contains("\"event\":\"no_policy\"")),
        "{}",
        testbed.log()
    );
    // Packets wait in the rings until there is a policy: then those of p4 are dropped.
    testbed.accounting.expect_exactly([("no_policy", 2)]);
    check_unreachable(&testbed, &[0, 3]);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address leaked");
    testbed.start_policyd(CLUSTER);
    assert!(wait_for(Duration::from_secs(20), || testbed.is_ready()), "{}", testbed.log());
    check_cluster_traffic(&testbed);
    // The replies to what waited in the rings have arrived, too: none is left at a router that still resolves the VIP.
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.stop("TERM");
    check_uncovered(&mut testbed, "");
}
