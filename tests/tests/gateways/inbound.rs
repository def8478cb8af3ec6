//! Clients of a Service whose packets arrive at any gateway.

use std::time::Duration;

use vipgate_tests::cluster::{
    BGP_VIPS, ClientConfig, ClientResults, Clients, Cluster, HTTP_PORT, LineServer, sleep_ms,
};

use crate::scenario::{MAX_OUTAGE, RETRANSMISSION_DELAY, kill_gateway, restart_gateway};

/// Clients outside of a VIP's Service.
fn clients(cluster: &Cluster, count: u32, udp: bool) -> [Clients; 2] {
    let mut clients = [0, 1].map(|family| {
        let traffic = ClientConfig {
            udp,
            server: (BGP_VIPS[family], HTTP_PORT),
            ..ClientConfig::held_connections(BGP_VIPS[family], Vec::new(), count / 2)
        };
        let name = format!("inbound-{udp}-{family}");
        let first = 10_000_000 * (1 + family as u32) + 5_000_000 * u32::from(udp);
        Clients::start(cluster.folder.path(), &cluster.server, &name, first, &traffic)
    });
    for clients in &mut clients {
        clients.wait_established(Duration::from_secs(20));
    }
    clients
}

/// Line servers on the backends' pods.
fn backends(cluster: &Cluster) -> Vec<LineServer> {
    let hosts = [&cluster.pods[0], &cluster.pods[1], &cluster.bulk_pods];
    hosts.map(|host| LineServer::start(cluster.folder.path(), host)).into_iter().collect()
}

#[test]
fn clients_of_a_service_keep_their_backend_when_a_gateway_dies() {
    let mut cluster = Cluster::running("inbound", 3);
    let monitor = cluster.start_monitor();
    let backends = backends(&cluster);
    let held = clients(&cluster, 1_000, false);
    let flows = clients(&cluster, 100, true);
    for turn in 1..=3 {
        cluster.rehash(turn);
        sleep_ms(300);
    }
    sleep_ms(500);
    kill_gateway(&mut cluster, 0);
    sleep_ms(3_000);
    restart_gateway(&mut cluster, 0);
    sleep_ms(2_000);
    let [held, flows] = [held, flows].map(Clients::end_all);
    let [held, flows] = [held, flows].map(|[ipv4, ipv6]| ClientResults([ipv4.0, ipv6.0].concat()));
    println!("connections: {}\nflows: {}", held.summary(), flows.summary());
    for outcome in [&held, &flows] {
        outcome.check_no_misdelivery();
        outcome.check_survived(99);
    }
    assert!(held.p99_wait(0.2) <= MAX_OUTAGE + RETRANSMISSION_DELAY, "{}", held.summary());
    monitor.verify(&cluster);
    // Each client stays with one backend.
    let mut records: Vec<_> = backends.into_iter().flat_map(LineServer::end).collect();
    assert!(records.iter().all(|record| record.errors == 0));
    records.sort_by(|one, other| one.identity.cmp(&other.identity));
    let with_two_backends: Vec<_> = records.windows(2).filter(|pair| pair[0].identity == pair[1].identity).collect();
    assert!(
        with_two_backends.len() * 100 <= records.len(),
        "{} had two backends: {:?}",
        with_two_backends.len(),
        with_two_backends[0]
    );
}
