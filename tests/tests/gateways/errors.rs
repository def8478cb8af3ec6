//! ICMP errors that come to a gateway which doesn't have what they are about.

use std::time::Duration;

use vipgate_tests::cluster::{Clients, Cluster, FAR, LINES, LineServer, Traffic, pass};

#[test]
fn a_narrow_way_is_learned_whichever_gateway_hears_of_it() {
    let cluster = Cluster::running("narrow", 3);
    let far = LineServer::start(cluster.folder.path(), &cluster.far);
    // Between gateways the way is narrow, too.
    cluster.ledger.expect(["too_big"]);
    for (round, (out, back)) in [(0, 1), (1, 2), (2, 0)].into_iter().enumerate() {
        cluster.spread_inside_over(&[out]);
        cluster.spread_outside_over(&[back]);
        pass(100);
        for family in [0, 1] {
            let pod = &cluster.pods[round % 2];
            // What was learned before is forgotten.
            for flag in ["-4", "-6"] {
                pod.ip(&[flag, "route", "flush", "cache"]).unwrap();
            }
            let traffic = Traffic {
                to: (FAR[family], LINES),
                count: 20,
                bytes: 1_400,
                lines: 5,
                patience: 5,
                ..Traffic::default()
            };
            let first = 10_000_000 * (round as u32 * 2 + family as u32 + 1);
            let name = format!("narrow-{round}-{family}");
            let clients = Clients::start(cluster.folder.path(), pod, &name, first, &traffic);
            clients.wait(Duration::from_secs(20)).check_all_well();
            // What is asked by ICMP is answered by ICMP, which has no ports to be told apart by.
            pod.output(&["ping", ["-4", "-6"][family], "-c", "3", "-i", "0.1", "-W", "2", FAR[family]]).unwrap();
            // Somebody on the way says that a packet was on its way for too long.
            let hops = ["ping", ["-4", "-6"][family], "-c", "1", "-W", "2", "-t", "3", FAR[family]];
            let said = pod.output(&hops).unwrap_err().to_string();
            assert!(said.contains("Time to live exceeded") || said.contains("Hop limit"), "{said}");
        }
    }
    let narrow = cluster.outside.output(&["nstat", "-asz", "IpFragFails", "Ip6FragFails"]).unwrap_or_default();
    println!("{narrow}");
    assert!(far.end().iter().all(|record| record.faults == 0));
    cluster.check_frames();
}
