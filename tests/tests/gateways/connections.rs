//! Many connections over several gateways without faults.

use std::time::Duration;

use vipgate_tests::cluster::{BGP_VIPS, ClientConfig, Cluster, SERVER, check_unique_tuples, sources_a};
use vipgate_tests::iperf3;

use crate::scenario::expect_too_big;

#[test]
fn ten_thousand_connections_over_three_gateways() {
    const COUNT: u32 = 5_000;
    let cluster = Cluster::running("tenk", 3);
    let monitor = cluster.start_monitor();
    let ipv4 = cluster.start_clients(
        "ipv4",
        10_000_000,
        &ClientConfig::short_connections(SERVER[0], sources_a(0), COUNT, 1_000),
    );
    let ipv6 = cluster.start_clients(
        "ipv6",
        20_000_000,
        &ClientConfig::short_connections(SERVER[1], sources_a(1), COUNT, 1_000),
    );
    for clients in [ipv4, ipv6] {
        clients.wait(Duration::from_mins(1)).check_all_succeeded();
    }
    let records = monitor.verify(&cluster);
    assert_eq!(records.len(), 2 * COUNT as usize);
    check_unique_tuples(&records);
    let unexpected: Vec<_> = records.iter().filter(|record| !BGP_VIPS.contains(&record.peer.0.as_str())).collect();
    assert!(unexpected.is_empty(), "{} were seen with another address: {:?}", unexpected.len(), unexpected[0]);
    // Each gateway has opened sessions, and packets were forwarded to their owners.
    for gateway in &cluster.gateways {
        assert!(gateway.metric("vipgate_sessions_created_total", "") > 1000.0, "{}", gateway.name);
        assert!(gateway.metric("vipgate_packets_total", "direction=\"peer_out\"") > 0.0, "{}", gateway.name);
        assert!(gateway.metric("vipgate_packets_total", "direction=\"peer_in\"") > 0.0, "{}", gateway.name);
    }
    cluster.check_frames();
}

#[test]
fn a_single_gateway_cluster_works() {
    let cluster = Cluster::running("alone", 1);
    let monitor = cluster.start_monitor();
    let mut held =
        cluster.start_clients("held", 10_000_000, &ClientConfig::held_connections(SERVER[0], sources_a(0), 300));
    let mut probes = cluster.start_clients("probes", 20_000_000, &ClientConfig::probes(SERVER[1], sources_a(1), 20));
    held.wait_established(Duration::from_secs(20));
    probes.wait_established(Duration::from_secs(20));
    let brief =
        cluster.start_clients("brief", 30_000_000, &ClientConfig::short_connections(SERVER[0], sources_a(0), 500, 500));
    brief.wait(Duration::from_mins(1)).check_all_succeeded();
    for clients in [held, probes] {
        let outcome = clients.end();
        outcome.check_all_succeeded();
        println!("{}", outcome.summary());
        assert!(outcome.longest_wait(0.2) < 1.0, "{}", outcome.summary());
    }
    let records = monitor.verify(&cluster);
    assert_eq!(records.len(), 820);
    check_unique_tuples(&records);
    assert!(records.iter().all(|record| BGP_VIPS.contains(&record.peer.0.as_str())));
    cluster.check_frames();
}

#[test]
fn iperf3_runs_in_both_directions_over_several_gateways() {
    let cluster = Cluster::running("iperf", 3);
    let _server = iperf3::start_server(&cluster.server, cluster.folder.path());
    expect_too_big(&cluster);
    for (server, reverse) in [(SERVER[0], false), (SERVER[0], true), (SERVER[1], false), (SERVER[1], true)] {
        // With six connections, some are routed via a gateway that doesn't own them.
        let mut arguments = vec!["-t", "1", "-P", "6", "-c", server];
        arguments.extend(reverse.then_some("-R"));
        let rate = iperf3::measure(&cluster.pods[0], &arguments, "bits_per_second");
        assert!(rate > 20e6, "{server}, reverse {reverse}: {rate} bit/s\n{}", cluster.drop_summary());
        println!("{server}, reverse {reverse}: {:.0} Mbit/s", rate / 1e6);
    }
    cluster.check_frames();
}
