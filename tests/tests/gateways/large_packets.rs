//! Packets larger than the MTU of the tunnel between gateways.

use std::time::Duration;

use vipgate_tests::cluster::{BGP_VIPS, ClientConfig, Clients, Cluster, Download, SERVER, sleep_ms};

use crate::scenario::{expect_too_big, source_addresses};

#[test]
fn large_packets_are_forwarded_between_gateways() {
    const BYTES: u64 = 10_000_000;
    let cluster = Cluster::running("large", 3);
    let monitor = cluster.start_monitor();
    // Wherever packets arrive, two of three gateways aren't the owner.
    expect_too_big(&cluster);
    for (out, back) in [(0, 1), (1, 2), (2, 0)] {
        cluster.route_inside_via(&[out]);
        cluster.route_outside_via(&[back]);
        for server in SERVER {
            for pod in [0, 1] {
                let download = Download::start(&cluster.server, server, &cluster.pods[pod], BYTES, 100_000_000);
                let longest = download.end();
                assert!(longest < 1.0, "no packet for {longest} s: path MTU black hole");
            }
        }
    }
    monitor.verify(&cluster);
    cluster.check_frames();
}

/// Datagrams of pods that fill a frame, and fragmented ones.
#[test]
fn fragments_are_reassembled_via_any_gateway() {
    let cluster = Cluster::running("fragments", 3);
    let monitor = cluster.start_monitor();
    expect_too_big(&cluster);
    // Later fragments time out when their first fragment was too big.
    cluster.accounting.allow(["fragment"]);
    for (round, (out, back)) in [(0, 1), (1, 2), (2, 0)].into_iter().enumerate() {
        cluster.route_inside_via(&[out]);
        cluster.route_outside_via(&[back]);
        sleep_ms(100);
        let kinds = [1_472, 4_000, 9_000].into_iter().flat_map(|bytes| [(bytes, 0), (bytes, 1)]);
        let mut running = Vec::new();
        for (kind, (bytes, family)) in kinds.enumerate() {
            let traffic = ClientConfig { line_length: bytes, ..ClientConfig::probes(SERVER[family], Vec::new(), 10) };
            let first = (10 * round + kind + 10) as u32 * 1_000_000;
            let name = format!("large-{round}-{bytes}-{family}");
            let pod = &cluster.pods[round % 2];
            running.push((name.clone(), Clients::start(cluster.folder.path(), pod, &name, first, &traffic)));
        }
        for (_, clients) in &mut running {
            clients.wait_established(Duration::from_secs(10));
        }
        sleep_ms(700);
        for (_, clients) in &running {
            clients.stop();
        }
        for (name, clients) in running {
            let outcome = clients.wait(Duration::from_secs(30));
            outcome.check_no_misdelivery();
            let [sent, answered] = [0, 1].map(|n| outcome.0.iter().map(|client| client.lines[n]).sum::<u64>());
            // The first datagrams may be lost to path MTU discovery.
            assert!(answered * 10 >= sent * 9, "{name}: {answered} of {sent}\n{}", cluster.drop_summary());
        }
    }
    let records = monitor.verify(&cluster);
    assert!(source_addresses(&records).iter().all(|source| BGP_VIPS.contains(source)));
    cluster.check_frames();
}
