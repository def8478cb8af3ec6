//! The world itself, without gateways: what the other scenarios cut, spoil and spread.

use vipgate::lab::Host;
use vipgate_tests::cluster::{Cluster, Impairment};

/// How many of these pings come back, of a hundred, and how long the median one takes in milliseconds.
fn ping(host: &Host, to: &str, count: u32) -> (u32, f64) {
    let count = count.to_string();
    let said = host.output(&["ping", "-i", "0.01", "-c", &count, "-W", "0.3", to]);
    // Without a single answer it fails, and says so.
    let said = said.unwrap_or_else(|error| error.to_string());
    let mut times: Vec<f64> =
        said.lines().filter_map(|line| line.split_once("time=")?.1.split(' ').next()?.parse().ok()).collect();
    times.sort_by(f64::total_cmp);
    (times.len() as u32, times.get(times.len() / 2).copied().unwrap_or_default())
}

#[test]
fn cables_can_be_cut_healed_and_spoilt() {
    let cluster = Cluster::new("world", 3);
    let host = |number: usize| &cluster.gateways[number].host;
    let hears = |one: usize, other: usize| ping(host(one), &cluster.gateways[other].peer, 5).0 > 0;
    let managed = |number: usize| ping(host(number), "10.3.0.254", 5).0 > 0;
    assert!(hears(0, 1) && hears(1, 2) && managed(0) && managed(1));
    cluster.cut_peers(0);
    assert!(!hears(0, 1) && hears(1, 2) && managed(0));
    cluster.heal_peers(0);
    cluster.cut_management(0);
    assert!(hears(0, 1) && !managed(0) && managed(1));
    cluster.heal_management(0);
    cluster.cut_between(0, 1);
    assert!(!hears(0, 1) && hears(1, 2) && hears(0, 2) && managed(0));
    cluster.heal_between();
    assert!(hears(0, 1) && managed(0));

    let impaired = cluster.impair_peers(Impairment { loss: 10.0, repeat: 0.0, delay: 20.0, jitter: 10.0 }, 1);
    let (heard, median) = ping(host(0), &cluster.gateways[1].peer, 200);
    assert!((120..190).contains(&heard) && (40.0..80.0).contains(&median), "{heard} of 200 in {median} ms");
    impaired.be_perfect();
    let (heard, median) = ping(host(0), &cluster.gateways[1].peer, 50);
    assert!(heard == 50 && median < 10.0, "{heard} of 50 in {median} ms");
    let [frames, lost] = cluster.repair_peers(impaired);
    assert!(frames > 300 && lost > 10, "{lost} of {frames}");
    assert!(hears(0, 1) && hears(2, 1));
}
