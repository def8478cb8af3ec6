//! Gateways are added to a running group and removed again, under traffic: no connection breaks.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Cluster, SERVER, sleep_ms, sources_a};
use vipgate_tests::wait_for;

use crate::scenario::{MAX_OUTAGE, Scenario, allow_shard_moves};

/// Routes traffic via the first gateways, and waits until they are active.
fn route_via_first(cluster: &Cluster, count: usize) {
    cluster.wait_converged();
    cluster.route_via(&(0..count).collect::<Vec<_>>());
}

/// Adds gateways to the policy and starts them.
fn grow(cluster: &mut Cluster, count: usize) {
    cluster.define_gateways(count);
    for gateway in &mut cluster.gateways[..count] {
        if !gateway.is_running() {
            gateway.spawn("");
            gateway.wait_ready();
        }
    }
    route_via_first(cluster, count);
}

/// Drains gateways one after the other, removes them from the policy and stops them.
fn shrink(cluster: &mut Cluster, count: usize) {
    let leaving: Vec<usize> =
        cluster.indices().into_iter().filter(|at| *at >= count && cluster.gateways[*at].is_running()).collect();
    for &number in &leaving {
        let (code, stdout, stderr) = cluster.gateways[number].command(&["drain"]);
        assert_eq!(code, 0, "{stdout}{stderr}");
    }
    cluster.route_via(&(0..count).collect::<Vec<_>>());
    sleep_ms(200);
    cluster.define_gateways(count);
    let have_left = || cluster.gateways[..count].iter().all(|gateway| gateway.peers_up() + 1 == count);
    assert!(wait_for(Duration::from_secs(10), have_left), "the removed gateways are still in the view");
    for number in leaving {
        cluster.gateways[number].stop("TERM");
    }
    cluster.wait_converged();
}

#[test]
fn gateways_are_added_and_removed_under_load_without_breaking_a_connection() {
    let mut cluster = Cluster::new("reshard", 4);
    cluster.define_gateways(2);
    cluster.start_policyd("");
    grow(&mut cluster, 2);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    let traffic = ClientConfig::short_connections(SERVER[0], sources_a(0), 3_000, 200);
    let brief = cluster.start_clients("brief", 50_000_000, &traffic);
    allow_shard_moves(&cluster);
    for count in [3, 4] {
        sleep_ms(1_000);
        grow(&mut cluster, count);
        println!("{count} gateways: {}", cluster.drop_summary());
    }
    sleep_ms(1_000);
    shrink(&mut cluster, 2);
    println!("2 gateways: {}", cluster.drop_summary());
    sleep_ms(1_000);
    let brief = brief.wait(Duration::from_mins(2));
    println!("brief: {}", brief.summary());
    brief.check_all_succeeded();
    scenario.end(&cluster).check_uninterrupted(MAX_OUTAGE);
}
