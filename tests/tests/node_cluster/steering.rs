//! Egress, cluster-internal and inbound traffic beside kube-proxy, masquerading and NetworkPolicy.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use vipgate_lab::reflector::{UDP, query_http, query_http_at, query_udp, query_udp_at};
use vipgate_tests::cluster::{HTTP_PORT, L2_VIPS, LINE_PORT, SERVER};
use vipgate_tests::wait_for;

use crate::api_objects::{COVERED, UNCOVERED};
use crate::cluster::{NEIGHBOR, NodeCluster, POLICY_NODE};
use crate::network_policy::dropped;

/// Address of a node, by index and family.
fn node_address(index: usize, family: usize) -> String {
    let number = index + 1;
    [format!("10.5.{number}.1"), format!("fd00:5:{number}::1")][family].clone()
}

/// What a destination sees of a pod that sends past its node's pod subnet without vipgate: node-1 has flannel's
/// masquerading, which leaves traffic between pods alone, the others that of their plugin.
fn pod_to_pod_source(cluster: &NodeCluster, node: usize, family: usize) -> String {
    let pod = &cluster.covered(node).addresses[family];
    if node == 0 { pod.clone() } else { node_address(node, family) }
}

#[test]
fn covered_pods_leave_by_their_vip_and_all_else_is_as_without_vipgate() {
    let cluster = NodeCluster::start("nc-egress");
    let leaks = cluster.start_leak_verifier();
    for node in 0..3 {
        let (covered, uncovered) = (cluster.covered(node), cluster.uncovered(node));
        for family in [0, 1] {
            let server: IpAddr = SERVER[family].parse().unwrap();
            assert_eq!(query_http(&covered.host, server).unwrap(), L2_VIPS[family], "{}", cluster.evidence(node));
            assert_eq!(query_udp(&covered.host, server).unwrap(), L2_VIPS[family], "{}", cluster.evidence(node));
            // A destination that the policy excludes, and a pod without a policy: the node's masquerading applies.
            let neighbor: IpAddr = NEIGHBOR[family].parse().unwrap();
            for pod in [covered, uncovered] {
                assert_eq!(query_http(&pod.host, neighbor).unwrap(), node_address(node, family), "{}", pod.name);
                assert_eq!(query_udp(&pod.host, neighbor).unwrap(), node_address(node, family), "{}", pod.name);
            }
            // A pod on another node, and one on the same node.
            let other = cluster.uncovered((node + 1) % 3).addresses[family].parse::<IpAddr>().unwrap();
            let seen = query_http_at(&covered.host, (other, LINE_PORT).into()).unwrap();
            assert_eq!(seen, pod_to_pod_source(&cluster, node, family));
            let same = uncovered.addresses[family].parse::<IpAddr>().unwrap();
            let seen = query_http_at(&covered.host, (same, LINE_PORT).into()).unwrap();
            assert_eq!(seen, covered.addresses[family]);
        }
    }
    leaks.check();
    cluster.check_kernels_agree();
    assert_eq!(dropped(&cluster.nodes[POLICY_NODE].node.host), [0, 0], "NetworkPolicy drops nothing");
    assert_eq!(cluster.node_drops("guard"), 0);
}

#[test]
fn cluster_ips_work_from_covered_pods_on_every_node() {
    let cluster = NodeCluster::start("nc-clusterip");
    let leaks = cluster.start_leak_verifier();
    for node in 0..3 {
        let covered = cluster.covered(node);
        for family in [0, 1] {
            let expected = |backend: usize| {
                let is_local = backend == node;
                if is_local { covered.addresses[family].clone() } else { pod_to_pod_source(&cluster, node, family) }
            };
            let possible: BTreeSet<String> = (0..3).map(expected).collect();
            let internal = cluster.cluster_ips(UNCOVERED, "internal")[family];
            let mut seen = BTreeSet::new();
            for _ in 0..12 {
                let reached = || query_http_at(&covered.host, (internal, HTTP_PORT).into());
                let works = || reached().is_ok();
                assert!(wait_for(Duration::from_secs(10), works), "{internal}: {}", cluster.evidence(node));
                seen.insert(reached().unwrap());
                seen.insert(query_udp_at(&covered.host, (internal, UDP).into()).unwrap());
            }
            assert!(seen.is_subset(&possible), "{seen:?}, not {possible:?}");
            // Also backends that are covered, one of which is the pod itself, through its own Service.
            let web = cluster.cluster_ips(COVERED, "web")[family];
            for _ in 0..6 {
                query_http_at(&covered.host, (web, HTTP_PORT).into())
                    .unwrap_or_else(|error| panic!("{web}: {error}\n{}", cluster.evidence(node)));
            }
            // The address of the load balancer: kube-proxy translates it on the node.
            let vip: IpAddr = L2_VIPS[family].parse().unwrap();
            query_http_at(&covered.host, (vip, HTTP_PORT).into())
                .unwrap_or_else(|error| panic!("{vip}: {error}\n{}", cluster.evidence(node)));
        }
    }
    leaks.check();
    assert_eq!(dropped(&cluster.nodes[POLICY_NODE].node.host), [0, 0], "NetworkPolicy drops nothing");
    assert_eq!(cluster.node_drops("guard"), 0);
}

#[test]
fn clients_reach_backends_on_every_node_with_their_address_and_pods_directly() {
    let cluster = NodeCluster::start("nc-inbound");
    let leaks = cluster.start_leak_verifier();
    let client = &cluster.cluster.server;
    let received = |node: usize| {
        let counters = cluster.nodes[node].node.host.output(&["nft", "list", "counters", "table", "inet", "vipgate"]);
        let counters = counters.unwrap();
        let from_gateways = counters.split("counter ").filter(|counter| counter.starts_with("from_"));
        let packets = |text: &str| text.split("packets ").nth(1)?.split(' ').next()?.parse::<u64>().ok();
        from_gateways.filter_map(packets).sum::<u64>()
    };
    let before: Vec<u64> = (0..3).map(received).collect();
    for (vip, server) in L2_VIPS.into_iter().zip(SERVER) {
        let vip: IpAddr = vip.parse().unwrap();
        for _ in 0..24 {
            let seen = query_http_at(client, (vip, HTTP_PORT).into());
            assert_eq!(seen.unwrap_or_else(|error| panic!("{error}\n{}", cluster.evidence(0))), server);
            assert_eq!(query_udp_at(client, (vip, UDP).into()).unwrap(), server);
        }
    }
    for (node, before) in before.into_iter().enumerate() {
        // 48 connections of TCP, and each of them three packets at least.
        assert!(received(node) > before + 20, "no backend of {} was chosen", cluster.nodes[node].node.name);
        for family in [0, 1] {
            let pod = cluster.covered(node).addresses[family].parse::<IpAddr>().unwrap();
            let seen = query_http_at(&cluster.neighbor, SocketAddr::new(pod, LINE_PORT)).unwrap();
            assert_eq!(seen, NEIGHBOR[family], "a client that reaches a pod directly is left alone");
            assert_eq!(query_udp_at(&cluster.neighbor, SocketAddr::new(pod, UDP)).unwrap(), NEIGHBOR[family]);
        }
    }
    leaks.check();
    assert_eq!(dropped(&cluster.nodes[POLICY_NODE].node.host), [0, 0], "NetworkPolicy drops nothing");
}
