//! Ports run out in a gateway's shard of a VIP, while the other gateway's shard has some left.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use vipgate_tests::cluster::{Cluster, Gateway, SERVER, SHARED};
use vipgate_tests::wait_for;

/// Blocks of 64 ports in the range.
const BLOCKS: u16 = 16;

#[test]
fn a_shard_that_runs_out_is_named_and_so_is_what_others_have() {
    let mut cluster = Cluster::new("shards", 2);
    cluster.ledger.expect(["ports_exhausted"]);
    // Who is refused hears of it only so often; where nobody listens, the server says so to each.
    cluster.ledger.allow(["answers_limited"]);
    cluster.start_all(&format!("ports: {{range: 20032-{}, quarantine: 2s}}", 20_031 + 64 * BLOCKS));
    for (own, server, vip) in [("10.1.0.11", SERVER[0], SHARED[0]), ("fd00:1::11", SERVER[1], SHARED[1])] {
        let (source, to): (IpAddr, IpAddr) = (own.parse().unwrap(), server.parse().unwrap());
        // More than all ports of the VIP, toward one destination, from a pod that has one shard.
        let sent = cluster.pods[0].run(move || {
            for port in 30_000..30_000 + 64 * BLOCKS + 50 {
                let socket = UdpSocket::bind((source, port))?;
                // What the gateway said to the one before is no concern of this one.
                let _ = socket.send_to(b"to nobody", (to, 9));
            }
            Ok(())
        });
        sent.join().unwrap().unwrap();
        let has_refused = |gateway: &&Gateway| entry(gateway, vip)["refused_in_shard"].as_u64() > Some(0);
        let refused = || cluster.gateways.iter().any(|gateway| has_refused(&gateway));
        assert!(wait_for(Duration::from_secs(5), refused), "{}", cluster.drops());
        let gateway = cluster.gateways.iter().find(has_refused).unwrap();
        let ports = entry(gateway, vip);
        let shards = ports["shards"].as_array().unwrap();
        let sum = |field: &str| shards.iter().map(|shard| shard[field].as_u64().unwrap()).sum::<u64>();
        assert_eq!((shards.len(), sum("blocks"), sum("ports")), (2, BLOCKS.into(), u64::from(BLOCKS) * 64), "{ports}");
        let shard = shards.iter().find(|shard| shard["own"] == true).unwrap();
        assert_eq!(shard["owner"], gateway.name.as_str(), "{ports}");
        let sessions = ports["sessions"].as_u64().unwrap();
        assert!(shard["ports"].as_u64() <= Some(sessions), "all of its ports are in use: {ports}");
        assert_eq!(ports["refused"], 0, "{ports}");

        let own_ports = gateway.metric("vipgate_vip_shard_ports", vip);
        assert!((own_ports - shard["ports"].as_f64().unwrap()).abs() < 0.5, "{own_ports}: {ports}");
        assert!(gateway.metric("vipgate_vip_ports_exhausted_total", "scope=\"shard\"") > 0.5);
        let blocks = |state: &str| gateway.metric("vipgate_port_blocks", &format!("vip=\"{vip}\",state=\"{state}\""));
        let all = blocks("claimed") + blocks("free") + blocks("elsewhere");
        assert!((all - f64::from(BLOCKS)).abs() < 0.5 && blocks("elsewhere") > 0.5, "{all} blocks");
        let to = if source.is_ipv4() { format!("{server}:9") } else { format!("[{server}]:9") };
        let from = if source.is_ipv4() { format!("{own}:29999") } else { format!("[{own}]:29999") };
        for (command, words) in [
            (vec!["ports"], "SHARD"),
            (vec!["drops"], "SHARD"),
            (vec!["explain", vip], "OUT OF PORTS"),
            (vec!["trace", "--from", &from, "--to", &to, "--proto", "udp"], "NO PORT IS FREE in its SHARD"),
        ] {
            let said = gateway.command(&command).1;
            assert!(said.contains(words), "{command:?}: {said}");
        }
        let logged = || gateway.log().lines().any(|line| line.contains("\"ports_exhausted\"") && line.contains(vip));
        assert!(wait_for(Duration::from_secs(5), logged), "{}", gateway.log_tail());
    }
}

/// What a gateway says of a VIP's ports.
fn entry(gateway: &Gateway, vip: &str) -> serde_json::Value {
    let all = gateway.ask(&["ports"]);
    let mine = all["vips"].as_array().unwrap().iter().find(|it| it["address"] == vip);
    mine.unwrap_or_else(|| panic!("no {vip} in {all}")).clone()
}
