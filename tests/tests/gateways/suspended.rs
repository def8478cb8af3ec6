//! A suspended gateway that resumes, and a policy server that is down.

use vipgate_tests::cluster::{Cluster, sleep_ms, test_seconds, unix_time};

use crate::scenario::{MAX_OUTAGE, Scenario, allow_shard_moves, check_new_connections, reroute_after_detection};

#[test]
fn a_suspended_gateway_is_failed_over() {
    let mut cluster = Cluster::running("stopped", 3);
    let scenario = Scenario::start(&cluster, 2_000, 40);
    sleep_ms(500);
    let died = unix_time();
    allow_shard_moves(&cluster);
    // Packets that wait for the suspended gateway.
    cluster.accounting.expect(["no_lease"]);
    cluster.gateways[2].suspend();
    reroute_after_detection(&cluster, 2);
    sleep_ms(1_000);
    check_new_connections(&cluster, "during", 50_000_000, 500);
    sleep_ms((test_seconds(10) * 1_000).saturating_sub(4_000));
    // It resumes with an expired lease and queued packets. Routers use it again at once.
    cluster.gateways[2].resume();
    cluster.route_via(&cluster.indices());
    sleep_ms(500);
    cluster.wait_converged();
    check_new_connections(&cluster, "after", 60_000_000, 500);
    sleep_ms(2_000);
    // Its links stay up, so only missing heartbeats show that it is gone: 0.9 to 1.4 s on two shared cores.
    scenario.end(&cluster).check_outage_within(1.5 * MAX_OUTAGE, died);
}

/// Suspensions about as long as a lease: whichever view is current, one gateway owns each shard.
#[test]
fn short_suspensions_keep_connections() {
    let mut cluster = Cluster::running("stumbles", 3);
    let scenario = Scenario::start(&cluster, 500, 40);
    allow_shard_moves(&cluster);
    cluster.accounting.expect(["no_lease"]);
    for milliseconds in [300, 600, 700, 1_300] {
        let number = milliseconds as usize / 100 % 3;
        cluster.gateways[number].suspend();
        sleep_ms(milliseconds);
        cluster.gateways[number].resume();
        sleep_ms(1_500);
    }
    cluster.wait_converged();
    check_new_connections(&cluster, "after", 60_000_000, 500);
    let results = scenario.end(&cluster);
    results.held.check_survived(99);
    results.probes.check_all_succeeded();
}

/// Without the policy server no failover happens, and existing sessions continue.
#[test]
fn sessions_continue_without_the_policy_server() {
    let mut cluster = Cluster::running("noserver", 3);
    let scenario = Scenario::start(&cluster, 500, 40);
    cluster.policyd.take().unwrap().kill();
    sleep_ms(3_000);
    cluster.start_policyd("");
    sleep_ms(2_000);
    cluster.wait_converged();
    check_new_connections(&cluster, "after", 60_000_000, 500);
    scenario.end(&cluster).check_uninterrupted(MAX_OUTAGE / 2.0);
}
