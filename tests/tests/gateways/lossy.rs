//! The network between gateways is bad, and one of them dies while it is.

use vipgate_tests::cluster::{Cluster, Impairment, pass};

use crate::scene::{Scene, come_back, kill, new_ones_work};

/// Copies may be this late, seconds. News wait behind what was lost before them, and an acknowledgement that is lost, too; TCP over
/// a way of 100 ms there and back sends again after 300 ms, then after 600 more.
const LATE: f64 = 1.0;

#[test]
fn lossy_replication() {
    let mut cluster = Cluster::running("lossy", 3);
    let impaired = cluster.impair_peers(Impairment { loss: 5.0, repeat: 1.0, delay: 50.0, jitter: 10.0 }, 7);
    let scene = Scene::begin(&cluster, 1_000, 40);
    new_ones_work(&cluster, "before", 50_000_000, 400);
    pass(1_500);
    let died = kill(&mut cluster, 0);
    new_ones_work(&cluster, "during", 55_000_000, 400);
    pass(1_000);
    come_back(&mut cluster, 0);
    pass(2_000);
    let [frames, lost] = cluster.repair_peers(impaired);
    println!("{lost} of {frames} frames were lost between gateways");
    assert!(lost * 100 > frames, "the network wasn't bad");
    cluster.wait_whole();
    pass(1_000);
    new_ones_work(&cluster, "after", 60_000_000, 400);
    let ended = scene.end(&cluster);
    ended.held.older(LATE, died).check_survived(99);
}
