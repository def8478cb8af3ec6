//! Agents are killed, their rules are flushed, nodes reboot: under load, beside everything else that nodes run.

use std::time::Duration;

use vipgate::lab::reflector::query_udp;
use vipgate_tests::cluster::{L2_VIPS, LineServer, SERVER, sleep_ms, unix_time};
use vipgate_tests::wait_for;

use crate::api_objects::COVERED;
use crate::cluster::{NFTABLES_NODE, NodeCluster};
use crate::failover::MAX_OUTAGE;
use crate::gateways::{Load, allow_shard_moves};
use crate::judge::describe;

/// Rounds in which each node's rules are flushed.
const FLUSHES: usize = 5;
/// The longest time from a flush until the last packet that left by the node, in seconds: with other builds on the machine.
const MAX_WINDOW: f64 = 1.0;

#[test]
fn killed_and_restarted_agents_cost_no_packet() {
    let mut cluster = NodeCluster::start("nc-kill");
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    let judge = cluster.judge();
    let load = Load::start(&cluster, "kill", 1_000_000);
    for node in 0..3 {
        for signal in ["KILL", "TERM"] {
            cluster.nodes[node].node.stop(signal);
            sleep_ms(300);
            cluster.nodes[node].node.start("");
        }
    }
    // A pod that starts while its node has no agent: its packets wait for the next one, or are dropped.
    cluster.nodes[0].node.stop("KILL");
    let pod = cluster.add_pod(0, COVERED, "late");
    cluster.write_slices();
    query_udp(&pod.host, SERVER[0].parse().unwrap()).expect_err("no agent has made the pod known");
    cluster.nodes[0].node.start("");
    let began = unix_time();
    let works = || query_udp(&pod.host, SERVER[0].parse().unwrap()).is_ok_and(|source| source == L2_VIPS[0]);
    assert!(wait_for(Duration::from_secs(20), works), "{}", cluster.evidence(0));
    println!("the late pod works {:.3} s after the agent is ready", unix_time() - began);
    let results = load.end(&cluster);
    println!("agents killed and restarted: {}", results.describe(0.0));
    results.check(MAX_OUTAGE);
    results.check_none_lost(&cluster);
    judge.check();
    server.end();
    cluster.check_kernels_agree();
}

/// `nft flush ruleset` removes the agent's table with all others. Until it is in place again packets leave by the node:
/// for a few milliseconds, which this test measures.
#[test]
fn flushed_rules_are_in_place_again_within_milliseconds() {
    let cluster = NodeCluster::start("nc-flush");
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    let load = Load::start(&cluster, "flush", 1_000_000);
    let mut windows = Vec::new();
    for (node, host) in cluster.nodes.iter().enumerate() {
        let judge = cluster.judge();
        let mut flushed = Vec::new();
        for _ in 0..FLUSHES {
            flushed.push(unix_time());
            host.node.host.output(&["nft", "flush", "ruleset"]).unwrap();
            let count = flushed.len();
            let repaired = || host.node.log().matches("\"event\":\"kernel_repaired\"").count() >= count;
            assert!(wait_for(Duration::from_secs(5), repaired), "{}", cluster.evidence(node));
            // The judge sees what leaves after the repair, too.
            sleep_ms(500);
        }
        let leaked = judge.end();
        for (round, at) in flushed.iter().enumerate() {
            let until = flushed.get(round + 1).copied().unwrap_or(f64::MAX);
            let times = leaked.iter().map(|frame| frame.time as f64 / 1e9).filter(|time| (*at..until).contains(time));
            let times: Vec<f64> = times.collect();
            let between = times.last().zip(times.first()).map_or(0.0, |(last, first)| last - first);
            windows.push((host.node.name.as_str(), times.len(), between, times.last().map_or(0.0, |last| last - at)));
        }
        let other: Vec<_> = leaked.iter().filter(|frame| (frame.time as f64 / 1e9) < flushed[0]).cloned().collect();
        assert!(other.is_empty(), "{}", describe(&other));
    }
    for (name, count, between, until) in &windows {
        let [between, until] = [between, until].map(|seconds| seconds * 1e3);
        println!(
            "{name}: {count} packets left by the node within {between:.1} ms, until {until:.1} ms after `nft` was run"
        );
    }
    let longest = windows.iter().map(|(_, _, _, until)| *until).fold(0.0, f64::max);
    assert!(longest <= MAX_WINDOW, "{longest:.3} s");
    let results = load.end(&cluster);
    println!("rules flushed {} times: {}", windows.len(), results.describe(0.0));
    results.check(2.0);
    cluster.check_kernels_agree();
    // kube-proxy and the ruleset of Services come back, too: the first by itself.
    cluster.write_slices();
    let judge = cluster.judge();
    for node in 0..3 {
        cluster.wait_translated(node);
    }
    judge.check();
    server.end();
}

#[test]
fn a_node_that_reboots_steers_its_new_pods_from_their_first_packet() {
    let mut cluster = NodeCluster::start("nc-reboot");
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    allow_shard_moves(&cluster);
    for node in [0, NFTABLES_NODE] {
        cluster.reboot(node);
        // The other nodes' pods go on; captures of the old uplink have ended with it.
        let judge = cluster.judge();
        for (namespace, name) in [(COVERED, "again"), (crate::api_objects::UNCOVERED, "other-again")] {
            cluster.add_pod(node, namespace, &format!("{name}-{}", node + 1));
        }
        cluster.write_slices();
        let began = unix_time();
        cluster.wait_translated(node);
        println!("node {node} rebooted: its new pod is translated after {:.3} s", unix_time() - began);
        let load = Load::start(&cluster, &format!("reboot-{node}"), (node as u32 + 1) * 1_000_000);
        sleep_ms(1_000);
        let results = load.end(&cluster);
        println!("{}", results.describe(0.0));
        results.check(MAX_OUTAGE);
        judge.check();
        cluster.check_kernels_agree();
    }
    server.end();
}
