//! What doesn't fit the way between gateways in one piece.

use std::time::Duration;

use vipgate_tests::cluster::{Clients, Cluster, Download, SERVER, SHARED, Traffic, pass};

use crate::scene::{seen_as, tunnels_are_narrow};

#[test]
fn large_packets_travel_between_gateways() {
    const BYTES: u64 = 10_000_000;
    let cluster = Cluster::running("large", 3);
    let watch = cluster.watch();
    // Wherever they come in, two of three gateways are the wrong one.
    tunnels_are_narrow(&cluster);
    for (out, back) in [(0, 1), (1, 2), (2, 0)] {
        cluster.spread_inside_over(&[out]);
        cluster.spread_outside_over(&[back]);
        for server in SERVER {
            for pod in [0, 1] {
                let download = Download::start(cluster.folder.path(), &cluster.pods[pod], server, BYTES, 100_000_000);
                let longest = download.end(Duration::from_secs(20));
                assert!(longest < 1.0, "no packet for {longest} s: a black hole");
            }
        }
    }
    watch.check(&cluster);
    cluster.check_frames();
}

/// Datagrams of pods that fill a frame, and that are cut into pieces.
#[test]
fn fragments_come_together_whichever_way_they_come() {
    let cluster = Cluster::running("fragments", 3);
    let watch = cluster.watch();
    tunnels_are_narrow(&cluster);
    // The rest of a datagram whose first piece doesn't fit waits for it in vain.
    cluster.ledger.allow(["fragment"]);
    for (round, (out, back)) in [(0, 1), (1, 2), (2, 0)].into_iter().enumerate() {
        cluster.spread_inside_over(&[out]);
        cluster.spread_outside_over(&[back]);
        pass(100);
        let kinds = [1_472, 4_000, 9_000].into_iter().flat_map(|bytes| [(bytes, 0), (bytes, 1)]);
        let mut running = Vec::new();
        for (kind, (bytes, family)) in kinds.enumerate() {
            let traffic = Traffic { bytes, ..Traffic::probes(SERVER[family], Vec::new(), 10) };
            let first = (10 * round + kind + 10) as u32 * 1_000_000;
            let name = format!("large-{round}-{bytes}-{family}");
            let pod = &cluster.pods[round % 2];
            running.push((name.clone(), Clients::start(cluster.folder.path(), pod, &name, first, &traffic)));
        }
        for (_, clients) in &mut running {
            clients.wait_open(Duration::from_secs(10));
        }
        pass(700);
        for (_, clients) in &running {
            clients.stop();
        }
        for (name, clients) in running {
            let outcome = clients.wait(Duration::from_secs(30));
            outcome.check_nobody_else_was_heard();
            let [said, answered] = [0, 1].map(|n| outcome.0.iter().map(|client| client.lines[n]).sum::<u64>());
            // The first ones may learn how much fits.
            assert!(answered * 10 >= said * 9, "{name}: {answered} of {said}\n{}", cluster.drops());
        }
    }
    let records = watch.check(&cluster);
    assert!(seen_as(&records).iter().all(|seen| SHARED.contains(seen)));
    cluster.check_frames();
}
