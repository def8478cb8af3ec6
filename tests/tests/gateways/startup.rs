//! Startup of gateways: at most one of them replies to each ARP request for a VIP.

use std::collections::BTreeSet;

use vipgate_tests::cluster::{Cluster, Gateway, L2_VIPS, responder_macs, sleep_ms};

/// Number of pairs of gateways to start: `VIPGATE_PAIRS`, default 4.
fn pairs() -> usize {
    std::env::var("VIPGATE_PAIRS").ok().and_then(|text| text.parse().ok()).unwrap_or(4)
}

/// Delays of the second gateway, milliseconds. With the longest the first one is active alone before the other
/// starts.
const START_DELAYS: [u64; 4] = [0, 600, 600, 40];

#[test]
fn no_arp_request_is_answered_by_two_starting_gateways() {
    let mut cluster = Cluster::new("started", 2);
    let gateway_macs: Vec<String> = cluster.gateways.iter().map(|gateway| format_mac(gateway.mac("gw-out"))).collect();
    let (mut owners, mut moves, mut reply_count) = (BTreeSet::new(), 0, 0);
    for pair in 0..pairs() {
        // A restarted server collects the gateways' views before it decides; a running one remembers the last pair.
        if pair % 8 >= 4 {
            cluster.policyd = None;
        }
        if cluster.policyd.is_none() {
            cluster.start_policyd("");
        }
        let probe = cluster.start_arp_probe(L2_VIPS[0]);
        let order = if pair / 4 % 2 == pair % 2 { [0, 1] } else { [1, 0] };
        cluster.gateways[order[0]].spawn("");
        sleep_ms(START_DELAYS[pair % 4]);
        cluster.gateways[order[1]].spawn("");
        cluster.gateways.iter_mut().for_each(Gateway::wait_ready);
        cluster.wait_converged();
        sleep_ms(700);
        let (requests, replies) = probe.end();
        let macs = responder_macs(&replies);
        println!(
            "pair {pair}: {} of {requests} requests answered, from {:?} ms on, by {macs:?}",
            replies.len(),
            replies.first().map(|reply| reply.ms)
        );
        assert!(
            macs.iter().all(|mac| gateway_macs.contains(mac)),
            "{macs:?} are not all of the gateways' {gateway_macs:?}"
        );
        assert!((1..=2).contains(&macs.len()), "the VIP moves at most once, to its preferred owner: {macs:?}");
        owners.extend(macs.last().cloned());
        moves += macs.len() - 1;
        reply_count += replies.len();
        for gateway in &mut cluster.gateways {
            gateway.kill();
        }
    }
    println!("{reply_count} replies, {moves} moves of the VIP to its preferred owner");
    assert_eq!(owners.len(), 1, "a VIP has one preferred owner: {owners:?}");
    assert!(moves > 0, "the VIP never moved between gateways, which this test requires");
}

fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
