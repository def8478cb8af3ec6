//! Forwarding loops: packets without an owner, at gateways with different membership views.

use std::time::Duration;

use vipgate_lab::Process;
use vipgate_tests::cluster::{BGP_VIPS, Cluster, script_path, sleep_ms};

#[test]
fn unowned_packets_do_not_loop() {
    const COUNT: u32 = 20_000;
    let cluster = Cluster::running("loops", 3);
    let monitor = cluster.start_monitor();
    let start_probe = |(family, vip): (usize, &str)| {
        let log = cluster.folder.path().join(format!("probe-{family}.log"));
        let first = (10_000_000 * (family as u32 + 1)).to_string();
        let command = ["python3", &script_path("cluster/knock.py"), vip, &COUNT.to_string(), "5000", &first];
        cluster.server.spawn(&command, &log).unwrap()
    };
    // Each packet is dropped once, wherever it was forwarded.
    cluster.accounting.expect_exactly([("no_service", 2 * u64::from(COUNT))]);
    let probes: Vec<Process> = BGP_VIPS.into_iter().enumerate().map(start_probe).collect();
    // Also while the routes change.
    for turn in 1..=3 {
        cluster.rehash(turn);
        sleep_ms(500);
    }
    for mut probe in probes {
        assert!(probe.wait(Duration::from_secs(30)).is_some_and(|status| status.success()));
    }
    sleep_ms(200);
    let count = f64::from(COUNT);
    let sent = cluster.metric("vipgate_packets_total", "direction=\"peer_out\"");
    let received = cluster.metric("vipgate_packets_total", "direction=\"peer_in\"");
    println!("{sent} packets sent through the tunnel, {received} received, of {} probes", 2 * COUNT);
    assert!(sent <= 2.0 * count && received <= sent, "{sent} {received}");
    assert!(sent >= 0.4 * count, "two thirds arrive at a gateway without the port: {sent}\n{}", cluster.drop_summary());
    // The monitor verifies how often each packet crossed the tunnel.
    monitor.verify(&cluster);
    cluster.check_frames();
}
