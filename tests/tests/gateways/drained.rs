//! A gateway that is taken away in order: nobody notices.

use std::time::Duration;

use vipgate_tests::cluster::{Cluster, SERVER, Traffic, pass, sources_a};
use vipgate_tests::wait_for;

use crate::scene::{OUTAGE, Scene, come_back, new_ones_work, shares_move};

#[test]
fn who_is_drained_and_is_not_takes_its_part_again() {
    let cluster = Cluster::running("undrain", 3);
    let opened = || cluster.gateways[1].metric("vipgate_sessions_created_total", "");
    let scene = Scene::begin(&cluster, 300, 20);
    shares_move(&cluster);
    assert_eq!(cluster.gateways[1].command(&["drain"]).0, 0);
    pass(2_000);
    assert_eq!(cluster.gateways[1].command(&["undrain"]).0, 0);
    cluster.wait_whole();
    let before = opened();
    let works = || {
        new_ones_work(&cluster, "again", 50_000_000, 300);
        opened() - before > 10.0
    };
    assert!(wait_for(Duration::from_secs(10), works), "it opens nothing any more\n{}", cluster.gateways[1].log_tail());
    scene.end(&cluster).check_unharmed(OUTAGE / 2.0);
}

/// A SYN that is lost is sent again after a second: what begins while shares change hands is not to wait for that.
#[test]
fn who_begins_while_one_is_drained_and_comes_back_does_not_wait() {
    const RATE: u32 = 260;
    let cluster = Cluster::running("begin", 3);
    let watch = cluster.watch();
    let traffic = Traffic::brief(SERVER[0], sources_a(0), RATE * 10, RATE);
    let brief = cluster.crowd("begin", 10_000_000, &traffic);
    for word in ["drain", "undrain", "drain", "undrain"] {
        pass(1_500);
        assert_eq!(cluster.gateways[1].command(&[word]).0, 0);
    }
    let brief = brief.wait(Duration::from_mins(1));
    println!("{}\n{}", brief.summary(), cluster.drops());
    brief.check_all_well();
    assert!(brief.longest(f64::MAX) < 0.95, "{}", brief.summary());
    for reason in ["no_lease", "no_owner"] {
        assert!(cluster.dropped(reason) < 1.0, "{reason}: {}", cluster.drops());
    }
    watch.check_handover(&cluster);
}

/// One is drained under load, ends when it says that nothing is left, and nobody notices.
#[test]
fn a_drain() {
    let mut cluster = Cluster::running("drain", 3);
    let scene = Scene::begin(&cluster, 1_000, 40);
    let brief = cluster.crowd("brief", 50_000_000, &Traffic::brief(SERVER[0], sources_a(0), 1_000, 200));
    // Of these there are always some that have just begun.
    let traffic = Traffic { rate: 200, paces: &[(100, 0.3, 0.6)], ..Traffic::held(SERVER[0], sources_a(0), 1_000) };
    let young = cluster.crowd("young", 60_000_000, &traffic);
    pass(2_000);
    shares_move(&cluster);
    let (code, said, complaint) = cluster.gateways[0].command(&["drain"]);
    println!("{said}{}", cluster.drops());
    assert!(code == 0 && said.contains("serves no more"), "{code}: {said}{complaint}");
    cluster.spread_over(&cluster.but(0));
    pass(200);
    cluster.gateways[0].end("TERM");
    brief.wait(Duration::from_mins(1)).check_all_well();
    pass(1_000);
    let young = young.end();
    println!("young: {}\n{}", young.summary(), cluster.drops());
    young.check_all_well();
    scene.end(&cluster).check_unharmed(OUTAGE / 2.0);
}

/// As an upgrade does it: one after the other, in order.
#[test]
fn a_rolling_restart() {
    let mut cluster = Cluster::running("rolling", 3);
    let scene = Scene::begin(&cluster, 1_000, 40);
    for number in cluster.all() {
        shares_move(&cluster);
        cluster.gateways[number].command(&["drain"]);
        pass(1_000);
        cluster.spread_over(&cluster.but(number));
        pass(200);
        cluster.gateways[number].end("TERM");
        come_back(&mut cluster, number);
        pass(500);
    }
    new_ones_work(&cluster, "after", 60_000_000, 500);
    scene.end(&cluster).check_unharmed(OUTAGE / 2.0);
}
