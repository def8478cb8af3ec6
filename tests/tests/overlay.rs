//! Overlay: a pod on a node whose kernel sends and receives its packets in VXLAN.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_lab::Host;
use vipgate_lab::reflector::{query_http_at, start_at};
use vipgate_tests::iperf3;
use vipgate_tests::{SERVER, Testbed, VIP_B, wait_for};

/// Addresses of the pod, of its node (p4), and of the gateway.
const POD: [&str; 2] = ["10.50.0.5", "fd00:50::5"];
const NODE: &str = "10.1.0.31";
const GATEWAY: &str = "10.1.0.1";
const OVERLAY: &str = "overlay: {address: 10.1.0.1}";
/// MAC addresses in the overlay: the node's, and the one shared by all gateways.
const NODE_MAC: &str = "0e:00:00:00:00:31";
const GATEWAY_MAC: &str = "0e:00:00:00:00:ff";

/// Manifests of the node with these pod CIDRs, and of the pod as an endpoint of tenant B.
fn manifests(pods: &str) -> String {
    let slice = |family: &str, address: &str| {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: far-{family}, namespace: tenant-b, labels: {{kubernetes.io/service-name: web}}}}\n\
             addressType: {family}\nports: [{{name: https, port: 8443}}]\n\
             endpoints: [{{addresses: [\"{address}\"], conditions: {{ready: true}}}}]\n"
        )
    };
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: OverlayNode\nmetadata: {{name: node-4}}\n\
         spec: {{address: {NODE}, vni: 77, mac: \"{NODE_MAC}\", podCIDRs: [{pods}]}}\n{}{}",
        slice("IPv4", POD[0]),
        slice("IPv6", POD[1])
    )
}

/// Makes a host a node of the overlay with this VNI, and adds the pod's addresses to it.
fn join(host: &Host, own: &str, vni: &str) {
    let vxlan = ["link", "add", "vx0", "type", "vxlan", "id", vni, "dstport", "8472", "local", own, "nolearning"];
    host.ip(&[&vxlan[..], &["dev", "eth0"]].concat()).unwrap();
    host.ip(&["link", "set", "vx0", "address", NODE_MAC, "mtu", "1450", "up"]).unwrap();
    let _ = host.output(&["ethtool", "-K", "vx0", "tx", "off", "tso", "off", "gso", "off", "gro", "off"]);
    host.output(&["bridge", "fdb", "add", GATEWAY_MAC, "dev", "vx0", "dst", GATEWAY]).unwrap();
    for (pod, router, net) in [(POD[0], "169.254.9.9", "198.51.100.0/24"), (POD[1], "fe80::9", "2001:db8:51::/64")] {
        host.ip(&["address", "add", pod, "dev", "lo"]).unwrap();
        host.ip(&["neigh", "add", router, "lladdr", GATEWAY_MAC, "dev", "vx0", "nud", "permanent"]).unwrap();
        host.ip(&["route", "add", net, "via", router, "dev", "vx0", "onlink", "src", pod]).unwrap();
    }
}

#[test]
fn a_pod_behind_vxlan_uses_its_vip_and_is_reached_via_its_node() {
    let mut testbed = Testbed::new("overlay");
    testbed.write_policy("overlay.yaml", &manifests("10.50.0.0/24, \"fd00:50::/64\""));
    testbed.start(OVERLAY);
    let node = &testbed.pods[3];
    join(node, NODE, "77");
    testbed.check_source_addresses(node, SERVER, VIP_B);

    // Large packets in both directions: they fit with the overlay's headers, or TCP learns the path MTU. Packets in
    // flight at the end aren't counted.
    let _server = iperf3::start_server(&testbed.server, testbed.folder.path());
    for server in SERVER {
        for direction in [&[][..], &["-R"]] {
            let received = iperf3::measure(node, &[&["-n", "20M", "-c", server], direction].concat(), "bytes");
            assert!(received >= 10e6, "{server} {direction:?}: {received} bytes");
        }
    }
    // Clients outside reach the pod as a backend of the Service.
    start_at(node, &POD, 8443);
    for vip in VIP_B {
        let reachable = || {
            (0..12).any(|_| {
                let reply = query_http_at(&testbed.server, (vip.parse::<std::net::IpAddr>().unwrap(), 443).into());
                reply.is_ok()
            })
        };
        assert!(reachable(), "no reply at {vip}: {:?}", testbed.query(&["drops"]));
    }
    testbed.check_frames();
    assert!(testbed.metric("vipgate_drops_total", "reason=\"peer_unknown\"") < 0.5);
}

/// The tunnel headers extend packets that just fit a packet buffer beyond it.
#[test]
fn jumbo_packets_pass_through_the_overlay() {
    let mut testbed = Testbed::new("overlay-jumbo");
    testbed.write_policy("overlay.yaml", &manifests("10.50.0.0/24, \"fd00:50::/64\""));
    testbed.set_path_mtu(3, 9000);
    testbed.start(OVERLAY);
    let node = &testbed.pods[3];
    join(node, NODE, "77");
    node.ip(&["link", "set", "vx0", "mtu", "8950"]).unwrap();
    let ping = |payload: u32, server: &str| {
        let payload = payload.to_string();
        node.output(&["ping", "-c", "1", "-W", "1", "-M", "do", "-s", &payload, server])
    };
    for (server, headers) in [(SERVER[0], 28), (SERVER[1], 48)] {
        // 3826 bytes with their Ethernet header fill a page's buffer; a page holds the tunnel headers of 3776.
        for length in (3770..=3830).step_by(2).chain([5000, 7616, 7618, 7666, 7668, 8949, 8950]) {
            let reply = ping(length - headers, server);
            assert!(reply.is_ok(), "{server}, {length} bytes: {reply:?} {:?}", testbed.query(&["drops"]));
        }
    }
    testbed.check_frames();
}

#[test]
fn packets_from_unknown_overlay_nodes_are_dropped() {
    let mut testbed = Testbed::new("overlay-no");
    testbed.write_policy("overlay.yaml", &manifests("10.50.0.0/24, \"fd00:50::/64\""));
    testbed.start(OVERLAY);
    let unknown = || testbed.metric("vipgate_drops_total", "reason=\"peer_unknown\"");
    let spoofed = || testbed.metric("vipgate_drops_total", "reason=\"spoofed_source\"");
    // Another host sends from the pod's address, and the node uses another VNI.
    join(&testbed.pods[0], "10.1.0.11", "77");
    join(&testbed.pods[3], NODE, "78");
    testbed.accounting.expect_exactly([("peer_unknown", 4)]);
    for host in [&testbed.pods[0], &testbed.pods[3]] {
        let before = unknown();
        assert!(host.output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", SERVER[0]]).is_err());
        assert!(unknown() - before > 1.5, "{:?}", testbed.query(&["drops"]));
    }
    // The node sends from an address outside of its pod CIDRs.
    testbed.pods[3].ip(&["link", "del", "vx0"]).unwrap();
    for pod in POD {
        testbed.pods[3].ip(&["address", "del", pod, "dev", "lo"]).unwrap();
    }
    join(&testbed.pods[3], NODE, "77");
    assert!(testbed.pods[3].output(&["ping", "-c", "1", "-W", "2", SERVER[0]]).is_ok());
    let version = testbed.query(&["status"])["policy"]["version"].clone();
    testbed.write_policy("overlay.yaml", &manifests("10.51.0.0/24"));
    let changed = || testbed.query(&["status"])["policy"]["version"] != version;
    assert!(wait_for(Duration::from_secs(10), changed));
    let before = spoofed();
    testbed.accounting.expect_exactly([("spoofed_source", 2)]);
    assert!(testbed.pods[3].output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", SERVER[0]]).is_err());
    assert!(spoofed() - before > 1.5, "{:?}", testbed.query(&["drops"]));
    testbed.check_frames();
}
