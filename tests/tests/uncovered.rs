//! Uncovered pods: with `pod_cidrs`, traffic that no policy covers is dropped before, with and after a policy, and
//! traffic inside of the cluster is not translated. Priority tags make no difference, for covered pods either.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use vipgate_lab::reflector::query_udp;
use vipgate_lab::{Host, run};
use vipgate_tests::{EXCLUDED, POD_FILTER, SERVER, Testbed, VIP_A, VIP_B, wait_for};

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
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
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
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    testbed.start_policyd(CLUSTER);
    assert!(wait_for(Duration::from_secs(20), || testbed.is_ready()), "{}", testbed.log());
    check_cluster_traffic(&testbed);
    // The replies to what waited in the rings have arrived, too: none is left at a router that still resolves the VIP.
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.stop("TERM");
    check_uncovered(&mut testbed, "");
}

/// Adds tags with VLAN ID 0 and these types, the innermost first, to all frames that a pod sends.
fn add_priority_tags(testbed: &Testbed, pod: usize, types: &[u16]) {
    let [source, object] = ["tags.c", "tags.o"].map(|name| testbed.folder.path().join(name).display().to_string());
    let pushes: Vec<_> = types.iter().map(|kind| format!("push(frame, {}, 5 << 13); ", kind.to_be())).collect();
    // bpf_skb_vlan_push with priority 5, and TC_ACT_UNSPEC: other filters add their tags, too.
    let text = format!(
        "static long (*const push)(void *, unsigned short, unsigned short) = (void *)18;\n\
         __attribute__((section(\"tc\"), used)) int tags(void *frame) {{ {}return -1; }}\n\
         __attribute__((section(\"license\"), used)) char terms[] = \"GPL\";\n",
        pushes.concat()
    );
    fs::write(&source, text).unwrap();
    run(&["clang", "-O2", "-g", "-target", "bpf", "-c", &source, "-o", &object]).unwrap();
    let filter = ["tc", "filter", "add", "dev", "eth0", "egress", "bpf", "da", "obj", &object, "sec", "tc"];
    testbed.pods[pod].output(&filter).unwrap();
}

/// Pods with priority tags, in an XDP mode, which iproute2 calls `link_mode`.
fn check_priority_tags(testbed: &mut Testbed, mode: &str, link_mode: &str) {
    testbed.uses_policy_server = false;
    // The tags are in the frames, as on a physical wire, not in metadata of the link.
    let offloads = ["ethtool", "-K", "to-gw", "txvlan", "off", "tx-vlan-stag-hw-insert", "off"];
    testbed.switch.output(&offloads).unwrap();
    testbed.start(&format!("{CLUSTER}\nxdp: {{mode: {mode}}}"));
    let capture = testbed.capture(POD_FILTER);
    for pod in &testbed.pods {
        pod.output(&["tc", "qdisc", "add", "dev", "eth0", "clsact"]).unwrap();
    }
    for (pod, types, vips) in [(0, &[0x8100][..], VIP_A), (1, &[0x8100, 0x88a8][..], VIP_A), (2, &[0x88a8][..], VIP_B)]
    {
        add_priority_tags(testbed, pod, types);
        testbed.check_source_addresses(&testbed.pods[pod], SERVER, vips);
    }
    add_priority_tags(testbed, 3, &[0x8100]);
    testbed.accounting.expect_exactly([("no_policy", 2)]);
    check_unreachable(testbed, &[3]);
    // Three tags are more than the program removes.
    add_priority_tags(testbed, 0, &[0x88a8, 0x8100]);
    testbed.accounting.expect(["not_ours"]);
    check_unreachable(testbed, &[0]);
    assert!(testbed.query(&["drops"])["not_ours"].as_u64().unwrap() >= 2);

    // The tc guard alone.
    testbed.process().signal("STOP").unwrap();
    for interface in ["gw-in", "gw-out"] {
        testbed.gateway.ip(&["link", "set", interface, link_mode, "off"]).unwrap();
    }
    check_unreachable(testbed, &[0, 1, 2, 3]);
    testbed.process().signal("CONT").unwrap();
    assert!(testbed.metric("vipgate_steered_packets_total", "outcome=\"guarded\"") >= 8.0);
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    testbed.check_frames();
}

#[test]
fn pods_with_priority_tags_are_translated_or_dropped() {
    check_priority_tags(&mut Testbed::new("tags"), "native", "xdpdrv");
}

#[test]
fn pods_with_priority_tags_are_translated_or_dropped_in_generic_mode() {
    check_priority_tags(&mut Testbed::new("tags-generic"), "generic", "xdpgeneric");
}
