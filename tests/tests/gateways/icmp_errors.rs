//! ICMP errors that arrive at a gateway without the session that they are about.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Clients, Cluster, LINE_PORT, LOW_MTU_SERVER, LineServer, sleep_ms};

#[test]
fn path_mtu_is_learned_via_any_gateway() {
    let cluster = Cluster::running("narrow", 3);
    let server = LineServer::start(cluster.folder.path(), &cluster.low_mtu_server);
    // The tunnel between gateways has a smaller MTU, too.
    cluster.accounting.expect(["too_big"]);
    for (round, (out, back)) in [(0, 1), (1, 2), (2, 0)].into_iter().enumerate() {
        cluster.route_inside_via(&[out]);
        cluster.route_outside_via(&[back]);
        sleep_ms(100);
        for family in [0, 1] {
            let pod = &cluster.pods[round % 2];
            // Flush the path MTU that was learned before.
            for flag in ["-4", "-6"] {
                pod.ip(&[flag, "route", "flush", "cache"]).unwrap();
            }
            let traffic = ClientConfig {
                server: (LOW_MTU_SERVER[family], LINE_PORT),
                count: 20,
                line_length: 1_400,
                lines: 5,
                timeout: 5,
                ..ClientConfig::default()
            };
            let first = 10_000_000 * (round as u32 * 2 + family as u32 + 1);
            let name = format!("narrow-{round}-{family}");
            let clients = Clients::start(cluster.folder.path(), pod, &name, first, &traffic);
            clients.wait(Duration::from_secs(20)).check_all_succeeded();
            // ICMP echo, which has no ports.
            pod.output(&["ping", ["-4", "-6"][family], "-c", "3", "-i", "0.1", "-W", "2", LOW_MTU_SERVER[family]])
                .unwrap();
            // A router on the path sends a time exceeded error.
            let ping = ["ping", ["-4", "-6"][family], "-c", "1", "-W", "2", "-t", "3", LOW_MTU_SERVER[family]];
            let output = pod.output(&ping).unwrap_err().to_string();
            assert!(output.contains("Time to live exceeded") || output.contains("Hop limit"), "{output}");
        }
    }
    let counters = cluster.outside.output(&["nstat", "-asz", "IpFragFails", "Ip6FragFails"]).unwrap_or_default();
    println!("{counters}");
    assert!(server.end().iter().all(|record| record.errors == 0));
    cluster.check_frames();
}
