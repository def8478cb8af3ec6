//! ECMP rehash: routers move flows to other gateways under traffic.

use vipgate_tests::cluster::{Cluster, sleep_ms};

use crate::scenario::{Scenario, check_new_connections};

/// Time of one retransmission, seconds.
const RTO: f64 = 0.25;

#[test]
fn rehash_mid_flow() {
    let cluster = Cluster::running("rehash", 3);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    for turn in 1..=6 {
        cluster.rehash(turn);
        sleep_ms(400);
    }
    // Fewer and more next hops, changed separately in each direction, so that traffic becomes asymmetric.
    for next_hops in [vec![0], vec![1, 2], vec![2, 1, 0], vec![2]] {
        cluster.route_outside_via(&next_hops);
        sleep_ms(400);
        cluster.route_inside_via(&next_hops.iter().rev().copied().collect::<Vec<_>>());
        sleep_ms(400);
    }
    cluster.route_via(&cluster.indices());
    check_new_connections(&cluster, "after", 60_000_000, 500);
    scenario.end(&cluster).check_uninterrupted(RTO);
}
