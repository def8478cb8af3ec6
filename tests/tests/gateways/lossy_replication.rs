//! Replication over a lossy network between gateways, with a failover.

use vipgate_tests::cluster::{Cluster, Impairment, sleep_ms};

use crate::scenario::{Scenario, check_new_connections, kill_gateway, restart_gateway};

/// Maximum replication delay, seconds. Records wait behind lost ones, and so do lost acknowledgments; with a round
/// trip of 100 ms TCP retransmits after 300 ms, then after 600 ms more.
const MAX_REPLICATION_DELAY: f64 = 1.0;

#[test]
fn replication_survives_a_lossy_network() {
    let mut cluster = Cluster::running("lossy", 3);
    let impaired = cluster.impair_peers(Impairment { loss: 5.0, duplicate: 1.0, delay: 50.0, jitter: 10.0 }, 7);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    check_new_connections(&cluster, "before", 50_000_000, 400);
    sleep_ms(1_500);
    let died = kill_gateway(&mut cluster, 0);
    check_new_connections(&cluster, "during", 55_000_000, 400);
    sleep_ms(1_000);
    restart_gateway(&mut cluster, 0);
    sleep_ms(2_000);
    let [frames, lost] = cluster.repair_peers(impaired);
    println!("{lost} of {frames} frames were lost between gateways");
    assert!(lost * 100 > frames, "too few frames were lost");
    cluster.wait_converged();
    sleep_ms(1_000);
    check_new_connections(&cluster, "after", 60_000_000, 400);
    let results = scenario.end(&cluster);
    results.held.established_before(MAX_REPLICATION_DELAY, died).check_survived(99);
}
