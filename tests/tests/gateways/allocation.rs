//! Ports that several gateways give out for one VIP toward one far side.

use std::collections::BTreeSet;
use std::time::Duration;

use vipgate_tests::cluster::{
    Clients, Cluster, LINES, Outcome, SERVER, SHARED, Traffic, check_all_different, sources_a,
};

use crate::scene::seen_as;

/// Flows that begin at the same time, in three crowds: more open files a process may not have everywhere.
fn ask(cluster: &Cluster, count: u32, patience: u32) -> [Outcome; 3] {
    let traffic = Traffic {
        to: (SERVER[0], LINES),
        sources: sources_a(0),
        count,
        rate: 2_000,
        lines: 1,
        patience,
        // Who has gone would leave his port to the next one, who would be the same session.
        stay: true,
        udp: true,
        ..Traffic::default()
    };
    let crowds = [1, 2, 3].map(|crowd| cluster.crowd(&format!("crowd-{crowd}"), crowd * 10_000_000, &traffic));
    crowds.map(|clients: Clients| clients.wait(Duration::from_secs(90)))
}

#[test]
fn disjoint_allocation() {
    const EACH: u32 = 15_000;
    let cluster = Cluster::running("disjoint", 3);
    let watch = cluster.watch();
    let outcomes = ask(&cluster, EACH, 5);
    for outcome in &outcomes {
        outcome.check_nobody_else_was_heard();
        let [all, lost] = outcome.lost();
        // A datagram may be lost on a busy machine.
        assert!(lost * 200 <= all, "{}\n{}", outcome.summary(), cluster.drops());
    }
    let records = watch.check(&cluster);
    check_all_different(&records);
    assert_eq!(seen_as(&records), [SHARED[0]]);
    assert!(cluster.dropped("ports_exhausted") < 0.5, "{}", cluster.drops());
    println!("{} flows toward one far side", records.len());
    cluster.check_frames();
}

/// Asked for twice as many as there are, they give out all there are, and none twice.
#[test]
fn every_port_is_given_out_once() {
    const PORTS: usize = 48 * 64;
    let mut cluster = Cluster::new("exhausted", 3);
    cluster.start_all(&format!("ports: {{range: 1024-{}}}", 1024 + PORTS - 1));
    let watch = cluster.watch();
    // Each of those in vain receives an ICMP error, as long as there aren't too many.
    cluster.ledger.expect(["ports_exhausted", "answers_limited"]);
    ask(&cluster, 2 * PORTS as u32 / 3, 3);
    let records = watch.check(&cluster);
    check_all_different(&records);
    let ports: BTreeSet<u16> = records.iter().map(|record| record.peer.1).collect();
    assert!(ports.len() * 100 >= PORTS * 98, "{} of {PORTS}\n{}", ports.len(), cluster.drops());
    assert!(cluster.dropped("ports_exhausted") > 100.0, "{}", cluster.drops());
}
