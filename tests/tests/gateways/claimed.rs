//! VIPs that one gateway has: it says so on the segment, and who takes over says so at once.

use std::time::Duration;

use vipgate_tests::cluster::{CLAIMED, Clients, Cluster, SERVER, Traffic, pass, sources_b};
use vipgate_tests::judge::{Claim, Frame, Kind, claims};

use crate::scene::{OUTAGE, RETRANSMISSION, come_back, kill, seen_as};

const ASKING: &str = "arp or icmp6";

fn links(cluster: &Cluster) -> Vec<[u8; 6]> {
    cluster.gateways.iter().map(|gateway| gateway.link("gw-out")).collect()
}

/// The outside router asks who has tenant B's VIPs; what it was told by gateways.
fn ask(cluster: &Cluster) -> [Vec<Claim>; 2] {
    let capture = cluster.capture_outside(ASKING);
    // A VIP answers no ping.
    cluster.ledger.expect_exactly([("no_service", 6)]);
    for _ in 0..3 {
        for (flag, vip) in [("-4", CLAIMED[0]), ("-6", CLAIMED[1])] {
            let _ = cluster.outside.ip(&[flag, "neigh", "del", vip, "dev", "public"]);
            let _ = cluster.outside.output(&["ping", "-c", "1", "-W", "0.2", vip]);
        }
    }
    let frames = capture.end();
    CLAIMED.map(|vip| claims(&frames, vip, &links(cluster)))
}

/// The one gateway that answers for both VIPs or, for each, which.
fn owners(cluster: &Cluster) -> [usize; 2] {
    let told = ask(cluster);
    let owners = [0, 1].map(|family| {
        let mut places: Vec<usize> = told[family].iter().map(|claim| claim.place).collect();
        assert!(!places.is_empty(), "nobody has {}", CLAIMED[family]);
        places.dedup();
        assert_eq!(places.len(), 1, "more than one has {}: {:?}", CLAIMED[family], told[family]);
        places[0]
    });
    let answers = told[0].iter().filter(|claim| claim.kind == Kind::Answer).count();
    assert_eq!(answers, 3, "as many answers as questions: {:?}", told[0]);
    owners
}

/// The first announcement of a VIP by another than its old owner, in seconds after a moment, and how many followed.
fn announced(frames: &[Frame], cluster: &Cluster, vip: &str, (old, after): (usize, f64)) -> (f64, usize) {
    let begun = Duration::from_secs_f64(after).as_nanos() as u64;
    let told = claims(frames, vip, &links(cluster));
    let own: Vec<&Claim> =
        told.iter().filter(|it| it.kind == Kind::Announcement && it.place != old && it.time > begun).collect();
    let first = own.first().unwrap_or_else(|| panic!("nobody announces {vip}: {told:?}"));
    (Duration::from_nanos(first.time - begun).as_secs_f64(), own.iter().filter(|it| it.place == first.place).count())
}

#[test]
fn one_gateway_has_a_claimed_vip_and_the_next_one_says_so_within_a_second() {
    let mut cluster = Cluster::running("claimed", 3);
    let watch = cluster.watch();
    // Who came first had it, until its own gateway came: that was announced, and is over.
    pass(2_000);
    let owners_before = owners(&cluster);
    let clients = |name: &str, first: u32, make: fn(&'static str, Vec<String>) -> Traffic<'static>| {
        [0, 1].map(|family| {
            let traffic = make(SERVER[family], sources_b(family));
            let mut clients = cluster.crowd(&format!("{name}-{family}"), first + 1_000_000 * family as u32, &traffic);
            clients.wait_open(Duration::from_secs(20));
            clients
        })
    };
    let held = clients("held", 10_000_000, |to, sources| Traffic::held(to, sources, 200));
    let probes = clients("probes", 20_000_000, |to, sources| Traffic::probes(to, sources, 20));
    pass(500);
    let capture = cluster.capture_outside(ASKING);
    let owner = owners_before[0];
    let died = kill(&mut cluster, owner);
    pass(3_000);
    let frames = capture.end();
    for (family, vip) in CLAIMED.into_iter().enumerate() {
        if owners_before[family] == owner {
            let (first, count) = announced(&frames, &cluster, vip, (owner, died));
            println!("{vip} announced after {first:.3} s, {count} times");
            assert!(first <= OUTAGE && count >= 3, "{vip}: after {first} s, {count} times");
        }
    }
    let stand_ins = owners(&cluster);
    assert!(stand_ins.iter().all(|it| *it != owner), "{stand_ins:?}");
    come_back(&mut cluster, owner);
    pass(2_000);
    assert_eq!(owners(&cluster), owners_before, "its own again");
    for (clients, more) in [(held, RETRANSMISSION), (probes, 0.0)] {
        for outcome in Clients::end_all(clients) {
            println!("{}", outcome.summary());
            outcome.check_nobody_else_was_heard();
            outcome.check_survived(99);
            assert!(outcome.p99(0.2) <= OUTAGE + more, "{}", outcome.summary());
        }
    }
    let records = watch.check_handover(&cluster);
    assert!(seen_as(&records).iter().all(|seen| CLAIMED.contains(seen)));
}
