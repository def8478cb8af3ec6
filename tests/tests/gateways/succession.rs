//! Gateways that restart while the policy server is away: they take their places by themselves.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Cluster, Gateway, LineServer, SERVER, sleep_ms, sources_a, unix_time};

use crate::scenario::{MAX_OUTAGE, MAX_REPLICATION_DELAY, Scenario, allow_shard_moves, check_new_connections};

/// How long a killed gateway is away at least, milliseconds: the leases of the others end meanwhile.
const AWAY: u64 = 800;
/// How long it takes at most until a gateway has written its policy and membership, milliseconds.
const WRITTEN: u64 = 1500;

/// Allows what is dropped while others use a gateway whose process has just started (their tunnels are nobody's there yet:
/// `no_policy`), and refused while the certificate of a process changes.
fn allow_successions(cluster: &Cluster) {
    allow_shard_moves(cluster);
    cluster.accounting.allow(["peer_unknown", "peer_unauthenticated", "peer_refused", "no_neighbor", "no_policy"]);
}

/// Kills a gateway and starts it again, and waits until it forwards; returns how long that took, seconds.
fn restart(cluster: &mut Cluster, number: usize) -> f64 {
    let died = cluster.gateways[number].kill();
    sleep_ms(AWAY);
    cluster.gateways[number].start("");
    cluster.wait_converged();
    let log = cluster.gateways[number].log();
    assert!(log.contains("\"event\":\"place_taken\""), "{log}");
    unix_time() - died
}

/// New connections of both families succeed.
fn check_both_families(cluster: &Cluster, name: &str, first: u32) {
    check_new_connections(cluster, name, first, 300);
    let traffic = ClientConfig::short_connections(SERVER[1], sources_a(1), 300, 200);
    let brief = cluster.start_clients(&format!("{name}-six"), first + 1_000_000, &traffic);
    brief.wait(Duration::from_mins(1)).check_all_succeeded();
}

/// Established sessions continue, and new ones open, once each of these gateways is back, one after the other; and when
/// the policy server is back, which has not seen any of their processes.
fn restart_without_the_server(tag: &str, count: usize, restarted: &[usize]) {
    let mut cluster = Cluster::running(tag, count);
    let scenario = Scenario::start(&cluster, 500, 40);
    sleep_ms(500);
    allow_successions(&cluster);
    cluster.policyd.take().unwrap().kill();
    sleep_ms(WRITTEN);
    let (first_died, mut longest) = (unix_time(), 0.0_f64);
    for number in restarted {
        longest = longest.max(restart(&mut cluster, *number));
        sleep_ms(500);
    }
    println!("restarted without the server, each within {longest:.2} s");
    check_both_families(&cluster, "away", 50_000_000);
    cluster.start_policyd("");
    sleep_ms(3_000);
    cluster.wait_converged();
    check_both_families(&cluster, "back", 60_000_000);
    let results = scenario.end(&cluster);
    let older = results.held.established_before(MAX_REPLICATION_DELAY, first_died);
    older.check_survived(99);
    results.probes.check_all_succeeded();
    // Packets that a gateway gets while it is away are lost, and leases end until it is back.
    let outage = results.probes.p99_wait(0.2);
    assert!(outage <= longest + MAX_OUTAGE, "{outage} s of at most {longest} s: {}", results.probes.summary());
}

#[test]
fn one_of_two_gateways_restarts_without_the_policy_server() {
    restart_without_the_server("alone2", 2, &[0]);
}

/// The first one twice: its second process has no more been in a view than the third one.
#[test]
fn of_three_gateways_each_restarts_without_the_policy_server() {
    restart_without_the_server("alone3", 3, &[0, 0, 2, 1]);
}

/// A gateway is ready only once it forwards: here, once its peer is back, which has restarted as well.
#[test]
fn two_gateways_that_restart_at_once_without_the_policy_server_wait_for_each_other() {
    let mut cluster = Cluster::running("both", 2);
    let server = LineServer::start(cluster.folder.path(), &cluster.server);
    allow_successions(&cluster);
    cluster.policyd.take().unwrap().kill();
    sleep_ms(WRITTEN);
    for gateway in &mut cluster.gateways {
        gateway.kill();
    }
    cluster.gateways[0].spawn("");
    sleep_ms(4_000);
    let log = cluster.gateways[0].log();
    assert!(log.contains("\"event\":\"place_taken\"") && !log.contains("\"event\":\"ready\""), "{log}");
    assert_eq!(cluster.gateways[0].http_get("/readyz").0, 503);
    cluster.gateways[1].spawn("");
    cluster.gateways.iter_mut().for_each(Gateway::wait_ready);
    cluster.wait_converged();
    check_both_families(&cluster, "both", 50_000_000);
    server.end();
    cluster.check_frames();
}
