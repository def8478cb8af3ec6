//! Network partitions: a gateway is cut off from the policy server, from its peers, or from both, while routers still
//! reach it.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Cluster, SERVER, sleep_ms, sources_a, test_seconds, unix_time};

use crate::scenario::{BFD_DETECTION, MAX_OUTAGE, Scenario, allow_shard_moves, check_new_connections};

#[test]
fn a_partitioned_gateway_opens_no_sessions() {
    let cluster = Cluster::running("partition", 3);
    let scenario = Scenario::start(&cluster, 2_000, 40);
    sleep_ms(500);
    let cut = unix_time();
    allow_shard_moves(&cluster);
    // On its segment, others announce the VIPs that it owned, before its own lease has expired.
    cluster.accounting.allow(["vip_conflicts"]);
    cluster.cut_management(0);
    cluster.cut_peers(0);
    // Its own links are up, so routers keep using it until the test changes their routes.
    sleep_ms(BFD_DETECTION);
    cluster.route_via(&[1, 2]);
    sleep_ms(1_000);
    check_new_connections(&cluster, "during", 50_000_000, 500);
    // Then routers use it alone: it must not open what others may open as well.
    let created = || cluster.gateways[0].metric("vipgate_sessions_created_total", "");
    let before = created();
    cluster.accounting.expect(["no_lease"]);
    cluster.route_via(&[0]);
    let traffic = ClientConfig { timeout: 2, ..ClientConfig::short_connections(SERVER[0], sources_a(0), 100, 200) };
    let [all, rejected] =
        cluster.start_clients("rejected", 55_000_000, &traffic).wait(Duration::from_secs(20)).total_and_failed();
    assert!(created() - before < 0.5, "{} sessions opened without a lease", created() - before);
    assert_eq!(rejected, all, "no other gateway can have opened them");
    cluster.route_via(&[1, 2]);
    sleep_ms((test_seconds(15) * 1_000).saturating_sub(7_500));
    cluster.heal_peers(0);
    cluster.heal_management(0);
    cluster.wait_converged();
    cluster.route_via(&cluster.indices());
    sleep_ms(3_000);
    check_new_connections(&cluster, "after", 60_000_000, 500);
    let results = scenario.end(&cluster);
    // The waits include the routes via the partitioned gateway above.
    results.held.established_before(0.2, cut).check_survived(99);
}

/// A gateway without the policy server loses its lease, and hands over its sessions to the others.
#[test]
fn a_gateway_cut_off_from_the_policy_server_is_failed_over() {
    let cluster = Cluster::running("nolease", 3);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    sleep_ms(500);
    let cut = unix_time();
    allow_shard_moves(&cluster);
    cluster.cut_management(1);
    sleep_ms(4_000);
    check_new_connections(&cluster, "during", 50_000_000, 500);
    cluster.heal_management(1);
    sleep_ms(2_000);
    cluster.wait_converged();
    check_new_connections(&cluster, "after", 60_000_000, 500);
    scenario.end(&cluster).check_outage(cut);
}

/// Gateways without peer links still serve the packets that arrive at their owner.
#[test]
fn gateways_without_peer_links_never_reuse_a_tuple() {
    let cluster = Cluster::running("deaf", 3);
    let scenario = Scenario::start(&cluster, 500, 20);
    for number in cluster.indices() {
        cluster.cut_peers(number);
    }
    sleep_ms(3_000);
    for number in cluster.indices() {
        cluster.heal_peers(number);
    }
    sleep_ms(2_000);
    cluster.wait_converged();
    check_new_connections(&cluster, "after", 60_000_000, 500);
    let results = scenario.end(&cluster);
    results.held.check_survived(99);
    // Packets that had to be forwarded to their owner had to wait.
    let longest = results.probes.longest_wait(0.2);
    assert!(longest <= 3.0 + 2.0 + MAX_OUTAGE, "{}", results.probes.summary());
}
