//! Gateways are added to a running group, replaced and removed, under traffic: no connection breaks.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Clients, Cluster, SERVER, sleep_ms, sources_a};
use vipgate_tests::wait_for;

use crate::scenario::{BFD_DETECTION, MAX_OUTAGE, Scenario, allow_shard_moves};

/// Many held connections: with more, five polling workers and the clients wait for two cores for seconds, and lose nothing.
const HELD_CONNECTIONS: u32 = 10_000;
/// New connections a second beside them: more of them overload two cores with five gateways of a debug build.
const NEW_CONNECTIONS: u32 = 300;

/// Changes the gateways of the policy to these; starts new ones, and stops the others once they have left the view.
/// Routers use new gateways once they are active, and no removed ones after their detection time.
fn reshard(cluster: &mut Cluster, gateways: &[usize]) {
    let removed: Vec<usize> = cluster
        .indices()
        .into_iter()
        .filter(|at| !gateways.contains(at) && cluster.gateways[*at].is_running())
        .collect();
    cluster.define_gateways(gateways);
    for &number in gateways {
        if !cluster.gateways[number].is_running() {
            cluster.gateways[number].spawn("");
            cluster.gateways[number].wait_ready();
        }
    }
    if !removed.is_empty() {
        sleep_ms(BFD_DETECTION);
        cluster.route_via(gateways);
        let have_left = || gateways.iter().all(|at| cluster.gateways[*at].peers_up() + 1 == gateways.len());
        assert!(wait_for(Duration::from_secs(15), have_left), "removed gateways are still in the view");
        for number in removed {
            cluster.gateways[number].stop("TERM");
        }
    }
    cluster.wait_converged();
    cluster.route_via(gateways);
    println!("{} gateways: {}", gateways.len(), cluster.drop_summary());
}

/// A cluster of which the first gateways run.
fn start(tag: &str, count: usize, running: &[usize]) -> Cluster {
    let mut cluster = Cluster::new(tag, count);
    cluster.define_gateways(running);
    cluster.start_policyd("");
    reshard(&mut cluster, running);
    cluster
}

/// Connections of one line each, for about 20 seconds.
fn start_short_connections(cluster: &Cluster) -> Clients {
    let traffic = ClientConfig::short_connections(SERVER[0], sources_a(0), 4_000, 200);
    cluster.start_clients("brief", 50_000_000, &traffic)
}

fn check(cluster: &Cluster, scenario: Scenario, brief: Clients) {
    sleep_ms(1_000);
    let brief = brief.wait(Duration::from_mins(2));
    println!("brief: {}", brief.summary());
    brief.check_all_succeeded();
    scenario.end(cluster).check_uninterrupted(MAX_OUTAGE);
}

#[test]
fn gateways_are_added_and_removed_under_load_without_breaking_a_connection() {
    let mut cluster = start("reshard", 5, &[0, 1]);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    let brief = start_short_connections(&cluster);
    allow_shard_moves(&cluster);
    for count in [3, 5, 2] {
        sleep_ms(1_000);
        reshard(&mut cluster, &(0..count).collect::<Vec<_>>());
    }
    check(&cluster, scenario, brief);
}

/// One in a hundred measures outages, so that two cores bear them.
#[test]
fn ten_thousand_connections_survive_added_and_removed_gateways() {
    let mut cluster = start("many", 5, &[0, 1]);
    let scenario = Scenario::start_with_intervals(&cluster, HELD_CONNECTIONS, 40, &[(1, 0.1, 0.2), (99, 10.0, 20.0)]);
    let traffic = ClientConfig::short_connections(SERVER[0], sources_a(0), 6_000, NEW_CONNECTIONS);
    let brief = cluster.start_clients("brief", 50_000_000, &traffic);
    allow_shard_moves(&cluster);
    for count in [3, 5, 2] {
        sleep_ms(1_000);
        reshard(&mut cluster, &(0..count).collect::<Vec<_>>());
    }
    check(&cluster, scenario, brief);
}

/// As nodes are replaced by new ones with other names.
#[test]
fn a_rolling_replacement_of_all_gateways_breaks_no_connection() {
    let mut cluster = start("replace", 6, &[0, 1, 2]);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    let brief = start_short_connections(&cluster);
    allow_shard_moves(&cluster);
    for first in 0..3 {
        let with_new: Vec<usize> = (first..first + 4).collect();
        reshard(&mut cluster, &with_new);
        sleep_ms(500);
        reshard(&mut cluster, &with_new[1..]);
    }
    check(&cluster, scenario, brief);
}
