//! Address conflicts: another host on the segment claims a VIP; the gateway reports it and defends the VIP (RFC
//! 5227).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::wire::arp::Arp;
use vipgate_dataplane::wire::{ethernet, ndp};
use vipgate_tests::{SERVER, Testbed, VIP_A, frames, wait_for};

const CLAIMANT_MAC: [u8; 6] = [2, 0, 0, 0, 9, 9];
const CONFLICT_TIMEOUT: Duration = Duration::from_secs(10);

#[test]
fn an_address_conflict_is_reported_and_the_vip_defended() {
    let testbed = Testbed::with_gateway("conflict");
    // After the announcements at startup.
    std::thread::sleep(Duration::from_secs(4));
    let own: String = testbed.gateway.output(&["cat", "/sys/class/net/gw-out/address"]).unwrap().trim().to_owned();
    let capture = testbed.capture(&format!("ether src {own} and (arp or icmp6)"));
    let v4: std::net::Ipv4Addr = VIP_A[0].parse().unwrap();
    let claim = Arp::announcement(CLAIMANT_MAC, v4.to_bits());
    let v6 = V6::from_ip(VIP_A[1].parse().unwrap()).unwrap();
    let v6 = ndp::Advertisement::unsolicited(v6, CLAIMANT_MAC);
    testbed.accounting.expect_exactly([("vip_conflicts", 10)]);
    let claims = [claim.frame(ethernet::BROADCAST).to_vec(), v6.frame().to_vec()];
    let sending = testbed.router.run(move || (0..5).try_for_each(|_| frames::send("to-gw", &claims)));
    sending.join().unwrap().unwrap();
    let claimants = || {
        let vips = testbed.query(&["vips"]);
        let of = |vip: &str| {
            let all = vips["vips"].as_array().unwrap().clone();
            all.into_iter().find(|it| it["address"] == vip).unwrap()["conflict"]["mac"].clone()
        };
        VIP_A.map(of)
    };
    assert!(
        wait_for(CONFLICT_TIMEOUT, || claimants().iter().all(|mac| mac == "02:00:00:00:09:09")),
        "{:?}",
        claimants()
    );
    assert!((testbed.metric("vipgate_vip_conflicts_total", "") - 10.0).abs() < 0.5);
    std::thread::sleep(Duration::from_secs(2));
    let log_lines = testbed.log().lines().filter(|line| line.contains("\"event\":\"vip_conflict\"")).count();
    assert_eq!(log_lines, 2, "one for each VIP: {}", testbed.log());
    let announcements = capture.end().unwrap();
    let count =
        |vip: &str, what: &str| announcements.iter().filter(|line| line.contains(what) && line.contains(vip)).count();
    assert_eq!(count(VIP_A[0], "Request who-has"), 1, "{announcements:#?}");
    assert_eq!(count(VIP_A[1], "neighbor advertisement, tgt is"), 1, "{announcements:#?}");
    // The defense has restored the neighbors' entries.
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
}
