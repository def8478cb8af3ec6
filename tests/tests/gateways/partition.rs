//! A gateway that nobody reaches any more, while pods and the world still do.

use std::time::Duration;

use vipgate_tests::cluster::{Cluster, SERVER, Traffic, moment, pass, seconds, sources_a};

use crate::scene::{DETECTED, OUTAGE, Scene, new_ones_work, shares_move};

#[test]
fn a_partition() {
    let cluster = Cluster::running("partition", 3);
    let scene = Scene::begin(&cluster, 2_000, 40);
    pass(500);
    let cut = moment();
    shares_move(&cluster);
    // On its segment, others announce the VIPs that it had, before it can know of that.
    cluster.ledger.allow(["vip_conflicts"]);
    cluster.cut_management(0);
    cluster.cut_peers(0);
    // Its own links are fine, so routers go on sending to it until somebody tells them.
    pass(DETECTED);
    cluster.spread_over(&[1, 2]);
    pass(1_000);
    new_ones_work(&cluster, "during", 50_000_000, 500);
    // Now they send to it alone: it must not open what others may open as well.
    let opened = || cluster.gateways[0].metric("vipgate_sessions_created_total", "");
    let before = opened();
    cluster.ledger.expect(["no_lease"]);
    cluster.spread_over(&[0]);
    let traffic = Traffic { patience: 2, ..Traffic::brief(SERVER[0], sources_a(0), 100, 200) };
    let [all, refused] = cluster.crowd("refused", 55_000_000, &traffic).wait(Duration::from_secs(20)).lost();
    assert!(opened() - before < 0.5, "{} sessions opened without a lease", opened() - before);
    assert_eq!(refused, all, "nobody else can have opened them");
    cluster.spread_over(&[1, 2]);
    pass((seconds(15) * 1_000).saturating_sub(7_500));
    cluster.heal_peers(0);
    cluster.heal_management(0);
    cluster.wait_whole();
    cluster.spread_over(&cluster.all());
    pass(3_000);
    new_ones_work(&cluster, "after", 60_000_000, 500);
    let ended = scene.end(&cluster);
    // The detour over the cut gateway above is in the waits of those who spoke then.
    ended.held.older(0.2, cut).check_survived(99);
}

/// Cut off from the policy server alone, it is as good as dead to the others, and hands over what it has.
#[test]
fn a_gateway_without_the_policy_server_is_stood_in_for() {
    let cluster = Cluster::running("nolease", 3);
    let scene = Scene::begin(&cluster, 1_000, 40);
    pass(500);
    let cut = moment();
    shares_move(&cluster);
    cluster.cut_management(1);
    pass(4_000);
    new_ones_work(&cluster, "during", 50_000_000, 500);
    cluster.heal_management(1);
    pass(2_000);
    cluster.wait_whole();
    new_ones_work(&cluster, "after", 60_000_000, 500);
    scene.end(&cluster).check_outage(cut);
}

/// Cut off from the other gateways alone, it still serves what comes to it and is its own.
#[test]
fn gateways_that_do_not_hear_each_other_open_nothing_twice() {
    let cluster = Cluster::running("deaf", 3);
    let scene = Scene::begin(&cluster, 500, 20);
    for number in cluster.all() {
        cluster.cut_peers(number);
    }
    pass(3_000);
    for number in cluster.all() {
        cluster.heal_peers(number);
    }
    pass(2_000);
    cluster.wait_whole();
    new_ones_work(&cluster, "after", 60_000_000, 500);
    let ended = scene.end(&cluster);
    ended.held.check_survived(99);
    // What had to travel had to wait.
    let longest = ended.probes.longest(0.2);
    assert!(longest <= 3.0 + 2.0 + OUTAGE, "{}", ended.probes.summary());
}
