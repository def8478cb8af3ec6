//! Clients of a Service whose packets come to any gateway.

use std::time::Duration;

use vipgate_tests::cluster::{Clients, Cluster, HTTP, LineServer, Outcome, SHARED, Traffic, pass};

use crate::scene::{OUTAGE, RETRANSMISSION, come_back, kill};

/// Clients outside, to a VIP.
fn clients(cluster: &Cluster, count: u32, udp: bool) -> [Clients; 2] {
    let mut clients = [0, 1].map(|family| {
        let traffic =
            Traffic { udp, to: (SHARED[family], HTTP), ..Traffic::held(SHARED[family], Vec::new(), count / 2) };
        let name = format!("inbound-{udp}-{family}");
        let first = 10_000_000 * (1 + family as u32) + 5_000_000 * u32::from(udp);
        Clients::start(cluster.folder.path(), &cluster.server, &name, first, &traffic)
    });
    for clients in &mut clients {
        clients.wait_open(Duration::from_secs(20));
    }
    clients
}

/// Pods that serve.
fn backends(cluster: &Cluster) -> Vec<LineServer> {
    let hosts = [&cluster.pods[0], &cluster.pods[1], &cluster.crowd];
    hosts.map(|host| LineServer::start(cluster.folder.path(), host)).into_iter().collect()
}

#[test]
fn clients_of_a_service_keep_their_backend_when_a_gateway_dies() {
    let mut cluster = Cluster::running("inbound", 3);
    let watch = cluster.watch();
    let backends = backends(&cluster);
    let held = clients(&cluster, 1_000, false);
    let flows = clients(&cluster, 100, true);
    for turn in 1..=3 {
        cluster.rehash(turn);
        pass(300);
    }
    pass(500);
    kill(&mut cluster, 0);
    pass(3_000);
    come_back(&mut cluster, 0);
    pass(2_000);
    let [held, flows] = [held, flows].map(Clients::end_all);
    let [held, flows] = [held, flows].map(|[four, six]| Outcome([four.0, six.0].concat()));
    println!("connections: {}\nflows: {}", held.summary(), flows.summary());
    for outcome in [&held, &flows] {
        outcome.check_nobody_else_was_heard();
        outcome.check_survived(99);
    }
    assert!(held.p99(0.2) <= OUTAGE + RETRANSMISSION, "{}", held.summary());
    watch.check(&cluster);
    // Who is served by one pod is served by no other.
    let mut records: Vec<_> = backends.into_iter().flat_map(LineServer::end).collect();
    assert!(records.iter().all(|record| record.faults == 0));
    records.sort_by(|one, other| one.identity.cmp(&other.identity));
    let served_twice: Vec<_> = records.windows(2).filter(|pair| pair[0].identity == pair[1].identity).collect();
    assert!(
        served_twice.len() * 100 <= records.len(),
        "{} had two backends: {:?}",
        served_twice.len(),
        served_twice[0]
    );
}
