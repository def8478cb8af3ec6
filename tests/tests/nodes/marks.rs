//! Marks of others beside those of the agent.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use vipgate_lab::Host;
use vipgate_lab::reflector::{query_http, query_http_at, start_at};
use vipgate_tests::cluster::{L2_VIPS, LINE_PORT, SERVER};
use vipgate_tests::wait_for;

use crate::scenario::{NODE_ADDRESS, Scenario, neighbor};

/// A port of the node that leads to a pod.
const HOST_PORT: u16 = 8080;

/// Rules of the CNI plugin portmap for that port: what a pod or the node itself sends there is marked, and what is
/// marked is masqueraded.
fn add_portmap_rules(node: &Host, pod: &str) {
    let translate = format!("fib daddr type local tcp dport {HOST_PORT} jump CNI-DN");
    let table = format!(
        "table ip nat {{\n\
         \x20 chain CNI-HOSTPORT-SETMARK {{\n    meta mark set meta mark | 0x2000\n  }}\n\
         \x20 chain CNI-DN {{\n    ip saddr {{ 10.244.1.0/24, 127.0.0.1, {NODE_ADDRESS} }} jump CNI-HOSTPORT-SETMARK\n\
         \x20   meta l4proto tcp dnat to {pod}:{LINE_PORT}\n  }}\n\
         \x20 chain PREROUTING {{\n    type nat hook prerouting priority dstnat;\n    {translate}\n  }}\n\
         \x20 chain OUTPUT {{\n    type nat hook output priority -100;\n    {translate}\n  }}\n\
         \x20 chain CNI-HOSTPORT-MASQ {{\n    meta mark & 0x2000 == 0x2000 masquerade\n  }}\n\
         \x20 chain POSTROUTING {{\n    type nat hook postrouting priority srcnat;\n    jump CNI-HOSTPORT-MASQ\n  }}\n\
         }}\n"
    );
    node.output(&["nft", &table]).unwrap();
}

/// Places and bits of others' rules.
fn conflicts(scenario: &Scenario) -> Vec<(String, u64)> {
    let status = scenario.node.query(&["status"]);
    let users = status["mark_users"].as_array().unwrap().iter();
    users.map(|user| (user["place"].as_str().unwrap().to_owned(), user["bits"].as_u64().unwrap())).collect()
}

#[test]
fn the_marks_of_portmap_and_of_the_agent_leave_each_other_alone() {
    let scenario = Scenario::start("node-portmap");
    let (covered, other) = (scenario.covered(), scenario.uncovered());
    start_at(&other.host, &other.addresses.each_ref().map(String::as_str), LINE_PORT);
    add_portmap_rules(&scenario.node.host, &other.addresses[0]);
    // Inside the cluster pods have their own address, unless portmap marks them.
    let direct = SocketAddr::new(other.addresses[0].parse().unwrap(), LINE_PORT);
    let reached = || query_http_at(&covered.host, direct).is_ok();
    assert!(wait_for(Duration::from_secs(10), reached), "{}", scenario.evidence());
    assert_eq!(query_http_at(&covered.host, direct).unwrap(), covered.addresses[0]);
    let host_port = SocketAddr::new(NODE_ADDRESS.parse::<IpAddr>().unwrap(), HOST_PORT);
    let seen_from = |host: &Host| {
        let seen = query_http_at(host, host_port);
        seen.unwrap_or_else(|error| panic!("{error}\n{}", scenario.evidence()))
    };
    // portmap masquerades what a pod sends to the node's port.
    assert_ne!(seen_from(&covered.host), covered.addresses[0]);
    // The node's own packets, which portmap marks, too.
    seen_from(&scenario.node.host);
    // To the outside.
    assert_eq!(query_http(&covered.host, SERVER[0].parse().unwrap()).unwrap(), L2_VIPS[0], "{}", scenario.evidence());
    assert_eq!(query_http(&other.host, neighbor()).unwrap(), NODE_ADDRESS, "{}", scenario.evidence());
    scenario.check_kernel_agrees();
}

#[test]
fn who_uses_the_same_bits_is_named() {
    let mut scenario = Scenario::start("node-conflict");
    let host = scenario.node.host.clone();
    add_portmap_rules(&host, &scenario.uncovered().addresses[0]);
    host.ip(&["-6", "rule", "add", "fwmark", "0x100/0x300", "lookup", "main", "priority", "500"]).unwrap();
    // Bits that kube-proxy and CNIs use, too.
    scenario.node.stop("TERM");
    scenario.node.start("mark_mask: 0x3f00");
    let expected: [(&str, u64); 3] = [
        ("IPv6 rule 500", 0x300),
        ("chain CNI-HOSTPORT-MASQ of table ip nat", 0x2000),
        ("chain CNI-HOSTPORT-SETMARK of table ip nat", 0x2000),
    ];
    let expected = expected.map(|(place, bits)| (place.to_owned(), bits));
    assert!(wait_for(Duration::from_secs(10), || conflicts(&scenario) == expected), "{:?}", conflicts(&scenario));
    let text = scenario.node.run(&["status"]);
    assert!(text.contains("chain CNI-HOSTPORT-MASQ of table ip nat uses bits 0x2000 of `mark_mask`"), "{text}");
    assert!((scenario.node.metric("vipgate_node_mark_conflicts", "") - 3.0).abs() < 0.5);
    assert!(scenario.node.log().contains("\"event\":\"mark_conflict\""), "{}", scenario.node.log());
    // With bits that are free.
    scenario.node.stop("TERM");
    scenario.node.start("mark_mask: 0x1f0000");
    scenario.node.wait_for_pods(4);
    assert_eq!(query_http(&scenario.covered().host, SERVER[0].parse().unwrap()).unwrap(), L2_VIPS[0]);
    scenario.check_kernel_agrees();
}
