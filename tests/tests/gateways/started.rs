//! Gateways that start: whenever somebody asks who has a VIP, at most one of them answers.

use std::collections::BTreeSet;

use vipgate_tests::cluster::{CLAIMED, Cluster, Gateway, answering, pass};

/// How many pairs of gateways are started: `VIPGATE_PAIRS`, or so many.
fn pairs() -> usize {
    std::env::var("VIPGATE_PAIRS").ok().and_then(|text| text.parse().ok()).unwrap_or(4)
}

/// How much later the second one starts, milliseconds. In the longest the first one serves alone before the other comes.
const LATER: [u64; 4] = [0, 600, 600, 40];

#[test]
fn no_question_is_answered_by_two_gateways_that_start() {
    let mut cluster = Cluster::new("started", 2);
    let links: Vec<String> = cluster.gateways.iter().map(|gateway| spelled(gateway.link("gw-out"))).collect();
    let (mut homes, mut moved, mut answered) = (BTreeSet::new(), 0, 0);
    for pair in 0..pairs() {
        // A server that has just started asks all gateways what they know before it decides; one that runs remembers the last pair.
        if pair % 8 >= 4 {
            cluster.policyd = None;
        }
        if cluster.policyd.is_none() {
            cluster.start_policyd("");
        }
        let questions = cluster.ask_who_has(CLAIMED[0]);
        let order = if pair / 4 % 2 == pair % 2 { [0, 1] } else { [1, 0] };
        cluster.gateways[order[0]].launch("");
        pass(LATER[pair % 4]);
        cluster.gateways[order[1]].launch("");
        cluster.gateways.iter_mut().for_each(Gateway::wait_ready);
        cluster.wait_whole();
        pass(700);
        let (asked, answers) = questions.end();
        let macs = answering(&answers);
        println!(
            "pair {pair}: {} of {asked} answered, from {:?} ms on, by {macs:?}",
            answers.len(),
            answers.first().map(|answer| answer.ms)
        );
        assert!(macs.iter().all(|mac| links.contains(mac)), "{macs:?} aren't all gateways' of {links:?}");
        assert!((1..=2).contains(&macs.len()), "from whoever comes first to its home, and no further: {macs:?}");
        homes.extend(macs.last().cloned());
        moved += macs.len() - 1;
        answered += answers.len();
        for gateway in &mut cluster.gateways {
            gateway.kill();
        }
    }
    println!("{answered} answers, {moved} VIPs went home");
    assert_eq!(homes.len(), 1, "a VIP has one home: {homes:?}");
    assert!(moved > 0, "no VIP went from one gateway to another: that is what it is about");
}

fn spelled(link: [u8; 6]) -> String {
    link.map(|byte| format!("{byte:02x}")).join(":")
}
