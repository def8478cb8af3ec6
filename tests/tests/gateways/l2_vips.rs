//! VIPs with L2 announcement: one gateway owns each, and another one announces them at failover.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Clients, Cluster, L2_VIPS, SERVER, sleep_ms, sources_b};
use vipgate_tests::verifier::{AddressClaim, ClaimKind, Frame, address_claims};

use crate::scenario::{MAX_OUTAGE, RETRANSMISSION_DELAY, kill_gateway, restart_gateway, source_addresses};

const ARP_AND_ND: &str = "arp or icmp6";

fn outside_macs(cluster: &Cluster) -> Vec<[u8; 6]> {
    cluster.gateways.iter().map(|gateway| gateway.mac("gw-out")).collect()
}

/// Makes the outside router resolve tenant B's VIPs; returns the gateways' claims.
fn resolve_vips(cluster: &Cluster) -> [Vec<AddressClaim>; 2] {
    let capture = cluster.capture_outside(ARP_AND_ND);
    // A VIP doesn't reply to pings.
    cluster.accounting.expect_exactly([("no_service", 6)]);
    for _ in 0..3 {
        for (flag, vip) in [("-4", L2_VIPS[0]), ("-6", L2_VIPS[1])] {
            let _ = cluster.outside.ip(&[flag, "neigh", "del", vip, "dev", "public"]);
            let _ = cluster.outside.output(&["ping", "-c", "1", "-W", "0.2", vip]);
        }
    }
    let frames = capture.end();
    L2_VIPS.map(|vip| address_claims(&frames, vip, &outside_macs(cluster)))
}

/// The gateway that owns each of both VIPs.
fn owners(cluster: &Cluster) -> [usize; 2] {
    let vip_claims = resolve_vips(cluster);
    let owners = [0, 1].map(|family| {
        let mut captures: Vec<usize> = vip_claims[family].iter().map(|claim| claim.capture).collect();
        assert!(!captures.is_empty(), "no gateway replies for {}", L2_VIPS[family]);
        captures.dedup();
        assert_eq!(captures.len(), 1, "several gateways reply for {}: {:?}", L2_VIPS[family], vip_claims[family]);
        captures[0]
    });
    let replies = vip_claims[0].iter().filter(|claim| claim.kind == ClaimKind::Reply).count();
    assert_eq!(replies, 3, "one reply for each request: {:?}", vip_claims[0]);
    owners
}

/// Time in seconds from `after` to the first announcement of a VIP by a gateway other than `old`, and the number of
/// its announcements.
fn announcements(frames: &[Frame], cluster: &Cluster, vip: &str, (old, after): (usize, f64)) -> (f64, usize) {
    let start = Duration::from_secs_f64(after).as_nanos() as u64;
    let vip_claims = address_claims(frames, vip, &outside_macs(cluster));
    let announced: Vec<&AddressClaim> = vip_claims
        .iter()
        .filter(|it| it.kind == ClaimKind::Announcement && it.capture != old && it.time > start)
        .collect();
    let first = announced.first().unwrap_or_else(|| panic!("no announcement of {vip}: {vip_claims:?}"));
    let count = announced.iter().filter(|it| it.capture == first.capture).count();
    (Duration::from_nanos(first.time - start).as_secs_f64(), count)
}

#[test]
fn an_l2_vip_has_one_owner_and_fails_over_within_a_second() {
    let mut cluster = Cluster::running("claimed", 3);
    let monitor = cluster.start_monitor();
    // The gateway that started first owned the VIPs until their preferred owner started: wait until that was
    // announced.
    sleep_ms(2_000);
    let owners_before = owners(&cluster);
    let clients = |name: &str, first: u32, make: fn(&'static str, Vec<String>) -> ClientConfig<'static>| {
        [0, 1].map(|family| {
            let traffic = make(SERVER[family], sources_b(family));
            let mut clients =
                cluster.start_clients(&format!("{name}-{family}"), first + 1_000_000 * family as u32, &traffic);
            clients.wait_established(Duration::from_secs(20));
            clients
        })
    };
    let held = clients("held", 10_000_000, |to, sources| ClientConfig::held_connections(to, sources, 200));
    let probes = clients("probes", 20_000_000, |to, sources| ClientConfig::probes(to, sources, 20));
    sleep_ms(500);
    let capture = cluster.capture_outside(ARP_AND_ND);
    let owner = owners_before[0];
    let died = kill_gateway(&mut cluster, owner);
    sleep_ms(3_000);
    let frames = capture.end();
    for (family, vip) in L2_VIPS.into_iter().enumerate() {
        if owners_before[family] == owner {
            let (first, count) = announcements(&frames, &cluster, vip, (owner, died));
            println!("{vip} announced after {first:.3} s, {count} times");
            assert!(first <= MAX_OUTAGE && count >= 3, "{vip}: after {first} s, {count} times");
        }
    }
    let new_owners = owners(&cluster);
    assert!(new_owners.iter().all(|it| *it != owner), "{new_owners:?}");
    restart_gateway(&mut cluster, owner);
    sleep_ms(2_000);
    assert_eq!(owners(&cluster), owners_before, "owned by the preferred gateway again");
    for (clients, extra) in [(held, RETRANSMISSION_DELAY), (probes, 0.0)] {
        for outcome in Clients::end_all(clients) {
            println!("{}", outcome.summary());
            outcome.check_no_misdelivery();
            outcome.check_survived(99);
            assert!(outcome.p99_wait(0.2) <= MAX_OUTAGE + extra, "{}", outcome.summary());
        }
    }
    let records = monitor.verify_with_more_hops(&cluster);
    assert!(source_addresses(&records).iter().all(|source| L2_VIPS.contains(source)));
}
