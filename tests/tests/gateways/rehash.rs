//! Routers change their mind about which gateway gets what, in the middle of everything.

use vipgate_tests::cluster::{Cluster, pass};

use crate::scene::{Scene, new_ones_work};

/// Time for one retransmission, seconds.
const RTO: f64 = 0.25;

#[test]
fn rehash_mid_flow() {
    let cluster = Cluster::running("rehash", 3);
    let scene = Scene::begin(&cluster, 1_000, 40);
    for turn in 1..=6 {
        cluster.rehash(turn);
        pass(400);
    }
    // Fewer and more ways, on one side only, so that both directions part.
    for ways in [vec![0], vec![1, 2], vec![2, 1, 0], vec![2]] {
        cluster.spread_outside_over(&ways);
        pass(400);
        cluster.spread_inside_over(&ways.iter().rev().copied().collect::<Vec<_>>());
        pass(400);
    }
    cluster.spread_over(&cluster.all());
    new_ones_work(&cluster, "after", 60_000_000, 500);
    scene.end(&cluster).check_unharmed(RTO);
}
