//! Port exhaustion in a group: gateways ask each other for ports, and the last one reports that it has none.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use vipgate_tests::cluster::{BGP_VIPS, Cluster, Gateway, SERVER};
use vipgate_tests::wait_for;

/// Port blocks in the range, 64 ports each.
const BLOCKS: u16 = 16;

#[test]
fn ports_of_all_gateways_are_used_before_exhaustion_is_reported() {
    let mut cluster = Cluster::new("shards", 2);
    cluster.accounting.expect(["ports_exhausted"]);
    // ICMP errors to the pod are rate-limited, and so are the server's port unreachable errors.
    cluster.accounting.allow(["answers_limited"]);
    cluster.start_all(&format!("ports: {{range: 20032-{}, quarantine: 2s}}", 20_031 + 64 * BLOCKS));
    for (own, server, vip) in [("10.1.0.11", SERVER[0], BGP_VIPS[0]), ("fd00:1::11", SERVER[1], BGP_VIPS[1])] {
        let (source, to): (IpAddr, IpAddr) = (own.parse().unwrap(), server.parse().unwrap());
        // More flows than the VIP has ports, toward one destination, from a pod whose flows are at one gateway.
        let sent = cluster.pods[0].run(move || {
            for port in 30_000..30_000 + 64 * BLOCKS + 50 {
                let socket = UdpSocket::bind((source, port))?;
                // May fail after an ICMP error to an earlier datagram.
                let _ = socket.send_to(b"unused port", (to, 9));
            }
            Ok(())
        });
        sent.join().unwrap().unwrap();
        let has_rejected = |gateway: &&Gateway| vip_ports(gateway, vip)["refused_in_shard"].as_u64() > Some(0);
        let is_exhausted = || cluster.gateways.iter().any(|gateway| has_rejected(&gateway));
        assert!(wait_for(Duration::from_secs(5), is_exhausted), "{}", cluster.drop_summary());
        let gateway = cluster.gateways.iter().find(has_rejected).unwrap();
        let ports = vip_ports(gateway, vip);
        let shards = ports["shards"].as_array().unwrap();
        let sum = |field: &str| shards.iter().map(|shard| shard[field].as_u64().unwrap()).sum::<u64>();
        assert_eq!((shards.len(), sum("blocks"), sum("ports")), (2, BLOCKS.into(), u64::from(BLOCKS) * 64), "{ports}");
        let shard = shards.iter().find(|shard| shard["own"] == true).unwrap();
        assert_eq!(shard["owner"], gateway.name.as_str(), "{ports}");
        let used: u64 = cluster.gateways.iter().map(|it| vip_ports(it, vip)["sessions"].as_u64().unwrap()).sum();
        assert!(used >= u64::from(BLOCKS) * 64 * 98 / 100, "the ports of all gateways are in use: {used}, {ports}");
        let sessions = ports["sessions"].as_u64().unwrap();
        assert!(shard["ports"].as_u64() <= Some(sessions), "not all of its ports are in use: {ports}");
        assert_eq!(ports["refused"], 0, "{ports}");

        let own_ports = gateway.metric("vipgate_vip_shard_ports", vip);
        assert!((own_ports - shard["ports"].as_f64().unwrap()).abs() < 0.5, "{own_ports}: {ports}");
        assert!(gateway.metric("vipgate_vip_ports_exhausted_total", "scope=\"shard\"") > 0.5);
        let blocks = |state: &str| gateway.metric("vipgate_port_blocks", &format!("vip=\"{vip}\",state=\"{state}\""));
        let all = blocks("claimed") + blocks("free") + blocks("elsewhere");
        assert!((all - f64::from(BLOCKS)).abs() < 0.5 && blocks("elsewhere") > 0.5, "{all} blocks");
        let to = if source.is_ipv4() { format!("{server}:9") } else { format!("[{server}]:9") };
        let from = if source.is_ipv4() { format!("{own}:29999") } else { format!("[{own}]:29999") };
        for (command, words) in
            [(vec!["ports"], "SHARD"), (vec!["drops"], "SHARD"), (vec!["explain", vip], "OUT OF PORTS")]
        {
            let stdout = gateway.command(&command).1;
            assert!(stdout.contains(words), "{command:?}: {stdout}");
        }
        // The pod's gateway was the first to have none.
        let asks = cluster.gateways.iter().find(|it| it.name != gateway.name).unwrap();
        let stdout = asks.command(&["trace", "--from", &from, "--to", &to, "--proto", "udp"]).1;
        for words in ["NO PORT IS FREE in its SHARD", "forwarded to the next gateway with ports"] {
            assert!(stdout.contains(words), "{stdout}");
        }
        let logged = || gateway.log().lines().any(|line| line.contains("\"ports_exhausted\"") && line.contains(vip));
        assert!(wait_for(Duration::from_secs(5), logged), "{}", gateway.log_tail());
    }
}

/// A VIP in a gateway's `ports` output.
fn vip_ports(gateway: &Gateway, vip: &str) -> serde_json::Value {
    let ports = gateway.query(&["ports"]);
    let found = ports["vips"].as_array().unwrap().iter().find(|it| it["address"] == vip);
    found.unwrap_or_else(|| panic!("no {vip} in {ports}")).clone()
}
