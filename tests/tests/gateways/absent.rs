//! A gateway that stands still and goes on as if nothing had been, and a policy server that is away.

use vipgate_tests::cluster::{Cluster, moment, pass, seconds};

use crate::scene::{OUTAGE, Scene, new_ones_work, routers_notice, shares_move};

#[test]
fn a_stopped_gateway() {
    let mut cluster = Cluster::running("stopped", 3);
    let scene = Scene::begin(&cluster, 2_000, 40);
    pass(500);
    let died = moment();
    shares_move(&cluster);
    // What waits for the one that wakes.
    cluster.ledger.expect(["no_lease"]);
    cluster.gateways[2].suspend();
    routers_notice(&cluster, 2);
    pass(1_000);
    new_ones_work(&cluster, "during", 50_000_000, 500);
    pass((seconds(10) * 1_000).saturating_sub(4_000));
    // It wakes with a lease that has ended long ago, and with packets that have waited for it. Routers find it at once.
    cluster.gateways[2].resume();
    cluster.spread_over(&cluster.all());
    pass(500);
    cluster.wait_whole();
    new_ones_work(&cluster, "after", 60_000_000, 500);
    pass(2_000);
    scene.end(&cluster).check_outage(died);
}

/// Short absences, about as long as a lease: whoever is right about who serves, it is one.
#[test]
fn a_gateway_that_stumbles_again_and_again() {
    let mut cluster = Cluster::running("stumbles", 3);
    let scene = Scene::begin(&cluster, 500, 40);
    shares_move(&cluster);
    cluster.ledger.expect(["no_lease"]);
    for milliseconds in [300, 600, 700, 1_300] {
        let number = milliseconds as usize / 100 % 3;
        cluster.gateways[number].suspend();
        pass(milliseconds);
        cluster.gateways[number].resume();
        pass(1_500);
    }
    cluster.wait_whole();
    new_ones_work(&cluster, "after", 60_000_000, 500);
    let ended = scene.end(&cluster);
    ended.held.check_survived(99);
    ended.probes.check_all_well();
}

/// Without the policy server nobody takes anything over, and nothing that stands is touched.
#[test]
fn without_the_policy_server_what_stands_goes_on() {
    let mut cluster = Cluster::running("noserver", 3);
    let scene = Scene::begin(&cluster, 500, 40);
    cluster.policyd.take().unwrap().kill();
    pass(3_000);
    cluster.start_policyd("");
    pass(2_000);
    cluster.wait_whole();
    new_ones_work(&cluster, "after", 60_000_000, 500);
    scene.end(&cluster).check_unharmed(OUTAGE / 2.0);
}
