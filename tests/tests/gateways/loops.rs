//! Packets that belong to nobody, at gateways who each believe that another has it.

use std::time::Duration;

use vipgate::lab::Process;
use vipgate_tests::cluster::{Cluster, SHARED, pass, script};

#[test]
fn no_loops() {
    const COUNT: u32 = 20_000;
    let cluster = Cluster::running("loops", 3);
    let watch = cluster.watch();
    let knock = |(family, vip): (usize, &str)| {
        let log = cluster.folder.path().join(format!("knock-{family}.log"));
        let first = (10_000_000 * (family as u32 + 1)).to_string();
        let command = ["python3", &script("cluster/knock.py"), vip, &COUNT.to_string(), "5000", &first];
        cluster.server.spawn(&command, &log).unwrap()
    };
    // However far each travels, it is dropped once.
    cluster.ledger.expect_exactly([("no_service", 2 * u64::from(COUNT))]);
    let knocking: Vec<Process> = SHARED.into_iter().enumerate().map(knock).collect();
    // Also when the way changes while packets travel.
    for turn in 1..=3 {
        cluster.rehash(turn);
        pass(500);
    }
    for mut knocking in knocking {
        assert!(knocking.wait(Duration::from_secs(30)).is_some_and(|status| status.success()));
    }
    pass(200);
    let count = f64::from(COUNT);
    let sent = cluster.metric("vipgate_packets_total", "direction=\"peer_out\"");
    let received = cluster.metric("vipgate_packets_total", "direction=\"peer_in\"");
    println!("{sent} packets travelled, {received} arrived, of {} that knocked", 2 * COUNT);
    assert!(sent <= 2.0 * count && received <= sent, "{sent} {received}");
    assert!(sent >= 0.4 * count, "two thirds come to who doesn't have the port: {sent}\n{}", cluster.drops());
    // How often each has travelled, the watch has counted.
    watch.check(&cluster);
    cluster.check_frames();
}
