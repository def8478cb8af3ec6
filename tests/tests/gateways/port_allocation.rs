//! Ports that several gateways allocate for one VIP toward one destination.

use std::collections::BTreeSet;
use std::time::Duration;

use vipgate_tests::cluster::{
    BGP_VIPS, ClientConfig, ClientResults, Clients, Cluster, LINE_PORT, SERVER, check_unique_tuples, sources_a,
};

use crate::scenario::source_addresses;

/// Flows that start at the same time, in three processes: not every system allows a process this many open files.
fn open_flows(cluster: &Cluster, count: u32, timeout: u32) -> [ClientResults; 3] {
    let traffic = ClientConfig {
        server: (SERVER[0], LINE_PORT),
        source_addresses: sources_a(0),
        count,
        rate: 2_000,
        lines: 1,
        timeout,
        // A port that a client releases would be reused by the next one, in the same session.
        keep_port: true,
        udp: true,
        ..ClientConfig::default()
    };
    let sets = [1, 2, 3].map(|set| cluster.start_clients(&format!("flows-{set}"), set * 10_000_000, &traffic));
    sets.map(|clients: Clients| clients.wait(Duration::from_secs(90)))
}

#[test]
fn port_allocation_is_disjoint_across_gateways() {
    const EACH: u32 = 15_000;
    let cluster = Cluster::running("disjoint", 3);
    let monitor = cluster.start_monitor();
    let outcomes = open_flows(&cluster, EACH, 5);
    for outcome in &outcomes {
        outcome.check_no_misdelivery();
        let [all, lost] = outcome.total_and_failed();
        // Single datagrams may be lost on a busy machine.
        assert!(lost * 200 <= all, "{}\n{}", outcome.summary(), cluster.drop_summary());
    }
    let records = monitor.verify(&cluster);
    check_unique_tuples(&records);
    assert_eq!(source_addresses(&records), [BGP_VIPS[0]]);
    assert!(cluster.drop_count("ports_exhausted") < 0.5, "{}", cluster.drop_summary());
    println!("{} flows toward one destination", records.len());
    cluster.check_frames();
}

/// Requests for twice the available ports: all ports are allocated, and none twice.
#[test]
fn every_port_is_allocated_once() {
    const PORTS: usize = 48 * 64;
    let mut cluster = Cluster::new("exhausted", 3);
    cluster.start_all(&format!("ports: {{range: 1024-{}}}", 1024 + PORTS - 1));
    let monitor = cluster.start_monitor();
    // Each rejected flow receives an ICMP error, within the rate limit.
    cluster.accounting.expect(["ports_exhausted", "answers_limited"]);
    open_flows(&cluster, 2 * PORTS as u32 / 3, 3);
    let records = monitor.verify_with_more_hops(&cluster);
    check_unique_tuples(&records);
    let ports: BTreeSet<u16> = records.iter().map(|record| record.peer.1).collect();
    assert!(ports.len() * 100 >= PORTS * 98, "{} of {PORTS}\n{}", ports.len(), cluster.drop_summary());
    assert!(cluster.drop_count("ports_exhausted") > 100.0, "{}", cluster.drop_summary());
}
