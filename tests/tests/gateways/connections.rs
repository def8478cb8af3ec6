//! Many connections over several gateways, when all is well.

use std::fs;
use std::time::Duration;

use serde_json::Value;
use vipgate_tests::cluster::{Cluster, SERVER, SHARED, Traffic, check_all_different, sources_a};
use vipgate_tests::wait_for;

use crate::scene::tunnels_are_narrow;

#[test]
fn ten_thousand_connections_over_three_gateways() {
    const COUNT: u32 = 5_000;
    let cluster = Cluster::running("tenk", 3);
    let watch = cluster.watch();
    let four = cluster.crowd("four", 10_000_000, &Traffic::brief(SERVER[0], sources_a(0), COUNT, 1_000));
    let six = cluster.crowd("six", 20_000_000, &Traffic::brief(SERVER[1], sources_a(1), COUNT, 1_000));
    for clients in [four, six] {
        clients.wait(Duration::from_mins(1)).check_all_well();
    }
    let records = watch.check(&cluster);
    assert_eq!(records.len(), 2 * COUNT as usize);
    check_all_different(&records);
    let strange: Vec<_> = records.iter().filter(|record| !SHARED.contains(&record.peer.0.as_str())).collect();
    assert!(strange.is_empty(), "{} were seen as somebody else: {:?}", strange.len(), strange[0]);
    // Each of the gateways has opened some, and what went the wrong way has travelled.
    for gateway in &cluster.gateways {
        assert!(gateway.metric("vipgate_sessions_created_total", "") > 1000.0, "{}", gateway.name);
        assert!(gateway.metric("vipgate_packets_total", "direction=\"peer_out\"") > 0.0, "{}", gateway.name);
        assert!(gateway.metric("vipgate_packets_total", "direction=\"peer_in\"") > 0.0, "{}", gateway.name);
    }
    cluster.check_frames();
}

#[test]
fn one_gateway_alone_serves_the_world() {
    let cluster = Cluster::running("alone", 1);
    let watch = cluster.watch();
    let mut held = cluster.crowd("held", 10_000_000, &Traffic::held(SERVER[0], sources_a(0), 300));
    let mut probes = cluster.crowd("probes", 20_000_000, &Traffic::probes(SERVER[1], sources_a(1), 20));
    held.wait_open(Duration::from_secs(20));
    probes.wait_open(Duration::from_secs(20));
    let brief = cluster.crowd("brief", 30_000_000, &Traffic::brief(SERVER[0], sources_a(0), 500, 500));
    brief.wait(Duration::from_mins(1)).check_all_well();
    for clients in [held, probes] {
        let outcome = clients.end();
        outcome.check_all_well();
        println!("{}", outcome.summary());
        assert!(outcome.longest(0.2) < 1.0, "{}", outcome.summary());
    }
    let records = watch.check(&cluster);
    assert_eq!(records.len(), 820);
    check_all_different(&records);
    assert!(records.iter().all(|record| SHARED.contains(&record.peer.0.as_str())));
    cluster.check_frames();
}

#[test]
fn iperf3_runs_both_ways_over_several_gateways() {
    let cluster = Cluster::running("iperf", 3);
    let log = cluster.folder.path().join("iperf3.log");
    let _server = cluster.server.spawn(&["iperf3", "-s", "--forceflush"], &log).unwrap();
    assert!(wait_for(Duration::from_secs(5), || fs::read_to_string(&log).is_ok_and(|log| log.contains("listening"))));
    tunnels_are_narrow(&cluster);
    for (server, reverse) in [(SERVER[0], false), (SERVER[0], true), (SERVER[1], false), (SERVER[1], true)] {
        // Of so many at once, some come to who doesn't have them.
        let mut command = vec!["iperf3", "-J", "-t", "1", "-P", "6", "-c", server];
        command.extend(reverse.then_some("-R"));
        let answer: Value = serde_json::from_str(&cluster.pods[0].output(&command).unwrap()).unwrap();
        let rate = answer["end"]["sum_received"]["bits_per_second"].as_f64().unwrap();
        assert!(rate > 20e6, "{server}, reverse {reverse}: {rate} bit/s\n{}", cluster.drops());
        println!("{server}, reverse {reverse}: {:.0} Mbit/s", rate / 1e6);
    }
    cluster.check_frames();
}
