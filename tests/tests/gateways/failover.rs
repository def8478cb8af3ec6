//! Failover: a gateway is killed, and restarted.

use std::collections::BTreeSet;
use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, ClientResults, Clients, Cluster, Download, SERVER, sleep_ms, sources_a};

use crate::scenario::{
    KILL_GRACE, MAX_OUTAGE, MAX_REPLICATION_DELAY, Scenario, allow_shard_moves, check_new_connections, expect_too_big,
    kill_gateway, restart_gateway, start_probes,
};

#[test]
fn a_killed_gateway_fails_over_within_a_second() {
    let mut cluster = Cluster::running("killed", 3);
    let scenario = Scenario::start(&cluster, 5_000, 40);
    // Connections that are opened shortly before and after the kill.
    let traffic = ClientConfig { rate: 400, ..ClientConfig::held_connections(SERVER[0], sources_a(0), 800) };
    let mut late = cluster.start_clients("late", 40_000_000, &traffic);
    sleep_ms(1_200);
    let died = kill_gateway(&mut cluster, 0);
    // Those that had just been opened were not replicated yet, and may be lost.
    late.wait_started(Duration::from_secs(20));
    check_new_connections(&cluster, "during", 50_000_000, 500);
    // The gateway restarts, and takes over its own shards again.
    let returning = start_probes(&cluster, "returning", 60_000_000, 20);
    restart_gateway(&mut cluster, 0);
    sleep_ms(3_000);
    check_new_connections(&cluster, "after", 70_000_000, 500);
    for outcome in Clients::end_all(returning) {
        println!("return: {}", outcome.summary());
        outcome.check_all_succeeded();
        assert!(outcome.longest_wait(0.2) <= MAX_OUTAGE, "after its restart: {}", outcome.summary());
    }
    let late = late.end();
    let (older, younger) =
        (late.established_before(MAX_REPLICATION_DELAY, died), late.started_after(died + KILL_GRACE));
    println!("older: {}; younger: {}", older.summary(), younger.summary());
    older.check_survived(99);
    assert!(younger.0.len() > 100, "{}", younger.summary());
    younger.check_all_succeeded();
    let kept: BTreeSet<&String> = older.0.iter().chain(&younger.0).map(|client| &client.identity).collect();
    let lost = late.0.iter().map(|client| client.identity.clone()).filter(|identity| !kept.contains(identity));
    scenario.end_with_lost(&cluster, &lost.collect()).check_outage(died);
}

/// Routers don't detect the failure and route a third of all packets to the dead gateway; the other packets are
/// forwarded.
#[test]
fn failover_works_while_routers_still_use_the_dead_gateway() {
    let mut cluster = Cluster::running("blind", 3);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    sleep_ms(500);
    allow_shard_moves(&cluster);
    let died = cluster.gateways[1].kill();
    sleep_ms(2_000);
    cluster.gateways[1].start("");
    cluster.wait_converged();
    sleep_ms(2_000);
    let results = scenario.end(&cluster);
    let survivors = results.held.established_before(MAX_REPLICATION_DELAY, died);
    survivors.check_survived(99);
    // Two thirds are routed via a live gateway outbound, and two thirds inbound.
    let count_quick =
        |outcome: &ClientResults| outcome.0.iter().filter(|client| client.longest_wait[0] <= MAX_OUTAGE).count();
    let (quick, all) = (count_quick(&results.probes), results.probes.0.len());
    assert!(quick * 4 >= all, "{quick} of {all} flows waited at most a second: {}", results.probes.summary());
}

/// A gateway that restarts repeatedly and is killed before it is useful costs no more than a single failover.
#[test]
fn a_flapping_gateway_costs_no_more_than_one_failover() {
    let mut cluster = Cluster::running("flaps", 3);
    let scenario = Scenario::start(&cluster, 500, 40);
    sleep_ms(500);
    let died = kill_gateway(&mut cluster, 2);
    for round in 0..3 {
        sleep_ms(800);
        cluster.gateways[2].start("");
        sleep_ms(400 * round);
        cluster.gateways[2].kill();
    }
    sleep_ms(1_000);
    restart_gateway(&mut cluster, 2);
    sleep_ms(1_000);
    check_new_connections(&cluster, "after", 70_000_000, 300);
    scenario.end(&cluster).check_outage(died);
}

#[test]
fn downloads_survive_successive_gateway_kills() {
    const BYTES: u64 = 40_000_000;
    const RATE: u64 = 4_000_000;
    let mut cluster = Cluster::running("downloads", 3);
    let monitor = cluster.start_monitor();
    expect_too_big(&cluster);
    let mut downloads = Vec::new();
    for pod in [0, 1, 2] {
        for server in SERVER {
            downloads.push(Download::start(&cluster.server, server, &cluster.pods[pod], BYTES, RATE));
        }
    }
    for number in [0, 1] {
        sleep_ms(1_000);
        kill_gateway(&mut cluster, number);
        sleep_ms(1_500);
        restart_gateway(&mut cluster, number);
    }
    let longest: Vec<f64> = downloads.into_iter().map(Download::end).collect();
    println!("longest gaps in seconds: {longest:?}");
    // TCP's exponential backoff: what is lost at the end of an outage is retransmitted after as long again.
    assert!(longest.iter().all(|gap| *gap <= 2.0 * MAX_OUTAGE + 0.5), "{longest:?}");
    monitor.verify_with_more_hops(&cluster);
}
