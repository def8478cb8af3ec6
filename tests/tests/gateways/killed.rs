//! A gateway dies, and comes back.

use std::time::Duration;

use vipgate_tests::cluster::{Clients, Cluster, Download, Outcome, SERVER, Traffic, pass, sources_a};

use crate::scene::{
    AGE, NOTICED, OUTAGE, Scene, come_back, kill, new_ones_work, probes, shares_move, tunnels_are_narrow,
};

#[test]
fn a_killed_gateway() {
    let mut cluster = Cluster::running("killed", 3);
    let scene = Scene::begin(&cluster, 5_000, 40);
    // Some of these stand for a moment when it happens, others begin just then.
    let traffic = Traffic { rate: 400, ..Traffic::held(SERVER[0], sources_a(0), 800) };
    let mut late = cluster.crowd("late", 40_000_000, &traffic);
    pass(1_200);
    let died = kill(&mut cluster, 0);
    // Nobody was told of those that had just begun: they may be lost.
    late.wait_begun(Duration::from_secs(20));
    new_ones_work(&cluster, "during", 50_000_000, 500);
    // It comes back, with what was its own and what came meanwhile.
    let returning = probes(&cluster, "returning", 60_000_000, 20);
    come_back(&mut cluster, 0);
    pass(3_000);
    new_ones_work(&cluster, "after", 70_000_000, 500);
    for outcome in Clients::end_all(returning) {
        println!("return: {}", outcome.summary());
        outcome.check_all_well();
        assert!(outcome.longest(0.2) <= OUTAGE, "its return: {}", outcome.summary());
    }
    let late = late.end();
    let (older, younger) = (late.older(AGE, died), late.younger(died + NOTICED));
    println!("older: {}; younger: {}", older.summary(), younger.summary());
    older.check_survived(99);
    assert!(younger.0.len() > 100, "{}", younger.summary());
    younger.check_all_well();
    scene.end(&cluster).check_outage(died);
}

/// Routers that learn nothing go on sending a third of all packets to nobody; who is sent to others is served.
#[test]
fn a_killed_gateway_to_which_routers_go_on_sending() {
    let mut cluster = Cluster::running("blind", 3);
    let scene = Scene::begin(&cluster, 1_000, 40);
    pass(500);
    shares_move(&cluster);
    let died = cluster.gateways[1].kill();
    pass(2_000);
    cluster.gateways[1].start("");
    cluster.wait_whole();
    pass(2_000);
    let ended = scene.end(&cluster);
    let survivors = ended.held.older(AGE, died);
    survivors.check_survived(99);
    // Two of three are sent the right way out, and two of three back.
    let waits = |outcome: &Outcome| outcome.0.iter().filter(|client| client.longest[0] <= OUTAGE).count();
    let (soon, all) = (waits(&ended.probes), ended.probes.0.len());
    assert!(soon * 4 >= all, "{soon} of {all} flows had to wait a second at most: {}", ended.probes.summary());
}

/// It comes and goes, and never stays long enough to be of use; nobody is worse off than the first time.
#[test]
fn a_gateway_that_comes_and_goes() {
    let mut cluster = Cluster::running("flaps", 3);
    let scene = Scene::begin(&cluster, 500, 40);
    pass(500);
    let died = kill(&mut cluster, 2);
    for round in 0..3 {
        pass(800);
        cluster.gateways[2].start("");
        pass(400 * round);
        cluster.gateways[2].kill();
    }
    pass(1_000);
    come_back(&mut cluster, 2);
    pass(1_000);
    new_ones_work(&cluster, "after", 70_000_000, 300);
    scene.end(&cluster).check_outage(died);
}

#[test]
fn downloads_go_on_while_gateways_are_killed_one_after_the_other() {
    const BYTES: u64 = 40_000_000;
    const RATE: u64 = 4_000_000;
    let mut cluster = Cluster::running("downloads", 3);
    let watch = cluster.watch();
    tunnels_are_narrow(&cluster);
    let mut downloads = Vec::new();
    for pod in [0, 1, 2] {
        for server in SERVER {
            downloads.push(Download::start(cluster.folder.path(), &cluster.pods[pod], server, BYTES, RATE));
        }
    }
    for number in [0, 1] {
        pass(1_000);
        kill(&mut cluster, number);
        pass(1_500);
        come_back(&mut cluster, number);
    }
    let longest = downloads.into_iter().map(|download| download.end(Duration::from_secs(40)));
    let longest: Vec<f64> = longest.collect();
    println!("longest gaps in seconds: {longest:?}");
    // TCP in a hurry backs off: what is lost at the end of an outage is sent again after as long once more.
    assert!(longest.iter().all(|gap| *gap <= 2.0 * OUTAGE + 0.5), "{longest:?}");
    watch.check_handover(&cluster);
}
