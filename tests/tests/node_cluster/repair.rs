//! Agents are killed, their rules are flushed, nodes reboot: under load, beside everything else that nodes run.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vipgate_lab::reflector::query_udp;
use vipgate_tests::cluster::{L2_VIPS, LineServer, SERVER, sleep_ms, unix_time};
use vipgate_tests::verifier::Frame;
use vipgate_tests::wait_for;

use crate::api_objects::COVERED;
use crate::cluster::{NFTABLES_NODE, NodeCluster};
use crate::failover::MAX_OUTAGE;
use crate::gateways::Load;
use crate::leaks::describe;

/// Rounds in which each node's rules are flushed.
const FLUSHES: usize = 5;
/// The longest time from a flush until the last packet that left by the node: with other builds on the machine.
const MAX_WINDOW: Duration = Duration::from_secs(1);

/// The current time of captures.
fn unix_nanoseconds() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(elapsed.as_nanos()).unwrap()
}

#[test]
fn killed_and_restarted_agents_cost_no_packet() {
    let mut cluster = NodeCluster::start("nc-kill");
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    let leaks = cluster.start_leak_verifier();
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
    leaks.check();
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
    let (mut longest, mut flushes) = (Duration::ZERO, 0);
    for (node, host) in cluster.nodes.iter().enumerate() {
        let leaks = cluster.start_leak_verifier();
        let mut flushed = Vec::new();
        for _ in 0..FLUSHES {
            flushed.push(unix_nanoseconds());
            host.node.host.output(&["nft", "flush", "ruleset"]).unwrap();
            let count = flushed.len();
            let repaired = || host.node.log().matches("\"event\":\"kernel_repaired\"").count() >= count;
            assert!(wait_for(Duration::from_secs(5), repaired), "{}", cluster.evidence(node));
            // The verifier sees what leaves after the repair, too.
            sleep_ms(500);
        }
        let leaked = leaks.end();
        let first = flushed[0];
        let other: Vec<_> = leaked.iter().filter(|frame| frame.time < first).cloned().collect();
        assert!(other.is_empty(), "{}", describe(&other));
        flushed.push(u64::MAX);
        for round in flushed.windows(2) {
            let during = |frame: &&Frame| (round[0]..round[1]).contains(&frame.time);
            let times: Vec<u64> = leaked.iter().filter(during).map(|frame| frame.time).collect();
            let [first, last] = [times.first(), times.last()].map(|time| time.copied().unwrap_or(round[0]));
            let [between, until] = [last - first, last - round[0]].map(Duration::from_nanos);
            let (name, count) = (&host.node.name, times.len());
            println!(
                "{name}: {count} packets left by the node within {between:.1?}, until {until:.1?} after `nft` was run"
            );
            (longest, flushes) = (longest.max(until), flushes + 1);
        }
    }
    assert!(longest <= MAX_WINDOW, "{longest:?}");
    let results = load.end(&cluster);
    println!("rules flushed {flushes} times: {}", results.describe(0.0));
    results.check(2.0);
    cluster.check_kernels_agree();
    // The rulesets of this test are gone, too; kube-proxy writes its own again.
    cluster.write_slices();
    let leaks = cluster.start_leak_verifier();
    for node in 0..3 {
        cluster.wait_translated(node);
    }
    leaks.check();
    server.end();
}

#[test]
fn a_node_that_reboots_steers_its_new_pods_from_their_first_packet() {
    let mut cluster = NodeCluster::start("nc-reboot");
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    for node in [0, NFTABLES_NODE] {
        cluster.reboot(node);
        // The other nodes' pods go on; captures of the old uplink have ended with it.
        let leaks = cluster.start_leak_verifier();
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
        leaks.check();
        cluster.check_kernels_agree();
    }
    server.end();
}
