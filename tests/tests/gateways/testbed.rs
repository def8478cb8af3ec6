//! Self-test of the cluster's links, without gateways: cuts, repairs and impairments.

use vipgate_lab::Host;
use vipgate_tests::cluster::{Cluster, Impairment};

/// Pings: the number of replies, and the median round trip time in milliseconds.
fn ping(host: &Host, to: &str, count: u32) -> (u32, f64) {
    let count = count.to_string();
    let output = host.output(&["ping", "-i", "0.01", "-c", &count, "-W", "0.3", to]);
    // ping fails without a reply.
    let output = output.unwrap_or_else(|error| error.to_string());
    let mut times: Vec<f64> =
        output.lines().filter_map(|line| line.split_once("time=")?.1.split(' ').next()?.parse().ok()).collect();
    times.sort_by(f64::total_cmp);
    (times.len() as u32, times.get(times.len() / 2).copied().unwrap_or_default())
}

#[test]
fn links_can_be_cut_healed_and_impaired() {
    let cluster = Cluster::new("world", 3);
    let host = |number: usize| &cluster.gateways[number].host;
    let reaches = |one: usize, other: usize| ping(host(one), &cluster.gateways[other].peer_address, 5).0 > 0;
    let managed = |number: usize| ping(host(number), "10.3.0.254", 5).0 > 0;
    assert!(reaches(0, 1) && reaches(1, 2) && managed(0) && managed(1));
    cluster.cut_peers(0);
    assert!(!reaches(0, 1) && reaches(1, 2) && managed(0));
    cluster.heal_peers(0);
    cluster.cut_management(0);
    assert!(reaches(0, 1) && !managed(0) && managed(1));
    cluster.heal_management(0);
    cluster.cut_between(0, 1);
    assert!(!reaches(0, 1) && reaches(1, 2) && reaches(0, 2) && managed(0));
    cluster.heal_between();
    assert!(reaches(0, 1) && managed(0));

    let impaired = cluster.impair_peers(Impairment { loss: 10.0, duplicate: 0.0, delay: 20.0, jitter: 10.0 }, 1);
    let (replies, median) = ping(host(0), &cluster.gateways[1].peer_address, 200);
    assert!((120..190).contains(&replies) && (40.0..80.0).contains(&median), "{replies} of 200 in {median} ms");
    impaired.stop_impairment();
    let (replies, median) = ping(host(0), &cluster.gateways[1].peer_address, 50);
    assert!(replies == 50 && median < 10.0, "{replies} of 50 in {median} ms");
    let [frames, lost] = cluster.repair_peers(impaired);
    assert!(frames > 300 && lost > 10, "{lost} of {frames}");
    assert!(reaches(0, 1) && reaches(2, 1));
}
