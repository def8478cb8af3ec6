//! A pod on a node of an overlay network: the node's kernel sends its packets in VXLAN, and takes what comes for it so.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::Host;
use vipgate::lab::peers::{ask_http_at, start_at};
use vipgate_tests::{SERVER, VIP_B, World, wait_for};

/// The pod's addresses, its node's (p4), and the gateway's.
const POD: [&str; 2] = ["10.50.0.5", "fd00:50::5"];
const NODE: &str = "10.1.0.31";
const GATEWAY: &str = "10.1.0.1";
const OVERLAY: &str = "overlay: {address: 10.1.0.1}";
/// Link addresses of the overlay network: the node's, and the one that all gateways have for it.
const NODE_MAC: &str = "0e:00:00:00:00:31";
const ANY_GATEWAY: &str = "0e:00:00:00:00:ff";

/// The node, with these pods, and the pod among the endpoints of tenant B.
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

/// Makes a host a node of the overlay network with this VNI, and puts the pod on it.
fn join(host: &Host, own: &str, vni: &str) {
    let vxlan = ["link", "add", "vx0", "type", "vxlan", "id", vni, "dstport", "8472", "local", own, "nolearning"];
    host.ip(&[&vxlan[..], &["dev", "eth0"]].concat()).unwrap();
    host.ip(&["link", "set", "vx0", "address", NODE_MAC, "mtu", "1450", "up"]).unwrap();
    let _ = host.output(&["ethtool", "-K", "vx0", "tx", "off", "tso", "off", "gso", "off", "gro", "off"]);
    host.output(&["bridge", "fdb", "add", ANY_GATEWAY, "dev", "vx0", "dst", GATEWAY]).unwrap();
    for (pod, router, net) in [(POD[0], "169.254.9.9", "198.51.100.0/24"), (POD[1], "fe80::9", "2001:db8:51::/64")] {
        host.ip(&["address", "add", pod, "dev", "lo"]).unwrap();
        host.ip(&["neigh", "add", router, "lladdr", ANY_GATEWAY, "dev", "vx0", "nud", "permanent"]).unwrap();
        host.ip(&["route", "add", net, "via", router, "dev", "vx0", "onlink", "src", pod]).unwrap();
    }
}

#[test]
fn a_pod_behind_vxlan_leaves_as_its_vip_and_is_reached_through_its_node() {
    let mut world = World::new("overlay");
    world.write_policy("overlay.yaml", &manifests("10.50.0.0/24, \"fd00:50::/64\""));
    world.start(OVERLAY);
    let node = &world.pods[3];
    join(node, NODE, "77");
    world.check_identity(node, SERVER, VIP_B);

    // Large packets both ways: the overlay's headers fit, or TCP hears that they don't. What is under way at the end isn't counted.
    let log = world.folder.path().join("iperf3.log");
    let _server = world.server.spawn(&["iperf3", "-s", "--forceflush"], &log).unwrap();
    let listens = || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("listening"));
    assert!(wait_for(Duration::from_secs(5), listens));
    for server in SERVER {
        for direction in [&[][..], &["-R"]] {
            let command = [&["iperf3", "-J", "-n", "20M", "-c", server], direction].concat();
            let told: serde_json::Value = serde_json::from_str(&node.output(&command).unwrap()).unwrap();
            let received = told["end"]["sum_received"]["bytes"].as_f64().unwrap();
            assert!(received >= 10e6, "{server} {direction:?}: {received} bytes");
        }
    }
    // Clients outside reach the pod as the Service's backend.
    start_at(node, &POD, 8443);
    for vip in VIP_B {
        let answered = || {
            (0..12).any(|_| {
                let asked = ask_http_at(&world.server, (vip.parse::<std::net::IpAddr>().unwrap(), 443).into());
                asked.is_ok()
            })
        };
        assert!(answered(), "nobody answers at {vip}: {:?}", world.ask(&["drops"]));
    }
    world.check_frames();
    assert!(world.metric("vipgate_drops_total", "reason=\"peer_unknown\"") < 0.5);
}

#[test]
fn who_is_no_node_of_the_policy_is_not_believed() {
    let mut world = World::new("overlay-no");
    world.write_policy("overlay.yaml", &manifests("10.50.0.0/24, \"fd00:50::/64\""));
    world.start(OVERLAY);
    let unknown = || world.metric("vipgate_drops_total", "reason=\"peer_unknown\"");
    let spoofed = || world.metric("vipgate_drops_total", "reason=\"spoofed_source\"");
    // Another host says that the pod is its own, and the node speaks of another network.
    join(&world.pods[0], "10.1.0.11", "77");
    join(&world.pods[3], NODE, "78");
    world.ledger.expect_exactly([("peer_unknown", 4)]);
    for host in [&world.pods[0], &world.pods[3]] {
        let before = unknown();
        assert!(host.output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", SERVER[0]]).is_err());
        assert!(unknown() - before > 1.5, "{:?}", world.ask(&["drops"]));
    }
    // A node that speaks for pods of others.
    world.pods[3].ip(&["link", "del", "vx0"]).unwrap();
    for pod in POD {
        world.pods[3].ip(&["address", "del", pod, "dev", "lo"]).unwrap();
    }
    join(&world.pods[3], NODE, "77");
    assert!(world.pods[3].output(&["ping", "-c", "1", "-W", "2", SERVER[0]]).is_ok());
    let version = world.ask(&["status"])["policy"]["version"].clone();
    world.write_policy("overlay.yaml", &manifests("10.51.0.0/24"));
    let changed = || world.ask(&["status"])["policy"]["version"] != version;
    assert!(wait_for(Duration::from_secs(10), changed));
    let before = spoofed();
    world.ledger.expect_exactly([("spoofed_source", 2)]);
    assert!(world.pods[3].output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", SERVER[0]]).is_err());
    assert!(spoofed() - before > 1.5, "{:?}", world.ask(&["drops"]));
    world.check_frames();
}
